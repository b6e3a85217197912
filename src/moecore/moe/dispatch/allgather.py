"""All-gather of every token, partial sums sent home: the simple dispatcher for small groups.

Legend: T local tokens, C the most tokens of any rank, D model dim, K experts per token, G ranks of
the group (ep * etp), S = G * C source rows.

Better than all-to-all where nearly every token needs nearly every rank (K >= ep), because nothing
is sorted before sending. One host sync per forward (`_exchange_counts`), none in backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from moecore._compat import all_gather_single
from moecore.moe.dispatch.base import ExpertInput, ExpertPlacement, group_rows
from moecore.moe.router import Routing


@dataclass(frozen=True, slots=True)
class AllGatherPlan:
    """What combine needs: tokens at home, and the padded rows per rank."""

    num_tokens: int
    rows_per_rank: int


class AllGatherDispatcher:
    """Gives every rank of the group all of its tokens.

    Ranks with fewer tokens than the most pad with rows that no expert reads.

    Args:
        placement: the dispatch group and who owns what.
    """

    def __init__(self, placement: ExpertPlacement) -> None:
        self.placement = placement

    def dispatch(self, x_TD: Tensor, routing: Routing) -> ExpertInput:
        """Gather all tokens of the group. One host sync; 4 collectives."""
        p, T = self.placement, x_TD.shape[0]
        block_TK = torch.div(routing.expert_ids_TK, p.num_local, rounding_mode="floor")
        pairs_P = (block_TK.flatten() == torch.arange(p.ep, device=x_TD.device)[:, None]).sum(1)
        C, num_rows = _exchange_counts(T, pairs_P, p)
        pad = (0, 0, 0, C - T)
        rows_SD = _GatherRanks.apply(F.pad(x_TD, pad), p.group)
        weights_SK = _GatherRanks.apply(F.pad(routing.weights_TK, pad), p.group)
        ids_SK = _gather_ranks(F.pad(routing.expert_ids_TK, pad, value=-1), p.group)
        row_ids_R, weights_R, offsets_e = group_rows(
            ids_SK, weights_SK, first=p.first_local, num_local=p.num_local, num_rows=num_rows
        )
        plan = AllGatherPlan(T, C)
        return ExpertInput(rows_SD, row_ids_R, weights_R, offsets_e, offsets_e[-1], plan)

    def combine(self, y_SD: Tensor, plan: AllGatherPlan) -> Tensor:
        """Send every rank its tokens' partial sums and add them in fp32. 1 collective."""
        return _SumRanks.apply(y_SD, self.placement.group)[: plan.num_tokens]


def _exchange_counts(num_tokens: int, pairs_P: Tensor, p: ExpertPlacement) -> tuple[int, int]:
    """Return C and R. The one host sync of this dispatcher: both size a buffer."""
    mine = F.pad(pairs_P, (1, 0), value=num_tokens)
    counts = _gather_ranks(mine[None], p.group).tolist()
    block = p.first_local // p.num_local
    return max(row[0] for row in counts), sum(row[1 + block] for row in counts)


def _gather_ranks(x_C: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x_C.new_empty((group.size() * x_C.shape[0], *x_C.shape[1:]))
    all_gather_single(out, x_C.contiguous(), group=group)
    return out


def _sum_ranks(y_SD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Rank g's C rows travel to rank g, which adds what it gets in fp32, in rank order."""
    received = torch.empty_like(y_SD, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, y_SD.contiguous(), group=group)
    parts_GCD = received.unflatten(0, (group.size(), y_SD.shape[0] // group.size()))
    dtype = torch.promote_types(y_SD.dtype, torch.float32)
    return parts_GCD.sum(0, dtype=dtype).to(y_SD.dtype)


class _GatherRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_C: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather_ranks(x_C, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _sum_ranks(grads[0], ctx.group), None


class _SumRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_SD: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _sum_ranks(y_SD, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gather_ranks(grads[0], ctx.group), None
