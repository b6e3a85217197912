"""Clones of hot experts: ranks with few tokens compute a part of the tokens of busy ranks' experts.

    routing -> counts of all ranks -> plan (kernels/routing/clones.py) -> physical ids -> dispatch
    weights of cloned experts are sent; Experts compute e + n experts
    gradients of clones are returned, and added in the order of the places for clones

Legend: E experts, e experts of a rank, c places for clones on a rank, n clones of this forward on
this rank, G ranks of the dispatch group, T local tokens, K experts per token.

A clone exists for one forward and its backward. It is not a parameter: checkpoints, optimizers and
norms do not include clones. The cloned experts are a function of all ranks' choices, or of a plan
that is used for several steps (`PeriodicPlan`). A forward that is recomputed in backward therefore
has the same clones.

A forward without `PeriodicPlan` has one all-gather of E numbers and one host sync. If there are
clones, each tensor of weights has one all-to-all in forward and one in backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.base.options.dispatch import CloneOptions
from moecore.base.torch_private import all_gather_single, is_inside_backward
from moecore.kernels.routing.clones import ClonePlan, assign_physical_ids, plan_clones
from moecore.kernels.routing.counts import add_expert_counts
from moecore.moe.dispatch.collectives import run_collectives
from moecore.moe.pairs import Pairs
from moecore.moe.placement import ExpertPlacement
from moecore.moe.records import ExpertInput, Routing


class Cloner:
    """Chooses a layer's busy experts, and other ranks for clones (temporary copies) of these.

    A clone computes a part of its expert's tokens. `group` has the ranks with this rank's etp
    index, in ep order.
    """

    def __init__(
        self, placement: ExpertPlacement, group: dist.ProcessGroup, options: CloneOptions
    ) -> None:
        self.options = options
        self._placement, self._group = placement, group
        self._counts_2: Tensor | None = None
        self.plan: PeriodicPlan | None = None
        if options.refresh != "forward":
            self.plan = PeriodicPlan(placement, options.refresh, min_share=options.min_share)

    def get_counts(self, device: torch.device) -> Tensor:
        """Return int64 [2]: this rank's clones (expert copies) and forwards since the last step."""
        if self._counts_2 is None:
            self._counts_2 = torch.zeros(2, dtype=torch.int64, device=device)
        return self._counts_2

    def drop_step_counts(self) -> None:
        """Set the counts since the last optimizer step to 0."""
        if self._counts_2 is not None:
            self._counts_2.zero_()

    @torch.compiler.disable
    def place_clones(
        self, routing: Routing, pairs: Pairs | None, *, training: bool
    ) -> tuple[Routing, Clones | None]:
        """Plan a forward's clones (expert copies on ranks with few tokens).

        Returns the routing with physical ids, which number experts and clones, and the clones or
        None. If `training`, `get_counts` includes this forward. Collective without `PeriodicPlan`.
        """
        p, ids_TK = self._placement, routing.expert_ids_TK
        if ids_TK.is_meta:  # loads are even, so there are no clones
            return replace(routing, physical_TK=p.convert_to_physical_ids(ids_TK)), None
        plan, before_E = self._make_clone_plan(ids_TK, pairs)
        sizes = dict(num_local_experts=p.num_local, clones_per_rank=p.num_clones)
        routing = replace(routing, physical_TK=assign_physical_ids(ids_TK, before_E, plan, **sizes))
        if training and torch.is_grad_enabled() and not is_inside_backward():
            is_clone_c = plan.experts_N.view(p.ep, -1)[dist.get_rank(self._group)] >= 0
            counts_2 = self.get_counts(ids_TK.device)
            counts_2[0] += is_clone_c.sum()
            counts_2[1] += 1
        # Host sync without a `PeriodicPlan`.
        experts = plan.experts_N.tolist() if self.plan is None else self.plan.experts
        has_clones = max(experts) >= 0
        return routing, Clones.from_plan(experts, p, self._group, pairs) if has_clones else None

    def _make_clone_plan(self, ids_TK: Tensor, pairs: Pairs | None) -> tuple[ClonePlan, Tensor]:
        """Return the plan of clones, and int32 [E]: each expert's tokens on lower ranks."""
        p = self._placement
        if self.plan is not None:
            none_E = torch.zeros(p.num_experts, dtype=torch.int32, device=ids_TK.device)
            return self.plan.divide_choices(ids_TK), none_E
        local_counts_1E = _count_tokens(ids_TK, p.num_experts)
        counts_GE = local_counts_1E.new_empty(p.group.size(), p.num_experts)
        run_collectives(all_gather_single, [counts_GE], [local_counts_1E], pairs, group=p.group)
        plan = plan_clones(
            counts_GE.sum(0, dtype=torch.int32),
            num_ranks=p.ep,
            clones_per_rank=p.num_clones,
            min_share=self.options.min_share,
        )
        return plan, counts_GE[: dist.get_rank(p.group)].sum(0, dtype=torch.int32)

    def add_clones_to_input(self, inp: ExpertInput, clones: Clones | None) -> ExpertInput:
        """Return `inp` with `clones`; its row offsets exclude the empty slots for clones."""
        number = self._placement.num_local + (0 if clones is None else clones.num_local_clones)
        index = inp.index._replace(offsets_e=inp.index.offsets_e[:number])
        return replace(inp, index=index, clones=clones)


@dataclass(frozen=True, kw_only=True, slots=True)
class Clones:
    """Sends experts' weights to their clones (copies on other ranks), and gradients back."""

    group: dist.ProcessGroup
    pairs: Pairs | None  # runs another micro-batch while weights are sent
    # Cloned experts of this rank, sorted by destination and then by slot; an id may repeat.
    send_ids: tuple[int, ...]
    send_splits: tuple[int, ...]  # number of clones sent to each rank
    receive_splits: tuple[int, ...]  # number of clones received from each rank
    order: tuple[int, ...]  # index of the received clone in each slot

    @classmethod
    def from_plan(
        cls,
        clone_experts: Sequence[int],
        placement: ExpertPlacement,
        group: dist.ProcessGroup,
        pairs: Pairs | None = None,
    ) -> Clones:
        """Return the clones of a plan: the expert id in each slot of all ranks; -1 = no clone."""
        # Example, three ranks of two experts and two places each, experts [4, 3, -1, -1, 2, 0]:
        # rank 0 sends its expert 0 to rank 2. Rank 0 receives expert 3 from rank 1 and expert 4
        # from rank 2, so its order is [1, 0].
        p, rank = placement, dist.get_rank(group)
        ranks = range(p.ep)
        rows = [clone_experts[q * p.num_clones : (q + 1) * p.num_clones] for q in ranks]
        owners = [[x // p.num_local for x in row if x >= 0] for row in rows]
        local_ids = range(rank * p.num_local, (rank + 1) * p.num_local)
        send_experts = [[x - local_ids.start for x in row if x in local_ids] for row in rows]
        arrivals = sorted(range(len(owners[rank])), key=lambda place: owners[rank][place])
        return cls(
            group=group,
            pairs=pairs,
            send_ids=tuple(x for row in send_experts for x in row),
            send_splits=tuple(map(len, send_experts)),
            receive_splits=tuple(owners[rank].count(q) for q in ranks),
            order=tuple(arrivals.index(place) for place in range(len(arrivals))),
        )

    @property
    def num_local_clones(self) -> int:
        """Number of clones (copies of other ranks' experts) on this rank, n."""
        return len(self.order)

    def fetch_clone_weights(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Send experts' weights [e, ...] to clones; return local clones [n, ...]. Collective."""
        expert_rows = [t[list(self.send_ids)] for t in tensors]
        rows = self._exchange(expert_rows, self.num_local_clones, to_experts=False)
        return rows if self._is_in_order else [t[list(self.order)] for t in rows]

    @torch.no_grad()
    def add_clone_grads_(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Add the clones' gradients of all ranks to the experts' gradients; return [e, ...].

        Each of `grads`, [e + n, ...], has this rank's e experts, then its n clones. The experts'
        part is changed in place: a sum in fp32, rounded once. Collective.
        """
        n = self.num_local_clones
        expert_grads = [grad[: grad.shape[0] - n] for grad in grads]
        clone_grads = [grad[grad.shape[0] - n :] for grad in grads]
        if not self._is_in_order:
            places = sorted(range(n), key=self.order.__getitem__)
            clone_grads = [grad[places] for grad in clone_grads]
        received_grads = self._exchange(clone_grads, len(self.send_ids), to_experts=True)
        for grad, parts in zip(expert_grads, received_grads, strict=True):
            for expert in sorted(set(self.send_ids)):
                total = grad[expert].to(torch.promote_types(grad.dtype, torch.float32))
                for part, clone in zip(parts, self.send_ids, strict=True):
                    if clone == expert:
                        total = total + part
                grad[expert] = total
        return expert_grads

    @property
    def _is_in_order(self) -> bool:
        return self.order == tuple(range(self.num_local_clones))

    def _exchange(self, tensors: Sequence[Tensor], num_rows: int, to_experts: bool) -> list[Tensor]:
        """All-to-all one row per expert, to experts or to clones; return `num_rows` rows each."""
        splits = [list(self.receive_splits), list(self.send_splits)]
        receive, send = reversed(splits) if to_experts else splits
        outs = [t.new_empty((num_rows, *t.shape[1:])) for t in tensors]
        run_collectives(
            dist.all_to_all_single,
            [*map(view_as_sendable_dtype, outs)],
            [view_as_sendable_dtype(t.contiguous()) for t in tensors],
            self.pairs,
            output_split_sizes=receive,
            input_split_sizes=send,
            group=self.group,
        )
        return outs


def view_as_sendable_dtype(tensor: Tensor) -> Tensor:
    """Return 1-byte tensors viewed as uint8, because NCCL cannot send FP8; others unchanged."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


def _count_tokens(ids_TK: Tensor, num_experts: int) -> Tensor:
    """Return int64 [1, E], this rank's tokens of each expert."""
    counts_1E = torch.zeros(1, num_experts, dtype=torch.int64, device=ids_TK.device)
    add_expert_counts(counts_1E, ids_TK)
    return counts_1E


class PeriodicPlan:
    """A layer's clones (expert copies) for `num_steps` steps, planned from the loads of one step.

    The plan is identical on all ranks. Each rank sends to each clone the planned fraction of the
    rank's tokens, without communication of counts. Checkpoints do not contain the plan, so a
    resumed run has no clones in its first step.
    """

    def __init__(self, placement: ExpertPlacement, num_steps: int, *, min_share: float) -> None:
        self._placement, self._num_steps, self._min_excess = placement, num_steps, min_share
        self.clear()

    def clear(self) -> None:
        """Remove all planned clones; the end of the next step plans new ones. No communication."""
        self._steps_remaining = 0
        # The expert of each slot, on the host; -1 = empty.
        self.experts = [-1] * (self._placement.ep * self._placement.num_clones)
        # The plan, and the loads of the experts in the slots; None = no slot has an expert.
        self._plan_and_loads_N: tuple[ClonePlan, Tensor] | None = None

    def divide_choices(self, ids_TK: Tensor) -> ClonePlan:
        """Return a forward's plan: the range of this rank's tokens that each clone computes."""
        # No communication, no host sync. Example: expert 0 had nine tokens, and its clone has
        # tokens 6 to 9. Of three choices on this rank, the last is sent to the clone.
        if self._plan_and_loads_N is None:
            empty_N = ids_TK.new_full((len(self.experts),), -1, dtype=torch.int32)
            return ClonePlan(empty_N, empty_N, empty_N)
        plan, loads_N = self._plan_and_loads_N
        local_counts_1E = _count_tokens(ids_TK, self._placement.num_experts)
        local_counts_N = local_counts_1E[0, plan.experts_N.clamp(min=0).long()]
        starts_N, stops_N = (
            torch.div(t * local_counts_N, loads_N, rounding_mode="floor").int() for t in plan[1:]
        )
        return ClonePlan(plan.experts_N, starts_N, stops_N)

    def update_from_loads(self, loads_E: Tensor, *, is_skipped: bool | Tensor) -> None:
        """Plan clones from a step's loads if the last plan is `num_steps` steps old.

        A skipped step (a bool, or a bool scalar on the device) changes no plan. A new plan
        synchronises the host.
        """
        if is_skipped is True:
            return
        self._steps_remaining -= 1
        if self._steps_remaining > 0:
            return
        self._steps_remaining = self._num_steps
        if is_skipped:  # host sync for a tensor
            return
        p = self._placement
        plan = plan_clones(
            loads_E.int(), num_ranks=p.ep, clones_per_rank=p.num_clones, min_share=self._min_excess
        )
        self._plan_and_loads_N = plan, loads_E[plan.experts_N.clamp(min=0).long()].clamp(min=1)
        self.experts = plan.experts_N.tolist()
