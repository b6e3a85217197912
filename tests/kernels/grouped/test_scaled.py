"""Grouped products of FP8 operands of two formats: the kernels, interpreted or on a GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from moecore.kernels.grouped import scaled_rows as sr
from moecore.kernels.grouped.scaled import mixed_format_gemm, mixed_format_wgrad
from moecore.kernels.rows.scaling import DTYPES, Blocks, OperandPair
from moecore.kernels.triton_api import INTERPRET

COUNTS = [
    5,
    0,
    35 if INTERPRET else 131,
    1,
    0,
    20,
]  # rows of experts, behind which some belong to none
R = sum(COUNTS) + 9
SIZES = [(96, 80), (16, 48)] if INTERPRET else [(144, 272), (16, 48)]  # N and K, no whole tiles
FORMATS = [("e5m2", "e4m3"), ("e4m3", "e5m2")]
HOW: dict[str, Any] = dict(per_row=True, power_of_two=False)


class Operands:
    """Rows and matrices of experts, each of another size, so that a wrong scale is seen."""

    def __init__(self, N: int, K: int, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.offsets_e = torch.tensor(COUNTS, device=device).cumsum(0).int()
        self.padded_e = sr.pad_offsets(self.offsets_e)
        sizes = 2.0 ** torch.arange(-3, 3)[:, None, None]
        self.w_eNK = (torch.randn(len(COUNTS), N, K, generator=generator) * sizes).to(device)
        of_rows = 2.0 ** (torch.arange(R) // 7 % 9)[:, None]
        self.x_RK, self.y_RN = (
            (torch.randn(R, n, generator=generator) * of_rows).to(device) for n in (K, N)
        )

    def rows(self, x_RN: Tensor, fmt: str) -> OperandPair:
        """Return rows and columns of experts."""
        return sr.quantise_expert_rows(x_RN, self.offsets_e, self.padded_e, **HOW, fp8_format=fmt)


def wide(side: Blocks) -> Tensor:
    """Return fp64 values, without their scales."""
    return side.values.double()


def lost_in_sums(left_MK: Tensor, right_NK: Tensor) -> Tensor:
    """Return the most that sums of fp64 [M, N] are off by.

    Hopper's tensor cores add 32 terms to a sum at a time, and keep of each 13 bits below the
    largest of them all; sums of 128 terms are then added in fp32.
    """
    if INTERPRET:
        return left_MK.shape[1] * 2.0**-24 * (left_MK.abs() @ right_NK.abs().T)
    lost_MN = left_MK.new_zeros(len(left_MK), len(right_NK))
    for block in zip(left_MK.split(128, 1), right_NK.split(128, 1), strict=True):
        sum_MN = torch.zeros_like(lost_MN)
        for left, right in zip(*(side.split(32, 1) for side in block), strict=True):
            largest_MN = (left[:, None].abs() * right.abs()).amax(-1)
            lost_MN += 33 * 2.0**-13 * torch.maximum(largest_MN, sum_MN.abs())
            sum_MN += left @ right.T
    return lost_MN


def check(found: Tensor, left: Tensor, right: Tensor, scales: Tensor) -> None:
    """A sum is off by its roundings, then by one of each scale, and one to the dtype."""
    step = 2.0 ** (-7 if INTERPRET else -8)  # the interpreter truncates
    step = 2.0**-22 if found.dtype == torch.float32 else step
    product = left @ right.T * scales
    bound = lost_in_sums(left, right) * scales + step * product.abs()
    assert ((found.double() - product).abs() <= bound).all()


@pytest.mark.parametrize("formats", FORMATS, ids=str)
@pytest.mark.parametrize(("N", "K"), SIZES)
def test_products(N: int, K: int, formats: tuple[str, str], device: str) -> None:
    o = Operands(N, K, device)
    a, b = o.rows(o.x_RK, formats[0]).rows, sr.quantise_expert_matrices(o.w_eNK, **HOW).rows
    if formats[1] == "e5m2":
        b = Blocks(b.values.to(torch.float32).to(DTYPES["e5m2"]), b.scales, b.kind)
    for dtype in (torch.float32, torch.bfloat16):
        found, start = mixed_format_gemm(a, b, o.offsets_e, dtype), 0
        assert found.dtype == dtype
        for i, end in enumerate(o.offsets_e.tolist()):
            x, w, rows = wide(a)[start:end], wide(b)[i], slice(start, end)
            scales = a.scales[rows, None].double() * b.scales[i].double()
            check(found[rows], x, w, scales)
            start = end


@pytest.mark.parametrize("formats", FORMATS, ids=str)
@pytest.mark.parametrize(("N", "K"), SIZES)
def test_weight_gradients(N: int, K: int, formats: tuple[str, str], device: str) -> None:
    o = Operands(N, K, device)
    y, x = (o.rows(rows, fmt).columns for rows, fmt in zip((o.y_RN, o.x_RK), formats, strict=True))
    for dtype in (torch.float32, torch.bfloat16):
        found, start = mixed_format_wgrad(y, x, o.padded_e, dtype), 0
        assert found.dtype == dtype
        for i, end in enumerate(o.padded_e.tolist()):
            left, right = wide(y)[:, start:end], wide(x)[:, start:end]
            scales = y.scales[i, :, None].double() * x.scales[i].double()
            check(found[i], left, right, scales)
            assert COUNTS[i] or not found[i].any()
            start = end


def test_what_is_not_finite_stays_in_its_row_and_its_expert(device: str) -> None:
    o = Operands(32, 64, device)
    b = sr.quantise_expert_matrices(o.w_eNK, **HOW).rows
    o.x_RK[7, 3] = torch.inf
    a, x = o.rows(o.x_RK, "e5m2")
    y = o.rows(o.y_RN, "e5m2").columns
    assert a is not None and b is not None and x is not None and y is not None
    out = mixed_format_gemm(a, b, o.offsets_e, torch.float32)
    others = torch.arange(sum(COUNTS)) != 7
    assert out[7].isnan().all() and out[: sum(COUNTS)][others.to(device)].isfinite().all()
    grad = mixed_format_wgrad(x, y, o.padded_e, torch.float32)
    assert grad[2, 3].isnan().all() and grad[[0, 1, 3, 4, 5]].isfinite().all()
