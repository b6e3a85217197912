"""Buffers of one rank that all ranks of its group can write, and checks that GPUs support them.

The buffers are torch's symmetric memory: CUDA backend, no multicast.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from moecore.base.rank_checks import gather_objects, get_host_id
from moecore.base.torch_private import allocate_symmetric_memory
from moecore.kernels.exchange.buffer import MAX_RANKS, NUM_WORDS, ExchangeLayout, SymmetricBuffer
from moecore.kernels.meta import get_num_meta_peers, meta_is_gpu
from moecore.kernels.triton_api import HAS_TRITON, INTERPRET


def make_exchange_buffer(
    layout: ExchangeLayout, group: dist.ProcessGroup, device: torch.device, timeout_s: float
) -> SymmetricBuffer:
    """Allocate this rank's zeroed buffer for an exchange of token rows. Collective."""
    size, rank = (layout.num_bytes,), dist.get_rank(group)
    memory, handle = allocate_symmetric_memory(layout.num_bytes, group, device)
    memory.zero_()  # the flags
    peers = [handle.get_remote_tensor(g, size, torch.uint8) for g in range(layout.num_ranks)]
    addresses = torch.tensor(
        [layout.locate_regions(peer.data_ptr()) for peer in peers], dtype=torch.int64, device="cpu"
    )
    buffer = SymmetricBuffer(
        layout=layout,
        rank=rank,
        bases=addresses.T.contiguous().to(device),
        state=torch.zeros(NUM_WORDS, dtype=torch.int32, device=device),
        report=torch.zeros(NUM_WORDS, dtype=torch.int32, device="cpu", pin_memory=True),
        timeout_ns=round(timeout_s * 1e9),
        memory=(memory, handle),
        sums_slots=tuple(layout.view_sums(peer, rank) for peer in peers if layout.sums_slot),
    )
    torch.cuda.synchronize(device)
    dist.barrier(group)  # no rank raises a flag before all flags are cleared
    return buffer


def find_local_peer_problem(num_ranks: int, device_type: str) -> str | None:
    """Return why kernels cannot store to `num_ranks` peers, or None, without a test of links."""
    is_planned = meta_is_gpu()
    if device_type != "cuda" and not is_planned:
        return f"must go with device_type ({device_type!r}) = 'cuda': use 'alltoall'"
    if not (HAS_TRITON or is_planned) or INTERPRET:
        return "must have Triton for its kernels: install triton or use 'alltoall'"
    if num_ranks > MAX_RANKS:
        return f"must have ep * etp ({num_ranks}) <= {MAX_RANKS}: use 'alltoall'"
    return None


def find_peer_store_problem(group: dist.ProcessGroup, device_type: str) -> str | None:
    """Return the reason why kernels cannot store to peers of a group, or None. Collective."""
    problem = find_local_peer_problem(group.size(), device_type)
    if problem is not None or meta_is_gpu():
        return problem
    return find_peer_access_problem(group)


def find_peer_access_problem(group: dist.ProcessGroup) -> str | None:
    """Return the reason why a group's GPUs cannot read each other's memory, or None. Collective."""
    problem = _find_local_access_problem(group)
    if problem is None:
        try:
            device = torch.device("cuda", torch.cuda.current_device())
            allocate_symmetric_memory(1024, group, device)
        except RuntimeError as error:
            problem = (
                "must have torch's symmetric memory, which fails here "
                f"({str(error).splitlines()[0]}): use 'alltoall'"
            )
    return next((p for p in gather_objects(problem, group) if p), None)


def can_meta_peers_access_memory(group: dist.ProcessGroup) -> bool:
    """Whether the GPUs of a simulated group on meta could read each other's memory."""
    return len({rank // get_num_meta_peers() for rank in dist.get_process_group_ranks(group)}) == 1


def _find_local_access_problem(group: dist.ProcessGroup) -> str | None:
    """Return the reason why this GPU cannot read the memory of its group, or None. Collective."""
    device, get_properties = torch.cuda.current_device(), torch.cuda.get_device_properties
    local_devices = {str(get_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    places = gather_objects((get_host_id(), str(get_properties(device).uuid)), group)
    hosts = len({host for host, _ in places})
    if hosts > 1:
        return f"must stay on one host (its ranks are on {hosts}): use 'alltoall'"
    for g, (_, uuid) in enumerate(places):
        rank = dist.get_global_rank(group, g)
        if uuid not in local_devices:
            return (
                f"must see the GPU of rank {rank} on every rank: make all GPUs of the host visible "
                "to each process, or use 'alltoall'"
            )
        peer = local_devices[uuid]
        if peer != device and not torch.cuda.can_device_access_peer(device, peer):
            me = dist.get_global_rank(group, dist.get_rank(group))
            return f"must have peer access from rank {me} to rank {rank}: use 'alltoall'"
    return None
