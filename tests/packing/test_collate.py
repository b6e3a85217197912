from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from moecore.models import Decoder, preset
from moecore.packing import PackedBatch, PackedBatchSampler, PackedCollator
from tests.packing.test_bins import lognormal

IGNORED = -100


def test_the_worked_example() -> None:
    batch = PackedCollator(row_tokens=8)([[5, 6, 7], torch.tensor([8, 9])])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 0, 0, 0]]
    assert batch["labels"].tolist() == [[6, 7, IGNORED, 9] + [IGNORED] * 4]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert batch["padding_mask"].tolist() == [[False] * 5 + [True] * 3]
    assert batch["cu_seqlens"].tolist() == [0, 3, 5, 8]
    assert batch["cu_seqlens"].dtype == torch.int32 and batch["labels"].dtype == torch.int64
    assert batch["max_seqlen"] == 3 and batch["num_tokens"].item() == 3
    assert batch.keys() == PackedBatch.__required_keys__


@pytest.mark.parametrize("shift_labels", [True, False])
def test_each_kind_of_labels(shift_labels: bool) -> None:
    ids = [5, 6, 7, 8]
    documents: list[Any] = [
        {"input_ids": ids, "labels": [IGNORED, IGNORED, 7, 8], "text": "not read"},
        {"input_ids": np.array(ids), "assistant_masks": [0, 1, 1, 0]},
        {"input_ids": ids, "labels": [5, IGNORED, 7, 8], "assistant_masks": [1, 1, 1, 0]},
        ids,
    ]
    batch = PackedCollator(row_tokens=16, shift_labels=shift_labels)(documents)
    own = [[7, 8], [6, 7], [7], [6, 7, 8]]  # a document's first token is learned by none
    labels = batch["labels"].view(4, 4)
    assert [[i for i in row if i != IGNORED] for row in labels.tolist()] == own
    shifted = labels if shift_labels else labels.roll(-1, dims=1)
    assert shifted.tolist()[0] == [IGNORED, 7, 8, IGNORED]
    assert batch["num_tokens"] == 8 and batch["cu_seqlens"].tolist() == [0, 4, 8, 12, 16]


def test_transformers_own_collator_agrees() -> None:
    collator = pytest.importorskip("transformers").DataCollatorWithFlattening
    ids, labels = ([5, 6, 7], [8, 9, 4]), ([5, 6, 7], [8, IGNORED, 4])
    rows = [{"input_ids": i, "labels": own} for i, own in zip(ids, labels, strict=True)]
    theirs = collator(return_flash_attn_kwargs=True)([dict(row) for row in rows])
    ours = PackedCollator(row_tokens=6, shift_labels=False)(rows)
    for name in ("input_ids", "labels", "position_ids"):
        assert torch.equal(torch.as_tensor(theirs[name]), ours[name]), name  # type: ignore[literal-required]
    assert torch.equal(theirs["cu_seq_lens_q"].flatten(), ours["cu_seqlens"])
    assert theirs["max_length_q"] == ours["max_seqlen"]


def test_rows_are_laid_end_to_end_and_documents_stay_in_one() -> None:
    batch = PackedCollator(row_tokens=4, rows=3, multiple=2)([[1, 1, 1], [2, 2], [3, 3]])
    assert batch["input_ids"].tolist() == [[1, 1, 1, 0], [2, 2, 3, 3], [0, 0, 0, 0]]
    assert batch["cu_seqlens"].tolist() == [0, 4, 6, 8, 12]  # padding behind 1 1 1 belongs to it
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3], [0, 1, 0, 1], [0, 1, 2, 3]]
    assert batch["padding_mask"].sum() == 5 and batch["num_tokens"] == 4


def test_static_shapes_for_graphs() -> None:
    collator = PackedCollator(row_tokens=8, rows=2, max_documents=6, pad_id=9)
    batches = [collator(documents) for documents in ([[1, 2], [3]], [[1] * 8], [[1]] * 4, [])]
    assert [b["cu_seqlens"].tolist() for b in batches] == [
        [0, 2, 3, 8, 16, 16, 16],
        [0, 8, 16, 16, 16, 16, 16],
        [0, 1, 2, 3, 4, 8, 16],
        [0, 8, 16, 16, 16, 16, 16],
    ]
    assert {b["max_seqlen"] for b in batches} == {8}
    assert (batches[3]["input_ids"] == 9).all() and batches[3]["num_tokens"] == 0


def test_a_loader_over_datasets_trains_on_every_label_once() -> None:
    datasets = pytest.importorskip("datasets")
    lengths = lognormal(300, longest=64, mean=3.0)
    draw = np.random.default_rng(0)
    rows = [draw.integers(1, 128, length).tolist() for length in lengths]
    dataset = datasets.Dataset.from_dict({"input_ids": rows, "length": lengths.tolist()})
    sampler = PackedBatchSampler(dataset["length"], 64, rows=2)
    collator = PackedCollator(row_tokens=64, rows=2)
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collator)
    batches = list(loader)
    assert len(batches) == len(PackedBatchSampler(lengths, 64, rows=2))
    assert sum(int(b["num_tokens"]) for b in batches) == lengths.sum() - len(lengths)
    assert lengths.sum() / (len(batches) * 128) > 0.95
    found = []
    for batch in batches:
        ids, borders = batch["input_ids"].flatten(), batch["cu_seqlens"].tolist()
        padding = batch["padding_mask"].flatten()
        found += [ids[a:b].tolist() for a, b in pairwise(borders) if not padding[a]]
    assert sorted(found) == sorted(rows)
    model, one = Decoder(preset("tiny")), batches[0]
    loss = model(
        one["input_ids"],
        one["labels"],
        num_tokens=one["num_tokens"],
        padding_mask_BT=one["padding_mask"],
    )
    assert loss.isfinite()


def test_models_of_transformers_train_on_rows_as_on_documents() -> None:
    """They see from `position_ids` where documents begin."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = dict(vocab_size=50, hidden_size=32, intermediate_size=32, moe_intermediate_size=16)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    model = transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            **sizes, **heads, num_hidden_layers=2, num_experts=4, num_experts_per_tok=2
        )
    )
    documents = [torch.randint(1, 50, (n,)) for n in (5, 9, 3, 12, 7)]
    batch = PackedCollator(row_tokens=20, rows=3, shift_labels=False)(documents)
    counted = {"num_items_in_batch": batch["num_tokens"], "use_cache": False}
    names = ("input_ids", "position_ids", "labels")
    loss = model(**{name: batch[name] for name in names}, **counted).loss  # type: ignore[literal-required]
    loss.backward()
    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    total = 0.0
    for ids in documents:
        alone = model(input_ids=ids[None], labels=ids[None], **counted).loss
        alone.backward()
        total += alone.item()
    assert loss.item() == pytest.approx(total, rel=1e-5)
    for grad, parameter in zip(grads, model.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PackedCollator(row_tokens=9, multiple=4), r"\(9\) must be a multiple of multiple"),
        (lambda: PackedCollator(row_tokens=2**30, rows=2), r"must be < 2\*\*31 / rows \(2\): cu"),
        (lambda: PackedCollator(row_tokens=2)([[1] * 3]), r"^documents \(number 0, 3 tokens\) mus"),
        (
            lambda: PackedCollator(row_tokens=2)([[1], [2], [3]]),
            r"^documents \(number 2, 1 tokens\) must fit the rows \(1 of 2 tokens\): give it",
        ),
        (
            lambda: PackedCollator(row_tokens=4, max_documents=2)([[1], [2]]),
            r"^documents \(3 with those of padding\) must be <= max_documents \(2\): raise it",
        ),
        (lambda: PackedCollator(row_tokens=4)([[]]), r"^documents\[0\] \(0 tokens\) must have >="),
        (lambda: PackedCollator(row_tokens=4)([[0.5]]), r"^documents\[0\] \(\[0.5\]\) must be who"),
        (lambda: PackedCollator(row_tokens=4)([["a"]]), r"^documents\[0\] \(\['a'\]\) must be who"),
        (
            lambda: PackedCollator(row_tokens=4)([{"input_ids": [1, 2], "labels": [1]}]),
            r"^documents\[0\]\['labels'\] \(1 numbers\) must have one per token \(2\): make them",
        ),
        (lambda: PackedCollator(row_tokens=4)([3]), r"^documents\[0\] \(3\) must be token ids or"),
    ],
)
def test_errors(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
