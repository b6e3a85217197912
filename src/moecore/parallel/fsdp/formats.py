"""The formats in which a unit all-gathers its shards: a cast dtype, or the FP8 format of a recipe.

    CastFormat      shard -> compute dtype                                  -> all-gather
    other formats   shard -> amax of its part of each block -> MAX all-reduce -> scales
                    shard and scales -> values                              -> all-gather

    BlockFormat     "blockwise"   FP8, a scale per 128 x 128              1 byte per value
    MatrixFormat    "tensorwise"  FP8, a scale per matrix                 1 byte per value
    PackedFormat    "nvfp4"       E2M1, a scale per 16 x 16 and matrix    0.5 bytes per value

Blocks are blocks of the unsharded matrix, at any shard boundary, and values are cast from the
trained shards. The all-gathered bytes are therefore equal to a quantisation of the unsharded matrix
on one rank. Scales are not all-gathered, because every rank computes all of them. Other recipes
quantise a weight twice, which needs as many bytes as bf16.

A quantised unsharded parameter has shape, dtype and gradient, but its memory is one NaN. Products
read its `Blocks` (`moe.param_reader.get_fp8_blocks`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from moecore.base.options.precision import Recipe, Scaling
from moecore.base.params import GATHERED_BLOCKS
from moecore.kernels.rows.e4m3 import FP8
from moecore.kernels.rows.scaling import Blocks
from moecore.kernels.rows.shard_blocks import MatrixShard, quantise_blocks_, write_block_amax_
from moecore.kernels.rows.shard_matrices import (
    SQUARE,
    cast_part_,
    count_matrices,
    pack_part_,
    write_finite_amax_,
    write_matrix_amax_,
    write_square_amax_,
)
from moecore.moe.amax_history import get_amax_history
from moecore.parallel.fsdp.params import UnitParam, copy_all


class Format(Protocol):
    """Converts shards to the all-gathered format, and the gathered buffer to parameters."""

    dtype: torch.dtype  # dtype of the unit's buffer

    def make_unsharded(self, params: Sequence[UnitParam], data: Sequence[Tensor]) -> list[Tensor]:
        """Create each unsharded parameter on its view of the unit's buffer in `data`.

        Returns the tensors whose version counters autograd checks.
        """

    def fill(self, params: Sequence[UnitParam], local_views: Sequence[Tensor]) -> None:
        """Convert each parameter's local shard, and write it to its view of the unit's buffer.

        Formats with scales all-reduce amax.
        """


class CastFormat:
    """Casts shards to the dtype of compute."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def make_unsharded(self, params: Sequence[UnitParam], data: Sequence[Tensor]) -> list[Tensor]:
        """Create unsharded parameters that are views of the buffer, see `Format`."""
        counters = [
            param.make_unsharded(memory) for param, memory in zip(params, data, strict=True)
        ]
        return [tensor for tensors in counters for tensor in tensors]

    def fill(self, params: Sequence[UnitParam], local_views: Sequence[Tensor]) -> None:
        """Cast this rank's shards into the buffer, see `Format`."""
        copy_all(local_views, [param.shard.reshape(-1) for param in params])


class QuantisedFormat(ABC):
    """Quantises shards by a recipe; the base class of the FP8 formats."""

    dtype = torch.uint8
    _scales = torch.float32  # dtype of the scales

    def __init__(
        self,
        dtype: torch.dtype,  # dtype of compute, which the unsharded parameters report
        recipe: Recipe,
        group: dist.ProcessGroup | None,  # ranks with the other shards; None = one shard
        cuts: dist.ProcessGroup | None = None,  # tp ranks whose parts of a matrix share a scale
    ) -> None:
        self._dtype, self._recipe, self._group, self._cuts = dtype, recipe, group, cuts
        # amax of all blocks, then of all matrices
        self._amax = torch.empty(0, dtype=torch.float32, device="cpu")
        self._of_matrices = self._amax  # the view of the matrices' amax
        self._parts: list[_ShardPart] = []

    def make_unsharded(self, params: Sequence[UnitParam], data: Sequence[Tensor]) -> list[Tensor]:
        """Create unsharded parameters without values, whose FP8 operands read `data` (`Format`)."""
        self._parts = self._make_parts(params)
        counting = list[Tensor]()
        for param, memory, part in zip(params, data, self._parts, strict=True):
            nothing = torch.full((), torch.nan, dtype=self._dtype, device=memory.device)
            counting += param.make_unsharded(nothing.expand(param.shape))
            blocks = self._make_blocks(memory.data, part)
            setattr(param.unsharded, GATHERED_BLOCKS, blocks)
            counting += blocks.tensors()
        return counting

    def fill(self, params: Sequence[UnitParam], local_views: Sequence[Tensor]) -> None:
        """Quantise this rank's shards into the buffer with scales from all ranks' amax.

        One all-reduce of 4 bytes per block and matrix; a second one if tp shards a matrix.
        """
        shards = [param.shard.contiguous() for param in params]
        for shard, part in zip(shards, self._parts, strict=True):
            self._write_amax(shard, part)
        for amax, group in ((self._amax, self._group), (self._of_matrices, self._cuts)):
            if group is not None and amax.numel():
                dist.all_reduce(amax, dist.ReduceOp.MAX, group)
        for shard, part, values in zip(shards, self._parts, local_views, strict=True):
            self._quantise_shard(shard, part, values)

    def _make_parts(self, params: Sequence[UnitParam]) -> list[_ShardPart]:
        """Allocate amax and scales of all parameters, and return a `_ShardPart` for each."""
        places = [_find_shard(param) for param in params]
        shapes = [self._get_blocks_shape(place) for place in places]
        numbers = [self._count_matrices(param.shape) for param in params]
        sizes = [*map(math.prod, shapes), *numbers]
        self._amax = torch.zeros(sum(sizes), device=params[0].shard.device, dtype=torch.float32)
        self._of_matrices = self._amax[sum(sizes[: len(params)]) :]
        views, parts = self._amax.split(sizes), list[_ShardPart]()
        for i, (param, place, shape) in enumerate(zip(params, places, shapes, strict=True)):
            blocks, matrices = views[i].view(shape), views[len(params) + i]
            scales = torch.zeros_like(blocks if blocks.numel() else matrices)
            parts.append(_ShardPart(param, place, blocks, matrices, scales.to(self._scales)))
        return parts

    def _count_matrices(self, shape: torch.Size) -> int:
        """Return the number of matrices in a parameter that have a scale for the full matrix."""
        return count_matrices(shape)

    @abstractmethod
    def _get_blocks_shape(self, place: MatrixShard) -> tuple[int, int]:
        """Return (block rows, block columns) of the matrix that contains the shard `place`."""

    @abstractmethod
    def _make_blocks(self, memory: Tensor, part: _ShardPart) -> Blocks:
        """Return an operand of products: values in `memory` of the buffer, scales of `part`."""

    @abstractmethod
    def _write_amax(self, shard: Tensor, part: _ShardPart) -> None:
        """Write the maximum magnitude of each block (or matrix) of a shard to `part`."""

    @abstractmethod
    def _quantise_shard(self, shard: Tensor, part: _ShardPart, values: Tensor) -> None:
        """Compute all scales in `part` from its amax; write the quantised shard to `values`."""


class BlockFormat(QuantisedFormat):
    """FP8 with a scale per block of 128 x 128; columns are the last dim of a parameter."""

    @override
    def _count_matrices(self, shape: torch.Size) -> int:
        """Return 0, because only blocks have scales."""
        return 0

    @override
    def _get_blocks_shape(self, place: MatrixShard) -> tuple[int, int]:
        """Return the shape of the scales of 128 x 128 blocks of the full matrix, with padding."""
        return place.scales_shape

    @override
    def _make_blocks(self, memory: Tensor, part: _ShardPart) -> Blocks:
        """Return FP8 values in `memory` of the buffer with the block scales of `part`."""
        return Blocks(memory.view(FP8), part.scales.data, "block")

    @override
    def _write_amax(self, shard: Tensor, part: _ShardPart) -> None:
        """Write the amax of each block of the shard to `part`."""
        write_block_amax_(shard, part.place, part.of_blocks)

    @override
    def _quantise_shard(self, shard: Tensor, part: _ShardPart, values: Tensor) -> None:
        """Write the scales of all blocks to `part`, and the shard's FP8 values to `values`."""
        power_of_two = self._recipe.power_of_two
        quantise_blocks_(
            shard, part.place, part.of_blocks, part.scales, values, power_of_two=power_of_two
        )


class MatrixFormat(QuantisedFormat):
    """FP8 with a scale per matrix, from its amax or its amax history."""

    @override
    def _get_blocks_shape(self, place: MatrixShard) -> tuple[int, int]:
        """Return (0, 0), because blocks have no scales."""
        return (0, 0)

    @override
    def _make_blocks(self, memory: Tensor, part: _ShardPart) -> Blocks:
        """Return FP8 values in `memory` of the buffer, and scales (and amax with a history)."""
        seen = None if part.history is None else part.of_matrices.data
        return Blocks(memory.view(FP8), part.scales.data, "tensor", seen)

    @override
    def _write_amax(self, shard: Tensor, part: _ShardPart) -> None:
        """Write the amax of each matrix of the shard to `part`."""
        write_matrix_amax_(shard, part.first, part.of_matrices)

    @override
    def _quantise_shard(self, shard: Tensor, part: _ShardPart, values: Tensor) -> None:
        """Write the scales of all matrices to `part`, and the shard's FP8 values to `values`."""
        past = None if part.history is None else part.history.get_max_amax("weight")
        amax = part.of_matrices
        if past is not None:  # all ranks must use the same scale, also if one skipped the linear
            amax = torch.where(past > 0, past, amax)
        power_of_two = self._recipe.power_of_two
        cast_part_(shard, part.first, amax, part.scales, values, power_of_two=power_of_two)


class PackedFormat(QuantisedFormat):
    """E2M1, two values per byte, with a scale per 16 x 16 block."""

    _scales = FP8

    @override
    def _get_blocks_shape(self, place: MatrixShard) -> tuple[int, int]:
        """Return the numbers of rows and columns of 16 x 16 blocks in the full matrix."""
        return place.rows // SQUARE, place.columns // SQUARE

    @override
    def _make_blocks(self, memory: Tensor, part: _ShardPart) -> Blocks:
        """Return packed values in `memory` of the buffer, and scales and amax of `part`."""
        return Blocks(memory, part.scales.data, "packed", part.of_matrices.data)

    @override
    def _write_amax(self, shard: Tensor, part: _ShardPart) -> None:
        """Write the amax of each 16 x 16 block and of each matrix of the shard to `part`."""
        write_square_amax_(shard, part.place, part.of_blocks)
        write_finite_amax_(shard, part.first, part.of_matrices)

    @override
    def _quantise_shard(self, shard: Tensor, part: _ShardPart, values: Tensor) -> None:
        """Write the scales of all blocks to `part`, and the shard's packed values to `values`."""
        pack_part_(
            shard, part.place, part.of_blocks, part.of_matrices, part.scales, values, self._recipe
        )


FORMATS: dict[Scaling, type[QuantisedFormat]] = {
    "blockwise": BlockFormat,
    "tensorwise": MatrixFormat,
    "nvfp4": PackedFormat,
}


class _ShardPart:
    """A shard's position in its unsharded parameter, and the parameter's amax and scales."""

    def __init__(
        self,
        param: UnitParam,
        place: MatrixShard,
        blocks: Tensor,
        matrices: Tensor,
        scales: Tensor,
    ) -> None:
        self.place, self.of_blocks, self.of_matrices, self.scales = place, blocks, matrices, scales
        self.first = (
            _find_shard_start(param) if param.slot.dim == 0 and len(param.shape) > 2 else 0
        )  # matrix
        self.history = get_amax_history(param.owners[0][0])


def _find_shard_start(param: UnitParam) -> int:
    """Return the index in the sharded dim at which this rank's shard begins."""
    return min(param.rank * param.slot.rows, param.shape[param.slot.dim])


def _find_shard(param: UnitParam) -> MatrixShard:
    """Return the position of this rank's shard in the unsharded parameter, viewed as a matrix."""
    dim = param.slot.dim
    return MatrixShard.of(param.shape, dim, _find_shard_start(param), param.shard.shape[dim])
