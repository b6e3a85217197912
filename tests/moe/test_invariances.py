"""What must not change a layer: the order of tokens and of experts, padding, how a batch is split,
and spelling the same layer with other options.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moecore import BalanceConfig, MoEConfig, MoELayer
from moecore.base.options.layer import CapacityConfig
from moecore.moe.balance import BalanceGroups
from moecore.moe.forced import force_even_load
from moecore.moe.state import MoEState
from tests.moe.moe_cases import (
    ALL_LOSSES,
    BASE,
    CONFIGS,
    OPTIONS,
    assert_equal_to_scale,
    make_layer,
)

CASES = CONFIGS | OPTIONS
BY_POSITION = ("capacity-position", "capacity-ties", "jitter")
RAGGED = [n for n in CASES if n != "jitter"]
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


def run(layer: MoELayer, x: Tensor, factor: Tensor, mask: Tensor | None = None) -> Run:
    """The gradients of sum(y * factor) and of the layer's losses."""
    x = x.detach().clone().requires_grad_()
    y = layer(x, mask)
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


def permutation(seed: int, n: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))


# --------------------------------------------------------------------------- order


@pytest.mark.parametrize("name", [n for n in CASES if n not in BY_POSITION])
@few
@given(st.integers(1, 24), seeds)
def test_permuted_tokens_give_permuted_outputs(name: str, T: int, seed: int) -> None:
    config = with_losses(CASES[name])
    x, factor, order = draw(seed, T, 32), draw(seed + 1, T, 32), permutation(seed, T)
    plain = run(make_layer(config), x, factor)
    moved = run(make_layer(config), x[order], factor[order])
    same(moved, replace_run(plain, y=plain.y[order], dx=plain.dx[order]))


def replace_run(r: Run, **changes: Any) -> Run:
    return Run(**(vars(r) | changes))


EXPERT_TENSORS = ("router.weight", "router.bias", "router.expert_bias")


def permute_experts(tensors: dict[str, Tensor], order_E: Tensor) -> dict[str, Tensor]:
    return {
        n: permute(t, order_E) if n.startswith("experts.") or n in EXPERT_TENSORS else t
        for n, t in tensors.items()
    }


def permute(tensor: Tensor, order_E: Tensor) -> Tensor:
    """Experts that return their input stay behind the others."""
    return torch.cat([tensor[order_E], tensor[len(order_E) :]])


@pytest.mark.parametrize("name", CASES)
@few
@given(st.integers(2, 16), seeds)
def test_permuted_experts_change_nothing(name: str, T: int, seed: int) -> None:
    """Groups move as wholes, experts inside them. To Sinkhorn one token alone is a tie."""
    config = with_losses(CASES[name])
    E, G = config.num_experts, config.num_groups
    inside = torch.stack([permutation(seed + g, E // G) + g * (E // G) for g in range(G)])
    order_E = inside[permutation(seed, G)].flatten()
    x, factor = draw(seed, T, 32), draw(seed + 1, T, 32)
    layer, moved = make_layer(config), make_layer(config)
    moved.load_state_dict(permute_experts(layer.state_dict(), order_E))
    torch.manual_seed(seed)
    plain = run(layer, x, factor)
    torch.manual_seed(seed)
    found = run(moved, x, factor)
    expected = permute_experts(plain.grads, order_E)
    same(found, replace_run(plain, grads=expected, choices_E=permute(plain.choices_E, order_E)))


# --------------------------------------------------------------------------- padding


def masked_factor(factor: Tensor, mask: Tensor) -> Tensor:
    """Padding has no part in the main loss: shared experts read it, too."""
    return torch.where(mask[..., None], 0, factor)


@pytest.mark.parametrize("name", RAGGED)
@few
@given(st.integers(1, 3), st.integers(1, 9), seeds)
def test_ragged_padding_equals_truncation(name: str, B: int, T: int, seed: int) -> None:
    """Tokens of any places are padding: as if they were not there, in the order of positions."""
    coefficients = dict(micro_batch_coef=0.03, global_batch_coef=0.07, z_loss_coef=0.01)
    config = with_losses(CASES[name], **coefficients)
    x, factor, mask = draw(seed, B, T, 32), draw(seed + 1, B, T, 32), draw(seed + 2, B, T) < 0
    order = (~mask).cumsum(1)[~mask].sort(stable=True).indices
    truncated = run(make_layer(config), x[~mask][order], factor[~mask][order])
    padded = run(make_layer(config), x, masked_factor(factor, mask), mask)
    assert not padded.dx[mask].any()
    y, dx = padded.y[~mask][order], padded.dx[~mask][order]
    same(replace_run(padded, y=y, dx=dx), truncated)


@pytest.mark.parametrize("name", RAGGED)
@few
@given(st.integers(1, 3), st.integers(0, 7), st.integers(1, 5), seeds)
def test_padding_at_the_end_equals_shorter_sequences(
    name: str, B: int, T: int, extra: int, seed: int
) -> None:
    """All four losses."""
    config = with_losses(CASES[name])
    shape = (B, T + extra, 32)
    x, factor = draw(seed, *shape), draw(seed + 1, *shape)
    mask = (torch.arange(T + extra) >= T).expand(B, T + extra)
    shorter = run(make_layer(config), x[:, :T], factor[:, :T])
    padded = run(make_layer(config), x, masked_factor(factor, mask), mask)
    same(replace_run(padded, y=padded.y[:, :T], dx=padded.dx[:, :T]), shorter)


@pytest.mark.parametrize("name", ["softmax", "sigmoid-groups-bias", "sqrtsoftplus", "latent"])
@few
@given(seeds)
def test_the_sequence_loss_of_ragged_sequences_is_the_mean_of_each(name: str, seed: int) -> None:
    config = with_losses(CASES[name], sequence_coef=0.5)
    lengths = [1 + int(n) for n in permutation(seed, 8)[:3]]
    x, factor = draw(seed, 3, 8, 32), draw(seed + 1, 3, 8, 32)
    mask = torch.arange(8) >= torch.tensor(lengths)[:, None]
    layer = make_layer(config)
    MoEState({"moe": layer}, BalanceGroups()).set_num_micro_batches(3)
    for b, n in enumerate(lengths):
        one = run(layer, x[b : b + 1, :n], factor[b : b + 1, :n])
    padded = run(make_layer(config), x, masked_factor(factor, mask), mask)
    assert_equal_to_scale(padded.losses, one.losses / 3)
    for parameter_name, grad in padded.grads.items():
        assert_equal_to_scale(grad, one.grads[parameter_name], parameter_name)
    assert torch.equal(padded.choices_E, one.choices_E)


def test_experts_that_are_dealt_out_see_padding_at_the_end_as_truncation() -> None:
    """They are dealt by place, so only what comes after does not matter."""
    config, x, factor = with_losses(BASE), draw(0, 20, 32), draw(1, 20, 32)
    mask = torch.arange(20) >= 13
    short_layer, padded_layer = make_layer(config), make_layer(config)
    force_even_load(short_layer)
    force_even_load(padded_layer)
    shorter = run(short_layer, x[:13], factor[:13])
    padded = run(padded_layer, x, masked_factor(factor, mask), mask)
    same(replace_run(padded, y=padded.y[:13], dx=padded.dx[:13]), shorter)


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
    joined = replace_run(
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


@pytest.mark.parametrize("name", ["sigmoid-groups-bias", "quantile"])
@few
@given(st.floats(-3, 3), seeds)
def test_a_bias_that_all_experts_share_changes_nothing(name: str, shift: float, seed: int) -> None:
    config, x, factor = with_losses(CASES[name]), draw(seed, 9, 32), draw(seed + 1, 9, 32)
    layer, shifted = make_layer(config), make_layer(config)
    shifted.router.expert_bias += shift
    same(run(shifted, x, factor), run(layer, x, factor))
