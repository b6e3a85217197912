"""Maximum magnitudes (amax) of the last optimizer steps, for delayed FP8 scaling.

Example with a history of two steps. An operand has amax 3 and 5 in the micro-batches of step 0, 2
in step 1 and 1 in step 2. Its scale is computed from

    step 0   the amax of the micro-batch: 3, then 5
    step 1   5
    step 2   max(5, 2) = 5
    step 3   max(2, 1) = 2

The amax of the current step is collected separately. The history changes only between steps
(`advance_histories`), so micro-batches of a step and their recomputation use the same scales.
Infinity, NaN and skipped steps are not recorded, because their scales would be wrong for n steps.

An operand may have no recorded amax, such as the gradient below a matrix of zeros, or after a
skipped first step. Its scale is then computed from its current amax. The device makes this decision
(`amax` is 0). When the host knows that all operands have a recorded amax (`has_all_amax`), the
device no longer checks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecore.base.streams import record_host_wait
from moecore.base.torch_private import foreach_copy_

OperandName = Literal["input", "weight", "gradient"]
GRADIENTS = frozenset(("gradient", "dy", "dh"))  # of linears and of experts
LINEAR_OPERANDS: tuple[OperandName, ...] = ("input", "weight", "gradient")


class AmaxHistory:
    """Records the amax (largest magnitude) of a matmul's operands in the last optimizer steps.

    Delayed FP8 scaling computes scales from this record.
    """

    def __init__(self, num_steps: int, operands: Sequence[str] = LINEAR_OPERANDS) -> None:
        self.num_steps, self.operands = num_steps, operands
        self.seen: dict[str, Tensor] = {}  # fp32 [1], the amax of the current step so far
        # fp32 [num_steps], the newest step first, 0 = no amax; {} before the first step ends.
        self.steps: dict[str, Tensor] = {}
        self._past: dict[str, Tensor] = {}  # fp32 [1], the maximum over `steps`
        self.has_all_amax = False  # whether the host knows that every operand has a recorded amax
        self._pending_check: _PendingAmaxCheck | None = (
            None  # the pending copy that sets `has_all_amax`
        )

    def get_max_amax(self, operand: str) -> Tensor | None:
        """Return the maximum over recorded steps, fp32 [1], 0 = no amax. None = no step ended."""
        return self._past.get(operand)

    def get_current_amax(self, device: torch.device, *, training: bool) -> dict[str, Tensor]:
        """Return {operand: fp32 [1]}, which forward and backward raise to this step's amax.

        Returns {} if `training` (the module's mode) is False, or without gradients.
        """
        if not (training and torch.is_grad_enabled()):
            return {}
        # {} under torch.compile before the tensors exist: a graph cannot allocate tensors that its
        # backward writes to. `advance_histories` allocates them.
        if not self.seen:
            if torch.compiler.is_compiling():
                return {}
            self.allocate_current_amax(device)
        return self.seen

    def allocate_current_amax(self, device: torch.device) -> None:
        """Allocate `seen`, the current step's amax of each operand, as zeros unless it exists."""
        if not self.seen:
            self.seen |= {
                operand: torch.zeros(1, device=device, dtype=torch.float32)
                for operand in self.operands
            }

    def reset_current_amax(self) -> None:
        """Set the amax of the current step to 0. No host sync."""
        for seen in self.seen.values():
            seen.zero_()

    def allocate_steps(self, device: torch.device) -> None:
        """Allocate `steps`, the recorded amax of each operand, as zeros unless it exists."""
        if not self.steps:
            for operand in self.operands:
                self.steps[operand] = torch.zeros(
                    self.num_steps, device=device, dtype=torch.float32
                )
                self._past[operand] = torch.zeros(1, device=device, dtype=torch.float32)

    def load(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Restore the newest `num_steps` of saved `steps`. Host sync.

        `state` maps an operand to fp32 [n], the newest step first. An operand without a saved amax
        starts as before its first step.
        """
        if not (state or self.steps):
            return
        self.allocate_steps(device)
        for operand, steps in self.steps.items():
            newest = state.get(operand, steps[:0])[: self.num_steps]
            steps[len(newest) :] = 0
            steps[: len(newest)] = newest
            # in place, where a CUDA graph reads it
            self._past[operand].copy_(steps.amax())
        record_host_wait()
        self.has_all_amax, self._pending_check = (
            all(steps.any() for steps in self.steps.values()),
            None,
        )

    def poll_amax_check(self) -> None:
        """Set `has_all_amax` (all operands have a recorded amax) once the device's copy arrived."""
        answer = self._pending_check
        if answer is not None and (answer.event is None or answer.event.query()):
            self.has_all_amax, self._pending_check = answer.read(self), None


class _PendingAmaxCheck:
    """An asynchronous copy that tells the host which histories have an amax of all operands."""

    def __init__(self, histories: Sequence[AmaxHistory]) -> None:
        min_amax = torch.stack([torch.cat([*h._past.values()]).amin() for h in histories])
        self._index = {history: i for i, history in enumerate(histories)}
        self._min_amax = min_amax.to("cpu", non_blocking=True)
        self.event = torch.cuda.Event() if min_amax.is_cuda else None
        if self.event is not None:
            self.event.record()

    def read(self, history: AmaxHistory) -> bool:
        """Return whether every operand of a history has an amax, from the copy on the host."""
        return bool(self._min_amax[self._index[history]] > 0)


@torch.no_grad()
def advance_histories(
    histories: Sequence[AmaxHistory],
    device: torch.device,
    group: dist.ProcessGroup | None,
    *,
    is_skipped: bool | Tensor = False,
) -> None:
    """All-reduce (MAX) the current step's amax over a group, and record it in the histories.

    All ranks pass the histories in the same order, for one all-reduce. `group` None = one rank. A
    skipped step (`is_skipped`, bool or a scalar on the device) records nothing.
    """
    for history in histories:
        history.allocate_current_amax(device)
    largest = torch.cat([seen for history in histories for seen in history.seen.values()])
    if group is not None and group.size() > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    if not isinstance(is_skipped, Tensor):
        is_skipped = torch.full((), is_skipped, device=device, dtype=torch.bool)
    push_amax(histories, largest.masked_fill(is_skipped, 0.0))


@torch.no_grad()
def push_amax(histories: Sequence[AmaxHistory], largest: Tensor) -> None:
    """Record a step's amax as the newest step of each history, and set the current amax to 0.

    `largest` is fp32, one entry per history and operand, in order. 0 = the operand had no amax.
    """
    # The number of launches does not depend on the number of histories. No host sync.
    of_length: dict[int, list[tuple[AmaxHistory, str, Tensor]]] = {}
    values = iter(largest.split(1))
    for history in histories:
        history.allocate_steps(largest.device)
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
        foreach_copy_(
            collected,
            torch.zeros(len(collected), device=largest.device, dtype=torch.float32).split(1),
        )
    _update_has_all_amax([history for history in histories if not history.has_all_amax])


def _update_has_all_amax(histories: Sequence[AmaxHistory]) -> None:
    """Start or finish the copy that tells the host which histories have an amax of all operands."""
    for history in histories:
        history.poll_amax_check()
    histories_to_check = [h for h in histories if not h.has_all_amax and h._pending_check is None]
    if not histories_to_check:
        return
    if next(
        iter(histories_to_check[0].steps.values())
    ).is_meta:  # a dry run stands for a later step
        for history in histories_to_check:
            history.has_all_amax = True
        return
    answer = _PendingAmaxCheck(histories_to_check)
    for history in histories_to_check:
        history._pending_check = answer
        history.poll_amax_check()


def get_amax_history(module: nn.Module) -> AmaxHistory | None:
    """Return the amax history of a linear's matmuls, or None without delayed scaling."""
    history: AmaxHistory | None = getattr(getattr(module, "products", None), "history", None)
    return history
