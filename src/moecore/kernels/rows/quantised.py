"""FP8 operands of grouped products, quantised in blocks of 128 along the dim that is summed.

    RowBlocks     1 x 128 along a row: what the forward and the input gradients multiply
    TokenTiles    128 x 1 along the rows of one expert, transposed: what weight gradients multiply
    WeightBlocks  128 x 128, in both layouts

Hopper's FP8 tensor cores take both operands with the summed dim innermost, hence the transposed
copies. A value is float8_e4m3fn times its block's scale.

Letters: R expert rows (length), K columns, C columns, B = K / 128 blocks, t row tiles of 128 rows
of one expert (`grouped/row_tiles.py`), e experts, N rows of a matrix.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 128  # elements of one scale along the summed dim
FP8 = torch.float8_e4m3fn
MAX = 448.0  # largest value of e4m3
SCALE_ROWS = 4  # of which the row length of `RowBlocks.scales_BR` is a multiple: 16 bytes, for TMA


class RowBlocks(NamedTuple):
    """Rows in expert order.

    Attributes:
        values_RK: float8_e4m3fn, contiguous.
        scales_BR: fp32 [K / 128, R rounded up to 4]: the scales of a tile's rows are neighbours.
    """

    values_RK: Tensor
    scales_BR: Tensor


class TokenTiles(NamedTuple):
    """The columns of rows in expert order, tile by tile.

    Attributes:
        values_tC: float8_e4m3fn [tiles, C, 128], contiguous: tile j holds the 128 rows of row tile
            j, transposed, and 0 past the end of its expert's rows. Tiles past the last one in use
            are uninitialised.
        scales_tC: fp32 [tiles, C]: of each column's 128 rows.
    """

    values_tC: Tensor
    scales_tC: Tensor


class WeightBlocks(NamedTuple):
    """One matrix of every expert.

    Attributes:
        values_eNK: float8_e4m3fn [e, N, K], contiguous.
        transposed_eKN: the same values as [e, K, N], contiguous.
        scales_eNK: fp32 [e, N / 128, K / 128].
    """

    values_eNK: Tensor
    transposed_eKN: Tensor
    scales_eNK: Tensor
