"""A step in pieces, one per module and pass, from which steps of other depths are put together.

    a dry run of few layers -> Pieces: what the host queues for each module, forward and backward
                            -> queue of any stage and micro-batch

A layer stands for those of its kind that are between the ends (`timed_layers`). The first, a middle
and the last micro-batch of a step differ, because weights arrive in the one and gradients leave in
the other. Work of a piece comes behind what it came behind there: in the piece or in the two before
it what is as far from its start, of earlier ones the newest copy.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from operator import add, attrgetter
from typing import Literal, NamedTuple

from moecore.parallel.pipeline.layout import Stage
from moecore.planning.dry_run import ADAMW, DryRun, dry_run_of_capacity, of_rows
from moecore.planning.record import Pass, Placed, Queued, Start
from moecore.planning.run import OptimizerOptions, TrainingRun
from moecore.planning.stored import SINGLE_STAGE, stages_of, state_bytes, stored_bytes

Likes = Mapping[Literal["F", "B"], Sequence[int]]  # of forward and backward


def timed_layers(run: TrainingRun, num_micro_batches: int) -> tuple[TrainingRun, Likes]:
    """Return a run of few layers on the ranks of one stage, and which is like each layer."""
    # Of the last layer's kind there are the first two and the last two. Of each other kind there is
    # the first, and the first behind one of the last kind, which stands for the others. A layer
    # prefetches for the next but one: so between them a forward is like the second one's and a
    # backward like the last but one's.
    p, kinds = run.resolved, run.planned_model.layers
    if not kinds:  # `parallelize_moe` refuses the model
        return run, {"F": (), "B": ()}
    twins = [i for i, kind in enumerate(kinds) if kind == kinds[-1]]
    ends = {kinds.index(kind) for kind in kinds if kind != kinds[-1]}
    samples = {kinds[i]: i for i in ends}
    samples |= {kinds[i]: i for i in reversed(range(twins[0], len(kinds))) if i not in twins}
    layers = sorted({*ends, *samples.values(), *twins[:2], *twins[-2:]})
    small = replace(
        run,
        model=run.planned_model.with_layers(layers),
        num_gpus=run.num_gpus // p.pp,
        parallel=replace(p, pp=1),
        num_micro_batches=num_micro_batches,
        pipeline=None,
    )

    def like(between: int) -> tuple[int, ...]:
        of = {**samples, kinds[-1]: between}
        return tuple(layers.index(i if i in layers else of[kind]) for i, kind in enumerate(kinds))

    return small, {"F": like(twins[:2][-1]), "B": like(twins[-2:][0])}


MIDDLE = 3  # micro-batches of a dry run: the first, one between, the last


class QueuePiece(NamedTuple):
    """What a step does between two starts."""

    place: range  # from where to where in the queue
    delta: int  # bytes that are allocated more behind it than before it
    rise: int  # most of them within it
    kinds: Mapping[str, int]  # `delta` by kind
    rise_kinds: Mapping[str, int]  # `rise` by kind


def _piece(place: range, start: Start, level: int, kinds: Mapping[str, int]) -> QueuePiece:
    """Return a piece from a start to a level."""
    changes = _difference(kinds, start.kinds), _difference(start.top_kinds, start.kinds)
    return QueuePiece(place, level - start.level, start.top - start.level, *changes)


def _difference(values: Mapping[str, int], base: Mapping[str, int]) -> dict[str, int]:
    return {kind: values.get(kind, 0) - base.get(kind, 0) for kind in {**values, **base}}


class Far(NamedTuple):
    """A place in a piece, and numbers of earlier work that it comes behind too, as `Queued`."""

    place: int
    dependencies: list[int]
    host_dependencies: list[int]


Copy = tuple[list[Placed], list[Far]]


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """A step that was cut."""

    queued: Sequence[Queued]
    resident_bytes: int
    like: Likes  # of each pass, the layer that each layer of the whole model is like
    passes: dict[tuple[int, Pass, str], list[QueuePiece]]  # (micro-batch, pass, part) -> in order
    end: QueuePiece  # clipping and the optimizer

    @classmethod
    def of(cls, queued: Sequence[Queued], starts: Sequence[Start], like: Likes) -> Pieces:
        """Return the pieces between starts; what comes before the first one is that one's."""
        passes: dict[tuple[int, Pass, str], list[QueuePiece]] = {}
        resident_bytes, last = starts[0].level, starts[-1]
        micro_batch, before = -1, "B"
        for i, (start, next_start) in enumerate(pairwise(starts)):
            micro_batch += (before, start.of) == ("B", "F")
            before = start.of
            place = range(start.first if i else 0, next_start.first)
            piece = _piece(place, start, next_start.level, next_start.kinds)
            passes.setdefault((micro_batch, start.of, start.part), []).append(piece)
        end = _piece(range(last.first, len(queued)), last, resident_bytes, starts[0].kinds)
        return cls(queued=queued, resident_bytes=resident_bytes, like=like, passes=passes, end=end)

    @property
    def num_micro_batches(self) -> int:
        """Of the step that was cut."""
        return 1 + max(micro_batch for micro_batch, _, _ in self.passes)

    def of_stage(self, stage: Stage, of: Pass, micro_batch: int) -> list[QueuePiece]:
        """Return the pieces of a stage's pass, in order; the micro-batch is of the cut step."""
        parts = self.parts(stage, of)
        return [piece for part in parts for piece in self.of_part(part, of, micro_batch)]

    def of_part(self, part: str, of: Pass, micro_batch: int) -> Sequence[QueuePiece]:
        """Return the pieces of a part's pass, in order."""
        return self.passes.get((micro_batch, of, part), ())

    def parts(self, stage: Stage, of: Pass) -> list[str]:
        """Return the parts that those of a stage's pass are like, in order."""
        parts = ["embedding"] * stage.embedding
        parts += [f"layer {self.like[of][layer]}" for layer in stage.layers]
        parts += ["predictions"] * bool(stage.mtp) + ["head"] * stage.loss
        return parts[::-1] if of == "B" else parts

    def join(self, pieces: Iterable[QueuePiece]) -> list[Placed]:
        """Return the queue of pieces one after the other."""
        queue: list[Placed] = []
        newest: dict[int, int] = {}  # where a piece starts in `queued` -> in `queue`
        lengths: tuple[int, ...] = ()
        for place in (piece.place for piece in pieces):
            start = len(queue)
            copy, far = self._copy(place, lengths)
            queue += copy
            for i, *numbers in far:
                queued, *near = queue[start + i]
                distances = (self._distances(ids, start + i, newest) for ids in numbers)
                queue[start + i] = Placed(queued, *map(add, near, distances))
            newest[place.start] = start
            lengths = len(place), *lengths[:1]
        return queue

    def _copy(self, place: range, lengths: tuple[int, ...]) -> Copy:
        """Return a piece behind the two pieces (the newest first) of these lengths, made once."""
        if (place, lengths) not in self._copies:
            queue, far = list[Placed](), list[Far]()
            for i in place:
                queued = self.queued[i]
                distances = [
                    {n: self._distance(n, i, place, lengths) for n in numbers}
                    for numbers in (queued.dependencies, queued.host_dependencies)
                ]
                near = (tuple(d for d in places.values() if d is not None) for places in distances)
                queue.append(Placed(queued, *near))
                earlier = ([n for n, d in places.items() if d is None] for places in distances)
                far.append(Far(i - place.start, *earlier))
            far = [item for item in far if item.dependencies or item.host_dependencies]
            self._copies[place, lengths] = queue, far
        return self._copies[place, lengths]

    def _distance(self, number: int, i: int, place: range, lengths: Iterable[int]) -> int | None:
        """Return how far before `i`, in a piece, a number is; None = not in the last pieces."""
        at = i - place.start
        start, end = 0, at
        for length in (0, *lengths):
            start -= length
            if number >= place.start:
                return at - min(start + number - place.start, end - 1)
            place, end = self._before.get(place.start, range(0)), start
        return None

    def _distances(
        self, numbers: Iterable[int], i: int, newest: Mapping[int, int]
    ) -> tuple[int, ...]:
        """Return how far before `i`, in a joined queue, the newest copies of earlier work are."""
        starts = ((n, self._starts[bisect_right(self._starts, n) - 1]) for n in numbers)
        return tuple(i - (newest[start] + n - start) for n, start in starts if start in newest)

    @cached_property
    def _starts(self) -> list[int]:
        """Where pieces start that have work."""
        return sorted(place.start for place in self._places if place)

    @cached_property
    def _before(self) -> dict[int, range]:
        """Start of each piece -> the piece before it."""
        return {place.start: before for before, place in pairwise(self._places)}

    @cached_property
    def _places(self) -> list[range]:
        places = [piece.place for pieces in self.passes.values() for piece in pieces]
        return [*sorted(places, key=attrgetter("start")), self.end.place]

    @cached_property
    def _copies(self) -> dict[tuple[range, tuple[int, ...]], Copy]:
        return {}


def pieces_of(run: TrainingRun) -> Pieces:
    """Return the pieces of a run's step, whose optimizer's state stays on the device."""
    pieces, share = passes_of(run), stored_bytes(run) / stored_bytes(small_of(run))
    states = (state_bytes(of.optimizer, run.dtype) for of in (run, small_of(run)))
    # As `dry_run._moved`.
    traffic, small_traffic = (3 * run.dtype.itemsize + 2 * state for state in states)
    first = pieces.end.place.start
    works = ((queued, queued.work) for queued in pieces.queued[first:])
    shares = {ADAMW: share * traffic / small_traffic}
    end = (
        queued._replace(
            work=replace(work, num_bytes=round(shares.get(work.name, share) * work.num_bytes))
        )
        for queued, work in works
    )
    return replace(pieces, queued=[*pieces.queued[:first], *end])


def passes_of(run: TrainingRun) -> Pieces:
    """Return the pieces of a run's step; the optimizer's is that of few layers."""
    small, like = _small(run)
    step = of_rows(small, _dry_run)
    return Pieces.of(step.queued, step.starts, like)


def small_step(run: TrainingRun) -> DryRun:
    """Return the dry run of few layers for its memory; its work is that of all capacity."""
    return _dry_run(small_of(run))


def memory_pieces_of(run: TrainingRun) -> Pieces:
    """Return the pieces of a run's step for their memory; their work is that of all capacity."""
    step, (_, like) = small_step(run), _small(run)
    return Pieces.of(step.queued, step.starts, like)


def small_of(run: TrainingRun) -> TrainingRun:
    """Return the run of few layers whose pieces those of a run are."""
    return _small(run)[0]


def _small(run: TrainingRun) -> tuple[TrainingRun, Likes]:
    # Where the state lies and in which dtype changes no allocation of a step but the state's own.
    options = OptimizerOptions(master_remainder=run.optimizer.master_remainder)
    plain = replace(run, optimizer=options)
    return timed_layers(plain, min(run.num_micro_batches, MIDDLE))


def timed_stages(run: TrainingRun) -> Sequence[Stage]:
    """Return the stages of a run; of one without, all of its layers."""
    if run.pipeline is not None:
        return stages_of(run)
    model = run.planned_model
    layers, mtp = tuple(range(model.num_layers)), tuple(range(model.num_mtp_layers))
    return [replace(SINGLE_STAGE, layers=layers, mtp=mtp)]


@lru_cache(maxsize=64)
def _dry_run(run: TrainingRun) -> DryRun:
    return dry_run_of_capacity(run)


def like_of(number: int, num_recorded: int) -> list[int]:
    """Return which of the known micro-batches each of a step is like: ends, and all between."""
    if number <= num_recorded:
        return [*range(number - 1), num_recorded - 1] if number > 1 else [0]
    return [0, *[num_recorded // 2] * (number - 2), num_recorded - 1]
