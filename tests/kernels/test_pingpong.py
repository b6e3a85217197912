"""Products whose epilogues hide behind the next product, against products expert by expert."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from moecore.kernels.activation import ActivationOptions, weighted_activation_bwd_ref
from moecore.kernels.grouped_gemm import grouped_gemm_activation_ref, grouped_gemm_ref
from moecore.kernels.pingpong import (
    CLEARED_ROWS,
    MAP_FIELDS,
    map_piece_tiles,
    map_row_tiles,
    pingpong_activation,
    pingpong_activation_bwd,
    pingpong_gemm,
)
from tests.kernels.conftest import poison
from tests.kernels.test_grouped_gemm import check

pytestmark = pytest.mark.gpu

# Rows of each expert: empty ones, one row, one expert, primes, tiles that are just full.
COUNTS = {
    "mixed": [85, 0, 1, 640, 0, 521],
    "one expert": [593],
    "full tiles": [128, 384, 256],
    "all to one": [0, 0, 977, 0],
    "no rows": [0, 0, 0],
    "more tiles than multiprocessors": [300] * 128,
}
SIZES = [(24, 40), (64, 128), (136, 328), (320, 256)]  # K, N
KINDS = ["swiglu", "geglu", "clamped_swiglu"]
SPARE = 70  # rows of the capacity that belong to nobody


def make(counts: list[int]) -> tuple[Tensor, Tensor, Tensor, int]:
    """Offsets, row ids and tiles of R = used + SPARE rows, and the number of source rows."""
    poison()
    torch.manual_seed(0)
    offsets = torch.tensor(counts).cumsum(0).int().cuda()
    R = sum(counts) + SPARE
    S = max(7, sum(counts) // 2)
    row_ids = torch.randint(0, S, (R,), dtype=torch.int32, device="cuda")
    return offsets, row_ids, map_row_tiles(offsets, R), S


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


@pytest.mark.parametrize("name", COUNTS)
def test_map_covers_every_row_once(name: str) -> None:
    offsets, _, tiles, _ = make(COUNTS[name])
    assert tiles.shape[1] == MAP_FIELDS
    covered = [
        (expert, r)
        for expert, row, end, _ in tiles[1 : 1 + int(tiles[0, 0])].tolist()
        for r in range(row, min(row + 128, end))
    ]
    stops = offsets.tolist()
    wanted = [
        (i, r)
        for i, (start, stop) in enumerate(zip([0, *stops[:-1]], stops, strict=True))
        for r in range(start, stop)
    ]
    assert covered == wanted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("K, N", SIZES)
@pytest.mark.parametrize("transposed", [False, True], ids=["KN", "NK"])
@pytest.mark.parametrize("gather", [False, True], ids=["contiguous", "gather"])
@pytest.mark.parametrize("name", COUNTS)
def test_gemm(
    name: str, gather: bool, transposed: bool, K: int, N: int, dtype: torch.dtype
) -> None:
    counts = COUNTS[name]
    offsets, row_ids, tiles, S = make(counts)
    used = sum(counts)
    a = randn(S if gather else row_ids.shape[0], K, dtype=dtype)
    if not gather:
        a[used:] = float("nan")  # nothing may read rows that belong to nobody
    b = randn(len(counts), *((N, K) if transposed else (K, N)), dtype=dtype)
    b = b.transpose(1, 2) if transposed else b
    ids = row_ids if gather else None
    found = pingpong_gemm(a, b, tiles, row_ids_R=ids)
    again = pingpong_gemm(a, b, tiles, row_ids_R=ids)
    exact = grouped_gemm_ref(a.double(), b.double(), offsets, row_ids_R=ids)
    plain = grouped_gemm_ref(a, b, offsets, row_ids_R=ids)
    assert found.shape == (row_ids.shape[0], N) and found.dtype == dtype
    assert torch.equal(found[:used], again[:used])
    check(found, exact, plain, used)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("D, F", SIZES)
@pytest.mark.parametrize("name", COUNTS)
def test_activation(name: str, D: int, F: int, kind: str) -> None:
    counts = COUNTS[name]
    offsets, row_ids, tiles, _ = make(counts)
    R, used = row_ids.shape[0], sum(counts)
    options = ActivationOptions(kind=kind, limit=1.0)
    x, weights = randn(R, D), torch.rand(R, device="cuda")
    w1 = randn(len(counts), 2 * F, D) / D**0.5
    rows = torch.arange(R, dtype=torch.int32, device="cuda")
    h, a = pingpong_activation(x, w1, [tiles], weights, options)
    exact = (x.double(), w1.double(), rows, weights.double(), offsets, options)
    exact_h, exact_a = grouped_gemm_activation_ref(*exact)
    plain_h, plain_a = grouped_gemm_activation_ref(x, w1, rows, weights, offsets, options)
    check(h, exact_h, plain_h, used)
    check(a, exact_a, plain_a, used)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("D, F", SIZES)
@pytest.mark.parametrize("gather", [False, True], ids=["contiguous", "gather"])
@pytest.mark.parametrize("name", COUNTS)
def test_activation_bwd(name: str, gather: bool, D: int, F: int, kind: str) -> None:
    counts = COUNTS[name]
    offsets, row_ids, tiles, S = make(counts)
    R, used = row_ids.shape[0], sum(counts)
    options = ActivationOptions(kind=kind, limit=1.0)
    dy, weights = randn(S if gather else R, D), torch.rand(R, device="cuda")
    h, w2 = randn(R, 2 * F), randn(len(counts), D, F) / D**0.5
    h[used:] = float("nan")
    ids = row_ids if gather else None
    found = pingpong_activation_bwd(dy, w2, [tiles], h, weights, offsets, options, row_ids_R=ids)
    again = pingpong_activation_bwd(dy, w2, [tiles], h, weights, offsets, options, row_ids_R=ids)
    da = grouped_gemm_ref(dy, w2, offsets, row_ids_R=ids)
    exact_da = grouped_gemm_ref(dy.double(), w2.double(), offsets, row_ids_R=ids)
    plain = weighted_activation_bwd_ref(h, da, weights, offsets[-1], options)
    exact = weighted_activation_bwd_ref(
        h.double(), exact_da, weights.double(), offsets[-1], options
    )
    for ours, same, right, theirs in zip(found, again, exact, plain, strict=True):
        assert torch.equal(ours[:used], same[:used])
        two_dims = (t.reshape(R, -1) for t in (ours, right, theirs))
        check(*two_dims, used)
    dh, dweights, a = found
    assert not dweights[used:].any()
    for cleared in (dh, a):
        assert not cleared[used : used + CLEARED_ROWS].any()


def test_output_of_more_than_2_to_the_31_elements() -> None:
    R, K, N = 300_000, 64, 8192
    offsets = torch.tensor([100_000, 300_000], dtype=torch.int32, device="cuda")
    a, b = randn(R, K), randn(2, K, N)
    out = pingpong_gemm(a, b, map_row_tiles(offsets, R))
    torch.testing.assert_close(out[-1000:], a[-1000:] @ b[1], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(out[:1000], a[:1000] @ b[0], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", COUNTS)
def test_pieces_are_the_whole(name: str) -> None:
    """Rows that arrive in pieces, two ranges of source rows each, give the same bits."""
    offsets, row_ids, tiles, S = make(COUNTS[name])
    R, start = row_ids.shape[0], 0
    for end in offsets.tolist():
        row_ids[start:end] = row_ids[start:end].sort().values
        start = end
    cuts = sorted(torch.randint(0, S, (3,)).tolist())
    ranges = [
        [(cuts[0], cuts[1]), (0, 0)],
        [(cuts[1], cuts[2]), (0, 0)],
        [(cuts[2], S), (0, cuts[0])],
    ]
    pieces = map_piece_tiles(offsets, row_ids, torch.tensor(ranges).int().cuda())
    x, w1, w2 = randn(R, 64), randn(len(offsets), 256, 64), randn(len(offsets), 64, 128)
    weights, options = torch.rand(R, device="cuda"), ActivationOptions(kind="swiglu")
    late = torch.full_like(x, float("nan"))

    def arrive() -> Iterator[Tensor]:
        used = torch.arange(R, device="cuda") < offsets[-1]
        for piece, tiles_of_piece in zip(ranges, pieces, strict=True):
            for first, last in piece:
                came = used & (row_ids >= first) & (row_ids < last)
                late[came] = x[came]
            yield tiles_of_piece

    used = int(offsets[-1])
    whole = pingpong_activation(x, w1, [tiles], weights, options)
    ours = pingpong_activation(late, w1, arrive(), weights, options)
    for a, b in zip(whole, ours, strict=True):
        assert torch.equal(a[:used], b[:used])
    late.fill_(float("nan"))
    where = (whole[0], weights, offsets, options)
    whole_bwd = pingpong_activation_bwd(x, w2, [tiles], *where)
    ours_bwd = pingpong_activation_bwd(late, w2, arrive(), *where)
    for a, b in zip(whole_bwd, ours_bwd, strict=True):
        assert torch.equal(a[:used], b[:used])
