"""Rows and sums that copy engines bring, beside whatever the multiprocessors do.

    copy_sums    sums [S, D] -> slot `SUMS_SLOT` of the tokens' ranks; the `reduce` that follows,
                 with `copied`, raises the flags of its operation and adds
    send_rows    tokens [T, D] -> slot `ROWS_SLOT` of every rank, one rank after the other, and
                 after each a flag; no operation of its own
    take_rows    rows of some ranks out of that slot, each to the expert rows that its slots name

Copies know no choices: every rank gets all tokens, of which `take_rows` reads those that it needs.
In the i-th step each rank sends to the i-th rank after it, so that all links are busy, and the rows
of the ranks before it come one by one: experts compute on the first while the others travel. Copies
that begin at different times share links and take twice as long, so what goes before them on the
device should let all ranks go on together.

Flags of rows count: the n-th `send_rows` of a rank raises its flag everywhere to n, by a copy too,
because a kernel would wait for a persistent product to end. All ranks count alike, on the device.

When a slot is free. Between two uses of one slot there must be something that tells all ranks that
it has been read. For `ROWS_SLOT`: an operation of `operations.py` after the last `take_rows` (a
rank that has ended it has seen flags of all ranks, raised after their reads). For `SUMS_SLOT`: an
operation without `copied`, or rows taken of all ranks, which they sent after their `reduce`.

Letters: as in `operations.py`. Copies move (G - 1) * T * D elements out and as many in, at about
280 GB/s; `take_rows` reads each used row once and writes its expert rows.
"""

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from moecore.kernels.common import INTERPRET, next_power_of_2, on_device, tl, triton
from moecore.kernels.exchange.port import (
    AT_ROWS,
    COPIES_WORD,
    ERROR_BEFORE,
    ROWS_SLOT,
    ExchangeLayout,
    ExchangePort,
)
from moecore.kernels.exchange.protocol import wait_for_copies
from moecore.kernels.exchange.rows import rows_of
from moecore.kernels.exchange.slots import copy_to_slots, list_slots
from moecore.kernels.exchange.tiles import MAX_BLOCK_N, take_columns

ROWS_AT_ONCE = 16  # that a program takes
MOST_PIECES = 4


def copy_sums(port: ExchangePort, sums_SD: Tensor) -> None:
    """Copy the sums of all source rows, holes too, to the tokens' ranks. No host sync.

    Args:
        port: this rank's end, of a layout with copy slots.
        sums_SD: contiguous; must live until the `reduce`.
    """
    G, C = port.layout.num_ranks, port.layout.capacity
    for i in range(1, G + 1):  # every rank begins with another peer
        peer = (port.rank + i) % G
        port.sums_slots[peer].copy_(sums_SD[peer * C : (peer + 1) * C], non_blocking=True)


def count_rows(port: ExchangePort) -> None:
    """Begin the next `send_rows`, on the stream on which its rows will be taken."""
    port.state[COPIES_WORD].add_(1)


def send_rows(port: ExchangePort, x_TD: Tensor) -> None:
    """Copy the tokens to all other ranks, after `count_rows`. No host sync.

    Args:
        port: this rank's end, of a layout with two copy slots.
        x_TD: contiguous; must live until the stream has done it.
    """
    G, T = port.layout.num_ranks, x_TD.shape[0]
    count = port.state[COPIES_WORD : COPIES_WORD + 1]
    for i in range(1, G):
        peer = (port.rank + i) % G
        slot = port.rows_slots[peer]
        (slot if slot.shape[0] == T else slot[:T]).copy_(x_TD, non_blocking=True)
        port.rows_flags[peer].copy_(count, non_blocking=True)


def pieces_of(num_ranks: int, least: int = 1) -> list[tuple[int, int]]:
    """Return how rows are taken: (first, how many) ranks before one's own, which is number 0.

    In four pieces at most, of `least` ranks at least but for the last one.

    Example: 8 ranks give [(0, 2), (2, 2), (4, 2), (6, 2)], with least 3 [(0, 3), (3, 3), (6, 2)].
    """
    count = max(least, -(-num_ranks // MOST_PIECES))
    return [(i, min(count, num_ranks - i)) for i in range(0, num_ranks, count)]


def ranks_of(piece: tuple[int, int], rank: int, num_ranks: int) -> list[int]:
    """Return the ranks of a piece in the order in which their rows come."""
    first, count = piece
    return [(rank - first - i) % num_ranks for i in range(count)]


# `partial` because jit with options, as a decorator, needs Triton to be installed.
@partial(
    triton.jit,
    do_not_specialize=["capacity", "num_chunks", "rank", "timeout", "first", "count"],
)
def _take_rows_kernel(
    x_ptr,  # [T, D] this rank's own tokens
    places_ptr,  # [S] int32
    slots_ptr,  # [S, N] int32
    out_ptr,  # [R, D], out
    lists_ptr,  # [programs, LIST] int32
    bases_ptr,  # [4, G] int64
    state_ptr,  # [NUM_WORDS] int32
    report_ptr,  # [NUM_WORDS] int32
    capacity,  # C
    num_chunks,  # of an operation, which says where the flags lie
    rank,
    timeout,  # nanoseconds
    first,  # of the piece
    count,  # of the piece
    SPIN: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,  # of an item
    LIST: tl.constexpr,
    TAKE_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    THREADS: tl.constexpr,
):
    pid = tl.program_id(0)
    list_ptr = lists_ptr + pid * LIST
    left = tl.where(tl.load(state_ptr + ERROR_BEFORE) == 0, timeout, 0).to(tl.int64)
    items = (capacity + ROWS - 1) // ROWS  # of one rank
    for item in range(pid, items * count, tl.num_programs(0)):
        source = (rank - first - item // items + G) % G
        rows, exists = rows_of(source, item % items, capacity, ROWS)
        places = tl.load(places_ptr + rows, mask=exists, other=-1)
        tl.debug_barrier()  # the last list has been read
        list_slots(slots_ptr, list_ptr, rows, exists, 0, N, ROWS, ROWS, ROWS, BLOCK_N)
        tl.debug_barrier()
        own = source == rank
        ptrs, whose = (bases_ptr, state_ptr, report_ptr), (source, num_chunks, rank)
        arrived = wait_for_copies(*ptrs, *whose, left, G, THREADS, SPIN)
        left = tl.where(arrived, left, 0)
        if arrived:
            buffer = tl.load(bases_ptr + AT_ROWS * G + rank)
            base = tl.where(own, x_ptr.to(tl.int64, bitcast=True), buffer)
            base = tl.multiple_of(base.to(tl.pointer_type(out_ptr.dtype.element_ty)), 16)
            slot = tl.where(own, -rank.to(tl.int64), ROWS_SLOT * G) * capacity
            copy_to_slots(base, out_ptr, list_ptr, places, rows, slot, D, ROWS, TAKE_D)


def take_rows(
    port: ExchangePort,
    x_TD: Tensor,
    places_S: Tensor,
    slots_SN: Tensor,
    out_RD: Tensor,
    piece: tuple[int, int],
) -> None:
    """Write the rows of a piece to where their slots say, as soon as they are there. No host sync.

    Args:
        port: this rank's end.
        x_TD: this rank's own rows, contiguous, at a multiple of 16 bytes.
        places_S: int32, -1 = a hole.
        slots_SN: int32, contiguous, the rows of `out_RD` that become copies of each source row,
            -1 = none.
        out_RD: written there; the other rows stay as they are.
        piece: one of `pieces_of`.
    """
    layout = port.layout
    programs, N = layout.num_push + layout.num_receive, slots_SN.shape[1]
    size = (1 + N) * ROWS_AT_ONCE
    lists = torch.empty(programs * size, dtype=torch.int32, device=port.state.device)
    sizes = (layout.capacity, layout.num_chunks, port.rank, port.timeout_ns, *piece)
    with on_device(port.state):
        _take_rows_kernel[(programs,)](
            *(x_TD, places_S, slots_SN, out_RD, lists, port.bases, port.state, port.report),
            *sizes,
            LIST=size,
            **_options(layout, N),
        )


@cache
def _options(layout: ExchangeLayout, num_slots: int) -> dict[str, Any]:
    """Return the constants of the kernel; nobody may change them."""
    return dict(
        G=layout.num_ranks,
        D=layout.dim,
        N=num_slots,
        ROWS=ROWS_AT_ONCE,
        TAKE_D=take_columns(layout, ROWS_AT_ONCE),
        BLOCK_N=min(MAX_BLOCK_N, next_power_of_2(num_slots)),
        THREADS=32 * layout.num_warps,
        SPIN=not INTERPRET,
        num_warps=layout.num_warps,
    )
