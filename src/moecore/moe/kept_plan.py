"""A plan of clones that stays for some optimizer steps, made from the loads of one of them.

    loads of a step -> plan (kernels/routing/clones.py), the same on all ranks
    choices of a rank -> their part of the plan: each divides its own tokens by the plan's shares

No rank needs another one's counts, and the host needs no plan but when it is made. No checkpoint
has it: a run that resumes has clones after its first step.

Legend: E experts, N places for clones, T local tokens, K experts per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moecore.kernels.routing.clones import ClonePlan, plan_clones
from moecore.kernels.routing.counts import add_expert_counts
from moecore.moe.placement import ExpertPlacement


class KeptPlan:
    """The plan of a layer.

    Args:
        placement: of the layer's experts, with room for clones.
        num_steps: how many optimizer steps it stays.
        least: as of `plan_clones`.
        is_read: whether the host needs it.

    Attributes:
        experts: the expert in each place, where the host needs them; none has one at first.
    """

    def __init__(
        self, placement: ExpertPlacement, num_steps: int, *, least: float, is_read: bool
    ) -> None:
        self._placement, self._num_steps, self._least = placement, num_steps, least
        self._is_read = is_read
        self._left = 0  # steps
        self._plan: ClonePlan | None = None  # stays where it is: CUDA graphs read it
        self._loads_N: Tensor | None = None  # of the experts in the places
        self.experts: list[int] = []
        self.clear()

    def clear(self) -> None:
        """Drop the plan: the next step that ends makes one. No communication, no host sync."""
        self._left = 0
        self.experts = [-1] * (self._placement.ep * self._placement.num_clones)
        if self._plan is not None:
            self._plan.experts_N.fill_(-1)

    def part_of(self, ids_TK: Tensor) -> ClonePlan:
        """Return the plan of this rank's choices alone: the same shares of each expert's tokens.

        No communication, no host sync.

        Args:
            ids_TK: int32, expert ids; -1 = dropped.

        Example, a clone has tokens 6 to 9 of the nine that expert 0 had: of three choices here the
        last goes to it.
        """
        plan, loads_N = self._tensors(ids_TK.device)
        E = self._placement.num_experts
        mine_1E = torch.zeros(1, E, dtype=torch.int64, device=ids_TK.device)
        add_expert_counts(mine_1E, ids_TK)
        mine_N = mine_1E[0, plan.experts_N.clamp(min=0).long()]
        starts_N, stops_N = (
            torch.div(t * mine_N, loads_N, rounding_mode="floor").int() for t in plan[1:]
        )
        return ClonePlan(plan.experts_N, starts_N, stops_N)

    def end_step(self, loads_E: Tensor, *, skipped: bool | Tensor) -> None:
        """Make a plan if it is time. No host sync, but where the host needs the plan.

        Args:
            loads_E: int64, choices of each expert in the step, over all ranks.
            skipped: whether nothing moves; a bool scalar on the device is not waited for.
        """
        if skipped is True:
            return
        self._left -= 1
        if self._left > 0:
            return
        self._left = self._num_steps
        p, (plan, loads_N) = self._placement, self._tensors(loads_E.device)
        sizes = dict(num_ranks=p.ep, num_clones=p.num_clones)
        made = plan_clones(loads_E.int(), **sizes, least=self._least)
        made_loads_N = loads_E[made.experts_N.clamp(min=0).long()].clamp(min=1)
        for mine, new in zip((*plan, loads_N), (*made, made_loads_N), strict=True):
            mine.copy_(new if skipped is False else torch.where(skipped, mine, new))
        if self._is_read:
            self.experts = plan.experts_N.tolist()

    def _tensors(self, device: torch.device) -> tuple[ClonePlan, Tensor]:
        if self._plan is None or self._loads_N is None:
            empty_N = torch.full((len(self.experts),), -1, dtype=torch.int32, device=device)
            self._plan = ClonePlan(empty_N, empty_N.clone(), empty_N.clone())
            self._loads_N = torch.ones_like(empty_N, dtype=torch.int64)
        return self._plan, self._loads_N
