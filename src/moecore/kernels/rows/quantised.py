"""FP8 operands of grouped products, with a scale per 128 elements of the summed dim.

    gather_row_blocks  1 x 128 of a row, rows in expert order: for the forward and input gradients
    tile_tokens        128 rows of one expert, transposed: for the weight gradients
    quantise_weights   128 x 128 of a matrix, in one layout or both

A value is float8_e4m3fn times the scale of its block. `scaling.py` has the layouts (table
"grouped"). Hopper's FP8 tensor cores need the summed dim of both operands innermost, hence the
transposed copies, and scales of rows are transposed so that the scales of a tile's rows are
adjacent.

Tile j of `tile_tokens` has the 128 rows of row tile j, and 0 past the end of its expert's rows. The
rows of a tile share one scale per 128 columns, the largest of the rows' scales; values of other
rows are multiplied by the ratio of both scales. If scales are powers of two, this loses only values
below 2^-17 of the block's largest value.

Letters: S source rows, R expert rows (length), D K C columns, B = K / 128 blocks, t row tiles of
128 rows of one expert (`rows/row_tiles.py`), e experts, N rows of a matrix.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from moecore.kernels.common import can_use_kernel, cdiv, launch, next_power_of_2
from moecore.kernels.rows.e4m3 import BLOCK, FP8, LEAST_SCALE
from moecore.kernels.rows.move import choose_column_block
from moecore.kernels.rows.quantised_kernel import (
    gather_row_blocks_kernel,
    quantise_rows_kernel,
    quantise_weights_kernel,
    tile_tokens_kernel,
)
from moecore.kernels.rows.record import Rows
from moecore.kernels.rows.row_tiles import MAP_FIELDS, RowTiles
from moecore.kernels.rows.scaling import Blocks, OperandPair, quantise_ref, round_up

SCALE_ROWS = 4  # transposed scales have a multiple of so many columns: 16 bytes, for TMA
ROWS_PROGRAM = {"BLOCKS": 32, "num_warps": 4}  # of one program: 32 elements per thread
TILE_WARPS = 4  # of a 128 x 128 block of weights
TOKEN_WARPS = 4  # of 128 rows and columns: 32 words per thread
SCALE_R, SCALE_B = 128, 16  # expert rows, and scales of each, that a program moves at a time


def split_blocks(x: Tensor) -> Tensor:
    """Return a view [..., blocks, 128] of x, whose last dim is divided into blocks."""
    return x.unflatten(-1, (-1, BLOCK))  # type: ignore[no-any-return]


def quantise_rows_ref(x_SD: Tensor, *, power_of_two: bool) -> Rows:
    """Compute `quantise_rows` in plain PyTorch."""
    values, scales = quantise_ref(split_blocks(x_SD), -1, power_of_two)
    return Rows(values.view(x_SD.shape), scales[..., 0], x_SD.dtype)


def quantise_row_blocks_ref(x_RK: Tensor, power_of_two: bool) -> Blocks:
    """Quantise rows to an FP8 operand with a scale per 1 x 128, in plain PyTorch."""
    rows = quantise_rows_ref(x_RK, power_of_two=power_of_two)
    assert rows.scales is not None
    return Blocks(rows.values, _transpose_scales(rows.scales), "tile")


def _transpose_scales(scales_RB: Tensor) -> Tensor:
    """Return scales [rows, blocks] as contiguous [blocks, rows], rows padded to a multiple of 4."""
    R = scales_RB.shape[0]
    return F.pad(scales_RB.T, (0, round_up(R, SCALE_ROWS) - R)).contiguous()


def gather_row_blocks_ref(rows: Rows, row_ids_R: Tensor | None) -> Blocks:
    """Compute `gather_row_blocks` in plain PyTorch."""
    assert rows.scales is not None
    values, scales = rows.values, rows.scales
    if row_ids_R is not None:
        values = values.view(torch.uint8).index_select(0, row_ids_R).view(FP8)
        scales = scales.index_select(0, row_ids_R)
    return Blocks(values, _transpose_scales(scales), "tile")


def tile_tokens_ref(rows: Rows | Blocks, row_ids_R: Tensor | None, tiles: RowTiles) -> Blocks:
    """Compute `tile_tokens` in plain PyTorch; unused tiles are 0."""
    values_SD, scales_SB = _get_values_and_scales(rows)
    tile = torch.arange(tiles.max_tiles, device=values_SD.device)
    _, first, end, _ = tiles.map[1:].long().unbind(1)
    row = first[:, None] + torch.arange(BLOCK, device=values_SD.device)
    tile_mask = (row < end[:, None]) & (tile < tiles.map[0, 0])[:, None]
    none = values_SD.shape[0]  # a row of zeros
    if row_ids_R is not None and row_ids_R.numel():
        row = row_ids_R.long()[torch.where(tile_mask, row, 0)]
    row = torch.where(tile_mask, row, none)
    values = split_blocks(F.pad(values_SD.half(), (0, 0, 0, 1))[row])  # [t, 128, B, 128]
    scales = F.pad(scales_SB, (0, 0, 0, 1))[row]  # [t, 128, B]
    largest_tB = scales.amax(1).clamp(min=LEAST_SCALE)
    values = (values * (scales / largest_tB[:, None]).half()[..., None]).to(FP8)
    return Blocks(values.flatten(2).transpose(1, 2).contiguous(), largest_tB, "block")


def _get_values_and_scales(rows: Rows | Blocks) -> tuple[Tensor, Tensor]:
    """Return values [S, D] and scales [S, D / 128] of FP8 rows or of an operand of kind "tile"."""
    if isinstance(rows, Blocks):
        return rows.values, rows.scales.T[: rows.values.shape[0]]
    assert rows.scales is not None
    return rows.values, rows.scales


def quantise_weights_ref(
    w_eNK: Tensor, *, power_of_two: bool, rowwise: bool = True, columnwise: bool = True
) -> OperandPair:
    """Compute `quantise_weights` in plain PyTorch."""
    e, N, K = w_eNK.shape
    blocks = w_eNK.view(e, N // BLOCK, BLOCK, K // BLOCK, BLOCK)
    values, scales = quantise_ref(blocks, (2, 4), power_of_two)
    values_eNK = values.view(e, N, K)
    transposed_eKN = values_eNK.transpose(1, 2).contiguous() if columnwise else None
    return _make_pair(values_eNK if rowwise else None, scales[:, :, 0, :, 0], transposed_eKN)


def _make_pair(
    values_eNK: Tensor | None, scales_eNK: Tensor, values_eKN: Tensor | None
) -> OperandPair:
    """Return the operands for a matrix and its transpose, which share scales; None = not made."""
    return OperandPair(
        None if values_eNK is None else Blocks(values_eNK, scales_eNK, "block"),
        None if values_eKN is None else Blocks(values_eKN, scales_eNK.transpose(1, 2), "block"),
    )


def check_multiple_of_128(dim_name: str, size: int) -> None:
    """Raise a ValueError, which names `dim_name`, unless `size` is a multiple of 128."""
    if size % BLOCK:
        raise ValueError(
            f"{dim_name} ({size}) must be a multiple of {BLOCK}: other columns have no whole blocks"
        )


def make_empty_row_blocks(like: Tensor, num_rows: int, num_columns: int) -> Blocks:
    """Return an uninitialised FP8 operand, a scale per 1 x 128 elements, on like's device."""
    values = like.new_empty(num_rows, num_columns, dtype=FP8)
    scales_shape = (num_columns // BLOCK, round_up(num_rows, SCALE_ROWS))
    return Blocks(values, like.new_empty(scales_shape, dtype=torch.float32), "tile")


def make_empty_rows(like_SD: Tensor) -> Rows:
    """Return uninitialised FP8 rows, a scale per 128 columns, with like_SD's shape and dtype."""
    S, D = like_SD.shape
    scales_SB = like_SD.new_empty(S, D // BLOCK, dtype=torch.float32)
    return Rows(torch.empty_like(like_SD, dtype=FP8), scales_SB, like_SD.dtype)


def quantise_rows(x_SD: Tensor, *, power_of_two: bool, num_rows: Tensor | None = None) -> Rows:
    """Return rows in FP8 with one scale per 128 columns. No autograd, no host sync.

    Rows are bf16, fp16 or fp32, contiguous; D is a multiple of 128. An infinity makes its 128
    columns NaN; a NaN stays a NaN. Rows from num_rows (0-dim int32 on the device; None = S) on are
    not read, and are uninitialised in the result.
    """
    S, D = x_SD.shape
    check_multiple_of_128("D", D)
    if not can_use_kernel(x_SD):
        return quantise_rows_ref(x_SD, power_of_two=power_of_two)
    out, num_blocks = make_empty_rows(x_SD), S * D // BLOCK
    args = (x_SD, num_rows, out.values.view(torch.uint8), out.scales, num_blocks)
    constants = dict(ROW_BLOCKS=D // BLOCK, POWER_OF_TWO=power_of_two, **ROWS_PROGRAM)
    launch(quantise_rows_kernel, cdiv(num_blocks, ROWS_PROGRAM["BLOCKS"]), *args, **constants)
    return out


def gather_row_blocks(
    rows: Rows, row_ids_R: Tensor | None, slots_SK: Tensor | None, num_rows: Tensor | None
) -> Blocks:
    """Gather FP8 rows in expert order to an operand with a scale per 1 x 128. No autograd.

    `rows` are token rows with scales, maybe strided; D is a multiple of 128. Other arguments are as
    in `gather_rows`. If row_ids_R or slots_SK is None, `rows` are in expert order, and the result
    shares their values. Rows from num_rows on, and values of padding rows, are
    uninitialised. No host sync.
    """
    assert rows.scales is not None
    S, D = rows.values.shape
    check_multiple_of_128("D", D)
    if not can_use_kernel(rows.values):
        return gather_row_blocks_ref(rows, row_ids_R)
    moves = row_ids_R is not None and slots_SK is not None
    R = row_ids_R.shape[0] if row_ids_R is not None else S
    out = make_empty_row_blocks(rows.values, R if moves else 0, D)
    if not moves:
        scales_BR = rows.scales.new_empty(D // BLOCK, round_up(R, SCALE_ROWS))
        out = Blocks(rows.values, scales_BR, "tile")
    if R and S:
        K = slots_SK.shape[1] if slots_SK is not None else 1
        num_scale, block = cdiv(R, SCALE_R), choose_column_block(D, 1)
        num_copy = S * cdiv(D, block["BLOCK_D"]) if moves else 0
        slots_SK = None if slots_SK is None else slots_SK.contiguous()
        sources = (rows.values.view(torch.uint8), rows.scales, row_ids_R, slots_SK, num_rows)
        targets = (out.values.view(torch.uint8), out.scales)
        launch(
            gather_row_blocks_kernel,
            num_scale + num_copy,
            *(*sources, *targets, R, num_scale, out.scales.shape[1]),
            D=D,
            W=rows.values.stride(0),
            SCALES_W=rows.scales.stride(0),
            K=K,
            BLOCK_K=next_power_of_2(K),
            SCALE_R=SCALE_R,
            SCALE_B=SCALE_B,
            **block,
        )
    return out


def tile_tokens(rows: Rows | Blocks, row_ids_R: Tensor | None, tiles: RowTiles) -> Blocks:
    """Transpose FP8 rows per tile of 128 expert rows, for weight gradients, which sum over rows.

    A NaN stays NaN. An infinity makes its block's scale infinite. No autograd, no host sync.

    Args:
        rows: FP8 rows with scales, maybe strided; D is a multiple of 128.
        row_ids_R: int32, source row of each expert row; None = rows are in expert order.
        tiles: from `map_row_tiles` of the R expert rows.

    Returns:
        FP8 [tiles, D, 128] with one scale per 128 rows and 128 columns, [tiles, D / 128]. Unused
        tiles of the map are uninitialised.
    """
    values_SD, scales_SB = _get_values_and_scales(rows)
    S, D = values_SD.shape
    check_multiple_of_128("D", D)
    if not can_use_kernel(values_SD):
        return tile_tokens_ref(rows, row_ids_R, tiles)
    scales = scales_SB.new_empty(tiles.max_tiles, D // BLOCK)
    out = Blocks(values_SD.new_empty(tiles.max_tiles, D, BLOCK), scales, "block")
    if S:
        sources = (values_SD.view(torch.int32), scales_SB, row_ids_R, tiles.map)
        args = (*sources, out.values.view(torch.int32), out.scales, scales_SB.stride(1))
        strides = dict(W=values_SD.stride(0) // 4, SCALES_W=scales_SB.stride(0))
        constants = dict(D=D, **strides, FIELDS=MAP_FIELDS, num_warps=TOKEN_WARPS)
        launch(tile_tokens_kernel, tiles.max_tiles * (D // BLOCK), *args, **constants)
    return out


def quantise_weights(
    w_eNK: Tensor, *, power_of_two: bool, rowwise: bool = True, columnwise: bool = True
) -> OperandPair:
    """Quantise matrices to FP8, one scale per 128 x 128 block, for both operands of matmuls.

    w_eNK is bf16, fp16 or fp32, contiguous; N and K are multiples of 128. One pass writes both
    operands, [e, N, K] (`rowwise`) and [e, K, N] (`columnwise`). No autograd, no host sync.
    """
    e, N, K = w_eNK.shape
    check_multiple_of_128("N", N)
    check_multiple_of_128("K", K)
    if not can_use_kernel(w_eNK):
        return quantise_weights_ref(
            w_eNK, power_of_two=power_of_two, rowwise=rowwise, columnwise=columnwise
        )
    values_eNK = w_eNK.new_empty(e, N, K, dtype=FP8) if rowwise else None
    scales_eNK = w_eNK.new_empty(e, N // BLOCK, K // BLOCK, dtype=torch.float32)
    transposed_eKN = w_eNK.new_empty(e, K, N, dtype=FP8) if columnwise else None
    codes = None if values_eNK is None else values_eNK.view(torch.uint8)
    words = None if transposed_eKN is None else transposed_eKN.view(torch.int32)
    flags = dict(N=N, K=K, POWER_OF_TWO=power_of_two, num_warps=TILE_WARPS)
    launch(quantise_weights_kernel, scales_eNK.numel(), w_eNK, codes, words, scales_eNK, **flags)
    return _make_pair(values_eNK, scales_eNK, transposed_eKN)
