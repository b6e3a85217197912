"""The order of one pipeline rank's actions: each schedule is a function from `Shape` to `Turns`.

    Shape (pp, chunks, rank, micro-batches) -> Turns -> Action or Overlap, ..

`Turns` has a sequence of forwards, a sequence of backwards, and the number of warm-up forwards.
Forwards and backwards alternate after the warm-up. None in a sequence is a gap, for a micro-batch
that the rule counts but the step does not have, so a step can have any number of micro-batches. A
backward can be split: `D` computes input gradients and `W`, later, weight gradients. The previous
stage then receives its gradient sooner, and `W` fills the bubble at the end of a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, count, zip_longest
from typing import Any, Literal, NamedTuple

Kind = Literal["F", "B", "D", "W"]


class Action(NamedTuple):
    """A forward (F), backward (B), or the input (D) or weight (W) gradients of a backward."""

    kind: Kind  # F forward, B backward, D gradients of inputs, W gradients of weights
    stage: int  # index of the virtual stage, in the order of forward
    micro_batch: int  # 0 .. num_micro_batches - 1


class Overlap(NamedTuple):
    """A pair of a forward and a backward of different micro-batches that run concurrently."""

    forward: Action
    backward: Action


Item = Action | Overlap


def list_actions(item: Item) -> tuple[Action, ...]:
    """Return the actions of an item: (forward, backward) of an `Overlap`, otherwise (item,)."""
    return tuple(item) if isinstance(item, Overlap) else (item,)


Pass = tuple[int, int] | None  # (stage, micro-batch); None = a gap


class Shape(NamedTuple):
    """Sizes of a pipeline: ranks, stages per rank (chunks), this rank, number of micro-batches."""

    pp: int
    chunks: int
    rank: int
    num_micro_batches: int


class Turns(NamedTuple):
    """One rank's forwards and backwards, each in order, and the numbers that interleave them."""

    forwards: Sequence[Pass]
    backwards: Sequence[Pass]
    warm_up: int  # forwards before the first backward
    # Largest number of pending W while forwards remain. None = backwards are not split.
    lag: int | None = None
    last_lag: int | None = None  # largest number of pending W after the last forward
    num_unsplit_last: int = 0  # backwards after the last forward that are not split
    # Turns before the first `Overlap`; in other turns the backward is first. None = no turn is an
    # `Overlap`, and the forward is first.
    first_pair: int | None = None


def make_order(turns: Turns) -> Iterator[Item]:
    """Yield a rank's items (`Action` or `Overlap`) in the order in which the rank runs them."""
    forwards = [Action("F", *pass_) if pass_ else None for pass_ in turns.forwards]
    while forwards and forwards[-1] is None:
        forwards.pop()
    yield from filter(None, forwards[: turns.warm_up])
    weight_grads: deque[tuple[int, int]] = deque()  # pending W
    num_last = 0
    pairs = zip_longest(forwards[turns.warm_up :], turns.backwards)
    for turn, (forward, backward) in enumerate(pairs):
        if forward and backward and turns.first_pair is not None and turn >= turns.first_pair:
            yield Overlap(forward, Action("B", *backward))
            continue
        is_last = turn >= len(forwards) - turns.warm_up
        lag = turns.last_lag if is_last else turns.lag
        back: list[Action] = []
        if backward:
            num_last += is_last
            if lag is None or (is_last and num_last <= turns.num_unsplit_last):
                back.append(Action("B", *backward))
            else:
                back.append(Action("D", *backward))
                weight_grads.append(backward)
                if len(weight_grads) > lag:
                    back.append(Action("W", *weight_grads.popleft()))
        actions = [forward] if forward else []
        yield from actions + back if turns.first_pair is None else back + actions
    yield from (Action("W", *pass_) for pass_ in weight_grads)


def _make_loop_turns(shape: Shape, *, rounds: Sequence[int], warm_up: int, **options: Any) -> Turns:
    """Return the passes, chunk after chunk, in rounds of `rounds[i]` micro-batches."""

    def passes(chunks: Sequence[int]) -> list[Pass]:
        return [
            (chunk * shape.pp + shape.rank, micro_batch)
            for end, size in zip(accumulate(rounds), rounds, strict=True)
            for chunk in chunks
            for micro_batch in range(end - size, end)
        ]

    order = range(shape.chunks)
    return Turns(passes(order), passes(order[::-1]), warm_up, **options)


def _make_interleaved_turns(
    shape: Shape, *, warm_up_step: int, num_extra: int = 0, **options: Any
) -> Turns:
    """Return the turns of interleaved 1F1B, in rounds of at least pp micro-batches.

    Each rank runs `warm_up_step` more warm-up forwards than the next rank, and `num_extra` more.
    """
    # In one turn a forward moves one rank up and a backward one rank down, so neighbours are two
    # turns apart; with one chunk a distance of one is enough. The first micro-batch of a round
    # must pass all ranks before the round ends: 11 micro-batches on 4 ranks are rounds of 6 and 5.
    # Shorter rounds would wait, and longer rounds need more memory.
    rounds = max(1, shape.num_micro_batches // shape.pp)
    size, longer = divmod(shape.num_micro_batches, rounds)
    sizes = [size + (i < longer) for i in range(rounds)]
    warm_up = (shape.chunks - 1) * sizes[0] + warm_up_step * (shape.pp - 1 - shape.rank) + num_extra
    return _make_loop_turns(shape, rounds=sizes, warm_up=warm_up, **options)


def _make_v_turns(shape: Shape, *, num_extra: int = 0, **options: Any) -> Turns:
    """Return the turns of 1F1B if rank r has the stages r and 2 pp - 1 - r (V-shaped).

    Stage s runs 2 pp - s forwards before its first backward, and each rank `num_extra` more.
    """
    pp, _, rank, num_micro_batches = shape
    steady = [0, 1] * num_micro_batches
    forwards = [0] * (2 * (pp - rank) - 1) + [1, 0] * rank + [1] * (pp - rank) + steady
    backwards = [1] * (pp - rank) + steady

    def passes(chunks: list[int]) -> list[Pass]:
        stages, numbers = (rank, 2 * pp - 1 - rank), (count(), count())
        pairs = ((stages[chunk], next(numbers[chunk])) for chunk in chunks)
        return [pass_ if pass_[1] < num_micro_batches else None for pass_ in pairs]

    return Turns(passes(forwards), passes(backwards), 2 * pp - 1 + num_extra, **options)


class Rule(NamedTuple):
    """The rule of a named schedule: stages per rank (None = any), V shape, function for `Turns`."""

    chunks: int | None
    is_v: bool
    turns: Callable[[Shape], Turns]


RULES: dict[str, Rule] = {
    "gpipe": Rule(  # all forwards are warm-up
        None,
        False,
        lambda shape: _make_loop_turns(
            shape, rounds=[shape.num_micro_batches], warm_up=shape.num_micro_batches * shape.chunks
        ),
    ),
    "1f1b": Rule(1, False, lambda shape: _make_interleaved_turns(shape, warm_up_step=1)),
    "interleaved": Rule(
        None, False, lambda shape: _make_interleaved_turns(shape, warm_up_step=min(shape.chunks, 2))
    ),
    "overlapped": Rule(
        None,
        False,
        lambda shape: _make_interleaved_turns(shape, warm_up_step=2, num_extra=1, first_pair=0),
    ),
    "zero-bubble": Rule(
        1, False, lambda s: _make_interleaved_turns(s, warm_up_step=1, lag=s.rank, last_lag=s.rank)
    ),
    "zbv": Rule(2, True, lambda shape: _make_v_turns(shape, lag=0, last_lag=2 * shape.rank)),
    "dualpipe-v": Rule(
        2,
        True,
        lambda shape: _make_v_turns(
            shape,
            num_extra=1,
            lag=0,
            last_lag=shape.rank,
            num_unsplit_last=shape.rank + 1,
            first_pair=shape.pp - 1 - shape.rank,
        ),
    ),
}
DEFERRING = ("zero-bubble", "zbv", "dualpipe-v")  # schedules with D and W
PAIRING = ("overlapped", "dualpipe-v")  # schedules with `Overlap`s
