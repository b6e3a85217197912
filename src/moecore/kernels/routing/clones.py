"""Which experts are cloned on which rank, and which of their tokens the clones compute.

    plan_clones           loads of the experts -> the expert and the tokens of each clone
    assign_physical_ids   ids -> physical ids: the expert on its own rank, or one of its clones

Letters: P ranks, E experts, e experts of a rank (E / P), c clones of a rank at most, N = P c, T
tokens, K experts per token.

The tokens of an expert are ordered by rank, then by choice. The rank that owns the expert computes
the first tokens, and each clone a range of the others. Each step of the plan moves tokens of the
busiest expert of the busiest rank to the rank with the fewest tokens: as many as bring one of both
ranks to the mean, or, if these are too few, as many as make both ranks equal. Each step uses one
clone. Ties go to the lower number, so every rank computes the same plan.

One launch of one program, and one launch over the choices; no host sync.

Source: ECHO, https://arxiv.org/abs/2603.07685, section 4.3.7 (the idea; the rule is simpler).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from moecore.kernels.common import can_use_kernel, cdiv, launch, next_power_of_2
from moecore.kernels.rows.index import build_index
from moecore.kernels.triton_api import tl, triton

BLOCK = 1024  # choices of one program


class ClonePlan(NamedTuple):
    """Which experts are cloned (copied to other ranks), and each clone's range of tokens.

    Each rank has c slots for clones, some maybe empty. Slot n of all ranks is on rank n // c.
    """

    experts_N: Tensor  # int32, the expert; -1 = the place is empty
    starts_N: Tensor  # int32, the first of the expert's tokens that it computes
    stops_N: Tensor  # int32, behind the last


def plan_clones_ref(
    loads_E: Tensor, num_ranks: int, clones_per_rank: int, min_share: float
) -> ClonePlan:
    """Compute `plan_clones` on the host. Synchronises for CUDA tensors."""
    loads, e = loads_E.tolist(), loads_E.numel() // num_ranks
    ranks = [sum(loads[p * e : (p + 1) * e]) for p in range(num_ranks)]
    mean = -(-sum(loads) // num_ranks)
    min_tokens = max(1, mean * round(min_share * 2**16) >> 16)
    clone_counts = [0] * num_ranks
    places = [(-1, 0, 0)] * (num_ranks * clones_per_rank)
    for _ in places:
        p = max(range(num_ranks), key=lambda p: ranks[p])
        x = max(range(p * e, (p + 1) * e), key=lambda x: loads[x])
        free = [q for q in range(num_ranks) if clone_counts[q] < clones_per_rank]
        q = min(free, key=lambda q: ranks[q])
        num_tokens = min(ranks[p] - mean, mean - ranks[q], loads[x])
        if num_tokens < min_tokens:
            num_tokens = min((ranks[p] - ranks[q]) // 2, loads[x])
        if num_tokens < min_tokens:
            break
        places[q * clones_per_rank + clone_counts[q]] = x, loads[x] - num_tokens, loads[x]
        clone_counts[q] += 1
        loads[x] -= num_tokens
        ranks[p] -= num_tokens
        ranks[q] += num_tokens
    columns = torch.tensor(places, dtype=torch.int32, device=loads_E.device).T
    return ClonePlan(*columns.contiguous())


@triton.jit
def _plan_clones_kernel(
    loads_ptr,  # [E] int32
    experts_ptr,  # [N] int32, out
    starts_ptr,  # [N] int32, out
    stops_ptr,  # [N] int32, out
    SHARE: tl.constexpr,
    NUM_LOCAL: tl.constexpr,  # e
    P: tl.constexpr,
    CLONES: tl.constexpr,
    EXPERTS: tl.constexpr,  # power of two >= e
    RANKS: tl.constexpr,  # power of two >= P
    PLACES: tl.constexpr,  # power of two >= N
):
    """Write the `ClonePlan` of `plan_clones` in one program."""
    experts = tl.arange(0, EXPERTS)
    ranks = tl.arange(0, RANKS)
    inside = (ranks < P)[:, None] & (experts < NUM_LOCAL)[None, :]
    at = ranks[:, None] * NUM_LOCAL + experts[None, :]
    local_loads = tl.load(loads_ptr + at, mask=inside, other=0)  # tokens that stay at home
    loads = tl.sum(local_loads, axis=1)
    mean = (tl.sum(loads, axis=0) + P - 1) // P
    min_tokens = tl.maximum((mean.to(tl.int64) * SHARE >> 16).to(tl.int32), 1)
    clone_counts = tl.where(ranks < P, 0, CLONES)
    places = tl.arange(0, PLACES)
    of = tl.full([PLACES], -1, tl.int32)
    starts = tl.zeros([PLACES], tl.int32)
    stops = tl.zeros([PLACES], tl.int32)
    for _ in range(P * CLONES):
        p = tl.argmax(tl.where(ranks < P, loads, -1), axis=0)
        q = tl.argmin(tl.where(clone_counts < CLONES, loads, 2147483647), axis=0)
        of_p = tl.sum(tl.where(ranks[:, None] == p, local_loads, 0), axis=0)
        x = tl.argmax(tl.where(experts < NUM_LOCAL, of_p, -1), axis=0)
        at_home = tl.max(of_p, axis=0)
        over = tl.max(loads, axis=0) - mean
        room = mean - tl.sum(tl.where(ranks == q, loads, 0), axis=0)
        place = q * CLONES + tl.sum(tl.where(ranks == q, clone_counts, 0), axis=0)
        num_tokens = tl.minimum(tl.minimum(over, room), at_home)
        half = tl.minimum(tl.maximum(over + room, 0) // 2, at_home)
        num_tokens = tl.where(num_tokens < min_tokens, half, num_tokens)
        num_tokens = tl.where(num_tokens < min_tokens, 0, num_tokens)  # and so in all later steps
        place_mask = (places == place) & (num_tokens > 0)
        of = tl.where(place_mask, p * NUM_LOCAL + x, of)
        starts = tl.where(place_mask, at_home - num_tokens, starts)
        stops = tl.where(place_mask, at_home, stops)
        local_loads -= tl.where((ranks[:, None] == p) & (experts[None, :] == x), num_tokens, 0)
        loads += tl.where(ranks == q, num_tokens, 0) - tl.where(ranks == p, num_tokens, 0)
        clone_counts += ((ranks == q) & (num_tokens > 0)).to(tl.int32)
    tl.store(experts_ptr + places, of, mask=places < P * CLONES)
    tl.store(starts_ptr + places, starts, mask=places < P * CLONES)
    tl.store(stops_ptr + places, stops, mask=places < P * CLONES)


def plan_clones(
    loads_E: Tensor, *, num_ranks: int, clones_per_rank: int, min_share: float = 0.0
) -> ClonePlan:
    """Plan which busy experts are cloned to which ranks, and each clone's tokens. No host sync.

    `loads_E` (int32) counts tokens over all ranks; expert x is on rank x // (E / num_ranks). A
    clone has at least `min_share` times the mean number of tokens per rank.

    Example, two ranks of two experts, one clone each, loads [6, 2, 1, 1]: the mean is 5, so rank 1
    clones expert 0 for its last 3 tokens: experts_N [-1, 0], starts_N [0, 3], stops_N [0, 6].
    """
    if not can_use_kernel(loads_E):
        return plan_clones_ref(loads_E, num_ranks, clones_per_rank, min_share)
    E, N = loads_E.numel(), num_ranks * clones_per_rank
    plan = ClonePlan(*(torch.empty(N, dtype=torch.int32, device=loads_E.device) for _ in range(3)))
    NUM_LOCAL, SHARE = E // num_ranks, round(min_share * 2**16)
    EXPERTS, RANKS, PLACES = map(next_power_of_2, (NUM_LOCAL, num_ranks, N))
    sizes = dict(NUM_LOCAL=NUM_LOCAL, P=num_ranks, CLONES=clones_per_rank, SHARE=SHARE)
    blocks = dict(EXPERTS=EXPERTS, RANKS=RANKS, PLACES=PLACES)
    launch(_plan_clones_kernel, 1, loads_E.contiguous(), *plan, **sizes, **blocks)
    return plan


def assign_physical_ids_ref(
    ids_TK: Tensor, index_TK: Tensor, plan: ClonePlan, num_local_experts: int, clones_per_rank: int
) -> Tensor:
    """Compute `assign_physical_ids`; `index_TK`: how many earlier tokens the same expert has."""
    block_TK = torch.div(ids_TK, num_local_experts, rounding_mode="floor")
    physical_TK = torch.where(ids_TK < 0, ids_TK, ids_TK + block_TK * clones_per_rank)
    for place, (x, start, stop) in enumerate(zip(*(t.tolist() for t in plan), strict=True)):
        rank, number = divmod(place, clones_per_rank)
        physical = rank * (num_local_experts + clones_per_rank) + num_local_experts + number
        is_clone_TK = (ids_TK == x) & (index_TK >= start) & (index_TK < stop) & (x >= 0)
        physical_TK = physical_TK.masked_fill(is_clone_TK, physical)
    return physical_TK


@triton.jit(do_not_specialize=["num_choices"])
def _physical_ids_kernel(
    ids_ptr,  # [T K] int32
    rows_ptr,  # [T K] int32, each choice's row in the order of experts
    offsets_ptr,  # [E] int32, running sum of this rank's rows
    counts_before_ptr,  # [E] int32, tokens of ranks before this one
    experts_ptr,  # [N] int32
    starts_ptr,  # [N] int32
    stops_ptr,  # [N] int32
    out_ptr,  # [T K] int32, out
    num_choices,  # T K
    NUM_LOCAL: tl.constexpr,
    CLONES: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the physical ids of BLOCK choices to `out_ptr`."""
    choices = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = choices < num_choices
    ids = tl.load(ids_ptr + choices, mask=inside, other=-1)
    is_choice = ids >= 0
    rows = tl.load(rows_ptr + choices, mask=inside, other=0)
    first = tl.load(offsets_ptr + ids - 1, mask=ids > 0, other=0)
    places = rows - first + tl.load(counts_before_ptr + ids, mask=is_choice, other=0)
    out = tl.where(is_choice, ids + ids // NUM_LOCAL * CLONES, ids)
    for n in range(N):
        x = tl.load(experts_ptr + n)
        start, stop = tl.load(starts_ptr + n), tl.load(stops_ptr + n)
        is_clone = (ids == x) & (places >= start) & (places < stop)
        physical = n // CLONES * (NUM_LOCAL + CLONES) + NUM_LOCAL + n % CLONES
        out = tl.where(is_clone & (x >= 0), physical, out)
    tl.store(out_ptr + choices, out, mask=inside)


def assign_physical_ids(
    ids_TK: Tensor,
    counts_before_E: Tensor,
    plan: ClonePlan,
    *,
    num_local_experts: int,
    clones_per_rank: int,
) -> Tensor:
    """Return physical ids, int32 [T, K], of each token's experts or of their clones. No host sync.

    Each rank has num_local_experts + clones_per_rank physical ids: first its experts, then its
    clones. -1 means dropped in ids_TK and in the result. counts_before_E, int32, counts each
    expert's tokens on all ranks before this rank.

    Example, the plan of `plan_clones`, all tokens on one rank: the first three of expert 0's six
    tokens have physical id 0, the last three 5 (the clone). Experts 1, 2 and 3 have ids 1, 3, 4.
    """
    E = counts_before_E.numel()
    index = build_index(
        ids_TK, torch.zeros_like(ids_TK, dtype=torch.float32), first_expert=0, num_local_experts=E
    )
    offsets_E, rows_TK = index.offsets_e, index.slots_SK
    if not can_use_kernel(ids_TK):
        starts_E = offsets_E - offsets_E.diff(prepend=offsets_E.new_zeros(1))
        base_E = counts_before_E - starts_E
        places_TK = rows_TK + base_E[ids_TK.clamp(min=0).long()]
        return assign_physical_ids_ref(ids_TK, places_TK, plan, num_local_experts, clones_per_rank)
    out_TK, num_choices = torch.empty_like(rows_TK), ids_TK.numel()
    tensors = (ids_TK.contiguous(), rows_TK, offsets_E, counts_before_E.contiguous(), *plan, out_TK)
    sizes = dict(
        NUM_LOCAL=num_local_experts, CLONES=clones_per_rank, N=plan.experts_N.numel(), BLOCK=BLOCK
    )
    launch(_physical_ids_kernel, cdiv(num_choices, BLOCK), *tensors, num_choices, **sizes)
    return out_TK
