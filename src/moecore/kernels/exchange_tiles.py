"""How much a program of `exchange.py` holds at once: bytes in flight against registers."""

from moecore.kernels.common import cdiv, next_power_of_2
from moecore.kernels.exchange_port import ExchangeLayout

TILE_BYTES_PER_WARP = 32 * 8 * 16  # eight 16-byte accesses in flight per thread
MAX_BLOCK_N = 32  # slots that a row holds at once, as bits of an int32
UNIT_BYTES = 2048
CHOICES_TILE = 4096  # ids or weights that a program holds at once, at least one per token


def list_size(layout: ExchangeLayout) -> int:
    """Return the entries of a program's list: for all pairs of a chunk, or one per thread."""
    return max(32 * layout.num_warps, layout.chunk * next_power_of_2(layout.num_ranks))


def tile_elements(layout: ExchangeLayout) -> int:
    """Return the elements that a program loads at once."""
    return layout.num_warps * TILE_BYTES_PER_WARP // layout.dtype.itemsize


def unit_columns(layout: ExchangeLayout) -> int:
    """Return the columns of a unit: the most that leave at most 1/8 idle, up to 2048 bytes.

    Example, bf16: 1024 of 7168, seven units; 1024 of 2048, two; 32 of 24.
    """
    D, most = layout.dim, UNIT_BYTES // layout.dtype.itemsize
    fits = (n for n in (most, most // 2, most // 4, 256) if cdiv(D, n) * n * 8 <= D * 9)
    return next(fits, min(256, next_power_of_2(D)))


def sum_tile(layout: ExchangeLayout) -> tuple[int, int]:
    """Return rows and columns of a tile of sums, for which four rows of each are held at once.

    Example, 8 tokens of 7168 columns in bf16: 8 rows of 1024.
    """
    block = unit_columns(layout)
    elements = tile_elements(layout) // 4
    rows = min(layout.chunk, elements // block)
    while block < layout.dim and 2 * block * rows <= elements:
        block *= 2
    return rows, block
