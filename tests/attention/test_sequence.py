"""Documents that are cut into chunks."""

from __future__ import annotations

import pytest
import torch

from moecore.attention.sequence import Sequence, make_packed_sequence, split_documents

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("cu_seqlens", "size", "expected"),
    [
        ([0, 5, 8], 2, [0, 2, 4, 5, 7, 8]),
        ([0, 8, 8], 3, [0, 3, 6, 8]),
        ([0, 4, 8], 1, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (None, 3, [0, 3, 4, 7, 8]),
    ],
)
def test_chunks_begin_with_documents(
    cu_seqlens: list[int] | None, size: int, expected: list[int]
) -> None:
    sequence = Sequence()
    if cu_seqlens is not None:
        sequence = make_packed_sequence(torch.tensor(cu_seqlens), None, (2, 4), CPU)
    chunks = split_documents(sequence, (2, 4), size, CPU)
    assert chunks.cu_seqlens is not None and chunks.cu_seqlens.dtype == torch.int32
    found = chunks.cu_seqlens.tolist()
    assert found[: len(expected)] == expected and set(found[len(expected) :]) <= {8}
    assert chunks.max_seqlen == size and chunks.positions_BT is sequence.positions_BT


def test_short_documents_are_not_cut() -> None:
    sequence = make_packed_sequence(torch.tensor([0, 3, 8]), None, (2, 4), CPU)
    assert split_documents(sequence, (2, 4), 5, CPU) is sequence
