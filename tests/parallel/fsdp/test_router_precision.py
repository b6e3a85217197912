"""Mixed precision rounds no router weight: choices and the router's gradient are those of fp32."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from moecore import FSDPOptions, MoEConfig, MoELayer, ParallelConfig, build_meshes, parallelize_moe
from moecore.kernels.routing.router_logits import router_logits_ref
from tests.helpers.parts import on_parts
from tests.helpers.ranks import run_ranks
from tests.moe.moe_cases import make_layer
from tests.parallel.fsdp.units import is_unit, unit_of

WORLD = 2
CONFIG = MoEConfig(dim=32, hidden_dim=16, num_experts=8, top_k=2, router_bias=True)


def batch(rank: int) -> Tensor:
    return torch.randn(1, 24, 32, generator=torch.Generator().manual_seed(rank))


def train_on_ranks(rank: int, device: torch.device) -> dict[str, Any]:
    model = nn.Sequential(nn.Identity(), make_layer(CONFIG))
    meshes = build_meshes(ParallelConfig(), "cpu")
    options = FSDPOptions(param_dtype=torch.bfloat16)
    parallelize_moe(model, meshes, fsdp=options)
    routings: list[Any] = []
    router = model[1].router
    router.register_forward_hook(lambda _, args, out: routings.append(out))
    y = model(batch(rank))
    y.float().square().mean().backward()
    grads = {n: p.grad.full_tensor() for n, p in model[1].named_parameters()}
    own = is_unit(model, router)
    return {"logits": routings[0].logits_TE, "grads": grads, "is_unit": own}


def partly_recomputed(rank: int) -> dict[str, bool]:
    """By (blocks per unit, recomputed blocks) whether two steps have the bits of none recomputed.

    Routers of several blocks are one unit, of which a recomputed forward runs some.
    """
    found = {}
    for together in (2, 4):
        plain = two_steps(rank, together, ())
        for blocks in ((3,), (0, 2), (1, 2), (0, 1, 2, 3)):
            steps = two_steps(rank, together, blocks)
            pairs = zip(plain, steps, strict=True)
            same = all(torch.equal(a, b) and bool(a.isfinite().all()) for a, b in pairs)
            found[f"{together}, {blocks}"] = same
    return found


def left_out(rank: int) -> dict[str, Tensor]:
    """Gradients of a step of all blocks, behind forwards that left blocks out."""
    model = Residual()
    options = FSDPOptions(param_dtype=torch.bfloat16)
    parallelize_moe(model, build_meshes(ParallelConfig(), "cpu"), fsdp=options)
    for without in ((3,), (0, 2), ()):
        with torch.no_grad():
            model(batch(rank), (1, 2))
        model.zero_grad()
        model(batch(rank).requires_grad_(), without).float().square().mean().backward()
    assert len({unit_of(model, layer.router) for layer in model.layers}) == 1
    return {n: p.grad.full_tensor() for n, p in model.named_parameters()}


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make_layer(CONFIG, seed=i, std=0.1) for i in range(4))

    def forward(self, x: Tensor, without: tuple[int, ...] = ()) -> Tensor:
        for i, layer in enumerate(self.layers):
            if i not in without:
                x = x + layer(x)
        return x


def two_steps(rank: int, together: int, recomputed: tuple[int, ...]) -> list[Tensor]:
    model = Residual()
    options = FSDPOptions(param_dtype=torch.bfloat16, blocks_per_unit=together)
    parallelize_moe(model, build_meshes(ParallelConfig(), "cpu"), fsdp=options)
    for i in recomputed:
        layer = model.layers[i]
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    optimizer = on_parts(torch.optim.SGD)(model.parameters(), lr=0.01)
    found = []
    for step in range(2):
        optimizer.zero_grad()
        model(batch(10 * step + rank).requires_grad_()).float().square().mean().backward()
        found += [p.grad.full_tensor() for p in model.parameters()]
        optimizer.step()
    return found


def worker(rank: int, device: torch.device) -> dict[str, Any]:
    return {
        **train_on_ranks(rank, device),
        "partly": partly_recomputed(rank),
        "left_out": left_out(rank),
    }


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return run_ranks(WORLD, worker)


def test_routers_of_one_unit_may_be_recomputed_in_part(found: dict[str, Any]) -> None:
    assert len(found["partly"]) == 8 and all(found["partly"].values()), found["partly"]


def test_a_forward_may_leave_out_routers_of_a_unit(found: dict[str, Any]) -> None:
    model = Residual()
    for layer in model.layers:
        layer.experts.bfloat16()
    for rank in range(WORLD):
        (model(batch(rank).bfloat16()).float().square().mean() / WORLD).backward()
    assert found["left_out"].keys() == dict(model.named_parameters()).keys()
    for name, param in model.named_parameters():
        error = (found["left_out"][name] - param.grad).abs().max() / param.grad.abs().max()
        bound = 1e-5 if "router" in name else 2**-8
        assert error <= bound, f"{name}: {error}"


def test_logits_are_those_of_the_unrounded_weight(found: dict[str, Any]) -> None:
    router = make_layer(CONFIG).router
    x_TD = batch(0)[0].bfloat16()
    assert found["is_unit"]
    expected = router_logits_ref(x_TD, router.weight, router.bias)
    assert torch.equal(found["logits"], expected)
    rounded = router_logits_ref(x_TD, router.weight.bfloat16(), router.bias)
    assert not torch.allclose(expected, rounded, rtol=1e-4), "or the test could not tell"


def test_gradients_are_those_of_one_process(found: dict[str, Any]) -> None:
    layer = make_layer(CONFIG)
    layer.experts.bfloat16()
    for rank in range(WORLD):
        (layer(batch(rank).bfloat16()).float().square().mean() / WORLD).backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None
        # Units add the ranks' bf16 gradients of experts in fp32, autograd in bf16.
        bound = 1e-5 if name.startswith("router") else 2**-8
        scale = parameter.grad.abs().max()
        worst = (found["grads"][name] - parameter.grad).abs().max() / scale
        assert worst <= bound, f"{name}: {worst}"


@pytest.mark.usefixtures("no_group_left")
def test_without_mixed_precision_the_router_is_part_of_its_block() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    model = nn.Sequential(nn.Identity(), MoELayer(CONFIG, device="meta"))
    parallelize_moe(model, build_meshes(ParallelConfig(), "cpu"), fsdp=FSDPOptions())
    assert isinstance(model[1].router.weight, DTensor)
    assert not is_unit(model, model[1].router)


@pytest.mark.usefixtures("no_group_left")
def test_routers_of_a_list_and_a_dtype_are_one_unit() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    layers = [MoELayer(CONFIG, device="meta") for _ in range(5)]
    layers[1].router.double()
    model = nn.Module()
    model.first, model.second = nn.ModuleList(layers[:3]), nn.ModuleList(layers[3:])
    options = FSDPOptions(param_dtype=torch.bfloat16)
    parallelize_moe(model, build_meshes(ParallelConfig(), "cpu"), fsdp=options)
    found = [unit_of(model, layer.router) for layer in layers]
    assert [found.index(unit) for unit in found] == [0, 1, 0, 3, 3]
