"""The order of output tiles in Triton kernels of grouped products.

Row tiles start at each expert's first row, so a tile never mixes experts. A program computes its
tiles from the offsets of the experts' rows; Gluon kernels read a map of tiles instead
(`rows/row_tiles.py`). Tiles are numbered in groups of GROUP_M row tiles, which share weights in L2.
Letters: e experts.
"""

from moecore.kernels.common import tl, triton
from moecore.kernels.rows.row_tiles import load_expert_ranges

NO_TILE = tl.constexpr(2147483647)


@triton.jit
def count_row_tiles(
    offsets_ptr,  # [e] int32, running sum of the experts' rows
    num_experts,
    E_POW2: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Return each expert's first row, number of row tiles, their running sum, and their total."""
    starts, ends, exists = load_expert_ranges(offsets_ptr, num_experts, E_POW2)
    tiles = tl.where(exists, (ends - starts + BLOCK_M - 1) // BLOCK_M, 0)
    sums = tl.where(exists, tl.cumsum(tiles, 0), NO_TILE)
    return starts, tiles, sums, tl.sum(tiles, 0)


@triton.jit
def locate_tile(
    tile_idx,  # number of the tile
    num_column_tiles,  # column tiles
    row_tiles,  # from count_row_tiles
    E_POW2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Return (expert, first row, column tile) of output tile `tile_idx`."""
    starts, tiles, sums, total = row_tiles
    width = GROUP_M * num_column_tiles
    first = tile_idx // width * GROUP_M
    size = tl.minimum(total - first, GROUP_M)
    inside = tile_idx % width
    row_tile = first + inside % size
    expert = tl.sum((sums <= row_tile).to(tl.int32), 0)
    rows = starts + (row_tile - sums + tiles) * BLOCK_M
    row = tl.sum(tl.where(tl.arange(0, E_POW2) == expert, rows, 0), 0)
    return expert, row, inside // size
