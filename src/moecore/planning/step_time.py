"""How long a step takes, and what it waits for, from what its host queues: `time_step`.

    DryRun, CostTable -> when each piece of work starts and ends -> StepTime

Work starts when the host has queued it, and what it comes behind has ended; the host queues one
piece after the other, and waits where it reads a result. It begins a step while the one before it
still runs, so a step's time is that between the ends of two steps. Work side by side is as fast as
alone, but a step takes no less than all that its network carries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from moecore.base.fields import check_arguments
from moecore.planning.costs import CostTable, Wall
from moecore.planning.dry_run import DryRun
from moecore.planning.work import Placed, Queued, Work, placed

Part = Literal[Wall, "host", "bubble"]
# Of what runs at once the first one counts: the others are hidden behind it.
PARTS: tuple[Part, ...] = ("compute", "memory", "launch", "nvlink", "network", "pcie", "host")
STEPS = 3  # until one is like the one before it


@dataclass(frozen=True, slots=True)
class StepTime:
    """The time of a step.

    Attributes:
        seconds: between the ends of two steps.
        parts: of it by what limits it, without what is hidden: "compute" and "memory" rates,
            "launch" of small kernels, links ("nvlink", "network", "pcie"), and the "host".
    """

    seconds: float
    parts: dict[Part, float]

    @property
    def wall(self) -> Part:
        """What limits the largest part."""
        return max(self.parts, key=lambda part: self.parts[part])


class Spans(NamedTuple):
    """When each piece of work of a queue starts and ends, and what limits it."""

    starts: list[float]
    ends: list[float]
    parts: list[Part]


def time_step(step: DryRun, table: CostTable) -> StepTime:
    """Return how long a step of a rank takes where other ranks are as fast.

    Args:
        step: what it does.
        table: what that takes.
    """
    check_arguments(time_step, locals())
    spans = run_queue(placed(step.queued), table, STEPS)
    first, last = (max(spans.ends[: len(step.queued) * n]) for n in (STEPS - 1, STEPS))
    before = (STEPS - 1) * len(step.queued)
    parts = at_least(exposed(spans, first, last), carried(spans, before, len(spans.ends)))
    return StepTime(max(last - first, sum(parts.values())), parts)


def run_queue(queue: Sequence[Placed], table: CostTable, steps: int = 1) -> Spans:
    """Return when each piece of work runs, in steps that come one behind the other.

    Args:
        queue: what the host queues in a step, in order.
        table: what that takes.
        steps: how many.
    """
    costs = _costs(queue, table)
    starts, ends = list[float](), list[float]()
    host = begun = 0.0
    for _ in range(steps):
        first, last = len(ends), dict[int, float]()  # ends of streams
        works = zip(queue, costs, strict=True)
        for i, ((one, behind, host_behind), (seconds, _)) in enumerate(works, first):
            for distance in host_behind:
                host = max(host, ends[i - distance])
            host += table.host_seconds
            start = max(host, last.get(one.stream, begun))
            for distance in behind:
                if ends[i - distance] > start:
                    start = ends[i - distance]
            last[one.stream] = end = start + seconds
            starts.append(start)
            ends.append(end)
        begun = max(ends[first:], default=begun)
    return Spans(starts, ends, steps * [part for _, part in costs])


def carried(spans: Spans, first: int, last: int) -> float:
    """Return the seconds in which the network carries some of a queue, if it carries no other.

    Args:
        spans: of the queue.
        first: where some of it begins.
        last: where it ends.
    """
    found = zip(
        spans.starts[first:last], spans.ends[first:last], spans.parts[first:last], strict=True
    )
    return sum(end - start for start, end, part in found if part == "network")


def at_least(parts: Mapping[Part, float], network: float) -> dict[Part, float]:
    """Return parts that add up to the seconds of the network: streams share it."""
    missing = max(0.0, network - sum(parts.values()))
    return {**parts, "network": parts.get("network", 0.0) + missing}


def _costs(queue: Sequence[Placed], table: CostTable) -> list[tuple[float, Part]]:
    """Return seconds and what limits them; of equal work once."""
    known: dict[tuple[Work, int], tuple[float, Part]] = {}

    def cost(one: Queued) -> tuple[float, Part]:
        key = one.work, one.node_ranks
        if key not in known:
            known[key] = table.seconds(*key), table.wall(*key)
        return known[key]

    of = {id(one): cost(one) for one in {id(one): one for one, _, _ in queue}.values()}
    return [of[id(one)] for one, _, _ in queue]


def exposed(spans: Spans, start: float, end: float) -> dict[Part, float]:
    """Return how long each part is the first that runs; the host's when none does."""
    edges: list[tuple[float, int, Part]] = []
    for begin, stop, part in zip(*spans, strict=True):
        if begin < end and stop > start:  # comparisons here and below: calls take longer
            edges.append((begin if begin > start else start, 1, part))
            edges.append((stop if stop < end else end, -1, part))
    running, now = dict.fromkeys(PARTS, 0), start
    sums: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
    edges.sort()
    for at, change, part in edges:
        if at > now:
            for first in PARTS:
                if running[first]:
                    break
            sums[first] += at - now
            now = at
        running[part] += change
    sums["host"] += max(0.0, end - now)
    return sums
