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


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """Totals of a batch: of one data-parallel rank, or of the global batch.

    Attributes:
        num_micro_batches: of each rank; in the global totals, the maximum over ranks.
        weight: sum of the weights of response tokens.
        num_responses: number of sequences with a positive weight.
    """

    num_micro_batches: int
    weight: float
    num_responses: int


def gather_totals(
    meshes: Meshes,
    local_totals: Totals | None,
    problem: str | None,
    *,
    global_entries: Mapping[str, Any],
    shared_entries: Mapping[str, Any],
) -> Totals:
    """Return the totals of the global batch. Collective over the world, with a host sync.

    Args:
        local_totals: totals of this rank's rollouts; None if this rank has a `problem`.
        problem: the error text of this rank; None = no error.
        global_entries: name -> value that must be equal on all ranks.
        shared_entries: name -> value that must be equal on the ranks of one data-parallel rank.

    Raises:
        ValueError: on every rank, if a rank has a problem or if entries differ between ranks.
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
    """Return the sum of `local_value` over data-parallel ranks; tp, cp and pp ranks count once."""
    inner = (meshes.dense.get_local_rank(name) for name in ("pp", "cp", "tp"))
    total = local_value.clone() if not any(inner) else torch.zeros_like(local_value)
    dist.all_reduce(total)
    return total
