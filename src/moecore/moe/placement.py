"""Which rank owns which experts: a function of the mesh alone.

Tokens go to physical experts. Each rank has its own experts first, and behind them room for clones
of other ranks' (`moe/clones.py`): rank p's physical ids begin at p * (e + c). Dispatchers and
indices know physical ids alone. Without clones they are expert ids.

Legend: E experts, e experts of a rank (E / ep), c clones of a rank at most, T tokens of a rank, K
experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.base.fields import check_arguments
from moecore.base.options.dispatch import DISPATCHERS
from moecore.moe.records import Dispatcher, Routing


def balanced_tokens(num_tokens: int, top_k: int, num_experts: int, num_local: int) -> int:
    """Return how many tokens go to a rank of `num_local` experts when each chooses at random."""
    return round(num_tokens * _chance(top_k, num_experts, num_local))


def _chance(top_k: int, num_experts: int, num_local: int) -> float:
    """Return the chance that one of K random choices of E experts is among e of them."""
    E, e = num_experts, num_local
    if top_k > E:  # others may be zero experts, which are ignored here
        return 1.0
    return 1 - math.comb(E - e, top_k) / math.comb(E, top_k)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertPlacement:
    """Which rank of a dispatch group owns which experts.

    Group rank g = ep_rank * etp + etp_rank. Every etp rank of an ep rank owns the same experts,
    1 / etp of each, so it needs the same tokens; adding over ranks in `combine` adds the parts.
    """

    group: dist.ProcessGroup  # the ep x etp ranks
    num_experts: int  # E of the whole layer
    ep: int
    etp: int  # ranks that share a block of experts
    num_clones: int = 0  # c
    layer: tuple[int, str] = (0, "the layer")  # its number and name in the model

    @property
    def num_local(self) -> int:
        """Experts on each rank."""
        return self.num_experts // self.ep

    @property
    def num_physical(self) -> int:
        """Physical experts on each rank, e + c."""
        return self.num_local + self.num_clones

    @property
    def first_physical(self) -> int:
        """Physical id of this rank's first expert."""
        return dist.get_rank(self.group) // self.etp * self.num_physical

    def physical_ids(self, ids_TK: Tensor) -> Tensor:
        """Return the physical id of each expert on the rank that owns it; -1 stays."""
        # Example, two ranks of two experts, room for one clone: [0, 1, 2, 3, -1] give [0, 1, 3, 4,
        # -1].
        if not self.num_clones:
            return ids_TK
        block_TK = torch.div(ids_TK, self.num_local, rounding_mode="floor")
        return torch.where(ids_TK < 0, ids_TK, ids_TK + block_TK * self.num_clones)

    def balanced_rows(self, num_tokens: int, top_k: int) -> int:
        """Return the expert rows of a rank when all experts get as many of T tokens per rank."""
        return num_tokens * top_k * self.etp

    def balanced_tokens(self, num_tokens: int, top_k: int) -> int:
        """Return how many of T tokens go to one rank when each chooses at random."""
        return balanced_tokens(num_tokens, top_k, self.num_experts, self.num_local)

    def most_rows(self, routing: Routing) -> int:
        """Most expert rows of one rank, when every rank brings as many tokens as this one."""
        (T, K), num_physical = routing.destinations_TK.shape, self.num_physical
        max_source_rows = min(T * min(K, num_physical), num_physical * routing.most_rows_per_expert)
        return self.group.size() * max_source_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class DomainPlacement(ExpertPlacement):
    """Which ranks of one of H domains own which of its experts, for tokens that have come to it.

    Group, experts and ep are those of the domain. Of A rows that have come to a rank each has one
    of its K choices here at least.
    """

    num_domains: int  # H

    @property
    def num_in_domain(self) -> int:
        """Physical experts of a domain."""
        return self.num_physical * self.ep

    def ids_inside(self, ids_AK: Tensor, domain: int) -> Tensor:
        """Return physical ids of all domains as those of one; -1 = in none, or another."""
        ids_AK = ids_AK - domain * self.num_in_domain
        return ids_AK.masked_fill((ids_AK < 0) | (ids_AK >= self.num_in_domain), -1)

    def balanced_arrivals(self, num_tokens: int, top_k: int) -> int:
        """Return how many of T tokens go to one domain when each chooses at random."""
        return round(num_tokens * self._reach(top_k, self.num_experts))

    def balanced_rows(self, num_tokens: int, top_k: int) -> int:
        """Return the expert rows of a rank when as many come to each: A is `num_tokens`."""
        all_tokens = num_tokens / (self.num_domains * self._reach(top_k, self.num_experts))
        return round(all_tokens * top_k * self.etp)

    def balanced_tokens(self, num_tokens: int, top_k: int) -> int:
        """Return how many of A tokens go to one rank of the domain."""
        share = self._reach(top_k, self.num_local) / self._reach(top_k, self.num_experts)
        return round(num_tokens * share)

    def _reach(self, top_k: int, num_experts: int) -> float:
        return _chance(top_k, self.num_domains * self.num_experts, num_experts)


def domain_of(
    placement: ExpertPlacement, inside: dist.ProcessGroup, num_domains: int
) -> DomainPlacement:
    """Return the placement of this rank's domain, one of several of a placement."""
    return DomainPlacement(
        group=inside,
        num_experts=placement.num_experts // num_domains,
        ep=placement.ep // num_domains,
        etp=placement.etp,
        num_clones=placement.num_clones,
        layer=placement.layer,
        num_domains=num_domains,
    )


def register_dispatcher(name: str, make: Callable[[ExpertPlacement], Dispatcher]) -> None:
    """Let `DispatchOptions.name` name a dispatcher of yours, on every rank.

    Args:
        name: a new name.
        make: called once per MoE layer with the ranks that own the layer's experts; returns its
            `Dispatcher`. It is not called where ep * etp is 1, because no token leaves its rank.

    Raises:
        ValueError: when the name is taken, or `make` is no function.
    """
    check_arguments(register_dispatcher, locals())
    DISPATCHERS.register(name, make)
