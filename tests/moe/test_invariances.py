"""What must not change a layer: how a batch is split, and the same layer with other options."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moecore import BalanceConfig, MoEConfig, MoELayer
from moecore.base.options.layer import CapacityConfig
from moecore.moe.balance import BalanceGroups
from moecore.moe.state import MoEState
from tests.moe.moe_cases import (
    ALL_LOSSES,
    BASE,
    CASES,
    OPTIONS,
    assert_equal_to_scale,
    make_layer,
)

BY_POSITION = ("capacity-position", "capacity-ties", "jitter")
few = settings(deadline=None, derandomize=True, max_examples=3, database=None)
seeds = st.integers(0, 10_000)


@dataclass
class Run:
    """One forward and backward."""

    y: Tensor
    dx: Tensor
    grads: dict[str, Tensor]
    losses: Tensor
    choices_E: Tensor


def with_losses(config: MoEConfig, **coefficients: float) -> MoEConfig:
    """All auxiliary losses that the config may have, or these."""
    wanted = coefficients or dict(
        micro_batch_coef=0.03, sequence_coef=0.05, global_batch_coef=0.07, z_loss_coef=0.01
    )
    if config.assignment == "expert_choice":
        wanted = dict(z_loss_coef=0.01)
    return replace(config, balance=replace(config.balance, **wanted))


def run(layer: MoELayer, x: Tensor, factor: Tensor) -> Run:
    """The gradients of sum(y * factor) and of the layer's losses."""
    x = x.detach().clone().requires_grad_()
    y = layer(x)
    (y * factor).sum().backward()
    grads = {n: p.grad for n, p in layer.named_parameters()}
    counts = layer.tracker.counts
    assert counts is not None and x.grad is not None
    return Run(y.detach(), x.grad, grads, counts.losses, counts.choices_E)  # type: ignore[arg-type]


def same(found: Run, expected: Run) -> None:
    assert_equal_to_scale(found.y, expected.y, "y")
    assert_equal_to_scale(found.dx, expected.dx, "x")
    # One weight over itself is 1: what cancels in the router's gradient has the size of x's.
    floor = float(expected.dx.abs().max()) * 0.1 if expected.dx.numel() else 0.0
    for name in expected.grads:
        scale = floor if name.startswith("router") else 0.0
        assert_equal_to_scale(found.grads[name], expected.grads[name], name, floor=scale)
    assert_equal_to_scale(found.losses, expected.losses, "losses")
    assert torch.equal(found.choices_E, expected.choices_E)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --------------------------------------------------------------------------- splitting

UNCOUPLED = [n for n in CASES if CASES[n].capacity is None and n not in BY_POSITION]
UNCOUPLED = [n for n in UNCOUPLED if CASES[n].assignment not in ("sinkhorn", "expert_choice")]
UNCOUPLED = [n for n in UNCOUPLED if not CASES[n].balance.bias_per_micro_batch]


@pytest.mark.parametrize("name", UNCOUPLED)
@few
@given(st.sampled_from([2, 3, 4]), st.integers(1, 5), seeds)
def test_a_split_batch_has_the_same_losses_and_gradients(
    name: str, parts: int, T: int, seed: int
) -> None:
    """Micro-batches of whole sequences, each loss a mean; so it is over data ranks, too."""
    config = with_losses(CASES[name], sequence_coef=0.05, z_loss_coef=0.01)
    B = 2 * parts
    x, factor = draw(seed, B, T, 32), draw(seed + 1, B, T, 32)
    whole = run(make_layer(config), x, factor / B)
    layer = make_layer(config)
    state = MoEState({"moe": layer}, BalanceGroups())
    state.set_num_micro_batches(parts)
    found = [run(layer, xs, f / B) for xs, f in zip(x.split(2), factor.split(2), strict=True)]
    joined = replace(
        found[-1],
        y=torch.cat([r.y for r in found]),
        dx=torch.cat([r.dx for r in found]),
        losses=found[-1].losses / parts,
    )
    same(joined, whole)
    assert_equal_to_scale(state.finish_step().aux_losses["moe"], whole.losses)


# --------------------------------------------------------------------------- equal spellings


def equal_layers(a: MoEConfig, b: MoEConfig, seed: int, T: int) -> None:
    """Two configs with the same parameters, the same results."""
    x, factor = draw(seed, T, 32), draw(seed + 1, T, 32)
    first, second = make_layer(a), make_layer(b)
    assert first.state_dict().keys() == second.state_dict().keys()
    same(run(second, x, factor), run(first, x, factor))


EVERY = replace(BASE, top_k=8, balance=ALL_LOSSES)
ALL_TOKENS = CapacityConfig(factor=8.0)
POST = replace(BASE, score_order="post")
RELU = replace(OPTIONS["weights-on-input"], activation="relu", fc1_bias=False, fc2_bias=False)
Z = BalanceConfig(z_loss_coef=0.01)
SPELLINGS: dict[str, tuple[MoEConfig, MoEConfig]] = {
    "all experts, evened out": (EVERY, replace(EVERY, assignment="sinkhorn")),
    "all experts choose all tokens": (
        replace(EVERY, balance=Z),
        replace(EVERY, assignment="expert_choice", capacity=ALL_TOKENS, balance=Z),
    ),
    "all experts, normalised or not": (EVERY, replace(EVERY, normalize_weights=False)),
    "softmax before or after": (BASE, POST),
    "all groups": (BASE, replace(BASE, num_groups=4, top_groups=4)),
    "capacity for all": (BASE, replace(BASE, capacity=ALL_TOKENS)),
    "capacity for all, padded": (
        BASE,
        replace(BASE, capacity=replace(ALL_TOKENS, pad=True, drop="position")),
    ),
    "a relu before or after the weight": (RELU, replace(RELU, weights_on_input=False)),
    "two shared experts or a wide one": (
        replace(BASE, shared_hidden_dim=12, num_shared_experts=2),
        replace(BASE, shared_hidden_dim=24),
    ),
    "fp64 router": (BASE, replace(BASE, router_dtype="float64")),
}


@pytest.mark.parametrize("name", SPELLINGS)
@settings(few, max_examples=3)
@given(st.integers(1, 20), seeds)
def test_one_layer_spelled_twice(name: str, T: int, seed: int) -> None:
    equal_layers(*SPELLINGS[name], seed, T)
