"""Quantises a rank's shard of a weight to FP8 or NVFP4, with the bits of the full weight's.

    write_matrix_amax_  a shard -> the largest magnitude in each matrix
    quantise_shard_          a shard, and the maximum of these over ranks -> its E4M3, with one
    scale per matrix

    write_square_amax_  a shard -> the largest magnitude in each 16 x 16 of the full weight
    write_finite_amax_  a shard -> the largest finite magnitude in each matrix
    pack_shard_          a shard, and the maxima of both over ranks -> its E2M1; all E4M3 scales

A weight is one matrix [N, K], or one matrix of every expert, [e, ..., K]. Values and scales equal
the results of `quantise_expert_matrices` and `quantise_matrix` (E4M3), and of
`quantise_microscaled_matrices` (NVFP4). In NVFP4 a value that is not finite makes the scale of its
square NaN, and does not count for the amax of its matrix.

Letters: R rows and C columns of the full weight, all matrices one below the other; r, c rows and
columns of a shard. NVFP4 reads a shard three times and writes half a byte per element.
"""

import torch
from torch import Tensor

from moecore.base.options.precision import Recipe
from moecore.kernels.common import can_use_kernel, cdiv, launch
from moecore.kernels.rows.e4m3 import abs_without_nan_ref, compute_block_scale_ref
from moecore.kernels.rows.microscaled import compute_finite_amax
from moecore.kernels.rows.microscaled_kernel import (
    compute_nvfp4_block_scale,
    compute_nvfp4_tensor_scale,
    encode_e2m1,
    to_e2m1,
)
from moecore.kernels.rows.microscaling import compute_nvfp4_scales, compute_tensor_scales, pack_e2m1
from moecore.kernels.rows.microscaling import to_e2m1 as to_e2m1_ref
from moecore.kernels.rows.scaling import quantise_ref
from moecore.kernels.rows.shard_blocks import MatrixShard, locate_shard_tile
from moecore.kernels.triton_api import tl, triton

SQUARE = 16  # rows and columns of one scale
TILE = {"SIDE": SQUARE, "COLUMNS": 256, "num_warps": 4}  # of one program


def count_matrices(shape: torch.Size) -> int:
    """Return the number of matrices of a weight: shape[0] experts, or 1 for two dims."""
    return shape[0] if len(shape) > 2 else 1


def _view_as_matrices(shard: Tensor, first_matrix: int, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Return a shard as one row per matrix, and the entries of `amax` for these matrices."""
    rows = shard.reshape(count_matrices(shard.shape), -1)
    return rows, amax[first_matrix : first_matrix + rows.shape[0]]


def write_matrix_amax_(shard: Tensor, first_matrix: int, amax: Tensor) -> None:
    """Write the largest magnitude of a shard in each expert's matrix to `amax`, fp32 [matrices].

    `first_matrix`: index of the shard's first matrix. Other ranks' matrices get 0. NaN is ignored.
    """
    amax.zero_()
    if shard.numel():
        rows, part_amax = _view_as_matrices(shard, first_matrix, amax)
        part_amax.copy_(abs_without_nan_ref(rows.float()).amax(1))


def quantise_shard_(
    shard: Tensor, first: int, amax: Tensor, scales: Tensor, values: Tensor, *, power_of_two: bool
) -> None:
    """Quantise a shard to E4M3 with one scale per full matrix, into flat uint8 `values`.

    `first` is the index of the shard's first matrix. `amax` and the output `scales` are fp32, one
    per full matrix. Scales are powers of two if `power_of_two`, otherwise amax / 448.
    """
    scales.copy_(compute_block_scale_ref(amax, power_of_two)[0])
    if shard.numel():
        rows, part_amax = _view_as_matrices(shard, first, amax)
        part_values, _ = quantise_ref(rows, 1, power_of_two, amax=part_amax[:, None])
        values.copy_(part_values.view(torch.uint8).view(-1))


def write_square_amax_ref_(shard: Tensor, position: MatrixShard, amax: Tensor) -> None:
    """Compute `write_square_amax_` in plain PyTorch."""
    amax.zero_()
    if shard.numel():
        row, column = position.compute_indices(shard)
        magnitudes = shard.float().abs().nan_to_num(torch.inf, torch.inf).view(row.numel(), -1)
        rows = amax.new_zeros(amax.shape[0], magnitudes.shape[1])
        rows.scatter_reduce_(0, (row // SQUARE)[:, None].expand_as(magnitudes), magnitudes, "amax")
        amax.scatter_reduce_(1, (column // SQUARE).expand_as(rows), rows, "amax")


def pack_shard_ref_(
    shard: Tensor,
    position: MatrixShard,
    square_amax: Tensor,
    amax: Tensor,
    scales: Tensor,
    codes: Tensor,
    recipe: Recipe,
) -> None:
    """Compute `pack_shard_` in plain PyTorch."""
    rows_per_matrix = square_amax.shape[0] // amax.numel()
    of_rows = compute_tensor_scales(amax, recipe).repeat_interleave(rows_per_matrix)
    scales.copy_(compute_nvfp4_scales(square_amax, of_rows[:, None]))
    if shard.numel():
        row, column = (index // SQUARE for index in position.compute_indices(shard))
        step = (scales.float() * of_rows[:, None])[row[:, None], column]
        codes.copy_(pack_e2m1(to_e2m1_ref(shard.float().view(step.shape), step)).view(-1))


@triton.jit
def square_amax_kernel(shard_ptr, amax_ptr, position, SIDE: tl.constexpr, COLUMNS: tl.constexpr):
    """Write the shard's largest magnitude in each 16 x 16 square of a tile; 0 on other ranks."""
    i, j, at, inside = locate_shard_tile(position, SIDE, COLUMNS)
    size = tl.abs(tl.load(shard_ptr + at, mask=inside, other=0.0).to(tl.float32))
    size = tl.where(size == size, size, float("inf"))
    amax = tl.max(tl.reshape(tl.max(size, 0), (COLUMNS // SIDE, SIDE)), 1)
    square = j * (COLUMNS // SIDE) + tl.arange(0, COLUMNS // SIDE)
    squares = position.columns // SIDE
    tl.store(amax_ptr + i.to(tl.int64) * squares + square, amax, mask=square < squares)


@triton.jit
def pack_squares_kernel(
    shard_ptr,  # [r, c], c even
    square_amax_ptr,  # fp32 [R / SIDE, C / SIDE]
    amax_ptr,  # fp32, of matrices
    scales_ptr,  # uint8 with e4m3 [R / SIDE, C / SIDE], out
    packed_ptr,  # uint8 [r, c / 2], out
    position,  # MatrixShard
    rows_per_matrix,
    POWER_OF_TWO: tl.constexpr,
    SIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the scales of a tile's 16 x 16 squares, and this shard's values there in E2M1."""
    WIDE: tl.constexpr = COLUMNS // SIDE
    i, j, at, inside = locate_shard_tile(position, SIDE, COLUMNS)
    square, squares = j * WIDE + tl.arange(0, WIDE), position.columns // SIDE
    of_squares = i.to(tl.int64) * squares + square
    amax = tl.load(square_amax_ptr + of_squares, mask=square < squares, other=0.0)
    scale = compute_nvfp4_tensor_scale(
        tl.load(amax_ptr + i * SIDE // rows_per_matrix), POWER_OF_TWO
    )
    scale_code, block = compute_nvfp4_block_scale(amax, scale)
    tl.store(scales_ptr + of_squares, scale_code.to(tl.uint8), mask=square < squares)
    x = tl.load(shard_ptr + at, mask=inside, other=0.0).to(tl.float32)
    x = tl.reshape(x, (SIDE, WIDE, SIDE))
    step = tl.broadcast_to((block * scale)[None, :, None], (SIDE, WIDE, SIDE))
    code = tl.reshape(encode_e2m1(*to_e2m1(x, step, None)), (SIDE, COLUMNS // 2, 2))
    low, high = tl.split(code)
    first, _ = tl.split(tl.reshape(at, (SIDE, COLUMNS // 2, 2)))
    store_mask, _ = tl.split(tl.reshape(inside.to(tl.int32), (SIDE, COLUMNS // 2, 2)))
    tl.store(packed_ptr + first // 2, (low | high << 4).to(tl.uint8), mask=store_mask != 0)


def _launch_square_kernel(
    kernel: object, position: MatrixShard, *args: object, **constants: object
) -> None:
    """Launch a kernel on 16 x 16 squares with one program per tile of the full matrix."""
    grid = position.rows // SQUARE * cdiv(position.columns, TILE["COLUMNS"])
    launch(kernel, grid, *args, **constants, **TILE)


def write_square_amax_(shard: Tensor, position: MatrixShard, amax: Tensor) -> None:
    """Write a shard's largest magnitude in each 16 x 16 square of the full weight to fp32 `amax`.

    A NaN or infinity makes its square's entry infinite. Squares of other ranks get 0.
    """
    if not shard.numel() or not can_use_kernel(shard):
        write_square_amax_ref_(shard, position, amax)
    else:
        _launch_square_kernel(square_amax_kernel, position, shard, amax, position)


def write_finite_amax_(shard: Tensor, first_matrix: int, amax: Tensor) -> None:
    """Write the largest finite magnitude of a shard in each expert's matrix to `amax`, fp32.

    `first_matrix`: index of the shard's first matrix. Other ranks' matrices get 0.
    """
    amax.zero_()
    if shard.numel():
        matrices = count_matrices(shard.shape)
        part_amax = compute_finite_amax(shard.view(matrices, -1, shard.shape[-1]))
        amax[first_matrix : first_matrix + matrices].copy_(part_amax)


def pack_shard_(
    shard: Tensor,
    position: MatrixShard,
    square_amax: Tensor,
    amax: Tensor,
    scales: Tensor,
    codes: Tensor,
    recipe: Recipe,
) -> None:
    """Quantise a shard to E2M1 `codes`, and write all scales of blocks. No autograd, no host sync.

    The shard [r, c] of the weight [R, C] is contiguous, maybe empty; c and the shard's first column
    are even. `square_amax` is fp32 [R / 16, C / 16], and `amax`, each matrix's largest finite
    magnitude, fp32. Outputs are `scales`, e4m3 [R / 16, C / 16], and `codes`, uint8 [r * c / 2].
    """
    if not can_use_kernel(scales):
        pack_shard_ref_(shard, position, square_amax, amax, scales, codes, recipe)
        return
    tensors = (shard, square_amax, amax, scales.view(torch.uint8), codes)
    rows_of_matrix = position.rows // amax.numel()
    args = (*tensors, position, rows_of_matrix)
    _launch_square_kernel(pack_squares_kernel, position, *args, POWER_OF_TWO=recipe.power_of_two)
