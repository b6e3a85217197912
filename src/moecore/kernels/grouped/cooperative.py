"""Grouped products of contiguous rows on Hopper: two warp groups share a tile of 128 x 256.

    cooperative_gemm        out[r] = a[r] @ b[expert(r)]
    cooperative_activation  h[r] = x[r] @ w1[expert(r)]^T,  out[r] = act(h[r]) * weight[r]

Both products may have an `Addend`, added before anything is rounded.

Letters: R expert rows (length), e experts, M N K the sizes of one product, D model dim, F hidden
dim, C = 2F columns of h. One persistent program per multiprocessor:

    loading warp      fills a ring of stages with blocks of a and b, by TMA  (_load_step)
    warp group 0, 1   multiply the upper and the lower half of every tile    (_multiply_tiles)
    two more warps    compute the activation of h, with FC1                  (_store_activation)

The warps share the ring, the tiles, and `stage`: blocks of out for TMA to store, or gate and up of
each group, with two barriers per group: staged when gate and up are there, released when the two
more warps have read them.

TMA stores the staged half of a tile while the group continues with the next tile. Where an expert's
rows end, or F ends within a tile of h, threads store the part instead (store_block).

2 * R * N * K floating-point operations. Bytes moved at least: a (R * K elements), b and the outputs
once each. Tiles of this size read a quarter less through the L2 cache than those of `pingpong.py`,
which saves power: a training step is bound by power (docs/findings.md#power-and-clocks).
"""

from functools import cache

from torch import Tensor

from moecore.kernels.common import count_sms, launch, make_gluon_descriptor, split_halves
from moecore.kernels.grouped.skeleton import (
    HAS_FEW_REGISTERS,
    Addend,
    GroupedConstants,
    Ring,
    RowTiling,
    fence_staging_buffer,
    load_row_tiles,
    locate_output_tile,
    make_barriers,
    release_previous_stage,
    store_block,
    wait_for_stage,
    wait_for_staging_buffer,
)
from moecore.kernels.rows.activation import ActivationOptions
from moecore.kernels.rows.activation_kernel import activate
from moecore.kernels.rows.row_tiles import BLOCK_M, RowTiles
from moecore.kernels.triton_api import gl, gluon, hopper, thread_barrier, tma_load, tma_store

BLOCK_N, BLOCK_K, STAGES = 256, 64, 3
GROUP_M = 8  # row tiles that share weights in L2
EPILOGUE_ROWS = 8 if HAS_FEW_REGISTERS else 16  # of an activation, at a time in registers
FEWER_ROWS = {"situ_glu": 8}  # of activations of which 16 rows do not fit the registers
# Of consumers without an activation, then of consumers and epilogue with an activation.
CONSUMER_REGISTERS = {False: 240, True: 200 if HAS_FEW_REGISTERS else 208}
EPILOGUE_REGISTERS, PRODUCER_REGISTERS = 104 if HAS_FEW_REGISTERS else 88, 24


@gluon.jit
def _load_step(operands, location, k, ring, stage_idx, barrier, CONST: gl.constexpr):
    """Loading warp: start loads of a step's blocks of a and b, or then of the LoRA part."""
    if CONST.ADDEND:
        a_desc, b_desc, K, N, u_desc, m_desc, rank = operands
        first = gl.cdiv(K, CONST.BLOCK_K) * CONST.BLOCK_K
        if k < first:
            _load_blocks(a_desc, b_desc, K, N, location, k, ring, stage_idx, barrier, CONST)
        else:
            _load_blocks(
                u_desc, m_desc, rank, N, location, k - first, ring, stage_idx, barrier, CONST
            )
    else:
        a_desc, b_desc, K, N = operands
        _load_blocks(a_desc, b_desc, K, N, location, k, ring, stage_idx, barrier, CONST)


@gluon.jit
def _load_blocks(a_desc, b_desc, K, N, location, k, ring, stage_idx, barrier, CONST: gl.constexpr):
    """Start TMA loads of columns from `k` on, of a tile's rows and of its expert's matrix."""
    expert, row, _, n = location
    HALF_N: gl.constexpr = CONST.BLOCK_N // 2
    b = ring.b.index(stage_idx)
    tma_load(a_desc, [row, k], barrier, ring.a.index(stage_idx))
    if CONST.ACT is not None:  # gate columns, then the up columns that belong to them
        first = expert * 2 * N + n * HALF_N
        tma_load(b_desc, [first, k], barrier, b.slice(0, HALF_N, 0))
        tma_load(b_desc, [first + N, k], barrier, b.slice(HALF_N, HALF_N, 0))
    elif CONST.B_IS_NK:
        tma_load(b_desc, [expert * N + n * CONST.BLOCK_N, k], barrier, b)
    else:
        tma_load(b_desc, [expert * K + k, n * CONST.BLOCK_N], barrier, b)


@gluon.jit
def _store_activation(weights_ptr, h_ptr, out_ptr, staging, tiles, N, CONST: gl.constexpr):
    """Epilogue warps: store all tiles' weighted activation, and FC1's output of partial tiles."""
    N = N // 8 * 8  # as in _multiply_tiles
    HALF_M: gl.constexpr = CONST.BLOCK_M // 2
    HALF_N: gl.constexpr = CONST.BLOCK_N // 2
    ROWS: gl.constexpr = CONST.EPILOGUE_ROWS
    ACT: gl.constexpr = CONST.ACT
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    out_smem, staged, released = staging
    parity = 0
    for tile in range(gl.program_id(0), tiles.num_rows * tiles.num_columns, gl.num_programs(0)):
        _, first, end, n = locate_output_tile(tile, tiles, CONST.GROUP_M)
        column = n * HALF_N
        for group in gl.static_range(2):
            hopper.mbarrier.wait(staged.index(group), parity)
            is_full = (first + (group + 1) * HALF_M <= end) & (column + HALF_N <= N)
            for i in gl.static_range(HALF_M // ROWS):
                row = first + group * HALF_M + i * ROWS
                gate = out_smem.index(group).slice(i * ROWS, ROWS, 0).load(layout)
                up = out_smem.index(group + 2).slice(i * ROWS, ROWS, 0).load(layout)
                if i == HALF_M // ROWS - 1:
                    thread_barrier()  # all have read the last rows
                    hopper.mbarrier.arrive(released.index(group), count=1)
                if not is_full:
                    store_block(h_ptr, gate, row, end, column, N, 2 * N)
                    store_block(h_ptr + N, up, row, end, column, N, 2 * N)
                rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
                weights = gl.load(weights_ptr + rows, mask=rows < end, other=0.0)
                # The activation reads h as it is stored: the backward recomputes it from there.
                gate, up = gate.to(gl.float32), up.to(gl.float32)
                a = activate(gate, up, ACT)
                out = (a * weights[:, None]).to(dtype)
                store_block(out_ptr, out, row, end, column, N, N)
                if HAS_FEW_REGISTERS:
                    thread_barrier()  # the next rows are loaded later
        parity = 1 - parity


@gluon.jit
def _multiply_tiles(GROUP: gl.constexpr, outputs, staging, ring, tiles, K, N, CONST: gl.constexpr):
    """Multiplying warps: store half of every tile's rows, or stage them for `_store_activation`."""
    N = N // 8 * 8  # it is a multiple of 8 already; now the compiler knows, and stores 16 bytes
    BLOCK_N: gl.constexpr = CONST.BLOCK_N
    HALF_M: gl.constexpr = CONST.BLOCK_M // 2
    HALF_N: gl.constexpr = BLOCK_N // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, BLOCK_N, 16]
    )
    h_desc, out_ptr, out_desc = outputs
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    out_smem = staging[0]
    parity = 1
    step = 0
    for tile in range(gl.program_id(0), tiles.num_rows * tiles.num_columns, gl.num_programs(0)):
        _, row, end, n = locate_output_tile(tile, tiles, CONST.GROUP_M)
        row += GROUP * HALF_M
        total_MN = gl.zeros((HALF_M, BLOCK_N), gl.float32, layout)
        for k in range(0, K, CONST.BLOCK_K):
            slot = wait_for_stage(ring, step)
            a = ring.a.index(slot).slice(GROUP * HALF_M, HALF_M, 0)
            b = ring.b.index(slot)
            if CONST.B_IS_NK:
                b = b.permute((1, 0))
            total_MN = hopper.warpgroup_mma(a, b, total_MN, is_async=True)
            total_MN = hopper.warpgroup_mma_wait(1, deps=(total_MN,))
            release_previous_stage(ring, step, k > 0)
            step += 1
        total_MN = hopper.warpgroup_mma_wait(0, deps=(total_MN,))
        release_previous_stage(ring, step, True)
        out = total_MN.to(dtype)
        if CONST.ACT is not None:
            column = n * HALF_N
            gate, up = split_halves(out)
            staged, released = staging[1], staging[2]
            hopper.mbarrier.wait(released.index(GROUP), parity)
            parity = 1 - parity
            wait_for_staging_buffer()
            out_smem.index(GROUP).store(gate)
            out_smem.index(GROUP + 2).store(up)
            fence_staging_buffer()
            hopper.mbarrier.arrive(staged.index(GROUP), count=1)
            if (row + HALF_M <= end) & (column + HALF_N <= N):
                tma_store(h_desc, [row, column], out_smem.index(GROUP))
                tma_store(h_desc, [row, N + column], out_smem.index(GROUP + 2))
        elif row + HALF_M <= end:
            wait_for_staging_buffer()
            out_smem.index(GROUP).store(out)
            fence_staging_buffer()
            tma_store(out_desc, [row, n * BLOCK_N], out_smem.index(GROUP))
        else:
            wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
            lower, upper = split_halves(out)
            column = n * BLOCK_N
            store_block(out_ptr, gl.convert_layout(lower, wide), row, end, column, N, N)
            column += HALF_N
            store_block(out_ptr, gl.convert_layout(upper, wide), row, end, column, N, N)
    hopper.tma.store_wait(0)


@gluon.jit
def sm90_bf16_grouped_kernel(
    a_desc,  # [R, K] as blocks [BLOCK_M, BLOCK_K]
    b_desc,  # [e * N, K] as blocks [WIDTH, BLOCK_K], or [e * K, N] as blocks [BLOCK_K, BLOCK_N]
    map_ptr,  # see `rows/row_tiles.py`
    weights_ptr,  # [R] fp32, or None with h: the product alone
    h_ptr,  # [R, 2F], out
    h_desc,  # the same in blocks like those of out_desc
    out_ptr,  # [R, N]; rows past the last offset stay as they are, in both outputs
    out_desc,  # the same as blocks [BLOCK_M / 2, BLOCK_N], with h half as wide
    u_desc,  # LoRA rows [R, rank] in blocks as of a_desc; None = no LoRA
    m_desc,  # LoRA matrices in blocks as of b_desc, with rank in place of K; None = no LoRA
    K,
    N,
    rank,  # of LoRA; None = no LoRA
    CONST: gl.constexpr,  # GroupedConstants
):
    """Write each row of a times its expert's matrix b to out_ptr, [rows, N].

    If CONST.ACT, h_ptr receives this product h (gate and up), and out_ptr act(h) * weight.
    """
    BLOCK_M: gl.constexpr = CONST.BLOCK_M
    BLOCK_N: gl.constexpr = CONST.BLOCK_N
    BLOCK_K: gl.constexpr = CONST.BLOCK_K
    STAGES: gl.constexpr = CONST.STAGES
    dtype: gl.constexpr = b_desc.dtype
    a_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], a_desc.layout)
    if CONST.B_IS_NK:
        b_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_K], b_desc.layout)
    else:
        b_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, BLOCK_N], b_desc.layout)
    blocks: gl.constexpr = 4 if CONST.ACT is not None else 2
    block: gl.constexpr = out_desc.block_type.shape
    out_smem = gl.allocate_shared_memory(dtype, [blocks, block[0], block[1]], out_desc.layout)
    full, empty = make_barriers(STAGES, 1), make_barriers(STAGES, 2)
    num_n = gl.cdiv(N, BLOCK_N // 2 if CONST.ACT is not None else BLOCK_N)
    ring = Ring(a_smem, b_smem, full, empty)
    if CONST.ACT is not None:
        stage = (out_smem, make_barriers(2, 1), make_barriers(2, 1))
    else:
        stage = (out_smem,)  # type: ignore[assignment]
    tiles = RowTiling(map_ptr, gl.load(map_ptr), num_n)
    if CONST.ADDEND:
        operands = (a_desc, b_desc, K, N, u_desc, m_desc, rank)
        K = gl.cdiv(K, BLOCK_K) * BLOCK_K + rank  # what is summed
    else:
        operands = (a_desc, b_desc, K, N)  # type: ignore[assignment]
    outputs = (h_desc, out_ptr, out_desc)
    if CONST.ACT is not None:
        gl.warp_specialize(
            [
                (_multiply_tiles, (0, outputs, stage, ring, tiles, K, N, CONST)),
                (_multiply_tiles, (1, outputs, stage, ring, tiles, K, N, CONST)),
                (_store_activation, (weights_ptr, h_ptr, out_ptr, stage, tiles, N, CONST)),
                (load_row_tiles, (gl.constexpr(_load_step), operands, ring, tiles, K, CONST)),
            ],
            [4, 2, 1],
            [CONST.CONSUMER_REGISTERS, CONST.EPILOGUE_REGISTERS, CONST.PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply_tiles, (0, outputs, stage, ring, tiles, K, N, CONST)),
                (_multiply_tiles, (1, outputs, stage, ring, tiles, K, N, CONST)),
                (load_row_tiles, (gl.constexpr(_load_step), operands, ring, tiles, K, CONST)),
            ],
            [4, 1],
            [CONST.CONSUMER_REGISTERS, CONST.PRODUCER_REGISTERS],
        )


@cache
def _make_constants(
    b_is_NK: bool, options: ActivationOptions | None, has_addend: bool
) -> GroupedConstants:
    """Return the kernel's constants; `options` None = the product without an activation."""
    return GroupedConstants(
        *(BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES, PRODUCER_REGISTERS),
        CONSUMER_REGISTERS=CONSUMER_REGISTERS[options is not None],
        EPILOGUE_REGISTERS=EPILOGUE_REGISTERS,
        EPILOGUE_ROWS=FEWER_ROWS.get(options.kind, EPILOGUE_ROWS) if options else 0,
        ACT=options.constants if options else None,
        B_IS_NK=b_is_NK,
        ADDEND=has_addend,
    )


def _launch_cooperative_kernel(
    a: Tensor,
    b: Tensor,
    tiles: RowTiles,
    out: Tensor,
    addend: Addend | None,
    h_RC: Tensor | None = None,
    weights_R: Tensor | None = None,
    options: ActivationOptions | None = None,
) -> None:
    """Launch the kernel: `out` = the product; with `options` h_RC = the product, `out` = act(h)."""
    K, N = a.shape[1], out.shape[1]
    b_is_NK = b.stride(1) == 1
    b = b.transpose(1, 2) if b_is_NK else b
    width = BLOCK_N if h_RC is None else BLOCK_N // 2
    block = (BLOCK_M // 2, width)
    const = _make_constants(b_is_NK, options, addend is not None)
    a_block, b_block = (BLOCK_M, BLOCK_K), (width, BLOCK_K) if b_is_NK else (BLOCK_K, BLOCK_N)
    a_desc, b_desc = make_gluon_descriptor(a, a_block), make_gluon_descriptor(b, b_block)
    u_desc = m_desc = rank = None
    if addend is not None:
        u_Rr, m = addend.rows_Rr, addend.b_erN
        u_desc, rank = make_gluon_descriptor(u_Rr, a_block), u_Rr.shape[1]
        m_desc = make_gluon_descriptor(m.transpose(1, 2) if b_is_NK else m, b_block)
    h_desc = None if h_RC is None else make_gluon_descriptor(h_RC, block)
    out_desc = make_gluon_descriptor(out, block)
    args = (a_desc, b_desc, tiles.map, weights_R, h_RC, h_desc, out, out_desc, u_desc, m_desc)
    grid = count_sms(a.device)
    launch(sm90_bf16_grouped_kernel, grid, *args, K, N, rank, CONST=const, num_warps=4)


def cooperative_gemm(
    a_RK: Tensor, b_eKN: Tensor, tiles: RowTiles, *, addend: Addend | None = None
) -> Tensor:
    """Return each expert row times its expert's matrix, [R, N]. No autograd, no host sync.

    Summed in fp32, rounded once to `a_RK.dtype`. Rows past the last expert's are uninitialised.

    Args:
        a_RK: R rows in expert order, bf16 or fp16, contiguous; `tiles` is their `map_row_tiles`.
        b_eKN: contiguous, or the transpose of a contiguous [e, N, K]. K and N are multiples of 8.
        addend: LoRA part, added before the result is rounded; None = no LoRA.
    """
    out_RN = a_RK.new_empty(a_RK.shape[0], b_eKN.shape[2])
    if out_RN.numel():
        _launch_cooperative_kernel(a_RK, b_eKN, tiles, out_RN, addend)
    return out_RN


def cooperative_activation(
    x_RD: Tensor,
    w1_eCD: Tensor,
    tiles: RowTiles,
    weights_R: Tensor,
    options: ActivationOptions,
    *,
    addend: Addend | None = None,
) -> tuple[Tensor, Tensor]:
    """Return FC1's output h [R, 2F] and act(h) * weight [R, F]. No autograd, no host sync.

    Rows past the last expert's are uninitialised. `options` is a gated activation, not interleaved.

    Args:
        x_RD, tiles, addend: as for `cooperative_gemm`.
        w1_eCD: [experts, 2F, D] gate rows then up rows, contiguous; D and F multiples of 8.
        weights_R: fp32 routing weight of each expert row.
    """
    R, C = x_RD.shape[0], w1_eCD.shape[1]
    h_RC, a_RF = x_RD.new_empty(R, C), x_RD.new_empty(R, C // 2)
    if R:
        w1_eDC = w1_eCD.transpose(1, 2)
        _launch_cooperative_kernel(x_RD, w1_eDC, tiles, a_RF, addend, h_RC, weights_R, options)
    return h_RC, a_RF
