"""Copies weights of experts to the ranks of their clones, and adds the clones' gradients.

    fetch_clones       returns weights of this rank's clones, from the ranks that own the experts
    add_clone_grads_   adds gradients of clones to the gradients of their experts, in place order

Each rank has places for c clones, and the plan on the device says which expert each place has. All
ranks can access the buffer of each rank, which has a slot per place. A row of weights that is
longer than a slot is sent in pieces. Each piece is one operation with two launches:

    store     writes weights into the slots of the clones' ranks, or gradients into local slots.
              Then each program raises its flag on every rank. A store waits for nothing.
    receive   Each program waits for the flags of all ranks. Then it copies weights from the local
              slots, or adds gradients from the slots of peers.

Program p of a receive reads data that only programs p have stored. `exchange/protocol.py` describes
flags and memory order, and why two sets of slots need no barrier. Every rank must therefore raise
its flags and wait for all flags in every operation, even if it moves no data.

The etp ranks of a block own different slices of the same experts. Each rank exchanges its slices
with the ranks of the same etp index in other blocks.

Letters: G ranks, B = G / etp blocks, c clones of a block, N = B c places, e experts of a block, W
elements of one expert's slice. A buffer has two sets of c slots.

Bytes over the links, for elements of b bytes: W b per clone for weights, and for gradients.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moecore.kernels.common import launch, next_power_of_2
from moecore.kernels.exchange.buffer import ALIGNMENT, AT_ROWS, OPERATION, PeerBuffer
from moecore.kernels.exchange.protocol import (
    finish_operation,
    get_remaining_time,
    raise_flags,
    wait_for_flags,
)
from moecore.kernels.triton_api import INTERPRET, tl, triton

SET_BYTES = 32 << 20  # bytes of one set of slots
BLOCK_BYTES = 1 << 15  # bytes that a program moves at once


@dataclass(frozen=True, kw_only=True, slots=True)
class CloneLayout:
    """Buffer and launch sizes of an exchange of clones (expert copies), identical on all ranks."""

    num_ranks: int
    set_bytes: int = SET_BYTES  # bytes of one of the two sets of slots
    num_programs: int = 64
    num_warps: int = 16

    @property
    def num_bytes(self) -> int:
        """Bytes of one rank's buffer: two sets of slots, each for one expert copy, and flags."""
        return 2 * self.set_bytes + 2 * self.num_ranks * self.num_programs * 4

    def locate_regions(self, base_address: int) -> list[int]:
        """Return addresses [slots, 0, 0, flags] in the buffer at `base_address`; 0 = no region."""
        return [base_address, 0, 0, base_address + 2 * self.set_bytes]

    def slot_bytes(self, num_clones: int) -> int:
        """Return the bytes of one slot (for an expert copy) if a rank has `num_clones` slots."""
        return self.set_bytes // num_clones // ALIGNMENT * ALIGNMENT


@dataclass(frozen=True, kw_only=True, slots=True)
class CloneBuffer(PeerBuffer):
    """This rank's addresses of all ranks' buffers for expert copies (clones)."""

    layout: CloneLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class ClonePlaces:
    """For each clone slot (a place for an expert copy) of all ranks, its expert; -1 = empty."""

    experts_N: Tensor  # int32 on the device; -1 = the place is empty
    num_clones: int  # c; place n is the (n % c)-th of block n // c
    num_local: int  # e; block b owns experts [b * e, (b + 1) * e)
    etp: int = 1  # ranks of a block; rank r is of block r // etp


class ClonePiece(NamedTuple):
    """A range of an expert's flattened weights (W elements), which one operation sends."""

    width: int  # W
    start: int
    length: int


class CloneConstants(NamedTuple):
    """Compile-time constants of the kernels: sizes of the group, of the buffer and of a launch."""

    G: int
    ETP: int
    CLONES: int  # c
    NUM_LOCAL: int  # e
    SET_BYTES: int
    SLOT_BYTES: int
    PROGRAMS: int
    BLOCK: int  # elements that a program moves at once
    BLOCK_G: int
    THREADS: int
    SPIN: bool


@triton.jit
def _locate_slot(buffer, peer_rank, slot_idx, operation_idx, element_dtype, CONST: tl.constexpr):
    """Return a pointer to slot `slot_idx` on rank `peer_rank`, of the set of this operation."""
    base = tl.load(buffer.bases + AT_ROWS * CONST.G + peer_rank)
    at = base + (operation_idx % 2).to(tl.int64) * CONST.SET_BYTES + slot_idx * CONST.SLOT_BYTES
    return tl.multiple_of(at.to(tl.pointer_type(element_dtype)), 16)


@triton.jit
def _copy_piece(
    from_ptr, to_ptr, num_elements, has_source, CACHE: tl.constexpr, CONST: tl.constexpr
):
    """Copy this program's part of `num_elements` elements; write zeros if not `has_source`."""
    BLOCK: tl.constexpr = CONST.BLOCK
    for column in range(tl.program_id(0) * BLOCK, num_elements, CONST.PROGRAMS * BLOCK):
        columns = column + tl.arange(0, BLOCK)
        inside = columns < num_elements
        x = tl.load(from_ptr + columns, mask=inside & has_source, other=0, cache_modifier=CACHE)
        tl.store(to_ptr + columns, x, mask=inside)


@triton.jit(do_not_specialize=["rank"])
def _store_weights_kernel(rows_ptr, experts_ptr, buffer, piece, rank, CONST: tl.constexpr):
    """Store part of rows [e, W] in slots of the clones' ranks, and raise flags."""
    operation = tl.load(buffer.state + OPERATION)
    element = rows_ptr.dtype.element_ty
    first = rank // CONST.ETP * CONST.NUM_LOCAL
    for n in range(CONST.G // CONST.ETP * CONST.CLONES):
        row = tl.load(experts_ptr + n) - first
        if (row >= 0) & (row < CONST.NUM_LOCAL):
            peer = n // CONST.CLONES * CONST.ETP + rank % CONST.ETP
            to_ptr = _locate_slot(buffer, peer, n % CONST.CLONES, operation, element, CONST)
            from_ptr = rows_ptr + row.to(tl.int64) * piece.width + piece.start
            _copy_piece(from_ptr, to_ptr, piece.length, True, "", CONST)
    raise_flags(buffer.bases, operation, tl.program_id(0), CONST.PROGRAMS, rank, CONST)


@triton.jit(do_not_specialize=["rank", "timeout_ns"])
def _receive_weights_kernel(
    out_ptr, experts_ptr, buffer, piece, rank, timeout_ns, CONST: tl.constexpr
):
    """Wait for this program's flags, then copy part of the clones' weights to out_ptr, [c, W]."""
    pid = tl.program_id(0)
    operation = tl.load(buffer.state + OPERATION)
    element = out_ptr.dtype.element_ty
    remaining = get_remaining_time(buffer, timeout_ns)
    arrived = wait_for_flags(
        buffer, operation, 0, pid, CONST.PROGRAMS, rank, remaining, 0, CONST.G, CONST
    )
    to_ptr = out_ptr + piece.start
    for slot in range(CONST.CLONES):
        place = rank // CONST.ETP * CONST.CLONES + slot
        has_source = arrived & (tl.load(experts_ptr + place) >= 0)
        from_ptr = _locate_slot(buffer, rank, slot, operation, element, CONST)
        _copy_piece(from_ptr, to_ptr, piece.length, has_source, ".cg", CONST)
        to_ptr += piece.width
    finish_operation(buffer.state, operation)


@triton.jit(do_not_specialize=["rank"])
def _store_grads_kernel(grads_ptr, experts_ptr, buffer, piece, rank, CONST: tl.constexpr):
    """Store part of the local clones' gradients, [c, W], in this rank's slots; raise flags."""
    operation = tl.load(buffer.state + OPERATION)
    element = grads_ptr.dtype.element_ty
    from_ptr = grads_ptr + piece.start
    for slot in range(CONST.CLONES):
        if tl.load(experts_ptr + rank // CONST.ETP * CONST.CLONES + slot) >= 0:
            to_ptr = _locate_slot(buffer, rank, slot, operation, element, CONST)
            _copy_piece(from_ptr, to_ptr, piece.length, True, "", CONST)
        from_ptr += piece.width
    raise_flags(buffer.bases, operation, tl.program_id(0), CONST.PROGRAMS, rank, CONST)


@triton.jit(do_not_specialize=["rank", "timeout_ns"])
def _receive_grads_kernel(
    grads_ptr, experts_ptr, buffer, piece, rank, timeout_ns, CONST: tl.constexpr
):
    """Wait for this program's flags, then add clones' gradients to experts' gradients, [e, W]."""
    pid = tl.program_id(0)
    operation = tl.load(buffer.state + OPERATION)
    element = grads_ptr.dtype.element_ty
    BLOCK: tl.constexpr = CONST.BLOCK
    NUM_PLACES: tl.constexpr = CONST.G // CONST.ETP * CONST.CLONES
    remaining = get_remaining_time(buffer, timeout_ns)
    arrived = wait_for_flags(
        buffer, operation, 0, pid, CONST.PROGRAMS, rank, remaining, 1, CONST.G, CONST
    )
    first = rank // CONST.ETP * CONST.NUM_LOCAL
    for n in range(NUM_PLACES):
        expert = tl.load(experts_ptr + n)
        row = expert - first
        adds = arrived & (row >= 0) & (row < CONST.NUM_LOCAL)
        for m in range(n):  # the first of its places adds all of them
            adds = adds & (tl.load(experts_ptr + m) != expert)
        if adds:
            own_ptr = grads_ptr + row.to(tl.int64) * piece.width + piece.start
            for column in range(pid * BLOCK, piece.length, CONST.PROGRAMS * BLOCK):
                columns = column + tl.arange(0, BLOCK)
                inside = columns < piece.length
                total = tl.load(own_ptr + columns, mask=inside, other=0.0).to(tl.float32)
                for m in range(n, NUM_PLACES):
                    is_match = tl.load(experts_ptr + m) == expert
                    peer = m // CONST.CLONES * CONST.ETP + rank % CONST.ETP
                    slot = m % CONST.CLONES
                    from_ptr = _locate_slot(buffer, peer, slot, operation, element, CONST) + columns
                    mask = inside & is_match
                    part = tl.load(from_ptr, mask=mask, other=0.0, cache_modifier=".cg")
                    total = tl.where(is_match, total + part.to(tl.float32), total)
                tl.store(own_ptr + columns, total.to(element), mask=inside)
    finish_operation(buffer.state, operation)


def split_into_pieces(layout: CloneLayout, rows: Tensor, num_clones: int) -> Iterator[ClonePiece]:
    """Yield ranges of the W columns of `rows` [experts, W], each of which fits in a slot."""
    width, max_width = rows.shape[1], layout.slot_bytes(num_clones) // rows.itemsize
    for start in range(0, width, max_width):
        yield ClonePiece(width, start, min(max_width, width - start))


def _launch_clone_kernel(
    kernel: Any,
    waits_for_flags: bool,
    buffer: CloneBuffer,
    expert_rows: Tensor,  # [e or c, W]
    clone_places: ClonePlaces,
    piece: ClonePiece,
) -> None:
    """Launch `kernel` for one piece of `expert_rows`: weights or gradients, one row per expert."""
    layout = buffer.layout
    const = CloneConstants(
        G=layout.num_ranks,
        ETP=clone_places.etp,
        CLONES=clone_places.num_clones,
        NUM_LOCAL=clone_places.num_local,
        SET_BYTES=layout.set_bytes,
        SLOT_BYTES=layout.slot_bytes(clone_places.num_clones),
        PROGRAMS=layout.num_programs,
        BLOCK=BLOCK_BYTES // max(4, expert_rows.itemsize),  # sums are in fp32
        BLOCK_G=next_power_of_2(layout.num_ranks),
        THREADS=32 * layout.num_warps,
        SPIN=not INTERPRET,
    )
    numbers = (buffer.rank, buffer.timeout_ns) if waits_for_flags else (buffer.rank,)
    args = (expert_rows, clone_places.experts_N, buffer.kernel_tensors, piece, *numbers)
    launch(kernel, layout.num_programs, *args, CONST=const, num_warps=layout.num_warps)


# Launches with arguments (buffer, rows, places, piece), without a host sync:
#   store_weights    this rank's experts -> slots of the clones' ranks
#   receive_weights  local slots -> clones, zeros for an empty place
#   store_grads      gradients of the clones -> local slots
#   receive_grads    slots of peers, added to the gradients of this rank's experts
store_weights = partial(_launch_clone_kernel, _store_weights_kernel, False)
receive_weights = partial(_launch_clone_kernel, _receive_weights_kernel, True)
store_grads = partial(_launch_clone_kernel, _store_grads_kernel, False)
receive_grads = partial(_launch_clone_kernel, _receive_grads_kernel, True)


def fetch_clones(buffer: CloneBuffer, expert_weights: Tensor, clone_places: ClonePlaces) -> Tensor:
    """Copy weights from the experts' ranks to this rank's clones; return them. Collective.

    A clone is a copy of an expert. `expert_weights` are this rank's experts, in any dtype. Clones
    without an expert in `clone_places` are zeros. No host sync.
    """
    out = expert_weights.new_empty(clone_places.num_clones, *expert_weights.shape[1:])
    rows_eW = _view_as_words(expert_weights.contiguous())
    out_cW = _view_rows(out).view(rows_eW.dtype)
    for piece in split_into_pieces(buffer.layout, rows_eW, clone_places.num_clones):
        store_weights(buffer, rows_eW, clone_places, piece)
        receive_weights(buffer, out_cW, clone_places, piece)
    return out


def add_clone_grads_(buffer: CloneBuffer, grads: Tensor, clone_places: ClonePlaces) -> Tensor:
    """Add the gradients of all ranks' clones to their experts' gradients, in place. Collective.

    `grads` [experts + clones, ...] is contiguous, of one of `SUM_DTYPES`. A clone is a copy of an
    expert. Returns the gradients of this rank's experts, summed in fp32, in the order of clones,
    and rounded once. No host sync.
    """
    home_eW, clones_cW = _view_rows(grads).split((clone_places.num_local, clone_places.num_clones))
    for piece in split_into_pieces(buffer.layout, home_eW, clone_places.num_clones):
        store_grads(buffer, clones_cW, clone_places, piece)
        receive_grads(buffer, home_eW, clone_places, piece)
    return grads[: clone_places.num_local]


def _view_rows(tensor: Tensor) -> Tensor:
    """Return a view [rows, elements] of a tensor [rows, ...]."""
    return tensor.view(tensor.shape[0], tensor.shape[1:].numel())


def _view_as_words(rows: Tensor) -> Tensor:
    """Return a view of contiguous rows as int32 [rows, W], or as uint8 if they are not aligned."""
    bytes_eB = _view_rows(rows).view(torch.uint8)
    is_even = bytes_eB.shape[1] % 4 == 0 and bytes_eB.storage_offset() % 4 == 0
    return bytes_eB.view(torch.int32) if is_even else bytes_eB
