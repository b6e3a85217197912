"""SearchRequest -> SearchResult: all foldings of a model over GPUs, refused, planned and ranked.

    divisors of the GPUs -> rules -> most promising first -> levers until it fits -> ranked by time

A folding that a rule refuses costs microseconds, one that is planned some seconds: so few are
planned in full (`plan_memory`, `plan_time`), in the order of the guidelines, and a result has how
many were not. Legality is what `ParallelConfig` and `plan_sharding` refuse; guidelines are the
report's.

Legend of a folding: pp, tp, cp, ep, etp as in `ParallelConfig`; the data ranks are what is left.

Source: arXiv:2603.07685, section 9.1.2.
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
    """A folding that was planned, with the cheapest levers with which it fits, or with all.

    Attributes:
        folding: degrees.
        run: what was planned.
        levers: their last rung.
        peaks: the most bytes that each pipeline rank has at once.
        headroom: bytes of the limit that these leave; negative where it does not fit.
    """

    folding: Folding
    run: TrainingRun
    levers: Levers
    peaks: tuple[int, ...]
    headroom: int

    @property
    def plan(self) -> MemoryPlan:
        """Bytes of each pipeline rank by kind."""
        return plan_memory(self.run)

    @property
    def fits(self) -> bool:
        """Whether every rank fits."""
        return self.headroom >= 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitting(Candidate):
    """A candidate that fits.

    Attributes:
        time: of a step.
    """

    time: TimePlan


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """What was found, and what was not looked at.

    Attributes:
        request: what was asked.
        fitting: foldings that fit, best first.
        too_large: foldings that do not fit with any levers.
        refused: how many foldings each rule refused.
        not_planned: foldings that no rule refused, behind those that were planned.
        change: the smallest change that makes a folding fit, where none does; None = it is not
            needed, or nobody knows one.
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
            lines.append((*numbers, *rows, shown_levers(found), *memory, *_shown_time(found)))
        return "\n".join(columns(lines))


def shown_schedule(found: Candidate) -> str:
    """Return the order of a candidate's stages, and how many a rank has."""
    pipeline, chunks = found.run.pipeline, found.folding.chunks
    return "-" if pipeline is None else f"{pipeline.schedule}{f' x{chunks}' * (chunks > 1)}"


def shown_levers(found: Candidate) -> str:
    """Return what a candidate changes of a plain run, in few words."""
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


def _shown_time(found: Fitting) -> tuple[str, ...]:
    time = found.time
    return f"{time.seconds:.3g}", f"{time.tokens_per_second:,.0f}", time.wall


def by_time(found: Fitting) -> float:
    """Return the seconds of a step: those of a search have the same tokens."""
    return found.time.seconds


def search(
    request: SearchRequest,
    *,
    rank_by: Callable[[Fitting], Any] = by_time,
    table: CostTable | None = None,
    wanted: Count = 3,
    most_planned: Count = 4,
) -> SearchResult:
    """Return foldings that fit, ranked; where none does, the smallest change that helps.

    Args:
        request: what is trained, and what may vary.
        rank_by: sorts those that fit, the least first.
        table: what operations take; None = the one that moecore ships for the GPU.
        wanted: as many that fit with cheap levers are enough.
        most_planned: foldings that are planned in full.
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
    """Return a candidate that fits in the order of its stages that takes least time.

    Less may be computed again or offloaded then, where other levers have made it needless.
    """
    orders = _orders(request, found)
    times = plan_times([other.run for other in orders], table)
    time, best = min(zip(times, orders, strict=True), key=lambda pair: pair[0].seconds)
    eased = _eased(request, best)
    if eased is not best and (less := plan_time(eased.run, table)).seconds < time.seconds:
        time, best = less, eased
    known = {field.name: getattr(best, field.name) for field in fields(found)}
    return Fitting(**known, time=time)


def _eased(request: SearchRequest, found: Candidate) -> Candidate:
    """Return what fits with the memory options of the earliest rung with which it still does."""
    memories = list(dict.fromkeys(rung.memory for rung in rungs_of(request)))
    for memory in reversed(memories[: memories.index(found.run.memory)]):
        levers, run = replace(found.levers, memory=memory), replace(found.run, memory=memory)
        other = _planned(request, found.folding, levers, run)
        if not other.fits:
            break
        found = other
    return found


def _orders(request: SearchRequest, found: Candidate) -> list[Candidate]:
    """Return a candidate in all orders of its stages that fit, with its levers or a few more.

    More levers are those with which a dry run is the same: the optimizer's state on the host.
    """
    rungs = rungs_of(request)
    more = rungs[rungs.index(found.levers) :]
    small, orders = small_of(found.run), [found]
    plain = [run_of(request, found.folding, rung) for rung in more]
    alike = [(run, rung) for run, rung in zip(plain, more, strict=True) if small_of(run) == small]
    for i, _ in enumerate(schedules_of(found.run)[1:], 1):
        for run, rung in alike:
            other = _planned(request, found.folding, rung, schedules_of(run)[i])
            if other.fits:
                orders.append(other)
                break
    return orders


def explain_folding(request: SearchRequest, folding: Folding) -> str:
    """Return in one line why a folding is refused or too large, or with what it fits."""
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
    """Plan a folding with the cheapest levers with which it fits; with all where none suffice.

    Memory falls over the rungs, if not at each of them. From a
    guess the next rungs are tried, else halves of them.

    Args:
        guess: a rung that may be the one.
    """
    rungs, found = rungs_of(request), dict[int, Candidate]()
    low, high = -1, len(rungs)  # a rung that is too large, and one that fits
    at = len(rungs) // 2 if guess is None else rungs.index(guess)
    while high - low > 1:
        found[at] = planned_with(request, folding, rungs[at])
        low, high = (low, at) if found[at].fits else (at, high)
        by_one = at - 1 if found[at].fits else at + 1
        at = (low + high) // 2 if guess is None else by_one
    return found[min(high, len(rungs) - 1)]


def planned_with(request: SearchRequest, folding: Folding, levers: Levers) -> Candidate:
    """Plan a folding with the levers of one rung."""
    return _planned(request, folding, levers, run_of(request, folding, levers))


def _planned(
    request: SearchRequest, folding: Folding, levers: Levers, run: TrainingRun
) -> Candidate:
    peaks = plan_peak(run)
    return Candidate(
        folding=folding,
        run=run,
        levers=levers,
        peaks=peaks,
        headroom=request.limit - max(peaks),
    )


def smallest_change(request: SearchRequest, table: CostTable) -> str | None:
    """Return the cheapest change with which a folding fits; None = none of those tried."""
    for text, changed in _changes(request):
        open_ones = [f for f in foldings(changed.num_gpus) if refuse(changed, f) is None]
        about = Promise(changed, table).num_bytes
        for folding in sorted(open_ones, key=about)[:2]:
            last = rungs_of(changed)[-1]
            if about(folding) <= changed.limit and planned_with(changed, folding, last).fits:
                return f"{text}, with {folding}"
    return None


def _changes(request: SearchRequest) -> Iterator[tuple[str, SearchRequest]]:
    """Yield changes of a request, the cheapest first: free ones, then by the memory rented."""
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
