"""Grouped products on Hopper with epilogues that cost no time: two warp groups take turns.

    PLAIN            out[r] = a[row(r)] @ b[expert(r)]
    ACTIVATION       h[r] = a[row(r)] @ b[expert(r)],  out[r] = act(h[r]) * weight[r]
    ACTIVATION_BWD   da[r] = a[row(r)] @ b[expert(r)], which stays on the chip; with h[r] it gives
                     dh[r], act(h[r]) * weight[r] again, and dweight[r] = <da[r], act(h[r])>

row(r) is row_ids[r] where the rows are gathered while they are loaded, else r itself.

Letters: S source rows, R expert rows (capacity), e experts, M N K the sizes of one product, F
hidden dim (N of the last two), C = 2F columns of h.

One persistent program per multiprocessor. Warps of their own fill a ring of stages: b and
contiguous rows by TMA, gathered rows by asynchronous copies. One warp group multiplies a tile of
BLOCK_M x BLOCK_N while the other one stores the tile before, so that memory and tensor cores work
at the same time. 2 * R * N * K floating-point operations. Bytes moved at least: a (R * K elements),
b and the outputs once each, and h for ACTIVATION_BWD.

The Triton kernels of `grouped_gemm.py` compute the same; these run where they are faster.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from moecore.kernels.activation import ActivationOptions
from moecore.kernels.common import (
    cdiv,
    gluon_descriptor,
    next_power_of_2,
    num_sms,
    on_device,
    tl,
    triton,
)
from moecore.kernels.pingpong_kernel import pingpong_kernel

PLAIN, ACTIVATION, ACTIVATION_BWD = 0, 1, 2
BLOCK_M, BLOCK_N, BLOCK_K, STAGES = 128, 128, 64, 5
GROUP_M = {False: 4, True: 8}  # row tiles that share weights in L2, without and with a gather
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 224, 56
MAP_FIELDS = 4  # int32 words of a row tile: expert, first row, end of the expert's rows, unused
CLEARED_ROWS = 64  # after the last expert row, which `grouped_wgrad` multiplies by 0
ROWS_PER_SUM = 1024


@triton.jit
def _find_row(
    row_ids_ptr,  # [R] int32, rising within an expert
    starts,  # [E] int32, of the experts
    ends,  # [E] int32
    source_row,
    num_steps,
):
    """Return each expert's first row whose source row is not below, else its end."""
    low, high = starts, ends
    for _ in range(num_steps):
        middle = (low + high) // 2
        source = tl.load(row_ids_ptr + middle, mask=low < high, other=0)
        below = (low < high) & (source < source_row)
        high = tl.where(below, high, middle)
        low = tl.where(below, middle + 1, low)
    return low


@triton.jit
def _map_row_tiles_kernel(
    offsets_ptr,  # [e] int32
    row_ids_ptr,  # [R] int32; unused without RANGES
    ranges_ptr,  # [pieces, RANGES, 2] int32 first and last + 1 of source rows; likewise
    map_ptr,  # [pieces, most, FIELDS] int32, out; word 0 is the number of row tiles
    most,  # rows of one piece's map
    num_experts,
    num_steps,  # of a search among all rows
    E_POW2: tl.constexpr,
    RANGES: tl.constexpr,  # of a piece; 0: the only piece is all rows
    BLOCK_M: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    experts = tl.arange(0, E_POW2)
    exists = experts < num_experts
    ends = tl.load(offsets_ptr + experts, mask=exists, other=0)
    starts = tl.load(offsets_ptr + experts - 1, mask=exists & (experts > 0), other=0)
    mine, piece = tl.program_id(0), tl.program_id(1)
    map_ptr += piece * most * FIELDS
    before = 0  # tiles of the ranges before
    for i in tl.static_range(max(1, RANGES)):
        low, high = starts, ends
        if RANGES > 0:
            bounds = ranges_ptr + (piece * RANGES + i) * 2
            low = _find_row(row_ids_ptr, starts, ends, tl.load(bounds), num_steps)
            high = _find_row(row_ids_ptr, starts, ends, tl.load(bounds + 1), num_steps)
            high = tl.maximum(low, high)
        tiles = tl.where(exists, (high - low + BLOCK_M - 1) // BLOCK_M, 0)
        first = before + tl.sum(tl.where(experts < mine, tiles, 0), 0)
        count = tl.sum(tl.where(experts == mine, tiles, 0), 0)
        start = tl.sum(tl.where(experts == mine, low, 0), 0)
        end = tl.sum(tl.where(experts == mine, high, 0), 0)
        for done in range(0, count, BLOCK):
            tile = done + tl.arange(0, BLOCK)
            at = map_ptr + (1 + first + tile) * FIELDS
            tl.store(at, tl.full([BLOCK], 0, tl.int32) + mine, mask=tile < count)
            tl.store(at + 1, start + tile * BLOCK_M, mask=tile < count)
            tl.store(at + 2, tl.full([BLOCK], 0, tl.int32) + end, mask=tile < count)
        before += tl.sum(tiles, 0)
    if mine == 0:
        tl.store(map_ptr, before)


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
        part = parts_ptr + rows
        for _ in range(num_parts):
            total += tl.load(part, mask=used, other=0.0)
            part += R
        tl.store(dweights_ptr + rows, total, mask=rows < R)


def map_row_tiles(offsets_e: Tensor, num_rows: int) -> Tensor:
    """Return which rows of which expert each row tile covers, for all products of one index.

    Args:
        offsets_e: int32 on the device, running sum of the experts' rows.
        num_rows: R, the capacity.

    Returns:
        int32 [1 + most row tiles, MAP_FIELDS]; the first word counts the row tiles.
    """
    return _map(offsets_e, offsets_e, None, num_rows)[0]


def map_piece_tiles(offsets_e: Tensor, row_ids_R: Tensor, ranges_PN2: Tensor) -> Tensor:
    """Return the same for each of several pieces, in which the rows arrive.

    Args:
        offsets_e: int32 on the device, running sum of the experts' rows.
        row_ids_R: int32, source row of each expert row, rising within an expert.
        ranges_PN2: int32, contiguous: first and last + 1 source row of each piece's N ranges.

    Returns:
        int32 [P, 1 + most row tiles, MAP_FIELDS], one map per piece.

    Example, tiles of 2 rows, offsets [3, 5], row ids [0, 2, 3, 1, 2], pieces [[0, 2]] and [[2, 4]]:
    the first has tiles (expert 0, rows 0 to 1) and (1, 3 to 4), the second (0, 1 to 3) and (1, 4 to
    5).
    """
    return _map(offsets_e, row_ids_R, ranges_PN2, row_ids_R.shape[0])


def _map(offsets_e: Tensor, row_ids_R: Tensor, ranges_PN2: Tensor | None, num_rows: int) -> Tensor:
    e = offsets_e.shape[0]
    pieces, ranges = (1, 0) if ranges_PN2 is None else ranges_PN2.shape[:2]
    most = 1 + cdiv(num_rows, BLOCK_M) + e * max(1, ranges)
    tiles = offsets_e.new_empty(pieces, most, MAP_FIELDS)
    with on_device(offsets_e):
        _map_row_tiles_kernel[(e, pieces)](
            offsets_e,
            row_ids_R,
            offsets_e if ranges_PN2 is None else ranges_PN2,
            tiles,
            most,
            e,
            num_rows.bit_length(),
            E_POW2=next_power_of_2(e),
            RANGES=ranges,
            BLOCK_M=BLOCK_M,
            FIELDS=MAP_FIELDS,
            BLOCK=32,
        )
    return tiles


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
    """Return the kernel's arguments and its compile-time ones; outputs are weights to dweights."""
    K = a.shape[1]
    b_is_NK = b.stride(1) == 1
    flat = (b.transpose(1, 2) if b_is_NK else b).reshape(-1, K if b_is_NK else num_columns)
    width = BLOCK_N // 2 if epilogue == ACTIVATION else BLOCK_N
    weights_R, h, *rest = outputs
    h_desc = gluon_descriptor(h, (BLOCK_M, BLOCK_N // 4)) if epilogue == ACTIVATION_BWD else None
    args = (
        a,
        gluon_descriptor(a, (BLOCK_M, BLOCK_K)),
        gluon_descriptor(flat, (width, BLOCK_K) if b_is_NK else (BLOCK_K, BLOCK_N)),
        tiles if row_ids_R is None else row_ids_R,
        tiles,
        weights_R,
        h,
        h_desc,
        *rest,
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
        "GROUP_M": GROUP_M[row_ids_R is not None],
        "STAGES": STAGES,
        "FIELDS": MAP_FIELDS,
        "CONSUMER_REGISTERS": CONSUMER_REGISTERS,
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
        "num_warps": 4,
    }
    return args, constants


def _launch(device_of: Tensor, args: tuple[object, ...], constants: dict[str, object]) -> None:
    with on_device(device_of):
        pingpong_kernel[(num_sms(device_of.device),)](*args, **constants)


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
    x_RD: Tensor,
    w1_eCD: Tensor,
    tiles: Iterable[Tensor],
    weights_R: Tensor,
    options: ActivationOptions,
) -> tuple[Tensor, Tensor]:
    """Return FC1's output and the weighted activation of it. No autograd, no host sync.

    Args:
        x_RD: rows in expert order, bf16 or fp16, contiguous.
        w1_eCD: [e, 2F, D] gate rows then up rows, contiguous; D and F multiples of 8.
        tiles: one map, or those of all pieces; a piece is read after its map was asked for.
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
        for part in tiles:
            sizes = (None, R, C // 2, ACTIVATION, options)
            _launch(x_RD, *launch_arguments(x_RD, b, part, *sizes, *outputs))
    return h_RC, a_RF


def pingpong_activation_bwd(
    dy: Tensor,
    w2_eDF: Tensor,
    tiles: Iterable[Tensor],
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
        tiles: as for `pingpong_activation`.
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
    parts = weights_R.new_empty(cdiv(F, BLOCK_N), R)
    outputs = (weights_R, h_RC, a_RF, dh_RC, parts)
    for part in tiles:
        sizes = (row_ids_R, R, F, ACTIVATION_BWD, options)
        _launch(dy, *launch_arguments(dy, w2_eDF, part, *sizes, *outputs))
    e = offsets_e.shape[0]
    with on_device(dy):
        _finish_bwd_kernel[(CLEARED_ROWS + cdiv(R, ROWS_PER_SUM),)](
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
