"""search: SearchRequest -> SearchResult, with the foldings of a model over GPUs, ranked by time.

    divisors of the GPUs -> rules refuse some -> sorted by `Estimate` -> the first few: levers are
    added until the folding fits -> ranked by the time of a step

A rule refuses a folding in microseconds, but a plan takes seconds. So only a few foldings are
planned in full (`plan_memory`, `plan_time`), the fastest by an estimate first, and the result
counts the others. `layouts.py` has the rules, and the legend of a folding.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from heapq import heapify, heappop, heapreplace
from typing import Any

from moecore.base.fields import Count, check_arguments
from moecore.base.options.precision import Precision
from moecore.base.tables import columns, shown_bytes
from moecore.planning.costs import CostTable
from moecore.planning.estimate import Estimate
from moecore.planning.gpus import GPUS, Gpu, gpu_of, time_refusal
from moecore.planning.layouts import (
    ANY,
    Folding,
    Refusal,
    SearchRequest,
    divisors,
    fewer_of,
    foldings,
    refuse,
    run_of,
    rungs_of,
    schedules_of,
)
from moecore.planning.memory import MemoryPlan, plan_memory, plan_peak
from moecore.planning.option_sets import MIN_GAIN, Levers
from moecore.planning.run import MAX_GPUS, TrainingRun, lever_flags
from moecore.planning.times import TimePlan, layouts_of, plan_time

PLANS_PER_RESULT = 4  # foldings that are planned for each one that is wanted
MAX_DIVISORS = 64  # of a number of GPUs: the foldings of more would take many minutes


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A planned folding, with the cheapest levers with which it fits, or with all levers.

    Attributes:
        folding: the degrees.
        run: the planned run.
        levers: the last rung of the run's levers.
        peaks: the most bytes that each pipeline rank has at once.
        headroom: the limit minus the largest peak; negative if the folding does not fit.
        host: the most bytes of a server's host memory that are pinned at once.
        host_headroom: its limit minus these.
    """

    folding: Folding
    run: TrainingRun
    levers: Levers
    peaks: tuple[int, ...]
    headroom: int
    host: int
    host_headroom: int

    @property
    def plan(self) -> MemoryPlan:
        """The bytes of each pipeline rank by kind."""
        return plan_memory(self.run)

    @property
    def fits(self) -> bool:
        """Whether every rank fits its GPU, and a server's ranks its host memory."""
        return min(self.headroom, self.host_headroom) >= 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitting(Candidate):
    """A candidate that fits.

    Attributes:
        time: the planned time of a step.
    """

    time: TimePlan


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """The result of a search: planned foldings, and counts of all others.

    Attributes:
        request: the request of the search.
        fitting: foldings that fit, best first.
        too_large: foldings that do not fit with any levers.
        refused: the number of foldings that each rule refused.
        num_unplanned: the number of foldings that no rule refused and that were not planned.
        change: the smallest change with which one fits, if none does and a change was found.
    """

    request: SearchRequest
    fitting: tuple[Fitting, ...]
    too_large: tuple[Candidate, ...]
    refused: Mapping[str, int]
    num_unplanned: int
    change: str | None

    def table(self) -> str:
        """Return a row per folding that fits."""
        names = ("", "pp", "tp", "cp", "ep", "schedule", "micro-batches", "rows", "levers", "bytes")
        time_names = ("left", "host of a node", "s/step", "tokens/s", "wall")
        lines: list[tuple[str, ...]] = [(*names, *time_names)]
        for i, candidate in enumerate(self.fitting):
            p, run = candidate.folding, candidate.run
            numbers = (str(i + 1), *map(str, (p.pp, p.tp, p.cp, p.ep)), shown_schedule(candidate))
            rows = (str(run.num_micro_batches), str(run.batch_size))
            memory = map(shown_bytes, (max(candidate.peaks), candidate.headroom, candidate.host))
            time = candidate.time
            speed = (f"{time.seconds:.3g}", f"{time.tokens_per_second:,.0f}", time.wall)
            lines.append((*numbers, *rows, shown_levers(candidate), *memory, *speed))
        return "\n".join(columns(lines))


def shown_schedule(candidate: Candidate) -> str:
    """Return the order of a candidate's stages, and how many a rank has."""
    pipeline, chunks = candidate.run.pipeline, candidate.folding.chunks
    return "-" if pipeline is None else f"{pipeline.schedule}{f' x{chunks}' * (chunks > 1)}"


def shown_levers(candidate: Candidate) -> str:
    """Return the options of a candidate that differ from a plain run, as flags."""
    return " ".join(lever_flags(candidate.run)) or "none"


def _seconds_of(candidate: Fitting) -> float:
    return candidate.time.seconds


def search(
    request: SearchRequest,
    *,
    rank_by: Callable[[Fitting], Any] = _seconds_of,
    table: CostTable | None = None,
    num_results: Count = 3,
    max_plans: Count | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> SearchResult:
    """Return the foldings that fit, ranked; if none fits, the smallest change with which one does.

    Args:
        request: the model and its training, and the options that may vary.
        rank_by: the sort key of foldings that fit, ascending; all have equal tokens per step.
        table: the costs of operations; None = moecore's table of the GPU.
        num_results: how many of the fastest are planned with fewer levers and with balanced stages.
        max_plans: the most foldings that are planned at all; None = four for each wanted one.
        progress: called with a line before each step of the search that takes seconds.

    Raises:
        ValueError: for a number of GPUs that has too many divisors.
        NotImplementedError: for a precision whose time on the GPU is not modelled.
    """
    check_arguments(search, locals())
    _refuse_untimed(request)
    table = request.costs if table is None else table
    open_foldings, refused = _open_foldings(request)
    max_plans = PLANS_PER_RESULT * num_results if max_plans is None else max_plans
    estimate = Estimate(request, table)
    queue = [(estimate.key(folding), folding) for folding in open_foldings]
    heapify(queue)
    candidates = list[Candidate]()
    while queue and len(candidates) < max_plans:
        key, folding = queue[0]
        if (new_key := estimate.key(folding)) > key:  # as plans have corrected it
            heapreplace(queue, (new_key, folding))
            continue
        fitting = [c for c in candidates if isinstance(c, Fitting)]
        best_seconds = min(map(_seconds_of, fitting), default=math.inf)
        if len(fitting) >= num_results and key >= (False, best_seconds):  # no estimate is faster
            break
        best = f", the best one takes {best_seconds:.3g} s" if fitting else ""
        progress(f"planning {folding}: at most {max_plans - len(candidates)} foldings more{best}")
        try:
            candidate = _planned_as_estimated(request, folding, estimate)
            if candidate is None:
                continue
            heappop(queue)
            if candidate.fits:
                candidate = min(_orders(request, candidate, table), key=_seconds_of)
                estimate.learn_seconds(folding, candidate.levers, candidate.time.seconds)
            candidates.append(candidate)
        except (ValueError, NotImplementedError):
            heappop(queue)
            refused["parallelize_moe"] += 1
    fitting = sorted((c for c in candidates if isinstance(c, Fitting)), key=rank_by)
    for i, candidate in enumerate(fitting[:num_results]):
        number = min(num_results, len(fitting)) - i
        progress(f"easing {candidate.folding}: {number} foldings are left")
        fitting[i] = eased(request, candidate, table, estimate)
    if not fitting:
        progress("nothing fits: looking for the smallest change")
    return SearchResult(
        request=request,
        fitting=tuple(sorted(fitting[:num_results], key=rank_by)),
        too_large=tuple(candidate for candidate in candidates if not candidate.fits),
        refused=dict(refused),
        num_unplanned=len(open_foldings) - len(candidates) - refused["parallelize_moe"],
        change=None if fitting else smallest_change(request, table),
    )


def _open_foldings(request: SearchRequest) -> tuple[list[Folding], Counter[str]]:
    """Return the foldings that no rule refuses, and how many each rule refuses."""
    if (number := len(divisors(request.num_gpus))) > MAX_DIVISORS:
        raise ValueError(
            f"num_gpus ({request.num_gpus}) must have at most {MAX_DIVISORS} divisors to be "
            f"searched, not {number}: take a multiple of a higher power of 2, or give degrees"
        )
    refused, open_foldings = Counter[str](), list[Folding]()
    for folding in foldings(request.num_gpus):
        refusal = refuse(request, folding)
        if refusal is None:
            open_foldings.append(folding)
        else:
            refused[refusal.rule] += 1
    return open_foldings, refused


def _refuse_untimed(request: SearchRequest) -> None:
    """Raise a NotImplementedError for a precision whose time is not modelled."""
    if isinstance(request.precision, Precision):
        refusal = time_refusal(request.precision, request.gpu)
        if refusal is not None:
            raise NotImplementedError(
                f"{refusal}, so foldings cannot be ranked: plan the memory of one, with degrees "
                "such as --ep 8, or search without this precision"
            )


def eased(request: SearchRequest, best: Fitting, table: CostTable, estimate: Estimate) -> Fitting:
    """Return a candidate with balanced stages and fewer levers, where that is faster."""
    best = min(_layouts(request, best, table), key=_seconds_of)
    best_seconds, tried = best.time.seconds, set[Levers]()

    def less_of(plan: Fitting) -> Levers | None:
        # FP8 launches and moves more, so only a step that waits for these may be faster without.
        sets = fewer_of(request, plan.levers, gains=plan.time.wall in ("host", "memory", "launch"))
        return next((levers for levers in sets if levers not in tried), None)

    while (fewer_levers := less_of(best)) is not None:
        tried.add(fewer_levers)
        about = estimate.num_bytes(best.folding, fewer_levers)
        if about - estimate.num_bytes(best.folding, best.levers) > best.headroom:
            continue
        run = replace(run_of(request, best.folding, fewer_levers), pipeline=best.run.pipeline)
        other = planned_with(request, best.folding, fewer_levers, run)
        if not other.fits:
            continue
        candidate = timed(other, table)
        if candidate.time.seconds <= (1 + MIN_GAIN) * best_seconds:
            best, best_seconds = candidate, min(best_seconds, candidate.time.seconds)
    return best


def _layouts(request: SearchRequest, candidate: Fitting, table: CostTable) -> Iterator[Fitting]:
    """Yield a candidate with each layout of its stages with which it fits."""
    yield candidate
    for run in layouts_of(candidate.run, table)[1:]:
        other = planned_with(request, candidate.folding, candidate.levers, run)
        if other.fits:
            yield timed(other, table)


def _orders(request: SearchRequest, candidate: Candidate, table: CostTable) -> Iterator[Fitting]:
    """Yield a candidate in the orders of its stages that may be fastest, each as it fits."""
    rungs = _larger(request, candidate.levers)
    first = timed(candidate, table)
    yield first
    for i, order in enumerate(schedules_of(candidate.run)[1:], 1):
        # With more levers no order is faster than with these, at which no other order is planned.
        if plan_time(order, table).seconds >= first.time.seconds:
            continue
        for rung in rungs:
            run = schedules_of(run_of(request, candidate.folding, rung))[i]
            other = planned_with(request, candidate.folding, rung, run)
            if other.fits:
                yield timed(other, table)
                break


def timed(candidate: Candidate, table: CostTable) -> Fitting:
    """Return a candidate with the time of its step."""
    values = {field.name: getattr(candidate, field.name) for field in fields(candidate)}
    return Fitting(**values, time=plan_time(candidate.run, table))


def explain_folding(request: SearchRequest, folding: Folding) -> str:
    """Return one line: why a folding is refused or too large, or the levers with which it fits."""
    check_arguments(explain_folding, locals())
    return explained(request, folding, plan_folding(request, folding, request.costs))


def plan_folding(request: SearchRequest, folding: Folding, table: CostTable) -> Refusal | Candidate:
    """Return why a folding is refused, or its plan: fitting with the fastest levers, or not."""
    _refuse_untimed(request)
    refusal = refuse(request, folding)
    if refusal is not None:
        return refusal
    estimate = Estimate(request, table)
    candidate = fit(request, folding, estimate)
    if not candidate.fits:
        return candidate
    best = min(_orders(request, candidate, table), key=_seconds_of)
    return eased(request, best, table, estimate)


def explained(request: SearchRequest, folding: Folding, outcome: Refusal | Candidate) -> str:
    """Return what was planned of a folding in one line."""
    if isinstance(outcome, Refusal):
        return f"{folding}: refused ({outcome.rule}): {outcome.reason}"
    usage = f"{shown_bytes(max(outcome.peaks))} of {shown_bytes(request.limit)}"
    if isinstance(outcome, Fitting):
        order = f"{shown_schedule(outcome)}, " if outcome.run.pipeline is not None else ""
        return (
            f"{folding}: fits, {usage}, {order}levers: {shown_levers(outcome)}; {outcome.time.line}"
        )
    if outcome.headroom >= 0:
        host = f"{shown_bytes(outcome.host)} of {shown_bytes(request.host_limit)}"
        return f"{folding}: too large: with all levers a server's ranks pin {host} of its memory"
    largest = outcome.plan.largest
    kind, size = max(largest.device.items(), key=lambda item: item[1])
    return (
        f"{folding}: too large: with all levers pipeline rank {largest.pp_rank} holds {usage}, "
        f"most of it {kind} ({shown_bytes(size)})"
    )


def fit(request: SearchRequest, folding: Folding, estimate: Estimate) -> Candidate:
    """Plan a folding with levers whose estimate is fastest and that fit, or with all."""
    while (candidate := _planned_as_estimated(request, folding, estimate)) is None:
        pass
    return candidate


def _planned_as_estimated(
    request: SearchRequest, folding: Folding, estimate: Estimate
) -> Candidate | None:
    """Plan a folding with the levers of its estimate; None = too large, and that has changed."""
    levers = estimate.levers(folding)
    candidate = planned_with(request, folding, levers or rungs_of(request)[-1])
    if levers is None or candidate.fits:
        return candidate
    estimate.learn(folding, levers, max(candidate.peaks), candidate.host)
    return None


def _larger(request: SearchRequest, levers: Levers) -> list[Levers]:
    """Return levers, and rungs that have an option more than these."""
    rungs = rungs_of(request)
    return [levers, *(rung for rung in rungs if len(rung.options) > len(levers.options))]


def planned_with(
    request: SearchRequest, folding: Folding, levers: Levers, run: TrainingRun | None = None
) -> Candidate:
    """Plan a folding with the levers of one rung, or with a run that differs from theirs."""
    run = run_of(request, folding, levers) if run is None else run
    pins = run.memory.offload or run.optimizer.offload_fraction
    host = plan_memory(run).pinned_bytes(gpu_of(request.gpu)) if pins else 0
    peaks = plan_peak(run)
    return Candidate(
        folding=folding,
        run=run,
        levers=levers,
        peaks=peaks,
        headroom=request.limit - max(peaks),
        host=host,
        host_headroom=request.host_limit - host,
    )


def smallest_change(request: SearchRequest, table: CostTable) -> str | None:
    """Return the cheapest change of a request with which a folding fits; None = none was found."""
    for text, changed in _changes(request):
        open_foldings = [f for f in foldings(changed.num_gpus) if refuse(changed, f) is None]
        about = Estimate(changed, table).num_bytes
        for folding in sorted(open_foldings, key=about)[:2]:
            last = rungs_of(changed)[-1]
            if about(folding) <= changed.limit and planned_with(changed, folding, last).fits:
                return f"{text}, with {folding}"
    return None


def _changes(request: SearchRequest) -> Iterator[tuple[str, SearchRequest]]:
    """Yield changes of a request, the cheapest first: free ones, more GPUs, larger GPUs."""
    open_fields: dict[str, Any] = dict.fromkeys(("memory", "optimizer", "fsdp", "precision"), ANY)
    if any(getattr(request, name) != ANY for name in open_fields):
        yield "leave memory, precision and optimizer open", replace(request, **open_fields)
    fewer = request.num_gpus * max(1, request.rows // request.num_gpus)
    if fewer != request.rows:
        yield f"{fewer} rows of a step", replace(request, global_batch=fewer)
    facts = gpu_of(request.gpu)
    larger = (gpu for gpu in GPUS if GPUS[gpu].memory > facts.memory)
    # More of the GPUs that were asked for come before others, all of which have more memory.
    numbers = (request.num_gpus * 2**n for n in range(1, 7))
    gpus = [(request.gpu, n) for n in numbers if n <= MAX_GPUS and len(divisors(n)) <= MAX_DIVISORS]
    for gpu, num_gpus in [*gpus, *((gpu, request.num_gpus) for gpu in larger)]:
        rows = max(request.rows, num_gpus)
        changed = replace(request, gpu=gpu, num_gpus=num_gpus, global_batch=rows)
        name = "such GPUs" if isinstance(gpu, Gpu) else gpu
        yield f"{num_gpus} {name}", changed
