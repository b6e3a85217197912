import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from moecore import MoEConfig, MoELayer
from moecore.moe.expert_layout import ExpertLayout
from moecore.moe.layer import LayerLayout
from moecore.moe.low_rank import LowRank

E, D, F, R = 6, 8, 12, 3
SCALE = 0.75
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "split": ({}, {}),
    "no gate": (dict(activation="relu2"), {}),
    "concatenated": ({}, dict(gate_up="concatenated")),
    "interleaved, transposed, biases": (
        dict(fc1_bias=True, fc2_bias=True),
        dict(gate_up="interleaved", transposed=True),
    ),
}


def adapted(name: str, backend: str) -> tuple[MoELayer, MoELayer]:
    """Return a layer with random updates of two adapters, and it without."""
    torch.manual_seed(0)
    of_config, of_layout = LAYOUTS[name]
    config = MoEConfig(dim=D, hidden_dim=F, num_experts=E, top_k=2, **of_config)
    plain = MoELayer(config, layout=LayerLayout(expert_layout=ExpertLayout(**of_layout)))
    with torch.no_grad():
        for param in plain.parameters():
            param.normal_()
    layer = copy.deepcopy(plain)
    experts = layer.get_part("experts")
    experts.set_backend(backend)
    for name, (i, o) in {"w1": (D, config.fc1_dim), "w2": (F, D)}.items():
        pairs = {
            adapter: (nn.Parameter(torch.randn(E, r, i)), nn.Parameter(torch.randn(E, o, r)))
            for adapter, r in (("first", R), ("second", 1))
        }
        experts.add_low_rank_updates(name, LowRank(pairs, {"first": SCALE, "second": 1.0}))
    return layer, plain


def formed(layer: MoELayer) -> dict[str, Tensor]:
    """Return the layer's matrices with their updates, differentiably."""
    experts, found = layer.get_part("experts"), {}
    for name, update in experts.lora.items():
        weight = getattr(experts, name).detach()
        for adapter, a in update.lora_A.items():
            delta = update.scaling[adapter] * update.lora_B[adapter] @ a
            delta = delta.transpose(1, 2) if experts.layout.transposed else delta
            weight = weight + delta.reshape(weight.shape)
        found[f"experts.{name}"] = weight
    return found


@pytest.mark.parametrize("backend", ["auto", "sequential"])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("num_tokens", [0, 1, 17])
def test_updates_equal_formed_matrices(name: str, backend: str, num_tokens: int) -> None:
    layer, plain = adapted(name, backend)
    trained = list(layer.get_part("experts").lora.parameters())
    x = torch.randn(num_tokens, D, requires_grad=True)
    wanted = functional_call(plain, formed(layer), (x,))
    dy = torch.randn_like(wanted)
    expected = [wanted, *torch.autograd.grad(wanted, [x, *trained], dy)]
    y = layer(x)
    found = [y, *torch.autograd.grad(y, [x, *trained], dy)]
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        if one.numel():
            assert (one - other).abs().max() <= 1e-5 * other.abs().max().clamp(min=1)


def test_frozen_matrices_have_no_gradient_and_updates_are_padded() -> None:
    layer, _ = adapted("concatenated", "auto")
    for name, param in layer.named_parameters():
        param.requires_grad_(".lora." in name)
    layer(torch.randn(5, D)).sum().backward()
    assert {n for n, p in layer.named_parameters() if p.grad is not None} == {
        n for n, _ in layer.named_parameters() if ".lora." in n
    }
    lora = layer.get_part("experts").lora["w1"]
    update = lora.make_local_update(lambda p: p, lambda a, b: (a, b))
    assert update.a_erI.shape == (E, 4, D) and update.b_eOr.shape == (E, 2 * F, 4)
    short = LowRank({"a": (low(E, R, D), low(E, D, R))}, {"a": 1.0})
    update = short.make_local_update(lambda p: p, lambda a, b: (a, b))
    assert update.a_erI.shape == (E, 8, D) and update.b_eOr.shape == (E, D, 8)


def low(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape, dtype=torch.bfloat16))
