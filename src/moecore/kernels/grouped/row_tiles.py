"""Which rows of which expert each row tile covers, in `cooperative.py` and `pingpong.py`.

Letters: R expert rows (length), e experts.

A map is int32 [1 + most row tiles, MAP_FIELDS] on the device. Its first word counts the row tiles;
the others are a tile's expert, its first row, and the end of the rows that its expert has there.
"""

from torch import Tensor

from moecore.kernels.common import cdiv, gl, gluon, next_power_of_2, on_device, tl, triton

BLOCK_M = 128  # rows of a tile
MAP_FIELDS = 4  # int32 words of a row tile: expert, first row, end of the expert's rows, unused


@triton.jit
def _map_row_tiles_kernel(
    offsets_ptr,  # [e] int32
    map_ptr,  # [1 + most row tiles, FIELDS] int32, out; word 0 is the number of row tiles
    num_experts,
    E_POW2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    experts = tl.arange(0, E_POW2)
    exists = experts < num_experts
    ends = tl.load(offsets_ptr + experts, mask=exists, other=0)
    starts = tl.load(offsets_ptr + experts - 1, mask=exists & (experts > 0), other=0)
    tiles = tl.where(exists, (ends - starts + BLOCK_M - 1) // BLOCK_M, 0)
    mine = tl.program_id(0)
    first = tl.sum(tl.where(experts < mine, tiles, 0), 0)
    count = tl.sum(tl.where(experts == mine, tiles, 0), 0)
    start = tl.sum(tl.where(experts == mine, starts, 0), 0)
    end = tl.sum(tl.where(experts == mine, ends, 0), 0)
    for done in range(0, count, BLOCK):
        tile = done + tl.arange(0, BLOCK)
        at = map_ptr + (1 + first + tile) * FIELDS
        tl.store(at, tl.full([BLOCK], 0, tl.int32) + mine, mask=tile < count)
        tl.store(at + 1, start + tile * BLOCK_M, mask=tile < count)
        tl.store(at + 2, tl.full([BLOCK], 0, tl.int32) + end, mask=tile < count)
    if mine == 0:
        tl.store(map_ptr, tl.sum(tiles, 0))


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
        num_rows: R, the length.

    Returns:
        int32 [1 + most row tiles, MAP_FIELDS]; the first word counts the row tiles.
    """
    e = offsets_e.shape[0]
    tiles = offsets_e.new_empty(1 + cdiv(num_rows, BLOCK_M) + e, MAP_FIELDS)
    with on_device(offsets_e):
        _map_row_tiles_kernel[(e,)](
            offsets_e,
            tiles,
            e,
            E_POW2=next_power_of_2(e),
            BLOCK_M=BLOCK_M,
            FIELDS=MAP_FIELDS,
            BLOCK=32,
        )
    return tiles
