"""CUDA streams and events, and the streams of a dry run, which record dependencies of operations.

For a CPU device the functions return None instead of a stream. A dry run executes a step on meta
tensors. It numbers the operations, and `DryQueues.launch_operation` returns the dependencies of an
operation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from moecore.base.torch_private import patch_attributes

Key = TypeVar("Key")


class Stream(Protocol):
    """The methods of `torch.cuda.Stream` that moecore calls."""

    def record_event(self) -> Any:
        """Return an event that completes after all operations launched on this stream so far."""

    def wait_event(self, event: Any) -> None:
        """Make later operations of this stream wait for an event."""

    def wait_stream(self, stream: Any) -> None:
        """Make later operations of this stream wait for all operations launched on `stream`."""

    def synchronize(self) -> None:
        """Block the host until all operations launched on this stream are complete."""


class DryStream:
    """Stream of a dry run (a step on meta): the operations that its next operation waits for."""

    def __init__(self, queues: DryQueues) -> None:
        self._queues = queues
        self.number, queues.num_streams = queues.num_streams, queues.num_streams + 1
        self.dependencies = frozenset[int]()  # last operation, and operations it waited for

    def record_event(self) -> frozenset[int]:
        """Return the numbers of the operations on which this stream's next operation depends."""
        return self.dependencies

    def wait_event(self, event: Any) -> None:
        """Add the operation numbers in `event` to the dependencies of the next operation."""
        self.dependencies |= event

    def wait_stream(self, stream: Any) -> None:
        """Add the dependencies of `stream` to the dependencies of the next operation."""
        self.dependencies |= stream.dependencies

    def synchronize(self) -> None:
        """Make the next launch by the host depend on all operations of this stream."""
        self._queues.host_dependencies |= self.dependencies


class DryEvent:
    """An event of a dry run (a step on meta tensors): the dependencies of its stream."""

    def __init__(self, queues: DryQueues) -> None:
        self._queues, self._dependencies = queues, frozenset[int]()

    def record(self) -> None:
        """Store the dependencies of the current stream."""
        self._dependencies = self._queues.current.dependencies

    def wait(self) -> None:
        """Add the stored dependencies to the dependencies of the current stream."""
        self._queues.current.dependencies |= self._dependencies


class DryQueues:
    """All streams of a dry run (a step on meta tensors), and the number of launched operations."""

    def __init__(self) -> None:
        self.num_streams = 0
        self.current = DryStream(self)  # the stream on which operations are launched
        self.host_dependencies = frozenset[int]()  # host waits since the last launch
        self.length = 0  # number of launched operations

    def launch_operation(self) -> tuple[frozenset[int], frozenset[int]]:
        """Launch an operation; return the operations that its stream and the host depend on."""
        dependencies = self.current.dependencies, self.host_dependencies
        self.current.dependencies, self.host_dependencies = frozenset({self.length}), frozenset()
        self.length += 1
        return dependencies


Event = torch.Event | DryEvent


class _DryState(threading.local):
    """The dry run of this thread."""

    queues: DryQueues | None = None


_dry = _DryState()


def use_dry_streams(queues: DryQueues) -> AbstractContextManager[None]:
    """Return a context in which this thread's stream functions use the streams of a dry run."""
    return patch_attributes(_dry, queues=queues)


def create_stream(device: torch.device | str, priority: int = 0) -> Stream | None:
    """Create a stream on a device; None on a CPU. `priority` is CUDA's: -1 is high."""
    if _dry.queues is not None:
        return DryStream(_dry.queues)
    device = torch.device(device)
    return torch.cuda.Stream(device, priority) if device.type == "cuda" else None


def create_event(device: torch.device | str) -> Event | None:
    """Create a CUDA event, which can be recorded repeatedly; None on a CPU."""
    if _dry.queues is not None:
        return DryEvent(_dry.queues)
    return torch.Event("cuda") if torch.device(device).type == "cuda" else None


def get_current_stream(device: torch.device | str) -> Stream | None:
    """Return the current stream of a device, or None on a CPU."""
    if _dry.queues is not None:
        return _dry.queues.current
    device = torch.device(device)
    if device.type != "cuda":
        return None
    stream = torch.accelerator.current_stream(device.index)
    return _get_cuda_stream(stream.stream_id, stream.device_index, stream.device_type)


@cache
def _get_cuda_stream(stream_id: int, device_index: int, device_type: int) -> torch.cuda.Stream:
    # A `torch.Stream` ignores `wait` of a `torch.cuda.Event` without an error, and does not equal a
    # `torch.cuda.Stream`. `torch.cuda.current_stream` makes the same object at each call.
    return torch.cuda.Stream(
        stream_id=stream_id, device_index=device_index, device_type=device_type
    )


class _OnStream:
    """A context like `torch.cuda.stream` for the current device, with less host time."""

    __slots__ = ("_before", "_stream")

    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._before = torch.accelerator.current_stream()
        torch.accelerator.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_stream(self._before)


def use_stream(stream: Stream | None) -> AbstractContextManager[Any]:
    """Return a context in which `stream` is the current stream; None changes nothing."""
    if stream is None:
        return nullcontext()
    if isinstance(stream, DryStream):
        assert _dry.queues is not None, "a dry stream outlived its dry run"
        return patch_attributes(_dry.queues, current=stream)
    return _OnStream(stream)  # type: ignore[arg-type]


def copy_to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to a device without a host sync; a tensor on this device is not copied."""
    # A copy from pageable memory blocks the host until earlier work of the stream is complete.
    if torch.device(device).type == "cuda" and x.device.type == "cpu":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


class HostCopyOfTensor:
    """An asynchronous copy of a tensor to the host; construction launches it, `read` waits."""

    def __init__(self, tensor: Tensor) -> None:
        self._numbers = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        self._numbers.copy_(tensor, non_blocking=True)
        stream = get_current_stream(tensor.device)
        self._event = None if stream is None else stream.record_event()

    def has_arrived(self) -> bool:
        """Whether the copy is complete. Must not be called in a dry run."""
        assert _dry.queues is None, "a dry run has no device that is done"
        return self._event is None or bool(self._event.query())

    def read(self) -> Tensor:
        """Block the host until the copy is complete; return the tensor on the host."""
        if _dry.queues is not None:
            _dry.queues.host_dependencies |= self._event or frozenset()
        elif self._event is not None:
            self._event.synchronize()
        return self._numbers


def start_host_reads(values: Mapping[Key, Any]) -> Callable[[], dict[Key, Any]]:
    """Start to copy one-element GPU tensors; return a function that waits for {key: value}."""
    on_gpu = {key: x for key, x in values.items() if isinstance(x, Tensor) and x.is_cuda}
    if not on_gpu:
        return lambda: dict(values)
    numbers = HostCopyOfTensor(torch.stack([x.double().view(()) for x in on_gpu.values()]))
    return lambda: {**values, **dict(zip(on_gpu, numbers.read().tolist(), strict=True))}


def is_capturing(stream: Stream | None) -> bool:
    """Whether a CUDA graph captures the current stream; False for None or a dry run's stream."""
    if stream is None or isinstance(stream, DryStream):
        return False
    return torch.cuda.is_current_stream_capturing()


def is_dry_run() -> bool:
    """Whether this thread runs a dry run, a step on meta tensors."""
    return _dry.queues is not None


def record_host_wait() -> None:
    """In a dry run, record that the host waits for the current stream; otherwise do nothing."""
    if _dry.queues is not None:
        _dry.queues.current.synchronize()
