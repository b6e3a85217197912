"""FP8 in blocks of 128 x 128 of a weight of which each rank has a shard.

    write_block_amax_   a shard -> its largest magnitude in each block of the full matrix
    quantise_blocks_    a shard, and the maximum of these over ranks -> its FP8 values; all scales

    view_as_matrices    an all-gathered weight of experts as an operand [e, N, K]
    make_dense_operand  an all-gathered weight of a dense linear as an operand [N, K]

Scales and values equal those of `quantise_weights` of the full matrix, bit for bit. A shard is read
twice and its values are written once, 9 bytes per element of fp32.

Letters: R rows and C columns of the full matrix; r, c of a shard; e, N, K as in `quantised.py`.
Example, a weight [2, 128, 256] of two experts, sharded over four ranks along its last dim: R = 256,
C = 256, and rank 1 has columns 64 to 127 of all rows, half of the first block of columns.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from moecore.kernels.common import can_use_kernel, cdiv, launch
from moecore.kernels.rows.e4m3 import (
    BLOCK,
    FP8,
    abs_without_nan,
    abs_without_nan_ref,
    compute_block_scale,
    compute_block_scale_ref,
    to_e4m3,
)
from moecore.kernels.rows.scaling import SCALE_COLUMNS, Blocks, OperandPair, round_up
from moecore.kernels.triton_api import tl, triton

NUM_WARPS = 8  # 64 elements of fp32 per thread
TRANSPOSE_WARPS = 4


class MatrixShard(NamedTuple):
    """Position of a rank's shard in the full matrix [rows, last dim] of a parameter.

    Row i of the shard is row (i // run) * period + first_row + i % run of the matrix.
    """

    # R and C
    rows: int
    columns: int
    run: int  # rows of the part that are neighbours in the matrix
    period: int  # rows of the matrix from one run to the next
    first_row: int  # row of the matrix where the first run begins
    first_column: int  # column of the matrix where the part begins
    part_columns: int  # c

    @classmethod
    def from_slice(cls, shape: torch.Size, dim: int, start: int, size: int) -> Self:
        """Return the position of slice [start, start + size) of `dim` of a parameter of `shape`."""
        rows, columns = shape[:-1].numel(), shape[-1]
        if dim == len(shape) - 1:
            return cls(rows, columns, rows, rows, 0, first_column=start, part_columns=size)
        inner = shape[dim + 1 : -1].numel()
        runs = (size * inner, shape[dim] * inner, start * inner)
        return cls(rows, columns, *runs, first_column=0, part_columns=columns)

    @property
    def scales_shape(self) -> tuple[int, int]:
        """Shape of the full matrix's scales, per 128 x 128; columns padded to a multiple of 4."""
        return cdiv(self.rows, BLOCK), round_up(cdiv(self.columns, BLOCK), SCALE_COLUMNS)

    @property
    def num_blocks(self) -> int:
        """Number of 128 x 128 blocks of the full matrix."""
        return cdiv(self.rows, BLOCK) * cdiv(self.columns, BLOCK)

    def compute_indices(self, shard: Tensor) -> tuple[Tensor, Tensor]:
        """Return the shard's row indices and column indices in the full matrix."""
        row = torch.arange(shard.numel() // max(self.part_columns, 1), device=shard.device)
        if self.run:
            row = row // self.run * self.period + self.first_row + row % self.run
        return row, torch.arange(self.part_columns, device=shard.device) + self.first_column


def view_as_matrices(weight: Blocks, shape: torch.Size) -> OperandPair:
    """View an all-gathered FP8 weight of experts as the operand [experts, N, K] summed over K.

    `shape` is the shape of the parameter, with columns last.
    """
    scales, values_eNK = weight.scales, weight.values.view(*shape[:2], -1)
    if weight.kind == "block":
        scales = scales[:, : shape[2] // BLOCK]
    if weight.kind != "tensor":
        scales = scales.unflatten(0, (shape[0], -1))
    return OperandPair(Blocks(values_eNK, scales, weight.kind, weight.amax), None)


def make_dense_operand(weight: Blocks) -> Blocks:
    """Return an all-gathered FP8 linear weight as operand: a copy if K must be padded to 128."""
    if weight.kind == "tensor":
        return Blocks(weight.values, weight.scales.view(1, 1), "tensor")
    bytes_NK, missing = weight.values.view(torch.uint8), -weight.values.shape[1] % BLOCK
    operand_NK = pad(bytes_NK, (0, missing)) if missing else bytes_NK
    return Blocks(operand_NK.view(weight.values.dtype), weight.scales, "block")


def write_block_amax_ref_(shard: Tensor, position: MatrixShard, amax: Tensor) -> None:
    """Compute `write_block_amax_` in plain PyTorch."""
    row, column = position.compute_indices(shard)
    sizes = (position.rows, position.columns)
    magnitudes = torch.zeros(*sizes, device=shard.device, dtype=torch.float32)
    local = abs_without_nan_ref(shard.float())
    magnitudes[row[:, None], column] = local.view(-1, position.part_columns)
    magnitudes = pad(magnitudes, (0, -position.columns % BLOCK, 0, -position.rows % BLOCK))
    blocks = magnitudes.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    amax[:, : blocks.shape[2]].copy_(blocks.amax((1, 3)))


def quantise_blocks_ref_(
    shard: Tensor,
    position: MatrixShard,
    amax: Tensor,
    scales: Tensor,
    values: Tensor,
    *,
    power_of_two: bool,
) -> None:
    """Compute `quantise_blocks_` in plain PyTorch."""
    block_scales, inverse = compute_block_scale_ref(amax, power_of_two)
    columns = cdiv(position.columns, BLOCK)
    scales[:, :columns].copy_(block_scales[:, :columns])
    row, column = (index // BLOCK for index in position.compute_indices(shard))
    factors = inverse[row[:, None], column].view(shard.shape)
    values.view(FP8).copy_((shard.float() * factors).to(FP8).view(values.shape))


@triton.jit
def locate_shard_tile(position, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return tile row, tile column, offsets in the shard, and a mask of this rank's elements."""
    tiles = tl.cdiv(position.columns, COLUMNS)
    i, j = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    row = i.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_in_run = row % position.period - position.first_row
    column = j * COLUMNS + tl.arange(0, COLUMNS) - position.first_column
    row_inside = (row < position.rows) & (row_in_run >= 0) & (row_in_run < position.run)
    column_inside = (column >= 0) & (column < position.part_columns)
    at = (row // position.period * position.run + row_in_run)[
        :, None
    ] * position.part_columns + column[None, :]
    return i, j, at, row_inside[:, None] & column_inside[None, :]


@triton.jit
def block_amax_kernel(shard_ptr, amax_ptr, position, amax_stride, BLOCK: tl.constexpr):
    """Write a shard's largest magnitude in a 128 x 128 block, 0 if none, to [R / 128, stride]."""
    i, j, at, inside = locate_shard_tile(position, BLOCK, BLOCK)
    x = tl.load(shard_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(amax_ptr + i * amax_stride + j, tl.max(tl.max(abs_without_nan(x), 1), 0))


@triton.jit
def quantise_blocks_kernel(
    shard_ptr,  # [r, c]
    amax_ptr,  # fp32 [R / 128, stride]
    scales_ptr,  # likewise, out
    values_ptr,  # uint8 [r, c], out
    position,  # MatrixShard
    scales_stride,
    POWER_OF_TWO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Quantise the shard's elements in one 128 x 128 block to E4M3; write the block's scale."""
    i, j, at, inside = locate_shard_tile(position, BLOCK, BLOCK)
    scale, inverse = compute_block_scale(tl.load(amax_ptr + i * scales_stride + j), POWER_OF_TWO)
    x = tl.load(shard_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(values_ptr + at, to_e4m3(x * inverse), mask=inside)
    tl.store(scales_ptr + i * scales_stride + j, scale)


@triton.jit
def transpose_values_kernel(words_ptr, out_ptr, N: tl.constexpr, K: tl.constexpr, M: tl.constexpr):
    """Copy 128 x 128 FP8 bytes of words [e, N, K / 4], transposed, to [e, K, M / 4]; 0 past N."""
    row_blocks, column_blocks = tl.cdiv(M, 128), tl.cdiv(K, 128)
    pid = tl.program_id(0)
    j, pid = pid % column_blocks, pid // column_blocks
    i, expert = pid % row_blocks, (pid // row_blocks).to(tl.int64)
    row = i * 128 + 4 * tl.arange(0, 32)
    word = j * 32 + tl.arange(0, 32)
    at = words_ptr + (expert * N + row)[:, None] * (K // 4) + word[None, :]
    inside = (row < N)[:, None] & (4 * word < K)[None, :]  # N and K are multiples of 4
    w0 = tl.load(at, mask=inside, other=0)
    w1 = tl.load(at + K // 4, mask=inside, other=0)
    w2 = tl.load(at + 2 * (K // 4), mask=inside, other=0)
    w3 = tl.load(at + 3 * (K // 4), mask=inside, other=0)
    to_word = i * 32 + tl.arange(0, 32)
    for byte in tl.static_range(4):
        low = ((w0 >> (8 * byte)) & 0xFF) | (((w1 >> (8 * byte)) & 0xFF) << 8)
        high = ((w2 >> (8 * byte)) & 0xFF) | (((w3 >> (8 * byte)) & 0xFF) << 8)
        column = 4 * word + byte
        to = out_ptr + (expert * K + column)[:, None] * (M // 4) + to_word[None, :]
        mask = (column < K)[:, None] & (4 * to_word < M)[None, :]
        tl.store(to, tl.trans(low | (high << 16)), mask=mask)


def write_block_amax_(shard: Tensor, position: MatrixShard, amax: Tensor) -> None:
    """Write to `amax` a shard's largest magnitude in each 128 x 128 block of the full matrix.

    The shard is bf16 or fp32, contiguous, maybe empty; NaN is ignored. `amax` is fp32 of
    `position.scales_shape`: 0 in blocks without elements of the shard, not written in the padding.
    """
    if not shard.numel():
        amax[:, : cdiv(position.columns, BLOCK)].zero_()
    elif not can_use_kernel(shard):
        write_block_amax_ref_(shard, position, amax)
    else:
        args = (shard, amax, position, position.scales_shape[1])
        launch(block_amax_kernel, position.num_blocks, *args, BLOCK=BLOCK, num_warps=NUM_WARPS)


def quantise_blocks_(
    shard: Tensor,
    position: MatrixShard,
    amax: Tensor,
    scales: Tensor,
    values: Tensor,
    *,
    power_of_two: bool,
) -> None:
    """Write the FP8 values of a shard, and the scales of all blocks. No autograd, no host sync.

    `amax`, the largest magnitudes of the full matrix's blocks, and `scales` are fp32 of
    `position.scales_shape`; the padding of the last dim of `scales` is not written. `values` is
    uint8, contiguous. Scales are powers of two if `power_of_two`, otherwise amax / 448.
    """
    if not can_use_kernel(scales):
        quantise_blocks_ref_(shard, position, amax, scales, values, power_of_two=power_of_two)
        return
    args = (shard, amax, scales, values, position, position.scales_shape[1])
    constants = dict(POWER_OF_TWO=power_of_two, BLOCK=BLOCK, num_warps=NUM_WARPS)
    launch(quantise_blocks_kernel, position.num_blocks, *args, **constants)


def transpose_values(values_eNK: Tensor, row_multiple: int = 1) -> Tensor:
    """Return FP8 [e, N, K] as contiguous [e, K, M], where M is N rounded up to `row_multiple`.

    N and K are multiples of 16. Columns past N are 0. No autograd, no host sync.
    """
    e, N, K = values_eNK.shape
    M = round_up(N, row_multiple)
    bytes_eNK = values_eNK.view(torch.uint8)
    if not can_use_kernel(values_eNK):
        return pad(bytes_eNK.transpose(1, 2), (0, M - N)).contiguous().view(values_eNK.dtype)
    out_eKM = values_eNK.new_empty(e, K, M)
    words = (bytes_eNK.view(torch.int32), out_eKM.view(torch.int32))
    grid = e * cdiv(M, BLOCK) * cdiv(K, BLOCK)
    launch(transpose_values_kernel, grid, *words, N=N, K=K, M=M, num_warps=TRANSPOSE_WARPS)
    return out_eKM


def transpose_operand(weight: Blocks, num_columns: int) -> Blocks:
    """Transpose the FP8 operand [N, K] of a dense linear: return [K, N], to be summed over N.

    If scales are per 128 x 128, the input's K is padded to a multiple of 128. `num_columns` is K
    without padding; N and `num_columns` are multiples of 16. No autograd.
    """
    if weight.kind == "tensor":
        return Blocks(transpose_values(weight.values[None])[0], weight.scales, "tensor")
    values_KN = transpose_values(weight.values[None], BLOCK)[0, :num_columns]
    blocks = cdiv(num_columns, BLOCK), weight.scales.shape[0]
    scales = weight.scales.new_zeros(blocks[0], round_up(blocks[1], SCALE_COLUMNS))
    scales[:, : blocks[1]] = weight.scales[:, : blocks[0]].T
    return Blocks(values_KN, scales, weight.kind)
