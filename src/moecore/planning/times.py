"""The seconds of a step by limit: `time_step` of a dry run, `plan_time` of a run.

    time_step:  DryRun, CostTable -> start and end of each launch                -> StepTime
    plan_time:  Segments of few layers, CostTable
                    without stages -> queue of all layers                        -> TimePlan
                    with stages    -> seconds of each stage's passes, a Timeline -> TimePlan

A launch starts when the host has queued it and its dependencies have finished. The host queues
launches in order, and waits where it reads a result. It begins a step while the step before still
runs, so the time of a step is the time between the ends of two steps. Concurrent kernels are
assumed not to slow each other. Collectives share the network, so a step or a pass takes at least
the sum of its network seconds.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple

from moecore.base.fields import check_arguments
from moecore.base.options.names import GpuName
from moecore.parallel.pipeline.layout import LayoutCosts, Stage, balanced_layout
from moecore.parallel.pipeline.orders import PAIRING, Item, Overlap, list_actions
from moecore.parallel.pipeline.schedule import make_schedule
from moecore.parallel.pipeline.timeline import Timeline, compute_spans
from moecore.planning.costs import CostTable, Limit
from moecore.planning.dry_run import DryRun
from moecore.planning.gpus import Gpu, check_time_is_modelled
from moecore.planning.record import PASSES, SLICES, Pass, Work
from moecore.planning.run import (
    TrainingRun,
    count_max_parameter_bytes,
    count_state_bytes,
    list_rank_stages,
    list_stages,
)
from moecore.planning.segments import (
    MIDDLE,
    PlacedLaunch,
    SampledRun,
    Segment,
    Segments,
    make_segments,
    map_micro_batches,
    place_launches,
)

Part = Literal[Limit, "host", "bubble"]
Parts = Mapping[Part, float]
# If several parts run at once, the first of them counts, and the others are hidden behind it.
PARTS: tuple[Part, ...] = ("compute", "memory", "launch", "nvlink", "network", "pcie", "host")
MEMORY_ONLY = "; plan its memory with plan_memory"
STEPS = 3  # steps until a step takes as long as the step before it
SHARES = (0.25, 0.5, 0.75, 1.0)  # shares of the seconds of a model's ends, for stage layouts
ROUNDS = 3  # micro-batches of a simulated step over the number of pipeline ranks


@dataclass(frozen=True, slots=True)
class StepTime:
    """The seconds of a rank's step; `parts` are the seconds by limit, such as "memory"."""

    seconds: float  # between the ends of two steps
    parts: Parts  # the seconds by limit, without hidden work

    @property
    def limit(self) -> Part:
        """The limit with most seconds, such as "compute" or "network"."""
        return max(self.parts, key=lambda part: self.parts[part])


@dataclass(frozen=True, kw_only=True, slots=True)
class TimePlan(StepTime):
    """The planned time of a run's step.

    `parts` are the seconds of the pipeline rank with most work. "bubble" is that rank's waiting
    time for other ranks.
    """

    run: TrainingRun
    gpu: GpuName | Gpu  # of the cost table
    timeline: Timeline | None  # in seconds, of the simulated micro-batches; None = no pipeline

    @property
    def tokens_per_gpu_second(self) -> float:
        """Tokens per second of one GPU."""
        p, run = self.run.resolved, self.run
        rows = run.num_gpus // (p.pp * p.tp * p.cp) * run.batch_size * run.num_micro_batches
        return rows * run.seq_len / self.seconds / run.num_gpus

    @property
    def line(self) -> str:
        """The plan's seconds, tokens per second and limits in one line of text."""
        parts = sorted(self.parts.items(), key=lambda item: -item[1])
        shares = ((part, s / self.seconds) for part, s in parts)
        text = ", ".join(f"{part} {share:.0%}" for part, share in shares if share >= 0.005)
        speed = f"{self.seconds:.3g} s a step, {self.tokens_per_gpu_second:,.0f} tokens/s of a GPU"
        return f"{speed}; bottleneck {self.limit}: {text}"


class Spans(NamedTuple):
    """The simulated start, end (seconds) and limit of each launch of a queue."""

    starts: list[float]
    ends: list[float]
    parts: list[Part]

    def find_end(self, num_launches: int) -> float:
        """Return the time at which the first `num_launches` launches of the queue have finished."""
        return max(self.ends[:num_launches], default=0.0)

    def sum_network(self, first_launch: int, end_launch: int) -> float:
        """Return the sum of the network seconds of launches `first_launch` to `end_launch` - 1."""
        return sum(
            self.ends[i] - self.starts[i]
            for i in range(first_launch, end_launch)
            if self.parts[i] == "network"
        )

    def split_seconds(self, start: float, end: float) -> dict[Part, float]:
        """Split `start` to `end` (s) by limit: the first limit of `PARTS` in use, or "host"."""
        edges: list[tuple[float, int, Part]] = []
        for begin, stop, part in zip(*self, strict=True):
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


class PassSeconds(NamedTuple):
    """Seconds of a forward or backward by limit, without hidden work, and of network use."""

    parts: Parts
    network: float


StagePasses = dict[tuple[Pass, int], PassSeconds]  # by pass and micro-batch of the dry run
Memo = dict[object, StagePasses]  # by the starts of a stage's segments


def time_step(step: DryRun, table: CostTable) -> StepTime:
    """Return the time of a rank's step if all ranks are equally fast.

    Raises:
        NotImplementedError: for matmuls whose time on the table's GPU is not modelled.
    """
    check_arguments(time_step, locals())
    check_time_is_modelled(step.precision, table.gpu, MEMORY_ONLY)
    spans = simulate_queue(place_launches(step.queued), table, STEPS)
    before, number = (STEPS - 1) * len(step.queued), STEPS * len(step.queued)
    start, end = spans.find_end(before), spans.find_end(number)
    parts = _extend_network(spans.split_seconds(start, end), spans.sum_network(before, number))
    return StepTime(max(end - start, sum(parts.values())), parts)


def simulate_queue(queue: Sequence[PlacedLaunch], table: CostTable, num_steps: int = 1) -> Spans:
    """Simulate a queue that is launched `num_steps` times; return each launch's span and limit."""

    @cache
    def compute_cost(work: Work, node_ranks: int) -> tuple[float, Part]:
        return table.seconds(work, node_ranks), table.find_limiting_rate(work, node_ranks)

    cost_by_id: dict[int, tuple[float, Part]] = {}
    for key, queued in {id(queued): queued for queued, _, _ in queue}.items():
        seconds, wall = compute_cost(queued.work, queued.node_ranks)
        cost_by_id[key] = queued.times * seconds, wall
    costs = [cost_by_id[id(queued)] for queued, _, _ in queue]
    starts, ends = list[float](), list[float]()
    host = step_start = 0.0
    for _ in range(num_steps):
        first, stream_ends = len(ends), dict[int, float]()
        works = zip(queue, costs, strict=True)
        for i, ((queued, dependencies, host_dependencies), (seconds, _)) in enumerate(works, first):
            for distance in host_dependencies:
                host = max(host, ends[i - distance])
            host += table.host_seconds
            start = max(host, stream_ends.get(queued.stream, step_start))
            for distance in dependencies:
                if ends[i - distance] > start:
                    start = ends[i - distance]
            stream_ends[queued.stream] = end = start + seconds
            starts.append(start)
            ends.append(end)
        step_start = max(ends[first:], default=step_start)
    return Spans(starts, ends, num_steps * [part for _, part in costs])


def plan_time(run: TrainingRun, table: CostTable) -> TimePlan:
    """Return a run's planned step time by a cost table. No GPU, no communication.

    Raises:
        ValueError, NotImplementedError: as `parallelize_moe`, or if a time is not modelled.
    """
    check_arguments(plan_time, locals())
    check_time_is_modelled(run.precision, table.gpu, MEMORY_ONLY)
    segments, timeline, memo = make_segments(run), None, Memo()
    if run.pipeline is None:
        seconds, parts = _time_step_without_pipeline(run, segments, table)
    else:
        seconds, parts, timeline = _time_step_with_pipeline(run, segments, table, memo)
    if run.optimizer.offload_fraction:
        waits = _time_optimizer_state_waits(run, segments, table, memo)
        seconds, parts = seconds + waits, _sum_parts((parts, {"pcie": waits}))
    return TimePlan(run=run, gpu=table.gpu, seconds=seconds, parts=parts, timeline=timeline)


def balance_stages(run: TrainingRun, table: CostTable) -> list[TrainingRun]:
    """Return the run and copies with other pipeline layouts, which balance the stages' times."""
    if run.pipeline is None:
        return [run]
    segments, model = make_segments(run), run.planned_model
    none = Stage(index=0, embedding=False, layers=(), mtp=(), loss=False)

    @cache
    def cost(**parts: Any) -> float:
        """Return the seconds of forward and backward of a stage; `parts` are fields of `Stage`."""
        passes = _time_passes(replace(none, **parts), segments, table)
        return sum(
            sum(passes[direction, segments.num_micro_batches // 2].parts.values())
            for direction in PASSES
        )

    # All layers of a kind between the ends of a model have equal costs.
    kinds = model.layers
    middle = {kind: sorted(i for i, other in enumerate(kinds) if other == kind) for kind in kinds}
    kind_costs = {kind: cost(layers=(ids[len(ids) // 2],)) for kind, ids in middle.items()}
    mtp = tuple(range(model.num_mtp_layers))
    # Pairs of passes hide a part of the ends' seconds, which the plan of each layout shows.
    texts = dict[str, None]()
    for share in SHARES:
        costs = LayoutCosts(
            embedding=share * cost(embedding=True),
            layers=tuple(kind_costs[kind] for kind in kinds),
            mtp=tuple(share * cost(mtp=mtp) / len(mtp) for _ in mtp),
            loss=share * cost(loss=True),
            bound=model.list_bound_layers(),
        )
        texts[balanced_layout(costs, num_stages=len(list_stages(run))).text] = None
    even = run.pipeline
    return [run, *(replace(run, pipeline=replace(even, layout=t, chunks=None)) for t in texts)]


def _time_step_without_pipeline(
    run: TrainingRun, segments: Segments, table: CostTable
) -> tuple[float, Parts]:
    """Return the seconds of a step without a pipeline, and the seconds by limit."""
    # A queue of a few micro-batches is timed. Each further micro-batch takes as long as the last of
    # its middle ones.
    (stage,) = list_stages(run)
    number = min(run.num_micro_batches, MIDDLE + 1)
    queue, counts = list[Segment](), list[int]()
    for i in map_micro_batches(number, segments.num_micro_batches):
        for direction in PASSES:
            queue += segments.list_stage_segments(stage, direction, i)
        counts.append(sum(len(segment.launches) for segment in queue))
    placed_queue = segments.make_queue([*queue, segments.end])
    before, length = (STEPS - 1) * len(placed_queue), len(placed_queue)
    spans = simulate_queue(placed_queue, table, STEPS)
    parts: Parts = spans.split_seconds(spans.find_end(before), spans.find_end(before + length))
    network = spans.sum_network(before, before + length)
    if number < run.num_micro_batches:
        times, first, last = run.num_micro_batches - number, before + counts[1], before + counts[2]
        extra = spans.split_seconds(spans.find_end(first), spans.find_end(last))
        parts = _sum_parts((parts, {part: times * seconds for part, seconds in extra.items()}))
        network += times * spans.sum_network(first, last)
    parts = _extend_network(parts, network)
    return sum(parts.values()), parts


def _time_optimizer_state_waits(
    run: TrainingRun, segments: Segments, table: CostTable, pass_cache: Memo
) -> float:
    """Return the seconds that a step waits for copies of offloaded optimizer state."""
    # The copy to the host overlaps with the blocks of the first forward. The copy back overlaps
    # with the blocks of the last backward, except the first of them. In a pipeline these are the
    # blocks of the first rank.
    numel = count_max_parameter_bytes(run) // run.dtype.itemsize
    num_bytes = int(run.optimizer.offload_fraction * numel * count_state_bytes(run.optimizer))
    copy = table.seconds(Work("copy to host", "copy", 0, num_bytes, (), "uint8"))
    blocks = [replace(stage, embedding=False, loss=False) for stage in list_rank_stages(run)[0]]
    passes = [_time_passes_cached(stage, segments, table, pass_cache) for stage in blocks]
    last = segments.num_micro_batches - 1
    out = sum(sum(of_stage["F", 0].parts.values()) for of_stage in passes)
    back = sum(sum(of_stage["B", last].parts.values()) for of_stage in passes)
    back *= 1 - 1 / sum(len(stage.layers) for stage in blocks)
    return max(0.0, copy - out) + max(0.0, copy - back)


def find_hidden_share(run: TrainingRun, table: CostTable) -> float:
    """Return the fraction of inter-node exchange time that a schedule of paired passes hides."""
    is_paired = run.pipeline is not None and run.pipeline.schedule in PAIRING
    is_across = run.resolved.ep * run.resolved.etp > run.ranks_per_domain
    return table.pairs_hide if is_paired and is_across else 0.0


def has_tp_slices(run: TrainingRun) -> bool:
    """Return whether the run overlaps tp communication with matmuls, slice by slice."""
    return any(queued.work.name in SLICES for queued in SampledRun.from_run(run).segments.queued)


def _time_step_with_pipeline(
    run: TrainingRun, segments: Segments, table: CostTable, pass_cache: Memo
) -> tuple[float, Parts, Timeline]:
    """Return (seconds, seconds by limit, timeline) of a step with a pipeline."""
    assert run.pipeline is not None, "checked by the caller"
    name, pp, stages = run.pipeline.schedule, run.resolved.pp, list_stages(run)
    passes = [_time_passes_cached(stage, segments, table, pass_cache) for stage in stages]
    # Clipping and the optimizer follow the slowest pipeline rank.
    end_spans = simulate_queue(segments.make_queue([segments.end]), table)
    end_seconds = max(end_spans.ends, default=0.0)
    end_parts = end_spans.split_seconds(0.0, end_seconds)
    send, hides = _time_stage_send(run, table), find_hidden_share(run, table)
    timelines: dict[int, Timeline] = {}

    def step(number: int) -> tuple[float, Parts]:
        """Return the seconds of a step of `number` micro-batches, and the seconds by limit."""
        schedule = make_schedule(name, pp=pp, chunks=len(stages) // pp, num_micro_batches=number)
        like = map_micro_batches(number, segments.num_micro_batches)

        @cache
        def parts_of(item: Item) -> Parts:
            """Return the seconds by limit of a scheduled pass, or of two passes that overlap."""
            sums, network = list[Parts](), 0.0
            for kind, stage, i in list_actions(item):
                share = 0.5 if kind in "DW" else 1.0  # D and W are half a backward each
                parts, pass_network = passes[stage]["F" if kind == "F" else "B", like[i]]
                sums.append({part: share * seconds for part, seconds in parts.items()})
                network += share * pass_network
            total = _sum_parts(sums)
            # A pair never takes less than the network seconds of both passes. Dispatcher "nvlink"
            # does not overlap its exchanges with a pair.
            if isinstance(item, Overlap) and hides:
                return _extend_network(_subtract_hidden_network(total, hides), network)
            return total

        spans = compute_spans(schedule, lambda item: sum(parts_of(item).values()), send)
        timelines[number] = timeline = Timeline(spans=spans)
        busiest = max(range(pp), key=lambda rank: timeline.busy[rank])
        parts = _sum_parts(parts_of(span.item) for span in timeline.spans[busiest])
        bubble = timeline.makespan - sum(parts.values())
        return timeline.makespan + end_seconds, _sum_parts((parts, end_parts, {"bubble": bubble}))

    seconds, parts = _extrapolate_step(step, run.num_micro_batches, (ROUNDS - 1) * pp, ROUNDS * pp)
    return seconds, parts, timelines[max(timelines)]


def _extend_network(seconds_by_limit: Parts, network_seconds: float) -> dict[Part, float]:
    """Return seconds by limit whose sum is at least `network_seconds`, by a longer "network"."""
    missing = max(0.0, network_seconds - sum(seconds_by_limit.values()))
    return {**seconds_by_limit, "network": seconds_by_limit.get("network", 0.0) + missing}


def _subtract_hidden_network(seconds_by_limit: Parts, hidden_share: float) -> Parts:
    """Return the seconds with "network" reduced by a share, at most by the other limits' sum."""
    network = seconds_by_limit.get("network", 0.0)
    other_seconds = sum(seconds_by_limit.values()) - network
    return {**seconds_by_limit, "network": network - min(other_seconds, hidden_share * network)}


def _sum_parts(terms: Iterable[Parts]) -> dict[Part, float]:
    """Return the sum of several dicts of seconds by limit."""
    sums: dict[Part, float] = {}
    for parts in terms:
        for part, seconds in parts.items():
            sums[part] = sums.get(part, 0.0) + seconds
    return sums


def _time_passes_cached(
    stage: Stage, segments: Segments, table: CostTable, pass_cache: Memo
) -> StagePasses:
    """Return the seconds of a stage's passes; `pass_cache` has those of equal stages."""
    key = tuple(segment.launches.start for segment in segments.list_stage_segments(stage, "F", 0))
    if key not in pass_cache:
        pass_cache[key] = _time_passes(stage, segments, table)
    return pass_cache[key]


def _time_passes(stage: Stage, segments: Segments, table: CostTable) -> StagePasses:
    """Return {(pass, recorded micro-batch): seconds} of a stage that alternates both passes."""
    passes: StagePasses = {}
    queue: list[Segment] = []
    lengths: list[tuple[tuple[Pass, int], int]] = []
    for i in map_micro_batches(segments.num_micro_batches + 1, segments.num_micro_batches):
        for direction in PASSES:
            queue += segments.list_stage_segments(stage, direction, i)
            lengths.append(((direction, i), sum(len(segment.launches) for segment in queue)))
    spans = simulate_queue(segments.make_queue(queue), table)
    start, before = 0.0, 0
    for key, number in lengths:
        end, network = spans.find_end(number), spans.sum_network(before, number)
        passes[key] = PassSeconds(
            _extend_network(spans.split_seconds(start, end), network), network
        )
        start, before = end, number
    return passes


def _extrapolate_step(
    time_steps: Callable[[int], tuple[float, Parts]], num_micro_batches: int, low: int, high: int
) -> tuple[float, Parts]:
    """Return (seconds, seconds by limit) of a step, linear in the micro-batches above `high`."""
    if num_micro_batches <= high:
        return time_steps(num_micro_batches)
    (seconds, parts), (before, base) = time_steps(high), time_steps(low)
    times = (num_micro_batches - high) / (high - low)
    grown = {part: max(0.0, s + times * (s - base.get(part, 0.0))) for part, s in parts.items()}
    return seconds + times * (seconds - before), grown


def _time_stage_send(run: TrainingRun, table: CostTable) -> float:
    """Return the seconds in which a pipeline stage sends a micro-batch to the next stage."""
    p = run.resolved
    # The values are bf16, and one direction of two is used.
    num_bytes = 2 * 2 * run.batch_size * run.seq_len // (p.cp * p.tp) * run.planned_model.dim
    node_ranks = 1 if run.num_gpus // p.pp >= run.ranks_per_domain else 2
    return table.seconds(Work("send", "collective", 0, num_bytes, (2,), "bfloat16"), node_ranks)
