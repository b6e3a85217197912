from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from moecore.models import Decoder, flops_per_token
from moecore.recipes.corpus_training import CorpusTraining
from moecore.recipes.data import BatchShape, PackedSteps
from moecore.recipes.metrics import compute_flops


def packed(*lengths: int, cp: int = 1) -> tuple[Any, torch.Tensor]:
    """Return the steps of documents of these lengths, and all their tokens."""
    tokens_N = torch.arange(sum(lengths)).remainder(251)
    documents = [{"input_ids": ids} for ids in tokens_N.split(lengths)]
    shape = BatchShape(data_ranks=1, grad_accum=2, batch_size=2, seq_len=16, cp=cp)
    return PackedSteps(documents, lengths, shape, seed=3, data_rank=0), tokens_N


def test_documents_are_padded_for_the_ranks_that_share_rows() -> None:
    """cp 2: borders are multiples of 4, and an epoch still has each token once."""
    steps, tokens_N = packed(5, 16, 1, 9, 3, 16, 7, cp=2)
    found = torch.zeros(256, dtype=torch.int64)
    for _ in range(len(steps.sampler)):
        batch = steps.next_batch()
        assert not (batch.cu_seqlens_An % 4).any()
        found += torch.bincount(batch.tokens_ABT[~batch.padding_ABT], minlength=256)
    assert torch.equal(found, torch.bincount(tokens_N, minlength=256))


def test_the_loss_of_packed_rows_is_that_of_documents(train: ModuleType) -> None:
    """Against one forward per document."""
    batch = packed(5, 16, 9, 3, 16, 7, 13, 2)[0].next_batch()
    config = train.parse_arguments(["--aux-loss", "0"]).make_decoder_config()
    model = Decoder(config)
    model.init_weights(0)
    job: Any = SimpleNamespace(args=SimpleNamespace(seq_len=16))
    rows = zip(*batch.list_tensors(), strict=True)
    inputs = CorpusTraining.make_inputs(job, batch.num_labels, rows)
    loss = sum(model(**of_one) for of_one in inputs)
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
    count, tokens, pairs, size = batch.count_labels_and_tokens().tolist()
    assert tokens == sum(lengths) and size == batch.tokens_ABT.numel()
    assert count == batch.num_labels == sum(lengths) - len(lengths)
    torch.testing.assert_close(float(loss), total / count, rtol=1e-5, atol=0)
    flops = sum(n * flops_per_token(config, n) for n in lengths)
    torch.testing.assert_close(compute_flops(config, tokens, pairs), flops, rtol=1e-12, atol=0)
