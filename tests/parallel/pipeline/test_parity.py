"""Pipelines equal one process: every schedule, over layouts and what shares their ranks.

Cases, oracle and bounds are those of `tests/test_parity.py`: losses, gradients, their norm,
auxiliary losses, counts and weights after two steps. Micro-batches of a step differ in length.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecore import (
    CloneOptions,
    ContextOptions,
    DenseOptions,
    FSDPOptions,
    ParallelConfig,
    PipelineConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.base.rank_checks import gather_objects
from moecore.models import Decoder, DecoderConfig
from moecore.parallel.model.parallel_state import get_parallel_state
from moecore.parallel.pipeline.orders import Action
from moecore.parallel.pipeline.run import _ScheduleRun
from moecore.parallel.pipeline.schedule import make_schedule
from moecore.train import GraphedForwardBackward
from tests.families.transformers.hf_models import random_model
from tests.helpers.errors import error_of
from tests.helpers.grids import asked_for
from tests.helpers.parity import Case, run_case, worst_error
from tests.helpers.parts import on_parts
from tests.helpers.ranks import run_ranks
from tests.helpers.whole import gather_whole
from tests.parallel.small_decoder import parallel_decoder, small_decoder
from tests.test_parity import BF16, FP8, FP32_BOUND, case

pytestmark = pytest.mark.slow

CASES_PER_SPAWN = 8


def pipeline(schedule: Any, layout: str | None = None, chunks: int | None = None) -> PipelineConfig:
    return PipelineConfig(schedule=schedule, layout=layout, chunks=chunks)


GPIPE, ONE_F_ONE_B = pipeline("gpipe"), pipeline("1f1b")
TWO, THREE = pipeline("interleaved", chunks=2), pipeline("interleaved", chunks=3)
ZERO_BUBBLE, V, DUAL = pipeline("zero-bubble"), pipeline("zbv"), pipeline("dualpipe-v")
MERGED = pipeline("overlapped", chunks=2)
ALL = FSDPOptions(dense_strategy="optim", embedding_strategy="optim")
GRADS = FSDPOptions(dense_strategy="optim_grads")
RING = ContextOptions(way="p2p")


def staged(world, dense, expert, stages, micro_batches, **options) -> Case:
    return case(world, dense, expert, pipeline=stages, accumulate=micro_batches, **options)


PP2, PP4 = ("pp=2 dp=2", "pp=2 ep=2 edp=1"), ("pp=4 dp=1", "pp=4 edp=1")
GATED: dict[str, Any] = dict(model="gated-shared", fsdp=ALL)
HALVES: dict[str, Any] = dict(layers=4, fsdp=GRADS, recompute=True)
BALANCED: dict[str, Any] = dict(model="balanced")
CLONED = CloneOptions(per_rank=1, min_share=0.0)
CASES = [
    staged(4, "pp=2 dp=2", "pp=2 ep=1 edp=2", ONE_F_ONE_B, 3, meta=True),
    staged(4, *PP2, GPIPE, 2, model="sigmoid"),
    staged(4, *PP4, ONE_F_ONE_B, 5, layers=5, tied=True),
    staged(4, *PP2, pipeline("interleaved", "Et|t|tt|L"), 3, layers=4, **GATED),
    staged(8, "pp=2 dp=2 cp=2", "pp=2 ep=4 edp=1", ONE_F_ONE_B, 3, context=RING, packed=True),
    staged(4, *PP2, ZERO_BUBBLE, 4, layers=3, **GATED),
    staged(4, "pp=2 dp=2", "pp=2 ep=1 edp=2", V, 3, layers=4, meta=True),
    staged(4, *PP4, DUAL, 5, layers=8, tied=True, model="relu2"),
    staged(6, "pp=2 dp=1 tp=3", "pp=2 ep=3 edp=1", pipeline("zbv", "Et|tt|t|L"), 4, **HALVES),
    staged(6, "pp=2 dp=3", "pp=2 ep=3 edp=1", DUAL, 2, layers=4, clones=CLONED),
    staged(4, *PP2, MERGED, 5, layers=4, **GATED),
    # Without stages: the micro-batches of a step beside each other.
    staged(4, "dp=4", "ep=2 edp=2", pipeline("overlapped"), 4, model="sigmoid"),
]
ROUGH = [
    staged(4, *PP2, ZERO_BUBBLE, 2, layers=3, precision=FP8, **BALANCED),
    staged(4, *PP2, MERGED, 3, layers=4, bf16=True, fsdp=BF16, **BALANCED),
]
NARROW = dict(pp=2, dp_shard=1, edp_shard=1)
ON_GPUS = [
    Case(world=2, parallel=NARROW, pipeline=ONE_F_ONE_B, accumulate=3, tied=True),
    Case(world=2, parallel=NARROW, pipeline=TWO, accumulate=3, layers=4),
    Case(world=2, parallel=NARROW, pipeline=V, accumulate=4, layers=4, model="gated-shared"),
    # Micro-batches in flight, beside the streams of all-gathers and reductions.
    staged(2, "dp=2", "edp=2", pipeline("overlapped"), 3),
]
WORLDS = sorted({one.world for one in CASES})


PREDICTS = small_decoder(
    32,
    24,
    vocab_size=62,
    num_layers=3,
    max_seq_len=64,
    hash_layers=2,
    num_mtp_layers=2,
    mtp_loss_coef=0.3,
)
# Layouts of its modules on 4 ranks: apart, with the loss, in a V whose ends share a rank.
PREDICTING = {
    "apart": (pipeline("interleaved", "Ett||t|m|m|L"), dict(pp=2, ep=2), False),
    "with the loss, tied": (pipeline("1f1b", "Ett|tmmL"), dict(pp=2), True),
    "everywhere, tied": (pipeline("1f1b", "Et|tt|mm|L"), dict(pp=4), True),
    "alone": (pipeline("gpipe", "Ett|t|mm|L"), dict(pp=4), False),
}


def predicts(rank: int, name: str) -> dict[str, float]:
    """The worst errors of two steps of a model with multi-token prediction, on the first rank."""
    config, degrees, tied = PREDICTING[name]
    decoder = replace(PREDICTS, tie_embeddings=tied)
    meshes = build_meshes(ParallelConfig(**degrees), "cpu")
    model = Decoder(decoder, device="meta")
    parallelize_moe(model, meshes, pipeline=config)
    model.to_empty(device="cpu")
    model.init_weights(3)
    step, found = TrainStep(model, adamw(model), max_norm=0.5, num_micro_batches=3), {}
    batches = [
        [[batch(i, m, r) for r in range(meshes.data_ranks)] for m in range(3)] for i in range(2)
    ]
    for i, micros in enumerate(batches):
        losses = step.forward_backward([of_ranks[meshes.data_rank] for of_ranks in micros])
        found[f"norm {i}"] = torch.tensor(step.finish().norm.total)  # type: ignore[union-attr]
        means = losses.clone()
        dist.all_reduce(means)
        found[f"losses {i}"] = means / dist.get_world_size()
    found = gather_whole(found | dict(model.named_parameters()))
    if rank != 0:
        return {}
    wanted = alone(decoder, batches)
    assert found.keys() == wanted.keys()
    return {n: worst_error(found[n], wanted[n]) for n in wanted}


def alone(decoder: DecoderConfig, batches: list[list[list[dict[str, Tensor]]]]) -> dict[str, Any]:
    """What one process finds."""
    whole, wanted = Decoder(decoder, device="meta").to_empty(device="cpu"), {}
    whole.init_weights(3)
    optimizer = adamw(whole)
    for i, micros in enumerate(batches):
        every = [torch.stack([whole(**b) for b in of_ranks]).mean() for of_ranks in micros]
        wanted[f"losses {i}"] = torch.stack(every).detach()
        (sum(every) / 3).backward()
        wanted[f"norm {i}"] = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return wanted | {n: p.detach() for n, p in whole.named_parameters()}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return on_parts(torch.optim.AdamW)(model.parameters(), lr=0.01, eps=1e-3)


def batch(step: int, micro: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    tokens = torch.randint(0, 61, (2, 9 + 2 * micro), generator=generator)
    return {"tokens_BT": tokens[:, :-1], "labels_BT": tokens[:, 1:].contiguous()}


def refusals(rank: int) -> dict[str, str]:
    """What a rank is told; nothing communicates before."""
    meshes = build_meshes(ParallelConfig(pp=2), "cpu")

    def parallelized(**how: Any) -> Decoder:
        return parallelize_moe(Decoder(PREDICTS, device="meta"), meshes, **how)

    model = parallelized(pipeline=ONE_F_ONE_B).to_empty(device="cpu")
    step = TrainStep(model, num_micro_batches=2)
    calls = {
        "number": lambda: step.forward_backward([{}]),
        "alone": lambda: step.micro_batch().__enter__(),
        "graph": lambda: GraphedForwardBackward(print, model),
        "no stages": parallelized,
        "layout": lambda: parallelized(pipeline=pipeline("1f1b", "Ettt|tmmL")),
        "compiled": lambda: parallelized(pipeline=V, dense=DenseOptions(compile=True)),
    }
    return {name: error_of(call) for name, call in calls.items()}


def run_the_page() -> float:
    """Run the code of docs/pipeline.md on a small model; return its last loss."""
    page = Path(__file__).parents[3] / "docs" / "pipeline.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    small = {
        "pp=8, ep=8": "pp=2, ep=2",
        'preset("deepseek-v3")': "config",
        "Et*3|(tt|)*29m|L": "Et|t|tmm|L",
        "num_micro_batches=32": "num_micro_batches=3",
    }
    for large, other in small.items():
        assert code.count(large) == 1, large
        code = code.replace(large, other)
    batches = [tuple(batch(0, i, 0).values()) for i in range(3)]
    names: dict[str, Any] = {"config": PREDICTS, "batches": batches}
    exec(code, names)
    return float(names["losses"][-1])


REFUSED = {
    "number": r"micro_batches \(1\) must be num_micro_batches \(2\)",
    "alone": r"micro_batch\(\) must not run a pipeline's stages",
    "graph": r"model \(Decoder\) must have no pipeline stages for a CUDA graph",
    "no stages": r"ParallelConfig.pp \(2\) must go with stages",
    "layout": r"layout \('Ettt\|tmmL'\) must",
    "compiled": r"PipelineConfig.schedule \('zbv'\) must go with DenseOptions.compile",
}


def transformers_models(rank: int) -> dict[str, dict[str, float]]:
    """The worst errors of a step of transformers models, of which a rank has some layers."""
    found = {}
    for name, config in (("qwen3-moe", ONE_F_ONE_B), ("deepseek-v3", V)):
        meshes = build_meshes(ParallelConfig(pp=2), "cpu")
        whole, model = random_model(name), random_model(name)
        parallelize_moe(model, meshes, pipeline=config)
        step = TrainStep(model, adamw(model), num_micro_batches=3)
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(0, 61, (3, meshes.data_ranks, 2, 9), generator=generator)
        losses = step.forward_backward(
            [{"input_ids": ids, "labels": ids} for ids in rows[:, meshes.data_rank]]
        )
        step.finish()
        ours = gather_whole({f"losses {meshes.data_rank}": losses} | dict(model.named_parameters()))
        if rank != 0:
            continue
        every = [[whole(input_ids=ids, labels=ids).loss for ids in micro] for micro in rows]
        (sum(map(sum, every)) / rows[:, :, 0, 0].numel()).backward()
        adamw(whole).step()
        wanted = {n: p.detach() for n, p in whole.named_parameters()}
        wanted |= {
            f"losses {i}": torch.stack(of).detach() for i, of in enumerate(zip(*every, strict=True))
        }
        assert ours.keys() == wanted.keys()
        found[name] = {n: worst_error(ours[n], wanted[n]) for n in wanted}
    return found


def held_for_weights(config: PipelineConfig, *, layers: int) -> tuple[int, int]:
    """Return the most bytes that weight gradients of a rank wait for, as planned and as found."""
    decoder = replace(PREDICTS, num_layers=layers, num_mtp_layers=0, mtp_loss_coef=0.0)
    model, steps = parallel_decoder(decoder, ParallelConfig(pp=4), pipeline=config), 6
    one = [0] * len(get_parallel_state(model).pipeline.layout.stages)
    found = 0
    original = _ScheduleRun._run_input_backward

    def measured(self: _ScheduleRun, action: Action) -> Tensor | None:
        nonlocal found
        result = original(self, action)
        one[action.stage] = self._deferred[action.stage, action.micro_batch].nbytes
        found = max(found, sum(later.nbytes for later in self._deferred.values()))
        return result

    step = TrainStep(model, num_micro_batches=steps)
    with patch.object(_ScheduleRun, "_run_input_backward", measured):
        step.forward_backward([batch(0, 0, 0)] * steps)
    step.drop()
    chunks = len(one) // 4
    schedule = make_schedule(config.schedule, pp=4, chunks=chunks, num_micro_batches=steps)
    return schedule.compute_peak_live([0] * len(one), deferred_sizes=one)[dist.get_rank()], found


def worker(rank: int, device: torch.device, cases: list[Case]) -> dict[str, dict[str, float]]:
    return {one.name: run_case(one, device) for one in cases}


def worker_that_predicts(rank: int, device: torch.device) -> dict[str, dict[str, float]]:
    found: dict[str, Any] = {name: predicts(rank, name) for name in PREDICTING}
    found["refused"] = refusals(rank)
    found["page"] = run_the_page()
    held = [held_for_weights(ZERO_BUBBLE, layers=4), held_for_weights(V, layers=8)]
    return found | {"held": gather_objects(held)} | transformers_models(rank)


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    names = {one.name for one in asked_for(request, "one")}
    for world in WORLDS:
        cases = [one for one in [*CASES, *ROUGH] if one.world == world and one.name in names]
        for i in range(0, len(cases), CASES_PER_SPAWN):
            found |= run_ranks(world, worker, cases[i : i + CASES_PER_SPAWN])
    return found | run_ranks(4, worker_that_predicts)


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
def test_pipeline_is_one_process(one: Case, results: dict[str, dict[str, float]]) -> None:
    errors = results[one.name]
    assert any(name.startswith("grad/") for name in errors)
    assert {n: e for n, e in errors.items() if not e < FP32_BOUND} == {}


@pytest.mark.parametrize("one", ROUGH, ids=lambda one: one.name)
def test_rounded_pipeline_is_at_most_twice_as_wrong(one, results) -> None:
    ratios = results[one.name]
    assert any(name.startswith("grad/") for name in ratios)
    assert {n: ratio for n, ratio in ratios.items() if not ratio < 2} == {}


@pytest.mark.parametrize("name", PREDICTING)
def test_prediction_modules_and_copies_of_the_table(name, results) -> None:
    errors = results[name]
    assert any("mtp.1" in each for each in errors)
    assert {n: e for n, e in errors.items() if not e < FP32_BOUND} == {}


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3"])
def test_models_of_transformers(name: str, results: dict[str, dict[str, float]]) -> None:
    assert {n: e for n, e in results[name].items() if not e < FP32_BOUND} == {}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_one_line(name: str, results: dict[str, Any]) -> None:
    error = results["refused"][name]
    assert re.match(REFUSED[name], error) and "\n" not in error, error


def test_memory_of_weight_gradients_is_as_planned(results: dict[str, Any]) -> None:
    for held in results["held"]:
        for planned, found in held:
            assert planned == found > 0


def test_the_code_of_the_page_runs(results: dict[str, Any]) -> None:
    assert 3.5 < results["page"] < 6  # log(61) is 4.1, and of three tokens the loss is more


@pytest.mark.gpu
@pytest.mark.gpus(2)
def test_on_gpus() -> None:
    """Messages in both directions between one pair of ranks, over NCCL: gloo sends none of GPUs."""
    for name, errors in run_ranks(2, worker, ON_GPUS, device_type="cuda").items():
        assert {n: e for n, e in errors.items() if not e < FP32_BOUND} == {}, name
