"""One expert per rank: received rows are expert rows, so experts sum nothing, to the same bits.

Four ranks run each case twice, the second time without `ExpertPlacement.find_unsummed`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moecore import CapacityConfig, MoEConfig, MoELayer, ParallelConfig, build_meshes
from moecore.base.options.precision import Recipe
from moecore.base.rank_checks import gather_objects
from moecore.base.torch_private import get_local_tensor
from moecore.kernels.experts import backward, expert_mlp
from moecore.moe.dispatch.alltoall import AllToAllDispatcher
from moecore.moe.dispatch.hierarchical import HierarchicalDispatcher
from moecore.moe.dispatch.nvlink import NVLinkDispatcher
from moecore.moe.placement import ExpertPlacement, make_domain_placement
from moecore.parallel.mesh import make_domain_groups
from tests.helpers.ranks import ranks_fixture
from tests.moe.dispatchers import equal
from tests.moe.emulated_exchange import EmulatedExchangePool

pytestmark = pytest.mark.slow

WORLD = 4
CONFIG = MoEConfig(dim=128, hidden_dim=128, num_experts=WORLD, top_k=2)
PADDED = replace(CONFIG, capacity=CapacityConfig(factor=1.0, pad=True))
COUNTS, EVEN = (9, 0, 30, 4), (8,) * WORLD

# The fields of `run`, and how often experts sum rows in a forward and its backward.
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "all-to-all": ({}, 0),
    "one choice": (dict(config=replace(CONFIG, top_k=1, normalize_weights=False)), 0),
    "dropped": (dict(config=replace(CONFIG, capacity=CapacityConfig(factor=0.7))), 0),
    "nothing": (dict(counts=(0,) * WORLD), 0),
    "etp": (dict(etp=2, config=replace(CONFIG, num_experts=2, top_k=1)), 0),
    "domains": (dict(domain=2), 0),
    "domains, tokens as FP8": (dict(domain=2, fp8=True), 0),
    "tokens as FP8": (dict(fp8=True), 0),
    "FP8": (dict(recipe=Recipe(), fp8=True), 0),
    "sequential": (dict(backend="sequential"), 0),  # no kernel that sums
    "FC1 again": (dict(recompute_fc1=True), 0),
    "biases": (dict(config=replace(CONFIG, fc1_bias=True, fc2_bias=True)), 0),
    "stores outside of a step": (dict(has_stores=True), 0),  # all-to-all sends the tokens
    "padded": (dict(config=PADDED, counts=EVEN), 2),
    "two experts": (dict(config=replace(CONFIG, num_experts=2 * WORLD)), 2),
}


def run(
    *,
    config: MoEConfig = CONFIG,
    counts: tuple[int, ...] = COUNTS,
    etp: int = 1,
    domain: int = WORLD,
    fp8: bool = False,
    has_stores: bool = False,
    recipe: Recipe | None = None,
    backend: str = "torch",
    recompute_fc1: bool = False,
) -> list[Tensor]:
    """Return a layer's output and gradients; signs of zeros show as infinities."""
    meshes = build_meshes(ParallelConfig(ep=WORLD // etp, etp=etp), "cpu", ranks_per_domain=domain)
    assert meshes.dispatch_group is not None
    place = ExpertPlacement(
        group=meshes.dispatch_group, num_experts=config.num_experts, ep=WORLD // etp, etp=etp
    )
    torch.manual_seed(0)
    layer = MoELayer(config)
    experts = layer.get_part("experts")
    name: Any = "auto" if recipe is not None else backend
    experts.set_backend(name, recompute_fc1=recompute_fc1, recipe=recipe)
    experts.shard_parameters(meshes.expert["ep", "etp"])
    layer.dispatcher = AllToAllDispatcher(place, fp8=fp8)
    if has_stores:
        pool = EmulatedExchangePool(place.group, ep=WORLD, is_required=False)
        layer.dispatcher = NVLinkDispatcher(place, pool)
    if domain < WORLD:
        groups = make_domain_groups(meshes)
        inner = make_domain_placement(place, groups.inside, groups.across.size())
        inside = AllToAllDispatcher(inner, fp8=fp8)
        layer.dispatcher = HierarchicalDispatcher(place, inner, inside, groups.across, fp8=fp8)
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(counts[dist.get_rank()], config.dim, generator=generator).requires_grad_()
    y = layer(x)
    y.backward(torch.linspace(-1, 1, config.dim).expand_as(y).contiguous())
    grads = [get_local_tensor(p.grad) for p in layer.parameters()]
    return [1 / value for value in (y.detach(), x.grad, *grads)]


@contextmanager
def counted_sums() -> Iterator[list[int]]:
    """Within, list the rows of each sum of the experts."""
    sums: list[int] = []
    plain = expert_mlp.sum_rows_without_autograd

    def count(y_RD: Tensor, *row_map: Tensor) -> Tensor:
        sums.append(y_RD.shape[0])
        return plain(y_RD, *row_map)

    name = "sum_rows_without_autograd"
    with patch.object(expert_mlp, name, count), patch.object(backward, name, count):
        yield sums


def worker(rank: int, device: torch.device) -> list[dict[str, tuple[bool, int]]]:
    found = {}
    for name, (fields, _) in CASES.items():
        with counted_sums() as sums:
            values = run(**fields)
        with patch.object(ExpertPlacement, "find_unsummed", lambda *_: None):
            found[name] = equal(values, run(**fields)), len(sums)
    return gather_objects(found)


results = ranks_fixture(WORLD, worker)


@pytest.mark.parametrize("name", CASES)
def test_experts_sum_no_rows_and_no_bit_moves(name: str, results: Any) -> None:
    assert [found[name] for found in results] == [(True, CASES[name][1])] * WORLD
