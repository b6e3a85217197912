"""The tiles of expert rows, and the order of output tiles, in kernels of grouped products.

Row tiles start at each expert's first row, so a tile never mixes experts. Gluon kernels read a map
of row tiles. Programs of Triton kernels compute their tiles from the offsets of the experts' rows,
in groups of GROUP_M row tiles, which share weights in L2.

Letters: R expert rows (length), e experts. A map is int32 [1 + max row tiles, MAP_FIELDS] on the
device. Its first word is the number of row tiles. The row of each tile has the tile's expert, its
first expert row, and the end of the expert's rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from moecore.kernels.common import can_use_kernel, cdiv, launch, next_power_of_2
from moecore.kernels.triton_api import tl, triton

BLOCK_M = 128  # rows of a tile
NO_TILE = tl.constexpr(2147483647)
MAP_FIELDS = 4  # int32 words of a row tile: expert, first row, end of the expert's rows, unused


@triton.jit
def load_expert_ranges(offsets_ptr, num_experts, E_POW2: tl.constexpr):
    """Return (starts, ends, exists) [E_POW2]: each expert's rows, and whether the expert exists."""
    experts = tl.arange(0, E_POW2)
    exists = experts < num_experts
    ends = tl.load(offsets_ptr + experts, mask=exists, other=0)
    starts = tl.load(offsets_ptr + experts - 1, mask=exists & (experts > 0), other=0)
    return starts, ends, exists


@triton.jit
def count_row_tiles(offsets_ptr, num_experts, E_POW2: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return experts' first rows and row tile counts, the counts' running sum, and their total."""
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


@triton.jit
def mask_rows_in_use(rows, max_rows, num_used_ptr):
    """Return bool per entry of `rows`: True below max_rows, and below *num_used_ptr if not None."""
    mask = rows < max_rows
    if num_used_ptr is not None:
        mask = mask & (rows < tl.load(num_used_ptr))
    return mask


@triton.jit
def _map_row_tiles_kernel(
    offsets_ptr,  # [e] int32, running sum of the experts' rows
    map_ptr,  # [1 + most row tiles, FIELDS] int32, out; word 0 is the number of row tiles
    ends_ptr,  # [e] int32, out: running sum of the experts' row tiles
    num_experts,
    E_POW2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write one expert's row tiles to the map, and their running sum to ends_ptr."""
    experts = tl.arange(0, E_POW2)
    starts, ends, exists = load_expert_ranges(offsets_ptr, num_experts, E_POW2)
    tiles = tl.where(exists, (ends - starts + BLOCK_M - 1) // BLOCK_M, 0)
    expert = tl.program_id(0)
    first = tl.sum(tl.where(experts < expert, tiles, 0), 0)
    count = tl.sum(tl.where(experts == expert, tiles, 0), 0)
    start = tl.sum(tl.where(experts == expert, starts, 0), 0)
    end = tl.sum(tl.where(experts == expert, ends, 0), 0)
    for offset in range(0, count, BLOCK):
        tile = offset + tl.arange(0, BLOCK)
        at = map_ptr + (1 + first + tile) * FIELDS
        tl.store(at, tl.full([BLOCK], 0, tl.int32) + expert, mask=tile < count)
        tl.store(at + 1, start + tile * BLOCK_M, mask=tile < count)
        tl.store(at + 2, tl.full([BLOCK], 0, tl.int32) + end, mask=tile < count)
    tl.store(ends_ptr + expert, first + count)
    if expert == 0:
        tl.store(map_ptr, tl.sum(tiles, 0))


class RowTiles(NamedTuple):
    """The row tiles of all experts, on the device. A row tile is up to 128 rows of one expert."""

    map: Tensor  # int32 [1 + most row tiles, MAP_FIELDS], see above
    ends_e: Tensor  # int32 running sum of the experts' row tiles

    @property
    def max_tiles(self) -> int:
        """The map's capacity in row tiles; the device value map[0, 0] is the number in use."""
        return self.map.shape[0] - 1


def map_row_tiles_ref(offsets_e: Tensor, num_rows: int) -> RowTiles:
    """Compute `map_row_tiles` in plain PyTorch; entries of unused tiles are 0."""
    e = offsets_e.shape[0]
    map = offsets_e.new_zeros(1 + cdiv(num_rows, BLOCK_M) + e, MAP_FIELDS)
    counts_e = offsets_e.diff(prepend=offsets_e.new_zeros(1))
    ends_e = ((counts_e + BLOCK_M - 1) // BLOCK_M).cumsum(0, dtype=torch.int32)
    map[0, 0] = ends_e[-1]
    tile = torch.arange(map.shape[0] - 1, device=map.device, dtype=torch.int32)
    expert = torch.searchsorted(ends_e, tile, right=True).clamp(max=e - 1)
    first = torch.nn.functional.pad(ends_e, (1, 0))[expert]
    row = (offsets_e - counts_e)[expert] + (tile - first) * BLOCK_M
    map[1:, :3] = torch.stack([expert.int(), row.int(), offsets_e[expert]], 1)
    map[1:].masked_fill_((tile >= ends_e[-1])[:, None], 0)
    return RowTiles(map, ends_e)


def map_row_tiles(offsets_e: Tensor, num_rows: int) -> RowTiles:
    """Divide each expert's rows into tiles of up to 128 rows; return their map. No host sync.

    `offsets_e` is the int32 running sum of the experts' row counts, on the device. `num_rows` is
    the length of the row buffer. Unused entries are uninitialised.
    """
    if not can_use_kernel(offsets_e):
        return map_row_tiles_ref(offsets_e, num_rows)
    e = offsets_e.shape[0]
    map = offsets_e.new_empty(1 + cdiv(num_rows, BLOCK_M) + e, MAP_FIELDS)
    tiles = RowTiles(map, torch.empty_like(offsets_e))
    sizes = dict(E_POW2=next_power_of_2(e), BLOCK_M=BLOCK_M, FIELDS=MAP_FIELDS, BLOCK=32)
    launch(_map_row_tiles_kernel, e, offsets_e, *tiles, e, **sizes)
    return tiles
