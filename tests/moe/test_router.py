from dataclasses import replace
from typing import Any

import pytest
import torch

from moecore import MoEConfig, MoELayer
from moecore.kernels.routing.scores import compute_scores_ref
from moecore.moe.records import Routing
from moecore.moe.router import Router
from tests.moe import moe_cases

BASE = MoEConfig(dim=16, hidden_dim=8, num_experts=12, top_k=3)
GROUPS = dict(num_groups=4, top_groups=2, expert_bias=True, routed_scaling_factor=2.5)
CONFIGS = {
    "softmax": BASE,
    "softmax-post-bias": replace(BASE, score_order="post", router_bias=True, expert_bias=True),
    "softmax-bias": replace(BASE, expert_bias=True),
    "sigmoid-groups": replace(BASE, score_function="sigmoid", **GROUPS),
    "fp64": replace(BASE, router_dtype="float64"),
}


def make_router(config: MoEConfig, seed: int = 0) -> Router:
    torch.manual_seed(seed)
    router = Router(config)
    with torch.no_grad():
        router.weight.normal_()
        if router.bias is not None:
            router.bias.normal_()
        if router.selection_bias is not None:
            # Mostly negative: an excluded group must not win with a masked score of 0.
            router.selection_bias.copy_(torch.randn(config.num_experts) - 1.5)
    return router


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_one_expert_per_token_teaches_the_router(function: Any, on_input: bool) -> None:
    """Its weight is its score. Divided by itself, which must be asked for, it would be 1."""
    config = replace(BASE, top_k=1, score_function=function, weights_on_input=on_input)
    x_TD, largest = torch.randn(9, 16), {}
    for normalize in (False, True):
        layer = MoELayer(replace(config, normalize_weights=True) if normalize else config)
        layer.init_weights(key="moe", std=0.5)
        layer(x_TD).square().sum().backward()
        weights_T, grad = layer.router(x_TD).weights_TK[:, 0], layer.router.weight.grad
        scores_T = compute_scores_ref(x_TD @ layer.router.weight.T, function).amax(-1)
        torch.testing.assert_close(weights_T, torch.ones(9) if normalize else scores_T)
        largest[normalize] = float(grad.abs().max())
    assert largest[True] < 1e-5 * largest[False]  # rounding is left


def same(a: Routing, b: Routing) -> None:
    for field in ("expert_ids_TK", "weights_TK", "logits_TE"):
        assert torch.equal(getattr(a, field), getattr(b, field)), field


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["softmax", "sigmoid-groups", "softmax-post-bias"])
def test_fp32_inside_for_a_low_precision_layer(name: str, dtype: torch.dtype) -> None:
    router = make_router(CONFIGS[name]).to(dtype)
    wide = make_router(CONFIGS[name])
    with torch.no_grad():
        for target, source in zip(wide.parameters(), router.parameters(), strict=True):
            target.copy_(source)
        if wide.selection_bias is not None:
            wide.selection_bias.copy_(router.selection_bias)  # type: ignore[arg-type]
    x_TD = torch.randn(33, 16).to(dtype)
    found = router(x_TD)
    same(found, wide(x_TD.float()))
    assert found.logits_TE.dtype == found.weights_TK.dtype == torch.float32


@pytest.mark.parametrize("name", ["softmax", "sigmoid-groups"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(name: str, dtype: torch.dtype) -> None:
    router, x_TD = make_router(CONFIGS[name]), torch.randn(33, 16).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = router(x_TD)
    same(found, router(x_TD))
    assert found.logits_TE.dtype == torch.float32


def test_fp64_router_decides_in_fp64() -> None:
    router = make_router(CONFIGS["fp64"])
    routing = router(torch.randn(5, 16))
    assert routing.logits_TE.dtype == torch.float64 and routing.weights_TK.dtype == torch.float32
    # Two logits that only fp64 tells apart.
    with torch.no_grad():
        router.weight.zero_()
        router.weight[4, 0], router.weight[9, 0] = 1.0, 1.0
        router.weight[9, 1] = 2.0**-30
    x_TD = torch.zeros(1, 16)
    x_TD[0, :2] = 1.0
    assert router(x_TD).expert_ids_TK[0, :2].tolist() == [9, 4]


@pytest.mark.parametrize("cast", [lambda m: m.bfloat16(), lambda m: m.to(torch.float16)])
def test_the_selection_bias_stays_fp32_when_the_layer_is_cast(cast: Any) -> None:
    """A bf16 bias of 0.5 no longer moves by a rate of 0.001: balancing would stop silently."""
    router = cast(make_router(CONFIGS["softmax-bias"]))
    assert router.selection_bias is not None and router.selection_bias.dtype == torch.float32


def test_assigned_state_keeps_the_selection_bias_in_fp32() -> None:
    layer = moe_cases.make_layer(moe_cases.CONFIGS["sigmoid-groups-bias"])
    state = {n: t.bfloat16() for n, t in layer.state_dict().items()}
    layer.load_state_dict(state, assign=True)
    assert layer.router.weight.dtype == torch.bfloat16
    assert layer.router.selection_bias.dtype == torch.float32
