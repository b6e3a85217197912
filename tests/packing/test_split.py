import numpy as np
import pytest
import torch

from moecore.packing import (
    PackedCollator,
    invert_token_indices,
    padded_lengths,
    select_token_indices,
    split_batch,
)
from tests.packing.test_bins import lognormal


def borders(lengths: list[int] | np.ndarray) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)


def test_the_worked_example() -> None:
    held = [
        select_token_indices(torch.tensor([0, 12, 36, 42]), 3, rank).tolist() for rank in range(3)
    ]
    assert held == [
        [0, 1, 10, 11, *range(12, 16), *range(32, 36), 36, 41],
        [2, 3, 8, 9, *range(16, 20), *range(28, 32), 37, 40],
        [4, 5, 6, 7, *range(20, 28), 38, 39],
    ]


@pytest.mark.parametrize("cp", [1, 2, 3, 8])
def test_the_inverse_restores_the_order(cp: int) -> None:
    cu = borders(padded_lengths(lognormal(20, longest=300, seed=cp), cp))
    cu = torch.cat([cu, cu[-1:].expand(3)])  # a static number of documents
    x = torch.randn(int(cu[-1]), 2)
    parts = [x[select_token_indices(cu, cp, rank)] for rank in range(cp)]
    assert all(len(part) == len(x) // cp for part in parts)
    assert torch.equal(torch.cat(parts)[invert_token_indices(cu, cp)], x)


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_ranks_have_the_same_causal_pairs(cp: int) -> None:
    """Work is query and key pairs of a document's own tokens, without its padding."""
    lengths = lognormal(32, longest=32768, seed=cp, mean=8.0)
    padded = padded_lengths(lengths, cp)
    assert (padded % (2 * cp) == 0).all() and (padded - lengths < 2 * cp).all()
    pairs = np.concatenate(
        [
            np.where(np.arange(p) < n, np.arange(1, p + 1), 0)
            for n, p in zip(lengths, padded, strict=True)
        ]
    )
    work = [
        pairs[select_token_indices(borders(padded), cp, rank).numpy()].sum() for rank in range(cp)
    ]
    assert sum(work) == (lengths * (lengths + 1) // 2).sum() and max(work) / min(work) < 1.02


def test_a_rank_gets_the_labels_of_the_whole_batch() -> None:
    documents = [list(range(1, 12)), list(range(20, 25)), list(range(30, 40))]
    batch = PackedCollator(row_tokens=24, rows=2, multiple=4)(documents)
    parts = [split_batch(batch, 2, rank) for rank in range(2)]
    for rank, part in enumerate(parts):
        assert part["input_ids"].shape == (2, 12) and part["max_seqlen"] == 6
        assert torch.equal(part["cu_seqlens"], batch["cu_seqlens"] // 2)
        held = select_token_indices(batch["cu_seqlens"], 2, rank)
        for name in ("input_ids", "labels", "position_ids", "padding_mask"):
            assert torch.equal(part[name].flatten(), batch[name].flatten()[held])  # type: ignore[literal-required]
        learned = part["labels"] != -100
        assert torch.equal(part["labels"][learned], part["input_ids"][learned] + 1)
    assert parts[0]["num_tokens"] + parts[1]["num_tokens"] == batch["num_tokens"] == 10 + 4 + 9


def test_errors() -> None:
    cu = torch.tensor([0, 12, 22])
    for call, message in [
        (lambda: select_token_indices(cu, 3, 0), r"^cu_seqlens \(document 1 of 10 tokens\) must"),
        (lambda: select_token_indices(cu, 2, 2), r"^rank \(2\) must be < cp \(2\): count from 0$"),
        (
            lambda: select_token_indices(cu + 1, 1, 0),
            r"^cu_seqlens \(.*\) must ascend from 0: pass that of",
        ),
        (lambda: invert_token_indices(cu.float(), 1), r"^cu_seqlens \(.*\) must be whole numbers"),
        (lambda: split_batch({}, 2, 0), r"^batch \(\{\}\) must be a PackedBatch: pass what"),  # type: ignore[typeddict-item]
    ]:
        with pytest.raises(ValueError, match=message):
            call()
