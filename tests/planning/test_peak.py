"""Peaks of runs of any depth, put together from few layers, against dry runs of all layers.

`test_time_plan.py` compares the peaks of its cases, whose dry runs it has.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moecore import FSDPOptions, MemoryOptions, ParallelConfig, PipelineConfig
from moecore.models import preset
from moecore.planning import TrainingRun, dry_run, plan_peak
from tests.helpers.grids import beside

QWEN = replace(preset("qwen3-30b-a3b"), num_layers=8)
DEEPSEEK = replace(preset("deepseek-v3"), num_layers=9)  # three dense ones, six with experts
WHOLE = FSDPOptions(param_dtype=torch.bfloat16, dense_strategy="optim")
RUN = TrainingRun(
    model=QWEN, num_gpus=8, parallel=ParallelConfig(ep=8), seq_len=2048, num_micro_batches=4
)
CASES = {
    "weights whole": (replace(RUN, fsdp=WHOLE), 0.002),
    "MoE layers again": (replace(RUN, memory=MemoryOptions(recompute=("moe",))), 0.002),
    "deepseek, offloaded": (
        replace(
            RUN,
            model=DEEPSEEK,
            num_gpus=16,
            parallel=ParallelConfig(ep=16),
            memory=MemoryOptions(offload=("attention", "experts")),
        ),
        0.04,
    ),
}
STAGED = dict(parallel=ParallelConfig(pp=2, ep=4), num_micro_batches=6)
SCHEDULES = {
    "1f1b": (PipelineConfig(schedule="1f1b"), 0.002),
    "interleaved": (PipelineConfig(schedule="interleaved", chunks=2), 0.002),
    "overlapped": (PipelineConfig(schedule="overlapped", chunks=2), 0.002),
    # A gradient of the input frees all in a plan that the weights' products have not read.
    "zero-bubble": (PipelineConfig(schedule="zero-bubble"), 0.061),
}


@pytest.mark.parametrize("case", CASES)
def test_few_layers_stand_for_all(case: str) -> None:
    run, error = CASES[case]
    (found,) = plan_peak(run)
    assert found == pytest.approx(dry_run(run).peak, rel=error)


@pytest.mark.parametrize("name", beside(SCHEDULES, ["interleaved", "zero-bubble"]))
def test_ranks_of_a_pipeline(name: str) -> None:
    pipeline, error = SCHEDULES[name]
    run = replace(RUN, **STAGED, pipeline=pipeline)
    exact = [dry_run(run, rank).peak for rank in (0, 4)]
    assert plan_peak(run) == pytest.approx(exact, rel=error)
    assert plan_peak(replace(run, num_micro_batches=16)) == plan_peak(run)


@pytest.mark.parametrize("name", beside(SCHEDULES, ["interleaved", "zero-bubble"]))
def test_what_has_been_sent_is_freed_within_a_step(name: str) -> None:
    run = replace(RUN, **STAGED, pipeline=SCHEDULES[name][0])
    few, more = (dry_run(replace(run, num_micro_batches=n)).peak for n in (6, 8))
    assert few == more
