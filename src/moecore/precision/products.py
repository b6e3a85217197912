"""One dense product of FP8 operands: torch's scaled product on GPUs, else the reference.

Letters: M and N rows of the operands, K the dim that is summed.

cuBLASLt sums "tile" and "block" operands in fp32 every 128 of K. It wants scales of tiles with
neighbouring rows side by side, and those of blocks in rows of a multiple of four; that is how
`cast.py` lays them out, so nothing is copied here. It has blocks on Hopper alone.

Source: cuBLASLt's "scaling factors layouts", as torch's `_scaled_mm_v2` checks them.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from moecore.base.torch_names import scaled_mm
from moecore.kernels.common import has_hopper_kernels, no_autocast
from moecore.kernels.ops import Op
from moecore.kernels.rows.cast import operand
from moecore.kernels.rows.scaling import Blocks, product_ref

# Of torch.nn.functional.ScalingType; the operator takes numbers.
RECIPES = {"tensor": 0, "row": 1, "tile": 4, "block": 5}


def has_scaled_product(device: torch.device, kind: str) -> bool:
    """Return whether torch multiplies operands of this kind on the device's FP8 tensor cores."""
    return has_hopper_kernels(device) if device.type == "meta" else _has_product(device, kind)


@functools.cache
def _has_product(device: torch.device, kind: str) -> bool:
    if device.type != "cuda" or scaled_mm is None:
        return False
    capability = torch.cuda.get_device_capability(device)
    return capability == (9, 0) if kind in ("tile", "block") else capability >= (8, 9)


def _product(
    a_MK: Tensor,
    a_scales: Tensor,
    a_kind: str,
    a_fmt: str,
    b_NK: Tensor,
    b_scales: Tensor,
    b_kind: str,
    b_fmt: str,
    dtype: torch.dtype,
) -> Tensor:
    a = operand(a_MK, a_scales, a_kind, a_fmt)
    b = operand(b_NK, b_scales, b_kind, b_fmt)
    (M, K), N = a_MK.shape, b_NK.shape[0]
    if not M * N * K or not has_scaled_product(a_MK.device, a_kind):
        with no_autocast(a_MK):
            return product_ref(a, b).to(dtype)
    return scaled_mm(
        a.values,
        b.values.T,
        [_as_torch_takes_it(a, is_first=True)],
        [RECIPES[a_kind]],
        [],
        [_as_torch_takes_it(b, is_first=False)],
        [RECIPES[b_kind]],
        [],
        None,
        dtype,
    )


def _as_torch_takes_it(side: Blocks, *, is_first: bool) -> Tensor:
    """Return a view of an operand's scales."""
    if side.kind == "row":
        return side.scales if is_first else side.scales.T
    return side.scales.reshape(1) if side.kind == "tensor" else side.scales.T


def _product_fake(a_MK, a_scales, a_kind, a_fmt, b_NK, b_scales, b_kind, b_fmt, dtype):  # type: ignore[no-untyped-def]
    return a_MK.new_empty(a_MK.shape[0], b_NK.shape[0], dtype=dtype)


_product_op = Op("fp8_product", _product, _product_fake)


def product(a: Blocks, b: Blocks, dtype: torch.dtype) -> Tensor:
    """Return a @ b^T, [M, N] with the operands' padded sizes. Not differentiable, no host sync.

    Args:
        a: [M, K].
        b: [N, K].
        dtype: of the result, which is summed in fp32 and rounded once: bf16, fp16 or fp32.
    """
    return _product_op(*_parts(a), *_parts(b), dtype)


def _parts(side: Blocks) -> tuple[Tensor, Tensor, str, str]:
    fmt = "e5m2" if side.values.dtype == torch.float8_e5m2 else "e4m3"
    return side.values.view(torch.uint8), side.scales, side.kind, fmt
