"""Batch invariance on three ranks: bits are those of one process, whatever dp, ep and pp are.

Tokens have three experts each, whose sum depends on its order.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moecore import ParallelConfig, PipelineConfig, TrainStep, build_meshes, parallelize_moe
from moecore.models import Decoder
from moecore.rl import PPO, Engine, Rollouts
from tests.helpers.ranks import run_ranks
from tests.helpers.whole import gather_whole
from tests.rl.engine_cases import config, moved, rollouts_of
from tests.rl.replay_cases import randomize, worst

pytestmark = pytest.mark.slow

WORLD = 3
# name -> degrees, options of parallelize_moe, dtype
CASES: dict[str, tuple[dict[str, int], dict[str, Any], torch.dtype]] = {
    "dp": (dict(dp_shard=3), {}, torch.bfloat16),
    "ep": (dict(dp_shard=3, ep=3), dict(dispatch="alltoall"), torch.float32),
    "pp": (dict(pp=3), dict(pipeline=PipelineConfig()), torch.float32),
}
EP = [name for name in CASES if name.startswith("ep")]


def cases_on(device: torch.device) -> list[str]:
    """Return all, but no pipeline of ranks that share a GPU: gloo sends nothing from its memory."""
    shares = device.type == "cuda" and torch.cuda.device_count() < WORLD
    return [name for name in CASES if not (shares and name == "pp")]


def engine_of(degrees, dtype, device, *, is_invariant=True, **options) -> tuple[Engine, int]:
    """Return an engine and the data rank."""
    tiny = config(num_experts=6)
    assert tiny.moe is not None
    model = Decoder(replace(tiny, moe=replace(tiny.moe, top_k=3)))
    randomize(model, 0)
    meshes = build_meshes(ParallelConfig(**degrees), device.type)
    model = parallelize_moe(model.to(device, dtype), meshes, **options)
    engine = Engine(model, TrainStep(model), max_tokens=24, batch_invariant=is_invariant)
    return engine, meshes.data_rank


def rollouts_on(device: torch.device, data_rank: int) -> Rollouts:
    return moved(rollouts_of(data_rank).replace(old_log_probs_N=None), device)  # ratios of 1


def worker(rank: int, device: torch.device) -> dict[str, Any]:
    """Log-probabilities of training forwards by case and data rank."""
    found: dict[str, Any] = {}
    for name in cases_on(device):
        degrees, options, dtype = CASES[name]
        engine, data_rank = engine_of(degrees, dtype, device, **options)
        scores = engine.forward_backward(rollouts_on(device, data_rank), PPO()).scores
        found[name] = _by_data_rank(scores.log_probs_N, data_rank)
        if name in EP:
            plain, _ = engine_of(degrees, dtype, device, is_invariant=False, **options)
            scores = plain.forward_backward(rollouts_on(device, data_rank), PPO()).scores
            found[f"{name}, plain"] = _by_data_rank(scores.log_probs_N, data_rank)
            grads = _gradients(engine), _gradients(plain)
            found[f"{name}, gradient"] = None if rank else worst(*grads)
    with pytest.raises(ValueError, match=r"cp \(3\) must be 1, because its ranks each add a part"):
        engine_of(dict(dp_shard=1, cp=3), torch.float32, device)
    return found


def _gradients(engine: Engine) -> dict[str, Tensor]:
    """Whole ones, on rank 0."""
    grads = {n: p.grad for n, p in engine.model.named_parameters() if p.grad is not None}
    return {name: grad.float().cpu() for name, grad in gather_whole(grads).items()}


def _by_data_rank(own_N: Tensor, data_rank: int) -> dict[int, Tensor]:
    every: list[Any] = [None] * WORLD
    dist.all_gather_object(every, (data_rank, own_N.cpu()))
    return dict(every)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def results(request: pytest.FixtureRequest) -> tuple[Any, torch.device]:
    """Return what ranks found, and where."""
    found = run_ranks(WORLD, worker, device_type=request.param)
    return found, torch.device(request.param)


@cache
def of_one_process(dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    engine, _ = engine_of({}, dtype, device)
    every = [rollouts_on(device, data_rank) for data_rank in range(WORLD)]
    return [engine.log_probs(rollouts).log_probs_N.cpu() for rollouts in every]


@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_one_process(name: str, results: Any) -> None:
    found, device = results
    if name not in cases_on(device):
        pytest.skip("gloo sends nothing from a GPU's memory")
    wanted = of_one_process(CASES[name][2], device)
    assert len(found[name]) == (1 if name == "pp" else WORLD)
    for data_rank, log_probs_N in found[name].items():
        assert torch.equal(log_probs_N, wanted[data_rank])


@pytest.mark.parametrize("name", EP)
def test_without_it_they_are_others(name: str, results: Any) -> None:
    found, device = results
    wanted = of_one_process(CASES[name][2], device)
    plain = found[f"{name}, plain"]
    assert not all(torch.equal(plain[r], wanted[r]) for r in range(WORLD))


def test_gradients_of_tokens_that_travel_by_choice(results: Any) -> None:
    found, _ = results
    assert found["ep, gradient"] < 1e-5
