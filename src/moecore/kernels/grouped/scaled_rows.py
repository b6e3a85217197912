"""FP8 operands of grouped products with one scale per row, from expert rows and matrices.

    quantise_expert_rows      [R, D] -> rows [R, D], for sums over D, and columns [D, P], for sums
                              over rows
    quantise_expert_matrices  [e, N, D] -> rows [e, N, D] and columns [e, D, N]

Operands have the kind "row" of `rows/scaling.py`. With `per_row` each row of `rows` has a scale,
and in `columns` each expert and column. Otherwise all expert rows have one scale and each matrix
has one, repeated for every row. One pass writes both operands. A pass before it computes the
largest magnitudes, unless `amax` is given or one kernel reads full rows (only `rowwise`, a scale
per row).

Rows past the last expert's are not read and not written. Columns are 0 in the padding between two
experts' rows.

Letters: R expert rows (length), e experts, D columns, N rows of a matrix, P rows with each expert's
padded to a multiple of 16. Bytes moved with b per element: R * D * (b + 1 per operand), and R * D *
b again for the largest magnitudes.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moecore.kernels.common import can_use_kernel, cdiv, launch, next_power_of_2
from moecore.kernels.rows.cast import (
    choose_amax_ref,
    compute_amax_parts,
    has_cast_kernel,
    launch_cast_rows,
    view_as_bytes,
)
from moecore.kernels.rows.cast_kernel import (
    amax_kernel,
    load_amax,
    locate_row_tile,
    record_amax,
    to_fp8,
)
from moecore.kernels.rows.e4m3 import (
    BLOCK,
    abs_without_nan_ref,
    compute_block_scale,
    compute_block_scale_ref,
)
from moecore.kernels.rows.row_tiles import load_expert_ranges
from moecore.kernels.rows.scaling import (
    ALIGNED,  # of which D, N, and each expert's rows in P are multiples
    DTYPES,
    LARGEST,
    Blocks,
    OperandPair,
    compute_amax_ref,
    encode_fp8_ref,
    get_values_and_scales,
    quantise_ref,
    update_amax_ref_,
)
from moecore.kernels.triton_api import INTERPRET, tl, triton

NUM_WARPS = 8


class PaddedRows(NamedTuple):
    """Positions of expert rows after each expert's rows are padded to a multiple."""

    expert_R: Tensor  # int64 expert of each row; e for rows past the last one in use
    position_R: Tensor  # int64 row in P; P for rows past the last one in use
    offsets_e: Tensor  # int32 running sum of the padded counts
    num_rows: int  # P


def pad_rows(
    offsets_e: Tensor, num_rows: int, row_multiple: int = ALIGNED, *, min_rows: int = 1
) -> PaddedRows:
    """Return the position of each expert row if rows per expert are padded to `row_multiple`."""
    # If `min_rows` is 1, each expert has at least `row_multiple` rows, because torch's product does
    # not write the output of an expert without rows. Example, 22 rows, experts of 3 and 17: offsets
    # 16, 48, position_R 0 to 2, 16 to 32, 64, 64.
    e = offsets_e.shape[0]
    counts_e = offsets_e.diff(prepend=offsets_e.new_zeros(1))
    padded_e = (counts_e.clamp(min=min_rows) + row_multiple - 1) // row_multiple * row_multiple
    ends_e = padded_e.cumsum(0, dtype=torch.int32)
    row_R = torch.arange(num_rows, device=offsets_e.device)
    expert_R = torch.searchsorted(offsets_e, row_R.int(), right=True)
    shift_e = (ends_e - padded_e) - (offsets_e - counts_e)
    length = cdiv(num_rows, row_multiple) * row_multiple + e * row_multiple
    position_R = row_R + shift_e[expert_R.clamp(max=e - 1)]
    return PaddedRows(expert_R, position_R.where(expert_R < e, length), ends_e, length)


def quantise_expert_rows_ref(
    x_RD: Tensor,
    offsets_e: Tensor,
    *,
    per_row: bool,
    power_of_two: bool,
    fp8_format: str = "e4m3",
    rowwise: bool = True,
    columnwise: bool = True,
    amax: Tensor | None = None,
    new_amax: Tensor | None = None,
) -> OperandPair:
    """Compute `quantise_expert_rows` in plain PyTorch; unused rows are zeros."""
    R, D = x_RD.shape
    layout = pad_rows(offsets_e, R)
    is_used = layout.expert_R < offsets_e.shape[0]
    x_RD = torch.where(is_used[:, None], x_RD.detach(), 0).float()
    if new_amax is not None and R:
        update_amax_ref_(x_RD, new_amax)
    if amax is not None:
        amax = amax.amax().reshape(1, 1)
    elif not per_row:
        amax = abs_without_nan_ref(x_RD).amax().reshape(1, 1) if R else x_RD.new_zeros(1, 1)
    of_rows = of_columns = None
    if rowwise:
        values, scales = quantise_ref(x_RD, -1, power_of_two, fp8_format, amax)
        of_rows = Blocks(values, scales.flatten().expand(R).contiguous(), "row")
    if columnwise:
        if amax is None:  # of each expert's columns; the last entry is of unused rows
            expert_RD = layout.expert_R[:, None].expand_as(x_RD)
            none_eD = x_RD.new_zeros(offsets_e.shape[0] + 1, D)
            amax = none_eD.scatter_reduce_(0, expert_RD, abs_without_nan_ref(x_RD), "amax")
        amax_eD = amax.expand(offsets_e.shape[0] + 1, D).contiguous()
        largest = LARGEST[fp8_format]
        scales_eD, inverse_eD = compute_block_scale_ref(amax_eD, power_of_two, largest)
        values_RD = encode_fp8_ref(x_RD, inverse_eD[layout.expert_R], fp8_format)
        values_PD = x_RD.new_zeros(layout.num_rows + 1, D, dtype=torch.uint8)
        values_PD.index_copy_(0, layout.position_R, values_RD.view(torch.uint8))
        values_DP = values_PD[:-1].T.contiguous().view(DTYPES[fp8_format])
        of_columns = Blocks(values_DP, scales_eD[:-1].contiguous(), "row")
    return OperandPair(of_rows, of_columns)


def compute_row_amax(x_RD: Tensor, offsets_e: Tensor, past_amax: Tensor) -> Tensor:
    """Return fp32 [n], whose largest entry gives the FP8 scale of all expert rows. No host sync.

    If `past_amax`, fp32 [1], of earlier steps is not 0, all entries are `past_amax`.
    """
    if has_cast_kernel(x_RD):
        x_RD = x_RD if x_RD.stride(1) == 1 else x_RD.contiguous()
        return compute_amax_parts(x_RD, offsets_e, past_amax)
    is_used = torch.arange(len(x_RD), device=x_RD.device) < offsets_e[-1]
    amax = compute_amax_ref(torch.where(is_used[:, None], x_RD.detach(), 0))
    return choose_amax_ref(past_amax, amax)


def quantise_expert_matrices_ref(
    w: Tensor, *, per_row: bool, power_of_two: bool, rowwise: bool = True, columnwise: bool = True
) -> OperandPair:
    """Compute `quantise_expert_matrices` in plain PyTorch."""
    operands: list[Blocks | None] = []
    for is_requested, dim in ((rowwise, 2), (columnwise, 1)):
        operand = None
        if is_requested:
            values, scales = quantise_ref(w, dim if per_row else (1, 2), power_of_two)
            values = values if dim == 2 else values.transpose(1, 2).contiguous()
            scales = scales.flatten(1).expand(values.shape[:2]).contiguous()
            operand = Blocks(values, scales, "row")
        operands.append(operand)
    return OperandPair(*operands)


@triton.jit(do_not_specialize=["num_experts"])
def pad_offsets_kernel(
    offsets_ptr, padded_offsets_ptr, num_experts, E_POW2: tl.constexpr, MULTIPLE: tl.constexpr
):
    """Write the running sum of row counts, each padded to a positive multiple of MULTIPLE."""
    experts = tl.arange(0, E_POW2)
    starts, ends, exists = load_expert_ranges(offsets_ptr, num_experts, E_POW2)
    sizes = tl.cdiv(tl.maximum(ends - starts, 1), MULTIPLE) * MULTIPLE
    sizes = tl.cumsum(tl.where(exists, sizes, 0), 0)
    tl.store(padded_offsets_ptr + experts, sizes, mask=exists)


@triton.jit(do_not_specialize=["num_experts", "N"])
def quantise_experts_kernel(
    x_ptr,  # [R, D] or [e, N, D], rows `row_stride` apart
    offsets_ptr,  # [e] int32; None = N rows each
    padded_offsets_ptr,  # [e] int32, from `pad_offsets`; None = P each
    amax_ptr,  # fp32: PARTS = 0 as in `amax_kernel`; else [PARTS], or [e, PARTS]
    new_amax_ptr,  # fp32 [1]: grows to the largest finite magnitude, in and out; None = it does not
    rows_ptr,  # FP8, of x's shape, out; None = not this operand
    row_scales_ptr,  # fp32, one for each of them, out
    columns_ptr,  # FP8 [D, P] or [e, D, N], out; None = not this operand
    column_scales_ptr,  # fp32 [e, D], out
    num_experts,
    N,
    R,
    D,
    row_stride,
    P,  # length of the columns
    PARTS: tl.constexpr,
    HAS_AMAX: tl.constexpr,  # the amax is of other rows
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    E_POW2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Quantise one tile of an expert to FP8; store it in rows_ptr, transposed in columns_ptr."""
    width = tl.cdiv(D, BLOCK)
    tile = tl.program_id(0) // width
    expert, start, end, first = locate_row_tile(tile, offsets_ptr, num_experts, N, E_POW2, BLOCK)
    if expert < num_experts:
        lane = tl.arange(0, BLOCK)
        row = start + first + lane
        column_tile = tl.program_id(0) % width
        d = column_tile * BLOCK + lane
        is_row, is_column = row < end, d < D
        inside = is_row[:, None] & is_column[None, :]
        x = tl.load(x_ptr + row[:, None] * row_stride + d[None, :], mask=inside, other=0.0)
        x = x.to(tl.float32)
        x = record_amax(x, new_amax_ptr, HAS_AMAX)
        if PARTS:
            of_all = amax_ptr
            if offsets_ptr is None:
                of_all += expert * PARTS
            amax = tl.zeros((BLOCK,), tl.float32) + load_amax(of_all, PARTS)
            scale, inverse = compute_block_scale(amax, POWER_OF_TWO, E5M2)
        if rows_ptr is not None:
            if not PARTS:
                amax = tl.load(amax_ptr + row, mask=is_row, other=0.0)
                scale, inverse = compute_block_scale(amax, POWER_OF_TWO, E5M2)
            tl.store(row_scales_ptr + row, scale, mask=is_row & (column_tile == 0))
            value = to_fp8(x * inverse[:, None], rows_ptr, E5M2)
            tl.store(rows_ptr + row[:, None] * D + d[None, :], value, mask=inside)
        if columns_ptr is not None:
            if not PARTS:
                of_columns = amax_ptr + expert * D + d
                if rows_ptr is not None:
                    of_columns += R
                amax = tl.load(of_columns, mask=is_column, other=0.0)
                scale, inverse = compute_block_scale(amax, POWER_OF_TWO, E5M2)
            tl.store(column_scales_ptr + expert * D + d, scale, mask=is_column & (first == 0))
            quotient = tl.where(is_row[:, None], x * inverse[None, :], 0.0)
            value = tl.trans(to_fp8(quotient, columns_ptr, E5M2))
            if padded_offsets_ptr is None:
                to, place, stop = columns_ptr + expert * D * P, first + lane, P
            else:
                before = tl.load(padded_offsets_ptr + expert - 1, mask=expert > 0, other=0)
                # so that the compiler writes 16 bytes at a time
                to, place = columns_ptr, tl.multiple_of(before, 16) + first + lane
                stop = tl.multiple_of(tl.load(padded_offsets_ptr + expert), 16)
            at = to + d.to(tl.int64)[:, None] * P + place[None, :]
            tl.store(at, value, mask=is_column[:, None] & (place < stop)[None, :])


def pad_offsets(offsets_e: Tensor) -> Tensor:
    """Return int32 [e], the running sum of row counts, each padded to a positive multiple of 16."""
    if not can_use_kernel(offsets_e):
        return pad_rows(offsets_e, 0).offsets_e
    padded_e, e = torch.empty_like(offsets_e), offsets_e.shape[0]
    e_pow2 = next_power_of_2(e)
    launch(pad_offsets_kernel, 1, offsets_e, padded_e, e, E_POW2=e_pow2, MULTIPLE=ALIGNED)
    return padded_e


class _ScaledInput(NamedTuple):
    """Expert rows or experts' matrices to quantise, with their offsets and FP8 format."""

    x: Tensor  # [R, D] or [e, N, D]
    offsets_e: Tensor | None  # of rows; None = matrices
    padded_e: Tensor | None  # from `pad_offsets`; None = matrices, or no columns
    num_experts: int
    per_row: bool
    power_of_two: bool
    fp8_format: str = "e4m3"

    def fill(self, out: OperandPair, amax: Tensor | None, new_amax: Tensor | None) -> OperandPair:
        """Quantise by kernels into `out` and return it; amax as in `quantise_expert_rows`."""
        x, offsets_e, e = self.x, self.offsets_e, self.num_experts
        formats = dict(E5M2=self.fp8_format == "e5m2", POWER_OF_TWO=self.power_of_two)
        outputs = [t for side in out for t in get_values_and_scales(side)]
        if INTERPRET:
            outputs = [view_as_bytes(t) for t in outputs]
        (N, D), R, stride = x.shape[-2:], x.shape[:-1].numel(), x.stride(-2)
        if self.per_row and out.columns is None and amax is None and new_amax is None:
            launch_cast_rows(x, offsets_e, outputs[0], outputs[1], R, D, stride, e, **formats)
            return out
        tiles = cdiv(R, BLOCK) + e if offsets_e is not None else e * cdiv(N, BLOCK)
        grid, sizes = tiles * cdiv(D, BLOCK), (e, N, R, D, stride)
        shared = dict(E_POW2=next_power_of_2(e), BLOCK=BLOCK, num_warps=NUM_WARPS)
        has_amax, parts = amax is not None, 0
        if amax is None and self.per_row:
            has_rows = out.rows is not None
            amax = torch.zeros(R * has_rows + e * D, device=x.device, dtype=torch.float32)
            launch(amax_kernel, grid, x, offsets_e, amax, *sizes, ROWS=has_rows, **shared)
        else:
            amax = compute_amax_parts(x, offsets_e) if amax is None else amax
            parts = amax.shape[-1]
        P = 0 if out.columns is None else out.columns.values.shape[-1]
        args = (x, offsets_e, self.padded_e, amax, new_amax, *outputs, *sizes, P)
        constants = dict(PARTS=parts, HAS_AMAX=has_amax, **formats, **shared)
        launch(quantise_experts_kernel, grid, *args, **constants)
        return out


def _make_empty_blocks(
    x: Tensor, fp8_format: str, values_shape: tuple[int, ...], scales_shape: tuple[int, ...]
) -> Blocks:
    """Return an uninitialised FP8 operand, a scale per row, with tensors of these shapes."""
    values = torch.empty(values_shape, dtype=DTYPES[fp8_format], device=x.device)
    return Blocks(values, torch.empty(scales_shape, dtype=torch.float32, device=x.device), "row")


def quantise_expert_rows(
    x_RD: Tensor,
    offsets_e: Tensor,
    padded_e: Tensor | None,
    *,
    per_row: bool,
    power_of_two: bool,
    fp8_format: str = "e4m3",
    rowwise: bool = True,
    columnwise: bool = True,
    amax: Tensor | None = None,
    new_amax: Tensor | None = None,
) -> OperandPair:
    """Quantise expert rows to FP8 matmul operands, one or both layouts. No autograd, no host sync.

    Args:
        x_RD: bf16, fp16 or fp32; D a multiple of 16. Rows past the last expert's are not read, and
            are uninitialised in the result.
        offsets_e: int32, the running sum of the experts' row counts.
        padded_e: from `pad_offsets`; None without `columnwise`.
        per_row: whether each row has a scale; otherwise all expert rows have one.
        fp8_format: "e4m3" or "e5m2".
        rowwise: whether to make [R, D] with scales [R], for sums over D.
        columnwise: whether to make the transpose [D, padded rows] with scales [experts, D], for
            sums over an expert's rows. Columns from padded_e[-1] on are uninitialised.
        amax: fp32 [n], whose largest entry gives all scales (larger values saturate); None = of x.
        new_amax: fp32 [1], raised in place to the largest finite magnitude; None = not recorded.
    """
    if not has_cast_kernel(x_RD):
        scales: Any = dict(per_row=per_row, power_of_two=power_of_two, fp8_format=fp8_format)
        layouts: Any = dict(rowwise=rowwise, columnwise=columnwise, amax=amax, new_amax=new_amax)
        return quantise_expert_rows_ref(x_RD, offsets_e, **scales, **layouts)
    x_RD = x_RD if x_RD.stride(1) == 1 else x_RD.contiguous()
    (R, D), e = x_RD.shape, offsets_e.shape[0]
    length = cdiv(R, ALIGNED) * ALIGNED + e * ALIGNED
    out = OperandPair(
        _make_empty_blocks(x_RD, fp8_format, (R, D), (R,)) if rowwise else None,
        _make_empty_blocks(x_RD, fp8_format, (D, length), (e, D)) if columnwise else None,
    )
    source = _ScaledInput(x_RD, offsets_e, padded_e, e, per_row, power_of_two, fp8_format)
    return source.fill(out, amax, new_amax)


def quantise_expert_matrices(
    w: Tensor, *, per_row: bool, power_of_two: bool, rowwise: bool = True, columnwise: bool = True
) -> OperandPair:
    """Quantise each expert's matrix to E4M3, with one scale per row or one per matrix.

    `w` is bf16, fp16 or fp32 [experts, N, D]; N and D are multiples of 16. `rowwise` requests [e,
    N, D] with scales [e, N], `columnwise` the transpose [e, D, N] with scales [e, D]. No host sync.
    """
    w = w.detach().contiguous()
    if not has_cast_kernel(w):
        return quantise_expert_matrices_ref(
            w, per_row=per_row, power_of_two=power_of_two, rowwise=rowwise, columnwise=columnwise
        )
    e, N, D = w.shape
    out = OperandPair(
        _make_empty_blocks(w, "e4m3", (e, N, D), (e, N)) if rowwise else None,
        _make_empty_blocks(w, "e4m3", (e, D, N), (e, D)) if columnwise else None,
    )
    return _ScaledInput(w, None, None, e, per_row, power_of_two).fill(out, None, None)
