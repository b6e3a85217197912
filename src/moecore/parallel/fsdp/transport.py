"""How units communicate: one call for all parameters of a unit, with no copy around it on NCCL.

Regions are flat pieces of a unit's buffer, one per parameter, with the shards of all ranks one
after the other. NCCL gathers and reduces a list of regions in one launch. gloo has no such call
that is fast: there regions are packed rank by rank. On a GPU all this is beside compute, on streams
of a model's units; on a CPU it is in line.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceScatterOptions

from moecore.base.streams import Stream, current_stream, new_event, new_stream, on_stream, to_device
from moecore.base.torch_private import (
    all_gather_single,
    foreach_copy_,
    is_gloo,
    reduce_scatter_single,
    tree_leaves,
    tree_map_only,
)

Tensors = list[Tensor]
Note = Sequence[int]  # of `CollectiveHeader`


class UnitTransport(Protocol):
    """How the shard ranks of a unit communicate. On the current stream."""

    host_reads: bool  # whether the host reads what ranks send without waiting for a device

    def gather(self, regions: Tensors, shards: Tensors, note: Note) -> list[Note]:
        """Fill each region [ranks * n] with the shards [n] of all ranks; return their notes."""

    def reduce(self, shards: list[Tensor], regions: list[Tensor]) -> None:
        """Fill each shard [n] with the sum over ranks of its part of the region [ranks * n]."""


class Coalesced:
    """One launch for a list of regions."""

    host_reads = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._gather, self._reduce = AllgatherOptions(), ReduceScatterOptions()
        self._gather.asyncOp = self._reduce.asyncOp = False

    def gather(self, regions: Tensors, shards: Tensors, note: Note) -> list[Note]:
        """As of `UnitTransport`."""
        work = self._group.allgather_into_tensor_coalesced(regions, shards, self._gather)
        if work is not None:
            work.wait()
        return []  # the host would have to wait for them

    def reduce(self, shards: list[Tensor], regions: list[Tensor]) -> None:
        """As of `UnitTransport`."""
        work = self._group.reduce_scatter_tensor_coalesced(shards, regions, self._reduce)
        if work is not None:
            work.wait()


class PackedTransport:
    """One message of all regions, rank by rank."""

    def __init__(self, group: dist.ProcessGroup, device_type: str) -> None:
        self._group, self.host_reads = group, device_type == "cpu"

    def gather(self, regions: Tensors, shards: Tensors, note: Note) -> list[Note]:
        """As of `UnitTransport`."""
        header = torch.tensor(
            note if self.host_reads and not shards[0].is_meta else [], dtype=torch.int64
        )
        shards = [*shards, header.to(shards[0].device).view(shards[0].dtype)]
        local_bytes = torch.cat(shards)
        ranks = self._group.size()
        everything = local_bytes.new_empty(ranks * local_bytes.numel())
        all_gather_single(everything, local_bytes, group=self._group)
        sizes = [shard.numel() for shard in shards]
        *parts, notes = everything.view(ranks, -1).split(sizes, dim=1)
        foreach_copy_([region.view(ranks, -1) for region in regions], parts)
        return notes.contiguous().view(torch.int64).tolist() if header.numel() else []

    def reduce(self, shards: list[Tensor], regions: list[Tensor]) -> None:
        """As of `UnitTransport`."""
        ranks = self._group.size()
        everything = torch.cat([region.view(ranks, -1) for region in regions], dim=1)
        local_sums = everything.new_empty(everything.shape[1])
        reduce_scatter_single(local_sums, everything.flatten(), group=self._group)
        foreach_copy_(shards, list(local_sums.split([shard.numel() for shard in shards])))


def transport_of(group: dist.ProcessGroup, device_type: str) -> UnitTransport:
    """Return the transport of a group's backend."""
    return PackedTransport(group, device_type) if is_gloo(group, device_type) else Coalesced(group)


class StreamMark:
    """A place behind what a stream has queued, for which others wait; on a CPU, nothing."""

    __slots__ = ("_event", "_is_set")

    def __init__(self, device_type: str) -> None:
        self._event = new_event(device_type)
        self._is_set = False

    def set(self) -> None:
        """Mark what the current stream has queued, in place of what was marked before."""
        if self._event is not None:
            self._event.record()
            self._is_set = True

    def wait(self) -> None:
        """Let the current stream wait for it."""
        if self._event is not None and self._is_set:
            self._event.wait()

    def clear(self) -> None:
        """Let nobody wait: all of it is done."""
        self._is_set = False


class UnitStreams:
    """The streams of a model's units."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self._gather = new_stream(device_type, priority=-1)
        self._reduce = new_stream(device_type, priority=-1)
        self._queued: list[Stream] = []  # what nothing has waited for

    def mark(self) -> StreamMark:
        """Return a mark that is not set."""
        return StreamMark(self.device_type)

    def on_device(self, value: Any) -> Any:
        """Return a value with its tensors on the GPU, where units compute on one."""
        if self.device_type != "cuda" or all(not _is_on_cpu(leaf) for leaf in tree_leaves(value)):
            return value
        return tree_map_only(Tensor, lambda x: to_device(x, self.device_type), value)

    def join(self) -> None:
        """Let the current stream wait for all communication."""
        for stream in self._queued:  # no other: it may be no part of a CUDA graph
            self._current().wait_stream(stream)
        self._queued.clear()

    def keep(self, tensor: Tensor) -> None:
        """Keep a tensor's memory until the reductions that are queued have run."""
        if isinstance(self._reduce, torch.cuda.Stream):
            tensor.record_stream(self._reduce)

    def start(self) -> None:
        """Let gathers wait for the current stream, which has written the shards."""
        if self._gather is not None:
            self._follow(self._gather)

    def gathering(self) -> AbstractContextManager[Any]:
        """Queue what follows beside compute, on the stream of gathers."""
        return on_stream(self._gather)

    def reducing(self) -> AbstractContextManager[Any]:
        """Queue what follows behind compute, on the stream of reductions."""
        if self._reduce is not None:
            self._follow(self._reduce)
        return on_stream(self._reduce)

    def _current(self) -> Stream:
        stream = current_stream(self.device_type)
        assert stream is not None, "only a GPU has others"
        return stream

    def _follow(self, stream: Stream) -> None:
        stream.wait_stream(self._current())
        if stream not in self._queued:
            self._queued.append(stream)


def _is_on_cpu(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.device.type == "cpu"
