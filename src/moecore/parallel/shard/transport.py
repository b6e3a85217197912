"""Collectives of one unit: one call for all of its parameters, with no copy around it on NCCL.

Regions are flat pieces of a unit's buffer, one per parameter, with the shards of all ranks one
after the other. NCCL gathers and reduces a list of regions in one launch. gloo has no such call
that is fast: there regions are packed rank by rank.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceScatterOptions

from moecore.base.torch_names import (
    all_gather_single,
    foreach_copy_,
    is_gloo,
    reduce_scatter_single,
)


class UnitTransport(Protocol):
    """How the shard ranks of a unit communicate. On the current stream."""

    def gather(self, regions: list[Tensor], shards: list[Tensor]) -> None:
        """Fill each region [ranks * n] with the shards [n] of all ranks, maybe parts of it."""

    def reduce(self, shards: list[Tensor], regions: list[Tensor]) -> None:
        """Fill each shard [n] with the sum over ranks of its part of the region [ranks * n]."""


class Coalesced:
    """One launch for a list of regions."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._gather, self._reduce = AllgatherOptions(), ReduceScatterOptions()
        self._gather.asyncOp = self._reduce.asyncOp = False

    def gather(self, regions: list[Tensor], shards: list[Tensor]) -> None:
        """As of `UnitTransport`."""
        work = self._group.allgather_into_tensor_coalesced(regions, shards, self._gather)
        if work is not None:
            work.wait()

    def reduce(self, shards: list[Tensor], regions: list[Tensor]) -> None:
        """As of `UnitTransport`."""
        work = self._group.reduce_scatter_tensor_coalesced(shards, regions, self._reduce)
        if work is not None:
            work.wait()


class Packed:
    """One message of all regions, rank by rank."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def gather(self, regions: list[Tensor], shards: list[Tensor]) -> None:
        """As of `UnitTransport`."""
        own = torch.cat(shards)
        ranks = self._group.size()
        everything = own.new_empty(ranks * own.numel())
        all_gather_single(everything, own, group=self._group)
        sizes = [shard.numel() for shard in shards]
        parts = everything.view(ranks, -1).split(sizes, dim=1)
        foreach_copy_([region.view(ranks, -1) for region in regions], list(parts))

    def reduce(self, shards: list[Tensor], regions: list[Tensor]) -> None:
        """As of `UnitTransport`."""
        ranks = self._group.size()
        everything = torch.cat([region.view(ranks, -1) for region in regions], dim=1)
        own = everything.new_empty(everything.shape[1])
        reduce_scatter_single(own, everything.flatten(), group=self._group)
        foreach_copy_(shards, list(own.split([shard.numel() for shard in shards])))


def transport_of(group: dist.ProcessGroup, device_type: str) -> UnitTransport:
    """Return the transport of a group's backend."""
    return Packed(group) if is_gloo(group, device_type) else Coalesced(group)
