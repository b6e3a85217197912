"""How long a step of a pipeline takes, from the seconds of each action: `simulate`.

    (Schedule, seconds of each item) -> Timeline

`moecore.parallel.pipeline.simulate` takes a cost per stage; here each action has its own.
"""

from __future__ import annotations

from collections.abc import Callable

from moecore.base.fields import PositiveOrZero, check_arguments
from moecore.parallel.pipeline.orders import Item
from moecore.parallel.pipeline.schedule import Schedule
from moecore.parallel.pipeline.simulate import spans_of
from moecore.parallel.pipeline.timeline import Timeline


def simulate(
    schedule: Schedule, seconds_of: Callable[[Item], float], send_seconds: PositiveOrZero = 0.0
) -> Timeline:
    """Return when each rank runs what; the step takes the timeline's `makespan`.

    Each rank runs its order in turn. An item waits for what it needs, and for its message where
    that comes from another rank. Nobody waits for a send.

    Args:
        schedule: of all ranks.
        seconds_of: of an action, or of an overlap of two as a whole.
        send_seconds: of hidden states, or of their gradient, from one rank to another.
    """
    check_arguments(simulate, locals())
    return Timeline(spans=spans_of(schedule, seconds_of, send_seconds))
