"""A dry run of few layers in segments, from which a step of any depth is put together.

    a dry run of few layers -> Segments: launches and bytes of each module's passes
                            -> the queue of any stage and micro-batch

A segment has the launches and allocations between the starts of two modules. A sampled layer
stands for all layers of its kind (`SampledRun`). The first, a middle and the last micro-batch of
a step are recorded, because the first one all-gathers weights and the last one reduces gradients.
A launch keeps its dependencies on launches of its segment and of the two segments before it, at the
same distance. A dependency on an earlier segment becomes one on the newest copy of that segment.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from operator import attrgetter
from typing import Literal, NamedTuple, Self

from moecore.parallel.pipeline.layout import Stage
from moecore.planning.dry_run import ADAMW, DryRun, record_step, record_with_even_loads
from moecore.planning.record import PartStart, Pass, QueuedLaunch
from moecore.planning.run import (
    OptimizerOptions,
    TrainingRun,
    count_max_parameter_bytes,
    count_state_bytes,
)

MIDDLE = 3  # micro-batches of a dry run: the first, one between, the last
# By pass: the sampled layer that stands for each layer.
SampledLayers = Mapping[Literal["F", "B"], Sequence[int]]


class PlacedLaunch(NamedTuple):
    """A launch in a simulated queue; a dependency n is the launch n positions earlier."""

    queued: QueuedLaunch
    dependencies: tuple[int, ...]
    host_dependencies: tuple[int, ...]


def place_launches(launches: Iterable[QueuedLaunch]) -> list[PlacedLaunch]:
    """Convert launches to a queue: dependencies become distances back to earlier launches."""
    placed = []
    for i, item in enumerate(launches):
        kinds = (item.dependencies, item.host_dependencies)
        placed.append(PlacedLaunch(item, *(tuple(i - n for n in numbers) for numbers in kinds)))
    return placed


class Segment(NamedTuple):
    """A part of a recorded step: its launches and allocations from one `PartStart` to the next."""

    launches: range  # numbers of the recorded launches
    net: int  # change of the allocated bytes
    peak: int  # peak of the allocated bytes over those at its start
    net_kinds: Mapping[str, int]  # `net` by kind
    peak_kinds: Mapping[str, int]  # `peak` by kind


def _make_segment(
    launch_range: range, start: PartStart, end_bytes: int, end_bytes_by_kind: Mapping[str, int]
) -> Segment:
    """Return the segment of these launches that begins at `start`, with the bytes at its end."""
    net_kinds, peak_kinds = (
        {kind: values.get(kind, 0) - start.kinds.get(kind, 0) for kind in {**values, **start.kinds}}
        for values in (end_bytes_by_kind, start.top_kinds)
    )
    return Segment(
        launch_range, end_bytes - start.level, start.top - start.level, net_kinds, peak_kinds
    )


class _FarLaunch(NamedTuple):
    """A launch that depends on launches more than two segments before its segment."""

    at: int  # its index in its segment
    dependencies: list[int]
    host_dependencies: list[int]


_Copy = tuple[list[PlacedLaunch], list[_FarLaunch]]


@dataclass(frozen=True, kw_only=True)
class Segments:
    """A recorded step, divided where the host begins a forward or backward of a module."""

    queued: Sequence[QueuedLaunch]
    resident_bytes: int
    sampled_layers: SampledLayers
    passes: dict[tuple[int, Pass, str], list[Segment]]  # by micro-batch, pass and part, in order
    end: Segment  # clipping and the optimizer
    offloads: Mapping[str, Mapping[str, int]]  # `DryRun.offloads`

    @classmethod
    def from_step(cls, step: DryRun, sampled_layers: SampledLayers) -> Self:
        """Divide a step at its `starts`; the first segment also has all earlier launches."""
        queued, starts = step.queued, step.starts
        passes: dict[tuple[int, Pass, str], list[Segment]] = {}
        resident_bytes, last = starts[0].level, starts[-1]
        micro_batch, before = -1, "B"
        for i, (start, next_start) in enumerate(pairwise(starts)):
            micro_batch += (before, start.direction) == ("B", "F")
            before = start.direction
            launches = range(start.first if i else 0, next_start.first)
            segment = _make_segment(launches, start, next_start.level, next_start.kinds)
            passes.setdefault((micro_batch, start.direction, start.part), []).append(segment)
        end = _make_segment(range(last.first, len(queued)), last, resident_bytes, starts[0].kinds)
        return cls(
            queued=queued,
            resident_bytes=resident_bytes,
            sampled_layers=sampled_layers,
            passes=passes,
            end=end,
            offloads=step.offloads,
        )

    @property
    def num_micro_batches(self) -> int:
        """The number of micro-batches of the recorded step."""
        return 1 + max(micro_batch for micro_batch, _, _ in self.passes)

    def list_stage_segments(
        self, stage: Stage, direction: Pass, micro_batch_idx: int
    ) -> list[Segment]:
        """Return the segments of a stage's pass in a recorded micro-batch, in order."""
        parts = self.list_recorded_modules(stage, direction)
        return [s for p in parts for s in self.list_part_segments(p, direction, micro_batch_idx)]

    def list_part_segments(
        self, part: str, direction: Pass, micro_batch_idx: int
    ) -> Sequence[Segment]:
        """Return the segments of module `part` ("layer 3") in a recorded micro-batch, in order."""
        return self.passes.get((micro_batch_idx, direction, part), ())

    def list_recorded_modules(self, stage: Stage, direction: Pass) -> list[str]:
        """Return the recorded modules ("layer 3") that represent the modules of a stage's pass."""
        parts = ["embedding"] * stage.embedding
        parts += [f"layer {self.sampled_layers[direction][layer]}" for layer in stage.layers]
        parts += ["predictions"] * bool(stage.mtp) + ["head"] * stage.loss
        return parts[::-1] if direction == "B" else parts

    def make_queue(self, segments: Iterable[Segment]) -> list[PlacedLaunch]:
        """Concatenate segments into one launch queue; dependencies are distances in it."""
        queue: list[PlacedLaunch] = []
        newest: dict[int, int] = {}  # first launch of a segment -> index of its newest copy
        lengths: tuple[int, ...] = ()
        for launches in (segment.launches for segment in segments):
            start = len(queue)
            copy, early = self._place_segment(launches, lengths)
            queue += copy
            for i, *numbers in early:
                queued, *near = queue[start + i]
                for kind, dependencies in enumerate(numbers):
                    for n in dependencies:
                        first = self._starts[bisect_right(self._starts, n) - 1]
                        if first in newest:
                            near[kind] += (start + i - (newest[first] + n - first),)
                queue[start + i] = PlacedLaunch(queued, *near)
            newest[launches.start] = start
            lengths = len(launches), *lengths[:1]
        return queue

    def _place_segment(self, launch_range: range, prior_lengths: tuple[int, ...]) -> _Copy:
        """Return a segment as queue entries, and its launches with far dependencies."""
        if (launch_range, prior_lengths) not in self._placed_segments:
            queue, early = list[PlacedLaunch](), list[_FarLaunch]()
            for i in launch_range:
                queued = self.queued[i]
                distances = [
                    {n: self._compute_distance(n, i, launch_range, prior_lengths) for n in numbers}
                    for numbers in (queued.dependencies, queued.host_dependencies)
                ]
                near = (tuple(d for d in by.values() if d is not None) for by in distances)
                queue.append(PlacedLaunch(queued, *near))
                far = [[n for n, d in by.items() if d is None] for by in distances]
                if any(far):
                    early.append(_FarLaunch(i - launch_range.start, *far))
            self._placed_segments[launch_range, prior_lengths] = queue, early
        return self._placed_segments[launch_range, prior_lengths]

    def _compute_distance(
        self, dependency: int, launch: int, launch_range: range, prior_lengths: Iterable[int]
    ) -> int | None:
        """Return the distance in the queue from `launch` back to `dependency`; None = it is far."""
        at = launch - launch_range.start
        start, end = 0, at
        for length in (0, *prior_lengths):
            start -= length
            if dependency >= launch_range.start:
                return at - min(start + dependency - launch_range.start, end - 1)
            launch_range, end = self._preceding_ranges.get(launch_range.start, range(0)), start
        return None

    @cached_property
    def _launch_ranges(self) -> list[range]:
        """The numbers of the launches of each segment, in the order of the recorded step."""
        ranges = [segment.launches for segments in self.passes.values() for segment in segments]
        return [*sorted(ranges, key=attrgetter("start")), self.end.launches]

    @cached_property
    def _starts(self) -> list[int]:
        """The number of the first launch of each segment that is not empty, ascending."""
        return sorted(launches.start for launches in self._launch_ranges if launches)

    @cached_property
    def _preceding_ranges(self) -> dict[int, range]:
        """{first launch of a segment: the launches of the segment before it}."""
        return {launches.start: before for before, launches in pairwise(self._launch_ranges)}

    @cached_property
    def _placed_segments(self) -> dict[tuple[range, tuple[int, ...]], _Copy]:
        """Cache of `_place_segment`."""
        return {}


_run_dry_cached = lru_cache(maxsize=64)(record_step)


class SampledRun(NamedTuple):
    """A run of a few sampled layers, and the sampled layer that represents each layer."""

    run: TrainingRun
    sampled_layers: SampledLayers

    @classmethod
    def from_run(cls, run: TrainingRun) -> Self:
        """Return the run of sampled layers, without a pipeline, that represents a complete run."""
        # The samples of the last layer's kind are its first two and its last two layers. The
        # samples of another kind are its first layer, and its first layer behind a layer of the
        # last kind, which stands for the rest of its kind. A layer prefetches weights of the next
        # but one. So the layers between the samples run forward as the second sample and backward
        # as the third.
        p, kinds = run.resolved, run.planned_model.layers
        if not kinds:  # `parallelize_moe` refuses the model
            return cls(run, {"F": (), "B": ()})
        last_kind = [i for i, kind in enumerate(kinds) if kind == kinds[-1]]
        first = {kinds.index(kind) for kind in kinds if kind != kinds[-1]}
        samples = {kinds[i]: i for i in first}
        samples |= {
            kinds[i]: i for i in reversed(range(last_kind[0], len(kinds))) if i not in last_kind
        }
        layers = sorted({*first, *samples.values(), *last_kind[:2], *last_kind[-2:]})
        small = replace(
            run,
            model=run.planned_model.select_layers(layers),
            num_gpus=run.num_gpus // p.pp,
            parallel=replace(p, pp=1),
            num_micro_batches=min(run.num_micro_batches, MIDDLE),
            pipeline=None,
            # The device and the dtype of the state change no other allocation of a step.
            optimizer=OptimizerOptions(master_remainder=run.optimizer.master_remainder),
        )

        def like(between: int) -> tuple[int, ...]:
            # The last kind's unsampled layers have the sample `between`.
            sample_of = {**samples, kinds[-1]: between}
            return tuple(
                layers.index(i if i in layers else sample_of[k]) for i, k in enumerate(kinds)
            )

        return cls(small, {"F": like(last_kind[:2][-1]), "B": like(last_kind[-2:][0])})

    @property
    def recorded_step(self) -> DryRun:
        """The dry run of the sampled layers; buffers of dispatcher "nvlink" have full capacity."""
        return _run_dry_cached(self.run)

    @property
    def memory_segments(self) -> Segments:
        """The segments of `recorded_step`, from which memory is planned."""
        return Segments.from_step(self.recorded_step, self.sampled_layers)

    @property
    def segments(self) -> Segments:
        """The segments of a step with even loads, from which time is planned."""
        step = record_with_even_loads(self.run, _run_dry_cached)
        return Segments.from_step(step, self.sampled_layers)


def make_segments(run: TrainingRun) -> Segments:
    """Return segments for step times; the optimizer's work is scaled to the complete model."""
    small = SampledRun.from_run(run)
    segments, share = (
        small.segments,
        count_max_parameter_bytes(run) / count_max_parameter_bytes(small.run),
    )
    # As `dry_run._count_optimizer_bytes`.
    traffic, small_traffic = (
        3 * run.dtype.itemsize + 2 * count_state_bytes(r.optimizer) for r in (run, small.run)
    )
    shares, first = {ADAMW: share * traffic / small_traffic}, segments.end.launches.start
    end = []
    for queued in segments.queued[first:]:
        num_bytes = round(shares.get(queued.work.name, share) * queued.work.num_bytes)
        end.append(queued._replace(work=replace(queued.work, num_bytes=num_bytes)))
    return replace(segments, queued=[*segments.queued[:first], *end])


def map_micro_batches(num_micro_batches: int, num_recorded: int) -> list[int]:
    """Return, for each of `num_micro_batches`, the index of the recorded micro-batch to use."""
    if num_micro_batches <= num_recorded:
        return [*range(num_micro_batches - 1), num_recorded - 1] if num_micro_batches > 1 else [0]
    return [0, *[num_recorded // 2] * (num_micro_batches - 2), num_recorded - 1]
