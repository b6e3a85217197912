"""NVFP4 of a weight that several ranks hold parts of, as one rank would quantise the whole.

    amax_of_squares_    a rank's part -> the largest magnitude of it in each 16 x 16 of the whole
    finite_amax_        a rank's part -> the same in each matrix, of finite values
                        the maximum over ranks
    pack_part_          a rank's part and these -> its E2M1, two values in a byte; every rank makes
                        all E4M3 scales

A weight is one matrix [N, K] or one of every expert, [e, ..., K]. Values and scales are those that
`quantise_microscaled_matrices` makes of the whole, bit for bit. A value that is not finite makes
its square NaN, and is no amax of its matrix.

Letters: R rows and C columns of the whole, all matrices one below the other; r, c those of a part.
Budget: a part is read three times, half a byte per element is written. One program takes squares
side by side: what of them lies on another rank is masked, as in `shard_blocks.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moecore.base.options.precision import Recipe
from moecore.kernels.common import cdiv, launch, tl, triton, use_kernel
from moecore.kernels.rows.microscaled import finite_amax
from moecore.kernels.rows.microscaled_kernel import (
    e2m1_code,
    nvfp4_block_scale,
    nvfp4_tensor_scale,
    to_e2m1,
)
from moecore.kernels.rows.microscaling import nvfp4_scales, pack_e2m1, tensor_scales
from moecore.kernels.rows.microscaling import to_e2m1 as to_e2m1_ref
from moecore.kernels.rows.shard_blocks import PartOfMatrix, tile_of_part
from moecore.kernels.rows.shard_matrices import num_matrices

SQUARE = 16  # rows and columns of one scale
TILE = {"SIDE": SQUARE, "COLUMNS": 256, "num_warps": 4}  # of one program


def amax_of_squares_ref_(part: Tensor, place: PartOfMatrix, amax: Tensor) -> None:
    """Do what `amax_of_squares_` does, in plain PyTorch."""
    amax.zero_()
    if part.numel():
        row, column = place.indices(part)
        magnitudes = part.float().abs().nan_to_num(torch.inf, torch.inf).view(row.numel(), -1)
        of_rows = amax.new_zeros(amax.shape[0], magnitudes.shape[1])
        of_rows.scatter_reduce_(
            0, (row // SQUARE)[:, None].expand_as(magnitudes), magnitudes, "amax"
        )
        amax.scatter_reduce_(1, (column // SQUARE).expand_as(of_rows), of_rows, "amax")


def pack_part_ref_(
    part: Tensor,
    place: PartOfMatrix,
    squares: Tensor,
    amax: Tensor,
    scales: Tensor,
    codes: Tensor,
    recipe: Recipe,
) -> None:
    """Do what `pack_part_` does, in plain PyTorch."""
    of_rows = tensor_scales(amax, recipe).repeat_interleave(squares.shape[0] // amax.numel())
    scales.copy_(nvfp4_scales(squares, of_rows[:, None]))
    if part.numel():
        row, column = (index // SQUARE for index in place.indices(part))
        step = (scales.float() * of_rows[:, None])[row[:, None], column]
        codes.copy_(pack_e2m1(to_e2m1_ref(part.float().view(step.shape), step)).view(-1))


@triton.jit
def square_amax_kernel(
    part_ptr,  # [r, c]
    amax_ptr,  # fp32 [R / SIDE, C / SIDE], out
    part,  # PartOfMatrix
    SIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the largest magnitude of the part in squares side by side; 0 where there is none."""
    i, j, at, inside = tile_of_part(part, SIDE, COLUMNS)
    size = tl.abs(tl.load(part_ptr + at, mask=inside, other=0.0).to(tl.float32))
    size = tl.where(size == size, size, float("inf"))
    amax = tl.max(tl.reshape(tl.max(size, 0), (COLUMNS // SIDE, SIDE)), 1)
    square = j * (COLUMNS // SIDE) + tl.arange(0, COLUMNS // SIDE)
    squares = part.columns // SIDE
    tl.store(amax_ptr + i.to(tl.int64) * squares + square, amax, mask=square < squares)


@triton.jit
def pack_squares_kernel(
    part_ptr,  # [r, c], c even
    squares_ptr,  # fp32 [R / SIDE, C / SIDE]
    amax_ptr,  # fp32, of matrices
    scales_ptr,  # uint8 with e4m3 [R / SIDE, C / SIDE], out
    packed_ptr,  # uint8 [r, c / 2], out
    part,  # PartOfMatrix
    rows_of_matrix,
    POWER_OF_TWO: tl.constexpr,
    SIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the scales of squares side by side, and the values of the part in them."""
    WIDE: tl.constexpr = COLUMNS // SIDE
    i, j, at, inside = tile_of_part(part, SIDE, COLUMNS)
    square, squares = j * WIDE + tl.arange(0, WIDE), part.columns // SIDE
    of_squares = i.to(tl.int64) * squares + square
    amax = tl.load(squares_ptr + of_squares, mask=square < squares, other=0.0)
    scale = nvfp4_tensor_scale(tl.load(amax_ptr + i * SIDE // rows_of_matrix), POWER_OF_TWO)
    scale_code, block = nvfp4_block_scale(amax, scale)
    tl.store(scales_ptr + of_squares, scale_code.to(tl.uint8), mask=square < squares)
    x = tl.load(part_ptr + at, mask=inside, other=0.0).to(tl.float32)
    x = tl.reshape(x, (SIDE, WIDE, SIDE))
    step = tl.broadcast_to((block * scale)[None, :, None], (SIDE, WIDE, SIDE))
    code = tl.reshape(e2m1_code(*to_e2m1(x, step, None)), (SIDE, COLUMNS // 2, 2))
    low, high = tl.split(code)
    first, _ = tl.split(tl.reshape(at, (SIDE, COLUMNS // 2, 2)))
    store_mask, _ = tl.split(tl.reshape(inside.to(tl.int32), (SIDE, COLUMNS // 2, 2)))
    tl.store(packed_ptr + first // 2, (low | high << 4).to(tl.uint8), mask=store_mask != 0)


def _launch(kernel: object, place: PartOfMatrix, *args: object, **constants: object) -> None:
    grid = place.rows // SQUARE * cdiv(place.columns, TILE["COLUMNS"])
    launch(kernel, grid, *args, **constants, **TILE)


def amax_of_squares_(part: Tensor, place: PartOfMatrix, amax: Tensor) -> None:
    """Write fp32 largest magnitudes [R / 16, C / 16]; infinity for what is not finite."""
    if not part.numel() or not use_kernel(part):
        amax_of_squares_ref_(part, place, amax)
    else:
        _launch(square_amax_kernel, place, part, amax, place)


def finite_amax_(part: Tensor, first: int, amax: Tensor) -> None:
    """Write fp32 largest finite magnitudes of matrices, from `first` on; 0 where there is none."""
    amax.zero_()
    if part.numel():
        matrices = num_matrices(part.shape)
        part_amax = finite_amax(part.view(matrices, -1, part.shape[-1]))
        amax[first : first + matrices].copy_(part_amax)


def pack_part_(
    part: Tensor,
    place: PartOfMatrix,
    squares: Tensor,
    amax: Tensor,
    scales: Tensor,
    codes: Tensor,
    recipe: Recipe,
) -> None:
    """Write a part's E2M1 to flat uint8 `codes`, and all scales. No autograd, no host sync.

    Args:
        part: [r, c], contiguous, maybe without elements; c and its first column are even.
        place: place of the part.
        squares: fp32 [R / 16, C / 16], largest magnitudes of the whole.
        amax: fp32, largest finite magnitudes of matrices.
        scales: e4m3 [R / 16, C / 16], out.
        codes: uint8, r * c / 2, out.
        recipe: an "nvfp4".
    """
    if not use_kernel(scales):
        pack_part_ref_(part, place, squares, amax, scales, codes, recipe)
        return
    tensors = (part, squares, amax, scales.view(torch.uint8), codes)
    rows_of_matrix = place.rows // amax.numel()
    _launch(
        pack_squares_kernel,
        place,
        *(*tensors, place, rows_of_matrix),
        POWER_OF_TWO=recipe.power_of_two,
    )
