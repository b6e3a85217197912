"""The engine on six ranks: losses, log-probabilities and gradients are one process's in fp64.

Data ranks have different numbers of sequences and of micro-batches. Old and reference numbers are
made near those of the policy, so that some ratios are clipped and others are not.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecore import (
    MemoryOptions,
    ParallelConfig,
    PipelineConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.families import use_causal_attention
from moecore.rl import PPO, Engine, OwnObjective, Rollouts
from tests.families.transformers.hf_models import random_model
from tests.helpers.errors import error_of
from tests.helpers.ranks import ranks_fixture
from tests.helpers.whole import gather_whole
from tests.rl import engine_cases as ec
from tests.rl.replay_cases import worst

pytestmark = pytest.mark.slow

WORLD = 6
# name -> degrees, how a loss is reduced, the model's family, objective
CASES: dict[str, tuple[dict[str, int], str, str, str]] = {
    "dp3-tp2-ep3": (dict(dp_shard=3, tp=2, ep=3), "mean", "native", "grpo"),
    "cp3-tp2-ep2": (dict(dp_shard=1, cp=3, tp=2, ep=2), "sum", "native", "gspo"),
    # Stages take turns in the layers; the first one of three has no MoE layer.
    "pp2-dp3-ep3": (dict(pp=2, dp_shard=3, ep=3), "sum", "native", "dpo"),
    "pp3-cp2-ep2": (dict(pp=3, dp_shard=1, cp=2, ep=2), "mean", "native", "gspo"),
    "hf-dp2-cp3-ep2": (dict(dp_shard=2, cp=3, ep=2), "mean", "transformers", "own"),
    "hf-pp3-dp2-ep2": (dict(pp=3, dp_shard=2, ep=2), "sum", "transformers", "ppo-k1"),
    "hf-dp3-tp2-ep2": (dict(dp_shard=3, tp=2, ep=2), "mean", "transformers", "ppo-k1"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "pp2-dp3-ep3": dict(pipeline=PipelineConfig(schedule="interleaved", chunks=2)),
    "pp3-cp2-ep2": dict(pipeline=PipelineConfig(), memory=MemoryOptions(recompute=("moe",))),
    "hf-pp3-dp2-ep2": dict(pipeline=PipelineConfig()),
}
WEIGHTED = ("cp3-tp2-ep2", "pp2-dp3-ep3")  # weights of routes are given too


def made(family: str, num_experts: int = 6) -> nn.Module:
    if family == "native":
        return ec.decoder(num_experts=num_experts)
    model = random_model("qwen3-moe", num_experts=num_experts, num_hidden_layers=3)
    use_causal_attention(model)
    model.set_experts_implementation("eager")  # what multiplies fp64
    return model


class LogitsOf(nn.Module):
    """A model that returns logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids_BT: Tensor) -> Tensor:
        out = self.model(ids_BT)
        found: Tensor = getattr(out, "logits", out)
        return found


def all_rollouts(plain, data_ranks, vocabulary, *, routed):
    """Of each data rank, with log-probabilities and routes of one process; made on rank 0."""

    def compute() -> Any:
        every = [ec.rollouts_of(data_rank, vocabulary) for data_rank in range(data_ranks)]
        log_probs = [ec.log_probs_by_hand(plain, r) for r in every]
        routes = [ec.routes_by_hand(plain, r) for r in every] if routed else []
        return [ec.near(r, x) for r, x in zip(every, log_probs, strict=True)], log_probs, routes

    return from_first_rank(compute)


def from_first_rank(compute: Callable[[], Any]) -> Any:
    """What a function returns on rank 0 alone."""
    found = [compute() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return found[0]


def run_case(name: str) -> dict[str, Any]:
    degrees, loss, family, objective = CASES[name]
    meshes = build_meshes(ParallelConfig(**degrees), "cpu")
    model = made(family)
    as_made = LogitsOf(copy.deepcopy(model))
    exact = copy.deepcopy(as_made).double()
    vocabulary = 128 if family == "native" else 61
    routed = family == "native"
    every, log_probs, routes = all_rollouts(exact, meshes.data_ranks, vocabulary, routed=routed)
    parallelize_moe(model, meshes, loss=loss, **OPTIONS.get(name, {}))  # type: ignore[arg-type]
    engine = Engine(model, TrainStep(model), max_tokens=24)
    own = every[meshes.data_rank]
    scores = engine.log_probs(own, entropy=True, routes=routed)
    if routed:
        assert scores.routes_NLK is not None
        assert torch.equal(scores.routes_NLK, routes[meshes.data_rank])
        by_force = [ec.forced(r, 6) for r in routes]
        every = [r.replace(routes_NLK=f) for r, f in zip(every, by_force, strict=True)]
        if name in WEIGHTED:
            every = [ec.weighted(r) for r in every]
        log_probs = from_first_rank(lambda: [ec.log_probs_by_hand(exact, r) for r in every])
        every = [ec.near(r, x) for r, x in zip(every, log_probs, strict=True)]
        own = every[meshes.data_rank]
        scores = engine.log_probs(own)
    else:
        given = own.replace(routes_NLK=made_routes(own))
        by_routes_N = engine.log_probs(given).log_probs_N
    found = engine.forward_backward(own, ec.OBJECTIVES[objective][0])
    errors = [
        float((scores.log_probs_N - log_probs[meshes.data_rank]).abs().max()),
        float((found.scores.log_probs_N - scores.log_probs_N).abs().max()),
    ]
    largest = torch.tensor(errors)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    whole = gather_whole({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    if dist.get_rank():
        return {}
    with ec.replayed(exact, every) if routed else nullcontext():
        want_loss, want = ec.by_hand(exact, every, objective)
    return {
        "log-probs": float(largest[0]),
        "of the step": float(largest[1]),
        "of one process": max(
            float((ec.log_probs_by_hand(as_made, r) - ec.log_probs_by_hand(exact, r)).abs().max())
            for r in every
        ),
        # of tokens whose losses are about 1, of either sign
        "loss": float((found.loss - want_loss).abs() / want_loss.abs().clamp(min=1)),
        "gradient": worst(whole, {n.removeprefix("model."): g for n, g in want.items()}),
        "micro-batches": found.num_micro_batches,
        "by routes": None if routed else by_routes_N,
    }


def made_routes(rollouts: Rollouts) -> Tensor:
    """Experts of a transformers model, in turn."""
    shape = (len(rollouts.tokens_N), 3, 2)
    return torch.arange(shape[0] * 6).view(shape) % 6


def of_first(log_probs_N: Tensor, entropy_N: Tensor | None, rollouts: Rollouts) -> Tensor:
    return -log_probs_N


def of_second(log_probs_N: Tensor, entropy_N: Tensor | None, rollouts: Rollouts) -> Tensor:
    return -2 * log_probs_N


def of_reinforce(factor: float, metrics: list[int]) -> OwnObjective:
    """Return an objective whose closure has a number and a list."""

    def compute_loss(log_probs_N: Tensor, entropy_N: Tensor | None, rollouts: Rollouts) -> Tensor:
        metrics.append(len(log_probs_N))
        return -factor * log_probs_N

    return OwnObjective(compute_loss)


def refusals() -> dict[str, str]:
    """What this rank raises where another one has wrong rollouts."""
    meshes = build_meshes(ParallelConfig(dp_shard=3, tp=2, ep=3), "cpu")
    model = parallelize_moe(ec.decoder(num_experts=6), meshes)
    engine, good = Engine(model, TrainStep(model), max_tokens=36), ec.rollouts_of(meshes.data_rank)
    last = dist.get_rank() == WORLD - 1
    given = {
        "a field": good.replace(advantages_N=None) if meshes.data_rank == 2 else good,
        "tp ranks": good.replace(advantages_N=-good.advantages_N) if last else good,  # type: ignore
        "ids": good.replace(
            routes_NLK=torch.full((len(good.tokens_N), 2, 2), 6 if meshes.data_rank == 1 else -1)
        ),
        "temperature": good.replace(temperature=2.0) if meshes.data_rank == 1 else good,
        "tokens": good.replace(tokens_N=good.tokens_N + 128) if meshes.data_rank == 1 else good,
        "no rollouts": None if last else good,
        **{
            f"{name} of some": good.replace(**{name: None}) if meshes.data_rank == 1 else good
            for name in ("old_log_probs_N", "ref_log_probs_N", "weights_N")
        },
        "large weights": good.replace(weights_N=good.weights_N.double() * 1e308)  # type: ignore
        if meshes.data_rank == 1
        else good,
    }
    found = {
        name: error_of(lambda rollouts=rollouts: engine.forward_backward(rollouts, PPO()))
        for name, rollouts in given.items()
    }
    objectives = {
        "function": OwnObjective((of_first, of_second)[last]),
        "factor": of_reinforce(1.0 + last, []),
        "metrics": of_reinforce(1.0, [dist.get_rank()]),
    }
    for name, objective in objectives.items():
        found[name] = error_of(lambda own=objective: engine.forward_backward(good, own))
        engine.step.drop()
    none = None if last else good
    found["no rollouts of log_probs"] = error_of(lambda: engine.log_probs(none))  # type: ignore
    engine.forward_backward(good, PPO())  # nobody waits for anybody
    return found


def worker(rank: int, device: torch.device, names: list[str]) -> Any:
    return {name: run_case(name) for name in names}, refusals()


results = ranks_fixture(WORLD, worker, "name")


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_of_one_process(name: str, results: Any) -> None:
    errors = results[0][name]
    assert errors.pop("micro-batches") > 1
    allowed = 2 * errors["of one process"]
    assert max(errors["log-probs"], errors["of the step"]) < allowed < 2e-5
    assert errors["loss"] < 2e-6 and errors["gradient"] < 1e-5


def test_routes_over_stages_of_a_transformers_model(results: Any) -> None:
    """Of the first data rank, on every layout."""
    first, *others = [
        found["by routes"] for name, found in results[0].items() if CASES[name][2] == "transformers"
    ]
    for found in others:
        torch.testing.assert_close(found, first, rtol=1e-6, atol=5e-6)


def test_wrong_rollouts_of_one_rank_are_an_error_of_all(results: Any) -> None:
    found = results[1]
    assert found["a field"].startswith("Rollouts.advantages_N (None) must be given for PPO")
    assert found["ids"].startswith("Rollouts.routes_NLK[:, 0] of layer")
    assert found["tokens"].startswith("Rollouts.tokens_N (")
    for name in ("no rollouts", "no rollouts of log_probs"):
        assert found[name].startswith("rollouts (None) must be a Rollouts")
    assert found["large weights"].startswith("Rollouts.weights_N must be finite")
    assert found["tp ranks"].startswith("rollouts of data rank 2 must be the same on the ranks")
    for name in ("old_log_probs_N", "ref_log_probs_N", "weights_N"):
        assert f"whether {name} is None" in found[f"{name} of some"]
    assert found["metrics"] == "no error"
    for name in ("function", "factor"):
        assert "OwnObjective.function" in found[name] and "must be the same" in found[name]
    assert found["temperature"].startswith("the objective, entropy, PPO.clip")
