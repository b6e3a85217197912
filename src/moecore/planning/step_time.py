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
from moecore.planning.work import Queued

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
    return time_queue(step.queued, table)


def time_queue(queued: Sequence[Queued], table: CostTable) -> StepTime:
    """Return how long a step takes whose host queues this, and then the next step."""
    spans = run_queue([*queued] * STEPS, table, len(queued))
    ends = [max(s.end for s in spans[: len(queued) * n]) for n in range(1, STEPS + 1)]
    first, last = ends[-2], ends[-1]
    parts = exposed(spans, first, last)
    return StepTime(last - first, parts)


def run_queue(queued: Sequence[Queued], table: CostTable, period: int = 0) -> list[Span]:
    """Return when each piece of work runs.

    Args:
        queued: by the host, in order.
        table: what that takes.
        period: of a step that comes again and again: numbers of what work is behind count from the
            step's first piece, and a step is behind all of the one before; 0 = no step ends.
    """
    period = period or len(queued)
    known: dict[tuple[object, int], tuple[float, Part]] = {}
    spans: list[Span] = []
    ends: dict[int, float] = {}  # of streams
    host = begun = 0.0
    for number, one in enumerate(queued):
        first = number - number % period
        if number == first:  # behind all of the step before
            begun = max((span.end for span in spans), default=0.0)
        key = one.work, one.node_ranks
        if key not in known:
            known[key] = table.seconds(*key), table.wall(*key)
        seconds, part = known[key]
        host = max([host, *(spans[first + n].end for n in one.host_behind)]) + table.host_seconds
        before = ends.get(one.stream, begun)
        start = max([host, begun, before, *(spans[first + n].end for n in one.behind)])
        ends[one.stream] = start + seconds
        spans.append(Span(start, start + seconds, part))
    return spans


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
