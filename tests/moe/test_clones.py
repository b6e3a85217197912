"""Clones of hot experts over ranks: who sends what, what backward keeps, and in which order sums.

Gradients over whole compositions are in `tests/test_parity.py`, in FP8 in
`test_experts_fp8_ranks.py`. Six ranks are spawned once: three blocks of experts, two ranks each.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from moecore import CloneOptions, MoEConfig, MoELayer, ParallelConfig, build_meshes
from moecore.kernels.experts.contract import ExpertWeights
from moecore.moe.balance import BalanceGroups
from moecore.moe.clones import Cloner, Clones, with_clones
from moecore.moe.dispatch.alltoall import AllToAllDispatcher
from moecore.moe.placement import ExpertPlacement
from moecore.moe.state import MoEState
from tests.ranks import run_ranks

EP, ETP, E, D = 3, 2, 6, 16
EXPERTS = [4, 3, -1, -1, 2, 0]  # of the example of `Clones.of`


def placed(num_clones: int) -> tuple[Any, ExpertPlacement]:
    meshes = build_meshes(ParallelConfig(ep=EP, etp=ETP), "cpu")
    assert meshes.dispatch_group is not None
    sizes = dict(num_experts=E, ep=EP, etp=ETP, num_clones=num_clones)
    return meshes, ExpertPlacement(group=meshes.dispatch_group, **sizes)


def of_blocks(found: Any) -> list[Any]:
    """Return what every block of experts has found."""
    meshes, _ = placed(0)
    everyone: list[Any] = [None] * EP
    dist.all_gather_object(everyone, found, group=meshes.expert.get_group("ep"))
    return everyone


def travel() -> list[Any]:
    """Experts' numbers go out to their clones; clones' gradients are powers of ten by place."""
    meshes, place = placed(2)
    group = meshes.expert.get_group("ep")
    clones = Clones.of(EXPERTS, place, group)
    own = torch.tensor([float(place.first_local + i) for i in range(2)])
    (there,) = clones.fetch([own])
    block = dist.get_rank(group)
    places = torch.tensor([10.0 ** (block * 2 + j) for j in range(clones.num_here)])
    (home,) = clones.bring_home_([torch.cat([own, places])])
    how = (clones.sent, clones.send_splits, clones.receive_splits, clones.order)
    return of_blocks((*how, there.tolist(), home.tolist()))


def kept() -> bool:
    """Return whether backward keeps no copy of this rank's experts, and gives them the gradient."""
    meshes, place = placed(2)
    clones = Clones.of(EXPERTS, place, meshes.expert.get_group("ep"))
    torch.manual_seed(dist.get_rank())
    w1, w2 = (torch.randn(2, D, D, requires_grad=True) for _ in range(2))
    with with_clones(ExpertWeights(w1_eCD=w1, w2_eDF=w2), clones) as weights:
        y = weights.w1_eCD * weights.w2_eDF
        joined = StorageWeakRef(weights.w1_eCD.untyped_storage())
        of_w1 = weights.w2_eDF.detach().clone()
    del weights
    is_gone = joined.expired() == (clones.num_here > 0)
    y.sum().backward()
    (expected,) = clones.bring_home_([of_w1])
    return is_gone and w1.grad is not None and torch.equal(w1.grad, expected)


def skewed(options: CloneOptions | None) -> list[float]:
    """Return rows that each block computes, most of experts 0 and 1, and clones per rank."""
    meshes, place = placed(0 if options is None else options.per_rank)
    torch.manual_seed(0)
    config = MoEConfig(dim=D, hidden_dim=D, num_experts=E, top_k=2, expert_bias=True)
    layer = MoELayer(config)
    layer.router.expert_bias[0] = 2.0
    layer.part("experts").shard(meshes.expert["ep", "etp"])
    layer.dispatcher = AllToAllDispatcher(place)
    if options is not None:
        layer.cloner = Cloner(place, meshes.expert.get_group("ep"), options)
    rows: list[int] = []
    compute = layer._compute
    layer._compute = lambda inp: (rows.append(int(inp.index.num_rows)), compute(inp))[1]
    torch.manual_seed(dist.get_rank())
    y = layer(torch.randn(64, D))
    y.sum().backward()
    metrics = MoEState({"layer": layer}, BalanceGroups(global_batch=dist.group.WORLD)).finish_step()
    numbers = metrics.to_dict(per_expert=False)
    assert (options is None) == ("clones_per_rank" not in numbers)
    return [*of_blocks(rows[0]), numbers.get("clones_per_rank", 0.0)]


def worker(rank: int, device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {"travel": travel(), "kept": of_blocks(kept())}
    found["plain"] = skewed(None)
    found["cloned"] = skewed(CloneOptions(per_rank=1, least=0.01))
    return found


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return run_ranks(EP * ETP, worker)


def test_weights_go_to_their_places_and_gradients_home(results: dict[str, Any]) -> None:
    assert results["travel"] == [
        ((0,), (0, 0, 1), (0, 1, 1), (1, 0), [4.0, 3.0], [0 + 1e5, 1.0]),
        ((1, 0), (1, 0, 1), (0, 0, 0), (), [], [2 + 1e4, 3 + 1e1]),
        ((0,), (1, 0, 0), (1, 1, 0), (1, 0), [2.0, 0.0], [4 + 1e0, 5.0]),
    ]


def test_backward_keeps_the_clones_alone(results: dict[str, Any]) -> None:
    assert results["kept"] == [True] * EP


def test_busy_ranks_give_tokens_away(results: dict[str, Any]) -> None:
    *plain, none = results["plain"]
    *cloned, per_rank = results["cloned"]
    assert none == 0 and per_rank * EP in (1, 2)
    assert sum(plain) == sum(cloned)
    assert max(plain) > 1.4 * sum(plain) / EP
    assert max(cloned) <= 1.01 * sum(plain) / EP + 1
