"""Grouped products on Hopper with epilogues that cost no time: two warp groups take turns.

    PLAIN:           out[r] = a[row(r)] @ b[expert(r)]
    ACTIVATION:      h[r] = a[row(r)] @ b[expert(r)],  out[r] = act(h[r]) * weight[r]
    ACTIVATION_BWD:  da[r] = a[row(r)] @ b[expert(r)], which stays on the chip; from it and h[r] come
                     dh[r], act(h[r]) * weight[r] again, and dweight[r] = <da[r], act(h[r])>

row(r) is row_ids[r] where the rows are gathered while they are loaded, else r itself.

Letters: S source rows, R expert rows (capacity), e experts, M N K the sizes of one product, F hidden
dim (N of the last two), C = 2F columns of h.

One persistent program per multiprocessor. Warps of their own fill a ring of stages: b and contiguous
rows by TMA, gathered rows by asynchronous copies. One warp group multiplies a tile of BLOCK_M x
BLOCK_N while the other one stores the tile before, so that memory and tensor cores work at the same
time. 2 * R * N * K floating-point operations. Bytes moved at least: a once (R * K elements), b once,
the outputs once, and h once for ACTIVATION_BWD.

The plain Triton kernels of `grouped_gemm.py` compute the same; this is what runs where it is faster.
"""

from functools import partial

import torch
from torch import Tensor

from moecore.kernels.activation import ActivationOptions, activate, activate_with_gradients
from moecore.kernels.common import (
    GluonDescriptor,
    async_load,
    gl,
    gluon,
    hopper,
    num_sms,
    on_device,
    tl,
    tma_load,
    triton,
)

PLAIN, ACTIVATION, ACTIVATION_BWD = 0, 1, 2
BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M = 128, 128, 64, 5, 8
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 216, 56
MAP_FIELDS = 4  # int32 words of a row tile: expert, first row, end of the expert's rows, unused
CLEARED_ROWS = 64  # after the last expert row, which `grouped_wgrad` multiplies by 0
ROWS_PER_SUM = 1024


@triton.jit
def _map_row_tiles_kernel(
    offsets_ptr,  # [e] int32
    map_ptr,  # [1 + row tiles, MAP_FIELDS] int32, out; word 0 is the number of row tiles
    num_experts,
    E_POW2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    experts = tl.arange(0, E_POW2)
    exists = experts < num_experts
    ends = tl.load(offsets_ptr + experts, mask=exists, other=0)
    starts = tl.load(offsets_ptr + experts - 1, mask=exists & (experts > 0), other=0)
    tiles = tl.where(exists, (ends - starts + BLOCK_M - 1) // BLOCK_M, 0)
    mine = tl.program_id(0)
    first = tl.sum(tl.where(experts < mine, tiles, 0), 0)
    count = tl.sum(tl.where(experts == mine, tiles, 0), 0)
    start = tl.sum(tl.where(experts == mine, starts, 0), 0)
    end = tl.sum(tl.where(experts == mine, ends, 0), 0)
    for done in range(0, count, BLOCK):
        tile = done + tl.arange(0, BLOCK)
        at = map_ptr + (1 + first + tile) * FIELDS
        tl.store(at, tl.full([BLOCK], 0, tl.int32) + mine, mask=tile < count)
        tl.store(at + 1, start + tile * BLOCK_M, mask=tile < count)
        tl.store(at + 2, tl.full([BLOCK], 0, tl.int32) + end, mask=tile < count)
    if mine == 0:
        tl.store(map_ptr, tl.sum(tiles, 0))


@gluon.jit
def _locate(
    tile,  # number of the tile
    num_row_tiles,
    num_n,  # column tiles
    map_ptr,
    GROUP_M: gl.constexpr,
    FIELDS: gl.constexpr,
):
    """Return expert, first row, end of its rows, column tile; GROUP_M row tiles share weights."""
    width = GROUP_M * num_n
    first = tile // width * GROUP_M
    size = gl.minimum(num_row_tiles - first, GROUP_M)
    inside = tile % width
    at = map_ptr + (1 + first + inside % size) * FIELDS
    return gl.load(at), gl.load(at + 1), gl.load(at + 2), inside // size


@gluon.jit
def _produce(
    a_ptr,  # [S or R, K]
    a_desc,  # the same as blocks [BLOCK_M, BLOCK_K]
    b_desc,  # [e * N, K] as blocks [*, BLOCK_K], or [e * K, N] as blocks [BLOCK_K, BLOCK_N]
    row_ids_ptr,  # [R] int32; unused without GATHER
    map_ptr,
    a_smem,  # [STAGES, BLOCK_M, BLOCK_K]
    b_smem,  # [STAGES, BLOCK_N, BLOCK_K] or [STAGES, BLOCK_K, BLOCK_N]
    full,  # barriers: a stage has its data
    empty,  # barriers: a stage has been read
    K,
    N,
    num_row_tiles,
    num_n,
    EPILOGUE: gl.constexpr,
    GATHER: gl.constexpr,
    B_IS_NK: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    FIELDS: gl.constexpr,
):
    K = K // 8 * 8  # it is a multiple of 8 already; now the compiler knows, and copies 16 bytes
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    in_tile = gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    in_step = gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))
    WIDTH: gl.constexpr = BLOCK_N // 2 if EPILOGUE == 1 else BLOCK_N
    ELEMENTS: gl.constexpr = BLOCK_N if GATHER else BLOCK_M + BLOCK_N
    step = 0
    for tile in range(gl.program_id(0), num_row_tiles * num_n, gl.num_programs(0)):
        expert, row, end, n = _locate(tile, num_row_tiles, num_n, map_ptr, GROUP_M, FIELDS)
        if GATHER:
            in_rows = row + in_tile < end
            source = gl.load(row_ids_ptr + row + in_tile, mask=in_rows, other=0).to(gl.int64)
            a_rows = a_ptr + (source * K)[:, None] + in_step[None, :]
        for k in range(0, K, BLOCK_K):
            stage = step % STAGES
            bar = full.index(stage)
            b = b_smem.index(stage)
            hopper.mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            hopper.mbarrier.expect(bar, ELEMENTS * BLOCK_K * 2)
            if EPILOGUE == 1:  # gate columns, then the up columns that belong to them
                first = expert * 2 * N + n * WIDTH
                tma_load(b_desc, [first, k], bar, b.slice(0, WIDTH, 0))
                tma_load(b_desc, [first + N, k], bar, b.slice(WIDTH, WIDTH, 0))
            elif B_IS_NK:
                tma_load(b_desc, [expert * N + n * WIDTH, k], bar, b)
            else:
                tma_load(b_desc, [expert * K + k, n * WIDTH], bar, b)
            if GATHER:
                mask = in_rows[:, None] & (k + in_step < K)[None, :]
                async_load(a_smem.index(stage), a_rows + k, mask)
                hopper.async_copy.mbarrier_arrive(bar, increment_count=False)
            else:
                tma_load(a_desc, [row, k], bar, a_smem.index(stage))
            step += 1


@gluon.jit
def _halves(x):
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute([0, 2, 1]).split()


@gluon.jit
def _store(
    out_ptr,
    x,  # [BLOCK_M, columns]
    row,
    end,
    column,
    num_columns,
    row_stride,
):
    """Write a block, 16 bytes a thread and access."""
    LANES: gl.constexpr = x.shape[1] // 8
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0]
    )
    x = gl.convert_layout(x.to(out_ptr.dtype.element_ty), layout)
    rows = row + gl.arange(0, x.shape[0], gl.SliceLayout(1, layout))
    columns = column + gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))
    at = out_ptr + (rows.to(gl.int64) * row_stride)[:, None] + columns[None, :]
    gl.store(at, x, mask=(rows < end)[:, None] & (columns < num_columns)[None, :])


@gluon.jit
def _store_activation(
    total_MN,  # gate columns, then up columns
    weights_ptr,
    h_ptr,
    out_ptr,
    row,
    end,
    column,
    F,
    KIND: gl.constexpr,
    LIMIT: gl.constexpr,
    ALPHA: gl.constexpr,
):
    gate, up = _halves(total_MN)
    rows = row + gl.arange(0, gate.shape[0], gl.SliceLayout(1, gate.type.layout))
    weights = gl.load(weights_ptr + rows, mask=rows < end, other=0.0)
    gate = gate.to(h_ptr.dtype.element_ty)
    up = up.to(h_ptr.dtype.element_ty)
    _store(h_ptr, gate, row, end, column, F, 2 * F)
    _store(h_ptr + F, up, row, end, column, F, 2 * F)
    # The activation reads h as it is stored: the backward recomputes it from there.
    a = activate(gate.to(gl.float32), up.to(gl.float32), KIND, LIMIT, ALPHA)
    _store(out_ptr, a * weights[:, None], row, end, column, F, F)


@gluon.jit
def _store_activation_bwd(
    total_MN,  # da
    da_smem,  # [4, BLOCK_M, BLOCK_N / 4]: a loop over quarters needs few registers
    weights_ptr,
    h_ptr,
    dh_ptr,
    out_ptr,
    dweights_ptr,  # [BLOCK_M] and on: this column tile's part
    row,
    end,
    column,
    F,
    KIND: gl.constexpr,
    LIMIT: gl.constexpr,
    ALPHA: gl.constexpr,
):
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    left, right = _halves(total_MN.to(dtype))
    part0, part1 = _halves(left)
    part2, part3 = _halves(right)
    da_smem.index(0).store(part0)
    da_smem.index(1).store(part1)
    da_smem.index(2).store(part2)
    da_smem.index(3).store(part3)
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
        at = (rows.to(gl.int64) * (2 * F))[:, None] + columns[None, :]
        gate = gl.load(h_ptr + at, mask=mask, other=0.0).to(gl.float32)
        up = gl.load(h_ptr + at + F, mask=mask, other=0.0).to(gl.float32)
        da = da_smem.index(i).load(layout).to(gl.float32)
        a, da_dgate, da_dup = activate_with_gradients(gate, up, KIND, LIMIT, ALPHA)
        dweights += gl.sum(gl.where(mask, da * a, 0.0), 1)
        out = out_ptr + (rows.to(gl.int64) * F)[:, None] + columns[None, :]
        gl.store(out, (a * weights[:, None]).to(dtype), mask=mask)
        da = da * weights[:, None]
        gl.store(dh_ptr + at, (da * da_dgate).to(dtype), mask=mask)
        gl.store(dh_ptr + at + F, (da * da_dup).to(dtype), mask=mask)
    gl.store(dweights_ptr + rows, dweights, mask=in_rows)


@gluon.jit
def _consume(
    GROUP: gl.constexpr,
    turn,  # two barriers: a group's turn to multiply
    da_smem,
    map_ptr,
    weights_ptr,
    h_ptr,
    out_ptr,
    dh_ptr,
    dweights_ptr,
    R,
    a_smem,
    b_smem,
    full,
    empty,
    K,
    N,
    num_row_tiles,
    num_n,
    EPILOGUE: gl.constexpr,
    B_IS_NK: gl.constexpr,
    KIND: gl.constexpr,
    LIMIT: gl.constexpr,
    ALPHA: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    FIELDS: gl.constexpr,
):
    """Multiply and store every other tile: group 0 the first, group 1 the second, and so on."""
    N = N // 8 * 8  # as above
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, BLOCK_N, 16]
    )
    WIDTH: gl.constexpr = BLOCK_N // 2 if EPILOGUE == 1 else BLOCK_N
    num_k = gl.cdiv(K, BLOCK_K)
    step = GROUP * num_k
    parity = 1 - GROUP
    first = gl.program_id(0) + GROUP * gl.num_programs(0)
    for tile in range(first, num_row_tiles * num_n, 2 * gl.num_programs(0)):
        _, row, end, n = _locate(tile, num_row_tiles, num_n, map_ptr, GROUP_M, FIELDS)
        total_MN = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, layout)
        # Not before the other group has read its last stage: a barrier tells even phases from odd
        # ones only, so a group that waits too early takes the other's data for its own.
        hopper.mbarrier.wait(turn.index(GROUP), parity)
        parity = 1 - parity
        for i in range(num_k):
            stage = step % STAGES
            hopper.mbarrier.wait(full.index(stage), step // STAGES & 1)
            hopper.fence_async_shared()  # gathered rows came through the generic proxy
            b = b_smem.index(stage)
            if B_IS_NK:
                b = b.permute((1, 0))
            total_MN = hopper.warpgroup_mma(a_smem.index(stage), b, total_MN, is_async=True)
            total_MN = hopper.warpgroup_mma_wait(1, deps=(total_MN,))
            before = empty.index((step + STAGES - 1) % STAGES)
            hopper.mbarrier.arrive(before, count=1, pred=i > 0)
            step += 1
        hopper.mbarrier.arrive(turn.index(1 - GROUP), count=1)
        total_MN = hopper.warpgroup_mma_wait(0, deps=(total_MN,))
        hopper.mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        step += num_k  # the other group's
        column = n * WIDTH
        if EPILOGUE == 0:
            left, right = _halves(total_MN.to(out_ptr.dtype.element_ty))
            _store(out_ptr, left, row, end, column, N, N)
            _store(out_ptr, right, row, end, column + BLOCK_N // 2, N, N)
        elif EPILOGUE == 1:
            _store_activation(
                total_MN, weights_ptr, h_ptr, out_ptr, row, end, column, N, KIND, LIMIT, ALPHA
            )
        else:
            _store_activation_bwd(
                total_MN,
                da_smem,
                weights_ptr,
                h_ptr,
                dh_ptr,
                out_ptr,
                dweights_ptr + n.to(gl.int64) * R,
                row,
                end,
                column,
                N,
                KIND,
                LIMIT,
                ALPHA,
            )


@partial(gluon.jit, do_not_specialize=["R"])
def _pingpong_kernel(
    a_ptr,  # [S or R, K]
    a_desc,  # the same as blocks [BLOCK_M, BLOCK_K]
    b_desc,  # see _produce
    row_ids_ptr,  # [R] int32; unused without GATHER
    map_ptr,  # see _map_row_tiles_kernel
    weights_ptr,  # [R] fp32; unused by PLAIN, as what follows
    h_ptr,  # [R, 2F]; out for ACTIVATION, in for ACTIVATION_BWD
    out_ptr,  # [R, N]; rows past the last offset stay as they are, in all outputs
    dh_ptr,  # [R, 2F], out
    dweights_ptr,  # [column tiles, R] fp32, out
    R,
    K,
    N,
    EPILOGUE: gl.constexpr,
    GATHER: gl.constexpr,
    B_IS_NK: gl.constexpr,
    KIND: gl.constexpr,
    LIMIT: gl.constexpr,
    ALPHA: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    FIELDS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    dtype: gl.constexpr = b_desc.dtype
    a_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], a_desc.layout)
    if B_IS_NK:
        b_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_K], b_desc.layout)
    else:
        b_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, BLOCK_N], b_desc.layout)
    bar_layout: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], bar_layout)
    for i in gl.static_range(STAGES):
        # One arrival for the TMA, one for each producing thread's copies.
        hopper.mbarrier.init(full.index(i), count=129 if GATHER else 1)
        hopper.mbarrier.init(empty.index(i), count=1)
    hopper.mbarrier.init(turn.index(0), count=1)
    hopper.mbarrier.init(turn.index(1), count=1)
    if EPILOGUE == 2:
        staged: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [1, 0])
        da0 = gl.allocate_shared_memory(dtype, [4, BLOCK_M, BLOCK_N // 4], staged)
        da1 = gl.allocate_shared_memory(dtype, [4, BLOCK_M, BLOCK_N // 4], staged)
    else:
        da0: gl.constexpr = None
        da1: gl.constexpr = None
    WIDTH: gl.constexpr = BLOCK_N // 2 if EPILOGUE == 1 else BLOCK_N
    num_n = gl.cdiv(N, WIDTH)
    num_row_tiles = gl.load(map_ptr)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    0,
                    turn,
                    da0,
                    map_ptr,
                    weights_ptr,
                    h_ptr,
                    out_ptr,
                    dh_ptr,
                    dweights_ptr,
                    R,
                    a_smem,
                    b_smem,
                    full,
                    empty,
                    K,
                    N,
                    num_row_tiles,
                    num_n,
                    EPILOGUE,
                    B_IS_NK,
                    KIND,
                    LIMIT,
                    ALPHA,
                    BLOCK_M,
                    BLOCK_N,
                    BLOCK_K,
                    GROUP_M,
                    STAGES,
                    FIELDS,
                ),
            ),
            (
                _consume,
                (
                    1,
                    turn,
                    da1,
                    map_ptr,
                    weights_ptr,
                    h_ptr,
                    out_ptr,
                    dh_ptr,
                    dweights_ptr,
                    R,
                    a_smem,
                    b_smem,
                    full,
                    empty,
                    K,
                    N,
                    num_row_tiles,
                    num_n,
                    EPILOGUE,
                    B_IS_NK,
                    KIND,
                    LIMIT,
                    ALPHA,
                    BLOCK_M,
                    BLOCK_N,
                    BLOCK_K,
                    GROUP_M,
                    STAGES,
                    FIELDS,
                ),
            ),
            (
                _produce,
                (
                    a_ptr,
                    a_desc,
                    b_desc,
                    row_ids_ptr,
                    map_ptr,
                    a_smem,
                    b_smem,
                    full,
                    empty,
                    K,
                    N,
                    num_row_tiles,
                    num_n,
                    EPILOGUE,
                    GATHER,
                    B_IS_NK,
                    BLOCK_M,
                    BLOCK_N,
                    BLOCK_K,
                    GROUP_M,
                    STAGES,
                    FIELDS,
                ),
            ),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@triton.jit
def _finish_bwd_kernel(
    parts_ptr,  # [PARTS, R] fp32
    offsets_ptr,  # [e] int32
    dweights_ptr,  # [R] fp32, out
    dh_ptr,  # [R, 2F]
    a_ptr,  # [R, F]
    num_experts,
    R,
    F,
    num_parts,
    CLEARED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the column tiles' parts of dweights, and clear the rows after the last used one."""
    num_rows = tl.load(offsets_ptr + num_experts - 1)
    pid = tl.program_id(0)
    if pid < CLEARED:
        row = num_rows.to(tl.int64) + pid
        for column in range(0, 3 * F, BLOCK):
            columns = column + tl.arange(0, BLOCK)
            in_dh = (columns < 2 * F) & (row < R)
            tl.store(
                dh_ptr + row * 2 * F + columns, tl.zeros([BLOCK], dh_ptr.dtype.element_ty), in_dh
            )
            in_a = (columns >= 2 * F) & (columns < 3 * F) & (row < R)
            at = a_ptr + row * F + columns - 2 * F
            tl.store(at, tl.zeros([BLOCK], a_ptr.dtype.element_ty), in_a)
    else:
        rows = (pid - CLEARED) * BLOCK + tl.arange(0, BLOCK)
        used = rows < num_rows
        total = tl.zeros([BLOCK], tl.float32)
        for part in range(num_parts):
            total += tl.load(parts_ptr + part.to(tl.int64) * R + rows, mask=used, other=0.0)
        tl.store(dweights_ptr + rows, total, mask=rows < R)


def map_row_tiles(offsets_e: Tensor, num_rows: int) -> Tensor:
    """Return which rows of which expert each row tile covers, for all products of one index.

    Args:
        offsets_e: int32 on the device, running sum of the experts' rows.
        num_rows: R, the capacity.

    Returns:
        int32 [1 + most row tiles, MAP_FIELDS]; the first word counts the row tiles.
    """
    e = offsets_e.shape[0]
    tiles = offsets_e.new_empty(1 + triton.cdiv(num_rows, BLOCK_M) + e, MAP_FIELDS)
    with on_device(offsets_e):
        _map_row_tiles_kernel[(e,)](
            offsets_e,
            tiles,
            e,
            E_POW2=triton.next_power_of_2(e),
            BLOCK_M=BLOCK_M,
            FIELDS=MAP_FIELDS,
            BLOCK=32,
        )
    return tiles


def _descriptor(x: Tensor, block: list[int]) -> GluonDescriptor:
    dtype = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return GluonDescriptor.from_tensor(x, block, layout)


def launch_arguments(
    a: Tensor,
    b: Tensor,
    tiles: Tensor,
    row_ids_R: Tensor | None,
    num_rows: int,
    num_columns: int,
    epilogue: int,
    options: ActivationOptions | None,
    *outputs: Tensor,
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return the kernel's arguments and its compile-time ones.

    Args:
        a, b, row_ids_R: as in `grouped_gemm`.
        tiles: from `map_row_tiles`.
        num_rows, num_columns: R and N.
        epilogue: PLAIN, ACTIVATION or ACTIVATION_BWD.
        options: the activation.
        outputs: weights, h, out, dh, dweights; any tensor where the epilogue has none.
    """
    K = a.shape[1]
    b_is_NK = b.stride(1) == 1
    flat = (b.transpose(1, 2) if b_is_NK else b).reshape(-1, K if b_is_NK else num_columns)
    width = BLOCK_N // 2 if epilogue == ACTIVATION else BLOCK_N
    args = (
        a,
        _descriptor(a, [BLOCK_M, BLOCK_K]),
        _descriptor(flat, [width, BLOCK_K] if b_is_NK else [BLOCK_K, BLOCK_N]),
        tiles if row_ids_R is None else row_ids_R,
        tiles,
        *outputs,
        num_rows,
        K,
        num_columns,
    )
    constants = {
        "EPILOGUE": epilogue,
        "GATHER": row_ids_R is not None,
        "B_IS_NK": b_is_NK,
        "KIND": options.kind if options else "",
        "LIMIT": options.limit if options else 0.0,
        "ALPHA": options.alpha if options else 0.0,
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
        "BLOCK_K": BLOCK_K,
        "GROUP_M": GROUP_M,
        "STAGES": STAGES,
        "FIELDS": MAP_FIELDS,
        "CONSUMER_REGISTERS": CONSUMER_REGISTERS,
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
        "num_warps": 4,
    }
    return args, constants


def _launch(device_of: Tensor, args: tuple[object, ...], constants: dict[str, object]) -> None:
    with on_device(device_of):
        _pingpong_kernel[(num_sms(device_of.device),)](*args, **constants)


def pingpong_gemm(
    a: Tensor, b: Tensor, tiles: Tensor, *, row_ids_R: Tensor | None = None
) -> Tensor:
    """Return each expert row times its expert's matrix. No autograd, no host sync.

    Args:
        a: [R, K] rows in expert order, or [S, K] source rows with `row_ids_R`; bf16 or fp16,
            contiguous.
        b: [e, K, N], dtype of `a`; contiguous, or the transpose of a contiguous [e, N, K]. K and N
            are multiples of 8.
        tiles: from `map_row_tiles`.
        row_ids_R: int32, the row of `a` that each expert row reads.

    Returns:
        [R, N], dtype of `a`, summed in fp32 and rounded once. Rows past the last expert's are
        uninitialised.
    """
    R, N = (a if row_ids_R is None else row_ids_R).shape[0], b.shape[2]
    out = a.new_empty(R, N)
    if out.numel() and a.shape[0]:
        none = (tiles, a, out, a, a)
        _launch(a, *launch_arguments(a, b, tiles, row_ids_R, R, N, PLAIN, None, *none))
    return out


def pingpong_activation(
    x_RD: Tensor, w1_eCD: Tensor, tiles: Tensor, weights_R: Tensor, options: ActivationOptions
) -> tuple[Tensor, Tensor]:
    """Return FC1's output and the weighted activation of it. No autograd, no host sync.

    Args:
        x_RD: rows in expert order, bf16 or fp16, contiguous.
        w1_eCD: [e, 2F, D] gate rows then up rows, contiguous; D and F multiples of 8.
        tiles: from `map_row_tiles`.
        weights_R: fp32 routing weights.
        options: a gated activation, not interleaved.

    Returns:
        h_RC [R, 2F] and a_RF [R, F]; rows past the last expert's are uninitialised.
    """
    R, C = x_RD.shape[0], w1_eCD.shape[1]
    h_RC, a_RF = x_RD.new_empty(R, C), x_RD.new_empty(R, C // 2)
    if R:
        outputs = (weights_R, h_RC, a_RF, h_RC, weights_R)
        b = w1_eCD.transpose(1, 2)
        found = launch_arguments(x_RD, b, tiles, None, R, C // 2, ACTIVATION, options, *outputs)
        _launch(x_RD, *found)
    return h_RC, a_RF


def pingpong_activation_bwd(
    dy: Tensor,
    w2_eDF: Tensor,
    tiles: Tensor,
    h_RC: Tensor,
    weights_R: Tensor,
    offsets_e: Tensor,
    options: ActivationOptions,
    *,
    row_ids_R: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients behind FC2 and the activation, and the activation again.

    No autograd, no host sync. da = dy @ w2 stays on the chip, rounded to the dtype of dy.

    Args:
        dy: [R, D] rows in expert order, or [S, D] source rows with `row_ids_R`; bf16 or fp16,
            contiguous.
        w2_eDF: contiguous; D and F multiples of 8.
        tiles: from `map_row_tiles`.
        h_RC: [R, 2F] FC1's output, contiguous.
        weights_R: fp32 routing weights.
        offsets_e: int32 running sum of the experts' rows.
        options: a gated activation, not interleaved.
        row_ids_R: int32, the row of `dy` that each expert row reads.

    Returns:
        dh_RC, dweights_R (fp32, 0 past the last expert's rows) and a_RF, the weighted activation.
        Of dh and a, CLEARED_ROWS rows past the last expert's are 0; the rest is uninitialised.
    """
    R, F = h_RC.shape[0], w2_eDF.shape[2]
    dh_RC, a_RF = torch.empty_like(h_RC), h_RC.new_empty(R, F)
    dweights_R = torch.empty_like(weights_R)
    if not R:
        return dh_RC, dweights_R, a_RF
    parts = weights_R.new_empty(triton.cdiv(F, BLOCK_N), R)
    outputs = (weights_R, h_RC, a_RF, dh_RC, parts)
    found = launch_arguments(dy, w2_eDF, tiles, row_ids_R, R, F, ACTIVATION_BWD, options, *outputs)
    _launch(dy, *found)
    e = offsets_e.shape[0]
    with on_device(dy):
        _finish_bwd_kernel[(CLEARED_ROWS + triton.cdiv(R, ROWS_PER_SUM),)](
            parts,
            offsets_e,
            dweights_R,
            dh_RC,
            a_RF,
            e,
            R,
            F,
            parts.shape[0],
            CLEARED=CLEARED_ROWS,
            BLOCK=ROWS_PER_SUM,
        )
    return dh_RC, dweights_R, a_RF
