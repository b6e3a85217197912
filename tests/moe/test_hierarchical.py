"""Two-level dispatch: what crosses between domains, and results beside one process and all-to-all.

Domains are neighbouring CPU ranks. Inside of them tokens go by all-to-all, or by the stores of
"nvlink", emulated.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moecore import (
    CapacityConfig,
    MemoryOptions,
    Meshes,
    MoEConfig,
    MoELayer,
    NVLinkOptions,
    ParallelConfig,
    build_meshes,
    parallelize_moe,
)
from moecore.base.saved_tensors import packing
from moecore.moe.dispatch import alltoall
from moecore.moe.dispatch.alltoall import AllToAllDispatcher
from moecore.moe.dispatch.hierarchical import HierarchicalDispatcher
from moecore.moe.dispatch.nvlink import NVLinkDispatcher
from moecore.moe.forced import force_even_load
from moecore.moe.placement import DomainPlacement, ExpertPlacement, domain_of
from moecore.moe.records import Dispatcher, Routing
from moecore.parallel.mesh import domain_groups, ranks_of_fabrics
from moecore.train.memory.saved_bytes import count_saved_bytes
from tests.helpers.grids import asked_for, beside
from tests.helpers.ranks import run_ranks
from tests.moe import test_dispatch_ranks as ranks
from tests.moe.emulated_exchange import EmulatedExchangePool
from tests.train.memory.test_saved_bytes import Saved

pytestmark = pytest.mark.slow

# Ranks, ep, etp, and ranks of a domain: axes of different sizes.
SHAPES = {
    "2 x 2": (4, 4, 1, 2),
    "2 x 2, etp": (4, 2, 2, 2),
    "2 x 3": (6, 6, 1, 3),
    "3 x 2": (6, 6, 1, 2),
    "4 x 2": (8, 8, 1, 2),
    "2 x 4, etp": (8, 4, 2, 4),
}
# More domains than two "3 x 2" has.
shapes = pytest.mark.parametrize("shape", beside(SHAPES, ["4 x 2"]))
E, K, D, T = 24, 5, 32, 40
PADDED = {
    "capacity": CapacityConfig(factor=1.0, pad=True),
    "room": CapacityConfig(factor=3.0, pad=True),
}


def meshes_of(shape: str) -> Meshes:
    _, ep, etp, domain = SHAPES[shape]
    return build_meshes(ParallelConfig(ep=ep, etp=etp), "cpu", ranks_per_domain=domain)


@cache
def placements(shape: str, num_experts: int) -> tuple[ExpertPlacement, DomainPlacement, Any]:
    meshes = meshes_of(shape)
    groups, p = domain_groups(meshes), meshes.parallel
    assert meshes.dispatch_group is not None
    whole = ExpertPlacement(
        group=meshes.dispatch_group, num_experts=num_experts, ep=p.ep, etp=p.etp
    )
    return whole, domain_of(whole, groups.inside, groups.across.size()), groups.across


def by_alltoall(shape: str, num_experts: int = E) -> Dispatcher:
    whole, domain, across = placements(shape, num_experts)
    return HierarchicalDispatcher(whole, domain, AllToAllDispatcher(domain), across)


def by_stores(shape: str, num_experts: int = E) -> Dispatcher:
    whole, domain, across = placements(shape, num_experts)
    options = NVLinkOptions(max_tokens=128, row_factor=None)
    pool = EmulatedExchangePool(domain.group, ep=whole.ep, options=options)
    pool.watch = "skips"
    return HierarchicalDispatcher(whole, domain, NVLinkDispatcher(domain, pool), across)


MAKE = {"alltoall": by_alltoall, "stores": by_stores}


@contextmanager
def counted_rows(across: dist.ProcessGroup) -> Iterator[list[list[int]]]:
    """List the rows that this rank sends to each domain, with their ids, by exchange."""
    sent: list[list[int]] = []
    original = dist.all_to_all_single

    def counting(out: Tensor, x: Tensor, *args: Any, **options: Any) -> Any:
        if options.get("group") is across and options.get("input_split_sizes"):
            sent.append(options["input_split_sizes"])
        return original(out, x, *args, **options)

    with patch.object(alltoall.dist, "all_to_all_single", counting):
        yield sent


def choices(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    ids = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(T)]).int()
    ids[0, 1:], ids[1] = -1, -1  # dropped choices, and a token without any expert
    return ids


def traffic(shape: str) -> bool:
    """Whether each token crosses once per domain, and reaches each rank of its experts once."""
    _, ep, etp, _ = SHAPES[shape]
    whole, domain, across = placements(shape, E)
    rank, dispatcher = dist.get_rank(), by_alltoall(shape)
    ids_TK = choices(rank)
    x_TD = (torch.arange(float(T)) + 1000 * rank)[:, None].expand(T, D).contiguous()
    weights_TK = torch.ones(T, K)
    routing = Routing(expert_ids_TK=ids_TK, weights_TK=weights_TK, chosen_ids_TK=ids_TK)
    with counted_rows(across) as sent:
        inp = dispatcher.dispatch(x_TD, routing)
        home_TD = dispatcher.combine(torch.ones_like(inp.rows.values), inp.plan)
    domains_TH = torch.stack(
        [
            ((ids_TK >= 0) & (ids_TK // domain.num_in_domain == h)).any(1)
            for h in range(across.size())
        ],
        dim=1,
    )
    first = rank // etp * whole.num_local
    wanted = sorted(
        1000.0 * r + t
        for r in range(ep * etp)
        for t, row in enumerate(choices(r).tolist())
        if any(first <= e < first + whole.num_local for e in row)
    )
    blocks_T = torch.tensor(
        [len({e // whole.num_local for e in row if e >= 0}) for row in ids_TK.tolist()]
    )
    return bool(
        sent[0] == domains_TH.sum(0).tolist()
        and sorted(inp.rows.values[:, 0].tolist()) == wanted
        and int(inp.index.num_rows) == inp.index.row_ids_R.numel()
        and torch.equal(home_TD[:, 0], blocks_T.float() * etp)
    )


def gradients(
    dispatcher: Dispatcher, config: MoEConfig, shape: str, num_tokens: int
) -> list[Tensor]:
    """Return a layer's output, and the gradients of tokens and of this rank's experts."""
    meshes = meshes_of(shape)
    layer = ranks.make_layer(config)
    layer.part("experts").shard(meshes.expert["ep", "etp"])
    layer.dispatcher = dispatcher
    generator = torch.Generator().manual_seed(dist.get_rank())
    x_TD = torch.randn(num_tokens, D, generator=generator).requires_grad_()
    y_TD = layer(x_TD)
    (y_TD * torch.linspace(-1, 1, D)).sum().backward()
    grads = [p.grad.to_local() for p in layer.part("experts").parameters()]  # type: ignore[union-attr]
    router = [p.grad for n, p in layer.named_parameters() if n.startswith("router")]
    return [y_TD.detach(), x_TD.grad, *grads, *router]  # type: ignore[list-item]


def beside_alltoall(shape: str) -> dict[str, float]:
    """Return the worst difference from all-to-all, by what is inside and how tokens are routed."""
    no_bias = dict(fc1_bias=False, fc2_bias=False)
    plain = replace(ranks.CONFIG, num_experts=E, top_k=K, **no_bias)  # type: ignore[arg-type]
    routings = {
        "uneven": (plain, 3 + 2 * dist.get_rank()),
        "none on a rank": (plain, 7 * (dist.get_rank() != 1)),
        "one expert": (replace(plain, top_k=1, expert_bias=True, normalize_weights=False), 6),
        "all experts": (replace(plain, top_k=E), 5),
        **{name: (replace(plain, capacity=capacity), 8) for name, capacity in PADDED.items()},
    }
    if dist.get_world_size() == 4:  # the others are beside one process
        routings = {name: routings[name] for name in PADDED}
    errors = {}
    for routing, (config, num_tokens) in routings.items():
        whole, *_ = placements(shape, E)
        expected = gradients(AllToAllDispatcher(whole), config, shape, num_tokens)
        for inside, make in MAKE.items():
            if inside == "stores" and config.capacity is not None:
                continue
            found = gradients(make(shape), config, shape, num_tokens)
            pairs = zip(found, expected, strict=True)
            scale = [max(float(b.abs().max()) if b.numel() else 0.0, 1e-3) for b in expected]
            worst = [
                float((a - b).abs().max()) / s if a.numel() else 0.0
                for (a, b), s in zip(pairs, scale, strict=True)
            ]
            errors[f"{routing}/{inside}"] = max(worst)
    found_by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found_by_rank, errors)
    return {name: max(each[name] for each in found_by_rank) for name in errors}


def against_one_process() -> dict[str, float]:
    """Return errors on hard numbers of tokens, of four ranks as two domains."""
    make = {"ep4": "2 x 2", "ep2-etp2": "2 x 2, etp"}
    errors = {}
    for tokens, routing in ranks.HARD:
        config, counts = ranks.ROUTINGS[routing], ranks.TOKENS[tokens]
        expected = ranks.run_reference(config, counts, torch.float32)
        for folding, shape in make.items():
            for name, of in MAKE.items():
                ranks.DISPATCHERS["two levels"] = lambda _, of=of, shape=shape: of(shape, 8)  # type: ignore[assignment]
                found = ranks.run_layer(config, folding, "two levels", counts, torch.float32)
                worst = [ranks.row_errors(found[k], expected[k])[1] for k in expected]
                errors[f"{tokens}/{routing}/{folding}/{name}"] = max(worst, default=0.0)
    return errors


def worker(rank: int, device: torch.device, world: int, asked: list[str]) -> dict[str, Any]:
    own = [shape for shape in asked if SHAPES[shape][0] == world]
    traffics: list[Any] = [None] * world
    dist.all_gather_object(traffics, {shape: traffic(shape) for shape in own})
    found = {f"traffic/{s}": all(each[s] for each in traffics) for s in own}
    found |= {f"alltoall/{s}": beside_alltoall(s) for s in own}
    if world == 4:
        found["kept"] = {name: kept(make) for name, make in MAKE.items()}
        found["one process"] = against_one_process()
        found["refused"] = refusals()
        racks = {"one": "aaaa", "two": "aabb", "odd": "abbb", "none": ["a", "a", None, None]}
        found["fabrics"] = {name: ranks_of_fabrics(names[rank]) for name, names in racks.items()}
    return found


def kept(make: Callable[..., Dispatcher]) -> tuple[int, int]:
    """Return the bytes that a forward on meta predicts for backward, and those of one that ran."""
    layer = MoELayer(MoEConfig(dim=128, hidden_dim=64, num_experts=E, top_k=2))
    force_even_load(layer)
    layer.part("experts").shard(meshes_of("2 x 2").expert["ep", "etp"])
    layer.dispatcher = make("2 x 2")
    x = torch.randn(48, 128, requires_grad=True)
    given = x.detach().to("meta").requires_grad_()
    how: dict[str, Any] = dict(options=MemoryOptions(), device_type="cpu")
    (predicted,) = count_saved_bytes(layer, [layer], lambda copy: copy(given), **how).blocks
    saved = Saved(layer)
    with packing(saved):
        y = layer(x)
    found = predicted.num_bytes, saved.num_bytes
    y.sum().backward()
    return found


def refusals() -> dict[str, str]:
    """Return what is raised, by what is asked for."""
    calls = {
        "no divisor of the world": lambda: build_meshes(
            ParallelConfig(), "cpu", ranks_per_domain=3
        ),
        "differs": lambda: build_meshes(
            ParallelConfig(), "cpu", ranks_per_domain=1 + dist.get_rank() // 3
        ),
        "one domain": lambda: tiny(ParallelConfig(ep=2), 2),
        "domains of one": lambda: tiny(ParallelConfig(ep=4), 1),
        "etp across": lambda: tiny(ParallelConfig(etp=4), 2),
        "hosts of different sizes": lambda: tiny(ParallelConfig(ep=4), None),
    }
    found = {}
    of_host = {"LOCAL_WORLD_SIZE": "2" if dist.get_rank() < 2 else "1"}
    for name, call in calls.items():
        try:
            with patch.dict(os.environ, of_host if name.startswith("hosts") else {}):
                call()
        except ValueError as error:
            found[name] = str(error)
    return found


def tiny(parallel: ParallelConfig, ranks_per_domain: int | None) -> Any:
    meshes = build_meshes(parallel, "cpu", ranks_per_domain=ranks_per_domain)
    layer = ranks.make_layer(ranks.CONFIG)
    return parallelize_moe(torch.nn.Sequential(layer), meshes, dispatch="hierarchical")


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, Any]:
    asked = asked_for(request, "shape")
    return {
        name: value
        for world in (4, 6, 8)
        for name, value in run_ranks(world, worker, world, asked).items()
    }


@shapes
def test_a_token_crosses_once_per_domain(results: dict[str, Any], shape: str) -> None:
    assert results[f"traffic/{shape}"]


@shapes
def test_equals_alltoall(results: dict[str, Any], shape: str) -> None:
    """But for the order of sums, in which domains come before ranks."""
    found = results[f"alltoall/{shape}"]
    num = 2 if SHAPES[shape][0] == 4 else 10
    assert len(found) == num and max(found.values()) < 2e-6, found


def test_equals_one_process(results: dict[str, Any]) -> None:
    found = results["one process"]
    assert len(found) == 4 * len(ranks.HARD) and max(found.values()) < 1e-5, found


def test_domains_are_those_of_fabrics_between_hosts(results: dict[str, Any]) -> None:
    assert results["fabrics"] == {"one": 4, "two": 2, "odd": 1, "none": None}


def test_what_does_not_fit_is_one_line(results: dict[str, Any]) -> None:
    found = results["refused"]
    begin = "ranks_per_domain ({}) of build_meshes must, with dispatcher ('hierarchical'), "
    assert found["no divisor of the world"] == (
        "ranks_per_domain (3) must divide the world size (4): give the ranks of a host"
    )
    assert found["differs"].startswith("ranks_per_domain (1 on")
    assert found["hosts of different sizes"].startswith("ranks_per_domain (2 on")
    own = "be between 2 and half of ep * etp (2): use 'auto', or tell it"
    assert found["one domain"] == begin.format(2) + own
    assert found["domains of one"] == begin.format(1) + own.replace("(2)", "(4)")
    assert found["etp across"] == (
        begin.format(2) + "be a multiple of etp (4), which stays inside: lower etp"
    )


@pytest.mark.parametrize(
    ("ep", "flat", "two"), [(16, 3.26, 1.00), (32, 5.45, 2.71), (64, 6.72, 4.63)]
)
def test_rows_that_the_page_names(ep: int, flat: float, two: float) -> None:
    """Rows of a token over the network between domains of 8 GPUs, 8 of 256 experts."""
    T, H, group = 100_000, ep // 8, None
    whole = ExpertPlacement(group=group, num_experts=256, ep=ep, etp=1)  # type: ignore[arg-type]
    domain = domain_of(whole, group, H)  # type: ignore[arg-type]
    assert whole.balanced_tokens(T, whole.num_experts + 1) == T  # some are zero experts
    assert (ep - 8) * whole.balanced_tokens(T, 8) / T == pytest.approx(flat, abs=0.005)
    assert (H - 1) * domain.balanced_arrivals(T, 8) / T == pytest.approx(two, abs=0.005)
    page = (Path(__file__).parents[2] / "docs" / "dispatchers.md").read_text()
    assert f"| {ep} | {flat:.2f} | {two:.2f} | {two / flat:.2f} |" in page


@pytest.mark.parametrize(("H", "N", "E", "K"), [(2, 4, 64, 6), (4, 2, 16, 2), (3, 2, 12, 12)])
def test_even_loads_are_those_of_random_choices(H: int, N: int, E: int, K: int) -> None:
    generator = torch.Generator().manual_seed(0)
    T = 20_000
    group: Any = None
    whole = ExpertPlacement(group=group, num_experts=E, ep=H * N, etp=1)
    domain = domain_of(whole, group, H)
    ids_TK = torch.rand(T, E, generator=generator).topk(K).indices
    come = (ids_TK < domain.num_in_domain).any(1)
    assert domain.balanced_arrivals(T, K) == pytest.approx(int(come.sum()), rel=0.02)
    arrived = H * domain.balanced_arrivals(T, K)
    needed = (ids_TK < whole.num_local).any(1)
    assert domain.balanced_tokens(arrived, K) == pytest.approx(H * int(needed.sum()), rel=0.05)
    assert domain.balanced_rows(arrived, K) == pytest.approx(T * K, rel=0.01)
