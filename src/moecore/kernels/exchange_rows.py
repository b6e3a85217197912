"""The rows of `exchange.py`'s kernels, for one program each: listed, pushed, copied, added.

A program first lists the rows of its chunk that are no holes, and then moves units of them: one row
and BLOCK_D of its columns. So every lane has work, however many holes there are, and all bytes of a
step are in flight at once.

Letters: T local tokens, C capacity, G ranks, S = G * C source rows, R expert rows, D columns, K
choices per token, N slots per source row. A pair is a token of the chunk and a rank.
"""

from moecore.kernels.common import tl, triton
from moecore.kernels.exchange_port import AT_IDS, AT_ROWS, AT_WEIGHTS


@triton.jit
def list_ones(
    list_ptr,  # [BLOCK] int32, out, of this program
    ones,  # [BLOCK] int32, 0 or 1
    BLOCK: tl.constexpr,  # at least the threads: the compiler fails at a shorter scan
):
    """Write where the ones are, in order; return how many. [0, 1, 0, 1] gives 1, 3."""
    place = tl.cumsum(ones, axis=0) - 1
    tl.debug_barrier()  # the last list has been read
    tl.store(list_ptr + place, tl.arange(0, BLOCK), mask=ones > 0)
    tl.debug_barrier()
    return tl.sum(ones, axis=0)


@triton.jit
def _units(
    list_ptr,  # int32
    start,  # first unit
    num_units,
    D: tl.constexpr,
    UNITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Return listed [UNITS], columns and mask [UNITS, BLOCK_D]; a row's units are neighbours."""
    BLOCKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    units = start + tl.arange(0, UNITS)
    listed = tl.load(list_ptr + units // BLOCKS, mask=units < num_units, other=0)
    columns = (units % BLOCKS * BLOCK_D)[:, None] + tl.arange(0, BLOCK_D)[None, :]
    return listed, columns, (units < num_units)[:, None] & (columns < D)


@triton.jit
def pair_of(
    pair,  # int32, of [CHUNK, BLOCK_G]
    chunk,
    rank,
    G: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Return token and peer, and whether it is a pair. Neighbours have different peers."""
    token = chunk * CHUNK + pair // BLOCK_G
    is_pair = (pair % BLOCK_G < G) & (pair < CHUNK * BLOCK_G)
    return token, (pair % BLOCK_G + token + rank) % G, is_pair


@triton.jit
def row_of(
    local,  # int32, of [ranks, CHUNK]
    first,  # first of the ranks
    chunk,
    capacity,  # C
    CHUNK: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Return the source row of a chunk's token of some rank, and whether there is one."""
    token = chunk * CHUNK + local % CHUNK
    exists = (local < RANKS * CHUNK) & (token < capacity)
    return (first + local // CHUNK).to(tl.int64) * capacity + token, exists


@triton.jit
def push_rows(
    x_ptr,  # [T, D]
    list_ptr,  # pairs
    bases_ptr,  # [4, G] int64
    count,  # pairs listed
    chunk,
    first,  # int64, row of this rank's token 0 in every peer's slot
    rank,
    G: tl.constexpr,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_G: tl.constexpr,
    UNITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store the tokens of the listed pairs on their peers."""
    num_units = count * ((D + BLOCK_D - 1) // BLOCK_D)
    for start in range(0, num_units, UNITS):
        pairs, columns, mask = _units(list_ptr, start, num_units, D, UNITS, BLOCK_D)
        tokens, peers, _ = pair_of(pairs, chunk, rank, G, CHUNK, BLOCK_G)
        tokens = tokens.to(tl.int64)
        base = tl.load(bases_ptr + AT_ROWS * G + peers).to(tl.pointer_type(x_ptr.dtype.element_ty))
        to = tl.multiple_of(base, 16) + (first + tokens) * D
        x = tl.load(x_ptr + tokens[:, None] * D + columns, mask=mask)
        tl.store(to[:, None] + columns, x, mask=mask)


@triton.jit
def _load_slots(
    slots_ptr,  # [S, N] int32
    rows,  # [UNITS] int64
    start,  # first slot
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return slots [UNITS, BLOCK_N], the used ones of each row by bit, and the most of a row."""
    n = start + tl.arange(0, BLOCK_N)
    slots = tl.load(slots_ptr + rows[:, None] * N + n[None, :], mask=(n < N)[None, :], other=-1)
    used = (slots >= 0).to(tl.int32)
    bits = tl.sum(used << tl.arange(0, BLOCK_N)[None, :], axis=1)
    return slots, bits, tl.max(tl.sum(used, axis=1), axis=0)


@triton.jit
def _next(slots, bits, BLOCK_N: tl.constexpr):
    """Return the slot [UNITS] of each row's lowest bit, -1 without one, and the other bits."""
    low = bits & -bits
    chosen = low[:, None] == (1 << tl.arange(0, BLOCK_N))[None, :]
    return tl.max(tl.where(chosen, slots, -1), axis=1).to(tl.int64), bits - low


@triton.jit
def _load_slot(
    y_ptr,  # [R, D]
    slot,  # [UNITS] int64
    columns,
    mask,
    D: tl.constexpr,
):
    """Return the rows in fp32; zeros where there is none."""
    mask = mask & (slot >= 0)[:, None]
    return tl.load(y_ptr + slot[:, None] * D + columns, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def push_sums(
    y_ptr,  # [R, D]
    slots_ptr,  # [S, N] int32
    list_ptr,  # pairs
    bases_ptr,  # [4, G] int64
    count,  # pairs listed
    chunk,
    capacity,  # C
    first,  # int64, row of this rank's token 0 in every peer's slot
    rank,
    G: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_G: tl.constexpr,
    UNITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add the rows that each listed pair's slots name, in order, and store the sums at home."""
    element = y_ptr.dtype.element_ty
    num_units = count * ((D + BLOCK_D - 1) // BLOCK_D)
    for start in range(0, num_units, UNITS):
        pairs, columns, mask = _units(list_ptr, start, num_units, D, UNITS, BLOCK_D)
        tokens, peers, _ = pair_of(pairs, chunk, rank, G, CHUNK, BLOCK_G)
        tokens, rows = tokens.to(tl.int64), peers.to(tl.int64) * capacity + tokens
        total = tl.zeros([UNITS, BLOCK_D], dtype=tl.float32)
        for block in range(0, N, BLOCK_N):
            slots, bits, most = _load_slots(slots_ptr, rows, block, N, BLOCK_N)
            for _step in range(0, most, 2):
                # Two independent loads before the first add: most rows have one slot or two.
                slot0, bits = _next(slots, bits, BLOCK_N)
                slot1, bits = _next(slots, bits, BLOCK_N)
                y0 = _load_slot(y_ptr, slot0, columns, mask, D)
                y1 = _load_slot(y_ptr, slot1, columns, mask, D)
                total = total + y0
                total = total + y1
        base = tl.load(bases_ptr + AT_ROWS * G + peers).to(tl.pointer_type(element))
        to = tl.multiple_of(base, 16) + (first + tokens) * D
        tl.store(to[:, None] + columns, total.to(element), mask=mask)


@triton.jit
def copy_rows(
    base,  # region of the buffer
    out_ptr,  # [R, D]
    slots_ptr,  # [S, N] int32
    list_ptr,  # rows of the item, [ranks, CHUNK]
    count,  # rows listed
    first,  # first of the ranks
    chunk,
    slot,  # int64, first row of the buffer's slot
    capacity,  # C
    D: tl.constexpr,
    N: tl.constexpr,
    CHUNK: tl.constexpr,
    RANKS: tl.constexpr,
    UNITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Copy each listed row out of the buffer to all rows that its slots name."""
    num_units = count * ((D + BLOCK_D - 1) // BLOCK_D)
    for start in range(0, num_units, UNITS):
        listed, columns, mask = _units(list_ptr, start, num_units, D, UNITS, BLOCK_D)
        rows, _ = row_of(listed, first, chunk, capacity, CHUNK, RANKS)
        x = tl.load(base + (slot + rows)[:, None] * D + columns, mask=mask, cache_modifier=".cg")
        if N == 1:
            to = tl.load(slots_ptr + rows).to(tl.int64)
            tl.store(out_ptr + to[:, None] * D + columns, x, mask=mask & (to >= 0)[:, None])
        else:
            for block in range(0, N, BLOCK_N):
                slots, bits, most = _load_slots(slots_ptr, rows, block, N, BLOCK_N)
                for _step in range(most):
                    to, bits = _next(slots, bits, BLOCK_N)
                    out = out_ptr + to[:, None] * D + columns
                    tl.store(out, x, mask=mask & (to >= 0)[:, None])


@triton.jit
def push_choices(
    ids_ptr,  # [T, K] int32, or [S, K] slots with REDUCE
    weights_ptr,  # [T, K] fp32, or [R] gradients with REDUCE
    marks_ptr,  # [T] int32 ranks by bit, or [S] int32 places with REDUCE
    bases_ptr,  # [4, G] int64
    chunk,
    num_tokens,  # T
    capacity,  # C
    first,  # int64, row of this rank's token 0 in every peer's slot
    rank,
    REDUCE: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Store ids and weights, or the weights' gradients, on the peers; ids of holes are -1."""
    for start in range(0, CHUNK * BLOCK_G, PAIRS):
        pairs = start + tl.arange(0, PAIRS)
        tokens, peers, exists = pair_of(pairs, chunk, rank, G, CHUNK, BLOCK_G)
        exists = exists & (tokens < capacity)
        send = sent_to(marks_ptr, tokens, peers, exists, num_tokens, capacity, REDUCE)
        sources, targets = tokens.to(tl.int64), first + tokens
        if REDUCE:
            sources = peers.to(tl.int64) * capacity + tokens
        base = tl.load(bases_ptr + AT_WEIGHTS * G + peers).to(tl.pointer_type(tl.float32))
        to_weights = base + targets * K
        to_ids = tl.load(bases_ptr + AT_IDS * G + peers).to(tl.pointer_type(tl.int32))
        to_ids += targets * K
        for k in range(0, K, BLOCK_K):
            choices = k + tl.arange(0, BLOCK_K)
            inside = (choices < K)[None, :]
            where = sources[:, None] * K + choices[None, :]
            sent = send[:, None] & inside
            ids = tl.load(ids_ptr + where, mask=sent, other=-1)
            if REDUCE:
                weights = tl.load(weights_ptr + ids, mask=ids >= 0, other=0.0)
            else:
                weights = tl.load(weights_ptr + where, mask=sent)
                tl.store(to_ids[:, None] + choices[None, :], ids, exists[:, None] & inside)
            tl.store(to_weights[:, None] + choices[None, :], weights, mask=sent)


@triton.jit
def sent_to(
    marks_ptr,  # [T] int32 ranks by bit, or [S] int32 places with REDUCE
    tokens,  # int32
    peers,  # int32
    exists,  # bool
    num_tokens,  # T
    capacity,  # C
    REDUCE: tl.constexpr,
):
    """Return for each pair whether something travels."""
    if REDUCE:
        rows = peers.to(tl.int64) * capacity + tokens
        return tl.load(marks_ptr + rows, mask=exists, other=-1) >= 0
    bits = tl.load(marks_ptr + tokens, mask=exists & (tokens < num_tokens), other=0)
    return ((bits >> peers) & 1) != 0


@triton.jit
def receive_choices(
    bases_ptr,  # [4, G] int64
    ids_ptr,  # [S, K] int32, out
    weights_ptr,  # [S, K] fp32, out
    places_ptr,  # [S] int32, out
    rows,  # [ROWS] int64
    exists,  # [ROWS] bool
    slot,  # int64, first row of the buffer's slot
    arrived,  # False: all are holes
    rank,
    G: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Copy ids and weights out of the buffer; write each row's place; return 1 where it is used."""
    ids_base = tl.load(bases_ptr + AT_IDS * G + rank).to(tl.pointer_type(tl.int32))
    weights_base = tl.load(bases_ptr + AT_WEIGHTS * G + rank).to(tl.pointer_type(tl.float32))
    used = tl.zeros([ROWS], dtype=tl.int32)
    for k in range(0, K, BLOCK_K):
        choices = k + tl.arange(0, BLOCK_K)
        inside = exists[:, None] & (choices < K)[None, :]
        where = rows[:, None] * K + choices[None, :]
        from_ids = ids_base + slot * K + where
        from_weights = weights_base + slot * K + where
        ids = tl.load(from_ids, mask=inside & arrived, other=-1, cache_modifier=".cg")
        weights = tl.load(from_weights, mask=inside & arrived, other=0.0, cache_modifier=".cg")
        tl.store(ids_ptr + where, ids, mask=inside)
        tl.store(weights_ptr + where, tl.where(ids >= 0, weights, 0.0), mask=inside)
        used = tl.maximum(used, tl.max((ids >= 0).to(tl.int32), axis=1))
    tl.store(places_ptr + rows, tl.where(used > 0, rows.to(tl.int32), -1), mask=exists)
    return used


@triton.jit
def _load_part(
    base,  # region of the buffer
    part,  # rank whose sums they are; zeros come back from G on
    bits,  # [TILE_ROWS] int32 ranks that hold a sum, by bit
    row,  # [TILE_ROWS] int64, place of token in the part of rank 0
    capacity,  # C
    columns,  # [BLOCK] int
    G: tl.constexpr,
    N: tl.constexpr,
):
    has = (((bits >> part) & 1) != 0) & (part < G)
    mask = has[:, None] & (columns < N)[None, :]
    where = (row + part * capacity)[:, None] * N + columns[None, :]
    return tl.load(base + where, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)


@triton.jit
def add_parts(
    base,  # region of the buffer
    out_ptr,  # [T, N]
    peers_ptr,  # [T] int32
    chunk,
    num_tokens,  # T
    slot,  # int64, first row of the slot
    capacity,  # C
    G: tl.constexpr,
    N: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the sums over ranks of a chunk's tokens, in rank order."""
    for start in range(0, CHUNK, TILE_ROWS):
        tokens = chunk * CHUNK + start + tl.arange(0, TILE_ROWS)
        bits = tl.load(peers_ptr + tokens, mask=tokens < num_tokens, other=0)
        row = slot + tokens
        for column in range(0, N, BLOCK):
            columns = column + tl.arange(0, BLOCK)
            total = tl.zeros([TILE_ROWS, BLOCK], dtype=tl.float32)
            for part in range(0, G, 4):
                # Four independent loads before the first add.
                y0 = _load_part(base, part, bits, row, capacity, columns, G, N)
                y1 = _load_part(base, part + 1, bits, row, capacity, columns, G, N)
                y2 = _load_part(base, part + 2, bits, row, capacity, columns, G, N)
                y3 = _load_part(base, part + 3, bits, row, capacity, columns, G, N)
                total = total + y0
                total = total + y1
                total = total + y2
                total = total + y3
            out = out_ptr + tokens.to(tl.int64)[:, None] * N + columns[None, :]
            mask = (tokens < num_tokens)[:, None] & (columns < N)[None, :]
            tl.store(out, total.to(out_ptr.dtype.element_ty), mask=mask)
