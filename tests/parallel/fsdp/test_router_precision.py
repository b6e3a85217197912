from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from moecore import FSDPOptions, MoEConfig, MoELayer, ParallelConfig, build_meshes, parallelize_moe
from moecore.kernels.routing.router_logits import router_logits_ref
from tests.helpers.ranks import ranks_fixture
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


found = ranks_fixture(WORLD, train_on_ranks)


def test_logits_are_those_of_the_unrounded_weight(found: dict[str, Any]) -> None:
    router, x_TD = make_layer(CONFIG).router, batch(0)[0].bfloat16()
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
    assert isinstance(model[1].router.weight, DTensor) and not is_unit(model, model[1].router)


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
