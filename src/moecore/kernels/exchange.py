"""Rows to the ranks that need them and partial sums back, by stores into the peers' memory.

    spread   token t of rank g -> row g * C + t of every rank that owns one of its experts
    reduce   row g * C + t of every such rank -> token t of rank g, added in fp32 in rank order

Each is the other's gradient. Row numbers are fixed by (rank, token), so nobody counts, sorts or
waits for a size: a rank holds S = G * C source rows with holes, and a hole is never read.

One launch per operation. Its first programs push: they store rows into the peers' receive buffers,
token by token with the peers interleaved (one peer after the other is a third slower), and after
each chunk of tokens they release one flag on every peer. They never wait, so they always end. The
others receive: they wait for a flag, then copy or add the chunk's rows out of the buffer.

Why two slots need no barrier. Operation n uses slot n % 2. A rank that pushes n + 2 has ended
n + 1, so it has seen the flags of n + 1 of every chunk of every rank (also of those without a row).
Those ranks raised them after ending n, and so after the last read of slot n % 2.

Why a flag holds n + 1. It is never cleared, and a flag that comes after a timeout can not be taken
for one of a later operation. n is counted on the device, so a replayed graph goes on counting. All
ranks must run the same operations in the same order, and each rank one after the other.

Memory order: stores of the program, barrier, one release at system scope by the thread that raises
the flags; acquire at system scope, barrier, loads that pass the L1 by.

Letters: T local tokens, C capacity (most tokens of any rank), G ranks, S = G * C source rows, D
columns, K choices per token, one chunk is CHUNK tokens. Bytes moved, with P ranks per token and b
bytes per element: P * T * D * b over the links, and the same read and written again by a receiver.
"""

from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from moecore.kernels.common import INTERPRET, next_power_of_2, on_device, tl, triton
from moecore.kernels.exchange_port import (
    AT_ROWS,
    AT_WEIGHTS,
    ERROR_BEFORE,
    OPERATION,
    ExchangePort,
)
from moecore.kernels.exchange_steps import (
    add_parts,
    copy_rows,
    find_peers,
    finish,
    notify,
    push_pairs,
    receive_choices,
    wait,
)

TILE_BYTES_PER_WARP = 32 * 8 * 16  # eight 16-byte accesses in flight per thread
MAX_BLOCK_K = 32

Half = Literal["both", "push", "receive"]


class SpreadChoices(NamedTuple):
    """What arrives with the rows of a dispatch.

    Attributes:
        rows_SD: received rows; holes are uninitialised.
        ids_SK: int32, global expert ids; -1 in holes.
        weights_SK: fp32; 0 where the id is -1.
        peers_T: int32, bit g of each local token: rank g needs it.
        used_S: int32, 1 = a row, 0 = a hole.
    """

    rows_SD: Tensor
    ids_SK: Tensor
    weights_SK: Tensor
    peers_T: Tensor
    used_S: Tensor


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


UNSPECIALIZED = ["num_tokens", "capacity", "num_chunks", "rank", "timeout"]


# `partial` because jit with options, as a decorator, needs Triton to be installed.
@partial(triton.jit, do_not_specialize=[*UNSPECIALIZED, "num_local"])
def _spread_kernel(
    x_ptr,  # [T, D]
    ids_ptr,  # [T, K] int32, with CHOICES
    weights_ptr,  # [T, K] fp32, with CHOICES
    peers_ptr,  # [T] int32 ranks by bit; out with CHOICES
    used_ptr,  # [S] int32; out with CHOICES
    out_ptr,  # [S, D], out
    out_ids_ptr,  # [S, K] int32, out with CHOICES
    out_weights_ptr,  # [S, K] fp32, out with CHOICES
    bases_ptr,  # [4, G] int64
    state_ptr,  # [NUM_WORDS] int32
    report_ptr,  # [NUM_WORDS] int32
    num_tokens,  # T
    capacity,  # C
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
    D: tl.constexpr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    PAIRS: tl.constexpr,
    PUSH_D: tl.constexpr,
    TAKE_ROWS: tl.constexpr,
    TAKE_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_G: tl.constexpr,
    THREADS: tl.constexpr,
):
    pid = tl.program_id(0)
    operation = tl.load(state_ptr + OPERATION)
    slot = (operation % 2).to(tl.int64) * G * capacity
    if PUSH:
        if pid < NUM_PUSH:
            for chunk in range(pid, num_chunks, NUM_PUSH):
                if CHOICES:
                    sizes = (chunk, num_tokens, num_local)
                    find_peers(ids_ptr, peers_ptr, *sizes, G, ETP, K, CHUNK, BLOCK_K)
                from_ptrs = (x_ptr, ids_ptr, weights_ptr, peers_ptr, bases_ptr)
                place = (chunk, num_tokens, capacity, slot + rank * capacity, rank)
                push_pairs(
                    *from_ptrs, *place, False, CHOICES, G, D, K, CHUNK, PAIRS, PUSH_D, BLOCK_K
                )
                flag = (operation % 2 * G + rank).to(tl.int64) * num_chunks + chunk
                notify(bases_ptr, flag, operation, G, BLOCK_G)
    if RECEIVE:
        FIRST: tl.constexpr = NUM_PUSH if PUSH else 0
        if pid >= FIRST:
            element = out_ptr.dtype.element_ty
            base = tl.load(bases_ptr + AT_ROWS * G + rank).to(tl.pointer_type(element))
            base = tl.multiple_of(base, 16)
            left = tl.where(tl.load(state_ptr + ERROR_BEFORE) == 0, timeout, 0).to(tl.int64)
            for item in range(pid - FIRST, num_chunks * G, NUM_RECEIVE):
                chunk, source = item // G, (item + rank) % G
                ptrs, whose = (bases_ptr, state_ptr, report_ptr), (source, chunk, num_chunks, rank)
                arrived = wait(*ptrs, operation, *whose, left, 0, 1, G, THREADS, SPIN)
                left = tl.where(arrived, left, 0)
                row = source.to(tl.int64) * capacity
                if CHOICES:
                    out_ptrs = (out_ids_ptr, out_weights_ptr, used_ptr)
                    there = (chunk, row, slot, capacity, arrived, rank)
                    receive_choices(bases_ptr, *out_ptrs, *there, G, K, CHUNK, BLOCK_K)
                here = (chunk, row, slot, capacity)
                if arrived:
                    copy_rows(base, out_ptr, used_ptr, *here, D, CHUNK, TAKE_ROWS, TAKE_D)
        finish(state_ptr, operation)


@partial(triton.jit, do_not_specialize=UNSPECIALIZED)
def _reduce_kernel(
    y_ptr,  # [S, D]
    dweights_ptr,  # [S, K] fp32, with CHOICES
    peers_ptr,  # [T] int32 ranks by bit
    used_ptr,  # [S] int32
    out_ptr,  # [T, D], out
    out_dweights_ptr,  # [T, K] fp32, out with CHOICES
    bases_ptr,  # [4, G] int64
    state_ptr,  # [NUM_WORDS] int32
    report_ptr,  # [NUM_WORDS] int32
    num_tokens,  # T
    capacity,  # C
    num_chunks,
    rank,
    timeout,  # nanoseconds
    PUSH: tl.constexpr,
    RECEIVE: tl.constexpr,
    CHOICES: tl.constexpr,
    SPIN: tl.constexpr,
    NUM_PUSH: tl.constexpr,
    NUM_RECEIVE: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    PAIRS: tl.constexpr,
    PUSH_D: tl.constexpr,
    TAKE_ROWS: tl.constexpr,
    TAKE_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_G: tl.constexpr,
    THREADS: tl.constexpr,
):
    pid = tl.program_id(0)
    operation = tl.load(state_ptr + OPERATION)
    slot = (operation % 2).to(tl.int64) * G * capacity
    if PUSH:
        if pid < NUM_PUSH:
            for chunk in range(pid, num_chunks, NUM_PUSH):
                from_ptrs = (dweights_ptr, used_ptr, bases_ptr)
                place = (chunk, num_tokens, capacity, slot + rank * capacity, rank)
                push_pairs(
                    y_ptr,
                    None,
                    *from_ptrs,
                    *place,
                    True,
                    CHOICES,
                    G,
                    D,
                    K,
                    CHUNK,
                    PAIRS,
                    PUSH_D,
                    BLOCK_K,
                )
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
            for chunk in range(pid - FIRST, num_chunks, NUM_RECEIVE):
                ptrs, whose = (bases_ptr, state_ptr, report_ptr), (0, chunk, num_chunks, rank)
                arrived = wait(*ptrs, operation, *whose, left, 1, G, G, THREADS, SPIN)
                left = tl.where(arrived, left, 0)
                place = (peers_ptr, chunk, num_tokens, slot, capacity)
                add_parts(base, out_ptr, *place, G, D, CHUNK, TAKE_ROWS, TAKE_D)
                if CHOICES:
                    add_parts(weights, out_dweights_ptr, *place, G, K, CHUNK, CHUNK, BLOCK_K)
        finish(state_ptr, operation)


def _options(port: ExchangePort, parts: int) -> dict[str, Any]:
    """Return the constants of a kernel whose receiver holds `parts` rows of each token at once."""
    layout = port.layout
    elements = layout.num_warps * TILE_BYTES_PER_WARP // layout.dtype.itemsize
    pairs, push_d = _tile(elements, layout.chunk * layout.num_ranks, layout.dim)
    take_rows, take_d = _tile(elements // parts, layout.chunk, layout.dim)
    return dict(
        NUM_PUSH=layout.num_push,
        NUM_RECEIVE=layout.num_receive,
        G=layout.num_ranks,
        D=layout.dim,
        K=layout.top_k,
        CHUNK=layout.chunk,
        PAIRS=pairs,
        PUSH_D=push_d,
        TAKE_ROWS=take_rows,
        TAKE_D=take_d,
        BLOCK_K=min(MAX_BLOCK_K, next_power_of_2(layout.top_k)),
        BLOCK_G=next_power_of_2(layout.num_ranks),
        THREADS=32 * layout.num_warps,
        SPIN=not INTERPRET,
        num_warps=layout.num_warps,
    )


def _tile(elements: int, most_rows: int, num_columns: int) -> tuple[int, int]:
    """Return rows and columns of a tile: powers of two, few idle columns, then many elements.

    Example, 32768 elements, 7168 columns: 32 rows of 1024 (none idle) of many, 8 of 4096 of eight.
    """
    fits = (
        n for n in (4096, 2048, 1024, 512, 256) if -(-num_columns // n) * n * 8 <= num_columns * 9
    )
    block = next(fits, min(256, next_power_of_2(num_columns)))
    rows = min(next_power_of_2(most_rows), elements // block)
    while block < num_columns and 2 * block * rows <= elements:
        block *= 2
    return rows, block


def _grid(port: ExchangePort, half: Half) -> tuple[int]:
    layout = port.layout
    return ((half != "receive") * layout.num_push + (half != "push") * layout.num_receive,)


def _common(port: ExchangePort, num_tokens: int) -> tuple[Any, ...]:
    layout = port.layout
    sizes = (num_tokens, layout.capacity, layout.num_chunks, port.rank, port.timeout_ns)
    return (port.bases, port.state, port.report, *sizes)


def spread_choices(
    port: ExchangePort,
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
        port: this rank's end.
        x_TD: tokens, at most C, contiguous, dtype of the layout.
        ids_TK: int32, contiguous, global expert ids; -1 = dropped.
        weights_TK: fp32, contiguous.
        num_local: experts of one rank; rank g owns block g // etp.
        etp: ranks that share a block.
        half: "push" and "receive" one after the other make up "both" (for tests that play all
            ranks in one process); what a half does not do is left uninitialised.
    """
    layout, (T, K) = port.layout, ids_TK.shape
    S, integers = layout.source_rows, partial(torch.empty, dtype=torch.int32, device=x_TD.device)
    out = SpreadChoices(
        rows_SD=x_TD.new_empty(S, layout.dim),
        ids_SK=integers(S, K),
        weights_SK=weights_TK.new_empty(S, K),
        peers_T=integers(T),
        used_S=integers(S),
    )
    outputs = (out.peers_T, out.used_S, out.rows_SD, out.ids_SK, out.weights_SK)
    _launch_spread(port, (x_TD, ids_TK, weights_TK, *outputs), num_local, etp, half)
    return out


def spread(
    port: ExchangePort, x_TD: Tensor, peers_T: Tensor, used_S: Tensor, *, half: Half = "both"
) -> Tensor:
    """Send rows where `spread_choices` sent their tokens; return rows_SD. No host sync.

    Args:
        port: this rank's end.
        x_TD: rows of the local tokens, contiguous.
        peers_T: who needs them, from `spread_choices`.
        used_S: which source rows come, from `spread_choices`.
        half: see `spread_choices`.
    """
    rows_SD = x_TD.new_empty(port.layout.source_rows, port.layout.dim)
    tensors = (x_TD, None, None, peers_T, used_S, rows_SD, None, None)
    _launch_spread(port, tensors, 1, 1, half)
    return rows_SD


def _launch_spread(
    port: ExchangePort, tensors: tuple[Any, ...], num_local: int, etp: int, half: Half
) -> None:
    with on_device(port.state):
        _spread_kernel[_grid(port, half)](
            *tensors,
            *_common(port, tensors[0].shape[0]),
            num_local,
            PUSH=half != "receive",
            RECEIVE=half != "push",
            CHOICES=tensors[1] is not None,
            ETP=etp,
            **_options(port, parts=1),
        )


def reduce(
    port: ExchangePort,
    y_SD: Tensor,
    peers_T: Tensor,
    used_S: Tensor,
    dweights_SK: Tensor | None = None,
    *,
    half: Half = "both",
) -> tuple[Tensor, Tensor | None]:
    """Send partial sums home and add them in fp32 in rank order. No host sync.

    Args:
        port: this rank's end.
        y_SD: partial sums of the source rows, contiguous; holes are not read.
        peers_T: from `spread_choices`: where the sums of the local tokens come from.
        used_S: from `spread_choices`: which source rows have a sum.
        dweights_SK: fp32, contiguous, gradients of the weights, to be added alike.
        half: see `spread_choices`.

    Returns:
        [T, D], rounded once, zero for a token that went nowhere; and [T, K] fp32 or None.
    """
    T = peers_T.shape[0]
    out_TD = y_SD.new_empty(T, port.layout.dim)
    out_TK = None if dweights_SK is None else dweights_SK.new_empty(T, port.layout.top_k)
    with on_device(port.state):
        _reduce_kernel[_grid(port, half)](
            *(y_SD, dweights_SK, peers_T, used_S, out_TD, out_TK),
            *_common(port, T),
            PUSH=half != "receive",
            RECEIVE=half != "push",
            CHOICES=dweights_SK is not None,
            **_options(port, parts=4),
        )
    return out_TD, out_TK
