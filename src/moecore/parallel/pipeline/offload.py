"""How much of what a stage keeps for backward can lie in host memory: `offload_fractions`.

    (Schedule, Costs, bytes of each stage, bytes per second) -> a fraction per stage

    item    F0    F1    F2    B0    F3    B1   ..
    out           0     1     2           3
    back                0           1

What a forward leaves goes out behind it, and its memory is free when the next item has ended. What
a backward reads comes back beside the item before it: `backwards_ahead` is the order in which a
rank asks for it, here and in `run.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

from moecore.base.fields import Bound, Positive, check_arguments
from moecore.parallel.pipeline.orders import Action, Item, actions_of
from moecore.parallel.pipeline.schedule import Schedule
from moecore.parallel.pipeline.timeline import Costs, Span, simulate

Place = tuple[int, int]  # (stage, micro-batch)
StageBytes = Annotated[int, Bound(">=", 0), Bound("<", 2**63)]
HALVINGS = 50


def next_backwards(order: Sequence[Item]) -> list[Action | None]:
    """Return of each item the backward that the next item runs, None = it runs none."""
    backwards: list[Action | None] = []
    upcoming: Action | None = None
    for item in reversed(order):
        backwards.append(upcoming)
        actions = actions_of(item)
        if actions[0].kind != "W":
            upcoming = next((a for a in actions if a.kind in "BD"), None)
    return backwards[::-1]


def offloads_last_block(order: Sequence[Item]) -> list[bool]:
    """Return of each item whether its forward's last block leaves the device, too."""
    backwards = next_backwards(order)
    flags = []
    for i, item in enumerate(order):
        soon = {action[1:] for action in backwards[i : i + 3] if action is not None}
        flags.append(any(a.kind == "F" and a[1:] not in soon for a in actions_of(item)))
    return flags


def offload_fractions(
    schedule: Schedule,
    costs: Annotated[Costs, "pass Costs"],
    sizes: Sequence[StageBytes],
    *,
    bytes_per_second: Positive,
) -> tuple[float, ...]:
    """Return the largest share of a stage's bytes that copies hide beside computation.

    For `MemoryOptions.offload_fraction`. No item of the simulated timeline starts or ends later
    than without offload, where

    - one engine copies out and one copies back, each in the order of the rank's items;
    - what a micro-batch leaves on a stage goes out when its forward has ended, and its memory is
      freed before the item after the next starts;
    - it comes back, when it is out, from the start of the item before its backward;
    - its layers keep alike, and are freed one after the other: copies out last no longer than the
      forward.

    The fraction of a stage holds for each of its micro-batches, so the shortest time counts. It is
    0 where a backward follows its forward at once. Chunks of a rank share its engines: all get the
    same fraction, then each as much more as there is time, the first one first.

    Args:
        schedule: of `make_schedule`.
        costs: of each of its stages, in seconds.
        sizes: what a micro-batch leaves on each stage in the parts that are offloaded, in bytes
            (`count_saved_bytes`).
        bytes_per_second: of copies in one direction, while copies run in the other.

    Raises:
        ValueError: when costs or sizes are of another number of stages.
    """
    check_arguments(offload_fractions, locals())
    if len(sizes) != schedule.num_stages:
        raise ValueError(
            f"sizes ({len(sizes)} stages) must have bytes per stage of the schedule "
            f"({schedule.num_stages}): pass as many"
        )
    seconds = [size / bytes_per_second for size in sizes]
    fractions = [0.0] * schedule.num_stages
    for rank, spans in enumerate(simulate(schedule, costs).spans):
        live_stages = _live_stages(schedule.orders[rank])
        stages = [s for s, r in enumerate(schedule.rank_of) if r == rank and s not in live_stages]
        for candidates in (stages, *([stage] for stage in stages)):
            _raise(fractions, candidates, partial(_fits, spans, fractions, seconds))
    return tuple(fractions)


def _live_stages(order: Sequence[Item]) -> set[int]:
    """Return the stages of which a backward is next to its forward."""
    return {
        action.stage
        for item, backward in zip(order, next_backwards(order), strict=True)
        for action in actions_of(item)
        if backward is not None and action.kind == "F" and action[1:] == backward[1:]
    }


def _raise(fractions: list[float], stages: Sequence[int], fits: Callable[[], bool]) -> None:
    """Raise the fractions of some stages, now the same, to the largest that fits; they fit now."""

    def tried(share: float) -> bool:
        for stage in stages:
            fractions[stage] = share
        return fits()

    low, high = (fractions[stages[0]], 1.0) if stages else (0.0, 1.0)
    if tried(high):
        return
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if tried(middle) else (low, middle)
    tried(low)


def _fits(spans: Sequence[Span], fractions: Sequence[float], seconds: Sequence[float]) -> bool:
    """Whether no item waits for copies; `seconds` copy all that a micro-batch leaves on a stage."""
    out = back = 0.0  # when each engine is free
    before = freed = copies_end = 0.0  # end of the item before; of copies of the two before
    offload_ends: dict[Place, float] = {}
    return_ends: dict[Place, float] = {}
    for span, backward in zip(spans, next_backwards([s.item for s in spans]), strict=True):
        begin = max(before, freed)
        if backward is not None and backward[1:] in offload_ends:
            copy_seconds = fractions[backward.stage] * seconds[backward.stage]
            back = return_ends[backward[1:]] = (
                max(begin, back, offload_ends.pop(backward[1:])) + copy_seconds
            )
        before, freed, copies_end = span.end, copies_end, 0.0
        for action in actions_of(span.item):
            if action.kind != "F":
                begin = max(begin, return_ends.get(action[1:], 0.0))
                continue
            copy_seconds = fractions[action.stage] * seconds[action.stage]
            if copy_seconds > span.end - span.start:
                return False
            out = copies_end = offload_ends[action[1:]] = max(out, span.end) + copy_seconds
        if begin > span.start:
            return False
    return True
