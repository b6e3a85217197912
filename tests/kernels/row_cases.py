"""Cases of the products that take their rows tile by tile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moecore.kernels.grouped.row_tiles import map_piece_tiles, map_row_tiles
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
KINDS = ["swiglu", "geglu", "clamped_swiglu"]
SPARE = 70  # rows of the capacity that belong to nobody


def make(counts: list[int]) -> tuple[Tensor, Tensor, Tensor, int]:
    """Offsets, row ids and tiles of R = used + SPARE rows, and the number of source rows."""
    poison()
    torch.manual_seed(0)
    offsets = torch.tensor(counts).cumsum(0).int().cuda()
    R = sum(counts) + SPARE
    S = max(7, sum(counts) // 2)
    row_ids = torch.randint(0, S, (R,), dtype=torch.int32, device="cuda")
    return offsets, row_ids, map_row_tiles(offsets, R), S


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


@dataclass
class Pieces:
    """Rows that arrive in three pieces, of two ranges of source rows each."""

    offsets: Tensor
    row_ids: Tensor
    tiles: Tensor  # of all rows
    ranges: list[list[tuple[int, int]]]

    def arrive(self, rows: Tensor, late: Tensor) -> Iterator[Tensor]:
        """Copy piece after piece of `rows` into `late`; yield its tiles when it is there."""
        late.fill_(float("nan"))
        where = (self.offsets, self.row_ids, torch.tensor(self.ranges).int().cuda())
        used = torch.arange(rows.shape[0], device="cuda") < self.offsets[-1]
        for piece, tiles in zip(self.ranges, map_piece_tiles(*where), strict=True):
            for first, last in piece:
                came = used & (self.row_ids >= first) & (self.row_ids < last)
                late[came] = rows[came]
            yield tiles


def make_pieces(counts: list[int]) -> Pieces:
    offsets, row_ids, tiles, S = make(counts)
    start = 0
    for end in offsets.tolist():
        row_ids[start:end] = row_ids[start:end].sort().values
        start = end
    cuts = sorted(torch.randint(0, S, (3,)).tolist())
    ranges = [
        [(cuts[0], cuts[1]), (0, 0)],
        [(cuts[1], cuts[2]), (0, 0)],
        [(cuts[2], S), (0, cuts[0])],
    ]
    return Pieces(offsets, row_ids, tiles, ranges)
