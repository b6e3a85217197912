"""Tile sizes of the kernels of `exchange/operations.py`: bytes in flight against registers.

A tile is some rows and a block of their columns, both powers of two. A program loads a tile, then
stores it. The first byte takes about a microsecond, which few programs cannot hide. They therefore
load twice the bytes, in four tiles, before they store the first tile.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from moecore.kernels.common import cdiv, next_power_of_2
from moecore.kernels.exchange.buffer import MAX_RANKS, ExchangeLayout
from moecore.kernels.triton_api import INTERPRET

TILE_BYTES_PER_WARP = 32 * 8 * 16  # eight 16-byte accesses in flight per thread
ENOUGH_BYTES = 2 << 20  # in flight from one rank: 300 GB/s for seven microseconds
MAX_BLOCK_N = 32  # slots of a row that a program looks at together, as bits of an int32
MAX_BLOCK_K = 32  # choices of a token that it holds at once
MAX_CHOICES = 1024  # choices of pairs that it holds at once
MAX_SLOTS = 4096  # slots that it looks at together


@dataclass(frozen=True, slots=True)
class RowFormat:
    """The number of columns, and the bytes per element, of the rows that an exchange sends."""

    count: int  # D
    itemsize: int


class ExchangeConstants(NamedTuple):
    """Compile-time constants of an exchange kernel: sizes of group, buffer, tiles and launch."""

    NUM_PUSH: int  # programs
    NUM_RECEIVE: int  # programs
    G: int
    ETP: int
    BLOCK_BITS: int  # of the ranks of block 0: an int64, whose last bit is its sign
    ROW_BYTES: int  # of the buffer; rows of an operation may have fewer
    D: int
    K: int
    N: int
    CHUNK: int
    LIST: int  # entries of a program's list of slots
    WIDTH: int  # rows of such a list
    LIST_PAIRS: int  # whose slots a program looks at together
    PAIRS: int  # of a pushed tile
    PUSH_D: int  # its columns
    RECEIVE_ROWS: int  # of a received tile
    RECEIVE_D: int  # its columns
    TILES: int  # loaded before the first is stored: 1 or 4
    CHOICE_PAIRS: int  # whose choices a program pushes at once
    BLOCK_K: int
    BLOCK_N: int  # at most 32
    BLOCK_G: int
    THREADS: int
    SPIN: bool  # False: a flag is looked at once, for the interpreter


def count_tiles(layout: ExchangeLayout, row_format: RowFormat) -> int:
    """Return how many tiles a program loads before it stores: 4 if few programs send, or 1."""
    # 1 for odd row sizes, because masks need registers.
    bytes_in_flight = layout.num_push * layout.num_warps * TILE_BYTES_PER_WARP
    is_even = row_format.count * row_format.itemsize % 1024 == 0
    return 4 if bytes_in_flight < ENOUGH_BYTES and is_even else 1


def choose_move_tile(
    layout: ExchangeLayout, row_format: RowFormat, max_rows: int, min_rows: int = 1
) -> tuple[int, int]:
    """Return (rows, columns) of the tiles in which a kernel copies rows.

    A program loads `count_tiles` tiles at once. A tile has at most `max_rows` rows, rounded up to a
    power of two, and at least `min_rows`.
    """
    # Example, 3584 words, one tile: 32 rows of 512 of many rows, 8 of 2048 of eight. Four tiles: 64
    # rows of 128.
    size = layout.num_warps * TILE_BYTES_PER_WARP
    if count_tiles(layout, row_format) == 1:
        return _choose_tile(row_format, size, max_rows, min_rows)
    rows, block = _choose_tile(row_format, 2 * size, max_rows, min_rows)
    return rows, block // 4


def choose_add_tile(layout: ExchangeLayout, row_format: RowFormat) -> tuple[int, int]:
    """Return (tokens, columns) of a tile of received sums; a program loads four at once."""
    return _choose_tile(row_format, layout.num_warps * TILE_BYTES_PER_WARP // 4, layout.chunk)


def choose_sum_tile(layout: ExchangeLayout, row_format: RowFormat) -> tuple[int, int]:
    """Return (token-peer pairs, columns) of a tile of sums to send."""
    # Example, bf16, 7168 columns: 16 rows of 1024.
    max_pairs = min(layout.chunk * layout.num_ranks, MAX_SLOTS // MAX_BLOCK_N)
    num_bytes = layout.num_warps * TILE_BYTES_PER_WARP // 2
    return _choose_tile(row_format, num_bytes, max_pairs, min_rows=8)


def compute_list_width(layout: ExchangeLayout) -> int:
    """Return a chunk's number of (token, peer) pairs, rounded up to a power of two."""
    return next_power_of_2(layout.chunk * layout.num_ranks)


def compute_list_size(layout: ExchangeLayout, num_slots: int) -> int:
    """Return the int32 entries of a program's scratch list of expert rows; 0 if num_slots is 1."""
    return (1 + num_slots) * compute_list_width(layout) if num_slots > 1 else 0


@cache
def make_exchange_constants(
    layout: ExchangeLayout, row_format: RowFormat, num_slots: int, *, is_reduce: bool, etp: int = 1
) -> ExchangeConstants:
    """Return the constants of the combine kernel if `is_reduce`, otherwise of the dispatch kernel.

    `num_slots` is the maximum number of expert rows per received row.
    """
    block_k = min(MAX_BLOCK_K, next_power_of_2(layout.top_k))
    block_n = min(MAX_BLOCK_N, next_power_of_2(num_slots))
    width = compute_list_width(layout)
    push = choose_move_tile(layout, row_format, layout.chunk * layout.num_ranks)
    take = choose_move_tile(layout, row_format, layout.chunk, layout.chunk)
    if is_reduce:
        push = choose_sum_tile(layout, row_format) if num_slots > 1 else push
        take = choose_add_tile(layout, row_format)
    return ExchangeConstants(
        NUM_PUSH=layout.num_push,
        NUM_RECEIVE=layout.num_receive,
        G=layout.num_ranks,
        ETP=etp,
        BLOCK_BITS=-1 if etp == MAX_RANKS else (1 << etp) - 1,
        ROW_BYTES=layout.row_bytes,
        D=row_format.count,
        K=layout.top_k,
        N=num_slots,
        CHUNK=layout.chunk,
        LIST=compute_list_size(layout, num_slots),
        WIDTH=width,
        LIST_PAIRS=min(width, MAX_SLOTS // block_n),  # whole tiles of sums
        PAIRS=push[0],
        PUSH_D=push[1],
        RECEIVE_ROWS=take[0],
        RECEIVE_D=take[1],
        TILES=count_tiles(layout, row_format),
        CHOICE_PAIRS=min(width, MAX_CHOICES // block_k),
        BLOCK_K=block_k,
        BLOCK_N=block_n,
        BLOCK_G=next_power_of_2(layout.num_ranks),
        THREADS=32 * layout.num_warps,
        SPIN=not INTERPRET,
    )


def _choose_tile(
    row_format: RowFormat, num_bytes: int, max_rows: int, min_rows: int = 1
) -> tuple[int, int]:
    """Return (rows, columns) of a tile of at most `num_bytes`, with few columns past a row."""
    D, elements = row_format.count, num_bytes // row_format.itemsize
    sizes = [n // row_format.itemsize for n in (8192, 4096, 2048, 1024, 512)]
    fits = (n for n in sizes if n * min_rows <= elements and cdiv(D, n) * n * 8 <= D * 9)
    block = next(fits, min(sizes[-1], next_power_of_2(D)))
    rows = min(next_power_of_2(max_rows), elements // block)
    while block < D and 2 * block * rows <= elements:
        block *= 2
    return rows, block
