"""MoEMetrics.to_dict: a step's numbers by name, equal to the oracle's, read in one copy."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from moecore.base.options.layer import CapacityConfig
from moecore.moe.balance import LOSS_NAMES, BalanceGroups
from moecore.moe.metrics import MoEMetrics
from moecore.moe.state import MoEState
from tests.moe.moe_cases import ALL_LOSSES, BASE, leaves, make_layer
from tests.moe.reference import moe_reference

CONFIGS = {
    "plain": replace(BASE, score_function="sigmoid", balance=ALL_LOSSES),
    "drops": replace(BASE, capacity=CapacityConfig(factor=0.8), balance=ALL_LOSSES),
}


@pytest.fixture(scope="module")
def step() -> tuple[MoEMetrics, dict[str, list[Any]]]:
    """Two micro-batches of other lengths, padding in both; and what the oracle saw of them."""
    layers = {name: make_layer(config) for name, config in CONFIGS.items()}
    state = MoEState(layers, BalanceGroups())
    state.set_num_micro_batches(2)
    seen: dict[str, list[Any]] = {name: [] for name in layers}
    for T in (6, 9):
        x, mask = torch.randn(2, T, 32), (torch.arange(T) >= T - 2).expand(2, T)
        for name, layer in layers.items():
            layer(x, mask).sum().backward()
            out = moe_reference(x, leaves(layer), layer.config, padding_mask_BT=mask)
            seen[name].append(out)
    return state.finish_step(), seen


def test_numbers_are_those_of_the_oracle(step: tuple[MoEMetrics, dict[str, list[Any]]]) -> None:
    metrics, seen = step
    found, drop_rates = metrics.to_dict(), {}
    for name, outputs in seen.items():
        counts_E = sum(out.counts_E for out in outputs)
        for e, count in enumerate(counts_E.tolist()):
            expected = count / counts_E.double().mean().item()
            assert found[f"expert_load/{name}/{e}"] == pytest.approx(expected)
        loads = [found[f"expert_load/{name}/{e}"] for e in range(8)]
        assert found[f"expert_load/{name}"] == max(loads) > 1
        z = sum(float(out.losses["z"].detach()) for out in outputs) / 2
        balance = [
            sum(float(out.losses[n].detach()) for n in ("micro_batch", "sequence"))
            for out in outputs
        ]
        assert found[f"z_loss/{name}"] == pytest.approx(z, rel=1e-5)
        losses = metrics.aux_losses[name].tolist()
        assert sum(losses[:2]) == pytest.approx(sum(balance) / 2, rel=1e-5)
        assert found[f"balance_loss/{name}"] == pytest.approx(sum(losses[:3]), rel=1e-6)
        p_NE = torch.cat([out.routing.scores_NE[out.routing.real_N] for out in outputs])
        entropy = float(torch.distributions.Categorical(p_NE.detach()).entropy().mean())
        assert found[f"router_entropy/{name}"] == pytest.approx(entropy, rel=1e-6)
        kept = sum(int(out.routing.kept_NE.sum()) for out in outputs)
        drop_rates[name] = 1 - kept / int(counts_E.sum())
    assert found["drop_rate"] == found["drop_rate/drops"] == pytest.approx(drop_rates["drops"])
    assert drop_rates["drops"] > 0.05 and "drop_rate/plain" not in found
    for name, join in (("balance_loss", sum), ("z_loss", sum), ("router_entropy", mean)):
        assert found[name] == pytest.approx(join([found[f"{name}/{n}"] for n in seen]))
    assert found["expert_load_max_over_mean"] == max(found[f"expert_load/{n}"] for n in seen)
    assert metrics.compute_total_aux_loss() == pytest.approx(
        found["balance_loss"] + found["z_loss"]
    )
    assert metrics.compute_drop_rates() == {"drops": found["drop_rate"]}
    assert metrics.compute_load_max_over_mean() == {n: found[f"expert_load/{n}"] for n in seen}


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_one_copy_reads_all(step: tuple[MoEMetrics, dict[str, list[Any]]]) -> None:
    metrics, _ = step
    copies: list[int] = []

    def tolist(self: Tensor) -> Any:
        copies.append(self.numel())
        return self.numpy().tolist()

    with (
        patch.object(Tensor, "tolist", tolist),
        patch.object(Tensor, "item", side_effect=AssertionError("waits once more")),
        patch.object(Tensor, "__float__", side_effect=AssertionError("waits once more")),
        patch.object(Tensor, "__bool__", side_effect=AssertionError("waits once more")),
    ):
        found = metrics.to_dict()
    assert copies == [2 * 8 + 8 + 2 * 4 + 2]
    assert all(type(value) is float for value in found.values())


def test_experts_are_left_out_if_asked(step: tuple[MoEMetrics, dict[str, list[Any]]]) -> None:
    metrics, seen = step
    whole, short = metrics.to_dict(), metrics.to_dict(per_expert=False)
    left_out = {f"expert_load/{name}/{e}" for name in seen for e in range(8)}
    assert whole.keys() - short.keys() == left_out and short.items() <= whole.items()


@pytest.mark.parametrize("name", ["micro_batch", "z"])
def test_losses_that_are_not_in_use_have_no_numbers(name: str) -> None:
    losses = torch.zeros(len(LOSS_NAMES))
    losses[LOSS_NAMES.index(name)] = 0.25
    counts = {"a": torch.ones(4, dtype=torch.int64)}
    found = MoEMetrics(tokens_per_expert=counts, aux_losses={"a": losses}).to_dict()
    expected = "z_loss" if name == "z" else "balance_loss"
    assert {key for key in found if "_loss" in key} == {expected, f"{expected}/a"}
    assert found[expected] == 0.25


def test_a_dense_model_has_no_numbers() -> None:
    assert MoEMetrics().to_dict() == {} == MoEMetrics().compute_drop_rates()
    assert MoEMetrics().compute_total_aux_loss() == 0.0


def test_layers_below_all_that_is_trained_enter_no_mean() -> None:
    """A layer whose input needs no gradient is not counted, and is not a dead one."""
    layers = {name: make_layer(CONFIGS["drops"]) for name in ("below", "trained")}
    layers["below"].requires_grad_(False)
    state = MoEState(layers, BalanceGroups())
    x = torch.randn(6, CONFIGS["drops"].dim)
    layers["trained"](layers["below"](x).detach()).sum().backward()
    found = state.finish_step().to_dict()
    assert not [name for name in found if "below" in name]
    assert found["router_entropy"] == found["router_entropy/trained"] > 0
    assert found["drop_rate"] == found["drop_rate/trained"]


def test_a_step_without_counts_is_zero() -> None:
    state = MoEState({"moe": make_layer(CONFIGS["drops"])}, BalanceGroups())
    assert set(state.finish_step().to_dict().values()) == {0.0}
