"""`offload_fractions`: the fractions of saved activations whose offload compute can hide.

    (Schedule, Costs, bytes of each stage, bytes per second) -> a fraction per stage

    item             F0    F1    F2    B0    F3    B1   ..
    copy to host           0     1     2           3
    copy to device                     0           1

The copy to the host starts after a forward, and device memory is free after the next item. The copy
to the device runs during the backward, one block ahead of it. The last block is copied during the
item before (`find_next_backwards`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

from moecore.base.fields import Bound, Positive, check_arguments
from moecore.parallel.pipeline.orders import Action, Item, list_actions
from moecore.parallel.pipeline.schedule import Schedule
from moecore.parallel.pipeline.timeline import Costs, Span, simulate

Place = tuple[int, int]  # (stage, micro-batch)
StageBytes = Annotated[int, Bound(">=", 0), Bound("<", 2**63)]
HALVINGS = 50


def find_next_backwards(order: Sequence[Item]) -> list[Action | None]:
    """Return, for each item of a rank's order, the next backward after it; None = no backward."""
    backwards: list[Action | None] = []
    upcoming: Action | None = None
    for item in reversed(order):
        backwards.append(upcoming)
        actions = list_actions(item)
        if actions[0].kind != "W":
            upcoming = next((a for a in actions if a.kind in "BD"), None)
    return backwards[::-1]


def list_last_block_offloads(order: Sequence[Item]) -> list[bool]:
    """Return, per item of a rank's order, whether its forward offloads its last block's tensors."""
    # Not if the micro-batch's backward is the next backward of this item or the two items after it.
    backwards = find_next_backwards(order)
    flags = []
    for i, item in enumerate(order):
        soon = {action[1:] for action in backwards[i : i + 3] if action is not None}
        flags.append(any(a.kind == "F" and a[1:] not in soon for a in list_actions(item)))
    return flags


def offload_fractions(
    schedule: Schedule,
    costs: Annotated[Costs, "pass Costs"],
    sizes: Sequence[StageBytes],
    *,
    bytes_per_second: Positive,
) -> tuple[float, ...]:
    """Return, for each stage, the largest `MemoryOptions.offload_fraction` that compute hides.

    No item of the simulated timeline starts or ends later than without offload. The simulation has
    one copy engine per direction, which copies in the order of the rank's items:

    - The copy to the host starts after a forward, takes no longer than the forward, and ends
      before the item after the next starts.
    - The copy to the device starts after the copy to the host and takes no longer than the
      backward.

    One fraction holds for all micro-batches of a stage. It is 0 if a backward directly follows its
    forward. Stages of one rank share the copy engines: first all stages get an equal fraction, then
    each stage in order gets the largest possible increase.

    Args:
        schedule: the result of `make_schedule`.
        costs: seconds of each stage.
        sizes: bytes that a micro-batch saves on each stage in the offloaded parts
            (`count_saved_bytes`).
        bytes_per_second: rate of copies in one direction while the other direction copies too.

    Raises:
        ValueError: if costs or sizes have another number of stages than the schedule.
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
        order = schedule.orders[rank]
        direct = {  # stages that run a backward directly after the forward of its micro-batch
            action.stage
            for item, backward in zip(order, find_next_backwards(order), strict=True)
            for action in list_actions(item)
            if backward is not None and action.kind == "F" and action[1:] == backward[1:]
        }
        stages = [s for s, r in enumerate(schedule.rank_of) if r == rank and s not in direct]
        fits = partial(_copies_fit_timeline, spans, fractions, seconds)
        for candidates in (stages, *([stage] for stage in stages)):
            _maximise_fractions(fractions, candidates, fits)
    return tuple(fractions)


def _maximise_fractions(
    fractions: list[float], stages: Sequence[int], is_feasible: Callable[[], bool]
) -> None:
    """Set `fractions[s]` for s in `stages` to the largest common feasible value, by bisection."""

    def fits_with(fraction: float) -> bool:
        for stage in stages:
            fractions[stage] = fraction
        return is_feasible()

    low, high = (fractions[stages[0]], 1.0) if stages else (0.0, 1.0)
    if fits_with(high):
        return
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if fits_with(middle) else (low, middle)
    fits_with(low)


def _copies_fit_timeline(
    spans: Sequence[Span], fractions: Sequence[float], copy_seconds: Sequence[float]
) -> bool:
    """Whether no item of a rank's timeline waits for the copies of these offload fractions."""
    out = 0.0  # time at which the copies to the host have ended
    before = freed = copies_end = 0.0  # end of the last item, and of the last two items' copies
    offload_ends: dict[Place, float] = {}
    for span in spans:
        begin = max(before, freed)
        before, freed, copies_end = span.end, copies_end, 0.0
        for action in list_actions(span.item):
            duration = fractions[action.stage] * copy_seconds[action.stage]
            if action.kind != "W" and duration > span.end - span.start:
                return False
            if action.kind == "F":
                out = copies_end = offload_ends[action[1:]] = max(out, span.end) + duration
            elif action.kind in "BD":
                begin = max(begin, offload_ends.pop(action[1:]))
        if begin > span.start:
            return False
    return True
