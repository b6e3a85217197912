"""Weight gradients of grouped products, with the source rows gathered while they are loaded.

    out[i] = sum over the rows r of expert i of  x[row_ids[r]]^T  y[r]      [M, N], or its transpose

FC1's gradient has the source rows as x and dH as y, transposed; FC2's has dY and the activation.

Letters: S source rows, R expert rows (capacity), e experts, M columns of x, N columns of y.

Hopper only; elsewhere a gather and torch's grouped product. One persistent program runs on each
multiprocessor. Four of its warps fill a ring of stages: x by asynchronous copies, because its rows
lie apart, y by TMA. Two warp groups multiply a tile of BLOCK_M x BLOCK_N. A copy of a row past the
expert's last one fills in zeros, so what y holds there is multiplied by 0. x takes the narrow side
of the tile: copies of 256 columns take longer than the product of a stage ("wgrad gather" in
docs/log.md). 2 * R * M * N floating-point operations.
"""

from functools import partial

import torch
from torch import Tensor

from moecore._compat import grouped_mm
from moecore.kernels.common import (
    GluonDescriptor,
    async_load,
    gl,
    gluon,
    has_hopper_kernels,
    hopper,
    num_sms,
    on_device,
    thread_barrier,
    tma_load,
    tma_store,
)

BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M = 128, 256, 64, 3, 8
CONSUMER_WARPS, PRODUCER_WARPS, PRODUCER_REGISTERS = 8, 4, 56


def grouped_wgrad_ref(
    x_SM: Tensor, y_RN: Tensor, row_ids_R: Tensor, offsets_e: Tensor, *, transposed: bool = False
) -> Tensor:
    """Return the gradients expert by expert, summed in fp32. Host sync.

    Args and Returns: as `grouped_wgrad`.
    """
    dtype = torch.promote_types(x_SM.dtype, torch.float32)
    out, start = [], 0
    for stop in offsets_e.tolist():
        x = x_SM.index_select(0, row_ids_R[start:stop]).to(dtype)
        product = x.T @ y_RN[start:stop].to(dtype)
        out.append(product.T if transposed else product)
        start = stop
    return torch.stack(out).to(x_SM.dtype)


@gluon.jit
def _tile(
    tile,  # number of the tile
    num_m,
    num_n,
    GROUP_M: gl.constexpr,
):
    """Return expert, row tile and column tile: GROUP_M row tiles inside, columns outside."""
    per_expert = num_m * num_n
    expert = tile // per_expert
    inside = tile % per_expert
    width = GROUP_M * num_n
    first = inside // width * GROUP_M
    size = gl.minimum(num_m - first, GROUP_M)
    inside = inside % width
    return expert, first + inside % size, inside // size


@gluon.jit
def _range(offsets_ptr, expert):
    """Return the first row of an expert, and the first after its last."""
    start = gl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
    return start, gl.load(offsets_ptr + expert)


@gluon.jit
def _produce(
    x_ptr,  # [S, M]
    y_desc,  # [R, N] as blocks [BLOCK_K, BLOCK_N]
    row_ids_ptr,  # [R] int32
    offsets_ptr,  # [e] int32
    x_smem,  # [STAGES, BLOCK_K, BLOCK_M]
    y_smem,  # [STAGES, BLOCK_K, BLOCK_N]
    full,  # barriers: a stage has its data
    empty,  # barriers: a stage has been read
    M,
    num_m,
    num_n,
    num_tiles,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
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
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        expert, m, n = _tile(tile, num_m, num_n, GROUP_M)
        start, end = _range(offsets_ptr, expert)
        # Row ids are read three steps ahead: a copy cannot start before its address is known.
        ids0 = gl.load(ids + start, mask=start + id_in_step < end, other=0)
        row = start + BLOCK_K
        ids1 = gl.load(ids + row, mask=row + id_in_step < end, other=0)
        row += BLOCK_K
        ids2 = gl.load(ids + row, mask=row + id_in_step < end, other=0)
        for row in range(start, end, BLOCK_K):
            stage = step % STAGES
            source = gl.convert_layout(ids0, row_layout).to(gl.int64)
            ids0 = ids1
            ids1 = ids2
            ahead = row + 3 * BLOCK_K
            ids2 = gl.load(ids + ahead, mask=ahead + id_in_step < end, other=0)
            x = x_ptr + (source * M)[:, None] + (m * BLOCK_M + columns)[None, :]
            mask = (row + in_step < end)[:, None] & (m * BLOCK_M + columns < M)[None, :]
            bar = full.index(stage)
            hopper.mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            hopper.mbarrier.expect(bar, y_desc.block_type.nbytes)
            tma_load(y_desc, [row, n * BLOCK_N], bar, y_smem.index(stage))
            async_load(x_smem.index(stage), x, mask)
            hopper.async_copy.mbarrier_arrive(bar, increment_count=False)
            step += 1


@gluon.jit
def _add_to(
    out_ptr,  # one expert's [rows, num_columns], fp32 or bf16
    x,  # [*, *] fp32
    row,
    column,
    num_rows,
    num_columns,
):
    """Add a block to global memory, 4 values a thread and access."""
    THREADS: gl.constexpr = 32 if x.shape[1] >= 128 else x.shape[1] // 4
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 4], [32 // THREADS, THREADS], [gl.num_warps(), 1], [1, 0]
    )
    x = gl.convert_layout(x, layout)
    rows = row + gl.arange(0, x.shape[0], gl.SliceLayout(1, layout))
    columns = column + gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))
    at = out_ptr + (rows.to(gl.int64) * num_columns)[:, None] + columns[None, :]
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    old = gl.load(at, mask=mask, other=0.0).to(gl.float32)
    gl.store(at, (old + x).to(out_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _halves(x):
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute([0, 2, 1]).split()


@gluon.jit
def _add_tile(
    out_ptr,
    total_MN,
    m,
    n,
    M,
    N,
    TRANSPOSED: gl.constexpr,
):
    """Add a tile to global memory in four parts, so that the staging buffer stays small."""
    PART: gl.constexpr = total_MN.shape[1] // 4
    left, right = _halves(total_MN)
    part0, part1 = _halves(left)
    part2, part3 = _halves(right)
    row = m * total_MN.shape[0]
    column = n * total_MN.shape[1]
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
            _add_to(out_ptr, part.permute([1, 0]), column + i * PART, row, N, M)
        else:
            _add_to(out_ptr, part, row, column + i * PART, M, N)


@gluon.jit
def _consume(
    offsets_ptr,
    x_smem,
    y_smem,
    full,
    empty,
    out_smem,  # [1, BLOCK_M, BLOCK_N], or transposed; None with ADD
    out_desc,  # [e, M, N] in such blocks, or transposed; None with ADD
    out_ptr,
    M,
    N,
    num_m,
    num_n,
    num_tiles,
    ADD: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
):
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, BLOCK_N, 16]
    )
    step = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        expert, m, n = _tile(tile, num_m, num_n, GROUP_M)
        start, end = _range(offsets_ptr, expert)
        total_MN = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, layout)
        for row in range(start, end, BLOCK_K):
            stage = step % STAGES
            hopper.mbarrier.wait(full.index(stage), step // STAGES & 1)
            hopper.fence_async_shared()  # x came through the generic proxy, wgmma reads the other
            x_T = x_smem.index(stage).permute((1, 0))
            total_MN = hopper.warpgroup_mma(x_T, y_smem.index(stage), total_MN, is_async=True)
            total_MN = hopper.warpgroup_mma_wait(1, deps=(total_MN,))
            thread_barrier()  # both warp groups have read the stage before this one
            before = empty.index((step + STAGES - 1) % STAGES)
            hopper.mbarrier.arrive(before, count=1, pred=row > start)
            step += 1
        total_MN = hopper.warpgroup_mma_wait(0, deps=(total_MN,))
        thread_barrier()
        before = empty.index((step + STAGES - 1) % STAGES)
        hopper.mbarrier.arrive(before, count=1, pred=end > start)
        if ADD:
            expert_out = out_ptr + expert.to(gl.int64) * M * N
            _add_tile(expert_out, total_MN, m, n, M, N, TRANSPOSED)
        else:
            out = total_MN.to(out_desc.dtype)
            hopper.tma.store_wait(0)  # the last tile has left the staging buffer
            thread_barrier()
            if TRANSPOSED:
                out_smem.reshape((BLOCK_N, BLOCK_M)).permute((1, 0)).store(out)
            else:
                out_smem.reshape((BLOCK_M, BLOCK_N)).store(out)
            hopper.fence_async_shared()
            thread_barrier()
            if TRANSPOSED:
                at = [expert, n * BLOCK_N, m * BLOCK_M]
            else:
                at = [expert, m * BLOCK_M, n * BLOCK_N]
            tma_store(out_desc, at, out_smem)
    if not ADD:
        hopper.tma.store_wait(0)


@partial(gluon.jit, do_not_specialize=["num_experts"])
def _grouped_wgrad_kernel(
    x_ptr,  # [S, M]
    y_desc,  # [R, N] as blocks [BLOCK_K, BLOCK_N]
    row_ids_ptr,  # [R] int32
    offsets_ptr,  # [e] int32
    out_desc,  # [e, M, N] as blocks [1, BLOCK_M, BLOCK_N], or transposed; None with ADD
    out_ptr,  # the same in plain
    num_experts,
    M,
    N,
    ADD: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    X_LAYOUT: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    PRODUCER_WARPS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    dtype: gl.constexpr = y_desc.dtype
    x_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, BLOCK_M], X_LAYOUT)
    y_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, BLOCK_N], y_desc.layout)
    if ADD:
        out_smem: gl.constexpr = None
    else:
        out_smem = gl.allocate_shared_memory(dtype, out_desc.block_type.shape, out_desc.layout)
    bar_layout: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    for i in gl.static_range(STAGES):
        # One arrival for the TMA, one for each producing thread's copies.
        hopper.mbarrier.init(full.index(i), count=1 + 32 * PRODUCER_WARPS)
        hopper.mbarrier.init(empty.index(i), count=1)
    num_m = gl.cdiv(M, BLOCK_M)
    num_n = gl.cdiv(N, BLOCK_N)
    num_tiles = num_m * num_n * num_experts
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    offsets_ptr,
                    x_smem,
                    y_smem,
                    full,
                    empty,
                    out_smem,
                    out_desc,
                    out_ptr,
                    M,
                    N,
                    num_m,
                    num_n,
                    num_tiles,
                    ADD,
                    TRANSPOSED,
                    BLOCK_M,
                    BLOCK_N,
                    BLOCK_K,
                    GROUP_M,
                    STAGES,
                ),
            ),
            (
                _produce,
                (
                    x_ptr,
                    y_desc,
                    row_ids_ptr,
                    offsets_ptr,
                    x_smem,
                    y_smem,
                    full,
                    empty,
                    M,
                    num_m,
                    num_n,
                    num_tiles,
                    BLOCK_M,
                    BLOCK_N,
                    BLOCK_K,
                    GROUP_M,
                    STAGES,
                    PRODUCER_WARPS,
                ),
            ),
        ],
        [PRODUCER_WARPS],
        [PRODUCER_REGISTERS],
    )


def _descriptor(x: Tensor, block: list[int]) -> GluonDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(block, _gluon_dtype(x))
    return GluonDescriptor.from_tensor(x, block, layout)


def _gluon_dtype(x: Tensor) -> gl.dtype:
    return gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16


def launch_arguments(
    x_SM: Tensor,
    y_RN: Tensor,
    row_ids_R: Tensor,
    offsets_e: Tensor,
    out: Tensor,
    *,
    transposed: bool,
    add: bool,
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return the kernel's arguments and its compile-time ones."""
    M, N = x_SM.shape[1], y_RN.shape[1]
    block = [1, BLOCK_N, BLOCK_M] if transposed else [1, BLOCK_M, BLOCK_N]
    args = (
        x_SM,
        _descriptor(y_RN, [BLOCK_K, BLOCK_N]),
        row_ids_R,
        offsets_e,
        None if add else _descriptor(out, block),
        out,
        offsets_e.shape[0],
        M,
        N,
    )
    x_layout = gl.NVMMASharedLayout.get_default_for([BLOCK_K, BLOCK_M], _gluon_dtype(x_SM))
    constants = {
        "ADD": add,
        "TRANSPOSED": transposed,
        "X_LAYOUT": x_layout,
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
        "BLOCK_K": BLOCK_K,
        "GROUP_M": GROUP_M,
        "STAGES": STAGES,
        "PRODUCER_WARPS": PRODUCER_WARPS,
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
        "num_warps": CONSUMER_WARPS,
    }
    return args, constants


def grouped_wgrad(
    x_SM: Tensor,
    y_RN: Tensor,
    row_ids_R: Tensor,
    offsets_e: Tensor,
    *,
    transposed: bool = False,
    main_grad: Tensor | None = None,
) -> Tensor:
    """Return each expert's sum of outer products x[row_ids[r]] y[r]. No autograd, no host sync.

    Args:
        x_SM: [S, M] source rows, bf16 or fp16, contiguous; M a multiple of 8.
        y_RN: [R, N] rows in expert order, dtype of x, contiguous; N a multiple of 8. Up to 63 rows
            past an expert's last one are multiplied by 0, so they must be finite: rows past
            offsets_e[-1] may not be uninitialised, and a NaN or an infinity in one expert's first
            rows reaches the expert before it too.
        row_ids_R: int32, the row of x that each expert row reads.
        offsets_e: int32 on the device, running sum of the experts' rows, at most R.
        transposed: return [e, N, M] instead of [e, M, N].
        main_grad: fp32 or bf16, contiguous, of the output's shape: the result is added to it in
            place, in fp32, without another pass, and it is returned.

    Returns:
        [e, M, N] (or transposed), summed in fp32; in the dtype of x, rounded once, or `main_grad`.
        Zero (nothing added) for an expert without rows. Bit-reproducible.
    """
    if not has_hopper_kernels(x_SM.device):
        return _plain(x_SM, y_RN, row_ids_R, offsets_e, transposed, main_grad)
    x_SM, y_RN = _aligned(x_SM), _aligned(y_RN)
    (M, N), e = (x_SM.shape[1], y_RN.shape[1]), offsets_e.shape[0]
    shape = (e, N, M) if transposed else (e, M, N)
    out = x_SM.new_empty(shape) if main_grad is None else main_grad
    if not row_ids_R.shape[0] or not x_SM.shape[0]:
        return out.zero_() if main_grad is None else out
    add = main_grad is not None
    args, constants = launch_arguments(
        x_SM, y_RN, row_ids_R, offsets_e, out, transposed=transposed, add=add
    )
    with on_device(x_SM):
        _grouped_wgrad_kernel[(num_sms(x_SM.device),)](*args, **constants)
    return out


def _aligned(x: Tensor) -> Tensor:
    """Views that start between two 16-byte lines are copied."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _plain(
    x_SM: Tensor,
    y_RN: Tensor,
    row_ids_R: Tensor,
    offsets_e: Tensor,
    transposed: bool,
    main_grad: Tensor | None,
) -> Tensor:
    """The same by torch: gathered rows in memory, and another pass to add."""
    x_RM = x_SM.index_select(0, row_ids_R)
    left, right = (y_RN, x_RM) if transposed else (x_RM, y_RN)
    out = grouped_mm(left.t(), right, offs=offsets_e)
    return out if main_grad is None else main_grad.add_(out)
