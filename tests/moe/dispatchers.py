"""Every dispatcher by name over six CPU ranks, and the layers whose results they are compared by.

"nvlink" runs emulated exchanges, "nccl_ep" a stand-in of NCCL EP. Two levels are domains of
neighbouring ranks: inside a domain all-to-all or the stores of "nvlink" send the tokens.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moecore import BalanceConfig, MoEConfig, MoELayer, NVLinkOptions, ParallelConfig, build_meshes
from moecore.base.torch_private import get_local_tensor
from moecore.moe.dispatch.allgather import AllGatherDispatcher
from moecore.moe.dispatch.alltoall import AllToAllDispatcher
from moecore.moe.dispatch.hierarchical import HierarchicalDispatcher
from moecore.moe.dispatch.nccl_ep import EPGroups, NCCLEPDispatcher
from moecore.moe.dispatch.nvlink import NVLinkDispatcher
from moecore.moe.forced_routing import force_even_load
from moecore.moe.placement import ExpertPlacement, make_domain_placement
from moecore.moe.records import Dispatcher
from moecore.parallel.mesh import Meshes, make_domain_groups
from tests.moe.emulated_exchange import EmulatedExchangePool

WORLD, E, D = 6, 12, 48
MAX_TOKENS = 24
CONFIG = MoEConfig(
    dim=D,
    hidden_dim=96,
    num_experts=E,
    top_k=3,
    fc1_bias=True,
    fc2_bias=True,
    balance=BalanceConfig(z_loss_coef=0.01),
)
PLAIN = replace(CONFIG, fc1_bias=False, fc2_bias=False)
LAYOUTS = {"ep6": (6, 1), "ep3-etp2": (3, 2), "etp6": (1, 6), "ep3-edp2": (3, 1)}


@cache
def placed(ep: int, etp: int, ranks_per_domain: int = 0) -> tuple[Meshes, ExpertPlacement]:
    """Return meshes and the experts' placement; 0 = all ranks are one domain."""
    domain = ranks_per_domain or dist.get_world_size()
    meshes = build_meshes(ParallelConfig(ep=ep, etp=etp), "cpu", ranks_per_domain=domain)
    assert meshes.dispatch_group is not None
    return meshes, ExpertPlacement(group=meshes.dispatch_group, num_experts=E, ep=ep, etp=etp)


def by_stores(place: ExpertPlacement, *, fp8: bool = False, **options: Any) -> NVLinkDispatcher:
    """Return dispatcher "nvlink" over emulated exchanges."""
    options = NVLinkOptions(**dict(max_tokens=MAX_TOKENS, row_factor=None) | options)
    pool = EmulatedExchangePool(place.group, ep=place.ep, options=options, fp8=fp8)
    pool.watch = "skips"
    return NVLinkDispatcher(place, pool)


def two_levels(
    ep: int,
    etp: int,
    *,
    ranks_per_domain: int,
    inside: Callable[..., Dispatcher] = AllToAllDispatcher,
    fp8: bool = False,
) -> HierarchicalDispatcher:
    """Return the hierarchical dispatcher over domains whose tokens `inside` sends."""
    meshes, place = placed(ep, etp, ranks_per_domain)
    groups = make_domain_groups(meshes)
    domain = make_domain_placement(place, groups.inside, groups.across.size())
    inner = inside(domain, fp8=fp8)
    return HierarchicalDispatcher(place, domain, inner, groups.across, fp8=fp8)


def over(make: Callable[[ExpertPlacement], Dispatcher]) -> Callable[[int, int], Dispatcher]:
    return lambda ep, etp: make(placed(ep, etp)[1])


far_stores = partial(by_stores, max_tokens=2 * MAX_TOKENS)  # of two domains
# Name -> a function of (ep, etp), and the layouts that the dispatcher supports.
DISPATCHERS: dict[str, tuple[Callable[[int, int], Dispatcher], tuple[str, ...]]] = {
    "alltoall": (over(AllToAllDispatcher), tuple(LAYOUTS)),
    "allgather": (over(AllGatherDispatcher), tuple(LAYOUTS)),
    "nvlink": (over(by_stores), tuple(LAYOUTS)),
    "nccl_ep": (over(lambda p: NCCLEPDispatcher(p, EPGroups(p.group, 6))), ("ep6", "ep3-edp2")),
    "domains of 2": (partial(two_levels, ranks_per_domain=2), ("ep6", "ep3-etp2")),
    "domains of 3, stores": (partial(two_levels, ranks_per_domain=3, inside=far_stores), ("ep6",)),
}
CASES = [(name, layout) for name, (_, layouts) in DISPATCHERS.items() for layout in layouts]


def make_dispatcher(name: str, layout: str) -> Dispatcher:
    return DISPATCHERS[name][0](*LAYOUTS[layout])


def make_layer(config: MoEConfig, dtype: torch.dtype = torch.float32) -> MoELayer:
    """Return the same full layer on every rank; a selection bias sends all tokens to expert 5."""
    layer = MoELayer(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        if config.expert_bias:
            layer.router.expert_bias[5] = 100.0
    return layer.to(dtype)


def sharded_layer(config, dispatcher, layout, dtype=torch.float32) -> MoELayer:
    """Return `make_layer`'s layer with this rank's experts."""
    layer = make_layer(config, dtype)
    layer.get_part("experts").shard_parameters(placed(*LAYOUTS[layout])[0].expert["ep", "etp"])
    layer.dispatcher = dispatcher
    return layer


def tokens_of(counts: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return the tokens of each rank."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, D, generator=generator).to(dtype) for n in counts]


def local_tokens(*counts: tuple[int, ...]) -> list[Tensor]:
    """Return this rank's tokens of several micro-batches."""
    return [tokens_of(of_ranks)[dist.get_rank()] for of_ranks in counts]


def weights_of(y_TD: Tensor) -> Tensor:
    """Return the gradient with which a backward starts."""
    return torch.linspace(-1, 1, D).to(y_TD.dtype).expand_as(y_TD).contiguous()


def gradients(layer: MoELayer, xs: list[Tensor], *, recompute: bool = False) -> list[Tensor]:
    """Run all forwards, then all backwards; return outputs and gradients of tokens and weights."""
    layer.zero_grad()
    xs = [x.detach().requires_grad_() for x in xs]
    ys = [checkpoint(layer, x, use_reentrant=False) if recompute else layer(x) for x in xs]
    for y in ys:
        y.backward(weights_of(y))
    grads = [p.grad for p in layer.parameters()]
    return [*(y.detach() for y in ys), *(x.grad for x in xs), *map(get_local_tensor, grads)]  # type: ignore[misc]


def equal(ones: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ones, others, strict=True))


def even_layer(name: str, layout: str) -> MoELayer:
    """Return a layer with exactly even loads: each token chooses all experts."""
    layer = MoELayer(MoEConfig(dim=128, hidden_dim=96, num_experts=E, top_k=E))
    force_even_load(layer)
    layer.get_part("experts").shard_parameters(placed(*LAYOUTS[layout])[0].expert["ep", "etp"])
    layer.dispatcher = make_dispatcher(name, layout)
    return layer
