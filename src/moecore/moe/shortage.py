"""Shortages: rows that exceed buffers of a static capacity, and the handling of their step.

No forward or backward waits to see a shortage. The device knows the needed capacity at once, and
the host knows it one step later:

    `TrainStep.forward_backward`    reads the device, and repeats the step: `train/rerun.py`
    `TrainStep.finish` that clips   skips the step on the device; the host enlarges buffers later
    a step without clipping         the host raises an error when it sees the shortage

A capacity limits buffers only inside such a step (`BufferOwner.watch`). Other forwards have no code
that would see a shortage, so their buffers have space for all rows.
"""

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

from moecore.base.rank_checks import get_rank_or_zero
from moecore.base.streams import HostCopyOfTensor

logger = logging.getLogger("moecore.capacity")
SLACK = 1.05  # of the next capacity over what was needed
Watch = Literal["reruns", "skips", "graph"]  # how a step handles rows above the capacity


@dataclass(eq=False, frozen=True, slots=True)
class ShortageCounters:
    """Records the number of rows that a buffer needed, if it exceeded the buffer's capacity.

    A capacity factor is a number of rows divided by `even`, the number of rows with even loads.
    """

    # int32 on the device: the first word is the maximum of the needed rows, and the last word is
    # not 0 after rows exceeded the capacity.
    words: Tensor
    report: Tensor  # copy of the first word in host memory, written when rows exceed the capacity
    even: float  # rows of even loads

    def compute_min_capacity_factor(self) -> Tensor:
        """Return the smallest sufficient capacity factor, fp32 on the device; 0 = all rows fit."""
        return self.words[0].float() * (self.words[-1] > 0) / self.even

    @property
    def reported_num_rows(self) -> int:
        """Number of rows needed, as last reported to the host; 0 = all rows fit."""
        return int(self.report[0])

    @property
    def reported_factor(self) -> float:
        """Capacity factor needed, as last reported to the host; 0 = all rows fit."""
        return self.reported_num_rows / self.even

    def clear(self, *, device: bool = True, host: bool = True) -> None:
        """Set the counters on the device (if `device`) and the host's report (if `host`) to 0."""
        if host:
            self.report.zero_()
        if device:
            self.words.zero_()


class BufferOwner(ABC):
    """Base class of owners of buffers with a limited capacity, which the option `option` sets."""

    option: str
    is_known_late = False  # whether a backward may also record a shortage
    watch: Watch | None = None  # what the running step does with a shortage; None = ignores it

    @property
    @abstractmethod
    def capacity_factor(self) -> float | None:
        """Capacity divided by the rows of even loads; None = buffers have space for all rows."""

    @property
    @abstractmethod
    def shortages(self) -> Sequence[ShortageCounters]:
        """One record of rows above the capacity per allocated buffer; its counts may be 0."""

    @abstractmethod
    def set_capacity_factor(self, capacity_factor: float) -> None:
        """Set the capacity factor of later forwards. Call it while no buffer is in use."""

    @abstractmethod
    def make_error(self, shortage: ShortageCounters) -> RuntimeError:
        """Return the error for a buffer that was too small; it is not raised."""

    @abstractmethod
    def wait_for_reports(self) -> None:
        """Wait for the device, which writes the reports. Host sync."""

    def raise_reported_errors(self, *, includes_shortages: bool = True) -> None:
        """Raise an error, once, if a too small buffer was reported to the host. No host sync."""
        for shortage in self.shortages if includes_shortages else ():
            if shortage.reported_num_rows:
                error = self.make_error(shortage)
                shortage.clear()
                raise error

    def wait_and_raise_errors(self, *, includes_shortages: bool = True) -> None:
        """Wait for the device, then call `raise_reported_errors`. Host sync."""
        self.wait_for_reports()
        self.raise_reported_errors(includes_shortages=includes_shortages)

    def compute_min_capacity_factor(self, device: torch.device) -> Tensor:
        """Return the smallest sufficient capacity factor, on the device; 0 = all rows fit."""
        factors = [shortage.compute_min_capacity_factor() for shortage in self.shortages]
        if not factors:
            return torch.zeros((), device=device, dtype=torch.float32)
        return torch.stack(factors).amax()

    def clear_counters(self, *, host: bool = True) -> None:
        """Set all counters on the device to 0, and the host's reports if `host`. No host sync."""
        for shortage in self.shortages:
            shortage.clear(host=host)


class SkippedSteps:
    """Flags of skipped steps, equal on all ranks; the host reads each flag one step later."""

    def __init__(self) -> None:
        self._flags: deque[bool | HostCopyOfTensor] = deque()

    def record_step(self, is_skipped: bool | Tensor) -> None:
        """Record whether the step that ends is skipped, on every rank. No host sync."""
        flag = HostCopyOfTensor(is_skipped) if isinstance(is_skipped, Tensor) else is_skipped
        self._flags.append(flag)

    def pop_skips(self) -> bool:
        """Remove all recorded steps but the last; return whether one was skipped. Host sync."""
        result = False
        while len(self._flags) > 1:
            flag = self._flags.popleft()
            result |= bool(flag.read() if isinstance(flag, HostCopyOfTensor) else flag)
        return result


class BufferCapacities:
    """All owners of limited buffers in a model: expert rows, tokens, and saved rows."""

    def __init__(self, *owners: BufferOwner | None, device: torch.device) -> None:
        self.owners = owners
        self.skips = False  # whether steps with a shortage are skipped; otherwise an error
        self.is_graphed = False  # whether the running step is captured in or replayed from a graph
        # Skipped steps since the capture of a CUDA graph, whose buffers cannot be enlarged.
        self.graph_steps: SkippedSteps | None = None
        self._device = device

    def _list_owners(self) -> list[BufferOwner]:
        return [owner for owner in self.owners if owner is not None]

    def raise_reported_errors(self) -> None:
        """Raise this rank's errors that were reported to the host. No host sync."""
        for owner in self._list_owners():
            owner.raise_reported_errors(includes_shortages=not self.skips)

    def wait_and_raise_errors(self) -> None:
        """Wait for the device, and raise the errors of this rank's owners. Host sync."""
        for owner in self._list_owners():
            owner.wait_and_raise_errors(includes_shortages=not self.skips)

    def end_step(self, *, skips: bool) -> None:
        """Raise reported errors. With `skips`, enlarge too small buffers instead.

        `skips` = the device skips each step with a too small buffer.
        """
        self.skips = skips
        self.raise_reported_errors()
        if skips and self.graph_steps is None:
            self.enlarge_buffers()

    def enlarge_buffers(self) -> None:
        """Enlarge buffers to the capacity that skipped steps needed, as reported to the host."""
        for owner in self._list_owners():
            min_factor = max((counter.reported_factor for counter in owner.shortages), default=0.0)
            for shortage in owner.shortages:
                shortage.clear(device=False)
            factor = compute_next_factor(min_factor)
            # Otherwise the buffer is already enlarged.
            if factor > (owner.capacity_factor or math.inf):
                logger.warning(
                    "%s (%s) was too small on rank %d: that step was skipped, the next have %s",
                    *(owner.option, owner.capacity_factor, get_rank_or_zero(), factor),
                )
                owner.set_capacity_factor(factor)

    @contextmanager
    def watch_shortages(self, handling: Watch) -> Iterator[None]:
        """Return a context for a step's forwards that sets what happens to rows above a capacity.

        "reruns" repeats the step, "skips" skips the step on the device, and "graph" marks a step in
        a CUDA graph. If contexts are nested, the outermost `handling` is used.
        """
        before = [owner.watch for owner in self._list_owners()]
        for owner in self._list_owners():
            owner.watch = owner.watch or handling
        try:
            yield
        finally:
            for owner, was in zip(self._list_owners(), before, strict=True):
                owner.watch = was

    @contextmanager
    def enter_graph(self) -> Iterator[None]:
        """Return a context for a step that is captured in, or replayed from, a CUDA graph."""
        self.is_graphed = True
        try:
            with self.watch_shortages("graph"):
                yield
        finally:
            self.is_graphed = False

    def is_graph_outgrown(self) -> bool:
        """Whether a captured graph's buffers were too small in a skipped step, on any rank.

        Collective with a host sync after a skipped step. The last step is not considered.
        """
        owners = [owner for owner in self._list_owners() if owner.capacity_factor is not None]
        if self.graph_steps is None or not self.graph_steps.pop_skips() or not owners:
            return False
        is_short = any(counter.reported_num_rows for owner in owners for counter in owner.shortages)
        flag = torch.tensor(float(is_short), device=self._device, dtype=torch.float32)
        if dist.is_initialized():
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())


def compute_next_factor(needed_factor: float) -> float:
    """Return the next capacity factor: `needed_factor` plus 5%, rounded up to 0.01."""
    return math.ceil(needed_factor * SLACK * 100) / 100
