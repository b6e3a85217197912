"""What a step of moecore train reads of packed documents, and its loss."""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tests.recipes.test_train import corpus_of


def packed(script: ModuleType, corpus: Any, *, ranks: int, accum: int, rank: int = 0) -> Any:
    from moecore.recipes.data import BatchShape

    shape = BatchShape(data_ranks=ranks, grad_accum=accum, batch_size=2, seq_len=16)
    return script.packed_corpus(corpus, shape, seed=3, data_rank=rank)


def test_a_step_has_the_same_rows_however_they_are_shared(train: ModuleType) -> None:
    """Over two epochs, and from a state in the second of them."""
    corpus = corpus_of(train, 5, 40, 1, 9, 3, 16, 7, 33, 2, 50, 11, 4, 4, 8, 23, 6)
    alone = packed(train, corpus, ranks=1, accum=2)
    shared = [packed(train, corpus, ranks=2, accum=1, rank=rank) for rank in range(2)]
    steps = 2 * len(alone.sampler)
    for step in range(steps):
        of_ranks = [one.next() for one in shared]
        if step == steps - 2:
            again = packed(train, corpus, ranks=1, accum=2)
            again.sampler.load_state_dict(alone.sampler.state_dict())
        whole = alone.next()
        assert whole.cu_seqlens_An.shape == of_ranks[0].cu_seqlens_An.repeat(2, 1).shape
        tokens = torch.cat([one.tokens_ABT.flatten() for one in of_ranks])
        found, wanted = torch.bincount(tokens), torch.bincount(whole.tokens_ABT.flatten())
        assert torch.equal(found, wanted)
        assert sum(int(one.num_labels) for one in of_ranks) == int(whole.num_labels)
        if step >= steps - 2:
            for x, y in zip(again.next().tensors(), whole.tensors(), strict=True):
                assert torch.equal(x, y)


def test_documents_are_padded_for_the_ranks_that_share_rows(train: ModuleType) -> None:
    """cp 2: borders are multiples of 4, and an epoch still has each token once."""
    from moecore.recipes.data import BatchShape

    corpus = corpus_of(train, 5, 40, 1, 9, 3, 16, 7)
    shape = BatchShape(data_ranks=1, grad_accum=2, batch_size=2, seq_len=16, cp=2)
    steps = train.packed_corpus(corpus, shape, seed=3, data_rank=0)
    found = torch.zeros(256, dtype=torch.int64)
    for _ in range(len(steps.sampler)):
        batch = steps.next()
        assert not (batch.cu_seqlens_An % 4).any()
        found += torch.bincount(batch.tokens_ABT[~batch.padding_ABT], minlength=256)
    assert torch.equal(found, torch.bincount(corpus.text_N.long(), minlength=256))


def test_the_loss_of_packed_rows_is_that_of_documents(train: ModuleType) -> None:
    """Through what a step runs, against one forward per document."""
    from moecore.models import Decoder, flops_per_token
    from moecore.recipes import corpus_training as native
    from moecore.recipes import metrics

    corpus = corpus_of(train, 5, 40, 9, 3, 16, 7, 33, 2)
    batch = packed(train, corpus, ranks=1, accum=2).next()
    torch.manual_seed(0)
    config = train.parse_arguments(["--aux-loss", "0"]).model_config()
    model = Decoder(config)
    model.init_weights(0)

    def losses_of(micro_batches: Any) -> torch.Tensor:
        return torch.stack([model(**inputs) for inputs in micro_batches])

    owner = SimpleNamespace(forward_backward=losses_of)
    args = train.parse_arguments(["--seq-len", "16", "--grad-accum", "2"])
    run_step = native.make_forward_backward(model, owner, args)
    loss = run_step(batch.num_labels, *batch.tensors())
    total, lengths = 0.0, []
    parts = (batch.tokens_ABT, batch.padding_ABT, batch.cu_seqlens_An)
    for tokens_BT, padding_BT, borders in zip(*parts, strict=True):
        for start, stop in pairwise(borders.tolist()):
            tokens_T = tokens_BT.flatten()[start:stop]
            if stop > start and not padding_BT.flatten()[start]:
                lengths.append(stop - start)
                one_BT = tokens_T[None]
                with torch.no_grad():
                    if stop - start > 1:
                        total += float(model(one_BT[:, :-1], one_BT[:, 1:], num_tokens=1))
    count, tokens, pairs, held = batch.counts().tolist()
    assert tokens == sum(lengths) and held == batch.tokens_ABT.numel()
    assert count == batch.num_labels == sum(lengths) - len(lengths)
    torch.testing.assert_close(float(loss), total / count, rtol=1e-5, atol=0)
    flops = sum(n * flops_per_token(config, n) for n in lengths)
    torch.testing.assert_close(metrics.flops_of(config, tokens, pairs), flops, rtol=1e-12, atol=0)
