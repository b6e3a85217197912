"""Rows to the ranks that need them and partial sums back, by stores into the peers' memory.

    spread   token t of rank g -> row g * C + t of every rank that owns one of its experts
    reduce   row g * C + t of every such rank -> token t of rank g, added in fp32 in rank order

Each is the other's gradient. The slots of a source row name its rows in memory: one row of [S, D],
or its expert rows in [R, D], which a spread writes as copies and a reduce adds before the sum
travels. Source rows are numbered by (rank, token), so no rank counts, sorts or waits for a size: a
rank has S = G * C of them with holes, and a hole is never read.

One launch per operation. Its first programs push: they store rows into the peers' receive buffers,
token by token with the peers interleaved (one peer after the other is a third slower), and after
each chunk of tokens they release one flag on every peer. They never wait, so they always end. The
others receive: they wait for a flag, then copy or add the chunk's rows out of the buffer.

Slots, flags and memory order: `exchange/protocol.py`. Sums may also come by copy engines:
`exchange/copies.py`.

Letters: T local tokens, C max_tokens of any rank, G ranks, S = G * C source rows, D
columns, K choices per token, R expert rows, N slots per source row, one chunk is CHUNK tokens.
Bytes moved, with P ranks per token and b bytes per element: P * T * D * b over the links, and the
same read and written again by a receiver; expert rows on one side where the slots name them.
"""

from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from moecore.kernels.common import on_device, tl, triton
from moecore.kernels.exchange.buffer import (
    AT_ROWS,
    AT_WEIGHTS,
    ERROR_BEFORE,
    OPERATION,
    SUMS_SLOT,
    SymmetricBuffer,
    as_words,
)
from moecore.kernels.exchange.protocol import find_peers, finish, notify, wait
from moecore.kernels.exchange.rows import (
    add_parts,
    copy_rows,
    push_choices,
    push_rows,
    receive_choices,
    rows_of,
)
from moecore.kernels.exchange.slots import copy_to_slots, list_pairs, list_slots, push_sums
from moecore.kernels.exchange.tiles import Columns, constants, list_size

Half = Literal["both", "push", "receive"]


class SpreadChoices(NamedTuple):
    """What arrives with the rows of a dispatch.

    Attributes:
        rows_SD: received rows; holes are uninitialised.
        ids_SK: int32, global expert ids; -1 in holes.
        weights_SK: fp32; 0 where the id is -1.
        peers_T: int32, bit g of each local token: rank g needs it.
        places_S: int32, the row's own number, or -1 for a hole: as slots [S, 1] they name rows_SD.
    """

    rows_SD: Tensor
    ids_SK: Tensor
    weights_SK: Tensor
    peers_T: Tensor
    places_S: Tensor


def peers_ref(ids_TK: Tensor, num_local: int, num_blocks: int, etp: int) -> Tensor:
    """Return int32 [T], bit g set where rank g owns one of the token's experts.

    Rank g owns block g // etp: experts [g // etp * num_local, (g // etp + 1) * num_local).

    Example, 2 blocks of 2 experts, etp 2: ids [[0, 1], [1, 3], [-1, -1]] give [3, 15, 0].
    """
    block_TK = torch.where(ids_TK < 0, -1, ids_TK.long() // num_local)
    ranks = torch.arange(num_blocks * etp, device=ids_TK.device)
    needs_TG = (block_TK[:, :, None] == ranks // etp).any(1)
    return (needs_TG.long() << ranks).sum(1).to(torch.int32)


def spread_ref(x_GCN: Tensor, peers_GC: Tensor, rank: int, fill: float = 0) -> Tensor:
    """Return what `rank` receives, [S, N]: the rows of the tokens that it needs, else `fill`."""
    needed_GC1 = (peers_GC >> rank & 1).bool()[..., None]
    return torch.where(needed_GC1, x_GCN, fill).flatten(0, 1)


def reduce_ref(y_GSN: Tensor, peers_T: Tensor, rank: int) -> Tensor:
    """Return the sums of `rank`'s tokens, [T, N]; y_GSN[p] is what rank p holds."""
    G, S, N = y_GSN.shape
    T = peers_T.shape[0]
    out_TN = y_GSN.new_zeros(T, N, dtype=torch.promote_types(y_GSN.dtype, torch.float32))
    for p in range(G):
        part_TN = y_GSN[p].view(G, S // G, N)[rank, :T]
        out_TN = out_TN + torch.where((peers_T >> p & 1).bool()[:, None], part_TN, 0)
    return out_TN.to(y_GSN.dtype)


UNSPECIALIZED = ["num_tokens", "max_tokens", "num_chunks", "rank", "timeout"]


# `partial` because jit with options, as a decorator, needs Triton to be installed.
@partial(triton.jit, do_not_specialize=[*UNSPECIALIZED, "num_local"])
def _spread_kernel(
    x_ptr,  # [T, D] int32, whatever the rows are
    ids_ptr,  # [T, K] int32, with CHOICES
    weights_ptr,  # [T, K] fp32, with CHOICES
    peers_ptr,  # [T] int32 ranks by bit; out with CHOICES
    places_ptr,  # [S] int32; out with CHOICES
    slots_ptr,  # [S, N] int32; the places with CHOICES
    out_ptr,  # [R, D] int32, out
    out_ids_ptr,  # [S, K] int32, out with CHOICES
    out_weights_ptr,  # [S, K] fp32, out with CHOICES
    lists_ptr,  # [programs, LIST] int32, with N > 1
    bases_ptr,  # [4, G] int64
    state_ptr,  # [NUM_WORDS] int32
    report_ptr,  # [NUM_WORDS] int32
    num_tokens,  # T
    max_tokens,  # C
    num_chunks,
    rank,
    timeout,  # nanoseconds
    num_local,  # experts of one block
    PUSH: tl.constexpr,
    RECEIVE: tl.constexpr,
    CHOICES: tl.constexpr,
    SPIN: tl.constexpr,
    NUM_PUSH: tl.constexpr,
    NUM_RECEIVE: tl.constexpr,
    G: tl.constexpr,
    ETP: tl.constexpr,
    ROW_BYTES: tl.constexpr,  # of the buffer; those of an operation may have fewer
    D: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    CHUNK: tl.constexpr,
    LIST: tl.constexpr,
    WIDTH: tl.constexpr,
    LIST_PAIRS: tl.constexpr,
    PAIRS: tl.constexpr,
    PUSH_D: tl.constexpr,
    TAKE_ROWS: tl.constexpr,
    TAKE_D: tl.constexpr,
    TILES: tl.constexpr,
    CHOICE_PAIRS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    THREADS: tl.constexpr,
):
    pid = tl.program_id(0)
    operation = tl.load(state_ptr + OPERATION)
    slot = (operation % 2).to(tl.int64) * G * max_tokens
    first = rank.to(tl.int64) * max_tokens
    if PUSH:
        if pid < NUM_PUSH:
            for chunk in range(pid, num_chunks, NUM_PUSH):
                if CHOICES:
                    sizes = (chunk, num_tokens, num_local)
                    find_peers(ids_ptr, peers_ptr, *sizes, G, ETP, K, CHUNK, BLOCK_K)
                place = (chunk, num_tokens, max_tokens, first, rank)
                rows_ptrs = (x_ptr, peers_ptr, bases_ptr, slot * ROW_BYTES)
                push_rows(*rows_ptrs, *place, False, G, D, CHUNK, PAIRS, PUSH_D, TILES)
                if CHOICES:
                    from_ptrs = (ids_ptr, weights_ptr, peers_ptr, bases_ptr)
                    place = (chunk, num_tokens, max_tokens, slot + first, rank)
                    push_choices(*from_ptrs, *place, False, G, K, CHUNK, CHOICE_PAIRS, BLOCK_K)
                flag = (operation % 2 * G + rank).to(tl.int64) * num_chunks + chunk
                notify(bases_ptr, flag, operation, G, BLOCK_G)
    if RECEIVE:
        FIRST: tl.constexpr = NUM_PUSH if PUSH else 0
        if pid >= FIRST:
            element = out_ptr.dtype.element_ty
            base = tl.load(bases_ptr + AT_ROWS * G + rank) + slot * ROW_BYTES
            base = tl.multiple_of(base.to(tl.pointer_type(element)), 16)
            left = tl.where(tl.load(state_ptr + ERROR_BEFORE) == 0, timeout, 0).to(tl.int64)
            for item in range(pid - FIRST, num_chunks * G, NUM_RECEIVE):
                chunk, source = item // G, (item + rank) % G
                rows, exists = rows_of(source, chunk, max_tokens, CHUNK)
                if not CHOICES:  # known before the rows come
                    marks_ptr = slots_ptr if N == 1 else places_ptr
                    to = tl.load(marks_ptr + rows, mask=exists, other=-1)
                    if N > 1:
                        tl.debug_barrier()  # the last list has been read; `wait` ends with one
                        those = (slots_ptr, lists_ptr + pid * LIST, rows, exists, 0)
                        list_slots(*those, N, CHUNK, CHUNK, CHUNK, BLOCK_N)
                ptrs, whose = (bases_ptr, state_ptr, report_ptr), (source, chunk, num_chunks, rank)
                arrived = wait(*ptrs, operation, *whose, left, 0, 1, G, THREADS, SPIN)
                left = tl.where(arrived, left, 0)
                if CHOICES:
                    out_ptrs = (out_ids_ptr, out_weights_ptr, places_ptr)
                    there = (rows, exists, slot, arrived, rank)
                    to = receive_choices(bases_ptr, *out_ptrs, *there, G, K, CHUNK, BLOCK_K)
                if arrived:
                    if N == 1:
                        copy_rows(base, out_ptr, to, rows, D, TAKE_D, TILES)
                    else:
                        list_ptr = lists_ptr + pid * LIST
                        copy_to_slots(base, out_ptr, list_ptr, to, rows, D, CHUNK, TAKE_D)
        finish(state_ptr, operation)


@partial(triton.jit, do_not_specialize=UNSPECIALIZED)
def _reduce_kernel(
    y_ptr,  # [R, D]
    dweights_ptr,  # [R] fp32, with CHOICES
    choices_ptr,  # [S, K] int32 slots of the choices, with CHOICES
    peers_ptr,  # [T] int32 ranks by bit
    places_ptr,  # [S] int32
    slots_ptr,  # [S, N] int32
    out_ptr,  # [T, D], out
    out_dweights_ptr,  # [T, K] fp32, out with CHOICES
    lists_ptr,  # [programs, LIST] int32, with N > 1
    bases_ptr,  # [4, G] int64
    state_ptr,  # [NUM_WORDS] int32
    report_ptr,  # [NUM_WORDS] int32
    num_tokens,  # T
    max_tokens,  # C
    num_chunks,
    rank,
    timeout,  # nanoseconds
    PUSH: tl.constexpr,
    RECEIVE: tl.constexpr,
    CHOICES: tl.constexpr,
    COPIED: tl.constexpr,  # rows came by `copy_sums`
    SPIN: tl.constexpr,
    NUM_PUSH: tl.constexpr,
    NUM_RECEIVE: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    CHUNK: tl.constexpr,
    LIST: tl.constexpr,
    WIDTH: tl.constexpr,
    LIST_PAIRS: tl.constexpr,
    PAIRS: tl.constexpr,
    PUSH_D: tl.constexpr,
    TAKE_ROWS: tl.constexpr,
    TAKE_D: tl.constexpr,
    TILES: tl.constexpr,
    CHOICE_PAIRS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    THREADS: tl.constexpr,
):
    pid = tl.program_id(0)
    operation = tl.load(state_ptr + OPERATION)
    slot = (operation % 2).to(tl.int64) * G * max_tokens
    if PUSH:
        if pid < NUM_PUSH:
            first = slot + rank * max_tokens
            for chunk in range(pid, num_chunks, NUM_PUSH):
                place = (chunk, num_tokens, max_tokens, first, rank)
                if N == 1 and not COPIED:
                    rows_ptrs = (y_ptr, slots_ptr, bases_ptr, 0)
                    push_rows(*rows_ptrs, *place, True, G, D, CHUNK, PAIRS, PUSH_D, TILES)
                if N > 1:
                    list_ptr = lists_ptr + pid * LIST
                    those = (slots_ptr, list_ptr, chunk, max_tokens, rank)
                    list_pairs(*those, G, N, CHUNK, WIDTH, LIST_PAIRS, PAIRS, BLOCK_N)
                    sums_ptrs = (y_ptr, places_ptr, list_ptr, bases_ptr)
                    there = (chunk, max_tokens, first, rank)
                    push_sums(*sums_ptrs, *there, G, D, CHUNK, WIDTH, PAIRS, PUSH_D)
                if CHOICES:
                    from_ptrs = (choices_ptr, dweights_ptr, places_ptr, bases_ptr)
                    push_choices(*from_ptrs, *place, True, G, K, CHUNK, CHOICE_PAIRS, BLOCK_K)
                flag = (operation % 2 * G + rank).to(tl.int64) * num_chunks + chunk
                notify(bases_ptr, flag, operation, G, BLOCK_G)
    if RECEIVE:
        FIRST: tl.constexpr = NUM_PUSH if PUSH else 0
        if pid >= FIRST:
            element = out_ptr.dtype.element_ty
            base = tl.load(bases_ptr + AT_ROWS * G + rank).to(tl.pointer_type(element))
            base = tl.multiple_of(base, 16)
            weights = tl.load(bases_ptr + AT_WEIGHTS * G + rank).to(tl.pointer_type(tl.float32))
            left = tl.where(tl.load(state_ptr + ERROR_BEFORE) == 0, timeout, 0).to(tl.int64)
            first = SUMS_SLOT * G * max_tokens if COPIED else slot
            for chunk in range(pid - FIRST, num_chunks, NUM_RECEIVE):
                ptrs, whose = (bases_ptr, state_ptr, report_ptr), (0, chunk, num_chunks, rank)
                arrived = wait(*ptrs, operation, *whose, left, 1, G, G, THREADS, SPIN)
                left = tl.where(arrived, left, 0)
                place = (peers_ptr, chunk, num_tokens, first, max_tokens)
                add_parts(base, out_ptr, *place, G, D, CHUNK, TAKE_ROWS, TAKE_D)
                if CHOICES:
                    place = (peers_ptr, chunk, num_tokens, slot, max_tokens)
                    add_parts(weights, out_dweights_ptr, *place, G, K, CHUNK, CHUNK, BLOCK_K)
        finish(state_ptr, operation)


def _grid(buffer: SymmetricBuffer, half: Half) -> tuple[int]:
    layout = buffer.layout
    return ((half != "receive") * layout.num_push + (half != "push") * layout.num_receive,)


def _common(buffer: SymmetricBuffer, num_tokens: int, num_slots: int) -> tuple[Any, ...]:
    layout = buffer.layout
    entries = (layout.num_push + layout.num_receive) * list_size(layout, num_slots)
    lists = torch.empty(entries, dtype=torch.int32, device=buffer.state.device) if entries else None
    sizes = (num_tokens, layout.max_tokens, layout.num_chunks, buffer.rank, buffer.timeout_ns)
    return (lists, buffer.bases, buffer.state, buffer.report, *sizes)


def spread_choices(
    buffer: SymmetricBuffer,
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    *,
    num_local: int,
    etp: int,
    half: Half = "both",
) -> SpreadChoices:
    """Send each token with its choices to the ranks that own its experts; return what came.

    No host sync. Every rank of the group must call it at the same place in its order of operations.

    Args:
        buffer: this rank's end.
        x_TD: tokens, at most C, contiguous, in any dtype; rows of at most `row_bytes`.
        ids_TK: int32, contiguous, global expert ids; -1 = dropped.
        weights_TK: fp32, contiguous.
        num_local: experts of one rank; rank g owns block g // etp.
        etp: ranks that share a block.
        half: "push" and "receive" one after the other make up "both" (for tests that play all
            ranks in one process); what a half does not do is left uninitialised.
    """
    layout, (T, K) = buffer.layout, ids_TK.shape
    S, integers = layout.source_rows, partial(torch.empty, dtype=torch.int32, device=x_TD.device)
    out = SpreadChoices(
        rows_SD=x_TD.new_empty(S, x_TD.shape[1]),
        ids_SK=integers(S, K),
        weights_SK=weights_TK.new_empty(S, K),
        peers_T=integers(T),
        places_S=integers(S),
    )
    made = (out.peers_T, out.places_S, out.places_S, as_words(out.rows_SD))
    tensors = (as_words(x_TD), ids_TK, weights_TK, *made, out.ids_SK, out.weights_SK)
    _launch_spread(buffer, tensors, half, num_slots=1, num_local=num_local, etp=etp)
    return out


def spread(
    buffer: SymmetricBuffer,
    x_TD: Tensor,
    peers_T: Tensor,
    places_S: Tensor,
    slots_SN: Tensor,
    num_rows: int,
    *,
    half: Half = "both",
) -> Tensor:
    """Send rows where `spread_choices` sent their tokens; return a copy for each slot, [R, D].

    No host sync. Rows that no slot names are uninitialised.

    Args:
        buffer: this rank's end.
        x_TD: rows of the local tokens, as in `spread_choices`.
        peers_T: who needs them, from `spread_choices`.
        places_S: which source rows come, from `spread_choices`.
        slots_SN: int32, contiguous, the rows that become copies of each source row, -1 = none.
        num_rows: R.
        half: see `spread_choices`.
    """
    out_RD = x_TD.new_empty(num_rows, x_TD.shape[1])
    words = (as_words(x_TD), as_words(out_RD))
    tensors = (words[0], None, None, peers_T, places_S, slots_SN, words[1], None, None)
    _launch_spread(buffer, tensors, half, num_slots=slots_SN.shape[1], num_local=1, etp=1)
    return out_RD


def _launch_spread(
    buffer: SymmetricBuffer,
    tensors: tuple[Any, ...],
    half: Half,
    *,
    num_slots: int,
    num_local: int,
    etp: int,
) -> None:
    columns = Columns(tensors[0].shape[1], tensors[0].itemsize)
    with on_device(buffer.state):
        _spread_kernel[_grid(buffer, half)](
            *tensors,
            *_common(buffer, tensors[0].shape[0], num_slots),
            num_local,
            PUSH=half != "receive",
            RECEIVE=half != "push",
            CHOICES=tensors[1] is not None,
            ETP=etp,
            ROW_BYTES=buffer.layout.row_bytes,
            **constants(buffer.layout, columns, num_slots, reduce=False),
        )


def reduce(
    buffer: SymmetricBuffer,
    y_RD: Tensor,
    peers_T: Tensor,
    places_S: Tensor,
    slots_SN: Tensor,
    choices: tuple[Tensor, Tensor] | None = None,
    *,
    copied: bool = False,
    half: Half = "both",
) -> tuple[Tensor, Tensor | None]:
    """Add the rows of each source row, send the sums home, add those in rank order. No host sync.

    Both in fp32; a sum travels in the dtype of the rows.

    Args:
        buffer: this rank's end.
        y_RD: contiguous rows of `row_bytes`, one of `SUM_DTYPES`; those that no slot names are not
            read.
        peers_T: from `spread_choices`: where the sums of the local tokens come from.
        places_S: from `spread_choices`: which source rows have a sum.
        slots_SN: int32, contiguous, the rows to add for each source row, -1 = none.
        choices: contiguous fp32 [R], the gradient of each expert row's weight, and int32 slots
            [S, K], the expert row of each choice: gradients go home to their choices.
        copied: `copy_sums` has brought the sums home already, on all ranks; y_RD and slots_SN are
            those sums [S, D] and their places [S, 1].
        half: see `spread_choices`.

    Returns:
        [T, D], zero for a token that went nowhere; and [T, K] fp32 or None.
    """
    T = peers_T.shape[0]
    D = y_RD.shape[1]
    out_TD = y_RD.new_empty(T, D)
    dweights_R, slots_SK = choices or (None, None)
    out_TK = None if dweights_R is None else dweights_R.new_empty(T, buffer.layout.top_k)
    with on_device(buffer.state):
        _reduce_kernel[_grid(buffer, half)](
            *(y_RD, dweights_R, slots_SK, peers_T, places_S, slots_SN, out_TD, out_TK),
            *_common(buffer, T, slots_SN.shape[1]),
            PUSH=half != "receive",
            RECEIVE=half != "push",
            CHOICES=choices is not None,
            COPIED=copied,
            **constants(buffer.layout, Columns(D, y_RD.itemsize), slots_SN.shape[1], reduce=True),
        )
    return out_TD, out_TK
