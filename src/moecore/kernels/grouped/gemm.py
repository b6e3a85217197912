"""Grouped matrix products over expert rows: plain, and FC1 with the activation in its epilogue.

    grouped_gemm:            out[r] = a[row(r)] @ b[expert(r)]
    grouped_gemm_activation: h[r] = x[row(r)] @ w1[expert(r)]^T,  a[r] = act(h[r]) * weight[r]

row(r) is row_ids[r] if the rows are gathered while they are loaded, otherwise r.

Letters: R expert rows (length), S source rows, e experts, M N K the sizes of one product
(M rows of an expert), D model dim, F hidden dim, C = 2F columns of a gated FC1.

One persistent program per multiprocessor computes tiles of BLOCK_M x BLOCK_N, in the order of
`rows/row_tiles.py`. TMA loads weights and contiguous rows, asynchronous copies load gathered rows.
Bytes moved at least: R * K + e * N * K + R * N elements; 2 * R * N * K floating-point operations.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from moecore.kernels.common import count_sms, launch, next_power_of_2
from moecore.kernels.prepared import make_descriptor
from moecore.kernels.rows.activation import ActivationOptions
from moecore.kernels.rows.activation_kernel import activate
from moecore.kernels.rows.row_tiles import count_row_tiles, locate_tile
from moecore.kernels.triton_api import INTERPRET, tl, triton


class TileConfig(NamedTuple):
    """Tile sizes, pipeline stages and warps of a Triton kernel for grouped matrix products."""

    BLOCK_M: int = 128
    BLOCK_N: int = 256
    BLOCK_K: int = 64  # of a step along K
    GROUP_M: int = 8  # row tiles that share weights in L2
    STAGES: int = 3  # steps in flight
    NUM_WARPS: int = 8
    # let the next tile's loads start under this tile's epilogue. It slows down gathered rows, whose
    # addresses would be computed inside the flattened loop
    FLATTEN: bool = False
    # 1 or 2; columns are rounded and stored in this many parts, which share one staging buffer in
    # shared memory
    PARTS: int = 1


# H200: docs/findings.md#grouped-gemm-tiles. The interpreter wants few, small tiles.
CONTIGUOUS = TileConfig(FLATTEN=True, PARTS=2)
GATHER = TileConfig()
# Few columns: a product reads its rows, and does little else. Not measured.
NARROW = TileConfig(BLOCK_N=64, STAGES=4, NUM_WARPS=4, FLATTEN=True)
NARROW_GATHER = NARROW._replace(FLATTEN=False)
WIDE = TileConfig(BLOCK_N=128, STAGES=2, PARTS=2)  # a short sum, and the old output; or fp32
SMALL = TileConfig(BLOCK_M=16, BLOCK_N=32, BLOCK_K=16, GROUP_M=2, NUM_WARPS=4)


@triton.jit
def _store_tile(
    out_ptr, tile, rows, row_mask, first_column, num_columns, row_stride, ADD: tl.constexpr = False
):
    """Store `tile` at `rows` and at columns from `first_column` on, or with ADD add it in fp32."""
    columns = first_column + tl.arange(0, tile.shape[1])
    mask = row_mask[:, None] & (columns < num_columns)[None, :]
    at = out_ptr + rows[:, None] * row_stride + columns[None, :]
    if ADD:
        tile = tile.to(tl.float32) + tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, tile.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_experts"])
def _grouped_gemm_fwd_kernel(
    a_ptr,  # [S or R, K]
    a_desc,  # the same as blocks [BLOCK_M, BLOCK_K]; unused with GATHER
    b_desc,  # [e * N, K] as blocks [BLOCK_N, BLOCK_K], or [e * K, N] as [BLOCK_K, BLOCK_N]
    row_ids_ptr,  # [R] int32; unused without GATHER
    offsets_ptr,  # [e] int32
    out_ptr,  # [R, N]; rows past the last offset stay as they are, all are added to with ADD
    num_experts,
    N,
    K,
    GATHER: tl.constexpr,
    ADD: tl.constexpr,
    B_IS_NK: tl.constexpr,
    E_POW2: tl.constexpr,
    TILE: tl.constexpr,  # TileConfig
):
    """Write each expert row of a times its expert's matrix b, [rows, N], to out_ptr."""
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    N = N // 8 * 8  # they are multiples of 8 already; now the compiler knows, and uses 16 bytes
    K = K // 8 * 8
    row_tiles = count_row_tiles(offsets_ptr, num_experts, E_POW2, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    num_k = tl.cdiv(K, BLOCK_K)
    steps = tl.arange(0, BLOCK_K)
    program, num_tiles = tl.program_id(0), row_tiles[3] * num_n
    for tile in tl.range(program, num_tiles, tl.num_programs(0), flatten=TILE.FLATTEN):
        expert, row, n = locate_tile(tile, num_n, row_tiles, E_POW2, BLOCK_M, TILE.GROUP_M)
        rows = row + tl.arange(0, BLOCK_M)
        in_rows = rows < tl.load(offsets_ptr + expert)
        column = n * BLOCK_N
        if GATHER:
            source = tl.load(row_ids_ptr + rows, mask=in_rows, other=0).to(tl.int64)
            a_rows = a_ptr + source[:, None] * K + steps[None, :]
        total_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in tl.range(0, num_k, num_stages=TILE.STAGES):
            k = step * BLOCK_K
            # Past K, a is 0 in every layout, so that what b reads there (the next expert) is lost.
            if GATHER:
                a = tl.load(a_rows + k, mask=(k + steps < K)[None, :], other=0.0)
            else:
                a = a_desc.load([row, k])
            if B_IS_NK:
                b = b_desc.load([expert * N + column, k]).T
            else:
                b = b_desc.load([expert * K + k, column])
            total_MN = tl.dot(a, b, total_MN)
        out = total_MN if ADD else total_MN.to(out_ptr.dtype.element_ty)
        rows = rows.to(tl.int64)
        if TILE.PARTS == 1:
            _store_tile(out_ptr, out, rows, in_rows, column, N, N, ADD)
        else:
            halves = tl.permute(tl.reshape(out, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
            lower, upper = tl.split(halves)
            _store_tile(out_ptr, lower, rows, in_rows, column, N, N, ADD)
            _store_tile(out_ptr, upper, rows, in_rows, column + BLOCK_N // 2, N, N, ADD)


@triton.jit(do_not_specialize=["num_experts"])
def _grouped_gemm_activation_fwd_kernel(
    x_ptr,  # [S, D]
    w1_desc,  # [2e, F, D], gate and up of each expert in turn, as blocks [2, BLOCK_F, BLOCK_K]
    row_ids_ptr,  # [R] int32
    weights_ptr,  # [R] fp32
    offsets_ptr,  # [e] int32
    h_ptr,  # [R, 2F], out; rows past the last offset stay as they are
    a_ptr,  # [R, F], out; likewise
    num_experts,
    F,
    D,
    ACT: tl.constexpr,  # ActivationConstants
    E_POW2: tl.constexpr,
    TILE: tl.constexpr,  # TileConfig
):
    """Write h = x @ w1^T of gathered rows of x, and act(h) * weight, tile by tile."""
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_F: tl.constexpr = TILE.BLOCK_N // 2
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    F = F // 8 * 8  # as above
    D = D // 8 * 8
    row_tiles = count_row_tiles(offsets_ptr, num_experts, E_POW2, BLOCK_M)
    num_n = tl.cdiv(F, BLOCK_F)
    num_k = tl.cdiv(D, BLOCK_K)
    steps = tl.arange(0, BLOCK_K)
    for tile in tl.range(tl.program_id(0), row_tiles[3] * num_n, tl.num_programs(0)):
        expert, row, n = locate_tile(tile, num_n, row_tiles, E_POW2, BLOCK_M, TILE.GROUP_M)
        rows = row + tl.arange(0, BLOCK_M)
        in_rows = rows < tl.load(offsets_ptr + expert)
        column = n * BLOCK_F
        source = tl.load(row_ids_ptr + rows, mask=in_rows, other=0).to(tl.int64)
        x_rows = x_ptr + source[:, None] * D + steps[None, :]
        total_MC = tl.zeros((BLOCK_M, 2 * BLOCK_F), tl.float32)
        for step in tl.range(0, num_k, num_stages=TILE.STAGES):
            k = step * BLOCK_K
            x = tl.load(x_rows + k, mask=(k + steps < D)[None, :], other=0.0)
            # One product for gate and up: twice as wide reads x half as often.
            w1 = w1_desc.load([2 * expert, column, k]).reshape(2 * BLOCK_F, BLOCK_K)
            total_MC = tl.dot(x, w1.T, total_MC)
        h = total_MC.to(h_ptr.dtype.element_ty)
        gate, up = tl.split(tl.permute(tl.reshape(h, (BLOCK_M, 2, BLOCK_F)), (0, 2, 1)))
        # The activation reads h as it is stored: the backward recomputes it from there.
        a = activate(gate.to(tl.float32), up.to(tl.float32), ACT)
        a = a * tl.load(weights_ptr + rows, mask=in_rows, other=0.0)[:, None]
        rows = rows.to(tl.int64)
        _store_tile(h_ptr, gate, rows, in_rows, column, F, 2 * F)
        _store_tile(h_ptr + F, up, rows, in_rows, column, F, 2 * F)
        _store_tile(a_ptr, a.to(a_ptr.dtype.element_ty), rows, in_rows, column, F, F)


def grouped_gemm(
    a: Tensor,
    b: Tensor,
    offsets_e: Tensor,
    *,
    row_ids_R: Tensor | None = None,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return each expert row times its expert's matrix. No autograd, no host sync.

    Args:
        a: [R, K] in expert order, or with `row_ids_R` token rows; bf16 or fp16, contiguous.
        b: [experts, K, N], the dtype of `a`; contiguous, or the transpose of a contiguous [e, N,
            K]. K and N are multiples of 8 (16 bytes, for TMA).
        offsets_e: int32 on the device, running sum of the experts' row counts, at most R.
        row_ids_R: int32, the row of `a` for each expert row; None = `a` is in expert order.
        out: [R, N], dtype of `a`, contiguous, added to in place; None = a new tensor.
        dtype: dtype of the result: fp32, or None for the dtype of `a`.

    Returns:
        [R, N], summed in fp32 and rounded once, or `out`. Rows past offsets_e[-1] are
        uninitialised, or 0 if N <= 64.
    """
    e, K, N = b.shape
    R = a.shape[0] if row_ids_R is None else row_ids_R.shape[0]
    gather, adds, narrow = row_ids_R is not None, out is not None, NARROW.BLOCK_N >= N
    if out is None:
        out = (a.new_zeros if narrow else a.new_empty)(R, N, dtype=dtype or a.dtype)
    if not R or not a.shape[0]:
        return out
    b_is_NK = b.stride(1) == 1
    flat = (b.transpose(1, 2) if b_is_NK else b).reshape(-1, K if b_is_NK else N)
    c = SMALL if INTERPRET else _choose_config(gather, narrow, adds or out.dtype != a.dtype)
    a_desc = a if gather else make_descriptor(a, (c.BLOCK_M, c.BLOCK_K))
    b_desc = make_descriptor(flat, (c.BLOCK_N, c.BLOCK_K) if b_is_NK else (c.BLOCK_K, c.BLOCK_N))
    launch(
        _grouped_gemm_fwd_kernel,
        count_sms(a.device),
        *(a, a_desc, b_desc, row_ids_R if gather else offsets_e, offsets_e, out, e, N, K),
        GATHER=gather,
        ADD=adds,
        B_IS_NK=b_is_NK,
        E_POW2=next_power_of_2(e),
        TILE=c,
        num_warps=c.NUM_WARPS,
    )
    return out


def grouped_gemm_activation(
    x_SD: Tensor,
    w1_eCD: Tensor,
    row_ids_R: Tensor,
    weights_R: Tensor,
    offsets_e: Tensor,
    options: ActivationOptions,
) -> tuple[Tensor, Tensor]:
    """Return FC1's output h [R, 2F] and act(h) * weight [R, F]. No autograd, no host sync.

    Rows past offsets_e[-1] are uninitialised. `options` is a gated activation, not interleaved.

    Args:
        x_SD: token rows, bf16 or fp16, contiguous.
        w1_eCD: [experts, 2F, D] gate rows then up rows, contiguous; D a multiple of 8.
        row_ids_R, offsets_e: as for `grouped_gemm`.
        weights_R: fp32 routing weight of each expert row.
    """
    e, C, D = w1_eCD.shape
    R, F = row_ids_R.shape[0], C // 2
    h_RC, a_RF = x_SD.new_empty(R, C), x_SD.new_empty(R, F)
    if not R or not x_SD.shape[0]:
        return h_RC, a_RF
    c = SMALL if INTERPRET else GATHER
    w1_desc = make_descriptor(w1_eCD.view(2 * e, F, D), (2, c.BLOCK_N // 2, c.BLOCK_K))
    args = (x_SD, w1_desc, row_ids_R, weights_R, offsets_e, h_RC, a_RF, e, F, D)
    sizes = dict(ACT=options.constants, E_POW2=next_power_of_2(e), TILE=c, num_warps=c.NUM_WARPS)
    launch(_grouped_gemm_activation_fwd_kernel, count_sms(x_SD.device), *args, **sizes)
    return h_RC, a_RF


def _choose_config(gathers: bool, has_few_columns: bool, has_wide_output: bool) -> TileConfig:
    """Return tile sizes for this kind of product; wide output = fp32 result, or added to `out`."""
    if has_wide_output:
        return WIDE
    if has_few_columns:
        return NARROW_GATHER if gathers else NARROW
    return GATHER if gathers else CONTIGUOUS
