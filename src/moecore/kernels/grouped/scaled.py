"""Grouped products of FP8 operands with one scale per row of either.

    scaled_gemm    out[r] = a[r] @ b[expert(r)]^T
    scaled_wgrad   out[i] = sum over the rows r of expert i of  x[r]^T y[r]

A scale belongs to all of the summed dim, so it is multiplied at the end. Operands are of the kind
"row", see `rows/scaling.py`; "tensorwise" ones have the same scale in every row. Columns are 0
between an expert's rows and the next one's. Torch's grouped product multiplies E4M3 alone; where an
operand is E5M2 the kernels of `scaled_kernel.py` do.

Letters: R expert rows (length), e experts, K the summed dim, N columns, M columns of x, P rows with
each expert's padded to a multiple of 16 (bytes, from which torch's product may read).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moecore.base.torch_names import is_silent, scaled_grouped_mm
from moecore.kernels.common import cdiv, rows_of_experts, use_kernel
from moecore.kernels.grouped.scaled_kernel import mixed_gemm, mixed_wgrad
from moecore.kernels.rows.e4m3 import block_scale_ref, magnitude_ref
from moecore.kernels.rows.scaling import (
    ALIGNED,  # of which K, N, and each expert's rows in P are multiples
    DTYPES,
    LARGEST,
    Blocks,
    Both,
    encode_ref,
    quantise_ref,
)


class PaddedRows(NamedTuple):
    """Where expert rows lie when each expert's are padded."""

    expert_R: Tensor  # int64 expert of each row; e for rows past the last one in use
    place_R: Tensor  # int64 row in P; P for rows past the last one in use
    offsets_e: Tensor  # int32 running sum of the padded counts
    length: int  # P


def pad_rows(offsets_e: Tensor, num_rows: int, multiple: int = ALIGNED) -> PaddedRows:
    """Return where rows padded to a multiple lie, in plain PyTorch. No host sync."""
    # Every expert has rows there: torch's product leaves what has none uninitialised. Example,
    # experts of 3 and 17 rows in 22: offsets 16 and 48, place_R 0 to 2, 16 to 32, 64, 64.
    e = offsets_e.shape[0]
    counts_e = offsets_e.diff(prepend=offsets_e.new_zeros(1))
    padded_e = (counts_e.clamp(min=1) + multiple - 1) // multiple * multiple
    ends_e = padded_e.cumsum(0, dtype=torch.int32)
    row_R = torch.arange(num_rows, device=offsets_e.device)
    expert_R = torch.searchsorted(offsets_e, row_R.int(), right=True)
    shift_e = (ends_e - padded_e) - (offsets_e - counts_e)
    length = cdiv(num_rows, multiple) * multiple + e * multiple
    place_R = row_R + shift_e[expert_R.clamp(max=e - 1)]
    return PaddedRows(expert_R, place_R.where(expert_R < e, length), ends_e, length)


def scaled_rows(
    x_RK: Tensor,
    *,
    per_row: bool,
    power_of_two: bool,
    fmt: str = "e4m3",
    amax: Tensor | None = None,
) -> Blocks:
    """Return rows in FP8, with a scale each or one for all, in plain PyTorch. No host sync."""
    # An amax, fp32 [1], is of other values than these: larger ones saturate.
    per_row |= not x_RK.shape[0]  # no rows have no largest value
    largest = None if amax is None else amax.reshape(1, 1)
    values, scales = quantise_ref(x_RK, -1 if per_row else (0, 1), power_of_two, fmt, largest)
    return Blocks(values, scales.flatten().expand(x_RK.shape[0]).contiguous(), "row")


def scaled_weights(w_eNK: Tensor, *, per_row: bool, power_of_two: bool) -> Both:
    """Return matrices in FP8, with a scale per row of either layout or one per expert."""
    e, N, K = w_eNK.shape
    rows, row_scales = quantise_ref(w_eNK, -1 if per_row else (1, 2), power_of_two)
    columns, column_scales = rows, row_scales
    if per_row:
        columns, column_scales = quantise_ref(w_eNK, 1, power_of_two)
    columns_eKN = columns.transpose(1, 2).contiguous()
    return Both(
        Blocks(rows, row_scales.view(e, -1).expand(e, N).contiguous(), "row"),
        Blocks(columns_eKN, column_scales.view(e, -1).expand(e, K).contiguous(), "row"),
    )


def scaled_columns(
    x_RC: Tensor,
    padded: PaddedRows,
    *,
    per_row: bool,
    power_of_two: bool,
    fmt: str = "e4m3",
    amax: Tensor | None = None,
) -> Blocks:
    """Return columns in FP8, with a scale per expert and column or one for all. No host sync."""
    # Rows are in expert order; those past the last one in use must be finite. `per_row` is of the
    # operand: a column of every expert. The amax is that of `scaled_rows`.
    C, e = x_RC.shape[1], padded.offsets_e.shape[0]
    x_RC = x_RC.float()
    if amax is not None:
        amax_eC = amax.expand(e + 1, C)
    elif per_row or not x_RC.shape[0]:
        expert_RC = padded.expert_R[:, None].expand_as(x_RC)
        magnitudes_RC = magnitude_ref(x_RC)
        amax_eC = x_RC.new_zeros(e + 1, C).scatter_reduce_(0, expert_RC, magnitudes_RC, "amax")
    else:
        amax_eC = magnitude_ref(x_RC).amax().expand(e + 1, C)
    scales_eC, inverse_eC = block_scale_ref(amax_eC.contiguous(), power_of_two, LARGEST[fmt])
    values_RC = encode_ref(x_RC, inverse_eC[padded.expert_R], fmt)
    values_PC = x_RC.new_zeros(padded.length + 1, C, dtype=torch.uint8)
    values_PC.index_copy_(0, padded.place_R, values_RC.view(torch.uint8))
    values_CP = values_PC[:-1].T.contiguous().view(DTYPES[fmt])
    return Blocks(values_CP, scales_eC[:e].contiguous(), "row")


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
    scales = (a.scales, b.scales)
    return scaled_grouped_mm(a.values, b_eKN, *scales, offs=offsets_e, out_dtype=dtype)


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
    scales = (x.scales.flatten(), y.scales.flatten())
    return scaled_grouped_mm(x.values, y.values.T, *scales, offs=offsets_e, out_dtype=dtype)
