"""Largest magnitudes of the last optimizer steps, for delayed scaling.

Example: two steps are kept. Operands whose largest magnitudes are 3 and 5 in the micro-batches of
step 0, 2 in step 1 and 1 in step 2 are scaled in

    step 0   by their own: 3, then 5
    step 1   by 5
    step 2   by max(5, 2) = 5
    step 3   by max(2, 1) = 2

Magnitudes of this step are collected beside the history, which changes between steps alone
(`advance_together`), so micro-batches of a step and their recomputation see the same scales.
Infinity and NaN are not collected, nor is a skipped step: they would clip nothing for n steps.

An operand that no step had, such as the gradient behind a matrix of zeros or of a skipped first
step, is scaled by its own magnitudes until one has it. The device decides that (`amax` is 0); once
the host knows that all operands have a past (`is_sure`), nothing asks any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecore.base.streams import wait_on_host
from moecore.base.torch_private import foreach_copy_

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
        self._past: dict[str, Tensor] = {}  # fp32 [1], the largest of the steps
        self.is_sure = False  # the host knows that every operand has a past: `amax` is not 0
        self._answer: _Answer | None = None  # to whether it has

    def amax(self, operand: str) -> Tensor | None:
        """Return fp32 [1], the largest of the steps, 0 where none had it; None before the first."""
        return self._past.get(operand)

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
        return self.seen

    def start(self, device: torch.device) -> None:
        """Make the tensors that collect, unless they are there."""
        if not self.seen:
            self.seen |= {operand: torch.zeros(1, device=device) for operand in self.operands}

    def drop(self) -> None:
        """Drop the magnitudes of this step. No host sync."""
        for seen in self.seen.values():
            seen.zero_()

    def grow(self, device: torch.device) -> None:
        """Make the tensors of the steps, unless they are there."""
        if not self.steps:
            for operand in self.operands:
                self.steps[operand] = torch.zeros(self.num_steps, device=device)
                self._past[operand] = torch.zeros(1, device=device)

    def load(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Go on from saved `steps`, the newest that there is room for. Host sync.

        An operand that is not there, or that no step had, is as before its first step.
        """
        if not (state or self.steps):
            return
        self.grow(device)
        for operand, steps in self.steps.items():
            newest = state.get(operand, steps[:0])[: self.num_steps]
            steps[len(newest) :] = 0
            steps[: len(newest)] = newest
            # in place, where a CUDA graph reads it
            self._past[operand].copy_(steps.amax())
        wait_on_host()
        self.is_sure, self._answer = all(steps.any() for steps in self.steps.values()), None

    def learn(self) -> None:
        """Take an answer that has come. No host sync."""
        answer = self._answer
        if answer is not None and (answer.event is None or answer.event.query()):
            self.is_sure, self._answer = answer.of(self), None


class _Answer:
    """Whether each history has a past of all operands, on its way to the host."""

    def __init__(self, histories: Sequence[AmaxHistory]) -> None:
        min_amax = torch.stack([torch.cat([*h._past.values()]).amin() for h in histories])
        self._index = {history: i for i, history in enumerate(histories)}
        self._min_amax = min_amax.to("cpu", non_blocking=True)
        self.event = torch.cuda.Event() if min_amax.is_cuda else None
        if self.event is not None:
            self.event.record()

    def of(self, history: AmaxHistory) -> bool:
        """Return that of one history."""
        return bool(self._min_amax[self._index[history]] > 0)


@torch.no_grad()
def advance_histories(
    histories: Sequence[AmaxHistory],
    device: torch.device,
    group: dist.ProcessGroup | None,
    *,
    is_skipped: bool | Tensor = False,
) -> None:
    """Start the next step of operands that are spread over the ranks of a group: `push_together`.

    One all-reduce for all histories, which all ranks have in the same order. None = one rank. A
    `is_skipped` step, bool scalar on the device, adds nothing.
    """
    for history in histories:
        history.start(device)
    largest = torch.cat([seen for history in histories for seen in history.seen.values()])
    if group is not None and group.size() > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    if not isinstance(is_skipped, Tensor):
        is_skipped = torch.full((), is_skipped, device=device)
    push_amax(histories, largest.masked_fill(is_skipped, 0.0))


@torch.no_grad()
def push_amax(histories: Sequence[AmaxHistory], largest: Tensor) -> None:
    """Add a step to histories: fp32 of each operand of each one; 0 = the step did not have it."""
    # A few launches however many there are. No host sync.
    of_length: dict[int, list[tuple[AmaxHistory, str, Tensor]]] = {}
    values = iter(largest.split(1))
    for history in histories:
        history.grow(largest.device)
        entries = of_length.setdefault(history.num_steps, [])
        entries += [(history, operand, next(values)) for operand in history.operands]
    for entries in of_length.values():
        newest = torch.cat([value for _, _, value in entries])[:, None]
        before = torch.stack([history.steps[operand] for history, operand, _ in entries])
        after = torch.where(newest > 0, torch.cat((newest, before[:, :-1]), 1), before)
        of_all = after.amax(1)
        # in place, where a CUDA graph reads it
        foreach_copy_([history.steps[operand] for history, operand, _ in entries], after.unbind())
        foreach_copy_([history._past[operand] for history, operand, _ in entries], of_all.split(1))
    collected = [seen for history in histories for seen in history.seen.values()]
    if collected:
        foreach_copy_(collected, torch.zeros(len(collected), device=largest.device).split(1))
    _learn_sureness([history for history in histories if not history.is_sure])


def _learn_sureness(histories: Sequence[AmaxHistory]) -> None:
    """Let the host know which histories are sure: at once, or on a GPU before a later step."""
    for history in histories:
        history.learn()
    unasked = [h for h in histories if not h.is_sure and h._answer is None]
    if not unasked:
        return
    if next(iter(unasked[0].steps.values())).is_meta:  # a dry run is of a later step
        for history in unasked:
            history.is_sure = True
        return
    answer = _Answer(unasked)
    for history in unasked:
        history._answer = answer
        history.learn()


def history_of(module: nn.Module) -> AmaxHistory | None:
    """Return the history of a linear's weight, from which delayed scaling has its scale."""
    history: AmaxHistory | None = getattr(getattr(module, "products", None), "history", None)
    return history
