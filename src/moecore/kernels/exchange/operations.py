"""Dispatch of rows and combine of partial sums, by stores into the peers' memory.

    spread       token t of rank g -> row g * C + t of every rank that owns one of its experts
    reduce       row g * C + t of every such rank -> token t of rank g, added in fp32 in rank order
    limit_rows   offsets of expert rows, clamped to a length

`dispatch_rows` is the gradient of `combine_rows`, and the reverse. A source row is a received
token, numbered by (rank, token), so no rank counts, sorts or waits for a size. Its slots are its
expert rows: a spread copies to them, and a reduce adds them and sends the sum.

Each operation is one launch, without a host sync. The first programs store rows into the peers'
buffers, interleaved by token because one peer after the other is a third slower. After each chunk
of tokens they release one flag on every peer. The other programs wait for a flag, then copy or add
the chunk's rows. Flags: `exchange/protocol.py`. Sums by copy engines: `exchange/copies.py`.

Letters: T local tokens, C max_tokens of any rank, G ranks, S = G * C source rows, D columns, K
choices per token, R expert rows, N slots per source row. Bytes moved, with P ranks per token and b
bytes per element: P * T * D * b over the links, and as many again in the receiver's memory.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from moecore.kernels.common import can_use_kernel, device_of, launch, next_power_of_2
from moecore.kernels.exchange.buffer import (
    AT_ROWS,
    AT_WEIGHTS,
    NEEDED_ROWS,
    NEEDED_WORD,
    OPERATION,
    SUMS_SLOT,
    SymmetricBuffer,
    view_int32,
)
from moecore.kernels.exchange.protocol import (
    find_peers,
    finish_operation,
    get_remaining_time,
    raise_flags,
    wait_for_flags,
)
from moecore.kernels.exchange.rows import (
    Choices,
    RowChunk,
    add_partial_sums,
    copy_rows,
    locate_source_rows,
    push_choices,
    push_rows,
    receive_choices,
)
from moecore.kernels.exchange.slots import copy_to_slots, list_pair_slots, list_row_slots, push_sums
from moecore.kernels.exchange.tiles import RowFormat, compute_list_size, make_exchange_constants
from moecore.kernels.triton_api import tl, triton

Half = Literal["both", "push", "receive"]


class DispatchedRows(NamedTuple):
    """The rows that a rank received, one per (source rank, token), with expert ids and weights."""

    rows_SD: Tensor  # holes are uninitialised
    ids_SK: Tensor  # int32, global expert ids; -1 in holes
    weights_SK: Tensor  # fp32; 0 where the id is -1
    peers_T: Tensor  # int64, bit g of each local token: rank g needs it
    places_S: Tensor  # int32, the index of the row, -1 = a hole; as [S, 1] the slots of rows_SD

    @classmethod
    def empty(cls, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, S: int) -> "DispatchedRows":
        """Return uninitialised tensors for S rows, with the arguments' columns and dtypes."""
        (T, K), D = ids_TK.shape, x_TD.shape[1]
        choices = (ids_TK.new_empty(S, K), weights_TK.new_empty(S, K))
        peers_T = ids_TK.new_empty(T, dtype=torch.int64)
        return cls(x_TD.new_empty(S, D), *choices, peers_T, ids_TK.new_empty(S))


class Ptrs(NamedTuple):
    """Pointers for a kernel: rows to send, output, and the indices that map rows to output."""

    rows: Any  # [T, D] to spread, [R, D] to add
    peers: Any  # [T] int64 ranks by bit
    places: Any  # [S] int32
    slots: Any  # [S, N] int32; the places where N = 1 and choices travel
    out: Any  # [R, D] or [T, D], out


# Numbers of a tuple would be specialised; those of a launch that may change are arguments.
UNSPECIALIZED = ["num_tokens", "max_tokens", "num_chunks", "rank", "timeout_ns"]


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "block_experts"])
def _spread_kernel(
    ptrs,  # Ptrs; peers and places are outputs with choices
    choices,  # Choices [T, K]; None: they came with an earlier spread
    out_choices,  # Choices [S, K], out, with choices
    lists_ptr,  # [programs, LIST] int32, with N > 1
    buffer,  # ExchangePointers
    num_tokens,  # T
    max_tokens,  # C
    num_chunks,
    rank,
    timeout_ns,  # nanoseconds
    block_experts,  # experts of one block
    HALF: tl.constexpr,
    CONST: tl.constexpr,  # ExchangeConstants
):
    """Send local rows and choices to peers, or copy received ones to outputs, by program id."""
    pid = tl.program_id(0)
    operation = tl.load(buffer.state + OPERATION)
    slot = (operation % 2).to(tl.int64) * CONST.G * max_tokens
    first = rank.to(tl.int64) * max_tokens
    if HALF != "receive":
        if pid < CONST.NUM_PUSH:
            for number in range(pid, num_chunks, CONST.NUM_PUSH):
                if choices is not None:
                    find_peers(choices.ids, ptrs.peers, number, num_tokens, block_experts, CONST)
                chunk = RowChunk(number, num_tokens, max_tokens, rank)
                offset, at = slot * CONST.ROW_BYTES, slot + first
                push_rows(ptrs.rows, ptrs.peers, buffer.bases, offset, chunk, first, False, CONST)
                if choices is not None:
                    push_choices(choices, ptrs.peers, buffer.bases, chunk, at, False, CONST)
                raise_flags(buffer.bases, operation, number, num_chunks, rank, CONST)
    if HALF != "push":
        FIRST: tl.constexpr = CONST.NUM_PUSH if HALF == "both" else 0
        if pid >= FIRST:
            element = ptrs.out.dtype.element_ty
            base = tl.load(buffer.bases + AT_ROWS * CONST.G + rank) + slot * CONST.ROW_BYTES
            base = tl.multiple_of(base.to(tl.pointer_type(element)), 16)
            remaining = get_remaining_time(buffer, timeout_ns)
            for item in range(pid - FIRST, num_chunks * CONST.G, CONST.NUM_RECEIVE):
                number, source = item // CONST.G, (item + rank) % CONST.G
                rows, exists = locate_source_rows(source, number, max_tokens, CONST.CHUNK)
                if choices is None:  # known before the rows come
                    marks_ptr = ptrs.slots if CONST.N == 1 else ptrs.places
                    to = tl.load(marks_ptr + rows, mask=exists, other=-1)
                    if CONST.N > 1:
                        tl.debug_barrier()  # the last list is read; `wait_for_flags` ends with one
                        list_row_slots(
                            ptrs.slots, lists_ptr + pid * CONST.LIST, rows, exists, 0,
                            CONST.N, CONST.CHUNK, CONST.CHUNK, CONST.CHUNK, CONST.BLOCK_N,
                        )  # fmt: skip
                arrived = wait_for_flags(
                    buffer, operation, source, number, num_chunks, rank, remaining, 0, 1, CONST
                )
                remaining = tl.where(arrived, remaining, 0)
                if choices is not None:
                    to = receive_choices(
                        buffer.bases, out_choices, ptrs.places,
                        rows, exists, slot, arrived, rank, CONST,
                    )  # fmt: skip
                if arrived:
                    if CONST.N == 1:
                        copy_rows(base, ptrs.out, to, rows, CONST)
                    else:
                        copy_to_slots(base, ptrs.out, lists_ptr + pid * CONST.LIST, to, rows, CONST)
        finish_operation(buffer.state, operation)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _reduce_kernel(
    ptrs,  # Ptrs
    choices,  # Choices: slots [S, K] of the choices, fp32 gradients [R]; or None
    out_dweights_ptr,  # [T, K] fp32, out, with choices
    lists_ptr,  # [programs, LIST] int32, with N > 1
    buffer,  # ExchangePointers
    num_tokens,  # T
    max_tokens,  # C
    num_chunks,
    rank,
    timeout_ns,  # nanoseconds
    HALF: tl.constexpr,
    HAS_SUMS: tl.constexpr,  # rows came by `copy_sums_to_peers`
    CONST: tl.constexpr,  # ExchangeConstants
):
    """Send sums of expert rows to the tokens' ranks, or add the received sums, by program id."""
    pid = tl.program_id(0)
    operation = tl.load(buffer.state + OPERATION)
    slot = (operation % 2).to(tl.int64) * CONST.G * max_tokens
    if HALF != "receive":
        if pid < CONST.NUM_PUSH:
            first = slot + rank * max_tokens
            for number in range(pid, num_chunks, CONST.NUM_PUSH):
                chunk = RowChunk(number, num_tokens, max_tokens, rank)
                if CONST.N == 1 and not HAS_SUMS:
                    push_rows(ptrs.rows, ptrs.slots, buffer.bases, 0, chunk, first, True, CONST)
                if CONST.N > 1:
                    list_ptr = lists_ptr + pid * CONST.LIST
                    list_pair_slots(ptrs.slots, list_ptr, chunk, CONST)
                    push_sums(ptrs.rows, ptrs.places, list_ptr, buffer.bases, chunk, first, CONST)
                if choices is not None:
                    push_choices(choices, ptrs.places, buffer.bases, chunk, first, True, CONST)
                raise_flags(buffer.bases, operation, number, num_chunks, rank, CONST)
    if HALF != "push":
        FIRST: tl.constexpr = CONST.NUM_PUSH if HALF == "both" else 0
        if pid >= FIRST:
            element = ptrs.out.dtype.element_ty
            base = tl.load(buffer.bases + AT_ROWS * CONST.G + rank).to(tl.pointer_type(element))
            base = tl.multiple_of(base, 16)
            weights = tl.load(buffer.bases + AT_WEIGHTS * CONST.G + rank)
            weights = weights.to(tl.pointer_type(tl.float32))
            remaining = get_remaining_time(buffer, timeout_ns)
            first = SUMS_SLOT * CONST.G * max_tokens if HAS_SUMS else slot
            for number in range(pid - FIRST, num_chunks, CONST.NUM_RECEIVE):
                arrived = wait_for_flags(
                    buffer, operation, 0, number, num_chunks, rank, remaining, 1, CONST.G, CONST
                )
                remaining = tl.where(arrived, remaining, 0)
                chunk = RowChunk(number, num_tokens, max_tokens, rank)
                add_partial_sums(
                    base, ptrs.out, ptrs.peers, chunk, first,
                    CONST.D, CONST.RECEIVE_ROWS, CONST.RECEIVE_D, CONST,
                )  # fmt: skip
                if choices is not None:
                    add_partial_sums(
                        weights, out_dweights_ptr, ptrs.peers, chunk, slot,
                        CONST.K, CONST.CHUNK, CONST.BLOCK_K, CONST,
                    )  # fmt: skip
        finish_operation(buffer.state, operation)


def _make_grid(buffer: SymmetricBuffer, half: Half) -> tuple[int]:
    """Return the grid: the programs that send, that receive, or both, as `half` says."""
    layout = buffer.layout
    return ((half != "receive") * layout.num_push + (half != "push") * layout.num_receive,)


def _list_common_args(buffer: SymmetricBuffer, num_tokens: int, num_slots: int) -> tuple[Any, ...]:
    """Return arguments `lists_ptr` to `timeout_ns`; `num_slots`: maximum expert rows per row."""
    layout = buffer.layout
    entries = (layout.num_push + layout.num_receive) * compute_list_size(layout, num_slots)
    lists = torch.empty(entries, dtype=torch.int32, device=buffer.state.device) if entries else None
    sizes = (num_tokens, layout.max_tokens, layout.num_chunks, buffer.rank, buffer.timeout_ns)
    return (lists, buffer.kernel_tensors, *sizes)


def dispatch_rows_and_choices(
    buffer: SymmetricBuffer,
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    *,
    num_local_experts: int,
    etp: int,
    half: Half = "both",
) -> DispatchedRows:
    """Send tokens, ids and weights to the experts' ranks; return the received rows. Collective.

    Args:
        x_TD: tokens, at most `max_tokens`, contiguous, in any dtype; rows of at most `row_bytes`.
        ids_TK, weights_TK: int32 global expert ids (-1 = dropped), fp32 weights; contiguous.
        num_local_experts: experts that each group of `etp` ranks (expert tensor parallel) shares.
        half: "both"; in tests, "push" only sends and "receive" only receives.
    """
    out = DispatchedRows.empty(x_TD, ids_TK, weights_TK, buffer.layout.source_rows)
    ptrs = Ptrs(view_int32(x_TD), out.peers_T, out.places_S, out.places_S, view_int32(out.rows_SD))
    choices, out_choices = Choices(ids_TK, weights_TK), Choices(out.ids_SK, out.weights_SK)
    _launch_spread(buffer, half, ptrs, 1, choices, out_choices, num_local_experts, etp)
    return out


def dispatch_rows(
    buffer: SymmetricBuffer,
    x_TD: Tensor,
    peers_T: Tensor,
    places_S: Tensor,
    slots_SN: Tensor,
    num_rows: int,
    *,
    half: Half = "both",
) -> Tensor:
    """Send tokens' rows to the ranks in peers_T; return [num_rows, D] in expert order. Collective.

    peers_T and places_S are fields of `DispatchedRows`. slots_SN, int32, contiguous, has the output
    rows of each received row, -1 = none; other output rows are uninitialised. `half` is as in
    `dispatch_rows_and_choices`.
    """
    out_RD = x_TD.new_empty(num_rows, x_TD.shape[1])
    ptrs = Ptrs(view_int32(x_TD), peers_T, places_S, slots_SN, view_int32(out_RD))
    _launch_spread(buffer, half, ptrs, slots_SN.shape[1])
    return out_RD


def _launch_spread(
    buffer: SymmetricBuffer,
    half: Half,
    ptrs: Ptrs,
    num_slots: int,
    choices: Choices | None = None,
    out_choices: Choices | None = None,
    num_local_experts: int = 1,
    etp: int = 1,
) -> None:
    """Launch `_spread_kernel`; `num_slots`: maximum output rows per row. No choices = only rows."""
    T, row_format = ptrs.rows.shape[0], RowFormat(ptrs.rows.shape[1], ptrs.rows.itemsize)
    layout, common_args = buffer.layout, _list_common_args(buffer, T, num_slots)
    with device_of(buffer.state):
        _spread_kernel[_make_grid(buffer, half)](
            *(ptrs, choices, out_choices, *common_args, num_local_experts),
            HALF=half,
            CONST=make_exchange_constants(layout, row_format, num_slots, is_reduce=False, etp=etp),
            num_warps=layout.num_warps,
        )


def combine_rows(
    buffer: SymmetricBuffer,
    y_RD: Tensor,
    peers_T: Tensor,
    places_S: Tensor,
    slots_SN: Tensor,
    choices: tuple[Tensor, Tensor] | None = None,
    *,
    has_sums: bool = False,
    half: Half = "both",
) -> tuple[Tensor, Tensor | None]:
    """Return the sum of each token's expert rows on all ranks, in fp32 in rank order. Collective.

    Args:
        y_RD: contiguous rows of `row_bytes`, one of `SUM_DTYPES`; only rows in slots_SN are read.
        peers_T, places_S, half: as for `dispatch_rows`.
        slots_SN: int32, contiguous, the rows of y_RD to add for each received row, -1 = none.
        choices: contiguous fp32 [R], gradients of expert rows' routing weights, and int32 [S, K],
            the expert row of each token's k-th expert. The tokens' ranks receive the gradients.
        has_sums: whether y_RD has sums per received row [S, D], sent by `copy_sums_to_peers`.

    Returns:
        Sums [T, D], zero for a token sent to no rank; gradients of weights [T, K] fp32 or None.
    """
    T, row_format = peers_T.shape[0], RowFormat(y_RD.shape[1], y_RD.itemsize)
    out_TD = y_RD.new_empty(T, row_format.count)
    out_TK, of_choices = None, None
    if choices is not None:
        dweights_R, slots_SK = choices
        out_TK = dweights_R.new_empty(T, buffer.layout.top_k)
        of_choices = Choices(slots_SK, dweights_R)
    ptrs, num_slots = Ptrs(y_RD, peers_T, places_S, slots_SN, out_TD), slots_SN.shape[1]
    with device_of(buffer.state):
        _reduce_kernel[_make_grid(buffer, half)](
            *(ptrs, of_choices, out_TK, *_list_common_args(buffer, T, num_slots)),
            HALF=half,
            HAS_SUMS=has_sums,
            CONST=make_exchange_constants(buffer.layout, row_format, num_slots, is_reduce=True),
            num_warps=buffer.layout.num_warps,
        )
    return out_TD, out_TK


# `build_index` drops rows past its length. `limit_rows` records the needed rows for the host, and
# clamps offsets, so that products read no row past the length.


def limit_rows_ref(offsets_e: Tensor, max_rows: int, state: Tensor, host_report: Tensor) -> Tensor:
    """Compute `limit_rows` in plain PyTorch. Host sync."""
    demand = int(offsets_e.max())
    if demand > max_rows:
        state[NEEDED_WORD] = host_report[NEEDED_WORD] = max(demand, int(state[NEEDED_WORD]))
    return offsets_e.clamp(max=max_rows)


@triton.jit
def _limit_rows_kernel(
    offsets_ptr,  # [e] int32
    out_ptr,  # [e] int32, out
    state_ptr,  # [NUM_WORDS] int32
    report_ptr,  # [NUM_WORDS] int32
    max_rows,  # R
    NUM_LOCAL: tl.constexpr,
    BINS: tl.constexpr,  # power of two >= NUM_LOCAL
):
    """Write offsets clamped to `max_rows`; record the last offset if it exceeds `max_rows`."""
    experts = tl.arange(0, BINS)
    offsets = tl.load(offsets_ptr + experts, mask=experts < NUM_LOCAL, other=0)
    tl.store(out_ptr + experts, tl.minimum(offsets, max_rows), mask=experts < NUM_LOCAL)
    demand = tl.max(offsets, axis=0)
    peak = tl.maximum(demand, tl.load(state_ptr + NEEDED_ROWS))
    if demand > max_rows:
        tl.store(state_ptr + NEEDED_ROWS, peak)
        tl.store(report_ptr + NEEDED_ROWS, peak)


def limit_rows(offsets_e: Tensor, max_rows: int, state: Tensor, host_report: Tensor) -> Tensor:
    """Clamp offsets, int32 running sums of expert rows, to `max_rows`; return them. No host sync.

    If the last offset exceeds `max_rows`, the word NEEDED_ROWS of `state` (on the device) and
    `host_report` (host memory) are raised to this offset.
    """
    if not can_use_kernel(offsets_e):
        return limit_rows_ref(offsets_e, max_rows, state, host_report)
    out_e, e = torch.empty_like(offsets_e), offsets_e.shape[0]
    args = (offsets_e, out_e, state, host_report, max_rows)
    launch(_limit_rows_kernel, 1, *args, NUM_LOCAL=e, BINS=next_power_of_2(e))
    return out_e
