"""In which order each pipeline rank runs forwards and backwards: `make_schedule`.

    (name, pp, chunks, micro-batches) -> Schedule: orders[rank] = (Action | Overlap, ..)

Every schedule is one generator (`_in_turns`) over one record (`_Turns`) per rank: a sequence of
forwards, a sequence of backwards, how many forwards come first, and then turns of one forward and
one backward. A sequence may have gaps: a rule that needs whole rounds of micro-batches counts those
that are not there, and leaves them out. So every schedule takes any number of micro-batches.

Weight gradients may wait (`D` now, `W` later), so that the next rank gets its gradient sooner and
the end of a step, where ranks wait for each other, has work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, count, zip_longest
from typing import Any, Literal, NamedTuple

from moecore._fields import Count, check_arguments

Kind = Literal["F", "B", "D", "W"]
ScheduleName = Literal[
    "gpipe", "1f1b", "interleaved", "overlapped", "zero-bubble", "zbv", "dualpipe-v"
]


class Action(NamedTuple):
    """One pass of one micro-batch through one stage.

    Attributes:
        kind: F forward, B whole backward, D gradient of inputs, W gradients of weights.
        stage: in the order of forward.
        micro_batch: 0 .. num_micro_batches - 1.
    """

    kind: Kind
    stage: int
    micro_batch: int


class Overlap(NamedTuple):
    """A forward and a backward of two micro-batches, whose layers run side by side."""

    forward: Action
    backward: Action


Item = Action | Overlap


def actions_of(item: Item) -> tuple[Action, ...]:
    """Return the one or two actions of an item of an order, the forward first."""
    return tuple(item) if isinstance(item, Overlap) else (item,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Which rank has which stage, and in which order it runs them.

    Attributes:
        name: as `make_schedule` takes it.
        pp: pipeline ranks.
        num_stages: pp times chunks.
        num_micro_batches: of a step.
        rank_of: the rank of each stage.
        orders: what each rank runs, in order.
    """

    name: str
    pp: int
    num_stages: int
    num_micro_batches: int
    rank_of: tuple[int, ...]
    orders: tuple[tuple[Item, ...], ...]

    def inputs_of(self, action: Action) -> list[Action]:
        """Return what must be complete before an action: of its own stage and of its neighbours.

        A gradient that comes from another stage is named as "D", whether that stage runs D or B.
        """
        kind, stage, micro_batch = action
        if kind == "F":
            return [Action("F", stage - 1, micro_batch)] if stage else []
        if kind == "W":
            return [Action("D", stage, micro_batch)]
        last = stage == self.num_stages - 1
        after = [] if last else [Action("D", stage + 1, micro_batch)]
        return [Action("F", stage, micro_batch), *after]

    def in_time(self) -> Iterator[tuple[int, Item]]:
        """Yield (rank, item) in an order that dependencies allow; stop where every rank waits."""
        done: set[Action] = set()
        position = [0] * self.pp
        moved = True
        while moved:
            moved = False
            for rank, order in enumerate(self.orders):
                while position[rank] < len(order):
                    item = order[position[rank]]
                    actions = actions_of(item)
                    if any(i not in done for action in actions for i in self.inputs_of(action)):
                        break
                    yield rank, item
                    done.update(actions, (a._replace(kind="D") for a in actions if a.kind == "B"))
                    position[rank] += 1
                    moved = True

    def check(self) -> None:
        """Raise unless every pass runs once, on its rank, and no rank waits forever.

        Raises:
            ValueError: of one line, with what is wrong.
        """
        found: dict[tuple[int, int], str] = {}
        for rank, order in enumerate(self.orders):
            for kind, stage, micro_batch in chain.from_iterable(map(actions_of, order)):
                if not (0 <= stage < self.num_stages and self.rank_of[stage] == rank):
                    raise ValueError(f"stage ({stage}) must not run on rank {rank}: fix orders")
                key = stage, micro_batch
                found[key] = found.get(key, "") + kind
        for stage in range(self.num_stages):
            for micro_batch in range(self.num_micro_batches):
                kinds = found.pop((stage, micro_batch), "")
                if sorted(kinds) not in (["B", "F"], ["D", "F", "W"]):
                    raise ValueError(
                        f"passes ({kinds!r}) of stage {stage} and micro-batch {micro_batch} must be"
                        " F and B, or F, D and W, once each: fix orders"
                    )
        if found:
            raise ValueError(
                f"passes ({min(found)}) must be of micro-batches of the step: fix them"
            )
        ran = [0] * self.pp
        for rank, _ in self.in_time():
            ran[rank] += 1
        for rank, order in enumerate(self.orders):
            if ran[rank] < len(order):
                raise ValueError(
                    f"orders ({self.name}) must not wait for each other: rank {rank} never runs "
                    f"{order[ran[rank]]}: move it after what it needs"
                )

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Return the most (stage, micro-batch) at once of each rank, from F to the end of B or W.

        In an overlap the forward's are there before the backward's are freed.
        """
        peaks = []
        for order in self.orders:
            held = peak = 0
            for kind, _, _ in chain.from_iterable(map(actions_of, order)):
                held += (kind == "F") - (kind in "BW")
                peak = max(peak, held)
            peaks.append(peak)
        return tuple(peaks)


def make_schedule(
    name: ScheduleName, *, pp: Count, chunks: Count, num_micro_batches: Count
) -> Schedule:
    """Return the order of each rank.

    | name | chunks | stage s is on rank | what it is |
    |---|---|---|---|
    | gpipe | any | s % pp | all forwards, then all backwards |
    | 1f1b | 1 | s | one forward and one backward in turns |
    | interleaved | any | s % pp | 1F1B over rounds of pp micro-batches |
    | overlapped | any | s % pp | interleaved, one forward more ahead, each turn an `Overlap` |
    | zero-bubble | 1 | s | 1F1B with weight gradients that wait (ZB-H1) |
    | zbv | 2 | min(s, 2 pp - 1 - s) | zero bubble, stages in a V |
    | dualpipe-v | 2 | min(s, 2 pp - 1 - s) | zbv whose turns are `Overlap`s (DualPipeV) |

    Args:
        name: of the schedule.
        pp: pipeline ranks.
        chunks: stages per rank.
        num_micro_batches: of a step, any number.

    Raises:
        ValueError: of one line, when the schedule does not take so many chunks.

    Source: https://arxiv.org/abs/2104.04473 (interleaved), https://arxiv.org/abs/2401.10241
    (zero bubble), https://arxiv.org/abs/2412.19437 (overlapped pairs).
    """
    check_arguments(make_schedule, locals())
    rule = _RULES[name]
    if rule.chunks not in (None, chunks):
        several = "; use 'interleaved' for more" if rule.chunks == 1 else ""
        raise ValueError(
            f"chunks ({chunks}) must be {rule.chunks} for schedule {name!r}: "
            f"pass {rule.chunks}{several}"
        )
    num_stages = pp * chunks
    ranks = [min(s, num_stages - 1 - s) if rule.is_v else s % pp for s in range(num_stages)]
    shapes = (_Shape(pp, chunks, rank, num_micro_batches) for rank in range(pp))
    return Schedule(
        name=name,
        pp=pp,
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        rank_of=tuple(ranks),
        orders=tuple(tuple(_in_turns(rule.turns(shape))) for shape in shapes),
    )


Pass = tuple[int, int] | None  # (stage, micro-batch), or a gap


class _Shape(NamedTuple):
    pp: int
    chunks: int
    rank: int
    num_micro_batches: int


class _Turns(NamedTuple):
    """What one rank runs, see the head of this file.

    Attributes:
        forwards: in order.
        backwards: in order.
        warm_up: how many of the forwards come before the first turn.
        lag: how many weight gradients wait once there are as many, while forwards run; None = no
            backward is split.
        last_lag: likewise after the last forward.
        last_whole: backwards after the last forward that are not split.
        alone: turns before the first one that is an overlap, the backward first; None = no turn
            is an overlap, and the forward is first.
    """

    forwards: Sequence[Pass]
    backwards: Sequence[Pass]
    warm_up: int
    lag: int | None = None
    last_lag: int | None = None
    last_whole: int = 0
    alone: int | None = None


def _in_turns(turns: _Turns) -> Iterator[Item]:
    """Yield the order of one rank."""
    forwards = [Action("F", *pass_) if pass_ else None for pass_ in turns.forwards]
    while forwards and forwards[-1] is None:
        forwards.pop()
    yield from filter(None, forwards[: turns.warm_up])
    waiting: deque[tuple[int, int]] = deque()  # weight gradients
    num_last = 0
    for turn, (forward, backward) in enumerate(
        zip_longest(forwards[turns.warm_up :], turns.backwards)
    ):
        if forward and backward and turns.alone is not None and turn >= turns.alone:
            yield Overlap(forward, Action("B", *backward))
            continue
        is_last = turn >= len(forwards) - turns.warm_up
        lag = turns.last_lag if is_last else turns.lag
        after: list[Action] = []
        if backward:
            num_last += is_last
            if lag is None or (is_last and num_last <= turns.last_whole):
                after.append(Action("B", *backward))
            else:
                after.append(Action("D", *backward))
                waiting.append(backward)
                if len(waiting) > lag:
                    after.append(Action("W", *waiting.popleft()))
        before = [forward] if forward else []
        yield from before + after if turns.alone is None else after + before
    yield from (Action("W", *pass_) for pass_ in waiting)


def _loop(shape: _Shape, *, sizes: Sequence[int], warm_up: int, **options: Any) -> _Turns:
    """Return passes by rounds of micro-batches, in a round chunk by chunk."""

    def passes(chunks: Sequence[int]) -> list[Pass]:
        return [
            (chunk * shape.pp + shape.rank, micro_batch)
            for end, size in zip(accumulate(sizes), sizes, strict=True)
            for chunk in chunks
            for micro_batch in range(end - size, end)
        ]

    order = range(shape.chunks)
    return _Turns(passes(order), passes(order[::-1]), warm_up, **options)


def _gpipe(shape: _Shape) -> _Turns:
    number = shape.num_micro_batches
    return _loop(shape, sizes=[number], warm_up=number * shape.chunks)


def _interleaved(shape: _Shape, *, hop: int, more: int = 0, **options: Any) -> _Turns:
    """Return 1F1B by rounds of at least pp: each rank is `hop` forwards ahead of the next one.

    A round must last until its first micro-batch has passed all ranks, so 11 micro-batches on 4
    ranks are rounds of 6 and 5: shorter ones would wait, longer ones hold more.
    """
    rounds = max(1, shape.num_micro_batches // shape.pp)
    size, longer = divmod(shape.num_micro_batches, rounds)
    sizes = [size + (i < longer) for i in range(rounds)]
    warm_up = (shape.chunks - 1) * sizes[0] + hop * (shape.pp - 1 - shape.rank) + more
    return _loop(shape, sizes=sizes, warm_up=warm_up, **options)


def _v(shape: _Shape, *, more: int = 0, **options: Any) -> _Turns:
    """Return 1F1B over the two stages of a V: stage s runs 2 pp - s forwards ahead."""
    pp, _, rank, num_micro_batches = shape
    steady = [0, 1] * num_micro_batches
    forwards = [0] * (2 * (pp - rank) - 1) + [1, 0] * rank + [1] * (pp - rank) + steady
    backwards = [1] * (pp - rank) + steady

    def passes(chunks: list[int]) -> list[Pass]:
        stages, numbers = (rank, 2 * pp - 1 - rank), (count(), count())
        found = ((stages[chunk], next(numbers[chunk])) for chunk in chunks)
        return [pass_ if pass_[1] < num_micro_batches else None for pass_ in found]

    return _Turns(passes(forwards), passes(backwards), 2 * pp - 1 + more, **options)


class _Rule(NamedTuple):
    """A schedule: which chunks it takes (None = any), its placement and the turns of a rank."""

    chunks: int | None
    is_v: bool
    turns: Callable[[_Shape], _Turns]


_RULES: dict[str, _Rule] = {
    "gpipe": _Rule(None, False, _gpipe),
    "1f1b": _Rule(1, False, lambda shape: _interleaved(shape, hop=1)),
    "interleaved": _Rule(None, False, lambda shape: _interleaved(shape, hop=min(shape.chunks, 2))),
    "overlapped": _Rule(None, False, lambda shape: _interleaved(shape, hop=2, more=1, alone=0)),
    "zero-bubble": _Rule(
        1, False, lambda shape: _interleaved(shape, hop=1, lag=shape.rank, last_lag=shape.rank)
    ),
    "zbv": _Rule(2, True, lambda shape: _v(shape, lag=0, last_lag=2 * shape.rank)),
    "dualpipe-v": _Rule(
        2,
        True,
        lambda shape: _v(
            shape,
            more=1,
            lag=0,
            last_lag=shape.rank,
            last_whole=shape.rank + 1,
            alone=shape.pp - 1 - shape.rank,
        ),
    ),
}
