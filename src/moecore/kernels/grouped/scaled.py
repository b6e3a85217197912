"""Grouped products of FP8 operands with one scale per row of either.

    scaled_gemm    out[r] = a[r] @ b[expert(r)]^T
    scaled_wgrad   out[i] = sum over the rows r of expert i of  x[r]^T y[r]

`scaled_rows.py` makes the operands, of the kind "row". A scale belongs to all elements along the
summed dim, so the sum is multiplied by the scale at the end.

Torch's grouped product multiplies E4M3 by E4M3. If one operand is E5M2, the kernels
`mixed_format_gemm` and `mixed_format_wgrad` multiply. Tensor cores sum 128 products with fewer bits
than fp32, and these sums are added in fp32. The speed of the kernels was not measured.

Letters: R expert rows (length), e experts, K the summed dim, M and N rows of an output, P rows with
each expert's padded to a multiple of 16 (bytes, from which torch's product may read). The kernels'
grids are persistent as in `gemm.py`, whose order of tiles `mixed_format_gemm` has. Bytes moved at
least: each operand and the output once; 2 * R * N * K floating-point operations.
"""

import torch
from torch import Tensor

from moecore.base.torch_private import scaled_grouped_mm, skips_communication
from moecore.kernels.common import (
    can_use_kernel,
    count_sms,
    iterate_expert_slices,
    launch,
    next_power_of_2,
)
from moecore.kernels.rows.row_tiles import count_row_tiles, locate_tile
from moecore.kernels.rows.scaling import ALIGNED, Blocks
from moecore.kernels.triton_api import INTERPRET, tl, triton

PROGRAM = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 128, "STAGES": 4, "num_warps": 8}
SMALL = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32, "STAGES": 1, "num_warps": 4}  # interpreted
GROUP_M = 8  # row tiles that share a matrix in L2


@triton.jit
def _load_block(values_ptr, rows, row_mask, k_start, k_end, row_stride, BLOCK_K: tl.constexpr):
    """Return BLOCK_K columns of `rows` from k_start on; 0 from k_end on or if row_mask is False."""
    columns = k_start + tl.arange(0, BLOCK_K)
    mask = row_mask[:, None] & (columns < k_end)[None, :]
    return tl.load(values_ptr + rows[:, None] * row_stride + columns[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["num_experts"])
def mixed_grouped_gemm_kernel(
    a_ptr,  # [R, K] FP8
    a_scales_ptr,  # [R] fp32
    b_ptr,  # [e, N, K] FP8
    b_scales_ptr,  # [e, N] fp32
    offsets_ptr,  # [e] int32
    out_ptr,  # [R, N], out; rows past the last offset stay as they are
    num_experts,
    N,
    K,
    ALIGNED: tl.constexpr,  # of which K is a multiple
    E_POW2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write each FP8 expert row times its expert's matrix to out_ptr (persistent programs)."""
    K = K // ALIGNED * ALIGNED  # now the compiler knows, and reads 16 bytes
    row_tiles = count_row_tiles(offsets_ptr, num_experts, E_POW2, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), row_tiles[3] * num_n, tl.num_programs(0)):
        expert, row, n = locate_tile(tile, num_n, row_tiles, E_POW2, BLOCK_M, GROUP)
        rows = (row + tl.arange(0, BLOCK_M)).to(tl.int64)
        in_rows = rows < tl.load(offsets_ptr + expert)
        columns = n * BLOCK_N + tl.arange(0, BLOCK_N)
        in_columns = columns < N
        b_rows = expert.to(tl.int64) * N + columns
        out = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in tl.range(0, tl.cdiv(K, BLOCK_K), num_stages=STAGES):
            a = _load_block(a_ptr, rows, in_rows, step * BLOCK_K, K, K, BLOCK_K)
            b = _load_block(b_ptr, b_rows, in_columns, step * BLOCK_K, K, K, BLOCK_K)
            out = tl.dot(a, b.T, out, max_num_imprecise_acc=BLOCK_K)
        a_scales = tl.load(a_scales_ptr + rows, mask=in_rows, other=0.0)
        out *= a_scales[:, None]
        out *= tl.load(b_scales_ptr + b_rows, mask=in_columns, other=0.0)[None, :]
        at = out_ptr + rows[:, None] * N + columns[None, :]
        tl.store(at, out.to(out_ptr.dtype.element_ty), mask=in_rows[:, None] & in_columns[None, :])


@triton.jit(do_not_specialize=["num_experts"])
def mixed_grouped_wgrad_kernel(
    x_ptr,  # [M, P] FP8
    x_scales_ptr,  # [e, M] fp32
    y_ptr,  # [N, P] FP8
    y_scales_ptr,  # [e, N] fp32
    offsets_ptr,  # [e] int32, multiples of ALIGNED
    out_ptr,  # [e, M, N], out
    num_experts,
    M,
    N,
    P,
    ALIGNED: tl.constexpr,  # of which P is a multiple, too
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write each expert's weight gradient x y^T of transposed FP8 rows; 0 for no rows."""
    P = P // ALIGNED * ALIGNED
    num_m, num_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    total = num_experts * num_m * num_n
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        expert = tile // (num_m * num_n)
        start = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
        end = tl.load(offsets_ptr + expert)
        start, end = tl.multiple_of(start, ALIGNED), tl.multiple_of(end, ALIGNED)
        rows = (tile // num_n % num_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        columns = (tile % num_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
        in_rows, in_columns = rows < M, columns < N
        out = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in tl.range(0, tl.cdiv(end - start, BLOCK_K), num_stages=STAGES):
            x = _load_block(x_ptr, rows, in_rows, start + step * BLOCK_K, end, P, BLOCK_K)
            y = _load_block(y_ptr, columns, in_columns, start + step * BLOCK_K, end, P, BLOCK_K)
            out = tl.dot(x, y.T, out, max_num_imprecise_acc=BLOCK_K)
        out *= tl.load(x_scales_ptr + expert * M + rows, mask=in_rows, other=0.0)[:, None]
        out *= tl.load(y_scales_ptr + expert * N + columns, mask=in_columns, other=0.0)[None, :]
        at = out_ptr + (expert.to(tl.int64) * M + rows[:, None]) * N + columns[None, :]
        tl.store(at, out.to(out_ptr.dtype.element_ty), mask=in_rows[:, None] & in_columns[None, :])


def mixed_format_gemm(a: Blocks, b: Blocks, offsets_e: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute `scaled_gemm` by a Triton kernel; the FP8 formats of `a` and `b` may differ."""
    (R, K), (e, N, _) = a.values.shape, b.values.shape
    out_RN = a.values.new_empty(R, N, dtype=dtype)
    args = (a.values, a.scales, b.values, b.scales, offsets_e, out_RN, e, N, K)
    grid = count_sms(a.values.device)
    constants = dict(
        ALIGNED=ALIGNED, E_POW2=next_power_of_2(e), GROUP=GROUP_M, **SMALL if INTERPRET else PROGRAM
    )
    launch(mixed_grouped_gemm_kernel, grid, *args, **constants)
    return out_RN


def mixed_format_wgrad(x: Blocks, y: Blocks, offsets_e: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute `scaled_wgrad` by a Triton kernel; the FP8 formats of x and y may differ."""
    (M, P), N, e = x.values.shape, y.values.shape[0], offsets_e.shape[0]
    out_eMN = x.values.new_empty(e, M, N, dtype=dtype)
    args = (x.values, x.scales, y.values, y.scales, offsets_e, out_eMN, e, M, N, P)
    grid = count_sms(x.values.device)
    constants = dict(ALIGNED=ALIGNED, **SMALL if INTERPRET else PROGRAM)
    launch(mixed_grouped_wgrad_kernel, grid, *args, **constants)
    return out_eMN


def _has_mixed_formats(a: Blocks, b: Blocks) -> bool:
    """Return whether one operand is E4M3 and one E5M2, which torch's matmul does not support."""
    return a.values.dtype != b.values.dtype


def _uses_reference(a: Blocks, b: Blocks) -> bool:
    """Return whether the references multiply: on a CPU, where torch has no grouped FP8 matmul."""
    has_kernel = _has_mixed_formats(a, b) and can_use_kernel(b.values)
    return b.values.device.type == "cpu" and not has_kernel


def scaled_gemm_ref(a: Blocks, b: Blocks, offsets_e: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute `scaled_gemm` in plain PyTorch; rows past offsets_e[-1] are 0. Host sync."""
    shape = (a.values.shape[0], b.values.shape[1])
    out_RN = torch.zeros(shape, device=b.values.device, dtype=torch.float32)
    for i, rows in enumerate(iterate_expert_slices(offsets_e)):
        product = a.values[rows].float() @ b.values[i].float().T
        out_RN[rows] = product * a.scales[rows, None] * b.scales[i]
    return out_RN.to(dtype)


def scaled_gemm(a: Blocks, b: Blocks, offsets_e: Tensor, dtype: torch.dtype) -> Tensor:
    """Return each expert row times its expert's matrix, [R, N]. No autograd; no sync on a GPU.

    `a` [R, K] is in expert order, and b is [experts, N, K], both FP8 with a scale per row; K and N
    are multiples of 16. `dtype` is bf16 on a GPU. Rows past offsets_e[-1] are uninitialised.
    """
    if _uses_reference(a, b):
        return scaled_gemm_ref(a, b, offsets_e, dtype)
    R, b_eKN = a.values.shape[0], b.values.transpose(1, 2)
    if not R or skips_communication(b_eKN):
        return b_eKN.new_empty(R, b_eKN.shape[2], dtype=dtype)
    if _has_mixed_formats(a, b):
        return mixed_format_gemm(a, b, offsets_e, dtype)
    scales = (a.scales, b.scales)
    return scaled_grouped_mm(a.values, b_eKN, *scales, offs=offsets_e, out_dtype=dtype)  # type: ignore[no-any-return]


def scaled_wgrad_ref(x: Blocks, y: Blocks, offsets_e: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute `scaled_wgrad` in plain PyTorch. Host sync."""
    out = []
    for i, rows in enumerate(iterate_expert_slices(offsets_e)):
        product = x.values[:, rows].float() @ y.values[:, rows].float().T
        out.append(product * x.scales[i, :, None] * y.scales[i])
    return torch.stack(out).to(dtype)


def scaled_wgrad(x: Blocks, y: Blocks, offsets_e: Tensor, dtype: torch.dtype) -> Tensor:
    """Return each expert's weight gradient x y^T over its columns, [experts, M, N]; 0 without rows.

    x [M, P] and y [N, P] are `columns` of `quantise_expert_rows`, and `offsets_e` the running sum
    of padded row counts, at most P. `dtype` is bf16 on a GPU. No autograd; no host sync on a GPU.
    """
    if _uses_reference(x, y):
        return scaled_wgrad_ref(x, y, offsets_e, dtype)
    if skips_communication(x.values):
        return x.values.new_empty(*x.scales.shape, y.scales.shape[1], dtype=dtype)
    if _has_mixed_formats(x, y):
        return mixed_format_wgrad(x, y, offsets_e, dtype)
    scales = (x.scales.flatten(), y.scales.flatten())
    return scaled_grouped_mm(x.values, y.values.T, *scales, offs=offsets_e, out_dtype=dtype)  # type: ignore[no-any-return]
