"""ParamOffload: trained shards and their gradients in host memory, as FSDP2's `CPUOffloadPolicy`.

    before an all-gather    shard of the host -> GPU            copy stream to the device
    after a reduction       .grad of the host -> GPU, if any    copy stream to the device
                            reduced gradient + .grad -> host    copy stream to the host
    end of a backward       the host waits for all copies, and may then step the optimizer

The engine prefetches the all-gather of a unit, and the copy of its shards starts with the prefetch.
The GPU has the shards of a unit from then to the end of the all-gather.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moecore.base.fields import Device, check_arguments
from moecore.base.streams import get_current_stream
from moecore.base.torch_private import get_local_tensor, make_dtensor_like
from moecore.parallel.fsdp.engine import UnitEngine
from moecore.parallel.model.parallel_state import list_engines
from moecore.train.memory.host import HostCopies, explain_memory_errors
from moecore.train.memory.streams import CopyJob, CopyStreams

IN_FLIGHT_BYTES = 2**28  # of gradients on the GPU whose copies may not have ended


class ParamOffload:
    """Copies between pinned host memory (`shards`, `grads`) and the device for `parallel.fsdp`."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._streams = device, CopyStreams(device)
        self.shards, self.grads = HostCopies(), HostCopies()
        # (gradient, event of its copy, stream that has made it), oldest first
        self._in_flight = deque[tuple[Tensor, Any, Any]]()

    def fetch(self, host_shards: Sequence[Tensor]) -> list[Tensor]:
        """Start to copy shards to the device; return the copies. `wait` waits for them."""
        if self._streams.is_capturing():
            raise ValueError(
                "MemoryOptions.offload_params (True) must be False where a step is captured in a "
                "CUDA graph: set it to False, or run the step eagerly"
            )
        device = self.device
        copies = [
            torch.empty_like(x, device=x.device if x.is_meta else device) for x in host_shards
        ]
        self._streams.back.start_copies(
            CopyJob(target.view(-1), source.view(-1))
            for target, source in zip(copies, host_shards, strict=True)
        )
        return copies

    def wait(self) -> None:
        """Make the current stream wait for all copies to the device."""
        self._streams.back.wait_for_event(self._streams.back.record_event())

    def add_grad(self, sharded: Tensor, grad: Tensor) -> None:
        """Start to add a gradient on the device to `.grad` on the host; `synchronize` waits."""
        grad = grad.contiguous()
        if sharded.grad is None:
            name = str(id(sharded))
            host = self.grads.reserve_like({name: grad})[name]
            sharded.grad = make_dtensor_like(host, sharded)
        else:
            host = get_local_tensor(sharded.grad)
            previous = torch.empty_like(grad)
            # The copy of an earlier micro-batch to the host has ended with its backward.
            out = self._streams.out.record_event()
            self._streams.back.start_copies([CopyJob(previous.view(-1), host.view(-1))], out)
            self.wait()
            grad = previous.add_(grad)
        event = self._streams.out.start_copies([CopyJob(host, grad)])
        self._in_flight.append((grad, event, get_current_stream(self.device)))
        while sum(item[0].nbytes for item in self._in_flight) > IN_FLIGHT_BYTES:
            # The memory is freed and reused in the order of the stream that has made the gradient.
            _, event, stream = self._in_flight.popleft()
            event.make_stream_wait(stream)

    def synchronize(self) -> None:
        """Wait for all copies in both directions. Host sync."""
        self._streams.synchronize()
        self._in_flight.clear()


@torch.no_grad()
def offload_params(
    engine: UnitEngine, device: torch.device, *, memory_device: torch.device | None = None
) -> None:
    """Move the shards of an engine's units to host memory, in place; `device` runs the compute.

    The memory is pinned for copies to `memory_device`; None = the device of the shards. Shards on
    meta stay on meta if it is None, otherwise they become uninitialised host memory. Raises
    MemoryError when host memory is insufficient.
    """
    offload = ParamOffload(device)
    params = [param for unit in engine.units for param in unit.params]
    shards = {param.slot.param: param.shard for param in params}
    likes = {n: x.new_empty((), device=memory_device).expand(x.shape) for n, x in shards.items()}
    gib = sum(shard.nbytes for shard in shards.values()) / 2**30
    with explain_memory_errors(f"MemoryOptions.offload_params ({gib:.1f} GiB)"):
        memory = offload.shards.reserve_like(likes)
    for unit in engine.units:
        unit.move_to_host([memory[param.slot.param] for param in unit.params], offload)


@torch.no_grad()
def materialize(model: nn.Module, *, device: Device) -> None:
    """Allocate a parallelized model that is on meta, in place, with uninitialised values.

    With `MemoryOptions.offload_params` the shards are in host memory, pinned if the ranks have
    GPUs, and all other tensors are on `device`. Without the option the function is
    `model.to_empty(device=device)`. Parameters are new objects: construct the optimizer afterwards.

    Args:
        model: a model on meta, after `parallelize_moe`.
        device: the device on which the model computes.

    Raises:
        MemoryError: when host memory is insufficient.
    """
    check_arguments(materialize, locals())
    engines, host_params = list[tuple[UnitEngine, torch.device]](), set[int]()
    for engine in list_engines(model):
        params = [param for unit in engine.units for param in unit.params]
        copies = {param.shard_copies.device for param in params if param.shard_copies is not None}
        if copies:
            engines.append((engine, copies.pop()))
            host_params |= {id(param.sharded) for param in params}
    model._apply(lambda x: torch.empty_like(x, device="meta" if id(x) in host_params else device))
    for engine, compute_device in engines:
        offload_params(engine, compute_device, memory_device=compute_device)
