"""The kernel of `fp8_wgrad` in `grouped/fp8.py`, for Hopper.

Letters: e experts, t row tiles, M columns of x, N columns of y.

    loading warp      fills a ring of stages with tiles of x and y by TMA          (_load_weight_step)
    warp group 0, 1   multiply all rows by the left and the right half of a tile's columns,
                      64 rows at a time, and store or add them                     (_multiply_weight_tiles)

A stage is one row tile: 128 rows of an expert are the summed dim. Its sum is promoted as in
`fp8_kernel.py`.
"""

from moecore.kernels.common import gl, gluon, hopper, tl, tma_load
from moecore.kernels.grouped.skeleton import (
    HAS_FEW_REGISTERS,
    Ring,
    WeightTiling,
    add_block,
    load_expert_range,
    load_weight_tiles,
    locate_weight_tile,
    make_barriers,
    store_weight_block,
    wait_for_stage,
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
