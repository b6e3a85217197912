"""search: SearchRequest -> SearchResult, the parallel layouts of a model over GPUs, fastest first.

    all layouts -> rules refuse some -> sorted by `Estimator` -> the first few are planned, with
    more options that save memory until they fit -> sorted by the time of a step

A rule takes microseconds and a plan takes seconds. A search therefore plans only a few layouts
(`plan_memory`, `plan_time`), and its result counts the other layouts.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from heapq import heapify, heappop, heapreplace
from operator import attrgetter
from typing import Any

from moecore.base.fields import Count, check_arguments
from moecore.base.options.names import GpuName
from moecore.base.options.precision import Precision
from moecore.base.text import format_bytes, format_columns
from moecore.planning.costs import CostTable
from moecore.planning.estimate import Estimator
from moecore.planning.gpus import GPUS, Gpu, check_time_is_modelled, get_gpu
from moecore.planning.layouts import (
    ANY,
    Layout,
    OptionSet,
    Refusal,
    SearchRequest,
    enumerate_layouts,
    find_refusal,
    list_divisors,
    list_option_sets,
    list_schedules,
    list_smaller_option_sets,
    make_run,
)
from moecore.planning.memory import MemoryPlan, plan_memory, plan_peak_memory
from moecore.planning.option_sets import MIN_GAIN
from moecore.planning.recipe import format_flags, list_options
from moecore.planning.run import MAX_GPUS, TrainingRun
from moecore.planning.times import TimePlan, balance_stages, plan_time

PLANS_PER_RESULT = 4  # layouts that are planned for each requested result
MAX_DIVISORS = 64  # of a number of GPUs: layouts of a number with more would take many minutes


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A layout's memory plan with the fastest options that fit, or all options if none fits."""

    layout: Layout
    run: TrainingRun
    options: OptionSet  # that save memory
    peaks: tuple[int, ...]  # the peak bytes of each pipeline rank
    headroom: int  # the limit minus the largest peak; negative if the layout does not fit
    host: int  # the peak bytes of a server's pinned host memory
    host_headroom: int  # the limit of a server's host memory minus `host`

    @property
    def plan(self) -> MemoryPlan:
        """The bytes of each pipeline rank by kind."""
        return plan_memory(self.run)

    @property
    def fits(self) -> bool:
        """Whether every rank fits its GPU, and the ranks of a server fit its host memory."""
        return min(self.headroom, self.host_headroom) >= 0

    @property
    def schedule(self) -> str:
        """The name of the pipeline schedule and the number of stages per rank; "-" = no stages."""
        pipeline, chunks = self.run.pipeline, self.layout.chunks
        return "-" if pipeline is None else f"{pipeline.schedule}{f' x{chunks}' * (chunks > 1)}"

    @property
    def flags(self) -> str:
        """The options that differ from a plain run, as flags of `moecore plan`."""
        return " ".join(format_flags(list_options(self.run))) or "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class FittingCandidate(Candidate):
    """A candidate that fits, with the planned time of a step."""

    time: TimePlan


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """The result of a search: planned layouts, and how many layouts were refused or not planned."""

    request: SearchRequest
    fitting: tuple[FittingCandidate, ...]  # best first
    too_large: tuple[Candidate, ...]  # with all options that save memory
    refused: Mapping[str, int]  # the number of layouts by the rule that refuses them
    num_unplanned: int  # layouts that no rule refused
    change: str | None  # if nothing fits, the smallest change with which a layout fits, if found

    def table(self) -> str:
        """Return a text table with a row per layout that fits."""
        names = ("", "pp", "tp", "cp", "ep", "schedule", "micro-batches", "rows", "options", "peak")
        time_names = ("free", "host memory", "s/step", "tokens/s", "bottleneck")
        lines: list[tuple[str, ...]] = [(*names, *time_names)]
        for i, candidate in enumerate(self.fitting):
            run, time = candidate.run, candidate.time
            degrees = map(str, (i + 1, *candidate.layout[:4]))
            rows = (str(run.num_micro_batches), str(run.batch_size))
            memory = map(format_bytes, (max(candidate.peaks), candidate.headroom, candidate.host))
            speed = (f"{time.seconds:.3g}", f"{time.tokens_per_gpu_second:,.0f}", time.limit)
            lines.append((*degrees, candidate.schedule, *rows, candidate.flags, *memory, *speed))
        return "\n".join(format_columns(lines))


_get_step_seconds: Callable[[FittingCandidate], float] = attrgetter("time.seconds")


def search(
    request: SearchRequest,
    *,
    rank_by: Callable[[FittingCandidate], Any] = _get_step_seconds,
    table: CostTable | None = None,
    num_results: Count = 3,
    max_plans: Count | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> SearchResult:
    """Return the layouts that fit, ranked; if no layout fits, the smallest change to fit one.

    Args:
        request: the model, the GPUs, and the options that may vary.
        rank_by: the sort key of layouts that fit, ascending; all have equal tokens per step.
        table: the costs of operations; None = moecore's table of the GPU.
        num_results: the maximum number of layouts that are returned as fitting.
        max_plans: the maximum number of layouts that are planned; None = four for each result.
        progress: called with a line before each part of the search that takes seconds.

    Raises:
        ValueError: for a number of GPUs that has too many divisors.
        NotImplementedError: for a precision whose time on the GPU is not modelled.
    """
    check_arguments(search, locals())
    _check_time_is_modelled(request)
    table = request.cost_table if table is None else table
    layouts, refused = _list_allowed_layouts(request)
    max_plans = PLANS_PER_RESULT * num_results if max_plans is None else max_plans
    estimator = Estimator(request, table)
    queue = [(estimator.compute_sort_key(layout), layout) for layout in layouts]
    heapify(queue)
    candidates = list[Candidate]()
    while queue and len(candidates) < max_plans:
        key, layout = queue[0]
        if (new_key := estimator.compute_sort_key(layout)) > key:  # plans corrected the estimates
            heapreplace(queue, (new_key, layout))
            continue
        fitting = [c for c in candidates if isinstance(c, FittingCandidate)]
        best_seconds = min(map(_get_step_seconds, fitting), default=math.inf)
        if len(fitting) >= num_results and key >= (False, best_seconds):  # no estimate is faster
            break
        best = f", the best one takes {best_seconds:.3g} s" if fitting else ""
        progress(f"planning {layout}: at most {max_plans - len(candidates)} more layouts{best}")
        try:
            candidate = _plan_estimated_options(request, layout, estimator)
            if candidate is None:
                continue
            heappop(queue)
            if candidate.fits:
                candidate = _find_fastest_schedule(request, candidate, table)
                estimator.correct_time_estimates(layout, candidate.options, candidate.time.seconds)
            candidates.append(candidate)
        except (ValueError, NotImplementedError):
            heappop(queue)
            refused["parallelize_moe"] += 1
    fitting = sorted((c for c in candidates if isinstance(c, FittingCandidate)), key=rank_by)
    for i, candidate in enumerate(fitting[:num_results]):
        number = min(num_results, len(fitting)) - i
        progress(f"reducing memory options of {candidate.layout}: {number} more to go")
        fitting[i] = find_faster_options(request, candidate, table, estimator)
    if not fitting:
        progress("nothing fits: looking for the smallest change")
    return SearchResult(
        request=request,
        fitting=tuple(sorted(fitting[:num_results], key=rank_by)),
        too_large=tuple(candidate for candidate in candidates if not candidate.fits),
        refused=dict(refused),
        num_unplanned=len(layouts) - len(candidates) - refused["parallelize_moe"],
        change=None if fitting else find_smallest_change(request, table),
    )


def _list_allowed_layouts(request: SearchRequest) -> tuple[list[Layout], Counter[str]]:
    """Return the layouts that no rule refuses, and how many layouts each rule refuses."""
    if (number := len(list_divisors(request.num_gpus))) > MAX_DIVISORS:
        raise ValueError(
            f"num_gpus ({request.num_gpus}) must have at most {MAX_DIVISORS} divisors to be "
            f"searched, not {number}: take a multiple of a higher power of 2, or give degrees"
        )
    refusals = {x: find_refusal(request, x) for x in enumerate_layouts(request.num_gpus)}
    layouts = [layout for layout, refusal in refusals.items() if refusal is None]
    return layouts, Counter(refusal.rule for refusal in refusals.values() if refusal is not None)


def _check_time_is_modelled(request: SearchRequest) -> None:
    """Raise a NotImplementedError for a precision whose time is not modelled."""
    precision = request.precision if isinstance(request.precision, Precision) else None
    fix = "plan the memory of one, with degrees such as --ep 8, or search without this precision"
    check_time_is_modelled(precision, request.gpu, f", so layouts cannot be ranked: {fix}")


def find_faster_options(
    request: SearchRequest, fitting: FittingCandidate, table: CostTable, estimator: Estimator
) -> FittingCandidate:
    """Return the fastest of `fitting` and variants with balanced stages or fewer options."""
    runs = balance_stages(fitting.run, table)[1:]
    stage_layouts = (plan_candidate(request, fitting.layout, fitting.options, run) for run in runs)
    balanced = (add_step_time(candidate, table) for candidate in stage_layouts if candidate.fits)
    fitting = min((fitting, *balanced), key=_get_step_seconds)
    best_seconds, tried = fitting.time.seconds, set[OptionSet]()
    while True:
        # FP8 launches and moves more, so only a step that these limit may be faster without FP8.
        gains = fitting.time.limit in ("host", "memory", "launch")
        sets = list_smaller_option_sets(request, fitting.options, includes_gains=gains)
        options = next((options for options in sets if options not in tried), None)
        if options is None:
            return fitting
        tried.add(options)
        num_bytes = estimator.num_bytes(fitting.layout, options)
        if num_bytes - estimator.num_bytes(fitting.layout, fitting.options) > fitting.headroom:
            continue
        run = replace(make_run(request, fitting.layout, options), pipeline=fitting.run.pipeline)
        other = plan_candidate(request, fitting.layout, options, run)
        if not other.fits:
            continue
        candidate = add_step_time(other, table)
        if candidate.time.seconds <= (1 + MIN_GAIN) * best_seconds:
            fitting, best_seconds = candidate, min(best_seconds, candidate.time.seconds)


def _find_fastest_schedule(
    request: SearchRequest, candidate: Candidate, table: CostTable
) -> FittingCandidate:
    """Return the candidate with the fastest schedule that fits, with more options if needed."""
    size, every = len(candidate.options.options), list_option_sets(request)
    sets = [candidate.options, *(options for options in every if len(options.options) > size)]
    plans = [add_step_time(candidate, table)]
    for i, run in enumerate(list_schedules(candidate.run)[1:], 1):
        # More options make no schedule faster, so a slower schedule is not planned with them.
        if plan_time(run, table).seconds >= plans[0].time.seconds:
            continue
        runs = ((s, list_schedules(make_run(request, candidate.layout, s))[i]) for s in sets)
        candidates = (plan_candidate(request, candidate.layout, *pair) for pair in runs)
        fitting = next((c for c in candidates if c.fits), None)
        plans += [] if fitting is None else [add_step_time(fitting, table)]
    return min(plans, key=_get_step_seconds)


def add_step_time(candidate: Candidate, table: CostTable) -> FittingCandidate:
    """Plan the step time of a candidate, and return the candidate as a `FittingCandidate`."""
    values = {field.name: getattr(candidate, field.name) for field in fields(candidate)}
    return FittingCandidate(**values, time=plan_time(candidate.run, table))


def plan_layout(request: SearchRequest, layout: Layout, table: CostTable) -> Refusal | Candidate:
    """Return a layout's refusal, or its plan with the fastest options (all options if none fit)."""
    _check_time_is_modelled(request)
    if (refusal := find_refusal(request, layout)) is not None:
        return refusal
    estimator = Estimator(request, table)
    candidate = plan_fitting_layout(request, layout, estimator)
    if not candidate.fits:
        return candidate
    fitting = _find_fastest_schedule(request, candidate, table)
    return find_faster_options(request, fitting, table, estimator)


def describe_outcome(request: SearchRequest, layout: Layout, outcome: Refusal | Candidate) -> str:
    """Return text: the options with which a layout fits, or why it is refused or too large."""
    if isinstance(outcome, Refusal):
        return f"{layout}: refused ({outcome.rule}): {outcome.reason}"
    usage = f"{format_bytes(max(outcome.peaks))} of {format_bytes(request.max_gpu_bytes)}"
    if isinstance(outcome, FittingCandidate):
        schedule = f"{outcome.schedule}, " if outcome.run.pipeline is not None else ""
        return f"{layout}: fits, {usage}, {schedule}options: {outcome.flags}; {outcome.time.line}"
    if outcome.headroom >= 0:
        host = f"{format_bytes(outcome.host)} of {format_bytes(request.max_host_bytes)}"
        return f"{layout}: too large with all options: the ranks of a server pin {host}"
    largest = outcome.plan.largest
    kind, size = max(largest.device.items(), key=lambda item: item[1])
    return (
        f"{layout}: too large with all options: pipeline rank {largest.pp_rank} needs {usage}, "
        f"most of it {kind} ({format_bytes(size)})"
    )


def plan_fitting_layout(request: SearchRequest, layout: Layout, estimator: Estimator) -> Candidate:
    """Plan a layout with the fastest options that fit, or all if none fits; update `estimator`."""
    while (candidate := _plan_estimated_options(request, layout, estimator)) is None:
        pass
    return candidate


def _plan_estimated_options(
    request: SearchRequest, layout: Layout, estimator: Estimator
) -> Candidate | None:
    """Plan a layout with `estimator`'s options; if too large, correct `estimator`, return None."""
    options = estimator.choose_options(layout)
    candidate = plan_candidate(request, layout, options or list_option_sets(request)[-1])
    if options is None or candidate.fits:
        return candidate
    estimator.raise_byte_estimates(layout, options, max(candidate.peaks), candidate.host)
    return None


def plan_candidate(
    request: SearchRequest, layout: Layout, options: OptionSet, run: TrainingRun | None = None
) -> Candidate:
    """Plan the memory of a layout and option set; `run` None = the run from `make_run`."""
    run = make_run(request, layout, options) if run is None else run
    pins = run.memory.offload or run.optimizer.offload_fraction
    host = plan_memory(run).count_pinned_bytes(get_gpu(request.gpu)) if pins else 0
    peaks = plan_peak_memory(run)
    return Candidate(
        layout=layout,
        run=run,
        options=options,
        peaks=peaks,
        headroom=request.max_gpu_bytes - max(peaks),
        host=host,
        host_headroom=request.max_host_bytes - host,
    )


def find_smallest_change(request: SearchRequest, table: CostTable) -> str | None:
    """Return text of the cheapest change with which a layout fits; None = no change was found."""
    for text, changed in _list_request_changes(request):
        layouts, _ = _list_allowed_layouts(changed)
        estimate, options = Estimator(changed, table).num_bytes, list_option_sets(changed)[-1]
        for layout in sorted(layouts, key=estimate)[:2]:
            is_small = estimate(layout) <= changed.max_gpu_bytes
            if is_small and plan_candidate(changed, layout, options).fits:
                return f"{text}, with {layout}"
    return None


def _list_request_changes(request: SearchRequest) -> Iterator[tuple[str, SearchRequest]]:
    """Yield (description, changed request), cheapest first: options, more GPUs, larger GPUs."""
    open_fields: dict[str, Any] = dict.fromkeys(("memory", "optimizer", "fsdp", "precision"), ANY)
    if any(getattr(request, name) != ANY for name in open_fields):
        yield "leave memory, precision and optimizer open", replace(request, **open_fields)
    rows = request.num_gpus * max(1, request.rows // request.num_gpus)
    if rows != request.rows:
        yield f"{rows} rows of a step", replace(request, global_batch=rows)
    # More of the requested GPUs come before other GPUs, all of which have more memory.
    numbers = (request.num_gpus * 2**n for n in range(1, 7))
    gpus: list[tuple[GpuName | Gpu, int]] = [
        (request.gpu, n) for n in numbers if n <= MAX_GPUS and len(list_divisors(n)) <= MAX_DIVISORS
    ]
    memory = get_gpu(request.gpu).memory
    gpus += [(name, request.num_gpus) for name, gpu in GPUS.items() if gpu.memory > memory]
    for gpu, num_gpus in gpus:
        rows = max(request.rows, num_gpus)
        changed = replace(request, gpu=gpu, num_gpus=num_gpus, global_batch=rows)
        yield f"{num_gpus} {'such GPUs' if isinstance(gpu, Gpu) else gpu}", changed
