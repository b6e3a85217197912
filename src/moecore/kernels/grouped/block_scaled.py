"""Grouped products of block-scaled operands, MXFP8 and NVFP4, on tensor cores that multiply scales.

    block_scaled_gemm    out[r] = scale[i] * a[r] @ b[i]^T                    i = expert of row r
    block_scaled_wgrad   out[i] = scale[i] * sum over rows r of i of x[r]^T y[r]

`rows/microscaled.py` packs the operands as bytes with a scale per block of the summed dim: E4M3
with E8M0 per 32, or two codes of E2M1 in a byte with E4M3 per 16. For E2M1 scale[i] is the product
of the fp32 scales of both tensors, otherwise 1. `tl.dot_scaled` is one instruction on Blackwell,
tcgen05.mma or mma.sync with block_scale. Older GPUs multiply widened operands in bf16. Sums are
fp32. On compute capability 10.0 torch multiplies MXFP8 (`torch_mxfp8.py`), whose output is bf16.
No Blackwell GPU has run these kernels: tests compile and interpret them, and run them on
older GPUs, where `experts/quantised_products.py` computes the same numbers.

Letters: R expert rows (length), e experts, M and N rows of an output, K the summed dim, P elements
of a byte, B elements of a scale, W rows with each expert's padded to full blocks. Grids are
persistent as in `gemm.py`. Bytes that `block_scaled_gemm` moves at least: (R + e * N) * K * (1 / P
+ 1 / B) + 2 * R * N; 2 * R * N * K floating-point operations.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from moecore.base.options.precision import Recipe
from moecore.kernels.common import count_sms, has_torch_mxfp8, launch, next_power_of_2
from moecore.kernels.grouped.torch_mxfp8 import mxfp8_gemm, mxfp8_wgrad
from moecore.kernels.grouped.wgrad import scale_and_store_grad
from moecore.kernels.rows.e4m3 import FP8
from moecore.kernels.rows.microscaled_kernel import compute_nvfp4_tensor_scale
from moecore.kernels.rows.row_tiles import count_row_tiles, locate_tile
from moecore.kernels.rows.scaling import Blocks
from moecore.kernels.triton_api import tl, triton

NUM_WARPS = 8
BYTES_K = 128  # of one step along the summed dim


class BlockScaledConstants(NamedTuple):
    """Compile-time constants of both kernels: tile sizes, and the MXFP8 or NVFP4 format."""

    FORMAT: str  # "e4m3" or "e2m1"
    POWER_OF_TWO: bool  # whether scales of tensors are powers of two
    P: int  # elements of a byte
    B: int  # elements of a scale along the summed dim
    BLOCK_K: int  # BYTES_K in elements
    # 128 rows are one instruction's. With 128 columns registers spill on sm_120. Not measured.
    BLOCK_M: int = 128
    BLOCK_N: int = 64
    GROUP_M: int = 8  # row tiles that share a matrix in L2
    STAGES: int = 4


@triton.jit
def _load_operand(
    values_ptr,  # [rows, K / P] e4m3, or uint8 with two e2m1
    scales_ptr,  # [rows / ROWS, K / B] uint8 with e8m0, or e4m3
    rows,  # int64
    row_mask,  # bool, of each row
    k_start,  # first of BLOCK_K elements of K, a multiple of B
    k_end,  # elements of K from there on are 0
    K,
    ROWS: tl.constexpr,  # rows of a scale
    CONST: tl.constexpr,  # BlockScaledConstants
):
    """Return packed values [rows, BLOCK_K / P] and block scales [rows, BLOCK_K / B]."""
    P: tl.constexpr = CONST.P
    B: tl.constexpr = CONST.B
    BLOCK_K: tl.constexpr = CONST.BLOCK_K
    k = k_start // P + tl.arange(0, BLOCK_K // P)
    block = k_start // B + tl.arange(0, BLOCK_K // B)
    inside = row_mask[:, None] & (k < k_end // P)[None, :]
    values = tl.load(values_ptr + rows[:, None] * (K // P) + k[None, :], mask=inside, other=0.0)
    # A scale of what is masked multiplies zeros; its byte 0 is no NaN of either format.
    inside = row_mask[:, None] & (block < k_end // B)[None, :]
    at = scales_ptr + (rows // ROWS)[:, None] * (K // B) + block[None, :]
    return values, tl.load(at, mask=inside, other=0.0)


@triton.jit
def _load_tensor_scales(a_amax_ptr, b_amax_ptr, expert, POWER_OF_TWO: tl.constexpr):
    """Return the product of two NVFP4 tensors' fp32 scales, from amax; 1 if a_amax_ptr is None."""
    scale = 1.0
    if a_amax_ptr is not None:
        a_scale = compute_nvfp4_tensor_scale(tl.load(a_amax_ptr + expert), POWER_OF_TWO)
        scale = a_scale * compute_nvfp4_tensor_scale(tl.load(b_amax_ptr + expert), POWER_OF_TWO)
    return scale


@triton.jit(do_not_specialize=["num_experts"])
def block_scaled_grouped_gemm_kernel(
    a_ptr,  # [R, K / P] e4m3, or uint8 with two e2m1
    a_scales_ptr,  # [R, K / B] uint8 with e8m0, or e4m3
    a_amax_ptr,  # fp32 [e] or more, largest magnitudes; None: no scales of tensors
    b_ptr,  # [e, N, K / P]
    b_scales_ptr,  # [e, N / B_ROWS, K / B]
    b_amax_ptr,  # fp32 [e], or None
    offsets_ptr,  # [e] int32
    out_ptr,  # [R, N], out; rows past the last offset stay as they are
    num_experts,
    N,
    K,
    B_ROWS: tl.constexpr,  # rows of a scale of b
    E_POW2: tl.constexpr,
    CONST: tl.constexpr,  # BlockScaledConstants
):
    """Write each expert row times its expert's matrix; persistent programs loop over tiles."""
    FORMAT: tl.constexpr = CONST.FORMAT
    BLOCK_M: tl.constexpr = CONST.BLOCK_M
    BLOCK_N: tl.constexpr = CONST.BLOCK_N
    row_tiles = count_row_tiles(offsets_ptr, num_experts, E_POW2, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), row_tiles[3] * num_n, tl.num_programs(0)):
        expert, row, n = locate_tile(tile, num_n, row_tiles, E_POW2, BLOCK_M, CONST.GROUP_M)
        rows = (row + tl.arange(0, BLOCK_M)).to(tl.int64)
        in_rows = rows < tl.load(offsets_ptr + expert)
        columns = n * BLOCK_N + tl.arange(0, BLOCK_N)
        in_columns = columns < N
        b_rows = expert.to(tl.int64) * N + columns
        out = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in tl.range(0, tl.cdiv(K, CONST.BLOCK_K), num_stages=CONST.STAGES):
            k = step * CONST.BLOCK_K
            a, sa = _load_operand(a_ptr, a_scales_ptr, rows, in_rows, k, K, K, 1, CONST)
            b, sb = _load_operand(b_ptr, b_scales_ptr, b_rows, in_columns, k, K, K, B_ROWS, CONST)
            out = tl.dot_scaled(a, sa, FORMAT, b.T, sb, FORMAT, out)
        out *= _load_tensor_scales(a_amax_ptr, b_amax_ptr, expert, CONST.POWER_OF_TWO)
        at = out_ptr + rows[:, None] * N + columns[None, :]
        tl.store(at, out.to(out_ptr.dtype.element_ty), mask=in_rows[:, None] & in_columns[None, :])


@triton.jit(do_not_specialize=["num_experts"])
def block_scaled_grouped_wgrad_kernel(
    x_ptr,  # [M, W / P] e4m3, or uint8 with two e2m1
    x_scales_ptr,  # [M, W / B] uint8 with e8m0, or e4m3
    x_amax_ptr,  # fp32 [e] or more, largest magnitudes; None: no scales of tensors
    y_ptr,  # [N, W / P]
    y_scales_ptr,  # [N, W / B]
    y_amax_ptr,  # fp32 [e] or more, or None
    offsets_ptr,  # [e] int32, multiples of B
    out_ptr,  # [e, M, N], out; in and out with ADD
    num_experts,
    M,
    N,
    W,
    scale,  # fp32, of every product
    ADD: tl.constexpr,
    CONST: tl.constexpr,  # BlockScaledConstants
):
    """Write each expert's weight gradient to out_ptr (or add, if ADD); 0 if it has no rows."""
    B: tl.constexpr = CONST.B
    FORMAT: tl.constexpr = CONST.FORMAT
    BLOCK_M: tl.constexpr = CONST.BLOCK_M
    BLOCK_N: tl.constexpr = CONST.BLOCK_N
    num_m, num_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    total = num_experts * num_m * num_n
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        expert = tile // (num_m * num_n)
        start = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
        end = tl.load(offsets_ptr + expert)
        # Known multiples let a thread read more than a byte at a time.
        start, end = tl.multiple_of(start, B), tl.multiple_of(end, B)
        rows = (tile // num_n % num_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        columns = (tile % num_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
        in_rows, in_columns = rows < M, columns < N
        out = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in tl.range(0, tl.cdiv(end - start, CONST.BLOCK_K), num_stages=CONST.STAGES):
            k = start + step * CONST.BLOCK_K
            x, sx = _load_operand(x_ptr, x_scales_ptr, rows, in_rows, k, end, W, 1, CONST)
            y, sy = _load_operand(y_ptr, y_scales_ptr, columns, in_columns, k, end, W, 1, CONST)
            out = tl.dot_scaled(x, sx, FORMAT, y.T, sy, FORMAT, out)
        out *= _load_tensor_scales(x_amax_ptr, y_amax_ptr, expert, CONST.POWER_OF_TWO) * scale
        at = out_ptr + (expert.to(tl.int64) * M + rows[:, None]) * N + columns[None, :]
        inside = in_rows[:, None] & in_columns[None, :]
        if ADD:
            out += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        tl.store(at, out.to(out_ptr.dtype.element_ty), mask=inside)


def _make_constants(operand: Blocks, recipe: Recipe) -> BlockScaledConstants:
    """Return the kernels' constants for an operand quantised by `recipe`."""
    fmt, P = ("e4m3", 1) if operand.values.dtype == FP8 else ("e2m1", 2)
    return BlockScaledConstants(fmt, recipe.power_of_two, P, recipe.weight_multiple, BYTES_K * P)


def block_scaled_gemm(
    a: Blocks, b: Blocks, offsets_e: Tensor, recipe: Recipe, dtype: torch.dtype
) -> Tensor:
    """Return each expert row times its expert's matrix, [R, N] in `dtype`. No autograd, no sync.

    `a` is packed by `quantise_microscaled` from R rows in expert order, and b [experts, N, K] by
    `quantise_microscaled_matrices`. offsets_e is the running sum of row counts; rows past
    offsets_e[-1] are uninitialised.
    """
    (R, bytes_K), (e, N, _) = a.values.shape, b.values.shape
    out_RN = a.values.new_empty(R, N, dtype=dtype)
    if not R:
        return out_RN
    if recipe.scaling == "mxfp8" and has_torch_mxfp8(a.values.device):
        return mxfp8_gemm(a, b, offsets_e).to(dtype)
    const = _make_constants(a, recipe)
    launch(
        block_scaled_grouped_gemm_kernel,
        count_sms(a.values.device),
        *(a.values, a.scales, a.amax, b.values, b.scales, b.amax, offsets_e, out_RN),
        *(e, N, bytes_K * const.P),
        B_ROWS=N // b.scales.shape[1],
        E_POW2=next_power_of_2(e),
        CONST=const,
        num_warps=NUM_WARPS,
    )
    return out_RN


def block_scaled_wgrad(
    x: Blocks,
    y: Blocks,
    offsets_e: Tensor,
    recipe: Recipe,
    *,
    out: Tensor | None = None,
    accumulate: bool = False,
    dtype: torch.dtype | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Return each expert's weight gradient x y^T over its columns, or `out`. No autograd, no sync.

    x [M, W] and y [N, W] are packed by `quantise_microscaled(over_rows=True, pack=True)`, each
    expert's rows padded with zeros to full blocks. offsets_e is the running sum of padded counts,
    at most W. Options are as in `grouped_wgrad`, but `dtype` None = fp32.
    """
    if recipe.scaling == "mxfp8" and has_torch_mxfp8(x.values.device):
        grad_eMN = mxfp8_wgrad(x, y, offsets_e)
        return scale_and_store_grad(grad_eMN, out, accumulate, dtype or torch.float32, scale)
    (M, bytes_W), N, e = x.values.shape, y.values.shape[0], offsets_e.shape[0]
    out = x.scales.new_empty(e, M, N, dtype=dtype or torch.float32) if out is None else out
    const = _make_constants(x, recipe)
    args = (
        *(x.values, x.scales, x.amax, y.values, y.scales, y.amax, offsets_e, out),
        *(e, M, N, bytes_W * const.P, scale),
    )
    grid = count_sms(x.values.device)
    constants = dict(ADD=accumulate, CONST=const, num_warps=NUM_WARPS)
    launch(block_scaled_grouped_wgrad_kernel, grid, *args, **constants)
    return out
