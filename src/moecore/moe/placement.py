"""Placement of experts on ranks, computed only from the mesh.

Tokens are sent to physical experts: the experts of a rank, followed by slots for clones of other
ranks' experts (`moe/clones.py`). The physical ids of rank p begin at p * (e + c). Dispatchers and
indices use only physical ids. Without clones, physical ids are expert ids.

Legend: E experts, e experts of a rank (E / ep), c places for clones on a rank, T tokens of a rank,
K experts per token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.kernels.rows.index import ExpertIndex, build_index
from moecore.moe.records import BalancedRows, Routing


def compute_balanced_tokens(num_tokens: int, top_k: int, num_experts: int, num_local: int) -> int:
    """Return the mean number of tokens that choose at least one of `num_local` experts.

    Each of `num_tokens` tokens has `top_k` random experts of `num_experts`.
    """
    return round(num_tokens * _compute_choice_probability(top_k, num_experts, num_local))


def _compute_choice_probability(top_k: int, num_experts: int, num_local: int) -> float:
    """Return the probability that `top_k` random experts include one of `num_local` experts."""
    if top_k > num_experts:  # the remaining choices are zero experts
        return 1.0
    return 1 - math.comb(num_experts - num_local, top_k) / math.comb(num_experts, top_k)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertPlacement:
    """The ranks of a dispatch group, and the experts that each rank owns.

    Group rank g = ep_rank * etp + etp_rank. Every etp rank of an ep rank owns the same experts, and
    1 / etp of each expert's matrices. Every etp rank therefore needs the same tokens. The sum over
    ranks in `combine` includes the partial sums of the etp ranks.
    """

    group: dist.ProcessGroup  # the ep x etp ranks
    num_experts: int  # E of the whole layer
    ep: int
    etp: int  # ranks that share a block of experts
    num_clones: int = 0  # c
    layer: tuple[int, str] = (0, "the layer")  # its number and name in the model

    @property
    def num_local(self) -> int:
        """Number of experts on each rank."""
        return self.num_experts // self.ep

    @property
    def num_physical(self) -> int:
        """Number of physical experts on each rank, e + c."""
        return self.num_local + self.num_clones

    @property
    def first_physical(self) -> int:
        """Physical id of this rank's first expert."""
        return dist.get_rank(self.group) // self.etp * self.num_physical

    def convert_to_physical_ids(self, ids_TK: Tensor) -> Tensor:
        """Return the physical id of each expert on the rank that owns the expert; -1 stays -1."""
        # Example, two ranks of two experts and one clone: [0, 1, 2, 3, -1] give [0, 1, 3, 4, -1].
        if not self.num_clones:
            return ids_TK
        block_TK = torch.div(ids_TK, self.num_local, rounding_mode="floor")
        return torch.where(ids_TK < 0, ids_TK, ids_TK + block_TK * self.num_clones)

    def compute_balanced_rows(self, num_tokens: int, top_k: int) -> int:
        """Return a rank's expert rows with even loads, for `num_tokens` tokens per rank."""
        return num_tokens * top_k * self.etp

    def compute_balanced_tokens(self, num_tokens: int, top_k: int) -> int:
        """Return how many of `num_tokens` tokens with random choices a rank receives on average."""
        return compute_balanced_tokens(num_tokens, top_k, self.num_experts, self.num_local)

    def count_balanced(self, num_tokens: int, top_k: int) -> BalancedRows:
        """Return a rank's source and expert rows with even loads, `num_tokens` tokens per rank."""
        num_source_rows = self.group.size() * self.compute_balanced_tokens(num_tokens, top_k)
        return BalancedRows(num_source_rows, self.compute_balanced_rows(num_tokens, top_k))

    def compute_max_rows(self, routing: Routing) -> int:
        """Return the maximum of a rank's expert rows, if all ranks have equally many tokens."""
        (T, K), num_physical = routing.destinations_TK.shape, self.num_physical
        max_source_rows = min(T * min(K, num_physical), num_physical * routing.max_rows_per_expert)
        return self.group.size() * max_source_rows

    def build_index(
        self, ids_SK: Tensor, weights_SK: Tensor, routing: Routing, num_rows: int
    ) -> ExpertIndex:
        """Return the `ExpertIndex` of this rank's experts, with `num_rows` expert rows.

        `ids_SK` are the physical ids of the source rows' choices.
        """
        sizes: Any = dict(
            first_expert=self.first_physical,
            num_local_experts=self.num_physical,
            max_pairs=num_rows,
        )
        return build_index(ids_SK, weights_SK, **sizes, row_multiple=routing.rows_multiple)


@dataclass(frozen=True, kw_only=True, slots=True)
class DomainPlacement(ExpertPlacement):
    """Placement of a domain's experts on the domain's ranks, for tokens that the domain received.

    One of H domains is a set of ranks with fast links (`dispatch/hierarchical.py`). `group`,
    `num_experts` and `ep` describe the domain. Each of the A rows that a rank has received has at
    least one of its K choices in the domain.
    """

    num_domains: int  # H

    @property
    def num_domain_experts(self) -> int:
        """Number of physical experts of a domain."""
        return self.num_physical * self.ep

    def convert_to_domain_ids(self, ids_AK: Tensor, domain: int) -> Tensor:
        """Convert physical ids of all domains to ids in one domain; -1 = in another domain."""
        ids_AK = ids_AK - domain * self.num_domain_experts
        return ids_AK.masked_fill((ids_AK < 0) | (ids_AK >= self.num_domain_experts), -1)

    def compute_balanced_domain_tokens(self, num_tokens: int, top_k: int) -> int:
        """Return how many of `num_tokens` random tokens one domain receives on average."""
        return round(num_tokens * self._compute_reach_probability(top_k, self.num_experts))

    def compute_balanced_rows(self, num_tokens: int, top_k: int) -> int:
        """Return the expert rows of a rank with even loads, for `num_tokens` received rows."""
        reach = self._compute_reach_probability(top_k, self.num_experts)
        return round(num_tokens / (self.num_domains * reach) * top_k * self.etp)

    def compute_balanced_tokens(self, num_tokens: int, top_k: int) -> int:
        """Return how many of `num_tokens` rows of the domain one of its ranks gets on average."""
        reach = self._compute_reach_probability
        return round(num_tokens * (reach(top_k, self.num_local) / reach(top_k, self.num_experts)))

    def _compute_reach_probability(self, top_k: int, num_experts: int) -> float:
        """Return the probability that a token chooses at least one of `num_experts` experts."""
        return _compute_choice_probability(top_k, self.num_domains * self.num_experts, num_experts)


def make_domain_placement(
    placement: ExpertPlacement, domain_group: dist.ProcessGroup, num_domains: int
) -> DomainPlacement:
    """Return the placement of this rank's domain, whose ranks are the group `domain_group`.

    The ranks of `placement` form `num_domains` domains.
    """
    return DomainPlacement(
        group=domain_group,
        num_experts=placement.num_experts // num_domains,
        ep=placement.ep // num_domains,
        etp=placement.etp,
        num_clones=placement.num_clones,
        layer=placement.layer,
        num_domains=num_domains,
    )
