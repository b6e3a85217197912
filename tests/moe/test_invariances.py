from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moecore import MoELayer
from moecore.moe.balance import BalanceGroups
from moecore.moe.state import MoEState
from tests.moe.moe_cases import CASES, assert_equal_to_scale, make_layer, tokens

BY_POSITION = ("capacity-position", "capacity-ties", "jitter")


@dataclass
class Run:
    """One forward and backward."""

    y: Tensor
    dx: Tensor
    grads: dict[str, Tensor]
    losses: Tensor
    choices_E: Tensor


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


UNCOUPLED = [n for n in CASES if CASES[n].capacity is None and n not in BY_POSITION]
UNCOUPLED = [n for n in UNCOUPLED if CASES[n].assignment not in ("sinkhorn", "expert_choice")]
UNCOUPLED = [n for n in UNCOUPLED if not CASES[n].balance.bias_per_micro_batch]


@pytest.mark.parametrize("name", UNCOUPLED)
@settings(deadline=None, derandomize=True, max_examples=3, database=None)
@given(st.sampled_from([2, 3, 4]), st.integers(1, 5), st.integers(0, 10_000))
def test_a_split_batch_has_the_same_losses_and_gradients(name, parts, T, seed) -> None:
    """Micro-batches of whole sequences, each loss a mean; so it is over data ranks, too."""
    balance = replace(CASES[name].balance, sequence_coef=0.05, z_loss_coef=0.01)
    config = replace(CASES[name], balance=balance)
    B = 2 * parts
    x, factor = tokens(B, T, 32, seed=seed), tokens(B, T, 32, seed=seed + 1)
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
