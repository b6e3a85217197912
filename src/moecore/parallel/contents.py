"""Contents of device tensors, compared between ranks without a wait for the device.

    forward n      checksums -> MAX all-reduce of [sums, ~sums], launched and not waited for
    forward n + 1  copy of the result to the host, launched and not waited for
    a later one    the copy has arrived: the host compares, and the ranks raise together

`TrainStep` reads the results on the device when it clips, so a clipped step with a difference is
skipped on every rank before any rank knows of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.base.rank_checks import checksum
from moecore.base.streams import ToHost, current_stream, is_capturing


@dataclass(kw_only=True, slots=True)
class _ContentsCheck:
    """The contents of one forward."""

    names: tuple[str, ...]
    bounds: Tensor  # int64 [2, names]: the largest checksum, and the largest complement of one
    work: Any  # the all-reduce; None after it was waited for
    copy: ToHost | None = None

    def start_copy(self) -> None:
        """Start to copy the result to the host; the stream waits for it, and the host does not."""
        if self.work is not None:
            self.work.wait()
            self.work, self.copy = None, ToHost(self.bounds)

    def is_different(self) -> Tensor:
        """Return bool [names] on the device."""
        self.start_copy()
        return self.bounds[0] != ~self.bounds[1]

    def problem(self) -> str | None:
        """Return an error's beginning if contents differ. It waits for the copy."""
        self.start_copy()
        assert self.copy is not None, "it was started"
        largest, complement = self.copy.read()
        names = [self.names[i] for i in (largest != ~complement).nonzero().flatten().tolist()]
        if not names:
            return None
        suffix = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return (
            f"contents of {names[0]}{suffix} in an earlier forward (its step is skipped if "
            "TrainStep clips it) must be the same"
        )


class Contents:
    """The comparisons whose results the host has not read."""

    def __init__(self) -> None:
        self._unread: list[_ContentsCheck] = []
        self._of_step: list[_ContentsCheck] = []

    def compare(self, tensors: Mapping[str, Tensor], groups: Sequence[dist.ProcessGroup]) -> None:
        """Launch a comparison of tensors. Collective; every rank names the same tensors."""
        if not groups or _captures(tensors):  # a replay would compare with nobody
            return
        with torch.no_grad():
            sums = torch.stack([checksum(x) for x in tensors.values()])
            bounds = torch.stack([sums, ~sums])
        for group in groups[:-1]:
            dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
        work = dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=groups[-1], async_op=True)
        comparison = _ContentsCheck(names=tuple(tensors), bounds=bounds, work=work)
        self._unread.append(comparison)
        if torch.is_grad_enabled():  # no step ends a forward without gradients
            self._of_step.append(comparison)

    def has_difference(self) -> bool:
        """Return whether contents of an earlier forward differ, as far as the host can see."""
        if _captures({str(i): check.bounds for i, check in enumerate(self._unread)}):
            return False
        for check in self._unread:
            check.start_copy()
        while self._unread:
            copy = self._unread[0].copy
            if copy is None or not copy.has_arrived():
                return False
            if self._unread[0].problem() is not None:
                return True
            self._unread.pop(0)
        return False

    def wait(self) -> str | None:
        """Return an error's beginning if contents of any earlier forward differ. Host sync."""
        comparisons, self._unread = self._unread, []
        problems = [check.problem() for check in comparisons]
        problem = next((check for check in problems if check is not None), None)
        if problem is not None:
            self._of_step = []  # the caller drops this step
        return problem

    def drop_step(self) -> None:
        """Forget which comparisons belong to the step; their errors are still raised."""
        self._of_step = []

    def end_step(self) -> Tensor | None:
        """Return whether contents of this step differ, a bool on the device; None = unknown."""
        comparisons, self._of_step = self._of_step, []
        if not comparisons:
            return None
        return torch.cat([check.is_different() for check in comparisons]).any()


def _captures(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether the work on tensors goes into a CUDA graph."""
    devices = {x.device for x in tensors.values()}
    return any(is_capturing(current_stream(device)) for device in devices)
