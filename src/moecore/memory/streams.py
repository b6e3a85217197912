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
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from moecore.kernels.rows.used import copy_used

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
        """Start the copy; a CPU ends it, and on meta there is none."""
        if self.target.is_meta:
            return
        if self.used is None:
            stream.copy(self.target, self.source)
            return
        num_rows, row_bytes = self.used
        with stream.running():
            copy_used(self.target.view(-1, row_bytes), self.source.view(-1, row_bytes), num_rows)


class Mark:
    """A point in a stream's work.

    Args:
        stream: whose work until now; None = that of a CPU, which is done.
        in_capture: whether that goes into a CUDA graph; None = if the current stream's does.
    """

    __slots__ = ("_event", "_in_capture", "_passed")

    def __init__(self, stream: torch.cuda.Stream | None, in_capture: bool | None = None) -> None:
        self._event: torch.cuda.Event | None = None
        self._passed = stream  # the last stream that goes on only behind it
        if stream is None:
            in_capture = False
        elif in_capture is None:
            in_capture = torch.cuda.is_current_stream_capturing()
        self._in_capture = in_capture
        if stream is not None:
            self._event = stream.record_event()

    def hold(self, stream: torch.cuda.Stream | None) -> None:
        """Let a stream go on only when the point has passed."""
        if self._event is None or stream is None or stream == self._passed:
            return
        if self._in_capture == torch.cuda.is_current_stream_capturing():
            stream.wait_event(self._event)
            self._passed = stream

    def later(self, stream: torch.cuda.Stream | None) -> Mark:
        """Return where a stream that waits for this point is now."""
        return Mark(stream, self._in_capture)


class CopyStream:
    """Copies in order, beside the work of a GPU; on a CPU each is done at once.

    Args:
        device: on one side of every copy.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        is_gpu = device.type == "cuda"
        # The first one's next work comes after all copies so far.
        self._turns = [torch.cuda.Stream(device) for _ in range(2)] if is_gpu else []

    @property
    def next(self) -> torch.cuda.Stream | None:
        """The stream of the next copy; None of a CPU."""
        return self._turns[0] if self._turns else None

    def running(self) -> AbstractContextManager[Any]:
        """Return a context in which the current stream is that of the next copy."""
        return torch.cuda.stream(self._turns[0]) if self._turns else nullcontext()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy, without a wait where the host's side is pinned.

        Args:
            target: contiguous.
            source: likewise, of the same shape and dtype.
        """
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
            self._turns[0].wait_stream(torch.cuda.current_stream(self._device))

    def mark(self) -> torch.cuda.Event | None:
        """Return an event after all copies so far."""
        return self._turns[0].record_event() if self._turns else None

    def hold(self, event: torch.cuda.Event | None) -> None:
        """Let the current stream wait for an event; the host does not."""
        if event is not None and self._turns:
            torch.cuda.current_stream(self._device).wait_event(event)

    def is_capturing(self) -> bool:
        """Whether the current stream's work goes into a CUDA graph."""
        return bool(self._turns) and torch.cuda.is_current_stream_capturing()

    def synchronize(self) -> None:
        """Wait for all copies so far. Host sync."""
        for stream in self._turns:
            stream.synchronize()


class Streams:
    """The copies of activations of one device: out of it beside those into it.

    Args:
        device: a GPU or the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._out, self._back = CopyStream(device), CopyStream(device)

    def current(self) -> torch.cuda.Stream | None:
        """Return the current stream of the device; None of a CPU."""
        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

    def is_capturing(self) -> bool:
        """Whether the current stream's work goes into a CUDA graph."""
        return self._out.is_capturing()

    def copy_out(self, jobs: Iterable[Job], *after: Mark) -> Mark:
        """Copy away what the current stream has made so far; return when it is there.

        Args:
            jobs: in order.
            after: what the copies come after, besides.
        """
        return self._copy(self._out, jobs, after)

    def copy_back(self, jobs: Iterable[Job], *after: Mark) -> Mark:
        """Copy back into what the current stream has allocated; return when.

        Args:
            jobs: of what was copied away.
            after: when that was there.
        """
        return self._copy(self._back, jobs, after)

    def _copy(self, stream: CopyStream, jobs: Iterable[Job], after: tuple[Mark, ...]) -> Mark:
        """Copy behind the current stream, which has waited for most of `after` anyway."""
        current = self.current()
        for mark in after:
            mark.hold(current)
        here = Mark(current)
        here.hold(stream.next)
        for job in jobs:
            job.start(stream)
        return here.later(stream.next)

    def synchronize(self) -> None:
        """Wait for both. Host sync."""
        self._out.synchronize()
        self._back.synchronize()
