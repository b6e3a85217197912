"""All-gathers and reduce-scatters of units, and the streams on which they run.

A region is a flat view of a unit's buffer for one parameter: the concatenated shards of all ranks.
NCCL all-gathers and reduce-scatters a list of regions in one launch, without copies. gloo's
coalesced calls are slow, so regions are packed into one message. On a GPU communication runs on
separate streams, concurrently with compute. On a CPU it blocks.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceScatterOptions

from moecore.base.streams import (
    Stream,
    copy_to_device,
    create_event,
    create_stream,
    get_current_stream,
    use_stream,
)
from moecore.base.torch_private import (
    all_gather_single,
    foreach_copy_,
    is_gloo,
    reduce_scatter_single,
    tree_leaves,
    tree_map_only,
)

Tensors = list[Tensor]
RankHeader = Sequence[int]  # a header of `CollectiveHeader`


class CoalescedTransport:
    """Runs a unit's NCCL collectives on the current stream, one launch for all parameters."""

    host_reads = False  # whether the host can read messages without a device synchronisation

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._gather, self._reduce = AllgatherOptions(), ReduceScatterOptions()
        self._gather.asyncOp = self._reduce.asyncOp = False

    def all_gather(self, regions: Tensors, shards: Tensors, header: RankHeader) -> list[RankHeader]:
        """All-gather each shard [n] into its region [ranks * n]; ignore `header` and return []."""
        work = self._group.allgather_into_tensor_coalesced(regions, shards, self._gather)
        if work is not None:
            work.wait()
        return []  # the host would have to wait for the headers

    def reduce_scatter(self, shards: Tensors, regions: Tensors) -> None:
        """Reduce-scatter (sum) each region [ranks * n] into its shard [n]."""
        work = self._group.reduce_scatter_tensor_coalesced(shards, regions, self._reduce)
        if work is not None:
            work.wait()


class PackedTransport:
    """Runs a unit's gloo collectives, with all parameters packed into one message."""

    def __init__(self, group: dist.ProcessGroup, device_type: str) -> None:
        self._group, self.host_reads = group, device_type == "cpu"

    def all_gather(self, regions: Tensors, shards: Tensors, header: RankHeader) -> list[RankHeader]:
        """All-gather all shards in one message; return all ranks' `header`s on CPUs, else []."""
        numbers = header if self.host_reads and not shards[0].is_meta else []
        words = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        shards = [*shards, words.to(shards[0].device).view(shards[0].dtype)]
        local_message, ranks = torch.cat(shards), self._group.size()
        messages = local_message.new_empty(ranks * local_message.numel())
        all_gather_single(messages, local_message, group=self._group)
        sizes = [shard.numel() for shard in shards]
        *parts, rank_headers = messages.view(ranks, -1).split(sizes, dim=1)
        foreach_copy_([region.view(ranks, -1) for region in regions], parts)
        return rank_headers.contiguous().view(torch.int64).tolist() if words.numel() else []

    def reduce_scatter(self, shards: Tensors, regions: Tensors) -> None:
        """Reduce-scatter (sum) all `regions` in one message, and copy the sums to the shards."""
        ranks = self._group.size()
        messages = torch.cat([region.view(ranks, -1) for region in regions], dim=1)
        local_sums = messages.new_empty(messages.shape[1])
        reduce_scatter_single(local_sums, messages.flatten(), group=self._group)
        foreach_copy_(shards, list(local_sums.split([shard.numel() for shard in shards])))


UnitTransport = CoalescedTransport | PackedTransport


def make_transport(group: dist.ProcessGroup, device_type: str) -> UnitTransport:
    """Create the transport for a group: packed messages for gloo, coalesced calls for NCCL."""
    if is_gloo(group, device_type):
        return PackedTransport(group, device_type)
    return CoalescedTransport(group)


class StreamEvent:
    """A reusable CUDA event. `wait` does nothing before `record`, and nothing on a CPU."""

    def __init__(self, device_type: str) -> None:
        self._event = create_event(device_type)
        self._is_recorded = False

    def record(self) -> None:
        """Record the event on the current stream."""
        if self._event is not None:
            self._event.record()
            self._is_recorded = True

    def wait(self) -> None:
        """Make the current stream wait for the event, if it is recorded."""
        if self._event is not None and self._is_recorded:
            self._event.wait()

    def clear(self) -> None:
        """Make later waits do nothing, because the recorded work is complete."""
        self._is_recorded = False


class ShardCopies(Protocol):
    """Copies between shards in host memory and the device (`MemoryOptions.offload_params`)."""

    device: torch.device

    def fetch(self, host_shards: Sequence[Tensor]) -> list[Tensor]:
        """Start to copy shards to the device; return the copies."""

    def wait(self) -> None:
        """Make the current stream wait for all copies to the device."""

    def add_grad(self, sharded: Tensor, grad: Tensor) -> None:
        """Start to add a local gradient on the device to `.grad` of a parameter in host memory."""

    def synchronize(self) -> None:
        """Wait for all copies in both directions. Host sync."""


class UnitStreams:
    """The CUDA streams for all-gathers and reductions of a model's units; no streams on a CPU."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.shard_copies: ShardCopies | None = None  # None = the shards are on the device
        self._gather = create_stream(device_type, priority=-1)
        self._reduce = create_stream(device_type, priority=-1)
        self._queued: list[Stream] = []  # streams for which `wait_for_collectives` must wait

    def make_event(self) -> StreamEvent:
        """Return a new `StreamEvent`, not yet recorded."""
        return StreamEvent(self.device_type)

    def copy_to_device(self, nested: Any) -> Any:
        """Copy the CPU tensors in nested containers to the GPU, if units are on a GPU."""
        if self.device_type != "cuda":
            return nested
        if not any(isinstance(leaf, Tensor) and leaf.is_cpu for leaf in tree_leaves(nested)):
            return nested
        return tree_map_only(Tensor, lambda x: copy_to_device(x, self.device_type), nested)

    def wait_for_collectives(self) -> None:
        """Make the current stream wait for all launched all-gathers and reductions."""
        for stream in self._queued:  # other streams may not belong to a CUDA graph
            self._get_current_stream().wait_stream(stream)
        self._queued.clear()
        if self.shard_copies is not None:  # the host may read gradients after backward
            self.shard_copies.synchronize()

    def record_reduce_stream(self, tensor: Tensor) -> None:
        """Prevent reuse of a tensor's memory until the launched reductions have completed."""
        if isinstance(self._reduce, torch.cuda.Stream):
            tensor.record_stream(self._reduce)

    def sync_gather_stream(self) -> None:
        """Make later all-gathers wait for the current stream, which has written the shards."""
        if self._gather is not None:
            self._order_after_current(self._gather)

    def use_gather_stream(self) -> AbstractContextManager[Any]:
        """Return a context that uses the all-gather stream, without a wait for the current one."""
        return use_stream(self._gather)

    def use_reduce_stream(self) -> AbstractContextManager[Any]:
        """Make the reduction stream wait for the current one; return a context that uses it."""
        if self._reduce is not None:
            self._order_after_current(self._reduce)
        return use_stream(self._reduce)

    def _get_current_stream(self) -> Stream:
        stream = get_current_stream(self.device_type)
        assert stream is not None, "only a GPU has streams"
        return stream

    def _order_after_current(self, stream: Stream) -> None:
        """Make `stream` wait for the current stream; `wait_for_collectives` waits for `stream`."""
        stream.wait_stream(self._get_current_stream())
        if stream not in self._queued:
            self._queued.append(stream)
