"""Ranks with equal stages are planned once, which equals a plan of each rank."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moecore import ParallelConfig, PipelineConfig
from moecore.base.options.precision import Precision
from moecore.models import preset
from moecore.planning import TrainingRun
from moecore.planning.run import _compute_rank_size, list_rank_bytes

DEEP = replace(preset("tiny-deepseek-v3"), num_layers=7, dense_layers=(0, 1))
TIED = replace(preset("tiny-shared"), num_layers=6)
BASE = TrainingRun(model=DEEP, num_gpus=16, seq_len=64, batch_size=32, num_micro_batches=4)
INTERLEAVED = PipelineConfig(schedule="interleaved", chunks=2)
TENSORWISE = Precision.of("tensorwise")
RUNS: dict[str, TrainingRun] = {
    "stages": replace(BASE, parallel=ParallelConfig(pp=2, tp=2, ep=4), pipeline=INTERLEAVED),
    "linear attention": replace(
        BASE,
        model=replace(preset("tiny-qwen3-next"), num_layers=8, linear_layers=(0, 1, 2, 4, 5, 6)),
        parallel=ParallelConfig(pp=4, ep=4),
        pipeline=PipelineConfig(),
    ),
    "a V, tied": replace(
        BASE,
        model=TIED,
        parallel=ParallelConfig(pp=2, cp=2),
        pipeline=PipelineConfig(schedule="zbv"),
    ),
    "predictions alone": replace(
        BASE, parallel=ParallelConfig(pp=4, ep=4), pipeline=PipelineConfig(layout="Ettt|tttt|m|L")
    ),
    "layers by name": replace(
        BASE,
        parallel=ParallelConfig(pp=4, ep=4),
        pipeline=PipelineConfig(layout="Ettt|tt|tt|mL"),
        precision=replace(TENSORWISE, overrides=(("*.3.*", None),)),
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_each_rank_stores_what_its_own_plan_has(name: str) -> None:
    run = RUNS[name]
    assert list(list_rank_bytes(run)) == [
        _compute_rank_size(run, rank) for rank in range(run.resolved.pp)
    ]
