"""The kernel behind `fp8_wgrad` of `grouped/fp8.py`. Hopper only.

Letters: e experts, t row tiles, M columns of x, N columns of y.

    loading warp      fills a ring of stages with tiles of x and y by TMA, and with their scales by
                      asynchronous copies                                               (_produce)
    warp group 0, 1   multiply all rows by the left and the right half of a tile's columns,
                      64 rows at a time, and store or add them                          (_consume)

What they share, beside the ring, the tiles and the scales:

    out      the output, its descriptor, and a block to stage for each group; the last two are None
             to add

A stage is one row tile: 128 rows of an expert are the summed dim. Its sum is promoted as in
`fp8_kernel.py`; here both scales change along their side of the output.
"""

from functools import partial
from typing import Any, NamedTuple

from moecore.kernels.common import async_load, gl, gluon, hopper, thread_barrier, tma_load
from moecore.kernels.grouped.skeleton import (
    Ring,
    WeightTiling,
    add_part,
    await_stage,
    begin_stage,
    locate_weights,
    make_barriers,
    range_of,
    store_weight_block,
)


class Scales(NamedTuple):
    """Of x [t, M] and y [t, N], and their stages [STAGES, BLOCK_M] and [STAGES, BLOCK_N]."""

    x_ptr: Any
    x: Any
    y_ptr: Any
    y: Any


@gluon.jit
def _produce(
    x_desc,  # [t * M, 128] as blocks [BLOCK_M, BLOCK_K]
    y_desc,  # [t * N, 128] as blocks [BLOCK_N, BLOCK_K]
    scales,
    ends_ptr,
    ring,
    tiles,
    M,
    N,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    """Load the row tiles of every output tile, in order."""
    # Multiples of 8 already; now the compiler knows, and copies 16 bytes.
    M, N = M // 8 * 8, N // 8 * 8
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    step = 0
    for tile in range(gl.program_id(0), tiles.num_tiles, gl.num_programs(0)):
        expert, m, n = locate_weights(tile, tiles, GROUP_M)
        start, end = range_of(ends_ptr, expert)
        rows = m * BLOCK_M + gl.arange(0, BLOCK_M, layout)
        columns = n * BLOCK_N + gl.arange(0, BLOCK_N, layout)
        for t in range(start, end):
            slot, bar = begin_stage(ring, step, (BLOCK_M + BLOCK_N) * BLOCK_K)
            tma_load(x_desc, [t * M + m * BLOCK_M, 0], bar, ring.a.index(slot))
            tma_load(y_desc, [t * N + n * BLOCK_N, 0], bar, ring.b.index(slot))
            async_load(scales.x.index(slot), scales.x_ptr + t * M + rows, rows < M)
            async_load(scales.y.index(slot), scales.y_ptr + t * N + columns, columns < N)
            hopper.async_copy.mbarrier_arrive(bar, increment_count=False)
            step += 1


@gluon.jit
def _put(
    out_ptr,
    out_desc,  # None to add
    out_smem,
    x,
    expert,
    row,
    column,
    M,
    N,
):
    """Store a block of an expert's gradient, or add it."""
    if out_desc is None:
        add_part(out_ptr + expert.to(gl.int64) * M * N, x, row, column, M, N)
    else:
        store_weight_block(out_desc, out_smem, x, expert, row, column, False)


@gluon.jit
def _consume(
    GROUP: gl.constexpr,
    scales,
    out,
    ends_ptr,
    ring,
    tiles,
    M,
    N,
    scale,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    """Multiply and put one half of every tile's columns."""
    HALF_M: gl.constexpr = BLOCK_M // 2
    HALF_N: gl.constexpr = BLOCK_N // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, HALF_N, 32]
    )
    in_columns: gl.constexpr = gl.SliceLayout(0, layout)
    in_rows: gl.constexpr = gl.SliceLayout(1, layout)
    nothing = gl.zeros((HALF_M, HALF_N), gl.float32, layout)
    out_ptr, out_desc, out_smem = out
    if out_desc is None:
        stage: gl.constexpr = None
    else:
        stage = out_smem.index(GROUP)
    step = 0
    for tile in range(gl.program_id(0), tiles.num_tiles, gl.num_programs(0)):
        expert, m, n = locate_weights(tile, tiles, GROUP_M)
        start, end = range_of(ends_ptr, expert)
        upper_MN = gl.zeros((HALF_M, HALF_N), gl.float32, layout)
        lower_MN = gl.zeros((HALF_M, HALF_N), gl.float32, layout)
        for _ in range(start, end):
            slot = await_stage(ring, step)
            x = ring.a.index(slot)
            y = ring.b.index(slot).slice(GROUP * HALF_N, HALF_N, 0).permute((1, 0))
            x_scales = scales.x.index(slot)
            y_scales = scales.y.index(slot).slice(GROUP * HALF_N, HALF_N, 0)
            sums_MN = hopper.warpgroup_mma(
                x.slice(0, HALF_M, 0), y, nothing, use_acc=False, is_async=True
            )
            upper = x_scales.slice(0, HALF_M, 0).load(in_rows)
            lower = x_scales.slice(HALF_M, HALF_M, 0).load(in_rows)
            sums_MN = hopper.warpgroup_mma_wait(0, deps=(sums_MN,))
            factors = y_scales.load(in_columns)
            upper_MN += sums_MN * upper[:, None] * factors[None, :]
            # Not added to: the old sums only name the registers.
            sums_MN = hopper.warpgroup_mma(
                x.slice(HALF_M, HALF_M, 0), y, sums_MN, use_acc=False, is_async=True
            )
            sums_MN = hopper.warpgroup_mma_wait(0, deps=(sums_MN,))
            factors = y_scales.load(in_columns)
            lower_MN += sums_MN * lower[:, None] * factors[None, :]
            thread_barrier()  # all have read the stage, and its scales
            hopper.mbarrier.arrive(ring.empty.index(slot), count=1)
            step += 1
        row, column = m * BLOCK_M, n * BLOCK_N + GROUP * HALF_N
        _put(out_ptr, out_desc, stage, upper_MN * scale, expert, row, column, M, N)
        _put(out_ptr, out_desc, stage, lower_MN * scale, expert, row + HALF_M, column, M, N)
    hopper.tma.store_wait(0)


@partial(gluon.jit, do_not_specialize=["num_experts"])
def sm90_fp8_grouped_wgrad_kernel(
    x_desc,  # [t * M, 128] as blocks [BLOCK_M, BLOCK_K]
    y_desc,  # [t * N, 128] as blocks [BLOCK_N, BLOCK_K]
    x_scales_ptr,  # [t, M] fp32
    y_scales_ptr,  # [t, N] fp32
    ends_ptr,  # [e] int32: running sum of the experts' row tiles
    out_ptr,  # [e, M, N]
    out_desc,  # the same as blocks [1, BLOCK_M / 2, BLOCK_N / 2]; None to add
    num_experts,
    M,
    N,
    scale,  # fp32, of every product
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """Compute `fp8_wgrad`."""
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    y_smem = gl.allocate_shared_memory(y_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], y_desc.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    x_scales_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], plain)
    y_scales_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_N], plain)
    if out_desc is None:
        out_smem: gl.constexpr = None
    else:
        block: gl.constexpr = [2, 1, BLOCK_M // 2, BLOCK_N // 2]
        out_smem = gl.allocate_shared_memory(out_desc.dtype, block, out_desc.layout)
    # One arrival for the TMA, one for each loading thread's copies.
    ring = Ring(x_smem, y_smem, make_barriers(STAGES, 33), make_barriers(STAGES, 2))
    num_m, num_n = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N)
    tiles = WeightTiling(num_m, num_n, num_m * num_n * num_experts)
    out = (out_ptr, out_desc, out_smem)
    scales = Scales(x_scales_ptr, x_scales_smem, y_scales_ptr, y_scales_smem)
    sizes: gl.constexpr = (BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M)
    gl.warp_specialize(
        [
            (_consume, (0, scales, out, ends_ptr, ring, tiles, M, N, scale) + sizes),
            (_consume, (1, scales, out, ends_ptr, ring, tiles, M, N, scale) + sizes),
            (_produce, (x_desc, y_desc, scales, ends_ptr, ring, tiles, M, N) + sizes),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
