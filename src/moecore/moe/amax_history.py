"""Largest magnitudes of the last optimizer steps, for delayed scaling.

Example: two steps are kept. Operands whose largest magnitudes are 3 and 5 in the micro-batches of
step 0, 2 in step 1 and 1 in step 2 are scaled in

    step 0   by their own: 3, then 5
    step 1   by 5
    step 2   by max(5, 2) = 5
    step 3   by max(2, 1) = 2

Magnitudes of this step are collected beside the history, which changes between steps alone
(`advance_together`), so micro-batches of a step and their recomputation see the same scales.
Infinity and NaN are not collected: they would clip nothing for n steps, and the step is skipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.base.streams import wait_on_host

OperandName = Literal["input", "weight", "gradient"]
GRADIENTS = frozenset(("gradient", "dy", "dh"))  # of linears and of experts
LINEAR_OPERANDS: tuple[OperandName, ...] = ("input", "weight", "gradient")


class AmaxHistory:
    """The history of operands, by default the three of a linear, equal on all ranks of a stage."""

    def __init__(self, num_steps: int, operands: Sequence[str] = LINEAR_OPERANDS) -> None:
        self.num_steps, self.operands = num_steps, operands
        self.seen: dict[str, Tensor] = {}  # fp32 [1], the largest of this step so far
        # fp32 [num_steps], the newest step first, 0 where there was none; {} before `push`.
        self.steps: dict[str, Tensor] = {}
        self._has_recorded = False  # and stays so: a replayed CUDA graph adds, but runs no Python
        self._known: set[str] = set()  # operands that `steps` gives a scale to, as this rank knows

    def amax(self, operand: str) -> Tensor | None:
        """Return fp32 [1], the largest of the steps; None before the first, when it is its own."""
        # 1 for an operand that no step had, like the gradient after forwards without backward.
        largest = self.largest(operand) if operand in self._known else None
        return None if largest is None else torch.where(largest > 0, largest, 1.0)

    def largest(self, operand: str) -> Tensor | None:
        """Return fp32 [1], 0 where no step had it; None before the first advance."""
        return self.steps[operand].amax().reshape(1) if operand in self.steps else None

    def record(self, device: torch.device, *, training: bool) -> dict[str, Tensor]:
        """Return `seen`, to which a forward that trains and its backward add; {} in others."""
        if not (training and torch.is_grad_enabled()):
            return {}
        # {} under torch.compile before there are tensors: a graph cannot make what its backward
        # writes to. The next `advance` makes them.
        if not self.seen:
            if torch.compiler.is_compiling():
                return {}
            self.start(device)
        is_first = not (self._has_recorded or self._known)
        if self.steps and is_first and not torch.compiler.is_compiling():
            self._find_known()  # once: other ranks may have had steps before this one's first
        self._has_recorded = True
        return self.seen

    def start(self, device: torch.device) -> None:
        """Make the tensors that collect, unless they are there."""
        if not self.seen:
            self.seen |= {operand: torch.zeros(1, device=device) for operand in self.operands}

    def drop(self) -> None:
        """Drop the magnitudes of this step. No host sync."""
        for seen in self.seen.values():
            seen.zero_()

    def push(self, step: Sequence[Tensor]) -> None:
        """Add a step, fp32 [1] of each operand; 0 = the step did not have it. No host sync."""
        for operand, largest in zip(self.operands, step, strict=True):
            steps = self.steps.get(operand)
            if steps is None:
                steps = self.steps[operand] = largest.new_zeros(self.num_steps)
            steps.copy_(torch.where(largest > 0, torch.cat((largest, steps[:-1])), steps))
        self.drop()
        if self._has_recorded:
            self._known.update(self.operands)

    def load(self, saved: Mapping[str, Tensor], device: torch.device) -> None:
        """Go on from saved `steps`, the newest that there is room for. Host sync.

        An operand that is not there, or that no step had, is as before its first step.
        """
        if not (saved or self.steps):
            return
        for operand in self.operands:
            steps = self.steps.setdefault(operand, torch.zeros(self.num_steps, device=device))
            newest = saved.get(operand, steps[:0])[: self.num_steps]
            steps[len(newest) :] = 0
            steps[: len(newest)] = newest  # in place, where a CUDA graph reads them
        self._find_known()

    def _find_known(self) -> None:
        wait_on_host()
        self._known = {operand for operand, steps in self.steps.items() if steps.any()}


@torch.no_grad()
def advance_together(
    histories: Sequence[AmaxHistory], device: torch.device, group: dist.ProcessGroup | None
) -> None:
    """Start the next step of operands that are spread over the ranks of a group. No host sync.

    One all-reduce for all histories, which all ranks have in the same order. None = one rank.
    """
    for history in histories:
        history.start(device)
    largest = torch.cat([seen for history in histories for seen in history.seen.values()])
    if group is not None and group.size() > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    steps = iter(largest.split(1))
    for history in histories:
        history.push([next(steps) for _ in history.operands])
