"""Copies between a device and host memory beside its work.

Only streams wait, on events; the host never does. On a CPU a copy is done when it returns.

Note "turns": a copy engine works off all that one stream has queued before it takes a copy of the
next stream, however small, such as the few bytes of a list of pointers. So large copies to the
device go in pieces to two streams in turns, each after the one before, and what comes between waits
for one piece: docs/findings/torch.md.

Note "capture": a CUDA graph may hold these copies. It records events anew at every replay, so one
from before its capture means nothing in it, nor one of the capture outside. No wait is needed
there: the device is idle when a capture begins.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from moecore.base.streams import Stream, current_stream, is_capturing, new_stream, on_stream
from moecore.kernels.common import record_launch
from moecore.kernels.rows.move import copy_used

PIECE_BYTES = 8 * 2**20  # 150 us


class Job(Protocol):
    """What a stream of copies is given."""

    def start(self, stream: CopyStream) -> None:
        """Start a copy on it; a CPU ends the copy."""
        ...


class Transfer(NamedTuple):
    """A copy of bytes.

    Attributes:
        target: uint8, 1-dim.
        source: likewise, of the same length.
        used: None, or how many rows of how many bytes are in use.
    """

    target: Tensor
    source: Tensor
    used: tuple[Tensor, int] | None = None

    def start(self, stream: CopyStream) -> None:
        """Start the copy; a CPU ends it."""
        if self.used is None or self.target.is_meta:
            stream.copy(self.target, self.source)
            return
        num_rows, row_bytes = self.used
        with stream.running():
            copy_used(self.target.view(-1, row_bytes), self.source.view(-1, row_bytes), num_rows)


class CopyMark:
    """A point in a stream's work.

    Args:
        stream: whose work until now; None = that of a CPU, which is done.
        in_capture: whether that goes into a CUDA graph; None = if the current stream's does.
    """

    __slots__ = ("_event", "_in_capture", "_passed")

    def __init__(self, stream: Stream | None, in_capture: bool | None = None) -> None:
        self._passed = stream  # the last stream that goes on only behind it
        self._in_capture = is_capturing(stream) if in_capture is None else in_capture
        self._event = None if stream is None else stream.record_event()

    def hold(self, stream: Stream | None) -> None:
        """Let a stream go on only when the point has passed."""
        if self._event is None or stream is None or stream == self._passed:
            return
        if self._in_capture == is_capturing(stream):
            stream.wait_event(self._event)
            self._passed = stream

    def later(self, stream: Stream | None) -> CopyMark:
        """Return where a stream that waits for this point is now."""
        return CopyMark(stream, self._in_capture)


class CopyStream:
    """Copies in order, beside the work of a GPU; on a CPU each is done at once.

    Args:
        device: on one side of every copy.

    Attributes:
        name: of its copies in a dry run.
    """

    def __init__(self, device: torch.device, name: str = "copy to device") -> None:
        self._device, self.name = device, name
        # The first one's next work comes after all copies so far.
        turns = (new_stream(device) for _ in range(2))
        self._turns = [stream for stream in turns if stream is not None]

    @property
    def next(self) -> Stream | None:
        """The stream of the next copy; None of a CPU."""
        return self._turns[0] if self._turns else None

    def running(self) -> AbstractContextManager[Any]:
        """Return a context in which the current stream is that of the next copy."""
        return on_stream(self.next)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy, without a wait where the host's side is pinned; on meta it is written down.

        Args:
            source: likewise, of the same shape and dtype.
        """
        if target.is_meta:
            with self.running():
                record_launch(self.name, target)
            return
        if not target.is_cuda or target.nbytes <= PIECE_BYTES:
            with torch.no_grad(), self.running():
                target.copy_(source, non_blocking=bool(self._turns))
            return
        numel = PIECE_BYTES // target.element_size()
        pieces = zip(target.view(-1).split(numel), source.view(-1).split(numel), strict=True)
        for piece, of_source in pieces:
            with torch.no_grad(), self.running():
                piece.copy_(of_source, non_blocking=True)
            self._turns[1].wait_event(self._turns[0].record_event())
            self._turns.reverse()

    def follow(self) -> None:
        """Let later copies wait for what the current stream has been given so far."""
        if self._turns:
            self._turns[0].wait_stream(current_stream(self._device))

    def mark(self) -> Any:
        """Return an event after all copies so far; None of a CPU."""
        return self._turns[0].record_event() if self._turns else None

    def hold(self, event: Any) -> None:
        """Let the current stream wait for an event; the host does not."""
        current = current_stream(self._device)
        if event is not None and current is not None:
            current.wait_event(event)

    def is_capturing(self) -> bool:
        """Whether the current stream's work goes into a CUDA graph."""
        return is_capturing(self.next)

    def synchronize(self) -> None:
        """Wait for all copies so far. Host sync."""
        for stream in self._turns:
            stream.synchronize()


class CopyStreams:
    """The copies of activations of one device: out of it beside those into it.

    Args:
        device: a GPU or the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._out = CopyStream(device, "copy to host")
        self._back = CopyStream(device, "copy to device")

    def current(self) -> Stream | None:
        """Return the current stream of the device; None of a CPU."""
        return current_stream(self.device)

    def is_capturing(self) -> bool:
        """Whether the current stream's work goes into a CUDA graph."""
        return self._out.is_capturing()

    def copy_out(self, jobs: Iterable[Job], *after: CopyMark) -> CopyMark:
        """Copy away what the current stream has made so far; return when it is there.

        Args:
            after: what the copies come after, besides.
        """
        return self._copy(self._out, jobs, after)

    def copy_back(self, jobs: Iterable[Job], *after: CopyMark) -> CopyMark:
        """Copy back into what the current stream has allocated; return when.

        Args:
            jobs: of what was copied away.
        """
        return self._copy(self._back, jobs, after)

    def _copy(
        self, stream: CopyStream, jobs: Iterable[Job], after: tuple[CopyMark, ...]
    ) -> CopyMark:
        """Copy behind the current stream, which has waited for most of `after` anyway."""
        current = self.current()
        for mark in after:
            mark.hold(current)
        here = CopyMark(current)
        here.hold(stream.next)
        for job in jobs:
            job.start(stream)
        return here.later(stream.next)

    def synchronize(self) -> None:
        """Wait for both. Host sync."""
        self._out.synchronize()
        self._back.synchronize()
