"""Configs, random weights and error measures that the tests of this folder share."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moecore import BalanceConfig, MoEConfig, MoELayer
from moecore.moe.layer import LayerLayout

ALL_LOSSES = BalanceConfig(
    micro_batch_coef=0.03, sequence_coef=0.05, global_batch_coef=0.07, z_loss_coef=0.01
)
BASE = MoEConfig(dim=32, hidden_dim=16, num_experts=8, top_k=2)
CONFIGS = {
    "softmax": BASE,
    "softmax-raw": replace(BASE, normalize_weights=False, routed_scaling_factor=1.7),
    "sigmoid-groups-bias": replace(
        BASE,
        score_function="sigmoid",
        num_groups=4,
        top_groups=2,
        expert_bias=True,
        routed_scaling_factor=2.5,
        shared_hidden_dim=24,
    ),
    "geglu-shared-gate": replace(
        BASE, activation="geglu", shared_hidden_dim=24, shared_gate=True, top_k=3
    ),
    "relu2": replace(BASE, activation="relu2", fc1_bias=True, fc2_bias=True),
    "gpt-oss": replace(
        BASE,
        score_order="post",
        router_bias=True,
        activation="clamped_swiglu",
        activation_limit=1.0,
        fc1_bias=True,
        fc2_bias=True,
    ),
    "one-of-one": replace(BASE, num_experts=1, top_k=1),
    "top-1": replace(BASE, top_k=1, normalize_weights=False),
    "all-experts": replace(BASE, top_k=8),
    "balanced": replace(BASE, assignment="balanced"),
    "fp64-router": replace(BASE, router_dtype="float64"),
    "prime-experts": replace(BASE, num_experts=13, top_k=5),
}


def make_layer(
    config: MoEConfig, *, layout: LayerLayout | None = None, seed: int = 0, std: float = 0.3
) -> MoELayer:
    """A layer whose every weight, bias and buffer is random and large enough to matter."""
    layer = MoELayer(config, layout=layout)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*layer.parameters(), *layer.buffers()]:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * std)
    return layer


def leaves(layer: MoELayer) -> dict[str, Tensor]:
    """Detached copies of the layer's tensors under moecore's names, ready for gradients."""
    named = dict(layer.named_parameters()) | dict(layer.named_buffers())
    return {
        n: t.detach().clone().requires_grad_(isinstance(t, torch.nn.Parameter))
        for n, t in named.items()
    }


def error(found: Tensor | None, expected: Tensor | None) -> float:
    """Largest element error over the largest element of the tensor."""
    assert found is not None and expected is not None
    found, expected = found.detach(), expected.detach()
    assert found.shape == expected.shape
    if expected.numel() == 0:
        return 0.0
    difference = (found.double() - expected.double()).abs().max()
    return float(difference / expected.double().abs().max().clamp(min=1e-6))


def assert_equal_to_scale(found: Tensor | None, expected: Tensor | None, name: str = "") -> None:
    assert error(found, expected) <= 1e-5, f"{name}: {error(found, expected)}"


def assert_twice_as_good(ours: Tensor, plain: Tensor, truth: Tensor, name: str) -> None:
    """The 2x rule, for the whole tensor and for the worst row.

    Args:
        ours: low-precision result.
        plain: what plain PyTorch of the same dtype gives.
        truth: the fp32 result from the same rounded inputs.
        name: shown on failure.
    """
    assert ours.isfinite().all(), name
    truth = truth.float().reshape(-1, truth.shape[-1])
    errors = [(t.float().reshape(truth.shape) - truth) for t in (ours, plain)]
    floor = 1e-3 * float(truth.square().mean().sqrt())
    ours_all, plain_all = (float(e.square().mean().sqrt()) for e in errors)
    assert ours_all <= 2 * plain_all + floor, f"{name}: {ours_all} against {plain_all}"
    ours_row, plain_row = (float(e.square().mean(-1).sqrt().max()) for e in errors)
    floor = 1e-3 * float(truth.square().mean(-1).sqrt().max())
    assert ours_row <= 2 * plain_row + floor, f"{name}, worst row: {ours_row}, {plain_row}"
