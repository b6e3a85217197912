"""search: SearchRequest -> SearchResult, with the foldings of a model over GPUs, ranked by time.

    divisors of the GPUs -> rules refuse some -> sorted by `Promise` -> the first few: levers are
    added until the folding fits -> ranked by the time of a step

A rule refuses a folding in microseconds, but a plan takes seconds. So only a few foldings are
planned in full (`plan_memory`, `plan_time`), the most promising first, and the result counts the
others. `foldings.py` has the rules, and the legend of a folding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from moecore.base.fields import Count, check_arguments
from moecore.base.tables import columns, shown_bytes
from moecore.planning.costs import CostTable
from moecore.planning.foldings import (
    ANY,
    Folding,
    SearchRequest,
    foldings,
    refuse,
    run_of,
    rungs_of,
    schedules_of,
)
from moecore.planning.gpus import GPUS
from moecore.planning.levers import Levers
from moecore.planning.memory import MemoryPlan, plan_memory, plan_peak
from moecore.planning.pieces import small_of
from moecore.planning.promise import Promise
from moecore.planning.run import TrainingRun
from moecore.planning.times import TimePlan, plan_time, plan_times


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A planned folding, with the cheapest levers with which it fits, or with all levers.

    Attributes:
        folding: the degrees.
        run: the planned run.
        levers: the last rung of the run's levers.
        peaks: the most bytes that each pipeline rank has at once.
        headroom: the limit minus the largest peak; negative if the folding does not fit.
    """

    folding: Folding
    run: TrainingRun
    levers: Levers
    peaks: tuple[int, ...]
    headroom: int

    @property
    def plan(self) -> MemoryPlan:
        """The bytes of each pipeline rank by kind."""
        return plan_memory(self.run)

    @property
    def fits(self) -> bool:
        """Whether every rank fits."""
        return self.headroom >= 0


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
        not_planned: the number of foldings that no rule refused and that were not planned.
        change: the smallest change with which one fits, if none does and a change was found.
    """

    request: SearchRequest
    fitting: tuple[Fitting, ...]
    too_large: tuple[Candidate, ...]
    refused: Mapping[str, int]
    not_planned: int
    change: str | None

    def table(self) -> str:
        """Return a row per folding that fits."""
        names = ("", "pp", "tp", "cp", "ep", "schedule", "micro-batches", "rows", "levers", "bytes")
        lines: list[tuple[str, ...]] = [(*names, "left", "s/step", "tokens/s", "wall")]
        for i, found in enumerate(self.fitting):
            p, run = found.folding, found.run
            numbers = (str(i + 1), *map(str, (p.pp, p.tp, p.cp, p.ep)), shown_schedule(found))
            rows = (str(run.num_micro_batches), str(run.batch_size))
            memory = (shown_bytes(max(found.peaks)), shown_bytes(found.headroom))
            time = found.time
            speed = (f"{time.seconds:.3g}", f"{time.tokens_per_second:,.0f}", time.wall)
            lines.append((*numbers, *rows, shown_levers(found), *memory, *speed))
        return "\n".join(columns(lines))


def shown_schedule(found: Candidate) -> str:
    """Return the order of a candidate's stages, and how many a rank has."""
    pipeline, chunks = found.run.pipeline, found.folding.chunks
    return "-" if pipeline is None else f"{pipeline.schedule}{f' x{chunks}' * (chunks > 1)}"


def shown_levers(found: Candidate) -> str:
    """Return the options of a candidate that differ from a plain run, in few words."""
    run, texts = found.run, []
    if run.precision is not None:
        texts.append(f"fp8 {run.precision.recipe.scaling}")
    if run.memory.parts:
        texts.append("+".join(run.memory.parts).replace("norm+activation+rope", "gemm_last"))
    if run.memory.stash is not None:
        texts.append("pages")
    if run.memory.offload:
        texts.append(f"offload {'+'.join(run.memory.offload)}")
    if run.nvlink is not None:
        factor = run.nvlink.row_factor
        is_number = isinstance(factor, int | float)
        texts.append(f"nvlink, rows x{factor:g}" if is_number else "nvlink")
    if run.fsdp.dense_strategy != "optim":
        texts.append(run.fsdp.dense_strategy)
    if run.optimizer.moment_dtype != "float32":
        texts.append(f"{run.optimizer.moment_dtype} moments")
    if run.optimizer.offload_fraction:
        texts.append("state on host")
    return ", ".join(texts) or "none"


def search(
    request: SearchRequest,
    *,
    rank_by: Callable[[Fitting], Any] = lambda found: found.time.seconds,
    table: CostTable | None = None,
    wanted: Count = 3,
    most_planned: Count = 4,
) -> SearchResult:
    """Return the foldings that fit, ranked; if none fits, the smallest change with which one does.

    Args:
        request: the model and its training, and the options that may vary.
        rank_by: the sort key of foldings that fit, ascending; all have equal tokens per step.
        table: the costs of operations; None = moecore's table of the GPU.
        wanted: the search ends after this number of foldings that fit with cheap levers.
        most_planned: the most foldings that are planned in full.
    """
    check_arguments(search, locals())
    table = CostTable.of(request.gpu) if table is None else table
    refused, open_foldings = Counter[str](), list[Folding]()
    for folding in foldings(request.num_gpus):
        refusal = refuse(request, folding)
        if refusal is None:
            open_foldings.append(folding)
        else:
            refused[refusal.rule] += 1
    promise = Promise(request, table)
    open_foldings.sort(key=promise.key)
    planned, cheap = list[Candidate](), 0
    for folding in open_foldings[:most_planned]:
        try:
            guess = promise.rung(folding) or rungs_of(request)[-1]
            planned.append(fit(request, folding, guess))
        except (ValueError, NotImplementedError):
            refused["parallelize_moe"] += 1
            continue
        cheap += planned[-1].fits and planned[-1].levers.overhead == "low"
        if cheap == wanted:
            break
    fitting = sorted((timed(request, f, table) for f in planned if f.fits), key=rank_by)
    return SearchResult(
        request=request,
        fitting=tuple(fitting),
        too_large=tuple(found for found in planned if not found.fits),
        refused=dict(refused),
        not_planned=len(open_foldings) - len(planned) - refused["parallelize_moe"],
        change=None if fitting else smallest_change(request, table),
    )


def timed(request: SearchRequest, found: Candidate, table: CostTable) -> Fitting:
    """Return a candidate in its fastest order, with less recompute if that is faster."""
    orders = _orders(request, found)
    times = plan_times([other.run for other in orders], table)
    time, best = min(zip(times, orders, strict=True), key=lambda pair: pair[0].seconds)
    eased = _eased(request, best)
    if eased is not best and (less := plan_time(eased.run, table)).seconds < time.seconds:
        time, best = less, eased
    known = {field.name: getattr(best, field.name) for field in fields(found)}
    return Fitting(**known, time=time)


def _eased(request: SearchRequest, found: Candidate) -> Candidate:
    """Return a candidate with the memory options of the earliest rung with which it still fits."""
    memories = list(dict.fromkeys(rung.memory for rung in rungs_of(request)))
    for memory in reversed(memories[: memories.index(found.run.memory)]):
        levers, run = replace(found.levers, memory=memory), replace(found.run, memory=memory)
        other = planned_with(request, found.folding, levers, run)
        if not other.fits:
            break
        found = other
    return found


def _orders(request: SearchRequest, found: Candidate) -> list[Candidate]:
    """Return a candidate in all orders of its stages that fit, with its levers or a few more."""
    rungs = rungs_of(request)
    # More levers are those that leave a dry run the same: the optimizer's state on the host.
    more = rungs[rungs.index(found.levers) :]
    small, orders = small_of(found.run), [found]
    plain = [run_of(request, found.folding, rung) for rung in more]
    alike = [(run, rung) for run, rung in zip(plain, more, strict=True) if small_of(run) == small]
    for i, _ in enumerate(schedules_of(found.run)[1:], 1):
        for run, rung in alike:
            other = planned_with(request, found.folding, rung, schedules_of(run)[i])
            if other.fits:
                orders.append(other)
                break
    return orders


def explain_folding(request: SearchRequest, folding: Folding) -> str:
    """Return one line: why a folding is refused or too large, or the levers with which it fits."""
    check_arguments(explain_folding, locals())
    refusal = refuse(request, folding)
    if refusal is not None:
        return f"{folding}: refused ({refusal.rule}): {refusal.reason}"
    found = fit(request, folding)
    largest = found.plan.largest
    used = f"{shown_bytes(max(found.peaks))} of {shown_bytes(request.limit)}"
    if found.fits:
        best = timed(request, found, CostTable.of(request.gpu))
        used = f"{shown_bytes(max(best.peaks))} of {shown_bytes(request.limit)}"
        order = f"{shown_schedule(best)}, " if best.run.pipeline is not None else ""
        return f"{folding}: fits, {used}, {order}levers: {shown_levers(best)}; {best.time.line}"
    kind, size = max(largest.device.items(), key=lambda item: item[1])
    return (
        f"{folding}: too large: with all levers pipeline rank {largest.pp_rank} holds {used}, "
        f"most of it {kind} ({shown_bytes(size)})"
    )


def fit(request: SearchRequest, folding: Folding, guess: Levers | None = None) -> Candidate:
    """Plan a folding with the cheapest levers with which it fits, or with all if it never fits."""
    # Memory falls from the first rung to the last, if not at each. From a guess the search goes
    # rung by rung; without one it is a binary search.
    rungs, found = rungs_of(request), dict[int, Candidate]()
    low, high = -1, len(rungs)  # a rung that is too large, and one that fits
    at = len(rungs) // 2 if guess is None else rungs.index(guess)
    while high - low > 1:
        found[at] = planned_with(request, folding, rungs[at])
        low, high = (low, at) if found[at].fits else (at, high)
        by_one = at - 1 if found[at].fits else at + 1
        at = (low + high) // 2 if guess is None else by_one
    return found[min(high, len(rungs) - 1)]


def planned_with(
    request: SearchRequest, folding: Folding, levers: Levers, run: TrainingRun | None = None
) -> Candidate:
    """Plan a folding with the levers of one rung, or with a run that differs from theirs."""
    run = run_of(request, folding, levers) if run is None else run
    peaks = plan_peak(run)
    return Candidate(
        folding=folding, run=run, levers=levers, peaks=peaks, headroom=request.limit - max(peaks)
    )


def smallest_change(request: SearchRequest, table: CostTable) -> str | None:
    """Return the cheapest change of a request with which a folding fits; None = none was found."""
    for text, changed in _changes(request):
        open_ones = [f for f in foldings(changed.num_gpus) if refuse(changed, f) is None]
        about = Promise(changed, table).num_bytes
        for folding in sorted(open_ones, key=about)[:2]:
            last = rungs_of(changed)[-1]
            if about(folding) <= changed.limit and planned_with(changed, folding, last).fits:
                return f"{text}, with {folding}"
    return None


def _changes(request: SearchRequest) -> Iterator[tuple[str, SearchRequest]]:
    """Yield changes of a request, the cheapest first: free changes, then by the memory of GPUs."""
    given: dict[str, Any] = dict.fromkeys(("memory", "optimizer", "fsdp", "precision"), ANY)
    if any(getattr(request, name) != ANY for name in given):
        yield "leave memory, precision and optimizer open", replace(request, **given)
    fewer = request.num_gpus * max(1, request.rows // request.num_gpus)
    if fewer != request.rows:
        yield f"{fewer} rows of a step", replace(request, global_batch=fewer)
    node = request.gpus_per_node
    rented = list[tuple[int, str, SearchRequest]]()
    counts = {request.num_gpus, *(max(request.num_gpus, node) * 2**n for n in range(6))}
    for num_gpus in counts:
        for gpu, facts in GPUS.items():
            is_less = facts.memory < GPUS[request.gpu].memory
            if is_less or (gpu, num_gpus) == (request.gpu, request.num_gpus):
                continue
            rows = max(request.rows, num_gpus)
            changed = replace(request, gpu=gpu, num_gpus=num_gpus, global_batch=rows)
            rented.append((num_gpus * facts.memory, f"{num_gpus} {gpu}", changed))
    for _, text, changed in sorted(rented, key=lambda item: item[:2]):
        yield text, changed
