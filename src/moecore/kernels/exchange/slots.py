"""Device functions of `exchange/operations.py` for source rows with several slots.

Few of a source row's N slots are used: 1.5 of 8 on average at 8 ranks. A program therefore first
lists the used slots of its chunk, and reads the list from its L1 cache when it moves the rows.

    list    [0, tile]      the depth of the tile: the largest number of used slots of its rows
            [1 + n, row]   the row's n-th used slot, -1 = none (each 32 slots start a new depth)

Example, two rows in one tile, slots [[-1, 7, 4], [-1, -1, 2]]: depth 2; [7, 2], [4, -1].

Letters: C max_tokens, G ranks, S = G * C source rows, R expert rows, D columns, N slots per source
row. WIDTH is the list's rows. A pair is a token of the chunk and a rank.
"""

from moecore.kernels.exchange.buffer import AT_ROWS
from moecore.kernels.exchange.rows import locate_pairs
from moecore.kernels.triton_api import tl, triton


@triton.jit
def list_row_slots(
    slots_ptr,  # [S, N] int32
    used_slots_ptr,  # [1 + N, WIDTH] int32, out, of this program
    source_rows,  # [ROWS] int64, source rows
    exists,  # [ROWS] bool
    list_idx,  # index of the first row in the list
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,  # rows of a tile
    BLOCK_N: tl.constexpr,  # at most 32
):
    """List the expert rows (slots >= 0) of each received row in this program's scratch memory."""
    TILES: tl.constexpr = ROWS // TILE
    entries = used_slots_ptr + WIDTH + list_idx + tl.arange(0, ROWS)
    depths = tl.zeros([TILES], dtype=tl.int32)
    depth = 0
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        mask = exists[:, None] & (n < N)[None, :]
        slots = tl.load(slots_ptr + source_rows[:, None] * N + n[None, :], mask=mask, other=-1)
        is_used = (slots >= 0).to(tl.int32)
        bits = tl.sum(is_used << tl.arange(0, BLOCK_N)[None, :], axis=1)
        counts = tl.sum(is_used, axis=1)
        max_counts = tl.max(tl.reshape(counts, [TILES, TILE]), axis=1)
        depths = tl.where(max_counts > 0, depth + max_counts, depths)
        for _step in range(tl.max(counts, axis=0)):
            low = bits & -bits
            slot_mask = low[:, None] == (1 << tl.arange(0, BLOCK_N))[None, :]
            slot = tl.max(tl.where(slot_mask, slots, -1), axis=1)
            tl.store(entries + depth * WIDTH, slot)
            bits -= low
            depth += 1
    tl.store(used_slots_ptr + list_idx // TILE + tl.arange(0, TILES), depths)


@triton.jit
def list_pair_slots(slots_ptr, used_slots_ptr, chunk, CONST: tl.constexpr):
    """List the expert rows of all (token, peer) pairs of a chunk in `used_slots_ptr`."""
    tl.debug_barrier()  # the last list has been read
    ROWS: tl.constexpr = CONST.LIST_PAIRS
    for start in range(0, CONST.CHUNK * CONST.G, ROWS):
        tokens, peers, exists = locate_pairs(start + tl.arange(0, ROWS), chunk, CONST)
        rows = peers.to(tl.int64) * chunk.max_tokens + tokens
        list_row_slots(
            slots_ptr, used_slots_ptr, rows, exists, start,
            CONST.N, CONST.WIDTH, ROWS, CONST.PAIRS, CONST.BLOCK_N,
        )  # fmt: skip
    tl.debug_barrier()


@triton.jit
def _load_rows_of_slot(
    y_ptr, entry_ptrs, slot_number, tile_depth, columns, D: tl.constexpr, WIDTH: tl.constexpr
):
    """Return the row of y in each listed row's slot `slot_number`; 0 from `tile_depth` on."""
    slot = tl.load(entry_ptrs + slot_number * WIDTH, mask=slot_number < tile_depth, other=-1).to(
        tl.int64
    )
    mask = (slot >= 0)[:, None] & (columns < D)[None, :]
    return tl.load(y_ptr + slot[:, None] * D + columns[None, :], mask=mask, other=0.0)


@triton.jit
def push_sums(y_ptr, places_ptr, used_slots_ptr, bases_ptr, chunk, first_row, CONST: tl.constexpr):
    """Sum the expert rows of each (token, peer) pair of a chunk; store sums in peers' buffers."""
    element = y_ptr.dtype.element_ty
    D: tl.constexpr = CONST.D
    PAIRS: tl.constexpr = CONST.PAIRS
    BLOCK_D: tl.constexpr = CONST.PUSH_D
    WIDTH: tl.constexpr = CONST.WIDTH
    for start in range(0, CONST.CHUNK * CONST.G, PAIRS):
        pairs = start + tl.arange(0, PAIRS)
        tokens, peers, exists = locate_pairs(pairs, chunk, CONST)
        rows = peers.to(tl.int64) * chunk.max_tokens + tokens
        send = tl.load(places_ptr + rows, mask=exists, other=-1) >= 0
        depth = tl.load(used_slots_ptr + start // PAIRS)
        entries = used_slots_ptr + WIDTH + pairs
        base = tl.load(bases_ptr + AT_ROWS * CONST.G + peers).to(tl.pointer_type(element))
        to = tl.multiple_of(base, 16) + (first_row + tokens) * D
        for column in range(0, D, BLOCK_D):
            columns = column + tl.arange(0, BLOCK_D)
            total = tl.zeros([PAIRS, BLOCK_D], dtype=tl.float32)
            for n in range(0, depth, 4):
                # Four independent loads before the first add.
                y0 = _load_rows_of_slot(y_ptr, entries, n, depth, columns, D, WIDTH)
                y1 = _load_rows_of_slot(y_ptr, entries, n + 1, depth, columns, D, WIDTH)
                y2 = _load_rows_of_slot(y_ptr, entries, n + 2, depth, columns, D, WIDTH)
                y3 = _load_rows_of_slot(y_ptr, entries, n + 3, depth, columns, D, WIDTH)
                total = total + y0.to(tl.float32)
                total = total + y1.to(tl.float32)
                total = total + y2.to(tl.float32)
                total = total + y3.to(tl.float32)
            mask = send[:, None] & (columns < D)[None, :]
            tl.store(to[:, None] + columns[None, :], total.to(element), mask=mask)


@triton.jit
def copy_to_slots(slot_ptr, out_ptr, used_slots_ptr, places, source_rows, CONST: tl.constexpr):
    """Copy each received row of a chunk from the buffer to all of its expert rows in `out_ptr`."""
    D: tl.constexpr = CONST.D
    CHUNK: tl.constexpr = CONST.CHUNK
    depth = tl.load(used_slots_ptr)
    entries = used_slots_ptr + CHUNK + tl.arange(0, CHUNK)
    for column in range(0, D, CONST.RECEIVE_D):
        columns = column + tl.arange(0, CONST.RECEIVE_D)
        inside = (columns < D)[None, :]
        from_ptrs = slot_ptr + source_rows[:, None] * D + columns[None, :]
        x = tl.load(from_ptrs, mask=(places >= 0)[:, None] & inside, cache_modifier=".cg")
        for n in range(depth):
            to = tl.load(entries + n * CHUNK).to(tl.int64)
            out = out_ptr + to[:, None] * D + columns[None, :]
            tl.store(out, x, mask=(to >= 0)[:, None] & inside)
