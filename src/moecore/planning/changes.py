"""What to change of a run that fits so that its GPUs have more tokens per second: `next_change`.

    TimePlan -> runs with one option more, each planned -> the one that gains most and fits

| change | how it is planned |
|---|---|
| FP8 for what computes, where the GPU has it | as another run |
| less computed again | as another run |
| tokens by stores into the memory of GPUs of a node | as another run |
| more stages on a rank, a forward beside a backward | the same pieces in another schedule |
| CUDA graphs, where no stage or size is waited for | a host that takes no time |
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from moecore._fields import NumBytes, check_arguments
from moecore.memory.options import MemoryOptions
from moecore.pipeline.config import PipelineConfig
from moecore.planning.costs import CostTable
from moecore.planning.foldings import TWICE
from moecore.planning.gpus import GPUS
from moecore.planning.levers import has_fp8
from moecore.planning.memory import plan_peak
from moecore.planning.run import TrainingRun
from moecore.planning.times import TimePlan, plan_time
from moecore.precision.roles import Precision

LEAST = 0.01  # of the tokens per second that are worth a change
NO_TIME = 1e-12


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """An option and what it gains.

    Attributes:
        text: the option.
        gain: tokens per second with it over those without, less 1.
    """

    text: str
    gain: float

    def __str__(self) -> str:
        return f"{self.text}: {self.gain:+.0%}"


def next_change(plan: TimePlan, table: CostTable, limit: NumBytes | None = None) -> Change | None:
    """Return the change that gains most tokens per second; None = none of those tried.

    Args:
        plan: of a run.
        table: that it was planned with.
        limit: bytes that a rank may use; None = the GPU's memory.
    """
    check_arguments(next_change, locals())
    limit = GPUS[plan.gpu].memory if limit is None else limit
    found = []
    if _may_be_graphed(plan.run):
        gain = _gain(plan, _without_host(plan, table))
        found.append(Change(text="CUDA graphs, at most", gain=gain))
    for alternatives in _changed(plan):
        for text, run in alternatives:  # the first one that fits
            try:
                if max(plan_peak(run)) <= limit:
                    found.append(Change(text=text, gain=_gain(plan, plan_time(run, table))))
                    break
            except (ValueError, NotImplementedError):  # what the run has refuses it
                continue
    best = max(found, key=lambda change: change.gain, default=None)
    return best if best is not None and best.gain >= LEAST else None


def _may_be_graphed(run: TrainingRun) -> bool:
    """Whether the host waits for nothing within forward and backward."""
    p = run.parallel
    return run.pipeline is None and (p.ep * p.etp == 1 or run.nvlink is not None)


def _gain(plan: TimePlan, other: TimePlan) -> float:
    return other.tokens_per_second / plan.tokens_per_second - 1


def _without_host(plan: TimePlan, table: CostTable) -> TimePlan:
    """Return the plan of a host that launches everything at once."""
    return plan_time(plan.run, replace(table, host_seconds=NO_TIME))


def _changed(plan: TimePlan) -> Iterator[list[tuple[str, TrainingRun]]]:
    """Yield runs with a change, and what it is; of alternatives the largest change first."""
    run, pipeline = plan.run, plan.run.pipeline
    if run.precision is None and has_fp8(run.model, plan.gpu):
        yield [('precision="blockwise"', replace(run, precision=Precision.of("blockwise")))]
    if run.nvlink is None:
        text = f'dispatcher="nvlink", nvlink=NVLinkOptions(row_factor={TWICE.row_factor})'
        with suppress(ValueError):  # where ep * etp ranks share no node
            yield [(text, replace(run, nvlink=TWICE))]
    if run.memory.parts:
        less = [("nothing computed again", replace(run.memory, recompute=()))]
        if run.memory.parts != MemoryOptions(recompute="gemm_last").parts:
            few = replace(run.memory, recompute="gemm_last")
            less.append(('recompute="gemm_last" alone', few))
        yield [(text, replace(run, memory=memory)) for text, memory in less]
    if pipeline is None or pipeline.layout is not None:
        return
    chunks = pipeline.chunks or 1
    more = PipelineConfig(schedule="interleaved", chunks=2 * chunks)
    yield [(f"PipelineConfig(chunks={2 * chunks})", replace(run, pipeline=more))]
    if pipeline.schedule != "overlapped":
        beside = PipelineConfig(schedule="overlapped", chunks=chunks)
        text = 'PipelineConfig(schedule="overlapped")'
        text += ', dispatcher="alltoall"' if run.nvlink is not None else ""
        yield [(text, replace(run, pipeline=beside, nvlink=None))]
