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
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.base.options.precision import Recipe, Scaling
from moecore.base.params import GATHERED_BLOCKS
from moecore.kernels.rows.e4m3 import FP8
from moecore.kernels.rows.scaling import Blocks
from moecore.kernels.rows.shard_blocks import MatrixShard, quantise_blocks_, write_block_amax_
from moecore.kernels.rows.shard_matrices import (
    SQUARE,
    count_matrices,
    pack_shard_,
    quantise_shard_,
    write_finite_amax_,
    write_matrix_amax_,
    write_square_amax_,
)
from moecore.moe.amax_history import AmaxHistory, get_amax_history
from moecore.parallel.fsdp.params import UnitParam, copy_all


class CastFormat:
    """Converts a unit's shards for the all-gather by a cast to the compute dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype  # dtype of the unit's buffer

    def make_unsharded(self, params: Sequence[UnitParam], views: Sequence[Tensor]) -> list[Tensor]:
        """Set `params[i].unsharded` to a parameter whose storage is `views[i]`, without a copy.

        Returns the tensors whose version counters autograd checks.
        """
        pairs = zip(params, views, strict=True)
        return [tensor for param, memory in pairs for tensor in param.make_unsharded(memory)]

    def write_shards(self, params: Sequence[UnitParam], local_views: Sequence[Tensor]) -> None:
        """Cast this rank's shard of `params[i]` into `local_views[i]` of the unit's buffer."""
        shards = [p.shard if p.device_shard is None else p.device_shard for p in params]
        copy_all(local_views, [shard.reshape(-1) for shard in shards])


class QuantisedFormat(ABC):
    """Base class of the FP8 and E2M1 formats: quantises shards before the all-gather."""

    dtype = torch.uint8  # dtype of the unit's buffer
    _scale_dtype = torch.float32
    _has_matrix_amax = True  # whether each full matrix has an amax

    def __init__(
        self,
        dtype: torch.dtype,  # dtype of compute, which the unsharded parameters report
        recipe: Recipe,
        shard_group: dist.ProcessGroup | None,  # ranks with the other shards; None = one shard
        tp_group: dist.ProcessGroup | None = None,  # tp ranks whose parts of a matrix share a scale
    ) -> None:
        self._dtype, self._recipe = dtype, recipe
        self._group, self._tp_group = shard_group, tp_group
        # amax of all blocks, then of all matrices
        self._amax = torch.empty(0, dtype=torch.float32, device="cpu")
        self._matrix_amax = self._amax  # the view of the matrices' amax
        self._shard_scalings: list[_ShardScaling] = []

    def make_unsharded(self, params: Sequence[UnitParam], views: Sequence[Tensor]) -> list[Tensor]:
        """Set `params[i].unsharded` to a placeholder, whose quantised values are in `views[i]`.

        Returns the tensors whose version counters autograd checks.
        """
        self._shard_scalings = self._make_shard_scalings(params)
        versioned_tensors = list[Tensor]()
        for param, memory, scaling in zip(params, views, self._shard_scalings, strict=True):
            nan = torch.full((), torch.nan, dtype=self._dtype, device=memory.device)
            versioned_tensors += param.make_unsharded(nan.expand(param.shape))
            blocks = self._make_blocks(memory.data, scaling)
            setattr(param.unsharded, GATHERED_BLOCKS, blocks)
            versioned_tensors += blocks.tensors()
        return versioned_tensors

    def write_shards(self, params: Sequence[UnitParam], local_views: Sequence[Tensor]) -> None:
        """Quantise this rank's shard of `params[i]` into `local_views[i]` of the unit's buffer.

        Collective: each block's and matrix's amax is all-reduced over ranks with a part of it.
        """
        shards = [param.shard.contiguous() for param in params]
        for shard, scaling in zip(shards, self._shard_scalings, strict=True):
            self._write_amax(shard, scaling)
        for amax, group in ((self._amax, self._group), (self._matrix_amax, self._tp_group)):
            if group is not None and amax.numel():
                dist.all_reduce(amax, dist.ReduceOp.MAX, group)
        for shard, scaling, values in zip(shards, self._shard_scalings, local_views, strict=True):
            self._quantise_shard(shard, scaling, values)

    def _make_shard_scalings(self, params: Sequence[UnitParam]) -> list[_ShardScaling]:
        """Return the position and the amax buffers of each parameter's shard, all zero."""
        places = []  # of the shards in the unsharded parameters, viewed as matrices
        for param in params:
            dim = param.slot.dim
            size = param.shard.shape[dim]
            places.append(MatrixShard.from_slice(param.shape, dim, param.start, size))
        shapes = [self._get_block_grid(place) for place in places]
        has_matrices = self._has_matrix_amax
        sizes = [math.prod(shape) for shape in shapes]
        sizes += [count_matrices(param.shape) if has_matrices else 0 for param in params]
        self._amax = torch.zeros(sum(sizes), device=params[0].shard.device, dtype=torch.float32)
        self._matrix_amax = self._amax[sum(sizes[: len(params)]) :]
        views, parts = self._amax.split(sizes), list[_ShardScaling]()
        for i, (param, place, shape) in enumerate(zip(params, places, shapes, strict=True)):
            blocks, matrices = views[i].view(shape), views[len(params) + i]
            scales = torch.zeros_like(blocks if blocks.numel() else matrices).to(self._scale_dtype)
            first = param.start if param.slot.dim == 0 and len(param.shape) > 2 else 0
            history = get_amax_history(param.owners[0][0])
            parts.append(_ShardScaling(place, first, blocks, matrices, scales, history))
        return parts

    @abstractmethod
    def _get_block_grid(self, shard: MatrixShard) -> tuple[int, int]:
        """Return the numbers of scale blocks along rows and columns of the unsharded matrix."""

    @abstractmethod
    def _make_blocks(self, memory: Tensor, scaling: _ShardScaling) -> Blocks:
        """Return a parameter's quantised values in `memory`, a view of the buffer, with scales."""

    @abstractmethod
    def _write_amax(self, shard: Tensor, scaling: _ShardScaling) -> None:
        """Write this shard's maximum magnitude in each block or matrix to the amax of `scaling`."""

    @abstractmethod
    def _quantise_shard(self, shard: Tensor, scaling: _ShardScaling, values: Tensor) -> None:
        """Compute all scales in `scaling` from its amax; write the quantised shard to `values`."""


class BlockFormat(QuantisedFormat):
    """All-gathers a unit's shards in FP8 with a scale per block of 128 x 128 elements.

    A parameter is viewed as matrices whose columns are its last dim.
    """

    _has_matrix_amax = False

    def _get_block_grid(self, shard: MatrixShard) -> tuple[int, int]:
        return shard.scales_shape

    def _make_blocks(self, memory: Tensor, scaling: _ShardScaling) -> Blocks:
        return Blocks(memory.view(FP8), scaling.scales.data, "block")

    def _write_amax(self, shard: Tensor, scaling: _ShardScaling) -> None:
        write_block_amax_(shard, scaling.place, scaling.of_blocks)

    def _quantise_shard(self, shard: Tensor, scaling: _ShardScaling, values: Tensor) -> None:
        operands = shard, scaling.place, scaling.of_blocks, scaling.scales, values
        quantise_blocks_(*operands, power_of_two=self._recipe.power_of_two)


class MatrixFormat(QuantisedFormat):
    """All-gathers a unit's shards in FP8 with a scale per matrix, from amax or an amax history."""

    def _get_block_grid(self, shard: MatrixShard) -> tuple[int, int]:
        return (0, 0)  # a matrix has one scale and is not divided into blocks

    def _make_blocks(self, memory: Tensor, scaling: _ShardScaling) -> Blocks:
        amax = None if scaling.history is None else scaling.of_matrices.data
        return Blocks(memory.view(FP8), scaling.scales.data, "tensor", amax)

    def _write_amax(self, shard: Tensor, scaling: _ShardScaling) -> None:
        write_matrix_amax_(shard, scaling.first, scaling.of_matrices)

    def _quantise_shard(self, shard: Tensor, scaling: _ShardScaling, values: Tensor) -> None:
        past = None if scaling.history is None else scaling.history.get_max_amax("weight")
        amax = scaling.of_matrices
        if past is not None:  # all ranks must use the same scale, also if one skipped the linear
            amax = torch.where(past > 0, past, amax)
        operands = shard, scaling.first, amax, scaling.scales, values
        quantise_shard_(*operands, power_of_two=self._recipe.power_of_two)


class PackedFormat(QuantisedFormat):
    """All-gathers a unit's shards in E2M1 (FP4), two per byte, with a scale per 16 x 16 block."""

    _scale_dtype = FP8

    def _get_block_grid(self, shard: MatrixShard) -> tuple[int, int]:
        return shard.rows // SQUARE, shard.columns // SQUARE

    def _make_blocks(self, memory: Tensor, scaling: _ShardScaling) -> Blocks:
        return Blocks(memory, scaling.scales.data, "packed", scaling.of_matrices.data)

    def _write_amax(self, shard: Tensor, scaling: _ShardScaling) -> None:
        write_square_amax_(shard, scaling.place, scaling.of_blocks)
        write_finite_amax_(shard, scaling.first, scaling.of_matrices)

    def _quantise_shard(self, shard: Tensor, scaling: _ShardScaling, values: Tensor) -> None:
        amax = scaling.of_blocks, scaling.of_matrices
        pack_shard_(shard, scaling.place, *amax, scaling.scales, values, self._recipe)


FORMATS: dict[Scaling, type[QuantisedFormat]] = {
    "blockwise": BlockFormat,
    "tensorwise": MatrixFormat,
    "nvfp4": PackedFormat,
}


class _ShardScaling(NamedTuple):
    """A shard's position in its unsharded parameter, and the parameter's amax and scales."""

    place: MatrixShard  # position of this rank's shard in the parameter, viewed as a matrix
    first: int  # index of the shard's first matrix
    of_blocks: Tensor  # amax of each block, 2-D; empty if blocks have no scales
    of_matrices: Tensor  # amax of each matrix, 1-D; empty if matrices have no scales
    scales: Tensor  # scales of the blocks, or of the matrices if blocks have none
    history: AmaxHistory | None  # amax history of the parameter's module


Format = CastFormat | QuantisedFormat
