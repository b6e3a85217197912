"""Copies between a device and host memory beside its work: one stream out of it, one into it.

Only streams wait, on events; the host never does. On a CPU a copy is done when it returns.

Note "capture": a CUDA graph may hold these copies. It records events anew at every replay, so one
from before its capture means nothing in it, nor one of the capture outside. No wait is needed
there: the device is idle when a capture begins.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from moecore.kernels.rows.used import copy_used


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

    def start(self) -> None:
        """Start the copy on the current stream; a CPU ends it."""
        if self.used is None:
            self.target.copy_(self.source, non_blocking=True)
            return
        num_rows, row_bytes = self.used
        copy_used(self.target.view(-1, row_bytes), self.source.view(-1, row_bytes), num_rows)


class Mark:
    """A point in a stream's work.

    Args:
        stream: whose work until now; None = that of a CPU, which is done.
    """

    __slots__ = ("_event", "_in_capture")

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._event: torch.cuda.Event | None = None
        self._in_capture = False
        if stream is not None:
            self._in_capture = torch.cuda.is_current_stream_capturing()
            self._event = stream.record_event()

    def hold(self, stream: torch.cuda.Stream | None) -> None:
        """Let a stream go on only when the point has passed."""
        if self._event is None or stream is None:
            return
        if self._in_capture == torch.cuda.is_current_stream_capturing():
            stream.wait_event(self._event)


class Streams:
    """The two streams of copies of one device.

    Args:
        device: a GPU or the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_gpu = device.type == "cuda"
        self._out = torch.cuda.Stream(device) if self.is_gpu else None
        self._back = torch.cuda.Stream(device) if self.is_gpu else None

    def current(self) -> torch.cuda.Stream | None:
        """Return the current stream of the device; None of a CPU."""
        return torch.cuda.current_stream(self.device) if self.is_gpu else None

    def is_capturing(self) -> bool:
        """Whether the current stream's work goes into a CUDA graph."""
        return self.is_gpu and torch.cuda.is_current_stream_capturing()

    def copy_out(self, transfers: Iterable[Transfer]) -> Mark:
        """Copy to host memory what the current stream has made so far; return when it is there."""
        return _copy(self._out, Mark(self.current()), transfers)

    def copy_back(self, transfers: Iterable[Transfer], out: Mark) -> Mark:
        """Copy from host memory into what the current stream has allocated; return when.

        Args:
            transfers: from host memory.
            out: when the host memory was written.
        """
        here = Mark(self.current())
        out.hold(self._back)
        return _copy(self._back, here, transfers)

    def synchronize(self) -> None:
        """Wait for both. Host sync."""
        for stream in (self._out, self._back):
            if stream is not None:
                stream.synchronize()


def _copy(stream: torch.cuda.Stream | None, after: Mark, transfers: Iterable[Transfer]) -> Mark:
    if stream is None:
        for transfer in transfers:
            transfer.start()
        return Mark(None)
    after.hold(stream)
    with torch.cuda.stream(stream), torch.no_grad():
        for transfer in transfers:
            transfer.start()
        return Mark(stream)
