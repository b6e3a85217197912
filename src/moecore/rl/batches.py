"""RolloutBatch: rollouts that data ranks compute together, and the rows of this rank.

Legend: N tokens of the rollouts, L MoE layers, K experts per token.

With dynamic context parallelism the data ranks gather their rollouts, schedule all sequences
(`packing/schedule.py`) and all-reduce the scores:

    data rank 0    s0 s1             round 0    ranks 0 and 1: s2
    data rank 1    s2 s3 s4          round 1    rank 0: s0 s4    rank 1: s1 s3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from moecore.base.rank_checks import gather_objects
from moecore.packing.schedule import schedule_documents
from moecore.parallel.mesh import Meshes
from moecore.rl.micro_batches import RolloutRow, RowLimits, build_row, group_sequences
from moecore.rl.rollouts import Rollouts
from moecore.rl.totals import Totals


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenScores:
    """Detached log-probabilities, entropies and expert ids ("routes") of rollout tokens.

    Tensors are on the device. A field is None if it was not requested.
    """

    log_probs_N: Tensor  # fp32, of response tokens given the tokens before them; 0 elsewhere
    entropy_N: Tensor | None  # fp32, of each response token's distribution, in nats
    routes_NLK: Tensor | None = None  # int32, each token's experts in each MoE layer


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutBatch:
    """The rollouts of a data rank, or with dynamic cp of all data ranks, and this rank's rows."""

    rollouts: Rollouts  # of this data rank; with dynamic context parallelism, of all data ranks
    rows: list[RolloutRow]  # as many on every rank
    totals: Totals  # of the global batch
    groups: Sequence[dist.ProcessGroup]  # whose ranks compute scores of other tokens or layers
    # the tokens of this data rank in `rollouts`
    local_tokens: slice = field(default_factory=lambda: slice(None))

    def make_empty_scores(self, *, entropy: bool) -> TokenScores:
        """Return scores that are 0 for all tokens of `rollouts`, with entropies if `entropy`."""
        device = self.rows[0].token_idx_N.device
        zeros_N = torch.zeros(len(self.rollouts.tokens_N), device=device, dtype=torch.float32)
        return TokenScores(log_probs_N=zeros_N, entropy_N=zeros_N.clone() if entropy else None)

    def reduce_scores(self, scores: TokenScores) -> TokenScores:
        """All-reduce log-probabilities and entropies over `groups`; return this rank's scores."""
        changes = {n: x for n in scores.__slots__ if (x := getattr(scores, n)) is not None}
        for name, group in product(("log_probs_N", "entropy_N"), self.groups):
            if name in changes:
                dist.all_reduce(changes[name], group=group)
        return replace(scores, **{name: x[self.local_tokens] for name, x in changes.items()})


def schedule_batch(
    rollouts: Rollouts, totals: Totals, limits: RowLimits, group_size: int, meshes: Meshes
) -> RolloutBatch:
    """Schedule all data ranks' rollouts into packed rows, one per micro-batch. Collective.

    `limits` are the row limits for cp 1. ValueError on all ranks if a sequence is too long.
    """
    local_values = {"cu_seqlens": rollouts.cu_seqlens.diff(), **rollouts.get_token_values()}
    parts = [{name: value.cpu() for name, value in local_values.items()}]
    data_groups = [meshes.dense.get_group(axis) for axis in ("dp_shard", "dp_replicate")]
    for data_group in data_groups:
        parts = [part for of_rank in gather_objects(parts, data_group) for part in of_rank]
    first = sum(len(part["tokens_N"]) for part in parts[: meshes.data_rank])
    local_tokens = slice(first, first + len(rollouts.tokens_N))
    values = {name: torch.cat([part[name] for part in parts]) for name in local_values}
    values["cu_seqlens"] = F.pad(values["cu_seqlens"].cumsum(0), (1, 0))
    rollouts = rollouts.replace(**values)
    rows = [row for _, row in schedule_rows(rollouts, limits, group_size, meshes)]
    groups = [*(meshes.pipeline_groups or ())[:1], *data_groups]
    return RolloutBatch(
        rollouts=rollouts, rows=rows, totals=totals, groups=groups, local_tokens=local_tokens
    )


def schedule_rows(
    rollouts: Rollouts, limits: RowLimits, group_size: int, meshes: Meshes
) -> list[tuple[list[int], RolloutRow]]:
    """Schedule the rollouts of all data ranks; return this rank's rows, with sequence indices.

    The arguments must be equal on all data ranks. ValueError if a sequence is too long.
    """
    units, lengths = group_sequences(rollouts, group_size), rollouts.lengths
    largest = replace(limits, cp=meshes.data_ranks & -meshes.data_ranks)
    # Each sequence of a unit has its own padding, but the schedule pads the unit only once.
    padding = largest if group_size > 1 else limits
    rank_unit = largest.row_unit // largest.cp
    schedule = schedule_documents(
        [padding.sum_padded_lengths(lengths[i] for i in unit) for unit in units],
        ranks=meshes.data_ranks,
        max_tokens=limits.max_tokens // rank_unit * rank_unit,
    )
    rows = []
    for group in schedule.select_rank_groups(meshes.data_rank):
        sequence_idxs = [i for unit in group.documents for i in units[unit]]
        row = build_row(rollouts, sequence_idxs, replace(limits, cp=group.cp), meshes.device)
        is_first = group.first_rank == meshes.data_rank
        rows.append((sequence_idxs, replace(row, is_first=is_first)))
    return rows
