"""Checks and totals of rollouts on all ranks before they run micro-batches, in one all-gather.

If the rollouts of one rank are invalid, all ranks raise the error. Ranks that share rows must have
equal rollouts. All ranks receive the totals of the global batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.base.attributes import describe_function, describe_value
from moecore.base.rank_checks import gather_objects
from moecore.base.torch_private import all_gather_single
from moecore.parallel.mesh import Meshes
from moecore.rl.objectives import Mean
from moecore.rl.rollouts import PER_TOKEN, Rollouts


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """Micro-batches, responses and sum of token weights, of a rank's or the global batch."""

    num_micro_batches: int  # of each rank; in the global totals, the maximum over ranks
    weight: float  # sum of the weights of response tokens
    num_responses: int  # number of sequences with a positive weight


def gather_totals(
    meshes: Meshes,
    local_totals: Totals | None,
    problem: str | None,
    *,
    global_entries: Mapping[str, Any],
    shared_entries: Mapping[str, Any],
) -> Totals:
    """Return the totals of the global batch. Collective over the world, with a host sync.

    `local_totals` is None if this rank's rollouts have an error, `problem`. ValueError on every
    rank if a rank has a problem, if `global_entries` differ between ranks, or if `shared_entries`
    differ between the ranks of one data-parallel rank.
    """
    totals = local_totals or Totals(num_micro_batches=0, weight=0.0, num_responses=0)
    weight = torch.tensor(totals.weight, dtype=torch.float64, device="cpu").view(torch.int64)
    numbers = [meshes.data_rank, problem is not None, totals.num_micro_batches]
    numbers += [totals.num_responses, int(weight)]
    numbers += [_hash_entries(global_entries), _hash_entries(shared_entries)]
    local_row = torch.tensor(numbers, dtype=torch.int64, device=meshes.device_type)
    all_rows = local_row.new_empty(dist.get_world_size() * len(local_row))
    all_gather_single(all_rows, local_row)
    rows: list[list[int]] = all_rows.unflatten(0, (-1, len(local_row))).tolist()
    if any(row[1] for row in rows):
        raise ValueError(next(text for text in gather_objects(problem) if text is not None))
    if len({row[5] for row in rows}) > 1:
        raise ValueError(
            f"{', '.join(global_entries)} must be the same on all ranks: pass them alike everywhere"
        )
    firsts: dict[int, list[int]] = {}
    for row in rows:
        if firsts.setdefault(row[0], row)[2:] != row[2:]:
            raise ValueError(
                f"rollouts of data rank {row[0]} must be the same on the ranks that share its rows "
                "(tp, cp, pp): shard them by meshes.data_rank of meshes.data_ranks"
            )
    weights = [firsts[i][4] for i in sorted(firsts)]
    weight = torch.tensor(weights, dtype=torch.int64, device="cpu").view(torch.float64)
    return Totals(
        num_micro_batches=max(row[2] for row in rows),
        weight=float(weight.sum()),
        num_responses=sum(row[3] for row in firsts.values()),
    )


def _hash_entries(entries: Mapping[str, Any]) -> int:
    """Return a 56-bit hash of names and values, which is equal on all ranks for equal entries."""
    # The closure of an objective may have data of one rank, such as a list of metrics.
    describe = partial(describe_function, reads_data=False)
    items = entries.items()
    text = repr({name: (describe if callable(x) else describe_value)(x) for name, x in items})
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")


def sum_over_data_ranks(local_value: Tensor, meshes: Meshes) -> Tensor:
    """Sum `local_value` over data-parallel ranks, without its replicas on tp, cp and pp ranks."""
    inner = (meshes.dense.get_local_rank(name) for name in ("pp", "cp", "tp"))
    total = local_value.clone() if not any(inner) else torch.zeros_like(local_value)
    dist.all_reduce(total)
    return total


def check_token_ids(tokens_N: Tensor, vocab_size: int | None) -> None:
    """Raise ValueError for a token id that is negative or >= `vocab_size` (None = not known)."""
    if not len(tokens_N):
        return
    min_id, max_id = (int(x) for x in tokens_N.aminmax())
    if min_id < 0 or (vocab_size is not None and max_id >= vocab_size):
        raise ValueError(
            f"Rollouts.tokens_N ({min_id} to {max_id}) must be in [0, vocab_size {vocab_size}): "
            "use the tokenizer of this model"
        )


def compute_totals(rollouts: Rollouts, num_micro_batches: int, group_size: int) -> Totals:
    """Return the totals of this rank's rollouts; ValueError for invalid values or weights."""
    for name in PER_TOKEN:
        value_N = getattr(rollouts, name)
        if value_N is None:
            continue
        mask_N = rollouts.response_mask_N.to(value_N.device)
        # In fp32, in which objectives read them: 1e308 of fp64 is infinite there.
        if not bool((value_N.float().isfinite() | ~mask_N).all()):
            raise ValueError(
                f"Rollouts.{name} must be finite in responses, as fp32: leave out sequences "
                "without numbers"
            )
    weights_N = _compute_weights(rollouts)
    if bool((weights_N < 0).any()):
        raise ValueError("Rollouts.weights_N must be >= 0 in responses: clamp them")
    num_responses = int((_sum_weights_by_sequence(rollouts, weights_N) > 0).sum())
    if group_size > 1 and num_responses < rollouts.num_sequences:
        raise ValueError(
            f"rollouts ({num_responses} responses with a weight) must have one in each sequence "
            f"({rollouts.num_sequences}) where sequences belong together: leave pairs out"
        )
    return Totals(
        num_micro_batches=num_micro_batches,
        weight=float(weights_N.sum()),
        num_responses=num_responses,
    )


def compute_shares(rollouts: Rollouts, mean: Mean, totals: Totals, loss_factor: float) -> Tensor:
    """Return each token's weight in the global mean of the loss, times `loss_factor`, fp32 [N]."""
    weights_N = _compute_weights(rollouts)
    if mean == "token":
        # This order, because a factor over weights of 1e-308 overflows.
        return (weights_N / totals.weight * loss_factor).float()
    of_sequence_N = _sum_weights_by_sequence(rollouts, weights_N)[rollouts.sequence_N.cpu()]
    shares_N = torch.where(weights_N > 0, weights_N / of_sequence_N, 0)
    return (shares_N * (loss_factor / totals.num_responses)).float()


def _compute_weights(rollouts: Rollouts) -> Tensor:
    """Return each token's weight in a mean of losses, fp64 [N] on the CPU; 0 outside responses."""
    mask_N = rollouts.response_mask_N.cpu()
    weights_N = rollouts.weights_N
    unit_weights_N = torch.ones_like(mask_N, dtype=torch.float64)
    return (unit_weights_N if weights_N is None else weights_N.cpu().double()).where(mask_N, 0)


def _sum_weights_by_sequence(rollouts: Rollouts, weights_N: Tensor) -> Tensor:
    """Return the sum of the token weights of each sequence, fp64 [sequences]."""
    sums_n = weights_N.new_zeros(rollouts.num_sequences)
    return sums_n.index_add(0, rollouts.sequence_N.cpu(), weights_N)
