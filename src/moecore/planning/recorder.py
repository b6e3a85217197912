"""Follows what a program allocates on meta, and writes down what a GPU would work on.

    the host's code of a step, on meta -> allocations -> level, peak
                                       -> kernels, products, collectives -> Work

Storages are those of tensors that are no subclass: a DTensor's are its rank's part. Sizes are
rounded as torch's allocator rounds them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from moecore.base.streams import Queues, wait_on_host
from moecore.base.torch_names import (
    DispatchMode,
    is_host_memory,
    phases,
    storage_key,
    tree_map_only,
)
from moecore.kernels.ops import PLAIN_TYPES
from moecore.planning.gpus import NODE
from moecore.planning.operations import work_of_collective, work_of_kernel, work_of_operation
from moecore.planning.pieces import Pass, Start
from moecore.planning.work import Queued, Work
from moecore.train.memory.on_meta import tensors_of

ALIGNMENT = 512  # bytes: what torch's allocator rounds to
FOREACH = "foreach"


class Recorder(DispatchMode):
    """The mode; within `launches_on_meta`, with `launched` for it.

    Attributes:
        level: bytes that are allocated.
        peak: most of them since `mark`.
        queues: the streams.
        queued: what ran since `mark`, in the order in which the host queued it.
        starts: where parts of the model have begun since then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.level = self.peak = self._top = self._held = 0
        self.queues = Queues()
        self.queued: list[Queued] = []
        self.starts: list[Start] = []
        self._first = 0
        self._sizes: dict[int, int] = {}

    def mark(self) -> None:
        """Begin anew: nothing is queued, and the peak is what is allocated now."""
        self.peak, self.queued, self._first = self.level, [], self.queues.length
        self.starts, self._top, self._held = [], self.level, self.level

    def begin(self, of: Pass, part: str) -> None:
        """Write down that a part of the model begins a pass."""
        level = self.level if self.starts else self._held
        self.end()
        self.starts.append(Start(of, part, len(self.queued), level, level))

    def end(self) -> None:
        """Write down how much the last of these parts had at most."""
        if self.starts:
            self.starts[-1] = self.starts[-1]._replace(top=self._top)
            self._top = self.level

    def take(self, tensor: Tensor) -> bool:
        """Count the memory of a tensor on meta, once; return whether it is new."""
        key = storage_key(tensor)
        if key in self._sizes:
            return False
        if is_host_memory():
            self._sizes[key] = 0
            return False
        storage = tensor.untyped_storage()
        self._sizes[key] = size = -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
        self.level += size
        self.peak, self._top = max(self.peak, self.level), max(self._top, self.level)
        weakref.finalize(storage, self._free, key)
        return True

    def _free(self, key: int) -> None:
        self.level -= self._sizes.pop(key)

    def launched(self, name: str, args: Sequence[Any]) -> None:
        """Write down a kernel of this package."""
        self._queue(work_of_kernel(name, args))

    def _queue(self, work: Work, node_ranks: int = 0) -> None:
        behind, host_behind = (self._since(numbers) for numbers in self.queues.put())
        stream = self.queues.current.number
        self.queued.append(Queued(work, stream, behind, host_behind, node_ranks, phases()))

    def _since(self, numbers: frozenset[int]) -> frozenset[int]:
        """Return what was queued since `mark`, counted from there; all else has ended."""
        return frozenset(n - self._first for n in numbers if n >= self._first)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if DTensor in types:  # it comes back with this rank's parts
            return NotImplemented
        kwargs = kwargs or {}
        if func.is_view:  # half of what a step calls
            return func(*args, **kwargs)
        namespace, name, changes = _called(func)
        if namespace == "c10d":
            return self._communicate(func, name, args, kwargs)
        if name == "local_scalar_dense" and args[0].is_meta:
            wait_on_host()
            return 0  # what a host reads: no gradient overflows, and nothing is skipped
        is_foreach = changes and name.startswith(FOREACH)  # whose form on meta reads values
        out = None if is_foreach else func(*args, **kwargs)
        for tensor in tensors_of(out):
            if type(tensor) in PLAIN_TYPES and tensor.is_meta:
                changes |= self.take(tensor)
        work = work_of_operation(name, args, kwargs, out, changes=changes)
        if work is not None:
            self._queue(work)
        return out

    def _communicate(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Write a collective down; ranks that are not there get nothing."""
        groups = [x for x in args if isinstance(x, torch.ScriptObject)]
        ranks = max((_ranks(x) for x in groups), key=len, default=[dist.get_rank()])
        node = dist.get_rank() // NODE
        here = [rank for rank in ranks if rank // NODE == node]
        self._queue(work_of_collective(name, args, len(ranks)), len(here))
        args, kwargs = tree_map_only(Tensor, lambda _: torch.empty(0), (args, kwargs))
        args = [[] if isinstance(x, list) and x and isinstance(x[0], int) else x for x in args]
        return func(*args, **kwargs)


@cache
def _called(func: Any) -> tuple[str, str, bool]:
    """Return an operation's namespace, its name without underscores, whether it changes memory."""
    namespace, name = func.name().split("::")
    name, _, overload = name.lstrip("_").partition(".")
    return namespace, name, name.endswith("_") or overload.endswith("out")


def _ranks(value: Any) -> list[int]:
    """Return the ranks of a process group; none of anything else."""
    try:
        return dist.get_process_group_ranks(dist.ProcessGroup.unbox(value))
    except RuntimeError:
        return []
