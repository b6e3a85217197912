"""Configs, random weights and error measures that the tests of this folder share."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moecore import BalanceConfig, MoEConfig, MoELayer
from moecore.base.options.layer import CapacityConfig
from moecore.moe.balance import BalanceGroups
from moecore.moe.state import MoEState
from tests.moe.reference import ReferenceOutput, moe_reference

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
    "top-1": replace(BASE, top_k=1),
    "all-experts": replace(BASE, top_k=8),
    "fp64-router": replace(BASE, router_dtype="float64"),
    "prime-experts": replace(BASE, num_experts=13, top_k=5),
}
# What a layer can do beside CONFIGS, each option alone.
OPTIONS = {
    "sqrtsoftplus": replace(BASE, score_function="sqrtsoftplus"),
    "groups-of-1": replace(BASE, num_groups=4, top_groups=2, group_experts=1),
    "groups-of-3": replace(BASE, num_groups=2, top_groups=1, group_experts=3),
    "jitter": replace(BASE, router_jitter=0.3),
    "sinkhorn": replace(BASE, assignment="sinkhorn"),
    "sinkhorn-post": replace(BASE, assignment="sinkhorn", score_order="post"),
    "expert-choice": replace(BASE, assignment="expert_choice"),
    "expert-choice-small": replace(
        BASE,
        assignment="expert_choice",
        capacity=CapacityConfig(factor=0.4, eval_factor=2.0),
        score_function="sigmoid",
        normalize_weights=False,
    ),
    "capacity-probability": replace(BASE, capacity=CapacityConfig(factor=0.8)),
    "capacity-position": replace(BASE, capacity=CapacityConfig(factor=0.8, drop="position")),
    "capacity-eval": replace(BASE, capacity=CapacityConfig(factor=1.5, eval_factor=0.5)),
    "capacity-pad": replace(BASE, capacity=CapacityConfig(factor=1.0, pad=True)),
    "capacity-ties": replace(
        BASE, top_k=1, normalize_weights=True, capacity=CapacityConfig(factor=0.6)
    ),
    "weights-on-input": replace(
        BASE, top_k=1, weights_on_input=True, score_function="sigmoid", fc1_bias=True, fc2_bias=True
    ),
    "latent": replace(BASE, latent_dim=16),
    "latent-input": replace(
        BASE,
        latent_dim=16,
        latent_norm_eps=1e-5,
        top_k=1,
        weights_on_input=True,
        score_function="sigmoid",
        fc2_bias=True,
        shared_hidden_dim=24,
    ),
    "zero-experts": replace(
        BASE, zero_experts=5, normalize_weights=False, expert_bias=True, routed_scaling_factor=6.0
    ),
    "two-shared": replace(BASE, shared_hidden_dim=12, num_shared_experts=2),
    "three-gates": replace(BASE, shared_hidden_dim=12, num_shared_experts=3, shared_gate=True),
    "two-gates-relu2": replace(
        BASE, shared_hidden_dim=12, num_shared_experts=2, shared_gate=True, activation="relu2"
    ),
    "gelu": replace(BASE, activation="gelu", shared_hidden_dim=12),
    "relu": replace(BASE, activation="relu"),
    "silu": replace(BASE, activation="silu", fc1_bias=True),
    "quantile": replace(
        BASE,
        score_function="sigmoid",
        expert_bias=True,
        balance=BalanceConfig(bias_update_rate=1.0, bias_update="quantile"),
    ),
    "quantile-micro-batch": replace(
        BASE,
        score_function="sigmoid",
        expert_bias=True,
        balance=BalanceConfig(
            bias_update_rate=1.0, bias_update="quantile", bias_per_micro_batch=True
        ),
    ),
}
CASES = CONFIGS | OPTIONS


def make_layer(config, *, layout=None, seed=0, std=0.3) -> MoELayer:
    """A layer whose every weight, bias and buffer is random and large enough to matter."""
    layer = MoELayer(config, layout=layout)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*layer.parameters(), *layer.buffers()]:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * std)
    return layer


def with_losses(config: MoEConfig) -> MoEConfig:
    """All auxiliary losses that the config may have."""
    if config.assignment == "expert_choice":
        return replace(config, balance=BalanceConfig(z_loss_coef=0.1))
    rule = ("bias_update_rate", "bias_update", "bias_per_micro_batch")
    kept: Any = {name: getattr(config.balance, name) for name in rule}
    return replace(config, balance=replace(ALL_LOSSES, **kept))


def tokens(*shape: int, seed: int = 1) -> Tensor:
    """Random hidden states, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def padding(B: int, T: int) -> Tensor:
    """Another number of real tokens in every sequence, and a hole."""
    mask_BT = torch.arange(T) >= T - 1 - torch.arange(B)[:, None]
    mask_BT[0, 1] = True
    return mask_BT


def make_state(layer: MoELayer) -> MoEState:
    """A balance record of one layer, counted by this process alone."""
    return MoEState({"moe": layer}, BalanceGroups())


def leaves(layer: MoELayer) -> dict[str, Tensor]:
    """Detached copies of the layer's tensors under moecore's names, ready for gradients."""
    named = dict(layer.named_parameters()) | dict(layer.named_buffers())
    return {
        n: t.detach().clone().requires_grad_(isinstance(t, torch.nn.Parameter))
        for n, t in named.items()
    }


def error(found: Tensor | None, expected: Tensor | None, floor: float = 0.0) -> float:
    """Largest element error over the largest element of the tensor, or over `floor` if larger."""
    found, expected = found.detach(), expected.detach()
    assert found.shape == expected.shape
    if expected.numel() == 0:
        return 0.0
    difference = (found.double() - expected.double()).abs().max()
    return float(difference / expected.double().abs().max().clamp(min=max(floor, 1e-6)))


def assert_equal_to_scale(found, expected, name="", *, floor=0.0) -> None:
    found_error = error(found, expected, floor)
    assert found_error <= 1e-5, f"{name}: {found_error}"


def oracle_of(
    config: MoEConfig,
    x_BTD: Tensor,
    params: dict[str, Tensor],
    *,
    training: bool = True,
    padding_mask_BT: Tensor | None = None,
    seed: int = 0,
    given_ids_NK: Tensor | None = None,
) -> ReferenceOutput:
    """The reference, with what its config leaves open as the layer does it after this seed."""
    N = x_BTD.shape[0] * x_BTD.shape[1]
    torch.manual_seed(seed)
    width = config.router_jitter
    jitter_ND = torch.empty(N, config.dim).uniform_(1 - width, 1 + width) if width else None
    return moe_reference(
        x_BTD,
        params,
        config,
        training=training,
        padding_mask_BT=padding_mask_BT,
        given_ids_NK=given_ids_NK,
        jitter_ND=jitter_ND,
    )


def has_constant_weights(config: MoEConfig) -> bool:
    """One weight over itself is 1: the router learns from its losses alone."""
    one = config.top_k == 1 and config.assignment != "expert_choice"
    return one and (config.normalizes or config.num_experts == 1)


def compare_with_oracle(
    layer: MoELayer,
    x: Tensor,
    *,
    padding_mask: Tensor | None = None,
    seed: int = 0,
    forward: Callable[..., Tensor] | None = None,
    given_ids_NK: Tensor | None = None,
) -> ReferenceOutput:
    """Assert that output, every gradient and all counts of one micro-batch are the oracle's.

    `layer` has no gradients and counts yet. `seed` is torch's before the forward, for the jitter.
    `forward` runs the layer, None = the layer itself. `given_ids_NK` = choices that are forced.
    """
    config, params = layer.config, leaves(layer)
    x_ours, x_ref = (x.detach().clone().requires_grad_() for _ in range(2))
    factor = torch.randn(x.shape, generator=torch.Generator().manual_seed(5))
    out = oracle_of(
        config,
        x_ref,
        params,
        training=layer.training,
        padding_mask_BT=padding_mask,
        seed=seed,
        given_ids_NK=given_ids_NK,
    )
    losses = sum(out.losses.values()) if layer.training else 0.0
    ((out.y_BTD * factor).sum() + losses).backward()
    torch.manual_seed(seed)
    y = (forward or layer)(x_ours, padding_mask)
    assert y.shape == x.shape and y.dtype == x.dtype
    (y * factor).sum().backward()
    assert_equal_to_scale(y, out.y_BTD, "y")
    assert_equal_to_scale(x_ours.grad, x_ref.grad, "x")
    for name, parameter in layer.named_parameters():
        expected = params[name].grad
        if name.startswith("router") and has_constant_weights(config):
            # Terms of the size of x's gradient cancel; their rounding is all that may be left.
            floor = float(x_ref.grad.abs().max()) if x_ref.numel() else 0.0  # type: ignore[union-attr]
        else:
            floor = 0.0
        assert_equal_to_scale(parameter.grad, expected, name, floor=floor)
    counts = layer.tracker.counts
    if layer.training:
        assert counts is not None and torch.equal(counts.choices_E, out.counts_E)
        assert_equal_to_scale(counts.losses, torch.stack(list(out.losses.values())), "losses")
        if counts.capacity_choices_E is not None:
            assert torch.equal(counts.capacity_choices_E, out.routing.kept_NE.sum(0))
        if counts.margins_EX is not None:
            assert (counts.margins_EX.sum(1) == out.routing.real_N.sum()).all()
    else:
        assert counts is None, "eval counts nothing"
    return out


def assert_twice_as_good(ours: Tensor, plain: Tensor, truth: Tensor, name: str) -> None:
    """Assert that ours is at most twice as far from the truth as plain PyTorch of the same dtype.

    This holds for the whole tensor and for the worst row. The truth is fp32, of the same inputs.
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
