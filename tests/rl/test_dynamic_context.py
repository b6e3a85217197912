"""Dynamic context parallelism in the engine: the numbers of the engine with one cp, on four ranks.

Both engines have the same weights and rollouts. Sequences need 1, 2 or 4 data ranks, and one data
rank of four has none. A case takes a step with each of its objectives.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from moecore import (
    ContextOptions,
    Meshes,
    ParallelConfig,
    PipelineConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.base.rank_checks import gather_objects
from moecore.rl import DPO, GRPO, GSPO, KTO, PPO, Engine, OwnObjective, Rollouts
from moecore.rl.objectives import Objective
from tests.helpers.errors import error_of
from tests.helpers.ranks import ranks_fixture
from tests.helpers.whole import gather_whole
from tests.rl import engine_cases as ec
from tests.rl.test_engine_ranks import made

pytestmark = pytest.mark.slow

LENGTHS = [(3, 37), (2, 12), (1, 13), (4, 10)]  # of prompt and response
ROW_TOKENS = 64  # of the data ranks that share a row, and of a row with one cp
OWN = OwnObjective(ec.own, entropy=True, needs=("advantages_N",))
CASES: dict[str, tuple[dict[str, int], str, tuple[Objective, ...]]] = {
    "dp4-ep2": (dict(dp_shard=4, ep=2), "native", (GRPO(), DPO(beta=0.5))),
    "hsdp2-dp2-ep4": (
        dict(dp_replicate=2, dp_shard=2, ep=4),
        "native",
        (PPO(kl="k2", kl_coef=0.1, entropy_coef=0.02),),
    ),
    "tp2-dp2-ep2": (dict(tp=2, dp_shard=2, ep=2), "native", (GSPO(clip=0.2, clip_high=0.3),)),
    "pp2-dp2-ep2": (dict(pp=2, dp_shard=2, ep=2), "native", (KTO(beta=0.5, kl=0.1),)),
    "hf-dp4-ep2": (dict(dp_shard=4, ep=2), "transformers", (OWN,)),
}


def rollouts_of(meshes: Meshes) -> Rollouts:
    rollouts = ec.rollouts_of(meshes.data_rank, 61, lengths=LENGTHS)
    return rollouts.take([]) if meshes.data_rank == 2 else rollouts


def engine_of(meshes: Meshes, family: str, *, dynamic: bool, **options: Any) -> Engine:
    pipeline = PipelineConfig() if meshes.parallel.pp > 1 else None
    context = ContextOptions(dynamic=True) if dynamic else None
    more: Any = dict(loss="sum", expert_backend="sequential")  # which supports fp64
    models = [
        parallelize_moe(model.double(), meshes, context=context, pipeline=pipeline, **more)
        for model in (made(family, 8), made(family, 8))
    ]
    step = TrainStep(models[0], torch.optim.SGD(models[0].parameters(), lr=0.05))
    max_tokens = ROW_TOKENS // (meshes.data_ranks if dynamic else 1)
    return Engine(models[0], step, max_tokens=max_tokens, reference=models[1], **options)


def run(name: str, meshes: Meshes, *, dynamic: bool) -> dict[str, Any]:
    """Return the scores of all data ranks, and the losses and weights of a step per objective."""
    _, family, objectives = CASES[name]
    engine, rollouts = engine_of(meshes, family, dynamic=dynamic), rollouts_of(meshes)
    cps: set[int] = set()

    def record_cp(model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        cps.add(kwargs.get("cp", 1))

    engine.model.register_forward_pre_hook(record_cp, with_kwargs=True, prepend=True)
    first = engine.log_probs(rollouts, entropy=True, routes=True)
    assert first.entropy_N is not None and first.routes_NLK is not None
    found: dict[str, Any] = dict(entropy=first.entropy_N, routes=first.routes_NLK)
    batch = ec.near(rollouts, first.log_probs_N)
    batch = batch.replace(
        ref_log_probs_N=batch.ref_log_probs_N + engine.reference_log_probs(rollouts).log_probs_N,
        routes_NLK=ec.forced(first.routes_NLK, 8),
    )
    scores, losses = [first.log_probs_N, engine.log_probs(batch).log_probs_N], []
    for objective in objectives:
        result = engine.forward_backward(batch, objective)
        assert result.num_micro_batches > 1
        losses.append(result.loss)
        scores.append(result.scores.log_probs_N)
        engine.step.finish()
    found |= {"losses": torch.stack(losses), "log-probs": torch.stack(scores)}
    every = gather_objects((found, cps))
    return {
        "ranks": [of_rank for of_rank, _ in every],
        "cps": set.union(*(cps for _, cps in every)),
        "weights": gather_whole(dict(engine.model.named_parameters())),
    }


def refusals() -> dict[str, str]:
    meshes = build_meshes(ParallelConfig(dp_shard=4, ep=2), "cpu")
    engine, rollouts = engine_of(meshes, "native", dynamic=True), rollouts_of(meshes)
    last = meshes.data_rank == 3
    ids = torch.zeros(65, dtype=torch.int64)
    long = Rollouts.of([ids[:1]], [ids[1:]], temperature=ec.TEMPERATURE) if last else rollouts
    odd = ec.rollouts_of(meshes.data_rank).take(range(3 if last else 4))
    found = {
        "long": error_of(lambda: engine.log_probs(long)),
        "odd": error_of(lambda: engine.forward_backward(odd, DPO())),
    }
    static = engine_of(meshes, "native", dynamic=False)
    step, reference = engine.step, static.model
    found["reference"] = error_of(
        lambda: Engine(engine.model, step, max_tokens=16, reference=reference)
    )
    found["invariant"] = error_of(
        lambda: engine_of(meshes, "native", dynamic=True, batch_invariant=True)
    )
    engine.log_probs(rollouts)  # no rank waits for another
    every = gather_objects(found)
    assert all(other == found for other in every)
    return found


def worker(rank: int, device: torch.device, names: list[str]) -> Any:
    found = {}
    for name in names:
        meshes = build_meshes(ParallelConfig(**CASES[name][0]), "cpu")
        found[name] = [run(name, meshes, dynamic=dynamic) for dynamic in (True, False)]
    return found, refusals()


results = ranks_fixture(4, worker, "name")


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_of_one_cp(name: str, results: Any) -> None:
    dynamic, static = results[0][name]
    assert dynamic["cps"] >= ({1, 2, 4} if "dp4" in name else {1, 2}) and static["cps"] == {1}
    for found, expected in zip(dynamic["ranks"], static["ranks"], strict=True):
        assert torch.equal(found.pop("routes"), expected.pop("routes"))
        for key, value in expected.items():
            assert_close(found[key], value)
    assert dynamic["weights"].keys() == static["weights"].keys()
    for key, value in static["weights"].items():
        assert_close(dynamic["weights"][key], value)


def test_refusals_are_of_all_ranks(results: Any) -> None:
    found = results[1]
    assert found["long"].startswith("max_tokens (16) must be >= 18, what each of 4 ranks holds")
    assert found["odd"].startswith("rollouts (3 sequences) must be a multiple of 2")
    assert found["reference"].startswith("ContextOptions.dynamic (False) of the reference must be")
    assert found["invariant"].startswith("ContextOptions.dynamic (True) must be False, because")
