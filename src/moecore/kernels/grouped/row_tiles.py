"""Which rows of which expert each row tile covers, in `cooperative.py` and `pingpong.py`.

Letters: S source rows, R expert rows (capacity), e experts.

A map is int32 [1 + most row tiles, MAP_FIELDS] on the device. Its first word counts the row tiles;
the others are a tile's expert, its first row, and the end of the rows that its expert has there.
"""

from torch import Tensor

from moecore.kernels.common import cdiv, gl, gluon, next_power_of_2, on_device, tl, triton

BLOCK_M = 128  # rows of a tile
MAP_FIELDS = 4  # int32 words of a row tile: expert, first row, end of the expert's rows, unused


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


@gluon.jit
def locate(
    tile,  # number of the tile
    num_row_tiles,
    num_n,  # column tiles
    map_ptr,
    GROUP_M: gl.constexpr,
    FIELDS: gl.constexpr,
):
    """Return expert, first row, end of its rows, column tile; GROUP_M row tiles share weights."""
    width = GROUP_M * num_n
    first = tile // width * GROUP_M
    size = gl.minimum(num_row_tiles - first, GROUP_M)
    inside = tile % width
    at = map_ptr + (1 + first + inside % size) * FIELDS
    return gl.load(at), gl.load(at + 1), gl.load(at + 2), inside // size


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
