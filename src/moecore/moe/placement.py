"""Which rank owns which experts: a function of the mesh alone.

Legend: E experts, e experts of a rank (E / ep), T tokens of a rank, K experts per token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.distributed as dist

from moecore.moe.records import Routing


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertPlacement:
    """Which rank of a dispatch group owns which experts: a function of the mesh alone.

    Group rank g = ep_rank * etp + etp_rank. Every etp rank of an ep rank owns the same experts,
    1 / etp of each, so it needs the same tokens; adding over ranks in `combine` adds the parts.

    Attributes:
        group: the ep x etp ranks.
        num_experts: E of the whole layer.
        ep: number of expert blocks.
        etp: number of ranks that share a block.
    """

    group: dist.ProcessGroup
    num_experts: int
    ep: int
    etp: int

    @property
    def num_local(self) -> int:
        """Experts on each rank."""
        return self.num_experts // self.ep

    @property
    def first_local(self) -> int:
        """Global id of this rank's first expert."""
        return dist.get_rank(self.group) // self.etp * self.num_local

    def balanced_rows(self, num_tokens: int, top_k: int) -> int:
        """Return the expert rows of a rank when all experts get as many of T tokens per rank."""
        return num_tokens * top_k * self.etp

    def balanced_tokens(self, num_tokens: int, top_k: int) -> int:
        """Return how many of T tokens go to one rank, rounded, when each chooses at random.

        That is T times one minus the chance that no choice is among a rank's e of E experts.
        """
        E, e = self.num_experts, self.num_local
        return round(num_tokens * (1 - math.comb(E - e, top_k) / math.comb(E, top_k)))

    def most_rows(self, routing: Routing) -> int:
        """Most expert rows of one rank, when every rank brings as many tokens as this one."""
        (T, K), e = routing.expert_ids_TK.shape, self.num_local
        return self.group.size() * min(T * min(K, e), e * routing.most_rows_per_expert)
