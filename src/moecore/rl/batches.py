r"""RolloutBatch: rollouts that data ranks compute together, and the rows of this rank.

Legend: N tokens of the rollouts, L MoE layers, K experts per token.

Without dynamic context parallelism each data rank computes its own rollouts. With dynamic context
parallelism the data ranks gather their rollouts and schedule all sequences (`schedule_documents`):

    data rank 0    s0 s1     \                     round 0    ranks 0 and 1: s2
                              s0 s1 s2 s3 s4  ->
    data rank 1    s2 s3 s4  /                     round 1    rank 0: s0 s4    rank 1: s1 s3

Scores of all sequences are then all-reduced, and each data rank selects its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.base.rank_checks import gather_objects
from moecore.packing.schedule import schedule_documents
from moecore.parallel.mesh import Meshes
from moecore.rl.micro_batches import (
    RolloutRow,
    RowLimits,
    build_row,
    group_sequences,
    sum_padded_lengths,
)
from moecore.rl.rollouts import Rollouts
from moecore.rl.totals import Totals

DATA_AXES = ("dp_shard", "dp_replicate")  # the inner axis first


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenScores:
    """Values of the tokens of rollouts, on the device and detached; None = not requested."""

    log_probs_N: Tensor  # fp32, of response tokens given the tokens before them; 0 elsewhere
    entropy_N: Tensor | None  # fp32, of each response token's distribution, in nats
    routes_NLK: Tensor | None = None  # int32, each token's experts in each MoE layer


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutBatch:
    """Rollouts that data ranks compute together, and the rows of this rank."""

    rollouts: Rollouts  # of this data rank; with dynamic context parallelism, of all data ranks
    rows: list[RolloutRow]  # as many on every rank
    totals: Totals  # of the global batch
    local_tokens: slice  # the tokens of this data rank in `rollouts`
    groups: list[dist.ProcessGroup]  # whose ranks compute scores of other tokens or layers

    def make_empty_scores(self, *, entropy: bool) -> TokenScores:
        """Return scores of 0 for the tokens of `rollouts`, with entropies if requested."""
        device = self.rows[0].token_idx_N.device
        zeros_N = torch.zeros(len(self.rollouts.tokens_N), device=device, dtype=torch.float32)
        return TokenScores(log_probs_N=zeros_N, entropy_N=zeros_N.clone() if entropy else None)

    def reduce_scores(self, scores: TokenScores) -> TokenScores:
        """All-reduce the log-probabilities and entropies of `rollouts`; return local scores."""
        changes: dict[str, Tensor] = {}
        for name in TokenScores.__dataclass_fields__:
            if (values_N := getattr(scores, name)) is not None:
                for group in self.groups if name != "routes_NLK" else ():
                    dist.all_reduce(values_N, group=group)
                changes[name] = values_N[self.local_tokens]
        return replace(scores, **changes)


def build_batch(
    rollouts: Rollouts,
    totals: Totals,
    limits: RowLimits,
    assignments: Sequence[Sequence[int]],
    meshes: Meshes,
) -> RolloutBatch:
    """Return a batch of this data rank's rollouts, with a row for each of `assignments`."""
    num_padding_rows = max(1, totals.num_micro_batches) - len(assignments)
    rows = [
        build_row(rollouts, sequence_idxs, limits, meshes.device)
        for sequence_idxs in (*assignments, *([()] * num_padding_rows))
    ]
    return RolloutBatch(
        rollouts=rollouts,
        rows=rows,
        totals=totals,
        local_tokens=slice(None),
        groups=[*(meshes.pipeline_groups or ())[:1]],
    )


def schedule_batch(
    rollouts: Rollouts, totals: Totals, limits: RowLimits, group_size: int, meshes: Meshes
) -> RolloutBatch:
    """Return a batch of all data ranks' rollouts, with a row for each round. Collective.

    `limits` are of cp 1. Raises a ValueError, equal on all ranks, if a sequence is too long.
    """
    tensors = {"cu_seqlens": rollouts.cu_seqlens, **rollouts.get_token_values()}
    parts = [rollouts.replace(**{name: value.cpu() for name, value in tensors.items()})]
    axis_groups = (meshes.dense.get_group(axis) for axis in DATA_AXES)
    data_groups = [group for group in axis_groups if group.size() > 1]
    for group in data_groups:
        parts = [part for of_rank in gather_objects(parts, group) for part in of_rank]
    first = sum(len(part.tokens_N) for part in parts[: meshes.data_rank])
    local_tokens = slice(first, first + len(rollouts.tokens_N))
    rollouts = Rollouts.concatenate(parts)
    units = group_sequences(rollouts, group_size)
    largest = replace(limits, cp=meshes.data_ranks & -meshes.data_ranks)
    # Each sequence of a unit has its own padding, but the schedule pads the unit only once.
    lengths = sum_padded_lengths(rollouts, units, largest if group_size > 1 else limits)
    rank_unit = largest.row_unit // largest.cp
    schedule = schedule_documents(
        lengths,
        ranks=meshes.data_ranks,
        max_tokens=limits.max_tokens // rank_unit * rank_unit,
    )
    rows = [
        build_row(
            rollouts,
            [sequence for unit in group.documents for sequence in units[unit]],
            replace(limits, cp=group.cp),
            meshes.device,
            is_first=group.first_rank == meshes.data_rank,
        )
        for group in schedule.select_rank_groups(meshes.data_rank)
    ]
    return RolloutBatch(
        rollouts=rollouts,
        rows=rows,
        totals=totals,
        local_tokens=local_tokens,
        groups=[*(meshes.pipeline_groups or ())[:1], *data_groups],
    )
