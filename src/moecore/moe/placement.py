"""Placement of experts on ranks, computed only from the mesh.

Tokens are sent to physical experts: the experts of a rank, followed by slots for clones of other
ranks' experts (`moe/clones.py`). The physical ids of rank p begin at p * (e + c). Dispatchers and
indices use only physical ids. Without clones, physical ids are expert ids.

Legend: E experts, e experts of a rank (E / ep), c places for clones on a rank, T tokens of a rank,
K experts per token.
"""

import math
from collections import Counter
from dataclasses import dataclass, fields
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.kernels.experts.contract import UnsummedInput
from moecore.kernels.rows.index import ExpertIndex, build_index
from moecore.kernels.rows.record import Rows
from moecore.moe.records import BalancedRows, Routing


@cache
def compute_choice_probability(
    top_k: int, num_experts: int, num_local_experts: int, num_groups: int = 1, top_groups: int = 1
) -> float:
    """Return the probability that a token chooses any of a block of `num_local_experts` experts.

    `num_experts` experts are divided into `num_groups` equal groups. The token chooses `top_groups`
    random groups and `top_k` random experts in these groups. The result is the mean over blocks.
    """
    if top_k > num_experts:  # the remaining choices are zero experts
        return 1.0
    size, misses = num_experts // num_groups, 0
    reach = top_groups * size
    firsts = range(0, num_experts, num_local_experts)
    for first in firsts:
        # Sets of j groups that contain n experts of the block: how many there are, by (j, n).
        sets = Counter({(0, 0): 1})
        for start in range(0, num_experts, size):
            shared = max(0, min(start + size, first + num_local_experts) - max(start, first))
            for (j, n), number in list(sets.items()):
                sets[j + 1, n + shared] += number
        chosen = ((n, number) for (j, n), number in sets.items() if j == top_groups)
        misses += sum(number * math.comb(reach - n, top_k) for n, number in chosen)
    choices = math.comb(num_groups, top_groups) * math.comb(reach, top_k)
    return 1 - misses / (len(firsts) * choices)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertPlacement:
    """The ranks of a dispatch group, and the experts that each rank owns.

    Group rank g is ep_rank * etp + etp_rank. The etp ranks of one ep rank own the same experts,
    each rank 1 / etp of each expert's matrices, and receive the same tokens. `combine` also sums
    the partial sums of the etp ranks. Physical ids number experts, and slots for clones, by rank.
    """

    group: dist.ProcessGroup  # the ep x etp ranks
    num_experts: int  # E of the whole layer
    ep: int
    etp: int  # ranks that share a block of experts
    num_clones: int = 0  # c
    num_adapters: int = 1  # LoRA adapters, by which each expert's rows are grouped
    # `MoEConfig.num_groups` and `top_groups`: a token's experts are in so many groups
    num_groups: int = 1
    top_groups: int = 1
    layer: tuple[int, str] = (0, "the layer")  # its number and name in the model
    num_domains: int = 1  # H, see `DomainPlacement`

    @property
    def num_local(self) -> int:
        """Number of experts on each rank."""
        return self.num_experts // self.ep

    @property
    def num_physical(self) -> int:
        """Number of physical ids per rank: (experts + slots for clones) * `num_adapters`."""
        return (self.num_local + self.num_clones) * self.num_adapters

    @property
    def first_physical(self) -> int:
        """Physical id of this rank's first expert."""
        return dist.get_rank(self.group) // self.etp * self.num_physical

    def convert_to_physical_ids(self, ids_TK: Tensor) -> Tensor:
        """Convert expert ids to physical ids, which also number slots for clones; -1 stays -1."""
        # Example, two ranks of two experts and one clone: [0, 1, 2, 3, -1] give [0, 1, 3, 4, -1].
        if not self.num_clones:
            return ids_TK
        block_TK = torch.div(ids_TK, self.num_local, rounding_mode="floor")
        return torch.where(ids_TK < 0, ids_TK, ids_TK + block_TK * self.num_clones)

    def compute_balanced_rows(self, num_tokens: int, top_k: int) -> int:
        """Return a rank's number of (token, expert) rows for even loads, `num_tokens` per rank."""
        return num_tokens * top_k * self.etp

    def compute_balanced_tokens(self, num_tokens: int, top_k: int) -> int:
        """Return how many of `num_tokens` tokens a given rank receives, if experts are random."""
        return round(num_tokens * self.compute_reach_probability(top_k, self.num_local))

    def compute_reach_probability(self, top_k: int, num_experts: int) -> float:
        """Return the probability that a token chooses any expert of a block of `num_experts`."""
        num_all = self.num_domains * self.num_experts
        groups = self.num_groups, self.top_groups
        return compute_choice_probability(top_k, num_all, num_experts, *groups)

    def count_balanced(self, num_tokens: int, top_k: int) -> BalancedRows:
        """Return a rank's source rows and (token, expert) rows for even loads."""
        num_source_rows = self.group.size() * self.compute_balanced_tokens(num_tokens, top_k)
        return BalancedRows(num_source_rows, self.compute_balanced_rows(num_tokens, top_k))

    def compute_max_rows(self, routing: Routing) -> int:
        """Return the maximum (token, expert) rows of a rank if ranks have equal token counts."""
        (T, K), num_physical = routing.destinations_TK.shape, self.num_physical
        max_source_rows = min(T * min(K, num_physical), num_physical * routing.max_rows_per_expert)
        return self.group.size() * max_source_rows

    def build_index(
        self, ids_SK: Tensor, weights_SK: Tensor, routing: Routing, num_rows: int
    ) -> ExpertIndex:
        """Return the index of `num_rows` expert rows: received rows sorted by local expert."""
        return build_index(
            ids_SK,
            weights_SK,
            first_expert=self.first_physical,
            num_local_experts=self.num_physical,
            max_pairs=num_rows,
            row_multiple=routing.rows_multiple,
        )

    def find_unsummed(
        self, rows: Rows, index: ExpertIndex, routing: Routing
    ) -> UnsummedInput | None:
        """Return a record for experts if the source rows are the expert rows; otherwise None."""
        # Each received row then has one choice, and rows are in expert order.
        # Example, expert 1 of two, received ids [[1, 0], [0, 1]]: row_ids_R [0, 1], slots_SK [[0,
        # -1], [-1, 1]]. Padding of rows adds expert rows or source rows without a choice.
        leaf_SD = rows.values if rows.grad_handle_SD is None else rows.grad_handle_SD
        has_one_expert = self.num_physical == 1 and not routing.pad
        if not has_one_expert or torch.compiler.is_compiling():  # a compiler would guard on S
            return None
        return UnsummedInput(leaf_SD) if len(index.weights_R) == len(leaf_SD) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class DomainPlacement(ExpertPlacement):
    """Placement of a domain's experts on the domain's ranks, for rows that the domain received.

    A domain is one of `num_domains` sets of ranks with fast links (`dispatch/hierarchical.py`).
    `group`, `num_experts` and `ep` describe the domain. Each received row has at least one expert
    in the domain.
    """

    @property
    def num_domain_experts(self) -> int:
        """Number of physical ids of a domain."""
        return self.num_physical * self.ep

    def convert_to_domain_ids(self, ids_AK: Tensor, domain: int) -> Tensor:
        """Convert physical ids of all domains to ids in domain `domain`; -1 = other domain."""
        ids_AK = ids_AK - domain * self.num_domain_experts
        return ids_AK.masked_fill((ids_AK < 0) | (ids_AK >= self.num_domain_experts), -1)

    def compute_balanced_domain_tokens(self, num_tokens: int, top_k: int) -> int:
        """Return how many of `num_tokens` tokens a given domain receives, if experts are random."""
        return round(num_tokens * self.compute_reach_probability(top_k, self.num_experts))

    def compute_balanced_rows(self, num_tokens: int, top_k: int) -> int:
        """Return a rank's (token, expert) rows for even loads; it receives `num_tokens` tokens."""
        reach = self.compute_reach_probability(top_k, self.num_experts)
        return round(num_tokens / (self.num_domains * reach) * top_k * self.etp)

    def compute_balanced_tokens(self, num_tokens: int, top_k: int) -> int:
        """Return how many of `num_tokens` received rows a rank gets, if experts are random."""
        compute = self.compute_reach_probability
        return round(
            num_tokens * (compute(top_k, self.num_local) / compute(top_k, self.num_experts))
        )


def make_domain_placement(
    placement: ExpertPlacement, domain_group: dist.ProcessGroup, num_domains: int
) -> DomainPlacement:
    """Return the placement in this rank's domain, whose ranks are `domain_group`."""
    domain_fields = {field.name: getattr(placement, field.name) for field in fields(placement)}
    domain_fields |= dict(
        group=domain_group,
        num_experts=placement.num_experts // num_domains,
        ep=placement.ep // num_domains,
        num_domains=num_domains,
    )
    return DomainPlacement(**domain_fields)
