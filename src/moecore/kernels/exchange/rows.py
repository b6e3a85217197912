"""Device functions of `exchange/operations.py` that push, copy and add rows.

A tile is some rows and BLOCK_D of their columns. Holes in a tile are masked, because listing the
used rows costs more (docs/findings.md#stores-into-peers-memory).

Letters: T local tokens, C max_tokens, G ranks, S = G * C source rows, R rows, D columns, K choices
per token. A pair is a token of the chunk and a rank.
"""

from typing import Any, NamedTuple

from moecore.kernels.exchange.buffer import AT_IDS, AT_ROWS, AT_WEIGHTS
from moecore.kernels.triton_api import tl, triton


class RowChunk(NamedTuple):
    """A chunk of local tokens: chunk index, tokens of this rank, maximum over ranks, this rank."""

    number: Any
    num_tokens: Any
    max_tokens: Any
    rank: Any


@triton.jit
def locate_pairs(pair_ids, chunk, CONST: tl.constexpr):
    """Return (token, rank, exists) of the (token, rank) pairs `pair_ids` of a chunk."""
    token = chunk.number * CONST.CHUNK + pair_ids // CONST.G
    exists = (pair_ids < CONST.CHUNK * CONST.G) & (token < chunk.max_tokens)
    return token, (pair_ids % CONST.G + token + chunk.rank) % CONST.G, exists


@triton.jit
def _load_rows(from_ptrs, mask, columns, D: tl.constexpr, CACHE: tl.constexpr):
    """Load columns of rows at `from_ptrs`, [rows, columns]; undefined where the mask is False."""
    inside = mask[:, None] & (columns < D)[None, :]
    return tl.load(from_ptrs[:, None] + columns[None, :], mask=inside, cache_modifier=CACHE)


@triton.jit
def _store_rows(to_ptrs, x, mask, columns, D: tl.constexpr):
    """Store x [rows, columns] to these columns of rows at `to_ptrs`, where the mask is True."""
    tl.store(to_ptrs[:, None] + columns[None, :], x, mask=mask[:, None] & (columns < D)[None, :])


@triton.jit
def _move_rows(
    from_ptrs,  # [ROWS] pointers to rows
    to_ptrs,  # [ROWS] pointers to rows
    mask,  # [ROWS] bool
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILES: tl.constexpr,  # loaded before the first is stored: 1 or 4
    CACHE: tl.constexpr,
):
    """Copy rows of D columns where the mask is True, TILES blocks of BLOCK_D columns at a time."""
    for start in range(0, D, TILES * BLOCK_D):
        columns = start + tl.arange(0, BLOCK_D)
        x0 = _load_rows(from_ptrs, mask, columns, D, CACHE)
        if TILES == 4:
            x1 = _load_rows(from_ptrs, mask, columns + BLOCK_D, D, CACHE)
            x2 = _load_rows(from_ptrs, mask, columns + 2 * BLOCK_D, D, CACHE)
            x3 = _load_rows(from_ptrs, mask, columns + 3 * BLOCK_D, D, CACHE)
        _store_rows(to_ptrs, x0, mask, columns, D)
        if TILES == 4:
            _store_rows(to_ptrs, x1, mask, columns + BLOCK_D, D)
            _store_rows(to_ptrs, x2, mask, columns + 2 * BLOCK_D, D)
            _store_rows(to_ptrs, x3, mask, columns + 3 * BLOCK_D, D)


@triton.jit
def push_rows(
    rows_ptr,  # [T, D], or [R, D] with REDUCE
    destinations_ptr,  # [T] int64 ranks by bit, or [S] int32 slots with REDUCE
    bases_ptr,  # [4, G] int64
    region_offset,  # int64, byte of the region where its row 0 is
    chunk,  # RowChunk
    first_row,  # int64, row of this rank's token 0 in every peer's slot
    REDUCE: tl.constexpr,
    CONST: tl.constexpr,  # ExchangeConstants
):
    """Store a chunk's rows in peers' buffers, at most one row per token and peer."""
    element = rows_ptr.dtype.element_ty
    D: tl.constexpr = CONST.D
    for start in range(0, CONST.CHUNK * CONST.G, CONST.PAIRS):
        tokens, peers, exists = locate_pairs(start + tl.arange(0, CONST.PAIRS), chunk, CONST)
        if REDUCE:
            rows = peers.to(tl.int64) * chunk.max_tokens + tokens
            sources = tl.load(destinations_ptr + rows, mask=exists, other=-1).to(tl.int64)
            send = sources >= 0
        else:
            sources = tokens.to(tl.int64)
            send = _find_sent_pairs(destinations_ptr, tokens, peers, exists, chunk, False)
        base = tl.load(bases_ptr + AT_ROWS * CONST.G + peers) + region_offset
        to_ptrs = tl.multiple_of(base.to(tl.pointer_type(element)), 16) + (first_row + tokens) * D
        _move_rows(rows_ptr + sources * D, to_ptrs, send, D, CONST.PUSH_D, CONST.TILES, "")


@triton.jit
def locate_source_rows(source_rank, chunk_idx, max_tokens, CHUNK: tl.constexpr):
    """Return the buffer rows of a chunk's tokens, int64 [CHUNK], and whether each token exists."""
    tokens = chunk_idx * CHUNK + tl.arange(0, CHUNK)
    return source_rank.to(tl.int64) * max_tokens + tokens, tokens < max_tokens


@triton.jit
def copy_rows(slot_ptr, out_ptr, out_rows, source_rows, CONST: tl.constexpr):
    """Copy received rows at `slot_ptr` to rows `out_rows` of `out_ptr`; -1 = not copied."""
    from_ptrs, to_ptrs = slot_ptr + source_rows * CONST.D, out_ptr + out_rows.to(tl.int64) * CONST.D
    _move_rows(from_ptrs, to_ptrs, out_rows >= 0, CONST.D, CONST.RECEIVE_D, CONST.TILES, ".cg")


class Choices(NamedTuple):
    """Pointers to the int32 expert ids and fp32 routing weights of rows."""

    ids: Any
    weights: Any


@triton.jit
def push_choices(
    from_ptrs,  # Choices [T, K]; with REDUCE slots [S, K] for ids, gradients [R] for weights
    destinations_ptr,  # [T] int64 ranks by bit, or [S] int32 places with REDUCE
    bases_ptr,  # [4, G] int64
    chunk,  # RowChunk
    first_row,  # int64, row of this rank's token 0 in every peer's slot
    REDUCE: tl.constexpr,
    CONST: tl.constexpr,  # ExchangeConstants
):
    """Store a chunk's ids and weights in peers' buffers, or (REDUCE) gradients of weights."""
    G: tl.constexpr = CONST.G
    K: tl.constexpr = CONST.K
    for start in range(0, CONST.CHUNK * G, CONST.CHOICE_PAIRS):
        pairs = start + tl.arange(0, CONST.CHOICE_PAIRS)
        tokens, peers, exists = locate_pairs(pairs, chunk, CONST)
        send = _find_sent_pairs(destinations_ptr, tokens, peers, exists, chunk, REDUCE)
        sources, targets = tokens.to(tl.int64), first_row + tokens
        if REDUCE:
            sources = peers.to(tl.int64) * chunk.max_tokens + tokens
        base = tl.load(bases_ptr + AT_WEIGHTS * G + peers).to(tl.pointer_type(tl.float32))
        to_weights = base + targets * K
        to_ids = tl.load(bases_ptr + AT_IDS * G + peers).to(tl.pointer_type(tl.int32))
        to_ids += targets * K
        for k in range(0, K, CONST.BLOCK_K):
            choices = k + tl.arange(0, CONST.BLOCK_K)
            inside = (choices < K)[None, :]
            offsets = sources[:, None] * K + choices[None, :]
            mask = send[:, None] & inside
            ids = tl.load(from_ptrs.ids + offsets, mask=mask, other=-1)
            if REDUCE:
                weights = tl.load(from_ptrs.weights + ids, mask=ids >= 0, other=0.0)
            else:
                weights = tl.load(from_ptrs.weights + offsets, mask=mask)
                tl.store(to_ids[:, None] + choices[None, :], ids, exists[:, None] & inside)
            tl.store(to_weights[:, None] + choices[None, :], weights, mask=mask)


@triton.jit
def _find_sent_pairs(destinations_ptr, tokens, peers, exists, chunk, REDUCE: tl.constexpr):
    """Return whether this rank sends a row to the peer, bool per (token, peer) pair."""
    if REDUCE:
        rows = peers.to(tl.int64) * chunk.max_tokens + tokens
        return tl.load(destinations_ptr + rows, mask=exists, other=-1) >= 0
    bits = tl.load(destinations_ptr + tokens, mask=exists & (tokens < chunk.num_tokens), other=0)
    return ((bits >> peers) & 1) != 0


@triton.jit
def receive_choices(
    bases_ptr,  # [4, G] int64
    out_ptrs,  # Choices [S, K], out
    places_ptr,  # [S] int32, out
    source_rows,  # [CHUNK] int64, source rows
    exists,  # [CHUNK] bool
    first_slot_row,  # int64, first row of the buffer's slot
    has_arrived,  # False: all are holes
    rank,
    CONST: tl.constexpr,  # ExchangeConstants
):
    """Copy a chunk's ids and weights to `out_ptrs`; return the received rows, -1 = not sent."""
    K: tl.constexpr = CONST.K
    CHUNK: tl.constexpr = CONST.CHUNK
    ids_base = tl.load(bases_ptr + AT_IDS * CONST.G + rank).to(tl.pointer_type(tl.int32))
    weights_base = tl.load(bases_ptr + AT_WEIGHTS * CONST.G + rank)
    weights_base = weights_base.to(tl.pointer_type(tl.float32))
    has_choice = tl.zeros([CHUNK], dtype=tl.int32)
    for k in range(0, K, CONST.BLOCK_K):
        choices = k + tl.arange(0, CONST.BLOCK_K)
        inside = exists[:, None] & (choices < K)[None, :]
        offsets = source_rows[:, None] * K + choices[None, :]
        from_ids = ids_base + first_slot_row * K + offsets
        from_weights = weights_base + first_slot_row * K + offsets
        ids = tl.load(from_ids, mask=inside & has_arrived, other=-1, cache_modifier=".cg")
        weights = tl.load(from_weights, mask=inside & has_arrived, other=0.0, cache_modifier=".cg")
        tl.store(out_ptrs.ids + offsets, ids, mask=inside)
        tl.store(out_ptrs.weights + offsets, tl.where(ids >= 0, weights, 0.0), mask=inside)
        has_choice = tl.maximum(has_choice, tl.max((ids >= 0).to(tl.int32), axis=1))
    places = tl.where(has_choice > 0, source_rows.to(tl.int32), -1)
    tl.store(places_ptr + source_rows, places, mask=exists)
    return places


@triton.jit
def _load_partial_sums(
    region_ptr, peer, rank_bits, first_rows, max_tokens, columns, G: tl.constexpr, N: tl.constexpr
):
    """Return the sums that rank `peer` sent, fp32; 0 for tokens without one and from rank G on."""
    has = (((rank_bits >> peer) & 1) != 0) & (peer < G)
    mask = has[:, None] & (columns < N)[None, :]
    offsets = (first_rows + peer * max_tokens).to(tl.int64)[:, None] * N + columns[None, :]
    return tl.load(region_ptr + offsets, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)


@triton.jit
def add_partial_sums(
    region_ptr,  # region of the buffer
    out_ptr,  # [T, N]
    peers_ptr,  # [T] int64
    chunk,  # RowChunk
    first_slot_row,  # first row of the slot
    N: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CONST: tl.constexpr,  # ExchangeConstants
):
    """Add the sums that ranks sent for a chunk's tokens, in fp32 and rank order, into `out_ptr`."""
    G: tl.constexpr = CONST.G
    max_tokens = chunk.max_tokens
    for start in range(0, CONST.CHUNK, TILE_ROWS):
        tokens = chunk.number * CONST.CHUNK + start + tl.arange(0, TILE_ROWS)
        bits = tl.load(peers_ptr + tokens, mask=tokens < chunk.num_tokens, other=0)
        row = first_slot_row + tokens
        for column in range(0, N, BLOCK):
            columns = column + tl.arange(0, BLOCK)
            total = tl.zeros([TILE_ROWS, BLOCK], dtype=tl.float32)
            for part in range(0, G, 4):
                # Four independent loads before the first add.
                y0 = _load_partial_sums(region_ptr, part, bits, row, max_tokens, columns, G, N)
                y1 = _load_partial_sums(region_ptr, part + 1, bits, row, max_tokens, columns, G, N)
                y2 = _load_partial_sums(region_ptr, part + 2, bits, row, max_tokens, columns, G, N)
                y3 = _load_partial_sums(region_ptr, part + 3, bits, row, max_tokens, columns, G, N)
                total = total + y0 + y1 + y2 + y3
            out = out_ptr + tokens.to(tl.int64)[:, None] * N + columns[None, :]
            mask = (tokens < chunk.num_tokens)[:, None] & (columns < N)[None, :]
            tl.store(out, total.to(out_ptr.dtype.element_ty), mask=mask)
