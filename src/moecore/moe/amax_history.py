"""Largest magnitudes of the last optimizer steps, for delayed scaling.

Example: two steps are kept. Operands whose largest magnitudes are 3 and 5 in the micro-batches of
step 0, 2 in step 1 and 1 in step 2 are scaled in

    step 0   by their own: 3, then 5
    step 1   by 5
    step 2   by max(5, 2) = 5
    step 3   by max(2, 1) = 2

Magnitudes of this step are collected beside the history, which changes between steps alone
(`advance`, `advance_together`), so micro-batches of a step and their recomputation see the same
scales. Infinity and NaN are not collected: they would clip nothing for n steps, and the step is
skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from moecore.base.streams import wait_on_host

OperandName = Literal["input", "weight", "gradient"]
LINEAR_OPERANDS: tuple[OperandName, ...] = ("input", "weight", "gradient")


class AmaxHistory:
    """The history of operands, by default the three of a linear; it is in no state dict."""

    def __init__(self, num_steps: int, operands: Sequence[str] = LINEAR_OPERANDS) -> None:
        self.num_steps, self.operands = num_steps, operands
        self.seen: dict[str, Tensor] = {}  # fp32 [1], the largest of this step so far
        # fp32 [num_steps], the newest step first; 0 where there was none.
        self.steps: dict[str, Tensor] = {}
        self._has_recorded = False  # and stays so: a replayed CUDA graph adds, but runs no Python
        self._has_step = False

    def amax(self, operand: str) -> Tensor | None:
        """Return fp32 [1], the largest of the steps; None before the first, when it is its own."""
        # 1 for an operand that no step had, like the gradient after forwards without backward.
        if not self._has_step:
            return None
        largest = self.steps[operand].amax().reshape(1)
        return torch.where(largest > 0, largest, 1.0)

    def record(self, device: torch.device) -> dict[str, Tensor]:
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
        for operand in self.operands:
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
        self._push()

    def _push(self) -> None:
        for operand in self.operands:
            seen, steps = self.seen[operand], self.steps[operand]
            steps.copy_(torch.where(seen > 0, torch.cat((seen, steps[:-1])), steps))
            seen.zero_()
        self._has_step = True


@torch.no_grad()
def advance_together(
    histories: Sequence[AmaxHistory], device: torch.device, group: dist.ProcessGroup | None
) -> None:
    """Start the next step of operands whose rows are spread over the ranks of a group.

    One all-reduce for all histories, which all ranks have in the same order. The host waits for it
    until each history has had a step: which ones another rank has recorded no rank knows.
    """
    for history in histories:
        if not history.seen:
            history._start(device)
    seen = [seen for history in histories for seen in history.seen.values()]
    undecided = [history for history in histories if not history._has_step]
    flags = [float(history._has_recorded) for history in undecided]
    largest = torch.cat([*seen, torch.tensor(flags, device=device)] if flags else seen)
    if group is not None and group.size() > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    for own, found in zip(seen, largest.split(1), strict=False):
        own.copy_(found)
    if undecided and not largest.is_meta:
        wait_on_host()
        flags = largest[len(seen) :].tolist()
    unused = [history for history, flag in zip(undecided, flags, strict=True) if not flag]
    for history in histories:
        if history not in unused:
            history._push()


def max_over_cut(value: Tensor, weight: Tensor) -> Tensor:
    """Return the largest value of the ranks that a weight is cut over."""
    # One all-reduce for each mesh dim that cuts it, none for a whole weight.
    if isinstance(weight, DTensor):
        for mesh_dim, placement in enumerate(weight.placements):
            if not placement.is_replicate():
                value = value.clone()
                dist.all_reduce(value, dist.ReduceOp.MAX, weight.device_mesh.get_group(mesh_dim))
    return value
