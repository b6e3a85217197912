"""Grouped products of FP8 operands with one scale per row of either, by torch's grouped product.

    scaled_gemm    out[r] = a[r] @ b[expert(r)]^T
    scaled_wgrad   out[i] = sum over the rows r of expert i of  x[r]^T y[r]

A scale belongs to all of the summed dim, so it is multiplied at the end. "tensorwise" operands have
the same scale in every row.

Letters: R expert rows (length), e experts, K the summed dim, N columns, M columns of x, P rows with
each expert's padded to a multiple of 16 (bytes, from which torch's product may read).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moecore.base.torch_names import is_silent, scaled_grouped_mm
from moecore.kernels.common import cdiv
from moecore.kernels.rows.e4m3 import FP8, block_scale_ref, magnitude_ref
from moecore.kernels.rows.quantised import quantise_ref

ALIGNED = 16  # of which K, N, and each expert's rows in P are multiples


class ScaledRows(NamedTuple):
    """Rows in expert order.

    Attributes:
        values_RK: float8_e4m3fn, contiguous.
        scales_R: fp32.
    """

    values_RK: Tensor
    scales_R: Tensor


class ScaledWeights(NamedTuple):
    """One matrix of every expert, quantised along either dim.

    Attributes:
        values_eNK: float8_e4m3fn, contiguous, for sums over K.
        scales_eN: fp32.
        transposed_eKN: float8_e4m3fn, contiguous, for sums over N.
        transposed_scales_eK: fp32.
    """

    values_eNK: Tensor
    scales_eN: Tensor
    transposed_eKN: Tensor
    transposed_scales_eK: Tensor


class ScaledColumns(NamedTuple):
    """The columns of rows in expert order, with every expert's own scales.

    Attributes:
        values_CP: float8_e4m3fn, contiguous; 0 between an expert's rows and the next one's.
        scales_eC: fp32.
    """

    values_CP: Tensor
    scales_eC: Tensor


class PaddedRows(NamedTuple):
    """Where expert rows lie when each expert's are padded.

    Attributes:
        expert_R: int64 expert of each row; e for rows past the last one in use.
        place_R: int64 row in P; P for rows past the last one in use.
        offsets_e: int32 running sum of the padded counts.
        length: P.
    """

    expert_R: Tensor
    place_R: Tensor
    offsets_e: Tensor
    length: int


def pad_rows(offsets_e: Tensor, num_rows: int) -> PaddedRows:
    """Return where padded rows lie, in plain PyTorch. No host sync.

    Args:
        offsets_e: int32 on the device, running sum of the experts' rows.
        num_rows: R, the length.

    Every expert has rows there: torch's product leaves what has none uninitialised.

    Example, experts of 3 and 17 rows in 22: offsets 16 and 48, place_R 0 to 2, 16 to 32, 64, 64.
    """
    e = offsets_e.shape[0]
    counts_e = offsets_e.diff(prepend=offsets_e.new_zeros(1))
    padded_e = (counts_e.clamp(min=1) + ALIGNED - 1) // ALIGNED * ALIGNED
    ends_e = padded_e.cumsum(0, dtype=torch.int32)
    row_R = torch.arange(num_rows, device=offsets_e.device)
    expert_R = torch.searchsorted(offsets_e, row_R.int(), right=True)
    shift_e = (ends_e - padded_e) - (offsets_e - counts_e)
    length = cdiv(num_rows, ALIGNED) * ALIGNED + e * ALIGNED
    place_R = row_R + shift_e[expert_R.clamp(max=e - 1)]
    return PaddedRows(expert_R, place_R.where(expert_R < e, length), ends_e, length)


def scaled_rows(x_RK: Tensor, *, per_row: bool, power_of_two: bool) -> ScaledRows:
    """Return rows in FP8, with a scale each or one for all, in plain PyTorch. No host sync."""
    per_row |= not x_RK.shape[0]  # no rows have no largest value
    values, scales = quantise_ref(x_RK, -1 if per_row else (0, 1), power_of_two)
    return ScaledRows(values, scales.flatten().expand(x_RK.shape[0]).contiguous())


def scaled_weights(w_eNK: Tensor, *, per_row: bool, power_of_two: bool) -> ScaledWeights:
    """Return matrices in FP8, with a scale per row of either layout or one per expert."""
    e, N, K = w_eNK.shape
    rows, row_scales = quantise_ref(w_eNK, -1 if per_row else (1, 2), power_of_two)
    columns, column_scales = rows, row_scales
    if per_row:
        columns, column_scales = quantise_ref(w_eNK, 1, power_of_two)
    return ScaledWeights(
        rows,
        row_scales.view(e, -1).expand(e, N).contiguous(),
        columns.transpose(1, 2).contiguous(),
        column_scales.view(e, -1).expand(e, K).contiguous(),
    )


def scaled_columns(
    x_RC: Tensor, padded: PaddedRows, *, per_row: bool, power_of_two: bool
) -> ScaledColumns:
    """Return columns in FP8, with a scale per expert and column or one for all. No host sync.

    Args:
        x_RC: rows in expert order; those past the last one in use may be finite only.
        padded: of these rows.
        per_row: of the operand: a column of every expert.
        power_of_two: of the scales; else amax / 448.
    """
    C, e = x_RC.shape[1], padded.offsets_e.shape[0]
    x_RC = x_RC.float()
    amax_RC = magnitude_ref(x_RC)
    if per_row or not x_RC.shape[0]:
        expert_RC = padded.expert_R[:, None].expand_as(x_RC)
        amax_eC = x_RC.new_zeros(e + 1, C).scatter_reduce_(0, expert_RC, amax_RC, "amax")
    else:
        amax_eC = amax_RC.amax().expand(e + 1, C)
    scales_eC, inverse_eC = block_scale_ref(amax_eC.contiguous(), power_of_two)
    values_RC = (x_RC * inverse_eC[padded.expert_R]).to(FP8)
    values_PC = values_RC.new_zeros(padded.length + 1, C, dtype=torch.uint8)
    values_PC.index_copy_(0, padded.place_R, values_RC.view(torch.uint8))
    return ScaledColumns(values_PC[:-1].T.contiguous().view(FP8), scales_eC[:e].contiguous())


def is_reference(x: Tensor) -> bool:
    """Return whether torch has no such product on a tensor's device."""
    return x.device.type == "cpu"


def scaled_gemm_ref(
    a: ScaledRows, b_eNK: Tensor, scales_eN: Tensor, offsets_e: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return what `scaled_gemm` returns, expert by expert in plain PyTorch. Host sync."""
    out_RN = torch.zeros(a.values_RK.shape[0], b_eNK.shape[1], device=b_eNK.device)
    start = 0
    for i, stop in enumerate(offsets_e.tolist()):
        product = a.values_RK[start:stop].float() @ b_eNK[i].float().T
        out_RN[start:stop] = product * a.scales_R[start:stop, None] * scales_eN[i]
        start = stop
    return out_RN.to(dtype)


def scaled_gemm(
    a: ScaledRows, b_eNK: Tensor, scales_eN: Tensor, offsets_e: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return each expert row times its expert's matrix. No autograd; no host sync on a GPU.

    Args:
        a: rows in expert order; K a multiple of 16.
        b_eNK: float8_e4m3fn, contiguous; N a multiple of 16.
        scales_eN: fp32.
        offsets_e: int32 running sum of the experts' rows.
        dtype: of the result, bf16 on a GPU.

    Returns:
        [R, N]; rows past the last expert's hold nothing of meaning.
    """
    if is_reference(b_eNK):
        return scaled_gemm_ref(a, b_eNK, scales_eN, offsets_e, dtype)
    if not a.values_RK.shape[0] or is_silent(b_eNK):
        return b_eNK.new_empty(a.values_RK.shape[0], b_eNK.shape[1], dtype=dtype)
    b_eKN = b_eNK.transpose(1, 2)
    return scaled_grouped_mm(
        a.values_RK, b_eKN, a.scales_R, scales_eN, offs=offsets_e, out_dtype=dtype
    )


def scaled_wgrad_ref(
    x: ScaledColumns, y: ScaledColumns, offsets_e: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return what `scaled_wgrad` returns, expert by expert in plain PyTorch. Host sync."""
    out, start = [], 0
    for i, stop in enumerate(offsets_e.tolist()):
        product = x.values_CP[:, start:stop].float() @ y.values_CP[:, start:stop].float().T
        out.append(product * x.scales_eC[i, :, None] * y.scales_eC[i])
        start = stop
    return torch.stack(out).to(dtype)


def scaled_wgrad(
    x: ScaledColumns, y: ScaledColumns, offsets_e: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return each expert's sum of outer products. No autograd; no host sync on a GPU.

    Args:
        x: [M, P].
        y: [N, P].
        offsets_e: of `PaddedRows`.
        dtype: of the result, bf16 on a GPU.

    Returns:
        [e, M, N]; zero for an expert without rows.
    """
    if is_reference(offsets_e):
        return scaled_wgrad_ref(x, y, offsets_e, dtype)
    scales = (x.scales_eC.flatten(), y.scales_eC.flatten())
    return scaled_grouped_mm(x.values_CP, y.values_CP.T, *scales, offs=offsets_e, out_dtype=dtype)
