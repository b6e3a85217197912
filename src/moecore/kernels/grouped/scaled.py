"""Grouped products of FP8 operands with one scale per row of either.

    scaled_gemm    out[r] = a[r] @ b[expert(r)]^T
    scaled_wgrad   out[i] = sum over the rows r of expert i of  x[r]^T y[r]

A scale belongs to all of the summed dim, so it is multiplied at the end. Operands are of the kind
"row", by `scaled_rows.py`; "tensorwise" ones have the same scale in every row. Torch's grouped
product multiplies E4M3 alone; where an operand is E5M2 the kernels of `scaled_kernel.py` do.

Letters: R expert rows (length), e experts, K the summed dim, N columns, M columns of x, P rows with
each expert's padded to a multiple of 16 (bytes, from which torch's product may read).
"""

from __future__ import annotations

import torch
from torch import Tensor

from moecore.base.torch_private import is_silent, scaled_grouped_mm
from moecore.kernels.common import rows_of_experts, use_kernel
from moecore.kernels.grouped.scaled_kernel import mixed_gemm, mixed_wgrad
from moecore.kernels.rows.scaling import Blocks


def is_reference(x: Tensor) -> bool:
    """Return whether torch has no such product on a tensor's device."""
    return x.device.type == "cpu"


def _is_mixed(a: Blocks, b: Blocks) -> bool:
    """Return whether torch's grouped product does not take the formats."""
    return a.values.dtype != b.values.dtype


def _has_no_product(a: Blocks, b: Blocks) -> bool:
    """Return whether references multiply."""
    return is_reference(b.values) and not (_is_mixed(a, b) and use_kernel(b.values))


def scaled_gemm_ref(a: Blocks, b: Blocks, offsets_e: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what `scaled_gemm` returns, expert by expert in plain PyTorch. Host sync."""
    out_RN = torch.zeros(a.values.shape[0], b.values.shape[1], device=b.values.device)
    for i, rows in enumerate(rows_of_experts(offsets_e)):
        product = a.values[rows].float() @ b.values[i].float().T
        out_RN[rows] = product * a.scales[rows, None] * b.scales[i]
    return out_RN.to(dtype)


def scaled_gemm(a: Blocks, b: Blocks, offsets_e: Tensor, dtype: torch.dtype) -> Tensor:
    """Return each expert row times its expert's matrix, [R, N]. No autograd; no sync on a GPU."""
    # Rows [R, K] are in expert order, matrices [e, N, K]; K and N are multiples of 16. A GPU gives
    # bf16. Rows past the last expert's hold nothing of meaning.
    if _has_no_product(a, b):
        return scaled_gemm_ref(a, b, offsets_e, dtype)
    R, b_eKN = a.values.shape[0], b.values.transpose(1, 2)
    if not R or is_silent(b_eKN):
        return b_eKN.new_empty(R, b_eKN.shape[2], dtype=dtype)
    if _is_mixed(a, b):
        return mixed_gemm(a, b, offsets_e, dtype)
    out_RN: Tensor = scaled_grouped_mm(
        a.values, b_eKN, a.scales, b.scales, offs=offsets_e, out_dtype=dtype
    )
    return out_RN


def scaled_wgrad_ref(x: Blocks, y: Blocks, offsets_e: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what `scaled_wgrad` returns, expert by expert in plain PyTorch. Host sync."""
    out = []
    for i, rows in enumerate(rows_of_experts(offsets_e)):
        product = x.values[:, rows].float() @ y.values[:, rows].float().T
        out.append(product * x.scales[i, :, None] * y.scales[i])
    return torch.stack(out).to(dtype)


def scaled_wgrad(x: Blocks, y: Blocks, offsets_e: Tensor, dtype: torch.dtype) -> Tensor:
    """Return each expert's sum of outer products of x [M, P] and y [N, P], [e, M, N]."""
    # Zero for an expert without rows; a GPU gives bf16. No autograd; no host sync on a GPU.
    if _has_no_product(x, y):
        return scaled_wgrad_ref(x, y, offsets_e, dtype)
    if is_silent(x.values):
        return x.values.new_empty(*x.scales.shape, y.scales.shape[1], dtype=dtype)
    if _is_mixed(x, y):
        return mixed_wgrad(x, y, offsets_e, dtype)
    x_scales, y_scales = x.scales.flatten(), y.scales.flatten()
    out_eMN: Tensor = scaled_grouped_mm(
        x.values, y.values.T, x_scales, y_scales, offs=offsets_e, out_dtype=dtype
    )
    return out_eMN
