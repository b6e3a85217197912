"""Where units of a model communicate: beside compute on a GPU, in line on a CPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from moecore._torch import tree_leaves, tree_map_only


class Mark:
    """A place behind what a stream has queued, for which others wait; on a CPU nothing is queued.

    Args:
        is_async: whether there are streams.
    """

    __slots__ = ("_event", "_is_set")

    def __init__(self, is_async: bool) -> None:
        self._event = torch.Event("cuda") if is_async else None
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


class Streams:
    """The streams of a model's units.

    Args:
        device_type: of the model.
    """

    def __init__(self, device_type: str) -> None:
        self._is_async = device_type == "cuda"
        self._gather = torch.cuda.Stream(priority=-1) if self._is_async else None
        self._reduce = torch.cuda.Stream(priority=-1) if self._is_async else None
        self._queued: list[torch.cuda.Stream] = []  # what nothing has waited for

    def mark(self) -> Mark:
        """Return a mark that is not set."""
        return Mark(self._is_async)

    def on_device(self, value: Any) -> Any:
        """Return a value with its tensors on the GPU, where units compute on one."""
        if not self._is_async or all(not _is_on_cpu(leaf) for leaf in tree_leaves(value)):
            return value
        return tree_map_only(Tensor, lambda x: x.cuda(non_blocking=True), value)

    def join(self) -> None:
        """Let the current stream wait for all communication."""
        for stream in self._queued:  # no other: it may be no part of a CUDA graph
            torch.cuda.current_stream().wait_stream(stream)
        self._queued.clear()

    def keep(self, tensor: Tensor) -> None:
        """Keep a tensor's memory until the reductions that are queued have run."""
        if self._reduce is not None:
            tensor.record_stream(self._reduce)

    def start(self) -> None:
        """Let gathers wait for the current stream, which has written the shards."""
        if self._gather is not None:
            self._follow(self._gather)

    def gathering(self) -> AbstractContextManager[Any]:
        """Queue what follows beside compute, on the stream of gathers."""
        return nullcontext() if self._gather is None else torch.cuda.stream(self._gather)

    def reducing(self) -> AbstractContextManager[Any]:
        """Queue what follows behind compute, on the stream of reductions."""
        if self._reduce is None:
            return nullcontext()
        self._follow(self._reduce)
        return torch.cuda.stream(self._reduce)

    def _follow(self, stream: torch.cuda.Stream) -> None:
        stream.wait_stream(torch.cuda.current_stream())
        if stream not in self._queued:
            self._queued.append(stream)


def _is_on_cpu(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.device.type == "cpu"
