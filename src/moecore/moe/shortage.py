"""Rows that find no place in buffers of a static capacity, and what becomes of their step.

No forward or backward waits to see them. How many were needed is known on the device, and on the
host a step late:

    `TrainStep.forward_backward`    reads the device and runs the step again: `train/rerun.py`
    `TrainStep.finish` that clips   skips the step on the device; the host enlarges the buffers then
    a step that nobody clips        is an error where the host sees it

A capacity holds within such a step alone (`Holder.watch`): elsewhere nobody would look, so
elsewhere there is room for everything.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.base.streams import ToHost

logger = logging.getLogger("moecore.capacity")
SLACK = 1.05  # of the next capacity over what was needed
Watch = Literal["reruns", "skips", "graph"]  # what follows where rows find no place


@dataclass(eq=False, frozen=True, slots=True)
class Shortage:
    """The most that a buffer should have held, in units of even loads."""

    # int32 on the device: first the most that was wanted, last what is not 0 once something found
    # no place.
    words: Tensor
    report: Tensor  # the same in memory that the host sees, written once something found no place
    even: float

    def min_factor(self) -> Tensor:
        """Return the least factor that had held everything; 0 = all fit. No host sync."""
        return self.words[0] * (self.words[-1] > 0) / self.even

    @property
    def num_seen(self) -> int:
        """How much was wanted, as far as the host can see; 0 = all fit."""
        return int(self.report[0])

    @property
    def factor_seen(self) -> float:
        """The needed factor, as far as the host can see."""
        return self.num_seen / self.even

    def clear(self, *, device: bool = True, host: bool = True) -> None:
        """Count anew; on the host when the device has come to here, or it has been read."""
        if host:
            self.report.zero_()
        if device:
            self.words.zero_()


class Holder(ABC):
    """Buffers whose capacity is an option, in units of `Shortage.even`."""

    option: str
    is_known_late = False  # whether backwards, too, find out what had no place
    watch: Watch | None = None  # what the running step does with a shortage; None = ignores it

    @property
    @abstractmethod
    def factor(self) -> float | None:
        """The option's value; None = everything fits."""

    @property
    @abstractmethod
    def shortages(self) -> Sequence[Shortage]:
        """Those of all buffers that have been made."""

    @abstractmethod
    def resize(self, factor: float) -> None:
        """Give later forwards so much; when the buffers hold no rows."""

    @abstractmethod
    def error(self, shortage: Shortage) -> RuntimeError:
        """Return what is raised for a shortage that the host sees."""

    @abstractmethod
    def wait(self) -> None:
        """Wait for the device, which writes reports."""

    def poll(self, *, is_error: bool = True) -> None:
        """Raise what went wrong, as far as the host can see: a shortage once, unless it is none."""
        for shortage in self.shortages if is_error else ():
            if shortage.num_seen:
                error = self.error(shortage)
                shortage.clear()
                raise error

    def check(self, *, is_error: bool = True) -> None:
        """Raise what went wrong so far. Host sync."""
        self.wait()
        self.poll(is_error=is_error)

    def min_factor(self, device: torch.device) -> Tensor:
        """Return the least factor that had held everything; 0 = it fits. No host sync."""
        factors = [shortage.min_factor() for shortage in self.shortages]
        return torch.stack(factors).amax() if factors else torch.zeros((), device=device)

    def clear(self, *, host: bool = True) -> None:
        """Count the rows of the next step anew on the device. No host sync."""
        for shortage in self.shortages:
            shortage.clear(host=host)


class SkippedSteps:
    """Which steps were skipped, equal on all ranks; the host reads it while the next step runs."""

    def __init__(self) -> None:
        self._flags: deque[bool | ToHost] = deque()

    def note(self, is_skipped: bool | Tensor) -> None:
        """Note whether the step that ends is skipped, on every rank. No host sync."""
        self._flags.append(ToHost(is_skipped) if isinstance(is_skipped, Tensor) else is_skipped)

    def pop(self) -> bool:
        """Return whether any step but the last was skipped since it was asked; waits for those."""
        result = False
        while len(self._flags) > 1:
            flag = self._flags.popleft()
            result |= bool(flag.read() if isinstance(flag, ToHost) else flag)
        return result


class Capacity:
    """The holders of a model (of expert rows, tokens to send, pages), and what a shortage is."""

    def __init__(self, *holders: Holder | None, device: torch.device) -> None:
        self.holders = holders
        # Whether steps with a shortage are skipped, as the last one would have been; else a
        # shortage is an error.
        self.skips = False
        self.is_graphed = False  # whether a step is one of a CUDA graph, which waits for nothing
        # Which steps were skipped since there is such a graph, whose buffers stay as they are.
        self.graph_steps: SkippedSteps | None = None
        self._device = device

    @property
    def _holders(self) -> list[Holder]:
        return [holder for holder in self.holders if holder is not None]

    def poll(self) -> None:
        """Raise what went wrong on this rank with rows, as far as the host can see."""
        for holder in self._holders:
            holder.poll(is_error=not self.skips)

    def check(self) -> None:
        """Raise it once the device is idle. Host sync."""
        for holder in self._holders:
            holder.check(is_error=not self.skips)

    def end_step(self, *, skips: bool) -> None:
        """Raise what is wrong with a step, or enlarge what a skipped one needed: see `poll`."""
        self.skips = skips
        self.poll()
        if skips and self.graph_steps is None:
            self.enlarge()

    def enlarge(self) -> None:
        """Give later forwards what skipped steps needed, as far as the host can see."""
        for holder in self._holders:
            min_factor = max((shortage.factor_seen for shortage in holder.shortages), default=0.0)
            for shortage in holder.shortages:
                shortage.clear(device=False)
            factor = larger(min_factor)
            if factor > (holder.factor or math.inf):  # else a step that ran before it was enlarged
                logger.warning(
                    "%s (%s) was too small on rank %d: that step was skipped, the next have %s",
                    *(holder.option, holder.factor, this_rank(), factor),
                )
                holder.resize(factor)

    @contextmanager
    def watched(self, watch: Watch) -> Iterator[None]:
        """Within, forwards are those of a step that looks at shortages; the outermost counts."""
        before = [holder.watch for holder in self._holders]
        for holder in self._holders:
            holder.watch = holder.watch or watch
        try:
            yield
        finally:
            for holder, was in zip(self._holders, before, strict=True):
                holder.watch = was

    @contextmanager
    def graphed(self) -> Iterator[None]:
        """Within, steps are those of a CUDA graph."""
        self.is_graphed = True
        try:
            with self.watched("graph"):
                yield
        finally:
            self.is_graphed = False

    def is_outgrown(self) -> bool:
        """Whether steps of the captured graph were skipped because of a shortage of any rank."""
        # The last step, whose end nobody waits for, does not count. Collective with a host sync
        # after a skipped step, else neither.
        holders = [holder for holder in self._holders if holder.factor is not None]
        if self.graph_steps is None or not self.graph_steps.pop() or not holders:
            return False
        is_short = any(shortage.num_seen for holder in holders for shortage in holder.shortages)
        flag = torch.tensor(float(is_short), device=self._device)
        if dist.is_initialized():
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())


def larger(factor: float) -> float:
    """Return the capacity to have next where so much was needed."""
    return math.ceil(factor * SLACK * 100) / 100


def this_rank() -> int:
    """Return the rank of this process; 0 without others."""
    return dist.get_rank() if dist.is_initialized() else 0
