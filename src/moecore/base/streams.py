"""Streams of a GPU; of a dry run, which writes down what waits for what; a CPU has none.

What is queued on a stream runs behind what it has held. In a dry run the recorder gives each piece
of work a number, and asks which ones it comes behind.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

Key = TypeVar("Key")


class Event(Protocol):
    """What `torch.Event` does for this package."""

    def record(self) -> None:
        """Be where the current stream's work is now."""

    def wait(self) -> None:
        """Let the current stream go on behind it."""


class Stream(Protocol):
    """What `torch.cuda.Stream` does for this package."""

    def record_event(self) -> Any:
        """Return where its work is now."""

    def wait_event(self, event: Any) -> None:
        """Go on behind a point of another."""

    def wait_stream(self, stream: Any) -> None:
        """Go on behind what another has been given so far."""

    def synchronize(self) -> None:
        """Let the host wait for all of it."""


class DryStream:
    """A stream whose work is numbers: the last ones it comes behind."""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self.number, queues.num_streams = queues.num_streams, queues.num_streams + 1
        self.dependencies = frozenset[int]()  # what it has waited for, and its own last work

    def record_event(self) -> frozenset[int]:
        """Return what it comes behind."""
        return self.dependencies

    def wait_event(self, event: frozenset[int]) -> None:
        """Come behind these, too."""
        self.dependencies |= event

    def wait_stream(self, stream: DryStream) -> None:
        """Come behind what another does."""
        self.dependencies |= stream.dependencies

    def synchronize(self) -> None:
        """Let what the host queues from now on come behind all of it."""
        self._queues.host_dependencies |= self.dependencies


class DryEvent:
    """An event of a dry run."""

    def __init__(self, queues: Queues) -> None:
        self._queues, self._dependencies = queues, frozenset[int]()

    def record(self) -> None:
        """Be where the current stream is now."""
        self._dependencies = self._queues.current.dependencies

    def wait(self) -> None:
        """Let the current stream come behind it."""
        self._queues.current.dependencies |= self._dependencies


class Queues:
    """The streams of a dry run."""

    def __init__(self) -> None:
        self.num_streams = 0
        self.current = DryStream(self)  # gets what is queued
        self.host_dependencies = frozenset[int]()  # waited for since the host queued something
        self.length = 0  # how much has been queued

    def put(self) -> tuple[frozenset[int], frozenset[int]]:
        """Queue work, numbered in turn; return what it comes behind, and what its launch does."""
        dependencies = self.current.dependencies, self.host_dependencies
        self.current.dependencies, self.host_dependencies = frozenset({self.length}), frozenset()
        self.length += 1
        return dependencies

    @contextmanager
    def on(self, stream: DryStream) -> Iterator[None]:
        """Within, a stream is the current one."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class _Dry(threading.local):
    """The dry run of this thread."""

    queues: Queues | None = None


_dry = _Dry()


@contextmanager
def dry_streams(queues: Queues) -> Iterator[None]:
    """Within, streams of this thread are those of a dry run."""
    before, _dry.queues = _dry.queues, queues
    try:
        yield
    finally:
        _dry.queues = before


def new_stream(device: torch.device | str, priority: int = 0) -> Stream | None:
    """Return a stream of a device, -1 = before others; None of a CPU."""
    if _dry.queues is not None:
        return DryStream(_dry.queues)
    device = torch.device(device)
    return torch.cuda.Stream(device, priority) if device.type == "cuda" else None


def new_event(device: torch.device | str) -> Event | None:
    """Return an event of a device that may be recorded again and again; None of a CPU."""
    if _dry.queues is not None:
        return DryEvent(_dry.queues)
    return torch.Event("cuda") if torch.device(device).type == "cuda" else None


def current_stream(device: torch.device | str) -> Stream | None:
    """Return the stream that gets a device's work now; None of a CPU."""
    if _dry.queues is not None:
        return _dry.queues.current
    device = torch.device(device)
    if device.type != "cuda":
        return None
    stream = torch.accelerator.current_stream(device.index)
    return _as_cuda(stream.stream_id, stream.device_index, stream.device_type)


@cache
def _as_cuda(stream_id: int, device_index: int, device_type: int) -> torch.cuda.Stream:
    # A `torch.Stream` would not wait for a `torch.cuda.Event`, without a word, nor equal a
    # `torch.cuda.Stream`. It is what `torch.cuda.current_stream` makes anew.
    return torch.cuda.Stream(
        stream_id=stream_id, device_index=device_index, device_type=device_type
    )


class _OnStream:
    """`torch.cuda.stream` for the current device's streams, with less work for the host."""

    __slots__ = ("_before", "_stream")

    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._before = torch.accelerator.current_stream()
        torch.accelerator.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_stream(self._before)


def on_stream(stream: Stream | None) -> AbstractContextManager[Any]:
    """Return a context in which a stream is the current one; None = as it is."""
    if stream is None:
        return nullcontext()
    if isinstance(stream, DryStream):
        assert _dry.queues is not None, "a dry stream outlived its dry run"
        return _dry.queues.on(stream)
    return _OnStream(stream)  # type: ignore[arg-type]


def to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """Return a tensor on a device; the host waits for nothing."""
    # A copy to a GPU from memory that is not pinned waits for what the stream has held before.
    if torch.device(device).type == "cuda" and x.device.type == "cpu":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


class ToHost:
    """Numbers on their way to the host, behind what the current stream has held before."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = torch.empty_like(numbers, device="cpu", pin_memory=numbers.is_cuda)
        self._numbers.copy_(numbers, non_blocking=True)
        stream = current_stream(numbers.device)
        self._event = None if stream is None else stream.record_event()

    def has_arrived(self) -> bool:
        """Return whether `read` would not wait. No dry run asks."""
        assert _dry.queues is None, "a dry run has no device that is done"
        return self._event is None or bool(self._event.query())

    def read(self) -> Tensor:
        """Wait for them, and for nothing that was queued behind them; return them."""
        if _dry.queues is not None:
            _dry.queues.host_dependencies |= self._event or frozenset()
        elif self._event is not None:
            self._event.synchronize()
        return self._numbers


def start_reads(values: Mapping[Key, Any]) -> Callable[[], dict[Key, Any]]:
    """Start to copy a GPU's scalars among values to the host; return the wait for all values."""
    on_gpu = {key: x for key, x in values.items() if isinstance(x, Tensor) and x.is_cuda}
    if not on_gpu:
        return lambda: dict(values)
    numbers = ToHost(torch.stack([x.double().view(()) for x in on_gpu.values()]))
    return lambda: {**values, **dict(zip(on_gpu, numbers.read().tolist(), strict=True))}


def is_capturing(stream: Stream | None) -> bool:
    """Return whether the current stream's work goes into a CUDA graph."""
    if stream is None or isinstance(stream, DryStream):
        return False
    return torch.cuda.is_current_stream_capturing()


def is_dry() -> bool:
    """Return whether this thread is in a dry run."""
    return _dry.queues is not None


def wait_on_host() -> None:
    """In a dry run: let the host wait for the current stream, as a read of its results does."""
    if _dry.queues is not None:
        _dry.queues.current.synchronize()
