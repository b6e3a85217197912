"""The seconds of a step, and what limits them: `time_step` of a dry run, `plan_time` of a run.

    time_step:  DryRun, CostTable -> start and end of each piece of work         -> StepTime
    plan_time:  Pieces of few layers, CostTable
                    without stages -> queue of all layers                        -> TimePlan
                    with stages    -> seconds of each stage's passes, a Timeline -> TimePlan

A piece of work starts when the host has queued it and all work before which it must not run has
ended. The host queues pieces in order and waits where it reads a result. It begins a step while the
step before still runs, so the time of a step is the time between the ends of two steps. Work on
several streams is as fast as alone, but a step or a pass takes at least the seconds of all its work
on the network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple

from moecore.base.fields import PositiveOrZero, check_arguments
from moecore.base.options.names import GpuName
from moecore.base.options.precision import Precision
from moecore.parallel.pipeline.layout import LayoutCosts, Stage, balanced_layout
from moecore.parallel.pipeline.orders import PAIRING, Action, Item, Overlap, actions_of
from moecore.parallel.pipeline.schedule import Schedule, make_schedule
from moecore.parallel.pipeline.timeline import Timeline, spans_of
from moecore.planning.costs import CostTable, Wall
from moecore.planning.dry_run import DryRun
from moecore.planning.gpus import Gpu, time_refusal
from moecore.planning.pieces import (
    MIDDLE,
    Pieces,
    QueuePiece,
    like_of,
    passes_of,
    pieces_of,
    timed_stages,
)
from moecore.planning.record import PASSES, SLICES, Pass, Placed, Queued, Work, placed
from moecore.planning.run import TrainingRun
from moecore.planning.stored import SINGLE_STAGE, ranks_of, stages_of, state_bytes, stored_bytes


def simulate(
    schedule: Schedule, seconds_of: Callable[[Item], float], send_seconds: PositiveOrZero = 0.0
) -> Timeline:
    """Return the timeline of a schedule; its `makespan` is the time of the step.

    Each rank runs its items in order. An item waits for the items that it needs, and for the
    message of one on another rank. No rank waits for its own sends.

    Args:
        schedule: the schedule of all ranks.
        seconds_of: returns the seconds of an action, or of an overlap of two as a whole.
        send_seconds: the seconds of a message between ranks: hidden states or their gradient.
    """
    check_arguments(simulate, locals())
    return Timeline(spans=spans_of(schedule, seconds_of, send_seconds))


Part = Literal[Wall, "host", "bubble"]
# If several parts run at once, the first of them counts, and the others are hidden behind it.
PARTS: tuple[Part, ...] = ("compute", "memory", "launch", "nvlink", "network", "pcie", "host")
STEPS = 3  # steps until one takes as long as the one before


@dataclass(frozen=True, slots=True)
class StepTime:
    """The time of a step.

    Attributes:
        seconds: the seconds between the ends of two steps.
        parts: the seconds by limit, without hidden work: "compute" and "memory" rates, "launch" of
            small kernels, links ("nvlink", "network", "pcie"), and the "host".
    """

    seconds: float
    parts: dict[Part, float]

    @property
    def wall(self) -> Part:
        """What limits the largest part."""
        return max(self.parts, key=lambda part: self.parts[part])


class Spans(NamedTuple):
    """Start, end and limit of each piece of work of a queue."""

    starts: list[float]
    ends: list[float]
    parts: list[Part]


def time_step(step: DryRun, table: CostTable) -> StepTime:
    """Return the time of a rank's step, if other ranks are as fast.

    Args:
        step: the work of the step.
        table: the costs of operations.

    Raises:
        NotImplementedError: for products whose time on the table's GPU is not modelled.
    """
    check_arguments(time_step, locals())
    _refuse_untimed(step.precision, table)
    spans = run_queue(placed(step.queued), table, STEPS)
    first, last = (max(spans.ends[: len(step.queued) * n]) for n in (STEPS - 1, STEPS))
    before = (STEPS - 1) * len(step.queued)
    parts = add_network(exposed(spans, first, last), carried(spans, before, len(spans.ends)))
    return StepTime(max(last - first, sum(parts.values())), parts)


def _refuse_untimed(precision: Precision | None, table: CostTable) -> None:
    """Raise a NotImplementedError for products whose time is not modelled."""
    if (refusal := time_refusal(precision, table.gpu)) is not None:
        raise NotImplementedError(f"{refusal}; plan its memory with plan_memory")


def run_queue(queue: Sequence[Placed], table: CostTable, steps: int = 1) -> Spans:
    """Return the spans of consecutive steps, each of which queues the work of `queue` in order."""
    costs = _costs(queue, table)
    starts, ends = list[float](), list[float]()
    host = step_start = 0.0
    for _ in range(steps):
        first, last = len(ends), dict[int, float]()  # ends of streams
        works = zip(queue, costs, strict=True)
        for i, ((queued, dependencies, host_dependencies), (seconds, _)) in enumerate(works, first):
            for distance in host_dependencies:
                host = max(host, ends[i - distance])
            host += table.host_seconds
            start = max(host, last.get(queued.stream, step_start))
            for distance in dependencies:
                if ends[i - distance] > start:
                    start = ends[i - distance]
            last[queued.stream] = end = start + seconds
            starts.append(start)
            ends.append(end)
        step_start = max(ends[first:], default=step_start)
    return Spans(starts, ends, steps * [part for _, part in costs])


def carried(spans: Spans, first: int, last: int) -> float:
    """Return the sum of the network's seconds of the spans from `first` to `last`."""
    triples = zip(
        spans.starts[first:last], spans.ends[first:last], spans.parts[first:last], strict=True
    )
    return sum(end - start for start, end, part in triples if part == "network")


def add_network(parts: Mapping[Part, float], network: float) -> dict[Part, float]:
    """Return parts whose sum is at least the seconds of the network, which streams share."""
    missing = max(0.0, network - sum(parts.values()))
    return {**parts, "network": parts.get("network", 0.0) + missing}


def _costs(queue: Sequence[Placed], table: CostTable) -> list[tuple[float, Part]]:
    """Return (seconds, limit) of each piece of work, computed once for equal work."""
    memo: dict[tuple[Work, int], tuple[float, Part]] = {}

    def cost(queued: Queued) -> tuple[float, Part]:
        key = queued.work, queued.node_ranks
        if key not in memo:
            memo[key] = table.seconds(*key), table.wall(*key)
        seconds, wall = memo[key]
        return queued.times * seconds, wall

    works = {id(queued): queued for queued, _, _ in queue}
    costs = {key: cost(queued) for key, queued in works.items()}
    return [costs[id(queued)] for queued, _, _ in queue]


def exposed(spans: Spans, start: float, end: float) -> dict[Part, float]:
    """Return the seconds in which each part is the first of `PARTS` that runs; "host" if none."""
    edges: list[tuple[float, int, Part]] = []
    for begin, stop, part in zip(*spans, strict=True):
        if begin < end and stop > start:  # calls of min and max would take longer, also below
            edges.append((begin if begin > start else start, 1, part))
            edges.append((stop if stop < end else end, -1, part))
    active, cursor = dict.fromkeys(PARTS, 0), start
    sums: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
    edges.sort()
    for at, change, part in edges:
        if at > cursor:
            for first in PARTS:
                if active[first]:
                    break
            sums[first] += at - cursor
            cursor = at
        active[part] += change
    sums["host"] += max(0.0, end - cursor)
    return sums


SHARES = (0.25, 0.5, 0.75, 1.0)  # of the seconds of a model's ends alone, for layouts
ROUNDS = 3  # micro-batches of a simulated step over the number of pipeline ranks
Parts = Mapping[Part, float]


class Passed(NamedTuple):
    """The seconds of a pass by limit, and those of the network for all that it carries of it."""

    parts: Parts
    network: float


StagePasses = dict[tuple[Pass, int], Passed]  # by pass and micro-batch of the dry run
Passes = Mapping[int, StagePasses]  # by stage
Memo = dict[object, StagePasses]  # by the starts of a stage's pieces


@dataclass(frozen=True, kw_only=True, slots=True)
class TimePlan:
    """The planned time of a run's step.

    Attributes:
        run: the planned run.
        gpu: as the table's.
        seconds: the seconds of a step.
        parts: the seconds by limit, as in `StepTime`, on the pipeline rank that works longest;
            "bubble" is the time in which that rank waits for others.
        timeline: the pipeline's timeline in seconds, of as many micro-batches as were simulated;
            None without a pipeline.
    """

    run: TrainingRun
    gpu: GpuName | Gpu
    seconds: float
    parts: Parts
    timeline: Timeline | None

    @property
    def wall(self) -> Part:
        """What limits the largest part."""
        return max(self.parts, key=lambda part: self.parts[part])

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of one GPU."""
        p, run = self.run.resolved, self.run
        rows = run.num_gpus // (p.pp * p.tp * p.cp) * run.batch_size * run.num_micro_batches
        return rows * run.seq_len / self.seconds / run.num_gpus

    @property
    def line(self) -> str:
        """The plan in one line."""
        shares = (
            f"{part} {share:.0%}"
            for part, s in sorted(self.parts.items(), key=lambda item: -item[1])
            if (share := s / self.seconds) >= 0.005
        )
        return (
            f"{self.seconds:.3g} s a step, {self.tokens_per_second:,.0f} tokens/s of a GPU; the "
            f"wall is {self.wall}: {', '.join(shares)}"
        )


def plan_time(run: TrainingRun, table: CostTable) -> TimePlan:
    """Return the planned time of a run's step, at a table's costs. No GPU, no communication.

    Raises:
        ValueError, NotImplementedError: as `parallelize_moe`, when options do not fit the model.
        NotImplementedError: for products whose time on the table's GPU is not modelled.
    """
    check_arguments(plan_time, locals())
    return plan_times([run], table)[0]


def layouts_of(run: TrainingRun, table: CostTable) -> list[TrainingRun]:
    """Return a run, and with stages the same one with others that balance its ends' seconds."""
    if run.pipeline is None:
        return [run]
    pieces, model = pieces_of(run), run.planned_model
    none = replace(SINGLE_STAGE, embedding=False, loss=False)

    @cache
    def cost(**parts: Any) -> float:
        passes = _passes(replace(none, **parts), pieces, table)
        return sum(sum(passes[of, pieces.num_micro_batches // 2].parts.values()) for of in PASSES)

    # Between the ends of a model all layers of a kind are alike.
    kinds = model.layers
    middle = {kind: sorted(i for i, of in enumerate(kinds) if of == kind) for kind in kinds}
    kind_costs = {kind: cost(layers=(ids[len(ids) // 2],)) for kind, ids in middle.items()}
    mtp = tuple(range(model.num_mtp_layers))
    # Pairs hide more of the ends beside layers than alone: how much, a plan of each layout has.
    texts = dict[str, None]()
    for share in SHARES:
        costs = LayoutCosts(
            embedding=share * cost(embedding=True),
            layers=tuple(kind_costs[kind] for kind in kinds),
            mtp=tuple(share * cost(mtp=mtp) / len(mtp) for _ in mtp),
            loss=share * cost(loss=True),
            bound=model.bound(),
        )
        texts[balanced_layout(costs, num_stages=len(stages_of(run))).text] = None
    even = run.pipeline
    return [run, *(replace(run, pipeline=replace(even, layout=t, chunks=None)) for t in texts)]


def plan_times(runs: Sequence[TrainingRun], table: CostTable) -> list[TimePlan]:
    """Return `plan_time` of runs that differ only in the order of stages or in state offload."""
    memo: Memo = {}
    plans = []
    for run in runs:
        _refuse_untimed(run.precision, table)
        pieces, timeline = pieces_of(run), None
        if run.pipeline is None:
            seconds, parts = _time_unstaged(run, pieces, table)
        else:
            seconds, parts, timeline = _staged(run, pieces, table, memo)
        if run.optimizer.offload_fraction:
            waits = _state_waits(run, pieces, table, memo)
            seconds, parts = seconds + waits, _sum((parts, {"pcie": waits}))
        plan = TimePlan(run=run, gpu=table.gpu, seconds=seconds, parts=parts, timeline=timeline)
        plans.append(plan)
    return plans


def _time_unstaged(run: TrainingRun, pieces: Pieces, table: CostTable) -> tuple[float, Parts]:
    """Return seconds and parts of a step without stages."""
    # A queue of a few micro-batches is timed; each further one takes as long as the last one in the
    # middle of these.
    (stage,) = timed_stages(run)
    number = min(run.num_micro_batches, MIDDLE + 1)
    queue, lengths = list[QueuePiece](), list[int]()
    for i in like_of(number, pieces.num_micro_batches):
        for of in PASSES:
            queue += pieces.of_stage(stage, of, i)
        lengths.append(_length(queue))
    placed_queue = pieces.join([*queue, pieces.end])
    before = (STEPS - 1) * len(placed_queue)
    spans = run_queue(placed_queue, table, STEPS)

    def end(length: int) -> float:
        return max(spans.ends[: before + length])

    start, stop = end(0), end(len(placed_queue))
    parts, network = exposed(spans, start, stop), carried(spans, before, before + len(placed_queue))
    if number < run.num_micro_batches:
        start, stop = end(lengths[1]), end(lengths[2])
        times, extra = run.num_micro_batches - number, exposed(spans, start, stop)
        parts = _sum((parts, {part: times * seconds for part, seconds in extra.items()}))
        network += times * carried(spans, before + lengths[1], before + lengths[2])
    parts = add_network(parts, network)
    return sum(parts.values()), parts


def _state_waits(run: TrainingRun, pieces: Pieces, table: CostTable, memo: Memo) -> float:
    """Return the seconds in which a step waits for the offload of its optimizer's state."""
    # The blocks of the first forward hide the copy out. The blocks of the last backward, except the
    # first of it, hide the copy back. In a pipeline these are the blocks of the first rank.
    numel = stored_bytes(run) // run.dtype.itemsize
    num_bytes = int(run.optimizer.offload_fraction * numel * state_bytes(run.optimizer, run.dtype))
    copy = table.seconds(Work("copy to host", "copy", 0, num_bytes, (), "uint8"))
    stages, rank_of = timed_stages(run), ranks_of(run)
    first_stages = [stage for stage in stages if rank_of[stage.index] == 0]
    blocks = [replace(stage, embedding=False, loss=False) for stage in first_stages]
    passes = _passes_of(blocks, pieces, table, memo)
    out, back = (
        sum(sum(passes[stage.index][end].parts.values()) for stage in blocks)
        for end in (("F", 0), ("B", pieces.num_micro_batches - 1))
    )
    back *= 1 - 1 / sum(len(stage.layers) for stage in blocks)
    return max(0.0, copy - out) + max(0.0, copy - back)


def hidden_share(run: TrainingRun, table: CostTable) -> float:
    """Return the share of a run's exchanges between nodes that pairs hide, as the table assumes."""
    is_paired = run.pipeline is not None and run.pipeline.schedule in PAIRING
    is_across = run.resolved.ep * run.resolved.etp > run.ranks_per_domain
    return table.pairs_hide if is_paired and is_across else 0.0


def has_slices(run: TrainingRun) -> bool:
    """Return whether tp ranks of a run exchange slices beside their products."""
    return any(queued.work.name in SLICES for queued in passes_of(run).queued)


def _staged(
    run: TrainingRun, pieces: Pieces, table: CostTable, memo: Memo
) -> tuple[float, Parts, Timeline]:
    """Return seconds, parts and timeline of a step with stages."""
    assert run.pipeline is not None, "checked by the caller"
    name, pp, stages = run.pipeline.schedule, run.resolved.pp, stages_of(run)
    passes = _passes_of(stages, pieces, table, memo)
    # Clipping and the optimizer follow the slowest pipeline rank.
    end_spans = run_queue(pieces.join([pieces.end]), table)
    end_seconds = max(end_spans.ends, default=0.0)
    end_parts = exposed(end_spans, 0.0, end_seconds)
    send = _send_seconds(run, table)
    hides = hidden_share(run, table)
    timelines: dict[int, Timeline] = {}

    def step(num_micro_batches: int) -> tuple[float, Parts]:
        schedule = make_schedule(
            name, pp=pp, chunks=len(stages) // pp, num_micro_batches=num_micro_batches
        )
        like = like_of(num_micro_batches, pieces.num_micro_batches)

        @cache
        def parts_of(item: Item) -> Parts:
            passed = [_passed(action, passes, like) for action in actions_of(item)]
            sums = _sum(parts for parts, _ in passed)
            # A pair never takes less than the network's seconds for what both passes send. Nothing
            # of dispatcher "nvlink" waits for a pair.
            if isinstance(item, Overlap) and hides:
                return add_network(_hidden(sums, hides), sum(n for _, n in passed))
            return sums

        timeline = simulate(schedule, lambda item: sum(parts_of(item).values()), send)
        timelines[num_micro_batches] = timeline
        busiest = max(range(pp), key=lambda rank: timeline.busy[rank])
        parts = _sum(parts_of(span.item) for span in timeline.spans[busiest])
        bubble = timeline.makespan - sum(parts.values())
        return timeline.makespan + end_seconds, _sum((parts, end_parts, {"bubble": bubble}))

    seconds, parts = _for_all(step, run.num_micro_batches, (ROUNDS - 1) * pp, ROUNDS * pp)
    return seconds, parts, timelines[max(timelines)]


def _passed(action: Action, passes: Passes, like: Sequence[int]) -> Passed:
    """Return the seconds of an action; D and W are half a backward each."""
    of: Pass = "F" if action.kind == "F" else "B"
    share = 0.5 if action.kind in "DW" else 1.0
    parts, network = passes[action.stage][of, like[action.micro_batch]]
    return Passed({part: share * seconds for part, seconds in parts.items()}, share * network)


def _hidden(parts: Parts, share: float) -> Parts:
    """Return parts without the share of the network that all else of a pair hides."""
    network = parts.get("network", 0.0)
    other_seconds = sum(parts.values()) - network
    return {**parts, "network": network - min(other_seconds, share * network)}


def _sum(all_parts: Iterable[Parts]) -> dict[Part, float]:
    sums: dict[Part, float] = {}
    for parts in all_parts:
        for part, seconds in parts.items():
            sums[part] = sums.get(part, 0.0) + seconds
    return sums


def _passes_of(stages: Sequence[Stage], pieces: Pieces, table: CostTable, memo: Memo) -> Passes:
    """Return `_passes` of each stage, computed once for stages with equal pieces."""
    passes = {}
    for stage in stages:
        key = tuple(piece.place.start for piece in pieces.of_stage(stage, "F", 0))
        if key not in memo:
            memo[key] = _passes(stage, pieces, table)
        passes[stage.index] = memo[key]
    return passes


def _passes(stage: Stage, pieces: Pieces, table: CostTable) -> StagePasses:
    """Return seconds by part of a stage's passes, where forwards and backwards alternate."""
    passes: StagePasses = {}
    queue: list[QueuePiece] = []
    ends: list[tuple[tuple[Pass, int], int]] = []
    for i in like_of(pieces.num_micro_batches + 1, pieces.num_micro_batches):
        for of in PASSES:
            queue += pieces.of_stage(stage, of, i)
            ends.append(((of, i), _length(queue)))
    spans = run_queue(pieces.join(queue), table)
    start, before = 0.0, 0
    for key, number in ends:
        end = max(spans.ends[:number], default=0.0)
        network = carried(spans, before, number)
        passes[key] = Passed(add_network(exposed(spans, start, end), network), network)
        start, before = end, number
    return passes


def _length(queue: Iterable[QueuePiece]) -> int:
    return sum(len(piece.place) for piece in queue)


def _for_all(
    step: Callable[[int], tuple[float, Parts]], number: int, low: int, high: int
) -> tuple[float, Parts]:
    """Return seconds and parts of `step(number)`, extrapolated from two steps beyond `high`."""
    if number <= high:
        return step(number)
    (seconds, parts), (before, base) = step(high), step(low)
    times = (number - high) / (high - low)
    grown = {part: max(0.0, s + times * (s - base.get(part, 0.0))) for part, s in parts.items()}
    return seconds + times * (seconds - before), grown


def _send_seconds(run: TrainingRun, table: CostTable) -> float:
    """Return the seconds of a message between stages."""
    p = run.resolved
    # Of bf16, in one direction of two.
    num_bytes = 2 * 2 * run.batch_size * run.seq_len // (p.cp * p.tp) * run.planned_model.dim
    node_ranks = 1 if run.num_gpus // p.pp >= run.ranks_per_domain else 2
    return table.seconds(Work("send", "collective", 0, num_bytes, (2,), "bfloat16"), node_ranks)
