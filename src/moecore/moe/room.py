"""Room that rows may not fit into, on the device, where no forward or backward waits to see it."""

from __future__ import annotations

import logging
import math
from collections import deque
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

logger = logging.getLogger("moecore.room")
SLACK = 1.05  # of the next room over what was needed


class Room(Protocol):
    """What a forward may find too small: expert rows, or pages.

    Attributes:
        option: that decides its size.
    """

    option: str

    @property
    def factor(self) -> float | None:
        """The option's value."""
        ...

    @property
    def may_be_small(self) -> bool:
        """Whether a step that found too little room may run again, or be skipped."""
        ...

    @property
    def is_short(self) -> bool:
        """Whether rows found no room, as far as the host can see."""
        ...

    def asked_later(self) -> AbstractContextManager[None]:
        """Return a context within which too little room is no error: `needed_factor` tells."""
        ...

    def needed_factor(self) -> Tensor:
        """Return the least factor that had held all rows; 0 = they fit. No host sync."""
        ...

    def grow(self, factor: float | None) -> None:
        """Give later forwards more room, None = as much, and clear what was needed."""
        ...

    def settle(self) -> None:
        """Give later forwards the room that earlier ones needed, as far as the host can see."""
        ...

    def clear_state(self) -> None:
        """Let the rows of the next step be counted anew on the device. No host sync."""
        ...

    def poll(self) -> None:
        """Raise an ExchangeError for what went wrong, as far as the host can see."""
        ...

    def check(self) -> None:
        """Raise it once the device is idle. Host sync."""
        ...


class SkippedSteps:
    """Which steps were skipped, read while the next one runs, so that the host waits for nothing.

    What it says is the same on every rank at the same step.
    """

    def __init__(self) -> None:
        self._flags: deque[tuple[Any, Any]] = deque()

    def note(self, skipped: bool | Tensor) -> None:
        """Note whether the step that ends is skipped, on every rank. No host sync."""
        arrived = None
        if isinstance(skipped, Tensor) and skipped.is_cuda:
            on_host = torch.empty((), dtype=torch.bool, pin_memory=True)
            skipped = on_host.copy_(skipped, non_blocking=True)
            arrived = torch.cuda.current_stream().record_event()
        self._flags.append((skipped, arrived))

    def pop(self) -> bool:
        """Return whether any step but the last was skipped since it was asked; waits for those."""
        found = False
        while len(self._flags) > 1:
            skipped, arrived = self._flags.popleft()
            if arrived is not None:
                arrived.synchronize()
            found |= bool(skipped)
        return found


def larger(factor: float) -> float:
    """Return the room to have next where so much was needed."""
    return math.ceil(factor * SLACK * 100) / 100


def warn_of_skipped(option: str, was: float | None, now: float) -> None:
    """Log that a step was skipped on all ranks because of too little room on this one."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    logger.warning(
        "%s (%s) was too small on rank %d: that step was skipped, the next have %s",
        *(option, was, rank, now),
    )
