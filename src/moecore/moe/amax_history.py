"""Maximum magnitudes (amax) of the last optimizer steps, for delayed FP8 scaling.

Example with a history of two steps. An operand has amax 3 and 5 in the micro-batches of step 0, 2
in step 1 and 1 in step 2. Its scale is computed from

    step 0   the amax of the micro-batch: 3, then 5
    step 1   5
    step 2   max(5, 2) = 5
    step 3   max(2, 1) = 2

The amax of the current step is collected separately. The history changes only between steps
(`advance_amax_histories`), so micro-batches of a step and their recomputation use the same scales.
Infinity, NaN and skipped steps are not recorded, because they would make the next scales wrong.

An operand without a recorded amax, such as a gradient that is always zero, is scaled by its current
amax. The device makes this decision until the host knows that all operands have a recorded amax
(`has_all_amax`).
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecore.base.streams import HostCopyOfTensor, record_host_wait
from moecore.base.torch_private import foreach_copy_

OperandName = Literal["input", "weight", "gradient"]
GRADIENTS = frozenset(("gradient", "dy", "dh"))  # of linears and of experts
LINEAR_OPERANDS: tuple[OperandName, ...] = ("input", "weight", "gradient")


class AmaxHistory:
    """The amax (largest magnitude) of each operand of a matmul in the last `num_steps` steps."""

    def __init__(self, num_steps: int, operands: Sequence[str] = LINEAR_OPERANDS) -> None:
        self.num_steps, self.operands = num_steps, operands
        self.current_amax: dict[str, Tensor] = {}  # fp32 [1], the amax of the current step so far
        # fp32 [num_steps], the newest step first, 0 = no amax; {} before the first step ends.
        self.recorded_amax: dict[str, Tensor] = {}
        self._past: dict[str, Tensor] = {}  # fp32 [1], the maximum over `recorded_amax`
        self.has_all_amax = False  # whether the host knows that every operand has a recorded amax
        # A copy of the smallest amax of each history, and this history's index.
        self._pending_copy: tuple[HostCopyOfTensor, int] | None = None

    def get_max_amax(self, operand: str) -> Tensor | None:
        """Return an operand's largest recorded amax, fp32 [1]; 0 or None = nothing is recorded."""
        return self._past.get(operand)

    def get_current_amax(self, device: torch.device, *, training: bool) -> dict[str, Tensor]:
        """Return {operand: fp32 [1]}, the step's amax that kernels update; {} = not recorded."""
        if not (training and torch.is_grad_enabled()):
            return {}
        # {} under torch.compile before the tensors exist: a graph cannot allocate tensors that its
        # backward writes to. `advance_amax_histories` allocates them.
        if not self.current_amax:
            if torch.compiler.is_compiling():
                return {}
            self.allocate_current_amax(device)
        return self.current_amax

    def allocate_current_amax(self, device: torch.device) -> None:
        """Allocate zeros for the current step's amax of each operand, unless they exist."""
        for operand in () if self.current_amax else self.operands:
            self.current_amax[operand] = torch.zeros(1, device=device, dtype=torch.float32)

    def allocate_recorded_amax(self, device: torch.device) -> None:
        """Allocate zeros for the recorded amax of each operand, unless `recorded_amax` exists."""
        for operand in () if self.recorded_amax else self.operands:
            self.recorded_amax[operand] = torch.zeros(
                self.num_steps, device=device, dtype=torch.float32
            )
            self._past[operand] = torch.zeros(1, device=device, dtype=torch.float32)

    def load_recorded_amax(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Restore the recorded amax from `state`, operand -> fp32 [n], newest first. Host sync."""
        if not (state or self.recorded_amax):
            return
        self.allocate_recorded_amax(device)
        for operand, steps in self.recorded_amax.items():
            newest = state.get(operand, steps[:0])[: self.num_steps]
            steps[len(newest) :] = 0
            steps[: len(newest)] = newest
            self._past[operand].copy_(steps.amax())  # in place, because CUDA graphs read it
        record_host_wait()
        self.has_all_amax = all(steps.any() for steps in self.recorded_amax.values())
        self._pending_copy = None

    def poll_pending_copy(self) -> None:
        """If the last copy to the host has arrived, update `has_all_amax`. No host sync."""
        if self._pending_copy is not None and self._pending_copy[0].has_arrived():
            copy, index = self._pending_copy
            self.has_all_amax, self._pending_copy = bool(copy.read()[index] > 0), None


@torch.no_grad()
def advance_amax_histories(
    histories: Sequence[AmaxHistory],
    device: torch.device,
    group: dist.ProcessGroup | None,
    *,
    is_skipped: bool | Tensor = False,
) -> None:
    """All-reduce (MAX) the current step's amax over a group, and record it in the histories.

    All ranks must pass the histories in equal order. A skipped step records no amax.
    """
    for history in histories:
        history.allocate_current_amax(device)
    largest = torch.cat([amax for history in histories for amax in history.current_amax.values()])
    if group is not None and group.size() > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    if not isinstance(is_skipped, Tensor):
        is_skipped = torch.full((), is_skipped, device=device, dtype=torch.bool)
    push_amax(histories, largest.masked_fill(is_skipped, 0.0))


@torch.no_grad()
def push_amax(histories: Sequence[AmaxHistory], step_amax: Tensor) -> None:
    """Record `step_amax` as the newest step, and set the current amax of all operands to 0.

    `step_amax` is fp32, one element per (history, operand). A 0 is not recorded.
    """
    # The number of launches does not depend on the number of histories. No host sync.
    of_length: dict[int, list[tuple[AmaxHistory, str, Tensor]]] = {}
    values = iter(step_amax.split(1))
    for history in histories:
        history.allocate_recorded_amax(step_amax.device)
        entries = of_length.setdefault(history.num_steps, [])
        entries += [(history, operand, next(values)) for operand in history.operands]
    for entries in of_length.values():
        newest = torch.cat([value for _, _, value in entries])[:, None]
        before = torch.stack([history.recorded_amax[operand] for history, operand, _ in entries])
        after = torch.where(newest > 0, torch.cat((newest, before[:, :-1]), 1), before)
        max_amax = after.amax(1)
        # in place, because CUDA graphs read these tensors
        foreach_copy_([h.recorded_amax[operand] for h, operand, _ in entries], after.unbind())
        foreach_copy_([h._past[operand] for h, operand, _ in entries], max_amax.split(1))
    collected = [amax for history in histories for amax in history.current_amax.values()]
    if collected:
        foreach_copy_(collected, torch.zeros_like(torch.cat(collected)).split(1))
    # The host learns by asynchronous copies which histories have an amax of all operands.
    for history in histories:
        if not history.has_all_amax:
            history.poll_pending_copy()
    unknown = [h for h in histories if not h.has_all_amax and h._pending_copy is None]
    if not unknown:
        return
    min_amax = torch.stack([torch.cat([*h._past.values()]).amin() for h in unknown])
    copy = None if min_amax.is_meta else HostCopyOfTensor(min_amax)
    for i, history in enumerate(unknown):
        if copy is None:  # a dry run stands for a later step
            history.has_all_amax = True
        else:
            history._pending_copy = copy, i
            history.poll_pending_copy()


def get_amax_history(module: nn.Module) -> AmaxHistory | None:
    """Return the amax history of a linear layer's matmuls; None without delayed scaling."""
    history: AmaxHistory | None = getattr(getattr(module, "products", None), "history", None)
    return history
