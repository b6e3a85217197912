"""The layer on a GPU: the same numbers as the reference, no host sync, garbage rows kept out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from moecore import MoEConfig, MoELayer
from moecore.moe.reference import moe_reference

pytestmark = pytest.mark.gpu

CONFIGS = {
    "softmax": MoEConfig(dim=128, hidden_dim=96, num_experts=16, top_k=4),
    "sigmoid-groups": MoEConfig(
        dim=128,
        hidden_dim=64,
        num_experts=16,
        top_k=4,
        score_function="sigmoid",
        num_groups=4,
        top_groups=2,
        expert_bias=True,
        routed_scaling_factor=2.5,
        shared_hidden_dim=64,
        shared_gate=True,
    ),
    "biases": MoEConfig(
        dim=64,
        hidden_dim=64,
        num_experts=8,
        top_k=8,
        score_order="post",
        router_bias=True,
        activation="clamped_swiglu",
        fc1_bias=True,
        fc2_bias=True,
    ),
    # One normalised weight is always 1, and its gradient pure rounding: so no normalisation.
    "relu2": MoEConfig(
        dim=64,
        hidden_dim=128,
        num_experts=8,
        top_k=1,
        activation="relu2",
        normalize_weights=False,
    ),
}
COUNTS = (0, 1, 37, 512)


def make(config: MoEConfig, num_tokens: int, dtype: torch.dtype) -> tuple[MoELayer, Tensor]:
    torch.manual_seed(0)
    layer = MoELayer(config)
    with torch.no_grad():
        for tensor in [*layer.parameters(), *layer.buffers()]:
            tensor.normal_(0, 0.1)
    bias = layer.router.selection_bias
    layer.to("cuda", dtype)
    if bias is not None:
        layer.router.expert_bias = bias.cuda()  # stays fp32
    x_TD = torch.randn(1, num_tokens, config.dim).to("cuda", dtype)
    return layer, x_TD


def poison() -> None:
    """Leave NaN in freed memory, where uninitialised rows would find it."""
    torch.full((64 << 20,), float("nan"), device="cuda")


def gradients(
    config: MoEConfig, num_tokens: int, dtype: torch.dtype, who: str, backend: str = "torch"
) -> dict[str, Tensor]:
    """Output and all gradients of the layer ("ours"), or of the reference in `dtype` or fp32."""
    layer, x = make(config, num_tokens, dtype)
    layer.experts.set_backend(backend)
    if who == "fp32":
        layer, x = layer.float(), x.float()
    x.requires_grad_()
    poison()
    params = dict(layer.named_parameters()) | dict(layer.named_buffers())
    y = layer(x) if who == "ours" else moe_reference(x, params, config).y_BTD
    y.backward(torch.linspace(-1, 1, config.dim, device="cuda").to(y.dtype).expand_as(y))
    found = {"y": y.detach(), "x": x.grad}
    for name, p in layer.named_parameters():
        found[name] = torch.zeros_like(p) if p.grad is None else p.grad
    return {name: t.float() for name, t in found.items()}


def errors(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """Return the error of the whole tensor, and of the worst row against the largest."""
    if not expected.numel():
        return 0.0, 0.0
    rows = (found - expected).reshape(-1, expected.shape[-1]).norm(dim=-1)
    scale = expected.reshape(-1, expected.shape[-1]).norm(dim=-1)
    return float(rows.norm() / scale.norm().clamp(min=1e-9)), float(rows.max() / scale.max())


@pytest.mark.parametrize("num_tokens", COUNTS)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("backend", ["torch", "sequential"])
def test_fp32_equals_reference(name: str, num_tokens: int, backend: str) -> None:
    config = CONFIGS[name]
    expected = gradients(config, num_tokens, torch.float32, "fp32")
    found = gradients(config, num_tokens, torch.float32, "ours", backend)
    for key, value in expected.items():
        scale = float(value.abs().max()) if value.numel() else 1.0
        worst = float((found[key] - value).abs().max()) if value.numel() else 0.0
        assert worst <= 1e-5 * max(scale, 1e-3), (key, worst, scale)


@pytest.mark.parametrize("name", CONFIGS)
def test_bf16_error_is_at_most_twice_that_of_plain_bf16(name: str) -> None:
    config = CONFIGS[name]
    expected = gradients(config, 512, torch.bfloat16, "fp32")
    plain = gradients(config, 512, torch.bfloat16, "plain")
    ours = gradients(config, 512, torch.bfloat16, "ours")
    for key, value in expected.items():
        pairs = zip(errors(ours[key], value), errors(plain[key], value), strict=True)
        assert all(a <= 2 * b + 1e-4 for a, b in pairs), key


@contextmanager
def syncs_are_errors() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", CONFIGS)
def test_local_layer_never_syncs_with_the_host(name: str) -> None:
    layer, x = make(CONFIGS[name], 512, torch.bfloat16)
    x.requires_grad_()
    grad = torch.randn_like(x)
    layer(x).backward(grad)
    torch.cuda.synchronize()
    with syncs_are_errors():
        layer(x).backward(grad)


@pytest.mark.parametrize("num_tokens", [1, 512])
def test_dropped_choices_read_nothing_uninitialised(num_tokens: int) -> None:
    config = CONFIGS["softmax"]
    layer, x = make(config, num_tokens, torch.bfloat16)
    x = x[0].requires_grad_()
    routing = layer.router(x)
    routing.expert_ids_TK[:, 1:] = -1
    routing.expert_ids_TK[0] = -1
    poison()
    inp = layer.dispatcher.dispatch(x, routing)
    y = layer.experts(inp)
    y.sum().backward()
    assert torch.isfinite(y).all() and torch.isfinite(x.grad).all()
    assert not y[0].any(), "a token without an expert gives zero"
    assert all(torch.isfinite(p.grad).all() for p in layer.experts.parameters())
