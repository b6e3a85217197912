"""Router: every choice against a token-by-token loop, weights by hand, fp32 whatever comes in."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moecore import MoEConfig, MoELayer
from moecore.kernels.routing.scores import compute_scores_ref
from moecore.moe.records import Routing
from moecore.moe.router import Router
from tests.moe import moe_cases

BASE = MoEConfig(dim=16, hidden_dim=8, num_experts=12, top_k=3)
CONFIGS = {
    "softmax": BASE,
    "softmax-raw": replace(BASE, normalize_weights=False),
    "softmax-post": replace(BASE, score_order="post"),
    "sigmoid-post": replace(BASE, score_order="post", score_function="sigmoid", expert_bias=True),
    "softmax-post-bias": replace(BASE, score_order="post", router_bias=True, expert_bias=True),
    "softmax-bias": replace(BASE, expert_bias=True),
    "sigmoid": replace(BASE, score_function="sigmoid"),
    "sigmoid-raw": replace(BASE, score_function="sigmoid", normalize_weights=False),
    "sigmoid-groups": replace(
        BASE,
        score_function="sigmoid",
        num_groups=4,
        top_groups=2,
        expert_bias=True,
        routed_scaling_factor=2.5,
    ),
    "softmax-groups": replace(BASE, num_groups=3, top_groups=1, expert_bias=True),
    "all-groups": replace(BASE, num_groups=4, top_groups=4),
    "scaled": replace(BASE, routed_scaling_factor=0.3, normalize_weights=False),
    "one": replace(BASE, top_k=1),
    "all": replace(BASE, top_k=12),
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


def scores_of(routing: Routing, config: MoEConfig) -> Tensor:
    """The scores before any normalisation, in the router's dtype."""
    logits_TE = routing.logits_TE
    return logits_TE.sigmoid() if config.score_function == "sigmoid" else logits_TE.softmax(-1)


def route_by_hand(router: Router, x_D: list[float]) -> tuple[list[int], list[float]]:
    """One token in plain Python floats: ids best first, and weights."""
    config = router.config
    rows = router.weight.double().tolist()
    offsets = [0.0] * len(rows) if router.bias is None else router.bias.double().tolist()
    logits = [
        sum(w * x for w, x in zip(row, x_D, strict=True)) + b
        for row, b in zip(rows, offsets, strict=True)
    ]
    exps = [math.exp(z) for z in logits]
    if config.score_function == "sigmoid":
        scores = [1 / (1 + math.exp(-z)) for z in logits]
    else:
        scores = [v / sum(exps) for v in exps]
    ranked = list(scores if config.score_order == "pre" else logits)
    if router.selection_bias is not None:
        ranked = [v + b for v, b in zip(ranked, router.selection_bias.tolist(), strict=True)]
    size = config.num_experts // config.num_groups
    groups = [list(range(g * size, (g + 1) * size)) for g in range(config.num_groups)]
    if config.top_groups < config.num_groups:
        groups.sort(key=lambda group: -sum(sorted(ranked[e] for e in group)[-2:]))
    allowed = [e for group in groups[: config.top_groups] for e in group]
    if config.top_groups == config.num_groups:
        allowed = list(range(config.num_experts))
    ids = sorted(allowed, key=lambda e: -ranked[e])[: config.top_k]
    if config.score_order == "post" and config.score_function == "softmax":
        weights = [exps[e] / sum(exps[i] for i in ids) for e in ids]
    else:
        weights = [scores[e] for e in ids]
        if config.normalizes:
            weights = [w / sum(scores[i] for i in ids) for w in weights]
    return ids, [w * config.routed_scaling_factor for w in weights]


@pytest.mark.parametrize("name", CONFIGS)
def test_each_token_by_hand(name: str) -> None:
    router = make_router(CONFIGS[name])
    x_TD = torch.randn(64, 16)
    routing = router(x_TD)
    assert routing.expert_ids_TK.dtype == torch.int32
    assert routing.weights_TK.dtype == torch.float32
    for x_D, ids, weights in zip(
        x_TD.double().tolist(), routing.expert_ids_TK.tolist(), routing.weights_TK, strict=True
    ):
        expected_ids, expected_weights = route_by_hand(router, x_D)
        assert ids == expected_ids
        torch.testing.assert_close(weights, torch.tensor(expected_weights), rtol=1e-5, atol=1e-7)


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
        assert grad is not None
        largest[normalize] = float(grad.abs().max())
    assert largest[True] < 1e-5 * largest[False]  # rounding is left


@pytest.mark.parametrize("name", CONFIGS)
def test_among_equal_scores_the_lower_id_wins(name: str) -> None:
    config = CONFIGS[name]
    router = make_router(config)
    with torch.no_grad():
        for tensor in (router.weight, router.bias, router.selection_bias):
            if tensor is not None:
                tensor.zero_()
    routing = router(torch.randn(5, 16))
    assert routing.expert_ids_TK.tolist() == [list(range(config.top_k))] * 5
    grouped = config.top_groups < config.num_groups
    worse = config.num_experts // config.num_groups if grouped else 2
    with torch.no_grad():
        router.weight[:worse] = -1.0
    routing = router(torch.ones(1, 16))
    after = [*range(worse, 12), *range(worse)]
    assert routing.expert_ids_TK.tolist() == [after[: config.top_k]]


def test_an_excluded_group_never_wins_however_negative_the_scores_are() -> None:
    config = replace(BASE, num_groups=4, top_groups=1, top_k=3, expert_bias=True)
    router = make_router(config)
    assert router.selection_bias is not None
    router.selection_bias.fill_(-100.0)
    ids_TK = router(torch.randn(50, 16)).expert_ids_TK
    assert all(len({e // 3 for e in row}) == 1 for row in ids_TK.tolist())


def test_bias_moves_the_choice_and_not_the_weights() -> None:
    router = make_router(replace(BASE, expert_bias=True, normalize_weights=False))
    x_TD = torch.randn(20, 16)
    assert router.selection_bias is not None
    router.selection_bias.zero_()
    plain = router(x_TD)
    router.selection_bias[7] = 100.0
    pushed = router(x_TD)
    assert (pushed.expert_ids_TK[:, 0] == 7).all()
    scores_TE = scores_of(plain, router.config)
    torch.testing.assert_close(pushed.weights_TK[:, 0], scores_TE[:, 7])


# --------------------------------------------------------------------------- dtype


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
    assert routing.logits_TE.dtype == torch.float64
    assert routing.weights_TK.dtype == torch.float32
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
    assert router.selection_bias is not None
    assert router.selection_bias.dtype == torch.float32


def test_extreme_logits_stay_finite() -> None:
    for name in ("softmax", "sigmoid", "softmax-post", "sigmoid-groups"):
        router = make_router(CONFIGS[name])
        for scale in (1e4, -1e4):
            x_TD = (torch.full((3, 16), scale)).requires_grad_()
            routing = router(x_TD)
            routing.weights_TK.square().sum().backward()
            assert routing.weights_TK.isfinite().all() and routing.logits_TE.isfinite().all()
            assert x_TD.grad is not None and x_TD.grad.isfinite().all(), name


# --------------------------------------------------------------------------- gradient


@pytest.mark.parametrize("name", CONFIGS)
def test_gradient_of_the_weights_against_fp64(name: str) -> None:
    """d weights / d(x, router) with the choice held fixed, by dense masked algebra in fp64."""
    config = CONFIGS[name]
    router = make_router(config)
    x_TD = torch.randn(9, 16, requires_grad=True)
    factor_TK = torch.randn(9, config.top_k)
    routing = router(x_TD)
    (routing.weights_TK * factor_TK).sum().backward()

    x64, w64 = (t.detach().double().requires_grad_() for t in (x_TD, router.weight))
    logits = x64 @ w64.T
    if router.bias is not None:
        logits = logits + router.bias.detach().double()
    ids = routing.expert_ids_TK.long()
    if config.score_order == "post" and config.score_function == "softmax":
        weights = logits.gather(1, ids).softmax(-1)
    else:
        scores = logits.sigmoid() if config.score_function == "sigmoid" else logits.softmax(-1)
        weights = scores.gather(1, ids)
        if config.normalizes:
            weights = weights / weights.sum(-1, keepdim=True)
    (weights * config.routed_scaling_factor * factor_TK).sum().backward()
    for found, expected in ((x_TD.grad, x64.grad), (router.weight.grad, w64.grad)):
        assert found is not None and expected is not None
        # Weights that are always 1 (one expert) have no gradient; rounding then is the signal.
        scale = max(float(expected.abs().max()), 1e-2)
        assert float((found - expected).abs().max()) <= 1e-5 * scale


def test_assigned_state_keeps_the_selection_bias_in_fp32() -> None:
    layer = moe_cases.make_layer(moe_cases.CONFIGS["sigmoid-groups-bias"])
    state = {n: t.bfloat16() for n, t in layer.state_dict().items()}
    layer.load_state_dict(state, assign=True)
    assert layer.router.weight.dtype == torch.bfloat16
    assert layer.router.selection_bias.dtype == torch.float32
