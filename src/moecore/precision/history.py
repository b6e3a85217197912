"""Largest magnitudes of the last optimizer steps, for delayed scaling.

Example: two steps are kept. Operands whose largest magnitudes are 3 and 5 in the micro-batches of
step 0, 2 in step 1 and 1 in step 2 are scaled in

    step 0   by their own: 3, then 5
    step 1   by 5
    step 2   by max(5, 2) = 5
    step 3   by max(2, 1) = 2

Magnitudes of this step are collected beside the history, which changes between steps alone
(`advance`), so micro-batches of a step and their recomputation see the same scales. Infinity and
NaN are not collected: they would clip nothing for n steps, and the step is skipped.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

OperandName = Literal["input", "weight", "gradient"]
OPERANDS: tuple[OperandName, ...] = ("input", "weight", "gradient")


class AmaxHistory:
    """The history of the three operands of one weight's products; it is in no state dict."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.seen: dict[OperandName, Tensor] = {}  # fp32 [1], the largest of this step so far
        # fp32 [num_steps], the newest step first; 0 where there was none.
        self.steps: dict[OperandName, Tensor] = {}
        self._has_recorded = False  # and stays so: a replayed CUDA graph adds, but runs no Python
        self._has_step = False

    def amax(self, operand: OperandName) -> Tensor | None:
        """Return fp32 [1], the largest of the steps; None before the first, when it is its own."""
        # 1 for an operand that no step had, like the gradient after forwards without backward.
        if not self._has_step:
            return None
        largest = self.steps[operand].amax().reshape(1)
        return torch.where(largest > 0, largest, 1.0)

    def record(self, device: torch.device) -> dict[OperandName, Tensor]:
        """Return `seen`, to which a training forward and its backward add."""
        # {} under torch.compile before there are tensors: a graph cannot make what its backward
        # writes to. The next `advance` makes them.
        if not self.seen:
            if torch.compiler.is_compiling():
                return {}
            self._start(device)
        self._has_recorded = True
        return self.seen

    def _start(self, device: torch.device) -> None:
        for operand in OPERANDS:
            self.seen[operand] = torch.zeros(1, device=device)
            self.steps[operand] = torch.zeros(self.num_steps, device=device)

    def drop(self) -> None:
        """Drop the magnitudes of this step. No host sync."""
        for seen in self.seen.values():
            seen.zero_()

    @torch.no_grad()
    def advance(self, weight: Tensor) -> None:
        """Start the next step; operands that this one had not are left out. No host sync."""
        # A collective for a weight that is a sharded DTensor.
        if not self.seen:
            self._start(weight.device)
        if not self._has_recorded:
            return
        self.seen["weight"].copy_(max_over_cut(self.seen["weight"], weight))
        for operand in OPERANDS:
            seen, steps = self.seen[operand], self.steps[operand]
            steps.copy_(torch.where(seen > 0, torch.cat((seen, steps[:-1])), steps))
            seen.zero_()
        self._has_step = True


def max_over_cut(value: Tensor, weight: Tensor) -> Tensor:
    """Return the largest value of the ranks that a weight is cut over."""
    # One all-reduce for each mesh dim that cuts it, none for a whole weight.
    if isinstance(weight, DTensor):
        for mesh_dim, placement in enumerate(weight.placements):
            if not placement.is_replicate():
                value = value.clone()
                dist.all_reduce(value, dist.ReduceOp.MAX, weight.device_mesh.get_group(mesh_dim))
    return value
