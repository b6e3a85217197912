"""Weights of cloned experts to the ranks that hold the clones, and clones' gradients home.

    fetch         place n of the plan -> its expert's row of a tensor, on the ranks of block n // c
    bring_home_   gradients of the clones -> added to those of their experts, in order of places

The plan stays on the device: every rank has c clones, of which some are empty. Clones' rows of a
tensor lie in slots of a buffer that all ranks see; a row that is longer than a slot travels in
pieces. A piece is one operation, of two launches:

    store     weights into the slots of the clones' ranks; or gradients into slots of one's own.
              Then each program raises its flag on every rank. Nobody waits, so it always ends.
    receive   each program waits for its flags of all ranks. Then it copies weights out of its own
              slots; or reads gradients in the peers' slots, and adds.

Program p of a receive reads what programs p have stored. Flags, memory order and why two sets of
slots need no barrier: `exchange/protocol.py`. There it matters that every rank raises flags in
every operation and waits for those of all ranks, also where it stores and reads nothing.

The ranks of a block (etp) own the same experts, a part of each; what each has comes from, and goes
to, its counterparts in other blocks.

Letters: G ranks, B = G / etp blocks, c clones of a block, N = B c places, e experts of a block, W
elements that a rank has of one expert. A buffer has two sets of c slots.

Bytes moved, with b of an element: fetch sends W b per clone over the links, and reads and writes
c W b here; bring_home_ reads W b per clone over the links.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from moecore.kernels.common import INTERPRET, next_power_of_2, on_device, tl, triton
from moecore.kernels.exchange.buffer import (
    ALIGNMENT,
    AT_ROWS,
    ERROR_BEFORE,
    OPERATION,
    PeerBuffer,
)
from moecore.kernels.exchange.protocol import finish, notify, wait

SET_BYTES = 32 << 20  # of the slots of one set, whatever they hold
BLOCK_BYTES = 1 << 15  # that a program moves at once


@dataclass(frozen=True, kw_only=True, slots=True)
class CloneLayout:
    """What all ranks agree on.

    Attributes:
        num_ranks: G.
        set_bytes: of one set of slots.
        num_programs: of a launch.
        num_warps: of a program.
    """

    num_ranks: int
    set_bytes: int = SET_BYTES
    num_programs: int = 64
    num_warps: int = 16

    @property
    def num_bytes(self) -> int:
        """Bytes of one rank's memory: two sets and their flags."""
        return 2 * self.set_bytes + 2 * self.num_ranks * self.num_programs * 4

    def regions(self, base: int) -> list[int]:
        """Return the addresses of slots and flags, where an exchange of rows has them."""
        return [base, 0, 0, base + 2 * self.set_bytes]

    def slot_bytes(self, num_clones: int) -> int:
        """Return the bytes of a slot when there are c of them."""
        return self.set_bytes // num_clones // ALIGNMENT * ALIGNMENT


@dataclass(frozen=True, kw_only=True, slots=True)
class CloneBuffer(PeerBuffer):
    """One rank's end.

    Attributes:
        layout: the same on all ranks.
    """

    layout: CloneLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """Which expert is where.

    Attributes:
        experts_N: int32 on the device, the expert in each place; -1 = the place is empty.
        num_clones: c; place n is the (n % c)-th of block n // c.
        num_local: e; block b owns experts [b * e, (b + 1) * e).
        etp: ranks of a block; rank r is of block r // etp.
    """

    experts_N: Tensor
    num_clones: int
    num_local: int
    etp: int = 1


class Piece(NamedTuple):
    """Elements of an expert's row that travel together.

    Attributes:
        start: the first.
        length: how many.
    """

    start: int
    length: int


def fetch_ref(rows: Sequence[Tensor], places: Places) -> list[Tensor]:
    """Return each rank's clones, [c, ...]; zeros where a place is empty.

    rows[b] are [e, ...] of the rank of block b, one per block.
    """
    used, dtype = places.experts_N >= 0, rows[0].dtype
    whole = torch.cat([r.view(torch.uint8) if r.itemsize == 1 else r for r in rows])
    came = whole.new_zeros(used.shape[0], *whole.shape[1:])
    came[used] = whole[places.experts_N[used].long()]
    return list(came.view(dtype).split(places.num_clones))


def bring_home_ref(grads: Sequence[Tensor], places: Places) -> list[Tensor]:
    """Return each rank's gradients, [e, ...], with those of its experts' clones.

    Added in fp32, in the order of places, and rounded once. grads[b] are [e + c, ...], as above.
    """
    e, c = places.num_local, places.num_clones
    home = [grad[:e].clone() for grad in grads]
    wide = torch.promote_types(grads[0].dtype, torch.float32)
    totals: dict[int, Tensor] = {}
    for n, x in enumerate(places.experts_N.tolist()):
        if x >= 0:
            total = totals.get(x, home[x // e][x % e].to(wide))
            totals[x] = total + grads[n // c][e + n % c]
    for x, total in totals.items():
        home[x // e][x % e] = total
    return home


UNSPECIALIZED = ["rank"]


@triton.jit
def _slot(
    bases_ptr,  # [4, G] int64
    peer,
    slot,
    operation,  # n
    element,
    G: tl.constexpr,
    SET_BYTES: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
):
    """Return a pointer to a slot of a rank, in the set of this operation."""
    base = tl.load(bases_ptr + AT_ROWS * G + peer)
    at = base + (operation % 2).to(tl.int64) * SET_BYTES + slot * SLOT_BYTES
    return tl.multiple_of(at.to(tl.pointer_type(element)), 16)


@triton.jit
def _copy(
    from_ptr,
    to_ptr,
    count,
    is_there,  # else zeros are written
    pid,
    CACHE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy a program's part of a piece."""
    for column in range(pid * BLOCK, count, PROGRAMS * BLOCK):
        columns = column + tl.arange(0, BLOCK)
        inside = columns < count
        x = tl.load(from_ptr + columns, mask=inside & is_there, other=0, cache_modifier=CACHE)
        tl.store(to_ptr + columns, x, mask=inside)


# `partial` because jit with options, as a decorator, needs Triton to be installed.
@partial(triton.jit, do_not_specialize=[*UNSPECIALIZED, "first"])
def _store_weights_kernel(
    rows_ptr,  # [e, W] words
    experts_ptr,  # [N] int32
    bases_ptr,  # [4, G] int64
    state_ptr,  # [NUM_WORDS] int32
    width,  # W
    start,  # of the piece
    count,  # of the piece
    rank,
    first,  # of this rank's experts
    G: tl.constexpr,
    ETP: tl.constexpr,
    CLONES: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    SET_BYTES: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    pid = tl.program_id(0)
    operation = tl.load(state_ptr + OPERATION)
    element = rows_ptr.dtype.element_ty
    for n in range(G // ETP * CLONES):
        row = tl.load(experts_ptr + n) - first
        if (row >= 0) & (row < NUM_LOCAL):
            peer = n // CLONES * ETP + rank % ETP
            where = (bases_ptr, peer, n % CLONES, operation)
            to_ptr = _slot(*where, element, G, SET_BYTES, SLOT_BYTES)
            from_ptr = rows_ptr + row.to(tl.int64) * width + start
            _copy(from_ptr, to_ptr, count, True, pid, "", PROGRAMS, BLOCK)
    flag = (operation % 2 * G + rank).to(tl.int64) * PROGRAMS + pid
    notify(bases_ptr, flag, operation, G, BLOCK_G)


@partial(triton.jit, do_not_specialize=UNSPECIALIZED)
def _receive_weights_kernel(
    out_ptr,  # [c, W] words, out
    experts_ptr,  # [N] int32
    bases_ptr,  # [4, G] int64
    state_ptr,  # [NUM_WORDS] int32
    report_ptr,  # [NUM_WORDS] int32
    width,  # W
    start,  # of the piece
    count,  # of the piece
    rank,
    timeout,  # nanoseconds
    G: tl.constexpr,
    ETP: tl.constexpr,
    CLONES: tl.constexpr,
    SET_BYTES: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    THREADS: tl.constexpr,
    SPIN: tl.constexpr,
):
    pid = tl.program_id(0)
    operation = tl.load(state_ptr + OPERATION)
    element = out_ptr.dtype.element_ty
    left = tl.where(tl.load(state_ptr + ERROR_BEFORE) == 0, timeout, 0).to(tl.int64)
    ptrs, whose = (bases_ptr, state_ptr, report_ptr), (0, pid, PROGRAMS, rank)
    arrived = wait(*ptrs, operation, *whose, left, 0, G, G, THREADS, SPIN)
    to_ptr = out_ptr + start
    for slot in range(CLONES):
        is_there = arrived & (tl.load(experts_ptr + rank // ETP * CLONES + slot) >= 0)
        where = (bases_ptr, rank, slot, operation)
        from_ptr = _slot(*where, element, G, SET_BYTES, SLOT_BYTES)
        _copy(from_ptr, to_ptr, count, is_there, pid, ".cg", PROGRAMS, BLOCK)
        to_ptr += width
    finish(state_ptr, operation)


@partial(triton.jit, do_not_specialize=UNSPECIALIZED)
def _store_grads_kernel(
    grads_ptr,  # [c, W], of the clones
    experts_ptr,  # [N] int32
    bases_ptr,  # [4, G] int64
    state_ptr,  # [NUM_WORDS] int32
    width,  # W
    start,  # of the piece
    count,  # of the piece
    rank,
    G: tl.constexpr,
    ETP: tl.constexpr,
    CLONES: tl.constexpr,
    SET_BYTES: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    pid = tl.program_id(0)
    operation = tl.load(state_ptr + OPERATION)
    element = grads_ptr.dtype.element_ty
    from_ptr = grads_ptr + start
    for slot in range(CLONES):
        if tl.load(experts_ptr + rank // ETP * CLONES + slot) >= 0:
            where = (bases_ptr, rank, slot, operation)
            to_ptr = _slot(*where, element, G, SET_BYTES, SLOT_BYTES)
            _copy(from_ptr, to_ptr, count, True, pid, "", PROGRAMS, BLOCK)
        from_ptr += width
    flag = (operation % 2 * G + rank).to(tl.int64) * PROGRAMS + pid
    notify(bases_ptr, flag, operation, G, BLOCK_G)


@partial(triton.jit, do_not_specialize=[*UNSPECIALIZED, "first"])
def _receive_grads_kernel(
    grads_ptr,  # [e, W], of this rank's experts; added to
    experts_ptr,  # [N] int32
    bases_ptr,  # [4, G] int64
    state_ptr,  # [NUM_WORDS] int32
    report_ptr,  # [NUM_WORDS] int32
    width,  # W
    start,  # of the piece
    count,  # of the piece
    rank,
    timeout,  # nanoseconds
    first,  # of this rank's experts
    G: tl.constexpr,
    ETP: tl.constexpr,
    CLONES: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    SET_BYTES: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    THREADS: tl.constexpr,
    SPIN: tl.constexpr,
):
    pid = tl.program_id(0)
    operation = tl.load(state_ptr + OPERATION)
    element = grads_ptr.dtype.element_ty
    left = tl.where(tl.load(state_ptr + ERROR_BEFORE) == 0, timeout, 0).to(tl.int64)
    ptrs, whose = (bases_ptr, state_ptr, report_ptr), (0, pid, PROGRAMS, rank)
    arrived = wait(*ptrs, operation, *whose, left, 1, G, G, THREADS, SPIN)
    for n in range(G // ETP * CLONES):
        expert = tl.load(experts_ptr + n)
        row = expert - first
        adds = arrived & (row >= 0) & (row < NUM_LOCAL)
        for m in range(n):  # the first of its places adds all of them
            adds = adds & (tl.load(experts_ptr + m) != expert)
        if adds:
            own_ptr = grads_ptr + row.to(tl.int64) * width + start
            for column in range(pid * BLOCK, count, PROGRAMS * BLOCK):
                columns = column + tl.arange(0, BLOCK)
                inside = columns < count
                total = tl.load(own_ptr + columns, mask=inside, other=0.0).to(tl.float32)
                for m in range(n, G // ETP * CLONES):
                    is_same = tl.load(experts_ptr + m) == expert
                    peer = m // CLONES * ETP + rank % ETP
                    where = (bases_ptr, peer, m % CLONES, operation)
                    from_ptr = _slot(*where, element, G, SET_BYTES, SLOT_BYTES) + columns
                    mask = inside & is_same
                    part = tl.load(from_ptr, mask=mask, other=0.0, cache_modifier=".cg")
                    total = tl.where(is_same, total + part.to(tl.float32), total)
                tl.store(own_ptr + columns, total.to(element), mask=inside)
    finish(state_ptr, operation)


def pieces(layout: CloneLayout, rows: Tensor, num_clones: int) -> Iterator[Piece]:
    """Yield the pieces in which rows [rows, W] travel; each is an operation."""
    width, most = rows.shape[1], layout.slot_bytes(num_clones) // rows.itemsize
    for start in range(0, width, most):
        yield Piece(start, min(most, width - start))


def store_weights(buffer: CloneBuffer, rows_eW: Tensor, places: Places, piece: Piece) -> None:
    """Store a piece of this rank's experts in the slots of their clones' ranks. No host sync."""
    how = _constants(buffer, rows_eW, places) | _flags(buffer)
    with on_device(buffer.state):
        _store_weights_kernel[(buffer.layout.num_programs,)](
            *(rows_eW, places.experts_N, buffer.bases, buffer.state),
            *(rows_eW.shape[1], *piece, buffer.rank, _first(buffer, places)),
            NUM_LOCAL=places.num_local,
            **how,
        )


def receive_weights(buffer: CloneBuffer, out_cW: Tensor, places: Places, piece: Piece) -> None:
    """Write a piece of this rank's clones, zeros where a place is empty. No host sync."""
    how = _constants(buffer, out_cW, places) | _waits(buffer)
    with on_device(buffer.state):
        _receive_weights_kernel[(buffer.layout.num_programs,)](
            *(out_cW, places.experts_N, buffer.bases, buffer.state, buffer.report),
            *(out_cW.shape[1], *piece, buffer.rank, buffer.timeout_ns),
            **how,
        )


def store_grads(buffer: CloneBuffer, grads_cW: Tensor, places: Places, piece: Piece) -> None:
    """Store a piece of the clones' gradients in slots of this rank. No host sync."""
    how = _constants(buffer, grads_cW, places) | _flags(buffer)
    with on_device(buffer.state):
        _store_grads_kernel[(buffer.layout.num_programs,)](
            *(grads_cW, places.experts_N, buffer.bases, buffer.state),
            *(grads_cW.shape[1], *piece, buffer.rank),
            **how,
        )


def receive_grads(buffer: CloneBuffer, grads_eW: Tensor, places: Places, piece: Piece) -> None:
    """Add a piece of the clones' gradients to those of their experts, in place. No host sync."""
    how = _constants(buffer, grads_eW, places) | _waits(buffer)
    with on_device(buffer.state):
        _receive_grads_kernel[(buffer.layout.num_programs,)](
            *(grads_eW, places.experts_N, buffer.bases, buffer.state, buffer.report),
            *(grads_eW.shape[1], *piece, buffer.rank, buffer.timeout_ns),
            _first(buffer, places),
            NUM_LOCAL=places.num_local,
            **how,
        )


def _first(buffer: CloneBuffer, places: Places) -> int:
    return buffer.rank // places.etp * places.num_local


def _constants(buffer: CloneBuffer, rows: Tensor, places: Places) -> dict[str, int]:
    layout, c = buffer.layout, places.num_clones
    return dict(
        G=layout.num_ranks,
        ETP=places.etp,
        CLONES=c,
        SET_BYTES=layout.set_bytes,
        SLOT_BYTES=layout.slot_bytes(c),
        PROGRAMS=layout.num_programs,
        BLOCK=BLOCK_BYTES // max(4, rows.itemsize),  # sums are in fp32
        num_warps=layout.num_warps,
    )


def _flags(buffer: CloneBuffer) -> dict[str, int]:
    return dict(BLOCK_G=next_power_of_2(buffer.layout.num_ranks))


def _waits(buffer: CloneBuffer) -> dict[str, int]:
    return dict(THREADS=32 * buffer.layout.num_warps, SPIN=not INTERPRET)


def fetch(buffer: CloneBuffer, rows: Tensor, places: Places) -> Tensor:
    """Return the clones' rows of a tensor, [c, ...]; zeros where a place is empty. No host sync.

    Every rank must call it at the same place in its order of operations.

    Args:
        buffer: this rank's end.
        rows: [e, ...] of any dtype, this rank's experts.
        places: the same on all ranks.
    """
    out = rows.new_empty(places.num_clones, *rows.shape[1:])
    rows_eW = _as_words(rows.contiguous())
    out_cW = _as_rows(out).view(rows_eW.dtype)
    for piece in pieces(buffer.layout, rows_eW, places.num_clones):
        store_weights(buffer, rows_eW, places, piece)
        receive_weights(buffer, out_cW, places, piece)
    return out


def bring_home_(buffer: CloneBuffer, grads: Tensor, places: Places) -> Tensor:
    """Add the clones' gradients to those of their experts, in place; return these, [e, ...].

    In fp32, in the order of places; rounded once. No host sync. Every rank must call it at the same
    place in its order of operations.

    Args:
        buffer: this rank's end.
        grads: [e + c, ...] contiguous, of `SUM_DTYPES`: this rank's experts and then its clones.
        places: the same on all ranks.
    """
    home_eW, clones_cW = _as_rows(grads).split((places.num_local, places.num_clones))
    for piece in pieces(buffer.layout, home_eW, places.num_clones):
        store_grads(buffer, clones_cW, places, piece)
        receive_grads(buffer, home_eW, places, piece)
    return grads[: places.num_local]


def _as_rows(tensor: Tensor) -> Tensor:
    return tensor.view(tensor.shape[0], tensor.shape[1:].numel())


def _as_words(rows: Tensor) -> Tensor:
    """Return contiguous rows as [rows, W], in words of four bytes where these divide them."""
    bytes_eB = _as_rows(rows).view(torch.uint8)
    is_even = bytes_eB.shape[1] % 4 == 0 and bytes_eB.storage_offset() % 4 == 0
    return bytes_eB.view(torch.int32) if is_even else bytes_eB
