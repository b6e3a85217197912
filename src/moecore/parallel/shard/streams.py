"""Where units of a model communicate: beside compute on a GPU, in line on a CPU."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from moecore.base.streams import Stream, current_stream, new_event, new_stream, on_stream
from moecore.base.torch_names import tree_leaves, tree_map_only


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
        self._device_type = device_type
        self._gather = new_stream(device_type, priority=-1)
        self._reduce = new_stream(device_type, priority=-1)
        self._queued: list[Stream] = []  # what nothing has waited for

    def mark(self) -> StreamMark:
        """Return a mark that is not set."""
        return StreamMark(self._device_type)

    def on_device(self, value: Any) -> Any:
        """Return a value with its tensors on the GPU, where units compute on one."""
        if self._device_type != "cuda" or all(not _is_on_cpu(leaf) for leaf in tree_leaves(value)):
            return value
        return tree_map_only(Tensor, lambda x: x.cuda(non_blocking=True), value)

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
        stream = current_stream(self._device_type)
        assert stream is not None, "only a GPU has others"
        return stream

    def _follow(self, stream: Stream) -> None:
        stream.wait_stream(self._current())
        if stream not in self._queued:
            self._queued.append(stream)


def _is_on_cpu(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.device.type == "cpu"
