"""Streams that copy between a device and host memory while the device computes.

Streams wait for each other on events; the host never waits. On a CPU each copy is done when its
call returns.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moecore.base.streams import Stream, create_stream, get_current_stream, is_capturing, use_stream
from moecore.kernels.meta import record_launch

PIECE_BYTES = 8 * 2**20  # 150 us


class CopyJob(NamedTuple):
    """A copy to launch on a `CopyStream`: `run(target, source)`; None = copy all bytes."""

    target: Any
    source: Any
    run: Callable[[Any, Any], None] | None = None

    def launch_on(self, stream: "CopyStream") -> None:
        """Launch the copy on the stream; on a CPU the copy is complete at return."""
        if self.run is None:
            stream.copy(self.target, self.source)
            return
        with stream.use_next_stream():
            self.run(self.target, self.source)


class CopyEvent:
    """An event on a stream, recorded after the work launched so far; on a CPU it does nothing.

    `in_capture` = whether the event is recorded in a CUDA graph; None = query the stream.
    """

    __slots__ = ("_event", "_passed", "in_capture")

    def __init__(self, stream: Stream | None, in_capture: bool | None = None) -> None:
        self._passed = stream  # the last stream that waits for this point
        self.in_capture = is_capturing(stream) if in_capture is None else in_capture
        self._event = None if stream is None else stream.record_event()

    def make_stream_wait(self, stream: Stream | None) -> None:
        """Make a stream wait for the recorded event; the host does not wait."""
        if self._event is None or stream is None or stream == self._passed:
            return
        # A CUDA graph records its events anew at every replay, so an event is valid only on its own
        # side of a capture. No wait is needed across: the device is idle when a capture begins.
        if self.in_capture == is_capturing(stream):
            stream.wait_event(self._event)
            self._passed = stream

    def synchronize(self) -> None:
        """Make the host wait for the recorded event. Host sync."""
        if self._event is not None:
            self._event.synchronize()


class CopyStream:
    """Runs copies in order on side streams of a device; `name` labels the copies in a dry run."""

    def __init__(self, device: torch.device, name: str = "copy to device") -> None:
        self.device, self.name = device, name
        # Two streams in turns; the next work of the first one comes after all copies so far.
        turns = (create_stream(device) for _ in range(2))
        self._turns = [stream for stream in turns if stream is not None]

    @property
    def next_stream(self) -> Stream | None:
        """The stream of the next copy; None on a CPU."""
        return self._turns[0] if self._turns else None

    def use_next_stream(self) -> AbstractContextManager[Any]:
        """Return a context in which the stream of the next copy is the current stream."""
        return use_stream(self.next_stream)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Start to copy `source` to `target`, of equal shape and dtype, and contiguous if large."""
        if target.is_meta:
            with self.use_next_stream():
                record_launch(self.name, target)
            return
        if not target.is_cuda or target.nbytes <= PIECE_BYTES:
            with torch.no_grad(), self.use_next_stream():
                target.copy_(source, non_blocking=bool(self._turns))
            return
        # A copy engine finishes all copies that one stream has queued before it takes a copy of
        # another stream, even of a few bytes, such as a list of pointers. So large copies to the
        # device are cut into pieces, which two streams run in turns, each after the piece before:
        # another stream's copy then waits for one piece (docs/findings.md#streams-and-attention).
        numel = PIECE_BYTES // target.element_size()
        pieces = zip(target.view(-1).split(numel), source.view(-1).split(numel), strict=True)
        for piece, of_source in pieces:
            with torch.no_grad(), self.use_next_stream():
                piece.copy_(of_source, non_blocking=True)
            self._turns[1].wait_event(self._turns[0].record_event())
            self._turns.reverse()

    def wait_for_current_stream(self) -> None:
        """Make later copies wait for the work that is queued on the current stream now."""
        if self._turns:
            self._turns[0].wait_stream(get_current_stream(self.device))

    def start_copies(self, jobs: Iterable[CopyJob], *dependencies: CopyEvent) -> CopyEvent:
        """Launch copies after the current stream's work and `dependencies`; return end event."""
        current = get_current_stream(self.device)
        # The current stream waits, too: it has already waited for most of these events.
        for event in dependencies:
            event.make_stream_wait(current)
        start_event = CopyEvent(current)
        start_event.make_stream_wait(self.next_stream)
        for job in jobs:
            job.launch_on(self)
        return CopyEvent(self.next_stream, start_event.in_capture)

    def record_event(self) -> CopyEvent:
        """Return an event that is complete when all launched copies are done."""
        return CopyEvent(self.next_stream)

    def wait_for_event(self, event: CopyEvent) -> None:
        """Make the current stream wait for an event; the host does not wait."""
        event.make_stream_wait(get_current_stream(self.device))

    def is_capturing(self) -> bool:
        """Whether the current stream's work is captured in a CUDA graph."""
        return is_capturing(self.next_stream)

    def synchronize(self) -> None:
        """Wait for all started copies. Host sync."""
        for stream in self._turns:
            stream.synchronize()


class CopyStreams:
    """Two streams that overlap: one copies activations to the host, and one copies them back."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.out = CopyStream(device, "copy to host")
        self.back = CopyStream(device, "copy to device")

    def get_current_stream(self) -> Stream | None:
        """Return the current stream of the device; None on a CPU."""
        return get_current_stream(self.device)

    def is_capturing(self) -> bool:
        """Whether the current stream's work is captured in a CUDA graph."""
        return self.out.is_capturing()

    def synchronize(self) -> None:
        """Wait for all started copies in both directions. Host sync."""
        self.out.synchronize()
        self.back.synchronize()
