"""How long a step takes, and what it waits for, from what its host queues: `time_step`.

    DryRun, CostTable -> when each piece of work starts and ends -> StepTime

Work starts when the host has queued it, and what it comes behind has ended; the host queues one
piece after the other, and waits where it reads a result. It begins a step while the one before it
still runs, so a step's time is that between the ends of two steps. Work side by side is as fast as
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from moecore._fields import check_arguments
from moecore.planning.costs import CostTable, Wall
from moecore.planning.dry_run import DryRun
from moecore.planning.work import Queued, Work

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


class Span:
    """When work runs, and what limits it."""

    __slots__ = ("end", "part", "start")

    def __init__(self, start: float, end: float, part: Part) -> None:
        self.start, self.end, self.part = start, end, part


def time_step(step: DryRun, table: CostTable) -> StepTime:
    """Return how long a step of a rank takes where other ranks are as fast.

    Args:
        step: what it does.
        table: what that takes.
    """
    check_arguments(time_step, locals())
    spans = run_queue(step.queued, table, STEPS)
    ends = [max(s.end for s in spans[: len(step.queued) * n]) for n in range(1, STEPS + 1)]
    first, last = ends[-2], ends[-1]
    parts = exposed(spans, first, last)
    return StepTime(last - first, parts)


def run_queue(queued: Sequence[Queued], table: CostTable, steps: int = 1) -> list[Span]:
    """Return when each piece of work runs, in steps that come one behind the other.

    Args:
        queued: by the host in a step, in order.
        table: what that takes.
        steps: how many.
    """
    costs = _costs(queued, table)
    spans: list[Span] = []
    host = begun = 0.0
    for _ in range(steps):
        first, ends = len(spans), dict[int, float]()  # of streams
        for one, (seconds, part) in zip(queued, costs, strict=True):
            for number in one.host_behind:
                host = max(host, spans[first + number].end)
            host += table.host_seconds
            start = max(host, ends.get(one.stream, begun))
            for number in one.behind:
                start = max(start, spans[first + number].end)
            ends[one.stream] = end = start + seconds
            spans.append(Span(start, end, part))
        begun = max((span.end for span in spans[first:]), default=begun)
    return spans


def _costs(queued: Sequence[Queued], table: CostTable) -> list[tuple[float, Part]]:
    """Return seconds and what limits them; work that is the same object, or equal, once."""
    by_id: dict[tuple[int, int], tuple[float, Part]] = {}
    by_value: dict[tuple[Work, int], tuple[float, Part]] = {}
    found = []
    for one in queued:
        key = id(one.work), one.node_ranks
        if key not in by_id:
            value = one.work, one.node_ranks
            if value not in by_value:
                by_value[value] = table.seconds(*value), table.wall(*value)
            by_id[key] = by_value[value]
        found.append(by_id[key])
    return found


def exposed(spans: Sequence[Span], start: float, end: float) -> dict[Part, float]:
    """Return how long each part is the first that runs; the host's when none does."""
    edges: list[tuple[float, int, Part]] = []
    for span in spans:
        if span.end <= start or span.start >= end:
            continue
        edges += [(max(span.start, start), 1, span.part), (min(span.end, end), -1, span.part)]
    running, now = dict.fromkeys(PARTS, 0), start
    sums: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
    for at, change, part in sorted(edges, key=lambda edge: edge[0]):
        first: Part = next((name for name in PARTS if running[name]), "host")
        sums[first] += at - now
        now = at
        running[part] += change
    sums["host"] += max(0.0, end - now)
    return sums
