"""A stream whose copies run as late as its events let them: a missing wait shows at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from moecore.train.memory.streams import CopyJob, CopyStream
from moecore.train.optim import host_step, state_offload


@dataclass
class LateMark:
    """After the first copies of a stream.

    Attributes:
        number: of these copies.
    """

    stream: LateStream
    number: int

    def synchronize(self) -> None:
        """Run them."""
        while self.stream.num_done < self.number:
            target, source = self.stream.copies[self.stream.num_done]
            target.copy_(source)
            self.stream.num_done += 1


class LateStream(CopyStream):
    """Takes the place of `CopyStream` for CPU tensors.

    Args:
        device: a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.num_done = 0

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy later."""
        self.copies.append((target, source))

    def start_copies(self, jobs: Iterable[CopyJob], *after: LateMark) -> LateMark:  # type: ignore[override]
        """Start copies late; return a mark after all copies so far."""
        for job in jobs:
            job.launch_on(self)
        return self.record_event()

    def record_event(self) -> LateMark:  # type: ignore[override]
        """Return a mark after all copies so far."""
        return LateMark(self, len(self.copies))

    def wait_for_event(self, mark: LateMark) -> None:  # type: ignore[override]
        """Run the copies before a mark."""
        mark.synchronize()


@pytest.fixture
def late_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of both modules run late."""
    monkeypatch.setattr(state_offload, "CopyStream", LateStream)
    monkeypatch.setattr(host_step, "CopyStream", LateStream)
