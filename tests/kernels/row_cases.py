"""Cases of the products that take their rows tile by tile."""

import torch
from torch import Tensor

from moecore.kernels.rows.row_tiles import RowTiles, map_row_tiles
from tests.kernels.conftest import poison

# Rows of each expert: empty ones, one row, one expert, primes, tiles that are just full.
COUNTS = {
    "mixed": [85, 0, 1, 640, 0, 521],
    "one expert": [593],
    "full tiles": [128, 384, 256],
    "all to one": [0, 0, 977, 0],
    "no rows": [0, 0, 0],
    "more tiles than multiprocessors": [300] * 128,
}
SIZES = [(24, 40), (64, 128), (136, 328), (320, 256)]  # K, N
KINDS = ["swiglu", "geglu", "clamped_swiglu", "limited_swiglu", "situ_glu"]
SPARE = 70  # rows of an index that belong to nobody


def make(counts: list[int]) -> tuple[Tensor, Tensor, RowTiles, int]:
    """Offsets, row ids and tiles of R = used + SPARE rows, and the number of source rows."""
    poison()
    torch.manual_seed(0)
    offsets = torch.tensor(counts).cumsum(0).int().cuda()
    R, S = sum(counts) + SPARE, max(7, sum(counts) // 2)
    row_ids = torch.randint(0, S, (R,), dtype=torch.int32, device="cuda")
    return offsets, row_ids, map_row_tiles(offsets, R), S


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)
