"""FP8 of whole matrices and NVFP4, of a weight that several ranks hold parts of, in plain PyTorch.

    amax_of_matrices_   a rank's part -> the largest magnitude of it in each matrix
    amax_of_squares_    a rank's part -> the same in each 16 x 16 of the whole
                        the maximum over ranks
    cast_part_          a rank's part and these -> its E4M3, by one scale per matrix
    pack_part_          a rank's part and these -> its E2M1, two values in a byte; every rank makes
                        all E4M3 scales

A weight is one matrix [N, K] or one of every expert, [e, ..., K]. Values and scales are those that
`scaled_weights`, `cast` and `emulated_matrices` make of the whole, bit for bit. A value that is not
finite makes its square NaN, and is no amax of its matrix in NVFP4.

Letters: R rows and C columns of the whole, all matrices one below the other; r, c those of a part.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moecore.base.options.precision import Recipe
from moecore.kernels.rows.e4m3 import block_scale_ref, magnitude_ref
from moecore.kernels.rows.microscaling import (
    finite_magnitude,
    nvfp4_scales,
    packed_e2m1,
    tensor_scales,
    to_e2m1,
)
from moecore.kernels.rows.scaling import quantise_ref
from moecore.kernels.rows.shard_blocks import PartOfMatrix

SQUARE = 16  # rows and columns of one scale


def num_matrices(shape: torch.Size) -> int:
    """Return how many matrices a weight is."""
    return shape[0] if len(shape) > 2 else 1


def _matrices(part: Tensor, first: int, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Return a part as one row per matrix, and the entries of these matrices."""
    rows = part.reshape(num_matrices(part.shape), -1)
    return rows, amax[first : first + rows.shape[0]]


def amax_of_matrices_(part: Tensor, first: int, amax: Tensor, *, finite: bool = False) -> None:
    """Write fp32 largest magnitudes, but NaN and if `finite` infinity; 0 where there is no part."""
    amax.zero_()
    if part.numel():
        rows, own = _matrices(part, first, amax)
        own.copy_((finite_magnitude if finite else magnitude_ref)(rows.float()).amax(1))


def amax_of_squares_(part: Tensor, place: PartOfMatrix, amax: Tensor) -> None:
    """Write fp32 largest magnitudes [R / 16, C / 16]; infinity for what is not finite."""
    amax.zero_()
    if part.numel():
        row, column = place.indices(part)
        found = part.float().abs().nan_to_num(torch.inf, torch.inf).view(row.numel(), -1)
        of_rows = amax.new_zeros(amax.shape[0], found.shape[1])
        of_rows.scatter_reduce_(0, (row // SQUARE)[:, None].expand_as(found), found, "amax")
        amax.scatter_reduce_(1, (column // SQUARE).expand_as(of_rows), of_rows, "amax")


def cast_part_(
    part: Tensor, first: int, amax: Tensor, scales: Tensor, values: Tensor, *, power_of_two: bool
) -> None:
    """Write a part's FP8 to flat uint8 `values`, and the scales of all matrices."""
    scales.copy_(block_scale_ref(amax, power_of_two)[0])
    if part.numel():
        rows, own = _matrices(part, first, amax)
        found, _ = quantise_ref(rows, 1, power_of_two, amax=own[:, None])
        values.copy_(found.view(torch.uint8).view(-1))


def pack_part_(
    part: Tensor,
    place: PartOfMatrix,
    squares: Tensor,
    amax: Tensor,
    scales: Tensor,
    packed: Tensor,
    recipe: Recipe,
) -> None:
    """Write a part's E2M1 to flat uint8 `packed`, and all scales [R / 16, C / 16]."""
    of_rows = tensor_scales(amax, recipe).repeat_interleave(squares.shape[0] // amax.numel())
    scales.copy_(nvfp4_scales(squares, of_rows[:, None]))
    if part.numel():
        row, column = (index // SQUARE for index in place.indices(part))
        step = (scales.float() * of_rows[:, None])[row[:, None], column]
        packed.copy_(packed_e2m1(to_e2m1(part.float().view(step.shape), step)).view(-1))
