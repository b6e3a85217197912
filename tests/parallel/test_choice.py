import inspect
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from moecore import (
    MoEConfig,
    MoELayer,
    ParallelConfig,
    TrainStep,
    build_meshes,
    explain,
    parallelize_moe,
    plan_sharding,
)
from moecore.base.rank_checks import gather_objects
from moecore.models import Decoder, preset
from moecore.parallel.choice import choose_meshes
from moecore.parallel.model.parallel_state import get_parallel_state
from tests.helpers.errors import error_of
from tests.helpers.ranks import run_ranks

SIZES = (1, 4, 6)
# Ranks, those of each rank's host (None = no launcher tells), experts of the MoE layers, ep.
CASES: list[tuple[int, tuple[int, ...] | None, tuple[int, ...], int]] = [
    (1, None, (8,), 1),
    (1, (1,), (6,), 1),
    (4, None, (6,), 2),
    (4, None, (8,), 4),
    (4, None, (8, 6), 2),
    (4, None, (64, 64), 4),
    (4, None, (7,), 1),
    (4, None, (), 1),
    (4, (2, 2, 2, 2), (8,), 2),
    (4, (3, 3, 3, 1), (12,), 1),
    (6, (6,) * 6, (8,), 2),
    (6, (6,) * 6, (6,), 6),
    (6, (6,) * 6, (9, 12), 3),
    (6, (3,) * 6, (6,), 3),
    (6, (4, 4, 4, 4, 2, 2), (8,), 2),
]


def make_model(expert_counts: Sequence[int], device: str | None = None) -> nn.Module:
    torch.manual_seed(0)
    configs = [MoEConfig(dim=32, hidden_dim=16, num_experts=n, top_k=2) for n in expert_counts]
    layers = [MoELayer(config, device=device) for config in configs]
    return nn.Sequential(nn.Linear(32, 32, device=device), *layers)


def on_host(local_size: int | None) -> Any:
    """Return a context in which the launcher tells the ranks of this host."""
    environ = {n: v for n, v in os.environ.items() if n != "LOCAL_WORLD_SIZE"}
    if local_size is not None:
        environ["LOCAL_WORLD_SIZE"] = str(local_size)
    return patch.dict(os.environ, environ, clear=True)


def train(model: nn.Module) -> list[torch.Tensor]:
    """Return the loss, local gradients and new local parameters of a step on own tokens."""
    torch.manual_seed(1 + dist.get_rank())
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), max_norm=1.0)
    with step.micro_batch():
        loss = model(torch.randn(12, 32)).square().mean()
        loss.backward()
    params: Any = list(model.parameters())
    grads = [param.grad.to_local().clone() for param in params]
    step.finish()
    return [loss.detach(), *grads, *(param.to_local().detach() for param in params)]


def compare_with_passed(local_size: int | None) -> dict[str, Any]:
    """Return what differs between a choice for 6 experts and the same degrees passed."""
    with on_host(local_size):
        chosen = parallelize_moe(make_model((6,)))
        planned = plan_sharding(make_model((6,), "meta"))
    record, world_size = get_parallel_state(chosen), dist.get_world_size()
    p = record.plan.parallel
    passed = parallelize_moe(make_model((6,)), build_meshes(ParallelConfig(ep=p.ep)))
    plan = get_parallel_state(passed).plan  # type: ignore[union-attr]
    texts = explain(chosen).splitlines(), explain(passed).splitlines()
    pairs = zip(train(chosen), train(passed), strict=True)
    return {
        "planned": planned == record.plan,
        "plans": replace(record.plan, parallel_reason=None) == plan,
        "reasons": (record.plan.parallel_reason, plan.parallel_reason),
        "lines": [line for line in texts[0] if line not in texts[1]],
        "world": p.dp_shard == world_size and p.ep * p.edp_shard == world_size,
        "equal": all(torch.equal(a, b) for a, b in pairs),
    }


def worker(rank: int, device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for world_size, local_sizes, expert_counts, _ in CASES:
        if world_size == dist.get_world_size():
            with on_host(None if local_sizes is None else local_sizes[rank]):
                found[str((local_sizes, expert_counts))] = choose_meshes(expert_counts).parallel
    found["passed"] = compare_with_passed(None)
    last = rank == dist.get_world_size() - 1
    with on_host(None):
        different = make_model((6,) if last else (8,), "meta")
        errors = [error_of(lambda: parallelize_moe(different))]
        errors.append(error_of(lambda: parallelize_moe(make_model((6,)), loss=last or "mean")))
    every = gather_objects(errors)
    return found | {"errors": every}


@pytest.fixture(scope="module")
def results() -> dict[int, dict[str, Any]]:
    return {size: run_ranks(size, worker, over_gloo=True) for size in SIZES}


@pytest.mark.parametrize(("world_size", "local_sizes", "expert_counts", "ep"), CASES)
def test_ep_divides_the_experts_and_the_ranks_of_a_host(
    world_size: int,
    local_sizes: tuple[int, ...] | None,
    expert_counts: tuple[int, ...],
    ep: int,
    results: dict[int, dict[str, Any]],
) -> None:
    parallel = results[world_size][str((local_sizes, expert_counts))]
    rest = world_size // ep
    assert parallel == ParallelConfig(dp_shard=world_size, ep=ep, edp_shard=rest)


@pytest.mark.parametrize(("world_size", "ep"), [(1, 1), (4, 2), (6, 6)])
def test_a_choice_is_as_if_it_were_passed(world_size, ep, results) -> None:
    found = results[world_size]["passed"]
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    reason = f"ep ({ep}) is the largest number that divides 6 experts and {ranks} of the world"
    assert found["reasons"] == (reason, None) and found["lines"] == [f"degrees chosen: {reason}"]
    assert found["planned"] and found["plans"] and found["world"] and found["equal"]


def test_ranks_that_differ_all_raise(results: dict[int, dict[str, Any]]) -> None:
    for models, arguments in results[4]["errors"]:
        assert models.startswith("ParallelConfig.edp_shard (")
        assert "and 1 more must be the same on every rank" in models
        assert arguments.startswith("loss (True) must be one of 'mean', 'sum': choose one (on rank")


@pytest.mark.usefixtures("no_group_left")
def test_one_process_without_a_launcher_starts_its_group() -> None:
    model = parallelize_moe(Decoder(preset("tiny"), device="meta"))
    plan = get_parallel_state(model).plan  # type: ignore[union-attr]
    assert plan.parallel == ParallelConfig(dp_shard=1, edp_shard=1) and dist.get_world_size() == 1


@pytest.mark.usefixtures("no_group_left")
def test_a_dense_model_says_that_it_has_no_experts() -> None:
    plan = plan_sharding(nn.Sequential(nn.Linear(4, 4)))
    assert "degrees chosen: the model has no MoE layers" in explain(plan)


def test_parallelize_moe_has_few_arguments() -> None:
    parameters = inspect.signature(parallelize_moe).parameters
    assert len(parameters) <= 14 and parameters["meshes"].default is None
