"""Weight gradients of grouped products; the source rows may be gathered while they are loaded.

    out[i] = sum over the rows r of expert i of  x[row(r)]^T  y[r]      [M, N], or its transpose

row(r) is row_ids[r] if the rows are gathered, otherwise r. FC1's gradient has the source rows as x
and dH as y, transposed. FC2's gradient has dY as x and the activation as y.

Letters: S source rows, R expert rows (length), e experts, M columns of x, N columns of y.

The kernel runs on Hopper; other devices gather, and use torch's grouped product. One persistent
program runs on each multiprocessor:

    loading warps      fill a ring of stages with blocks of x and y     (_load_step,
    _load_gathered_tiles) two warp groups    multiply a tile together, then store it
    (_multiply_tiles)

TMA loads contiguous rows, and asynchronous copies load gathered rows. Rows of x past the expert's
last row are set to 0, so that y's rows there are multiplied by 0. x has the narrow side of the
tile: copies of 256 columns take longer than the product of a stage
(docs/findings.md#weight-gradients-with-gathered-rows). 2 * R * M * N floating-point operations.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from moecore.kernels.common import (
    count_sms,
    has_hopper_kernels,
    launch,
    make_gluon_descriptor,
    split_halves,
)
from moecore.kernels.grouped.skeleton import (
    GroupedConstants,
    Ring,
    WeightTiling,
    add_block,
    begin_stage,
    load_expert_range,
    load_weight_tiles,
    locate_weight_tile,
    make_barriers,
    release_previous_stage,
    store_weight_block,
    wait_for_stage,
)
from moecore.kernels.rows.scaled_cast import scaled_cast
from moecore.kernels.triton_api import async_load, gl, gluon, hopper, thread_barrier, tma_load

BLOCK_M, BLOCK_N, BLOCK_K, CONSUMER_WARPS = 128, 256, 64, 8
CONST = GroupedConstants(
    BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M=8, STAGES=3, PRODUCER_REGISTERS=56, PRODUCER_WARPS=4
)


@gluon.jit
def _load_gathered_tiles(
    x_ptr, y_desc, row_ids_ptr, offsets_ptr, ring, tiles, M, CONST: gl.constexpr
):
    """Loading warps: fill the ring with rows of x, gathered by id, and with rows of y by TMA."""
    BLOCK_M: gl.constexpr = CONST.BLOCK_M
    BLOCK_K: gl.constexpr = CONST.BLOCK_K
    WARPS: gl.constexpr = CONST.PRODUCER_WARPS
    M = M // 8 * 8  # it is a multiple of 8 already; now the compiler knows, and copies 16 bytes
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // BLOCK_M, BLOCK_M // 8], [WARPS, 1], [1, 0]
    )
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    ids_layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    in_step = gl.arange(0, BLOCK_K, row_layout)
    ids = row_ids_ptr + gl.arange(0, BLOCK_K, ids_layout)
    id_in_step = gl.arange(0, BLOCK_K, ids_layout)
    columns = gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
    step = 0
    for tile in range(gl.program_id(0), tiles.num_tiles, gl.num_programs(0)):
        expert, m, n = locate_weight_tile(tile, tiles, CONST.GROUP_M)
        start, end = load_expert_range(offsets_ptr, expert)
        # Row ids are read three steps ahead: a copy cannot start before its address is known.
        ids0 = gl.load(ids + start, mask=start + id_in_step < end, other=0)
        row = start + BLOCK_K
        ids1 = gl.load(ids + row, mask=row + id_in_step < end, other=0)
        row += BLOCK_K
        ids2 = gl.load(ids + row, mask=row + id_in_step < end, other=0)
        for row in range(start, end, BLOCK_K):
            source = gl.convert_layout(ids0, row_layout).to(gl.int64)
            ids0 = ids1
            ids1 = ids2
            next_row = row + 3 * BLOCK_K
            ids2 = gl.load(ids + next_row, mask=next_row + id_in_step < end, other=0)
            x = x_ptr + (source * M)[:, None] + (m * BLOCK_M + columns)[None, :]
            mask = (row + in_step < end)[:, None] & (m * BLOCK_M + columns < M)[None, :]
            slot, bar = begin_stage(ring, step, y_desc.block_type.nbytes)
            tma_load(y_desc, [row, n * CONST.BLOCK_N], bar, ring.b.index(slot))
            async_load(ring.a.index(slot), x, mask)
            hopper.async_copy.mbarrier_arrive(bar, increment_count=False)
            step += 1


@gluon.jit
def _load_step(
    operands, row_tile, column_tile, first_row, ring, stage_idx, barrier, CONST: gl.constexpr
):
    """Start TMA loads of BLOCK_K rows of x and y for one tile; `barrier` signals their arrival."""
    x_desc, y_desc = operands
    tma_load(x_desc, [first_row, row_tile * CONST.BLOCK_M], barrier, ring.a.index(stage_idx))
    tma_load(y_desc, [first_row, column_tile * CONST.BLOCK_N], barrier, ring.b.index(stage_idx))


@gluon.jit
def _zero_rows_from(x_smem, num_rows):
    """Set rows from num_rows on of a block of x in shared memory to 0."""
    BLOCK_K: gl.constexpr = x_smem.shape[0]
    LANES: gl.constexpr = x_smem.shape[1] // 8
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0]
    )
    rows = gl.arange(0, BLOCK_K, gl.SliceLayout(1, layout))
    values = x_smem.load(layout)
    x_smem.store(gl.where((rows < num_rows)[:, None], values, 0.0).to(values.dtype))
    hopper.fence_async_shared()
    thread_barrier()


@gluon.jit
def _add_block(out_ptr, x, first_row, first_column, num_rows, num_columns):
    """Add fp32 x to out_ptr from (row, column) on, with 4 values per thread and memory access."""
    THREADS: gl.constexpr = 32 if x.shape[1] >= 128 else x.shape[1] // 4
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 4], [32 // THREADS, THREADS], [gl.num_warps(), 1], [1, 0]
    )
    add_block(out_ptr, gl.convert_layout(x, layout), first_row, first_column, num_rows, num_columns)


@gluon.jit
def _add_tile(out_ptr, total_MN, row_tile, column_tile, M, N, TRANSPOSED: gl.constexpr):
    """Add a tile to an expert's gradient [M, N], or to [N, M] if TRANSPOSED."""
    PART: gl.constexpr = total_MN.shape[1] // 4
    lower, upper = split_halves(total_MN)
    part0, part1 = split_halves(lower)
    part2, part3 = split_halves(upper)
    row = row_tile * total_MN.shape[0]
    column = column_tile * total_MN.shape[1]
    for i in gl.static_range(4):
        if i == 0:
            part = part0
        elif i == 1:
            part = part1
        elif i == 2:
            part = part2
        else:
            part = part3
        if TRANSPOSED:
            _add_block(out_ptr, part.permute([1, 0]), column + i * PART, row, N, M)
        else:
            _add_block(out_ptr, part, row, column + i * PART, M, N)


@gluon.jit
def _multiply_tiles(offsets_ptr, ring, tiles, out, M, N, scale, CONST: gl.constexpr):
    """Multiplying warps: compute x^T y of every tile, and store it, or with CONST.ADD add it."""
    BLOCK_M: gl.constexpr = CONST.BLOCK_M
    BLOCK_N: gl.constexpr = CONST.BLOCK_N
    BLOCK_K: gl.constexpr = CONST.BLOCK_K
    ADD: gl.constexpr = CONST.ADD
    TRANSPOSED: gl.constexpr = CONST.TRANSPOSED
    out_smem, out_desc, out_ptr = out
    WIDE: gl.constexpr = not ADD and out_desc.dtype.primitive_bitwidth == 32
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, BLOCK_N, 16]
    )
    step = 0
    for tile in range(gl.program_id(0), tiles.num_tiles, gl.num_programs(0)):
        expert, m, n = locate_weight_tile(tile, tiles, CONST.GROUP_M)
        start, end = load_expert_range(offsets_ptr, expert)
        total_MN = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, layout)
        for row in range(start, end, BLOCK_K):
            slot = wait_for_stage(ring, step)
            if CONST.GATHER:
                hopper.fence_async_shared()  # x came through the generic proxy, wgmma's is another
            elif row + BLOCK_K > end:
                _zero_rows_from(ring.a.index(slot), end - row)
            x_T = ring.a.index(slot).permute((1, 0))
            total_MN = hopper.warpgroup_mma(x_T, ring.b.index(slot), total_MN, is_async=True)
            total_MN = hopper.warpgroup_mma_wait(1, deps=(total_MN,))
            thread_barrier()  # both warp groups have read the stage before this one
            release_previous_stage(ring, step, row > start)
            step += 1
        total_MN = hopper.warpgroup_mma_wait(0, deps=(total_MN,))
        thread_barrier()
        release_previous_stage(ring, step, end > start)
        total_MN = total_MN * scale
        if ADD:
            expert_out = out_ptr + expert.to(gl.int64) * M * N
            _add_tile(expert_out, total_MN, m, n, M, N, TRANSPOSED)
        elif WIDE:
            lower, upper = split_halves(total_MN)
            row, column = m * BLOCK_M, n * BLOCK_N
            store_weight_block(out_desc, out_smem, lower, expert, row, column, TRANSPOSED)
            column += BLOCK_N // 2
            store_weight_block(out_desc, out_smem, upper, expert, row, column, TRANSPOSED)
        else:
            row, column = m * BLOCK_M, n * BLOCK_N
            store_weight_block(out_desc, out_smem, total_MN, expert, row, column, TRANSPOSED)
    if not ADD:
        hopper.tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_experts"])
def sm90_bf16_grouped_wgrad_kernel(
    x_ptr,  # [S or R, M]
    x_desc,  # the same as blocks [BLOCK_K, BLOCK_M]
    y_desc,  # [R, N] as blocks [BLOCK_K, BLOCK_N]
    row_ids_ptr,  # [R] int32; unused without GATHER
    offsets_ptr,  # [e] int32
    out_desc,  # [e, M, N] as blocks [1, BLOCK_M, BLOCK_N], or transposed; None with ADD
    out_ptr,  # [e, M, N] or transposed, out; in and out with ADD
    num_experts,
    M,
    N,
    scale,  # fp32, of every product
    CONST: gl.constexpr,  # GroupedConstants
):
    """Write each expert's x^T y to out_desc, or with CONST.ADD add the product to out_ptr."""
    BLOCK_M: gl.constexpr = CONST.BLOCK_M
    BLOCK_N: gl.constexpr = CONST.BLOCK_N
    BLOCK_K: gl.constexpr = CONST.BLOCK_K
    STAGES: gl.constexpr = CONST.STAGES
    dtype: gl.constexpr = y_desc.dtype
    x_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, BLOCK_M], x_desc.layout)
    y_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, BLOCK_N], y_desc.layout)
    if CONST.ADD:
        out_smem: gl.constexpr = None
    else:
        out_smem = gl.allocate_shared_memory(
            out_desc.dtype, out_desc.block_type.shape, out_desc.layout
        )
    # One arrival for the TMA, one for each producing thread's copies.
    full = make_barriers(STAGES, 1 + 32 * CONST.PRODUCER_WARPS if CONST.GATHER else 1)
    empty = make_barriers(STAGES, 1)
    num_m = gl.cdiv(M, BLOCK_M)
    num_n = gl.cdiv(N, BLOCK_N)
    ring = Ring(x_smem, y_smem, full, empty)
    tiles = WeightTiling(num_m, num_n, num_m * num_n * num_experts)
    load: gl.constexpr = _load_step
    out = (out_smem, out_desc, out_ptr)
    if CONST.GATHER:
        gl.warp_specialize(
            [
                (_multiply_tiles, (offsets_ptr, ring, tiles, out, M, N, scale, CONST)),
                (
                    _load_gathered_tiles,
                    (x_ptr, y_desc, row_ids_ptr, offsets_ptr, ring, tiles, M, CONST),
                ),
            ],
            [CONST.PRODUCER_WARPS],
            [CONST.PRODUCER_REGISTERS],
        )
    else:
        operands = (x_desc, y_desc)
        gl.warp_specialize(
            [
                (_multiply_tiles, (offsets_ptr, ring, tiles, out, M, N, scale, CONST)),
                (load_weight_tiles, (load, operands, offsets_ptr, ring, tiles, BLOCK_K, CONST)),
            ],
            [1],
            [CONST.PRODUCER_REGISTERS],
        )


@cache
def _make_constants(gathers: bool, accumulates: bool, transposed: bool) -> GroupedConstants:
    """Return the kernel's constants, with or without gather, accumulation and transposition."""
    return CONST._replace(GATHER=gathers, ADD=accumulates, TRANSPOSED=transposed)


def grouped_wgrad(
    x: Tensor,
    y_RN: Tensor,
    offsets_e: Tensor,
    *,
    row_ids_R: Tensor | None = None,
    transposed: bool = False,
    out: Tensor | None = None,
    accumulate: bool = False,
    dtype: torch.dtype | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Return each expert's weight gradient x^T y over its rows, or `out`. No autograd, no sync.

    Args:
        x: [R, M] rows in expert order, or with `row_ids_R` token rows; contiguous bf16 or fp16; M
            is a multiple of 8.
        y_RN: rows in expert order, contiguous, dtype of x; N is a multiple of 8. Up to 63 rows past
            an expert's last row are multiplied by 0, and must be finite. Rows past offsets_e[-1]
            must be initialised. A NaN or infinity in an expert's first rows spreads to the previous
            expert.
        offsets_e: int32 on the device, running sum of the experts' row counts, at most R.
        row_ids_R: int32, the row of x for each expert row; None = x is in expert order.
        transposed: return [e, N, M] instead of [e, M, N].
        out: fp32 or bf16, contiguous, of the output's shape, overwritten; None = a new tensor.
        accumulate: whether the result is added to `out` instead, in fp32.
        dtype: dtype of a new result, fp32 or None for the dtype of x.
        scale: factor on the fp32 sum, before it is added and rounded.

    Returns:
        [experts, M, N] (or transposed), summed in fp32 and rounded once, or `out`. Zero (nothing
        added) for an expert without rows. Bit-reproducible.
    """
    if not has_hopper_kernels(x.device):
        x_RM = x if row_ids_R is None else x.index_select(0, row_ids_R)
        lhs, rhs = (y_RN, x_RM) if transposed else (x_RM, y_RN)
        return scale_and_store_grad(
            grouped_mm(lhs.t(), rhs, offs=offsets_e), out, accumulate, dtype, scale
        )
    x, y_RN = _align_to_16_bytes(x), _align_to_16_bytes(y_RN)
    (M, N), e = (x.shape[1], y_RN.shape[1]), offsets_e.shape[0]
    shape = (e, N, M) if transposed else (e, M, N)
    out = x.new_empty(shape, dtype=dtype) if out is None else out
    if not y_RN.shape[0] or not x.shape[0]:
        return out if accumulate else out.zero_()
    columns = BLOCK_N * 2 // out.dtype.itemsize  # what the staging buffer has room for
    block = (1, columns, BLOCK_M) if transposed else (1, BLOCK_M, columns)
    gathers = row_ids_R is not None
    x_desc = make_gluon_descriptor(x, (BLOCK_K, BLOCK_M))
    y_desc = make_gluon_descriptor(y_RN, (BLOCK_K, BLOCK_N))
    out_desc = None if accumulate else make_gluon_descriptor(out, block)
    rows = row_ids_R if gathers else offsets_e
    const = _make_constants(gathers, accumulate, transposed)
    args = (x, x_desc, y_desc, rows, offsets_e, out_desc, out, e, M, N, scale)
    grid, num_warps = count_sms(x.device), CONSUMER_WARPS
    launch(sm90_bf16_grouped_wgrad_kernel, grid, *args, CONST=const, num_warps=num_warps)
    return out


def _align_to_16_bytes(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if its address is not a multiple of 16 bytes."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def scale_and_store_grad(
    grad: Tensor, out: Tensor | None, accumulate: bool, dtype: torch.dtype | None, scale: float
) -> Tensor:
    """Write grad * scale to `out`, or add it if `accumulate`, and return `out`.

    If `out` is None, return grad * scale in `dtype`; None = the dtype of `grad`.
    """
    if out is not None:
        if accumulate:
            return out.add_(grad, alpha=scale)
        return out.copy_(scale_and_store_grad(grad, None, accumulate, out.dtype, scale))
    if scale == 1.0 and dtype in (None, grad.dtype):
        return grad
    return scaled_cast(grad, dtype or grad.dtype, scale)
