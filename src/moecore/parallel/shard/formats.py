"""What a unit gathers: its shards cast, or FP8 in blocks of 128 x 128 with a scale each.

    Cast      shard -> compute dtype                                   -> gathered
    Blocks    shard -> amax of its part of each block -> largest of all ranks -> scales, on each
              shard and scales -> FP8                                  -> gathered, a byte each

Blocks are those of the whole matrix, wherever shards cut it, and values are cast from the shards as
they are trained. So what is gathered is what one rank would quantise of the whole, bit for bit.
Scales are not gathered: every rank makes all of them.

A parameter of `BlockFormat` has shape and dtype, and takes a gradient, but its memory is one NaN.
Products read its `Blocks` (`moe.params.gathered_blocks`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.kernels.rows.e4m3 import FP8
from moecore.kernels.rows.scaling import Blocks
from moecore.kernels.rows.shard_blocks import PartOfMatrix, block_amax_, quantise_blocks_
from moecore.moe.params import GATHERED
from moecore.parallel.shard.params import UnitParam, copy_all


class Format(Protocol):
    """How the shards of a unit become what is gathered, and that its whole parameters."""

    dtype: torch.dtype  # of the unit's buffer

    def make_whole(self, params: Sequence[UnitParam], data: Sequence[Tensor]) -> list[Tensor]:
        """Make whole parameters of their memory, once; return tensors that count changes of it."""

    def fill(self, params: Sequence[UnitParam], own: Sequence[Tensor]) -> None:
        """Write this rank's shards, as they are gathered, to flat `own`. Maybe collective."""


class CastFormat:
    """Values in the dtype of compute."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def make_whole(self, params: Sequence[UnitParam], data: Sequence[Tensor]) -> list[Tensor]:
        """As of `Format`."""
        made = [param.make_whole(memory) for param, memory in zip(params, data, strict=True)]
        return [tensor for tensors in made for tensor in tensors]

    def fill(self, params: Sequence[UnitParam], own: Sequence[Tensor]) -> None:
        """As of `Format`."""
        copy_all(own, [param.shard.reshape(-1) for param in params])


class BlockFormat:
    """FP8 in blocks of 128 x 128 of each parameter, whose last dim are the columns."""

    dtype = torch.uint8

    def __init__(
        self, dtype: torch.dtype, *, power_of_two: bool, group: dist.ProcessGroup | None
    ) -> None:
        self._dtype, self._power_of_two, self._group = dtype, power_of_two, group
        self._scales: _BlockScales | None = None

    def make_whole(self, params: Sequence[UnitParam], data: Sequence[Tensor]) -> list[Tensor]:
        """As of `Format`."""
        self._scales = scales = _BlockScales.of(params)
        counting = list[Tensor]()
        for param, memory, of_param in zip(params, data, scales.scales, strict=True):
            nothing = torch.full((), torch.nan, dtype=self._dtype, device=memory.device)
            counting += param.make_whole(nothing.expand(param.shape))
            gathered = Blocks(memory.data.view(FP8), of_param.data, "block")
            setattr(param.whole, GATHERED, gathered)
            counting += (gathered.values, gathered.scales)
        return counting

    def fill(self, params: Sequence[UnitParam], own: Sequence[Tensor]) -> None:
        """As of `Format`: one all-reduce of 4 bytes per block."""
        found = self._scales
        assert found is not None, "whole parameters are made first"
        shards = [param.shard.contiguous() for param in params]
        for shard, place, amax in zip(shards, found.places, found.amaxes, strict=True):
            block_amax_(shard, place, amax)
        if self._group is not None:
            dist.all_reduce(found.flat_amax, dist.ReduceOp.MAX, self._group)
        places = zip(shards, found.places, found.amaxes, found.scales, own, strict=True)
        for shard, place, amax, scales, values in places:
            quantise_blocks_(shard, place, amax, scales, values, power_of_two=self._power_of_two)


@dataclass(frozen=True, slots=True)
class _BlockScales:
    """The scales of a unit and where their blocks lie; their memory is 1 / 4096 of fp32 weights."""

    places: list[PartOfMatrix]  # of this rank's shard in each parameter
    flat_amax: Tensor  # fp32, of all parameters
    amaxes: list[Tensor]
    scales: list[Tensor]

    @classmethod
    def of(cls, params: Sequence[UnitParam]) -> _BlockScales:
        places = [_place(param) for param in params]
        sizes = [math.prod(place.scales_shape) for place in places]
        flat = torch.zeros(2, sum(sizes), device=params[0].shard.device)
        amaxes, scales = (
            [
                part.view(place.scales_shape)
                for part, place in zip(half.split(sizes), places, strict=True)
            ]
            for half in flat.unbind()
        )
        return cls(places, flat[0], amaxes, scales)


def _place(param: UnitParam) -> PartOfMatrix:
    """Return where a rank's shard lies in the whole parameter."""
    dim = param.slot.dim
    start = min(param.rank * param.slot.rows, param.shape[dim])
    return PartOfMatrix.of(param.shape, dim, start, param.shard.shape[dim])
