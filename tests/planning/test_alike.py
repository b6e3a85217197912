"""A few layers and ranks stand for all: plans with them equal plans without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moecore import FSDPOptions, MemoryOptions, ParallelConfig, PipelineConfig
from moecore.models import preset
from moecore.planning import OptimizerOptions, TrainingRun, memory, plan_memory, stored
from moecore.planning.stored import few_layers, lone_rank
from moecore.precision.roles import Precision

DEEP = replace(preset("tiny-deepseek-v3"), num_layers=7, dense_layers=(0, 1))
TIED = replace(preset("tiny-shared"), num_layers=6)
BASE = TrainingRun(model=DEEP, num_gpus=16, seq_len=64, batch_size=32, num_micro_batches=4)
OPTIM = FSDPOptions(param_dtype=torch.bfloat16, dense_strategy="optim", blocks_per_unit=2)
BF16 = FSDPOptions(param_dtype=torch.bfloat16, dense_strategy="optim")
INTERLEAVED = PipelineConfig(schedule="interleaved", chunks=2)
RUNS: dict[str, TrainingRun] = {
    "stages": replace(BASE, parallel=ParallelConfig(pp=2, tp=2, ep=4), pipeline=INTERLEAVED),
    "units of two blocks, bf16": replace(
        BASE,
        parallel=ParallelConfig(pp=4, ep=2),
        pipeline=PipelineConfig(),
        fsdp=OPTIM,
        optimizer=OptimizerOptions(master_remainder=True),
    ),
    "a V, tied": replace(
        BASE,
        model=TIED,
        parallel=ParallelConfig(pp=2, cp=2),
        pipeline=PipelineConfig(schedule="zbv"),
    ),
    "offload": replace(
        BASE,
        parallel=ParallelConfig(ep=8),
        memory=MemoryOptions(recompute="gemm_last", offload=("experts", "attention")),
    ),
    "one stage, tied": replace(BASE, model=TIED, parallel=ParallelConfig(tp=2, ep=2), fsdp=BF16),
    "one stage, sharded, FP8": replace(
        BASE, parallel=ParallelConfig(ep=4), precision=Precision.of("tensorwise")
    ),
    "predictions alone": replace(
        BASE, parallel=ParallelConfig(pp=4, ep=4), pipeline=PipelineConfig(layout="Ettt|tttt|m|L")
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_plans_are_those_of_all_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RUNS[name]
    found = plan_memory(run)
    assert few_layers(run) is not None
    monkeypatch.setattr(memory, "few_layers", lambda run: None)
    monkeypatch.setattr(stored, "lone_rank", lambda run, own: None)
    monkeypatch.setattr(stored, "shallow", lambda run: None)
    assert found == plan_memory(run)


@pytest.mark.parametrize(
    "changes",
    [
        dict(precision=replace(Precision.of("blockwise"), overrides=(("*.0.*", None),))),
        dict(memory=MemoryOptions(offload=("experts",), offload_fraction=0.5)),
    ],
)
def test_layers_that_differ_are_counted_each(changes: dict[str, Any]) -> None:
    run = replace(BASE, parallel=ParallelConfig(pp=2, ep=4), pipeline=INTERLEAVED, **changes)
    assert run.pipeline is not None
    own = run.pipeline.stages(2, DEEP.num_layers, DEEP.num_mtp_layers).stages[1::2]
    assert few_layers(run) is None and lone_rank(run, own) is None
