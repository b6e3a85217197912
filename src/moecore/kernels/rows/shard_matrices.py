"""FP8 of whole matrices, of a weight that several ranks hold parts of, in plain PyTorch.

    amax_of_matrices_   a rank's part -> the largest magnitude of it in each matrix
                        the maximum over ranks
    cast_part_          a rank's part and these -> its E4M3, by one scale per matrix

A weight is one matrix [N, K] or one of every expert, [e, ..., K]. Values and scales are those that
`scaled_matrices` and `cast` make of the whole, bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moecore.kernels.rows.e4m3 import block_scale_ref, magnitude_ref
from moecore.kernels.rows.scaling import quantise_ref


def num_matrices(shape: torch.Size) -> int:
    """Return how many matrices a weight is."""
    return shape[0] if len(shape) > 2 else 1


def _matrices(part: Tensor, first: int, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Return a part as one row per matrix, and the entries of these matrices."""
    rows = part.reshape(num_matrices(part.shape), -1)
    return rows, amax[first : first + rows.shape[0]]


def amax_of_matrices_(part: Tensor, first: int, amax: Tensor) -> None:
    """Write fp32 largest magnitudes, but NaN; 0 where there is no part."""
    amax.zero_()
    if part.numel():
        rows, part_amax = _matrices(part, first, amax)
        part_amax.copy_(magnitude_ref(rows.float()).amax(1))


def cast_part_(
    part: Tensor, first: int, amax: Tensor, scales: Tensor, values: Tensor, *, power_of_two: bool
) -> None:
    """Write a part's FP8 to flat uint8 `values`, and the scales of all matrices."""
    scales.copy_(block_scale_ref(amax, power_of_two)[0])
    if part.numel():
        rows, part_amax = _matrices(part, first, amax)
        part_values, _ = quantise_ref(rows, 1, power_of_two, amax=part_amax[:, None])
        values.copy_(part_values.view(torch.uint8).view(-1))
