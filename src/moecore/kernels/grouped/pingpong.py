"""FC2's input gradient with the activation's backward, on Hopper, by two alternating warp groups.

    da[r] = dy[row(r)] @ w2[expert(r)], which stays on the chip; with h[r] it gives dh[r],
    act(h[r]) * weight[r] recomputed, and dweight[r] = <da[r], act(h[r])>

row(r) is row_ids[r] if the rows are gathered while they are loaded, otherwise r. An `Addend` may be
added to da.

Letters: S source rows, R expert rows (length), e experts, D model dim, F hidden dim, C = 2F columns
of h; M N K the sizes of one product: R rows, F columns, D summed. One persistent program per
multiprocessor:

    loading warps     fill a ring of stages with blocks of dy and w2          (_load_tiles)
    warp group 0, 1   alternate: one multiplies while the other stores        (_multiply_tiles)

The warps share the ring, the tiles, and:

    turns   two barriers per group: it may multiply, it may use the stage
    stage   da in quarters, since a loop over them needs few registers; the descriptor of h, and two
            slots of its gate and up [4, BLOCK_M, BLOCK_N / 4] with a barrier each: h has arrived

TMA loads w2 and contiguous rows, asynchronous copies load gathered rows. A storing group stores six
times the bytes of the product, so memory and tensor cores work at the same time. A group that has
read a slot of h loads the columns after the next columns into the slot, and at the end the columns
of the other group's tile. So h is in shared memory when a product ends.

2 * R * D * F floating-point operations. Bytes moved at least: dy (R * D elements), w2, h, dh and
the activation once each.
"""

from functools import cache

import torch
from torch import Tensor

from moecore.kernels.common import cdiv, count_sms, launch, make_gluon_descriptor, split_halves
from moecore.kernels.grouped.skeleton import (
    Addend,
    GroupedConstants,
    Ring,
    RowTiling,
    begin_stage,
    locate_output_tile,
    make_barriers,
    release_previous_stage,
    wait_for_stage,
)
from moecore.kernels.rows.activation import ActivationOptions
from moecore.kernels.rows.activation_kernel import activate_with_gradients
from moecore.kernels.rows.row_tiles import BLOCK_M, RowTiles
from moecore.kernels.triton_api import (
    async_load,
    gl,
    gluon,
    hopper,
    thread_barrier,
    tl,
    tma_load,
    triton,
)

BLOCK_N, BLOCK_K, STAGES = 128, 64, 5
GROUP_M = {False: 4, True: 8}  # row tiles that share weights in L2, without and with a gather
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 224, 56
CLEARED_ROWS = 64  # after the last expert row, which `grouped_wgrad` multiplies by 0
ROWS_PER_SUM = 1024


@gluon.jit
def _load_tiles(a_ptr, a_desc, b_desc, row_ids_ptr, addend, ring, tiles, K, CONST: gl.constexpr):
    """Loading warps: fill the ring with blocks of a, b and the LoRA part for all tiles.

    `addend` has the descriptors of the LoRA part's factors and the number of summed columns, or ().
    """
    BLOCK_M: gl.constexpr = CONST.BLOCK_M
    BLOCK_N: gl.constexpr = CONST.BLOCK_N
    BLOCK_K: gl.constexpr = CONST.BLOCK_K
    GATHER: gl.constexpr = CONST.GATHER
    K = K // 8 * 8  # it is a multiple of 8 already; now the compiler knows, and copies 16 bytes
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    in_tile = gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    in_step = gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))
    ELEMENTS: gl.constexpr = BLOCK_N if GATHER else BLOCK_M + BLOCK_N
    step = 0
    for tile in range(gl.program_id(0), tiles.num_rows * tiles.num_columns, gl.num_programs(0)):
        expert, row, end, n = locate_output_tile(tile, tiles, CONST.GROUP_M)
        if GATHER:
            in_rows = row + in_tile < end
            source = gl.load(row_ids_ptr + row + in_tile, mask=in_rows, other=0).to(gl.int64)
            a_rows = a_ptr + (source * K)[:, None] + in_step[None, :]
        for k in range(0, K, BLOCK_K):
            slot, bar = begin_stage(ring, step, ELEMENTS * BLOCK_K * 2)
            tma_load(b_desc, [expert * K + k, n * BLOCK_N], bar, ring.b.index(slot))
            if GATHER:
                mask = in_rows[:, None] & (k + in_step < K)[None, :]
                async_load(ring.a.index(slot), a_rows + k, mask)
                hopper.async_copy.mbarrier_arrive(bar, increment_count=False)
            else:
                tma_load(a_desc, [row, k], bar, ring.a.index(slot))
            step += 1
        if CONST.ADDEND:
            u_desc, m_desc, rank = addend
            for k in range(0, rank, BLOCK_K):
                slot, bar = begin_stage(ring, step, (BLOCK_M + BLOCK_N) * BLOCK_K * 2)
                tma_load(m_desc, [expert * rank + k, n * BLOCK_N], bar, ring.b.index(slot))
                tma_load(u_desc, [row, k], bar, ring.a.index(slot))
                if GATHER:  # copies of the steps before have arrived: those of this one are none
                    hopper.async_copy.mbarrier_arrive(bar, increment_count=False)
                step += 1


@gluon.jit
def _fetch_h(h_desc, h_smem, h_barriers, h_slot, first_row, first_column, F):
    """Start TMA loads of a block of h's gate and up columns into half `h_slot` of h_smem."""
    bar = h_barriers.index(h_slot)
    hopper.mbarrier.expect(bar, h_smem.shape[1] * h_smem.shape[2] * 4)
    tma_load(h_desc, [first_row, first_column], bar, h_smem.index(2 * h_slot))
    tma_load(h_desc, [first_row, F + first_column], bar, h_smem.index(2 * h_slot + 1))


@gluon.jit
def _store_activation_bwd(
    total_MN,  # da of the tile, fp32
    staging,  # shared memory of da and h, and barriers
    other_group_barrier,  # barrier: the other group may use da_smem and h_smem
    outputs,  # pointers (weights, weighted activation, dh, this column tile's part of dweights)
    location,  # row, end and column of the tile; if there is a next tile, its row and column
    F,
    CONST: gl.constexpr,  # GroupedConstants
):
    """Store a tile's dh, act(h) * weight and sums of routing-weight gradients; load the next h."""
    weights_ptr, out_ptr, dh_ptr, dweights_ptr = outputs
    row, end, column, has_next, next_row, next_column = location
    ACT: gl.constexpr = CONST.ACT
    da_smem, h_desc, h_smem, arrived = staging
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    lower, upper = split_halves(total_MN.to(dtype))
    parts = split_halves(lower) + split_halves(upper)
    for i in gl.static_range(4):
        da_smem.index(i).store(parts[i])
    BLOCK_M: gl.constexpr = total_MN.shape[0]
    PART: gl.constexpr = total_MN.shape[1] // 4
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // PART, PART // 8], [gl.num_warps(), 1], [1, 0]
    )
    rows = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    in_rows = rows < end
    weights = gl.load(weights_ptr + rows, mask=in_rows, other=0.0)
    dweights = gl.zeros((BLOCK_M,), gl.float32, gl.SliceLayout(1, layout))
    for i in range(4):
        columns = column + i * PART + gl.arange(0, PART, gl.SliceLayout(0, layout))
        mask = in_rows[:, None] & (columns < F)[None, :]
        hopper.mbarrier.wait(arrived.index(i % 2), i // 2)
        gate = h_smem.index(i % 2 * 2).load(layout)
        up = h_smem.index(i % 2 * 2 + 1).load(layout)
        thread_barrier()  # all have read the slot
        is_this_tile = i < 2
        if is_this_tile or has_next:
            coming_row = gl.where(is_this_tile, row, next_row)
            next_start = gl.where(is_this_tile, column, next_column) + (i + 2) % 4 * PART
            _fetch_h(h_desc, h_smem, arrived, i % 2, coming_row, next_start, F)
        gate, up = gate.to(gl.float32), up.to(gl.float32)
        a, da_dgate, da_dup = activate_with_gradients(gate, up, ACT)
        da = da_smem.index(i).load(layout).to(gl.float32)
        if i == 3:
            thread_barrier()  # all have read da
            hopper.mbarrier.arrive(other_group_barrier, count=1)
        dweights += gl.sum(gl.where(mask, da * a, 0.0), 1)
        out = out_ptr + (rows.to(gl.int64) * F)[:, None] + columns[None, :]
        gl.store(out, (a * weights[:, None]).to(dtype), mask=mask)
        da = da * weights[:, None]
        dh = dh_ptr + (rows.to(gl.int64) * (2 * F))[:, None] + columns[None, :]
        gl.store(dh, (da * da_dgate).to(dtype), mask=mask)
        gl.store(dh + F, (da * da_dup).to(dtype), mask=mask)
    gl.store(dweights_ptr + rows, dweights, mask=in_rows)


@gluon.jit
def _multiply_tiles(
    GROUP: gl.constexpr, turn_barriers, staging, ring, tiles, outputs, R, K, N, CONST: gl.constexpr
):
    """Warp group GROUP: compute every other tile, and store it by `_store_activation_bwd`."""
    BLOCK_M: gl.constexpr = CONST.BLOCK_M
    BLOCK_N: gl.constexpr = CONST.BLOCK_N
    N = N // 8 * 8  # as above
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, BLOCK_N, 16]
    )
    turn, store_turn = turn_barriers
    weights_ptr, out_ptr, dh_ptr, dweights_ptr = outputs
    _da_smem, h_desc, h_smem, arrived = staging
    num_k = gl.cdiv(K, CONST.BLOCK_K)
    num_tiles = tiles.num_rows * tiles.num_columns
    step = GROUP * num_k
    parity = 1 - GROUP
    store_parity = parity
    first = gl.program_id(0) + GROUP * gl.num_programs(0)
    if GROUP == 0:
        if first < num_tiles:
            _, row, _, n = locate_output_tile(first, tiles, CONST.GROUP_M)
            _fetch_h(h_desc, h_smem, arrived, 0, row, n * BLOCK_N, N)
            _fetch_h(h_desc, h_smem, arrived, 1, row, n * BLOCK_N + BLOCK_N // 4, N)
    for tile in range(first, num_tiles, 2 * gl.num_programs(0)):
        _, row, end, n = locate_output_tile(tile, tiles, CONST.GROUP_M)
        total_MN = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, layout)
        # Not before the other group has read its last stage: a barrier distinguishes even and
        # odd phases only, so a group that waits too early reads the other's data as its own.
        hopper.mbarrier.wait(turn.index(GROUP), parity)
        parity = 1 - parity
        for i in range(num_k):
            slot = wait_for_stage(ring, step)
            hopper.fence_async_shared()  # gathered rows came through the generic proxy
            a, b = ring.a.index(slot), ring.b.index(slot)
            total_MN = hopper.warpgroup_mma(a, b, total_MN, is_async=True)
            total_MN = hopper.warpgroup_mma_wait(1, deps=(total_MN,))
            release_previous_stage(ring, step, i > 0)
            step += 1
        hopper.mbarrier.arrive(turn.index(1 - GROUP), count=1)
        total_MN = hopper.warpgroup_mma_wait(0, deps=(total_MN,))
        release_previous_stage(ring, step, True)
        step += num_k  # the other group's
        after = tile + gl.num_programs(0)  # the other group's
        has_next = after < num_tiles
        at = gl.where(has_next, after, tile)
        _, next_row, _, next_n = locate_output_tile(at, tiles, CONST.GROUP_M)
        hopper.mbarrier.wait(store_turn.index(GROUP), store_parity)
        store_parity = 1 - store_parity
        place = (row, end, n * BLOCK_N, has_next, next_row, next_n * BLOCK_N)
        outputs = (weights_ptr, out_ptr, dh_ptr, dweights_ptr + n.to(gl.int64) * R)
        other_turn = store_turn.index(1 - GROUP)
        _store_activation_bwd(total_MN, staging, other_turn, outputs, place, N, CONST)


@gluon.jit(do_not_specialize=["R"])
def sm90_bf16_grouped_nn_act_bwd_kernel(
    a_ptr,  # [S or R, K]
    a_desc,  # the same as blocks [BLOCK_M, BLOCK_K]
    b_desc,  # [e * K, N] as blocks [BLOCK_K, BLOCK_N]
    row_ids_ptr,  # [R] int32; unused without GATHER
    map_ptr,  # see `rows/row_tiles.py`
    weights_ptr,  # [R] fp32
    h_desc,  # [R, 2F] as blocks [BLOCK_M, BLOCK_N / 4]
    out_ptr,  # [R, F], out; rows past the last offset stay as they are, in all outputs
    dh_ptr,  # [R, 2F], out
    dweights_ptr,  # [column tiles, R] fp32, out
    u_desc,  # of an addend, in blocks like those of a_desc; None without, as the next two
    m_desc,  # in blocks like those of b_desc
    rank,
    R,
    K,
    N,
    CONST: gl.constexpr,  # GroupedConstants
):
    """Compute da = a @ b; write dh, act(h) * weight, and routing-weight gradients per tile."""
    BLOCK_M: gl.constexpr = CONST.BLOCK_M
    BLOCK_N: gl.constexpr = CONST.BLOCK_N
    BLOCK_K: gl.constexpr = CONST.BLOCK_K
    STAGES: gl.constexpr = CONST.STAGES
    dtype: gl.constexpr = b_desc.dtype
    a_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], a_desc.layout)
    b_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, BLOCK_N], b_desc.layout)
    # One arrival for the TMA, one for each producing thread's copies.
    full, empty = make_barriers(STAGES, 129 if CONST.GATHER else 1), make_barriers(STAGES, 1)
    turn, store_turn = make_barriers(2, 1), make_barriers(2, 1)
    arrived = make_barriers(2, 1)
    part: gl.constexpr = [4, BLOCK_M, BLOCK_N // 4]
    staged: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [1, 0])
    da_smem = gl.allocate_shared_memory(dtype, part, staged)
    h_smem = gl.allocate_shared_memory(dtype, part, h_desc.layout)
    turns = (turn, store_turn)
    stage = (da_smem, h_desc, h_smem, arrived)
    ring = Ring(a_smem, b_smem, full, empty)
    num_n = gl.cdiv(N, BLOCK_N)
    tiles = RowTiling(map_ptr, gl.load(map_ptr), num_n)
    outputs = (weights_ptr, out_ptr, dh_ptr, dweights_ptr)
    sum_length = K
    if CONST.ADDEND:
        addend = (u_desc, m_desc, rank)
        sum_length = gl.cdiv(K, BLOCK_K) * BLOCK_K + rank
    else:
        addend = ()  # type: ignore[assignment]
    gl.warp_specialize(
        [
            (_multiply_tiles, (0, turns, stage, ring, tiles, outputs, R, sum_length, N, CONST)),
            (_multiply_tiles, (1, turns, stage, ring, tiles, outputs, R, sum_length, N, CONST)),
            (_load_tiles, (a_ptr, a_desc, b_desc, row_ids_ptr, addend, ring, tiles, K, CONST)),
        ],
        [4, 4],
        [CONST.CONSUMER_REGISTERS, CONST.PRODUCER_REGISTERS],
    )


@triton.jit
def _finish_bwd_kernel(
    parts_ptr,  # [PARTS, R] fp32
    offsets_ptr,  # [e] int32
    dweights_ptr,  # [R] fp32, out
    dh_ptr,  # [R, 2F], out: only cleared rows
    a_ptr,  # [R, F], out: only cleared rows
    num_experts,
    R,
    F,
    num_parts,
    CLEARED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum parts [num_parts, R] of routing-weight gradients; zero CLEARED rows of dh and a."""
    num_rows = tl.load(offsets_ptr + num_experts - 1)
    pid = tl.program_id(0)
    if pid < CLEARED:
        row = num_rows.to(tl.int64) + pid
        for column in range(0, 3 * F, BLOCK):
            columns = column + tl.arange(0, BLOCK)
            in_dh = (columns < 2 * F) & (row < R)
            at = dh_ptr + row * 2 * F + columns
            tl.store(at, tl.zeros([BLOCK], dh_ptr.dtype.element_ty), in_dh)
            in_a = (columns >= 2 * F) & (columns < 3 * F) & (row < R)
            at = a_ptr + row * F + columns - 2 * F
            tl.store(at, tl.zeros([BLOCK], a_ptr.dtype.element_ty), in_a)
    else:
        rows = (pid - CLEARED) * BLOCK + tl.arange(0, BLOCK)
        in_use = rows < num_rows
        total = tl.zeros([BLOCK], tl.float32)
        part = parts_ptr + rows
        for _ in range(num_parts):
            total += tl.load(part, mask=in_use, other=0.0)
            part += R
        tl.store(dweights_ptr + rows, total, mask=rows < R)


@cache
def _get_constants(gathers: bool, options: ActivationOptions, has_addend: bool) -> GroupedConstants:
    """Return the kernel's constants, with or without gather and LoRA, for an activation."""
    return GroupedConstants(
        *(BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M[gathers], STAGES, PRODUCER_REGISTERS),
        CONSUMER_REGISTERS=CONSUMER_REGISTERS,
        ACT=options.constants,
        GATHER=gathers,
        ADDEND=has_addend,
    )


def pingpong_activation_bwd(
    dy: Tensor,
    w2_eDF: Tensor,
    tiles: RowTiles,
    h_RC: Tensor,
    weights_R: Tensor,
    offsets_e: Tensor,
    options: ActivationOptions,
    *,
    row_ids_R: Tensor | None = None,
    addend: Addend | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of FC1's output h and of routing weights, and act(h) * weight.

    No autograd, no host sync. The activation's gradient da = dy @ w2 is not written to memory; it
    is rounded to the dtype of dy.

    Args:
        dy: [R, D] in expert order, or with `row_ids_R` a row per token; contiguous bf16 or fp16.
        w2_eDF: contiguous; D and F multiples of 8.
        tiles: from `map_row_tiles` of `offsets_e`, the running sum of the experts' row counts.
        h_RC, weights_R: FC1's output [R, 2F], contiguous; fp32 routing weight of each row.
        options: a gated activation, not interleaved.
        addend: LoRA part in the dtype of dy, added to da before it is rounded; None = no LoRA.

    Returns:
        dh_RC, dweights_R (fp32, 0 past the last expert's rows) and a_RF. In dh and a, CLEARED_ROWS
        rows past the last expert's are 0, later rows uninitialised.
    """
    R, (_, D, F) = h_RC.shape[0], w2_eDF.shape
    dh_RC, a_RF = torch.empty_like(h_RC), h_RC.new_empty(R, F)
    dweights_R = torch.empty_like(weights_R)
    if not R:
        return dh_RC, dweights_R, a_RF
    parts = weights_R.new_empty(cdiv(F, BLOCK_N), R)
    gathers = row_ids_R is not None
    const = _get_constants(gathers, options, addend is not None)
    dy_desc = make_gluon_descriptor(dy, (BLOCK_M, BLOCK_K))
    w2_desc = make_gluon_descriptor(w2_eDF, (BLOCK_K, BLOCK_N))
    h_desc = make_gluon_descriptor(h_RC, (BLOCK_M, BLOCK_N // 4))
    u_desc = m_desc = rank = None
    if addend is not None:
        u_Rr, m_erF = addend
        u_desc, rank = make_gluon_descriptor(u_Rr, (BLOCK_M, BLOCK_K)), u_Rr.shape[1]
        m_desc = make_gluon_descriptor(m_erF, (BLOCK_K, BLOCK_N))
    row_ids, grid = row_ids_R if gathers else tiles.map, count_sms(dy.device)
    args = (dy, dy_desc, w2_desc, row_ids, tiles.map, weights_R, h_desc, a_RF, dh_RC, parts)
    sizes = (u_desc, m_desc, rank, R, D, F)
    launch(sm90_bf16_grouped_nn_act_bwd_kernel, grid, *args, *sizes, CONST=const, num_warps=4)
    sums = (parts, offsets_e, dweights_R, dh_RC, a_RF, offsets_e.shape[0], R, F, parts.shape[0])
    grid = CLEARED_ROWS + cdiv(R, ROWS_PER_SUM)
    launch(_finish_bwd_kernel, grid, *sums, CLEARED=CLEARED_ROWS, BLOCK=ROWS_PER_SUM)
    return dh_RC, dweights_R, a_RF
