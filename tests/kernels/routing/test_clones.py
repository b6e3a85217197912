import pytest
import torch
from torch import Tensor

from moecore.kernels.routing.clones import (
    ClonePlan,
    assign_physical_ids,
    plan_clones,
    plan_clones_ref,
)


def skewed(T: int, K: int, E: int, skew: float, seed: int = 0) -> Tensor:
    """Return T choices of K experts; expert e is `skew` times as popular as expert 0, e rising."""
    generator = torch.Generator().manual_seed(seed)
    popularity_E = torch.linspace(1, skew, E)[torch.randperm(E, generator=generator)]
    ids_TK = torch.multinomial(popularity_E.expand(T, E), K, generator=generator)
    return ids_TK.to(torch.int32)


def rank_loads(loads_E: Tensor, plan: ClonePlan, P: int) -> Tensor:
    loads_P, c = loads_E.view(P, -1).sum(1), len(plan.experts_N) // P
    for n, (x, start, stop) in enumerate(zip(*(t.tolist() for t in plan), strict=True)):
        if x >= 0:
            loads_P[x // (len(loads_E) // P)] -= stop - start
            loads_P[n // c] += stop - start
    return loads_P


def test_the_example(device: str) -> None:
    loads_E = torch.tensor([6, 2, 1, 1], dtype=torch.int32, device=device)
    plan = plan_clones(loads_E, num_ranks=2, clones_per_rank=1)
    assert [t.tolist() for t in plan] == [[-1, 0], [0, 3], [0, 6]]
    ids_TK = torch.tensor([[0], [0], [1], [0], [2], [0], [3], [0], [1], [0], [-1]], device=device)
    found = assign_physical_ids(
        ids_TK.int(), torch.zeros_like(loads_E), plan, num_local_experts=2, clones_per_rank=1
    )
    assert found.flatten().tolist() == [0, 0, 1, 0, 3, 5, 4, 5, 1, 5, -1]


@pytest.mark.parametrize(
    ("P", "e", "c", "least"),
    [
        (8, 16, 2, 0.0),
        (8, 16, 2, 0.05),
        (3, 5, 1, 0.01),
        (16, 4, 3, 0.02),
        (2, 1, 1, 0.0),
        (1, 4, 1, 0),
    ],
)
def test_plan_of_the_reference(P: int, e: int, c: int, least: float, device: str) -> None:
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        loads_E = (torch.rand(P * e, generator=generator) ** 4 * 1000).to(torch.int32).to(device)
        ours = plan_clones(loads_E, num_ranks=P, clones_per_rank=c, min_share=least)
        for found, expected in zip(ours, plan_clones_ref(loads_E, P, c, least), strict=True):
            assert torch.equal(found, expected)


def test_every_choice_goes_to_one_expert(device: str) -> None:
    """Over ranks that bring unequal tokens: parts are those of the plan, and nothing else moves."""
    P, e, c, K = 4, 6, 2, 3
    tokens = (50, 0, 201, 33)
    chosen = [skewed(n, K, P * e, 9.0).to(device) for n in tokens]
    chosen[2][5] = -1
    counts_GE = torch.stack(
        [torch.bincount(ids[ids >= 0].long(), minlength=P * e) for ids in chosen]
    )
    loads_E = counts_GE.sum(0).int()
    plan = plan_clones(loads_E, num_ranks=P, clones_per_rank=c, min_share=0.01)
    found = torch.zeros(P * (e + c), dtype=torch.int64)
    for g, ids_TK in enumerate(chosen):
        before_E = counts_GE[:g].sum(0).int()
        out_TK = assign_physical_ids(ids_TK, before_E, plan, num_local_experts=e, clones_per_rank=c)
        assert torch.equal(out_TK < 0, ids_TK < 0) and out_TK.dtype == torch.int32
        home = out_TK % (e + c) < e
        block = torch.div(out_TK, e + c, rounding_mode="floor")
        assert torch.equal((block * e + out_TK % (e + c))[home], ids_TK[home])
        place = (block * c + out_TK % (e + c) - e)[~home].long()
        assert torch.equal(plan.experts_N[place], ids_TK[~home])
        found += torch.bincount(out_TK[out_TK >= 0].long().cpu(), minlength=len(found))
    of_places = found.view(P, e + c)[:, e:].flatten()
    assert torch.equal(of_places, (plan.stops_N - plan.starts_N).long().cpu())
    assert torch.equal(found.view(P, e + c).sum(1).cpu(), rank_loads(loads_E, plan, P).long().cpu())
    assert (plan.experts_N >= 0).any()


@pytest.mark.parametrize("skew", [4.0, 20.0])
def test_ranks_become_even(skew: float) -> None:
    """With two clones a rank, of experts of which one is five times as hot as the mean or more."""
    P, E = 8, 128
    for seed in range(20):
        ids_TK = skewed(4096, 8, E, skew, seed)
        ids_TK[:1300, 0] = seed % E  # one more, hot
        loads_E = torch.bincount(ids_TK.flatten().long(), minlength=E).int()
        plan = plan_clones(loads_E, num_ranks=P, clones_per_rank=2, min_share=0.02)
        mean = loads_E.sum() / P
        assert rank_loads(loads_E, plan, P).max() <= 1.03 * mean
        assert rank_loads(loads_E, ClonePlan(*(t[:0] for t in plan)), P).max() > 1.05 * mean
        assert (plan.experts_N >= 0).sum() <= P
