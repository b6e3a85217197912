import pytest
import torch
from torch import Tensor

from moecore.kernels.routing.counts import (
    BLOCK,
    add_expert_counts,
    add_expert_counts_ref,
    count_experts_and_tokens,
)
from tests.kernels.conftest import check_without_host


def count_experts(ids_TK: Tensor, B: int, E: int) -> Tensor:
    counts_BE = torch.zeros(B, E, dtype=torch.int64, device=ids_TK.device)
    add_expert_counts(counts_BE, ids_TK)
    return counts_BE


# (T, K, B, E); the longer ones need several programs per sequence.
SHAPES = [
    (1, 1, 1, 1),
    (1, 7, 1, 7),
    (15, 2, 3, 8),
    (14, 3, 7, 13),
    (6, 1, 6, 1024),
    (BLOCK + 1, 1, 1, 3),
    (BLOCK, 3, 2, 130),
]
GPU_SHAPES = [(32768, 8, 1, 128), (32768, 8, 16, 256), (16384, 1, 2, 1), (49999 * 3, 5, 3, 1000)]


def shapes(device: str) -> list[tuple[int, int, int, int]]:
    return SHAPES + (GPU_SHAPES if device == "cuda" else [])


def make_ids(T: int, K: int, E: int, device: str = "cpu", seed: int = 0) -> Tensor:
    """Skewed towards expert 0, the last expert empty where there are two, a tenth dropped."""
    generator = torch.Generator().manual_seed(seed)
    ids = (torch.rand(T, K, generator=generator) ** 3 * max(E - 1, 1)).int()
    return ids.masked_fill(torch.rand(T, K, generator=generator) < 0.1, -1).to(device)


def expected_counts(ids: Tensor, B: int, E: int) -> Tensor:
    counts = torch.zeros(B, E, dtype=torch.int64, device=ids.device)
    add_expert_counts_ref(counts, ids)
    return counts


def test_counts_by_hand() -> None:
    ids = torch.tensor([[0, 2], [2, -1], [1, 0], [-1, -1]], dtype=torch.int32)
    assert count_experts(ids, 1, 3).tolist() == [[2, 1, 2]]
    assert count_experts(ids, 2, 3).tolist() == [[1, 0, 2], [1, 1, 0]]
    assert count_experts(ids, 4, 3).tolist() == [[1, 0, 1], [0, 0, 1], [1, 1, 0], [0, 0, 0]]
    assert count_experts_and_tokens(ids, 2, 3).tolist() == [[1, 0, 2, 2], [1, 1, 0, 2]]
    assert count_experts(ids, 1, 3).dtype == torch.int64
    mask = torch.tensor([False, False, False, True])
    assert count_experts_and_tokens(ids, 2, 3, mask).tolist() == [[1, 0, 2, 2], [1, 1, 0, 1]]
    with pytest.raises(ValueError, match=r"padding_mask_T \(\(3,\), torch.bool\) must be bool of"):
        count_experts_and_tokens(ids, 2, 3, mask[:3])
    counts = torch.tensor([[10, 20, 30]])
    add_expert_counts(counts, ids)
    assert counts.tolist() == [[12, 21, 32]]


def test_kernel_equals_reference(device: str) -> None:
    for T, K, B, E in shapes(device):
        ids = make_ids(T, K, E, device)
        expected = expected_counts(ids, B, E)
        assert torch.equal(count_experts(ids, B, E), expected), (T, K, B, E)
        found = count_experts_and_tokens(ids, B, E)
        assert torch.equal(found[:, :E], expected), (T, K, B, E)
        assert (found[:, E] == T // B).all()


def test_kernel_counts_real_tokens(device: str) -> None:
    for T, K, B, E in shapes(device):
        ids = make_ids(T, K, E, device)
        mask = torch.rand(2, T, device=device).T[:, 0] < 0.4  # strided
        mask[-1] = True
        ids[mask] = -1
        found = count_experts_and_tokens(ids, B, E, mask)
        assert torch.equal(found[:, :E], expected_counts(ids, B, E)), (T, K, B, E)
        real = [int((~part).sum()) for part in mask.chunk(B)]
        assert found[:, E].tolist() == real, (T, K, B, E)


def test_kernel_adds_in_place(device: str) -> None:
    counts = torch.full((2, 5), 1 << 40, dtype=torch.int64, device=device)
    ids, address = make_ids(8, 3, 5, device), counts.data_ptr()
    for _ in range(3):
        add_expert_counts(counts, ids)
    assert counts.data_ptr() == address
    assert torch.equal(counts, (1 << 40) + 3 * expected_counts(ids, 2, 5))


def test_kernel_edges(device: str) -> None:
    dropped = torch.full((4, 2), -1, dtype=torch.int32, device=device)
    assert count_experts_and_tokens(dropped, 2, 3).tolist() == [[0, 0, 0, 2], [0, 0, 0, 2]]
    empty = dropped[:0]
    assert count_experts(empty, 2, 3).tolist() == [[0, 0, 0], [0, 0, 0]]
    assert count_experts_and_tokens(empty, 0, 3).shape == (0, 4)
    last = torch.full((4, 2), 1023, dtype=torch.int32, device=device)
    assert int(count_experts(last, 1, 1024)[0, 1023]) == 8
    wide = torch.full((4, 2), 1500, dtype=torch.int32, device=device)  # more than a kernel takes
    assert int(count_experts(wide, 1, 1501)[0, 1500]) == 8


def test_kernel_reads_strided_ids(device: str) -> None:
    ids = make_ids(3, 14, 5, device).T
    assert not ids.is_contiguous()
    assert torch.equal(count_experts(ids, 2, 5), expected_counts(ids.contiguous(), 2, 5))


def test_op_contract(device: str) -> None:
    counts = torch.zeros(2, 6, dtype=torch.int64, device=device)
    for mask in (None, torch.arange(8, device=device) > 5):
        torch.library.opcheck(
            torch.ops.moecore.add_expert_counts, (counts, make_ids(8, 3, 5, device), mask, 5)
        )


@pytest.mark.gpu
def test_kernel_never_syncs_and_counts_at_each_replay() -> None:
    ids = make_ids(4096, 8, 64, "cuda")
    (counts,) = check_without_host(lambda ids: [count_experts_and_tokens(ids, 4, 64)], (ids,))
    assert torch.equal(counts[:, :64], expected_counts(ids, 4, 64))
    assert (counts[:, 64] == 1024).all()


@pytest.mark.gpu
def test_kernel_addresses_past_2_to_the_31() -> None:
    T, K, B = 3 << 27, 8, 3
    ids = torch.zeros(T, K, dtype=torch.int32, device="cuda")
    ids[-1] = 5
    counts, each = count_experts(ids, B, 7), T // B * K
    assert counts[:, 0].tolist() == [each, each, each - K] and counts[:, 5].tolist() == [0, 0, K]
    assert int(counts.sum()) == T * K
