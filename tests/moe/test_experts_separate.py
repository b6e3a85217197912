"""Gate and up as two parameters: the same numbers as in one tensor, whole and on every mesh."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moecore import MoEConfig, MoELayer, ParallelConfig, build_meshes, parallelize_moe
from moecore.base.params import init_normal_
from moecore.moe.expert_layout import ExpertLayout
from moecore.moe.experts import Experts
from moecore.moe.layer import LayerLayout
from tests.helpers.ranks import run_ranks

CONFIG = MoEConfig(dim=32, hidden_dim=16, num_experts=4, top_k=2)
LAYOUT = ExpertLayout(gate_up="separate")
DEGREES = {
    "fsdp": ParallelConfig(),
    "ep": ParallelConfig(ep=2),
    "etp": ParallelConfig(etp=2),
    "ep etp": ParallelConfig(ep=2, etp=2),
    "model dim": ParallelConfig(),  # two experts on four ranks: FSDP2 cuts the model dim
}
CHANGES = {"model dim": {"num_experts": 2}}


def layer_of(layout: ExpertLayout, **changes: Any) -> MoELayer:
    config = MoEConfig(**{**dict(dim=32, hidden_dim=16, num_experts=4, top_k=2), **changes})
    return MoELayer(config, layout=LayerLayout(expert_layout=layout))


def pair(**changes: Any) -> tuple[MoELayer, MoELayer]:
    """The same layer twice: gate and up in one tensor, and apart."""
    one, two = layer_of(ExpertLayout(), **changes), layer_of(LAYOUT, **changes)
    with torch.no_grad():
        for name in ("w1", "w2"):
            init_normal_(getattr(one.experts, name), std=0.3, key=name)
        init_normal_(one.router.weight, std=0.3, key="router")
        two.router.weight.copy_(one.router.weight)
        two.experts.w1.copy_(one.experts.w1[:, 0])
        two.experts.w3.copy_(one.experts.w1[:, 1])
        two.experts.w2.copy_(one.experts.w2)
    return one, two


def tokens(rank: int) -> Tensor:
    return torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(rank))


def gradients(model: nn.Module, x: Tensor, divisor: float = 1.0) -> Tensor:
    x = x.clone().requires_grad_()
    y = model(x)
    (y.square().sum() / divisor).backward()
    assert x.grad is not None
    return torch.cat([y.detach(), x.grad * divisor])


def joined(grads: dict[str, Tensor]) -> dict[str, Tensor]:
    w1 = torch.stack([grads["w1"], grads["w3"]], dim=1)
    return {"w1": w1, "w2": grads["w2"]}


def worker(rank: int, device: torch.device) -> dict[str, tuple[Any, ...]]:
    results = {}
    for name, degrees in DEGREES.items():
        layer = nn.Sequential(pair(**CHANGES.get(name, {}))[1])
        meshes = build_meshes(degrees, "cpu")
        parallelize_moe(layer, meshes, loss="sum")
        out = gradients(layer, tokens(rank))
        experts = layer[0].experts
        grads = {n: p.grad.full_tensor() for n, p in experts.named_parameters()}
        local = {n: tuple(p.to_local().shape) for n, p in experts.named_parameters()}
        results[name] = (out, joined(grads), local)
    return results


@pytest.fixture(scope="module")
def on_ranks() -> dict[str, tuple[Any, ...]]:
    return run_ranks(4, worker)


def close(found: Tensor, wanted: Tensor) -> bool:
    return bool((found - wanted).abs().max() <= 1e-5 * wanted.abs().max())


@pytest.mark.parametrize("changes", [{}, {"activation": "geglu"}, {"fc2_bias": True}])
@pytest.mark.parametrize("backend", ["torch", "sequential"])
def test_forward_and_gradients_are_those_of_one_tensor(
    backend: Any, changes: dict[str, Any]
) -> None:
    one, two = pair(**changes)
    if changes.get("fc2_bias"):
        two.experts.b2.data.copy_(one.experts.b2.data.normal_())
    two.experts.set_backend(backend)
    one.experts.set_backend("sequential")
    assert close(gradients(two, tokens(0)), gradients(one, tokens(0)))
    grads = joined({n: p.grad for n, p in two.experts.named_parameters() if p.grad is not None})
    assert close(grads["w1"], one.experts.w1.grad)
    assert close(grads["w2"], one.experts.w2.grad)
    assert close(two.router.weight.grad, one.router.weight.grad)


@pytest.mark.parametrize("name", DEGREES)
def test_on_ranks_forward_and_gradients_are_those_of_one_process(
    on_ranks: dict[str, tuple[Any, ...]], name: str
) -> None:
    one, _ = pair(**CHANGES.get(name, {}))
    out, grads, local = on_ranks[name]
    wanted = [gradients(one, tokens(rank)) for rank in range(4)]  # adds the weights' gradients up
    assert close(out, wanted[0])
    assert close(grads["w1"], one.experts.w1.grad)
    assert close(grads["w2"], one.experts.w2.grad)
    assert local["w1"] == local["w3"]
    if name == "model dim":
        assert local["w1"] == (2, 16, 8)
    assert 4 * math.prod(local["w1"]) == one.experts.w1.numel() // 2  # nobody holds nothing


def test_init_weights_fills_gate_and_up_apart() -> None:
    experts = Experts(CONFIG, layout=LAYOUT)
    experts.init_weights(std=1.0, key="e", seed=0)
    assert experts.w1.shape == experts.w3.shape == (4, 16, 32)
    assert not torch.equal(experts.w1, experts.w3)
    assert float(experts.w3.detach().std()) == pytest.approx(1.0, rel=0.1)


def test_without_a_gate_there_is_no_w3() -> None:
    config = MoEConfig(dim=32, hidden_dim=16, num_experts=4, top_k=2, activation="relu")
    assert set(dict(Experts(config, layout=LAYOUT).named_parameters())) == {"w1", "w2"}


def test_what_cannot_stand_apart_is_refused() -> None:
    with pytest.raises(ValueError, match=r"transposed \(True\) must go with gate_up \('separate'"):
        ExpertLayout(transposed=True, gate_up="separate")
    with pytest.raises(ValueError, match=r"MoEConfig.fc1_bias \(True\) must be False with Expert"):
        layer_of(LAYOUT, fc1_bias=True)
