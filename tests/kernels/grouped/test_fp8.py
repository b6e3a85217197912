"""Products of FP8 operands: the references against dequantised products, the kernels against both.

Tensor cores sum the 128 terms of a block with about 13 bits, so kernels differ from the references
by that, and by the order of fp32 terms.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moecore.kernels.grouped.fp8 import fp8_gemm, fp8_gemm_ref, fp8_wgrad, fp8_wgrad_ref
from moecore.kernels.rows.e4m3 import FP8
from moecore.kernels.rows.row_tiles import RowTiles, map_row_tiles
from moecore.kernels.rows.scaling import Blocks
from tests.kernels.row_cases import COUNTS, SPARE

SIZES = [(128, 128), (384, 640), (256, 256), (1152, 384)]  # K or M, N
CASES = [  # a CPU runs the reference, which tells few of them apart
    pytest.param(name, sizes, marks=[] if sizes in of_cpu else [pytest.mark.gpu])
    for name in COUNTS
    for of_cpu in [[] if name.startswith("more") else SIZES[: 1 + (name == "mixed")]]
    for sizes in SIZES
]
TERMS = 2**-11  # error of a block's sum on tensor cores, of the sum of its terms' sizes


def fp8(*shape: int, device: str) -> Tensor:
    return torch.randn(shape, device=device).to(FP8)


def powers(*shape: int, device: str) -> Tensor:
    return torch.exp2(torch.randint(-3, 4, shape, device=device).float())


def offsets_of(counts: list[int], device: str) -> tuple[Tensor, RowTiles, int]:
    torch.manual_seed(0)
    offsets = torch.tensor(counts, device=device).cumsum(0).int()
    R = sum(counts) + SPARE
    return offsets, map_row_tiles(offsets, R), R


def rows_of(R: int, used: int, K: int, device: str) -> Blocks:
    """Rows whose spare ones are NaN, in values and scales."""
    a = Blocks(fp8(R, K, device=device), powers(K // 128, R + -R % 4, device=device), "tile")
    a.values[used:] = float("nan")
    a.scales[:, used:] = float("nan")
    return a


def tiles_of(tiles: RowTiles, C: int, device: str) -> Blocks:
    """Tiles whose unused ones are NaN."""
    scales = powers(tiles.max_tiles, C // 128, device=device)
    t = Blocks(fp8(tiles.max_tiles, C, 128, device=device), scales, "block")
    t.values[int(tiles.ends_e[-1]) :] = float("nan")
    t.scales[int(tiles.ends_e[-1]) :] = float("nan")
    return t


def wide_rows(a: Blocks) -> Tensor:
    scales_RB = a.scales[:, : a.values.shape[0]].T
    return a.values.double() * scales_RB.repeat_interleave(128, 1)


def wide_weights(b: Blocks) -> Tensor:
    return b.values.double() * b.scales.repeat_interleave(128, 1).repeat_interleave(128, 2)


def gemm_truth(a: Blocks, b: Blocks, stops: list[int]) -> tuple[Tensor, Tensor]:
    """Return the exact products, and the sums of their terms' sizes."""
    rows, weights, exact, sizes, start = wide_rows(a), wide_weights(b), [], [], 0
    for i, stop in enumerate(stops):
        exact.append(rows[start:stop] @ weights[i].T)
        sizes.append(rows[start:stop].abs() @ weights[i].T.abs())
        start = stop
    return torch.cat(exact), torch.cat(sizes)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("name", "sizes"), CASES)
def test_gemm(name: str, sizes: tuple[int, int], transposed: bool, device: str) -> None:
    offsets, tiles, R = offsets_of(COUNTS[name], device)
    (K, N), used = sizes, sum(COUNTS[name])
    a = rows_of(R, used, K, device)
    shape = (K // 128, N // 128) if transposed else (N // 128, K // 128)
    scales = powers(len(offsets), *shape, device=device)
    scales = scales.transpose(1, 2) if transposed else scales
    b = Blocks(fp8(len(offsets), N, K, device=device), scales, "block")
    args = (a, b, offsets, tiles, torch.bfloat16)
    got = fp8_gemm(*args)
    assert got.shape == (R, N) and got.dtype == torch.bfloat16
    exact, terms = gemm_truth(a, b, offsets.tolist())
    error = (got[:used].double() - exact).abs()
    assert (error <= exact.abs() * 2**-8 + terms * TERMS).all()
    assert torch.equal(got[:used], fp8_gemm(*args)[:used])
    strided_RK = F.pad(a.values.view(torch.uint8), (0, 16))[:, :K].view(FP8)  # as rows are sent
    strided = Blocks(strided_RK, a.scales, "tile")
    assert torch.equal(got[:used], fp8_gemm(strided, *args[1:])[:used])
    want = fp8_gemm_ref(a, b, offsets, torch.float32)[:used]
    assert ((want.double() - exact).abs() <= terms * 2**-20).all()


@pytest.mark.parametrize("target", ["new", "bf16", "add", "add bf16"])
@pytest.mark.parametrize(("name", "sizes"), CASES)
def test_wgrad(name: str, sizes: tuple[int, int], target: str, device: str) -> None:
    offsets, tiles, _ = offsets_of(COUNTS[name], device)
    (M, N), e = sizes, len(offsets)
    x, y = tiles_of(tiles, M, device), tiles_of(tiles, N, device)
    dtype = torch.bfloat16 if "bf16" in target else torch.float32
    before = torch.randn(e, M, N, device=device).to(dtype)
    out, adds = before.clone(), "add" in target
    got = fp8_wgrad(x, y, tiles, out=out, accumulate=adds, dtype=dtype, scale=0.5)
    assert got.dtype == dtype and got is out
    wide = [t.values.double() * t.scales.repeat_interleave(128, 1)[:, :, None] for t in (x, y)]
    exact, terms = torch.zeros(2, e, M, N, device=device, dtype=torch.float64)
    first = 0
    for i, last in enumerate(tiles.ends_e.tolist()):
        left, right = (w[first:last].transpose(0, 1).flatten(1) for w in wide)
        exact[i], terms[i] = left @ right.T / 2, left.abs() @ right.abs().T / 2
        first = last
    if adds:
        exact += before
        terms += before.abs() * 2**-12
    rounding = 2**-22
    if dtype == torch.bfloat16:
        rounding = 2**-7 if device == "cpu" else 2**-8  # the interpreter cuts, not rounds
    assert ((got.double() - exact).abs() <= exact.abs() * rounding + terms * TERMS).all()
    again = fp8_wgrad(
        x, y, tiles, out=before if adds else None, accumulate=adds, dtype=dtype, scale=0.5
    )
    assert torch.equal(got, again) and torch.isfinite(fp8_wgrad_ref(x, y, tiles)).all()
