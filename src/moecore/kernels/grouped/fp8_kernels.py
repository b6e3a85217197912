"""The kernels of `grouped/fp8.py` for Hopper.

Letters: R expert rows (length), e experts, t row tiles, K the summed dim, N columns, M columns of
x.

    loading warp      fills a ring of stages by TMA: with blocks of a and b, and with the scales of
                      a by asynchronous copies (_load_row_step), or with tiles of x and y
                      (_load_weight_step)
    warp group 0, 1   multiply all rows by the left and the right half of a tile's columns,
                      64 rows at a time, and store or add them
                      (_multiply_row_tiles, _multiply_weight_tiles)

FP8 tensor cores sum the 128 of a stage with fewer bits than fp32 has. Each such sum is multiplied
by both scales and added in fp32, while the other group multiplies. The sum of 64 rows and the total
of 128 take 192 registers of a thread, so the second sum reuses the registers of the first. A stage
of `fp8_wgrad` is one row tile: 128 rows of an expert are the summed dim.
"""

from typing import Any, NamedTuple

from moecore.kernels.grouped.skeleton import (
    HAS_FEW_REGISTERS,
    Ring,
    RowTiling,
    WeightTiling,
    add_block,
    fence_staging_buffer,
    load_expert_range,
    load_row_tiles,
    load_weight_tiles,
    locate_output_tile,
    locate_weight_tile,
    make_barriers,
    store_block,
    store_weight_block,
    wait_for_stage,
    wait_for_staging_buffer,
)
from moecore.kernels.triton_api import (
    async_load,
    gl,
    gluon,
    hopper,
    thread_barrier,
    tl,
    tma_load,
    tma_store,
)


class LoadedScales(NamedTuple):
    """Pointers and strides of the scales of a and b; `a` = shared-memory stages for scales of a."""

    a_ptr: Any
    a_stride: Any
    a: Any
    b_ptr: Any
    b_stride_e: Any
    b_stride_n: Any
    b_stride_k: Any


@gluon.jit
def _load_row_step(operands, location, k, ring, stage_idx, barrier, CONST: gl.constexpr):
    """Start loads of a and b from column k on, and of a's scales; `barrier` signals arrival."""
    a_desc, b_desc, scales, N = operands
    expert, row, end, n = location
    tma_load(a_desc, [row, k], barrier, ring.a.index(stage_idx))
    tma_load(b_desc, [expert * N + n * CONST.BLOCK_N, k], barrier, ring.b.index(stage_idx))
    rows = row + gl.arange(0, CONST.BLOCK_M, gl.BlockedLayout([1], [32], [1], [0]))
    a_scales_ptr = scales.a_ptr + (k // CONST.BLOCK_K).to(gl.int64) * scales.a_stride
    async_load(scales.a.index(stage_idx), a_scales_ptr + rows, rows < end)
    hopper.async_copy.mbarrier_arrive(barrier, increment_count=False)


@gluon.jit
def _store_rows(out_ptr, out_desc, out_smem, x, first_row, row_end, first_column, N):
    """Store x at (first_row, first_column) by TMA, or by threads if x exceeds `row_end`."""
    wait_for_staging_buffer(1)
    out_smem.store(x.to(out_smem.dtype))
    fence_staging_buffer()
    if first_row + x.shape[0] <= row_end:
        tma_store(out_desc, [first_row, first_column], out_smem)
    else:
        wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
        store_block(out_ptr, out_smem.load(wide), first_row, row_end, first_column, N, N)
        hopper.tma.store_wait(
            0
        )  # wait_for_staging_buffer counts stores: this block has none in flight


@gluon.jit
def _multiply_row_tiles(GROUP: gl.constexpr, scales, out, ring, tiles, K, N, CONST: gl.constexpr):
    """Warp group GROUP (0 or 1): compute and store its half of the columns of every tile."""
    N = N // 8 * 8  # it is a multiple of 8 already; now the compiler knows, and stores 16 bytes
    HALF_M: gl.constexpr = CONST.BLOCK_M // 2
    HALF_N: gl.constexpr = CONST.BLOCK_N // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, HALF_N, 32]
    )
    out_ptr, out_desc, out_smem = out
    in_half: gl.constexpr = gl.SliceLayout(1, layout)
    nothing = gl.zeros((HALF_M, HALF_N), gl.float32, layout)
    step = 0
    for tile in range(gl.program_id(0), tiles.num_rows * tiles.num_columns, gl.num_programs(0)):
        expert, row, end, n = locate_output_tile(tile, tiles, CONST.GROUP_M)
        block = gl.minimum(n * 2 + GROUP, N // HALF_N - 1)
        b_scale_ptr = scales.b_ptr + expert * scales.b_stride_e + block * scales.b_stride_n
        next_scale = gl.load(b_scale_ptr)
        upper_MN = gl.zeros((HALF_M, HALF_N), gl.float32, layout)
        lower_MN = gl.zeros((HALF_M, HALF_N), gl.float32, layout)
        num_k = gl.cdiv(K, CONST.BLOCK_K)
        for k in range(num_k):
            slot = wait_for_stage(ring, step)
            a, a_scales = ring.a.index(slot), scales.a.index(slot)
            b = ring.b.index(slot).slice(GROUP * HALF_N, HALF_N, 0).permute((1, 0))
            sums_MN = hopper.warpgroup_mma(
                a.slice(0, HALF_M, 0), b, nothing, use_acc=False, is_async=True
            )
            b_scale = next_scale
            next_scale = gl.load(b_scale_ptr + gl.minimum(k + 1, num_k - 1) * scales.b_stride_k)
            upper = a_scales.slice(0, HALF_M, 0).load(in_half) * b_scale
            lower = a_scales.slice(HALF_M, HALF_M, 0).load(in_half) * b_scale
            sums_MN = hopper.warpgroup_mma_wait(0, deps=(sums_MN,))
            upper_MN += sums_MN * upper[:, None]
            # Not added to: the old sums only name the registers.
            sums_MN = hopper.warpgroup_mma(
                a.slice(HALF_M, HALF_M, 0), b, sums_MN, use_acc=False, is_async=True
            )
            sums_MN = hopper.warpgroup_mma_wait(0, deps=(sums_MN,))
            thread_barrier()  # all have read the stage, and its scales
            hopper.mbarrier.arrive(ring.empty.index(slot), count=1)
            lower_MN += sums_MN * lower[:, None]
            step += 1
        column = n * CONST.BLOCK_N + GROUP * HALF_N
        stage = out_smem.index(2 * GROUP)
        _store_rows(out_ptr, out_desc, stage, upper_MN, row, end, column, N)
        stage = out_smem.index(2 * GROUP + 1)
        _store_rows(out_ptr, out_desc, stage, lower_MN, row + HALF_M, end, column, N)
    hopper.tma.store_wait(0)


@gluon.jit
def sm90_fp8_grouped_nt_kernel(
    a_desc,  # [R, K] as blocks [BLOCK_M, BLOCK_K]
    b_desc,  # [e * N, K] as blocks [BLOCK_N, BLOCK_K]
    map_ptr,  # see `rows/row_tiles.py`
    a_scales_ptr,  # [K / BLOCK_K, a_stride] fp32
    b_scales_ptr,  # [e, N / 128, K / BLOCK_K] fp32 of these strides
    out_ptr,  # [R, N], out; rows past the last offset stay as they are
    out_desc,  # the same as blocks [BLOCK_M / 2, BLOCK_N / 2]
    K,
    N,
    a_stride,
    b_stride_e,
    b_stride_n,
    b_stride_k,
    CONST: gl.constexpr,  # GroupedConstants
):
    """Write each row of a times its expert's b^T to out_ptr, [rows, N]."""
    BLOCK_M: gl.constexpr = CONST.BLOCK_M
    BLOCK_N: gl.constexpr = CONST.BLOCK_N
    BLOCK_K: gl.constexpr = CONST.BLOCK_K
    STAGES: gl.constexpr = CONST.STAGES
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], a_desc.layout)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], b_desc.layout)
    block: gl.constexpr = out_desc.block_type.shape
    out_smem = gl.allocate_shared_memory(out_desc.dtype, [4, block[0], block[1]], out_desc.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    scales_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], plain)
    # One arrival for the TMA, one for each loading thread's copies.
    ring = Ring(a_smem, b_smem, make_barriers(STAGES, 33), make_barriers(STAGES, 2))
    tiles = RowTiling(map_ptr, gl.load(map_ptr), gl.cdiv(N, BLOCK_N))
    out = (out_ptr, out_desc, out_smem)
    b_strides = (b_stride_e, b_stride_n, b_stride_k)
    scales = LoadedScales(a_scales_ptr, a_stride, scales_smem, b_scales_ptr, *b_strides)
    operands = (a_desc, b_desc, scales, N)
    gl.warp_specialize(
        [
            (_multiply_row_tiles, (0, scales, out, ring, tiles, K, N, CONST)),
            (_multiply_row_tiles, (1, scales, out, ring, tiles, K, N, CONST)),
            (load_row_tiles, (gl.constexpr(_load_row_step), operands, ring, tiles, K, CONST)),
        ],
        [4, 1],
        [CONST.CONSUMER_REGISTERS, CONST.PRODUCER_REGISTERS],
    )


@gluon.jit
def _load_weight_step(
    operands, row_tile, column_tile, tile, ring, stage_idx, barrier, CONST: gl.constexpr
):
    """Start TMA loads of row tile `tile` of x and y, of the columns of one tile of the gradient."""
    x_desc, y_desc, M, N = operands
    tma_load(x_desc, [tile * M + row_tile * CONST.BLOCK_M, 0], barrier, ring.a.index(stage_idx))
    tma_load(y_desc, [tile * N + column_tile * CONST.BLOCK_N, 0], barrier, ring.b.index(stage_idx))


@gluon.jit
def _store_block(out_ptr, out_desc, out_smem, x, expert, first_row, first_column, M, N):
    """Store fp32 x in an expert's gradient from (row, column) on; add it if out_desc is None."""
    if out_desc is None:
        add_block(out_ptr + expert.to(gl.int64) * M * N, x, first_row, first_column, M, N)
    else:
        store_weight_block(out_desc, out_smem, x, expert, first_row, first_column, False)


@gluon.jit
def _multiply_weight_tiles(
    GROUP: gl.constexpr, scales, out, ends_ptr, ring, tiles, M, N, scale, CONST: gl.constexpr
):
    """Warp group GROUP (0 or 1): compute and store (or add) half of the columns of every tile."""
    BLOCK_M: gl.constexpr = CONST.BLOCK_M
    HALF_M: gl.constexpr = BLOCK_M // 2
    HALF_N: gl.constexpr = CONST.BLOCK_N // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, HALF_N, 32]
    )
    x_scales_ptr, y_scales_ptr = scales
    nothing = gl.zeros((HALF_M, HALF_N), gl.float32, layout)
    out_ptr, out_desc, out_smem = out
    if out_desc is None:
        stage: gl.constexpr = None
    else:
        stage = out_smem.index(GROUP)
    step = 0
    first, num_programs = gl.program_id(0), gl.num_programs(0)
    for tile in tl.range(first, tiles.num_tiles, num_programs, disable_licm=HAS_FEW_REGISTERS):
        expert, m, n = locate_weight_tile(tile, tiles, CONST.GROUP_M)
        start, end = load_expert_range(ends_ptr, expert)
        block = gl.minimum(n * 2 + GROUP, N // HALF_N - 1)
        x_scale_ptr = x_scales_ptr + start * (M // BLOCK_M) + m
        y_scale_ptr = y_scales_ptr + start * (N // HALF_N) + block
        next_x, next_y = gl.load(x_scale_ptr), gl.load(y_scale_ptr)
        upper_MN = gl.zeros((HALF_M, HALF_N), gl.float32, layout)
        lower_MN = gl.zeros((HALF_M, HALF_N), gl.float32, layout)
        for t in range(start, end):
            slot = wait_for_stage(ring, step)
            x = ring.a.index(slot)
            y = ring.b.index(slot).slice(GROUP * HALF_N, HALF_N, 0).permute((1, 0))
            sums_MN = hopper.warpgroup_mma(
                x.slice(0, HALF_M, 0), y, nothing, use_acc=False, is_async=True
            )
            scale_of_sum = next_x * next_y
            x_scale_ptr += M // BLOCK_M
            y_scale_ptr += N // HALF_N
            next_x = gl.load(x_scale_ptr, mask=t + 1 < end, other=0.0)
            next_y = gl.load(y_scale_ptr, mask=t + 1 < end, other=0.0)
            sums_MN = hopper.warpgroup_mma_wait(0, deps=(sums_MN,))
            upper_MN += sums_MN * scale_of_sum
            # Not added to: the old sums only name the registers.
            sums_MN = hopper.warpgroup_mma(
                x.slice(HALF_M, HALF_M, 0), y, sums_MN, use_acc=False, is_async=True
            )
            sums_MN = hopper.warpgroup_mma_wait(0, deps=(sums_MN,))
            hopper.mbarrier.arrive(ring.empty.index(slot), count=1)
            lower_MN += sums_MN * scale_of_sum
            step += 1
        row, column = m * BLOCK_M, n * CONST.BLOCK_N + GROUP * HALF_N
        _store_block(out_ptr, out_desc, stage, upper_MN * scale, expert, row, column, M, N)
        _store_block(out_ptr, out_desc, stage, lower_MN * scale, expert, row + HALF_M, column, M, N)
    hopper.tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_experts"])
def sm90_fp8_grouped_wgrad_kernel(
    x_desc,  # [t * M, 128] as blocks [BLOCK_M, BLOCK_K]
    y_desc,  # [t * N, 128] as blocks [BLOCK_N, BLOCK_K]
    x_scales_ptr,  # [t, M / BLOCK_M] fp32
    y_scales_ptr,  # [t, N / 128] fp32
    ends_ptr,  # [e] int32: running sum of the experts' row tiles
    out_ptr,  # [e, M, N], out; in and out to add
    out_desc,  # the same as blocks [1, BLOCK_M / 2, BLOCK_N / 2]; None to add
    num_experts,
    M,
    N,
    scale,  # fp32, of every product
    CONST: gl.constexpr,  # GroupedConstants
):
    """Write each expert's gradient x^T y to out_ptr, or add it if out_desc is None."""
    BLOCK_M: gl.constexpr = CONST.BLOCK_M
    BLOCK_N: gl.constexpr = CONST.BLOCK_N
    BLOCK_K: gl.constexpr = CONST.BLOCK_K
    STAGES: gl.constexpr = CONST.STAGES
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    y_smem = gl.allocate_shared_memory(y_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], y_desc.layout)
    if out_desc is None:
        out_smem: gl.constexpr = None
    else:
        block: gl.constexpr = [2, 1, BLOCK_M // 2, BLOCK_N // 2]
        out_smem = gl.allocate_shared_memory(out_desc.dtype, block, out_desc.layout)
    ring = Ring(x_smem, y_smem, make_barriers(STAGES, 1), make_barriers(STAGES, 2))
    num_m, num_n = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N)
    tiles = WeightTiling(num_m, num_n, num_m * num_n * num_experts)
    out = (out_ptr, out_desc, out_smem)
    scales = (x_scales_ptr, y_scales_ptr)
    load: gl.constexpr = _load_weight_step
    operands = (x_desc, y_desc, M, N)
    gl.warp_specialize(
        [
            (_multiply_weight_tiles, (0, scales, out, ends_ptr, ring, tiles, M, N, scale, CONST)),
            (_multiply_weight_tiles, (1, scales, out, ends_ptr, ring, tiles, M, N, scale, CONST)),
            (load_weight_tiles, (load, operands, ends_ptr, ring, tiles, 1, CONST)),
        ],
        [4, 1],
        [CONST.CONSUMER_REGISTERS, CONST.PRODUCER_REGISTERS],
    )
