"""Where a step's time went on one rank's GPU, what bounds the step, and what to try next.

    trace.json -> Trace -> each microsecond of its steps belongs to one part -> levers, by share
                           (`advice.py`)

Idle time is explained by what the host did: see `_cause`.
"""

from __future__ import annotations

import os
import re
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from moecore.base.fields import Count, check_arguments
from moecore.base.tables import columns
from moecore.planning.advice import LIMIT_OF, PARTS, TABLE
from moecore.planning.chrome import Range, Trace, read_trace
from moecore.planning.trace import (
    Breakdown,
    Kernel,
    break_down,
    category_of,
    covered,
)

MOST_LEVERS = 3
LEAST_SHARE = 0.01  # of a step that a lever is worth
LONGEST = 5
# NCCL: by the mesh dim of its group, else by the mark around it, else by what it does. A group of
# all ranks names no dim.
GROUPS = {
    "dispatch by collectives": r"^mesh_(ep|etp|ep_etp)$",
    "tensor parallelism": r"^mesh_tp$",
    "context parallelism": r"^mesh_cp(_inner|_outer)?$",
    "pipeline": r"^mesh_pp$",
    "sharding": r"^mesh_e?dp_",
}
COLLECTIVES = {
    "dispatch by collectives": r"(?i)all_?to_?all",
    "pipeline": r"^(send|recv)$",
    "sharding": r"(?i)all_?gather|reduce_?scatter|all_?reduce",
}
PART_OF_CATEGORY = {
    "nvlink dispatch": "dispatch by nvlink",
    "copies to peers": "dispatch by nvlink",
    "nvlink clones": "clones",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Lever:
    """What to try next.

    Attributes:
        lever: an option.
        page: of docs, with its section.
        limit: what it is about.
        share: of the step that it can take away at most.
    """

    lever: str
    page: str
    limit: str
    share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Where a step's time went. Milliseconds are of one step.

    Attributes:
        num_steps: that were traced.
        launches: the host's calls that put work on the GPU, of one step.
        parts: name -> milliseconds; each moment of the step is in one, so they add up to it.
        phases: name -> milliseconds in which kernels of it ran, by the marks around their launch.
        breakdown: sums by category, kernels, the longest ones.
        levers: at most three, the one that may win most first.
    """

    num_steps: int
    launches: int
    parts: Mapping[str, float]
    phases: Mapping[str, float]
    breakdown: Breakdown
    levers: tuple[Lever, ...]

    @property
    def limits(self) -> dict[str, float]:
        """Milliseconds of a step by what limits it, the most first."""
        found = {
            limit: sum(self.parts.get(p, 0.0) for p in parts) for limit, parts in PARTS.items()
        }
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def limit(self) -> str:
        """What bounds the step: the limit with most time, and the largest part of it."""
        limit = next(iter(self.limits))
        part = max(PARTS[limit], key=lambda part: self.parts.get(part, 0.0))
        return f"{limit}, most of it {part}"

    def table(self) -> str:
        """Return limits and their parts, phases, the longest kernels and levers, as text."""
        wall = self.breakdown.wall
        lines: list[tuple[str, ...]] = [("what", "ms", "share")]
        for limit, ms in self.limits.items():
            lines.append(_line(limit, ms, wall))
            parts = ((p, self.parts[p]) for p in PARTS[limit] if p in self.parts)
            lines += [_line(f"  {p}", ms, wall) for p, ms in sorted(parts, key=lambda x: -x[1])]
        lines.append(("kernels of a phase", "", ""))
        lines += [_line(f"  {phase}", ms, wall) for phase, ms in self.phases.items()]
        lines.append(("longest kernels", "", ""))
        longest = list(self.breakdown.longest.items())[:LONGEST]
        lines += [_line(f"  {name[:60]}", ms, wall) for name, (ms, _) in longest]
        text = [
            f"{wall:.2f} ms a step, {self.breakdown.kernels} kernels, {self.launches} launches",
            f"bound by {self.limit}",
            "",
            *columns(lines),
            "",
            "next" if self.levers else "next: no lever of the table reaches 1%",
        ]
        text += [
            f"  at most {lever.share:.1%}: {lever.lever} (docs/{lever.page})"
            for lever in self.levers
        ]
        return "\n".join(text)


def report_trace(path: str | os.PathLike[str], *, num_steps: Count | None = None) -> Report:
    """Return where the time of a trace went.

    Args:
        path: a Chrome trace of torch.profiler, `.json` or `.json.gz`, of one rank's GPU.
        num_steps: that it holds; None = as many as `profile.step()` has marked, else 1.

    Raises:
        ValueError: when it is no such trace, or holds kernels of no GPU or of several.
    """
    check_arguments(report_trace, locals())
    return report(read_trace(path), num_steps=num_steps)


def report_step(step: Callable[[], object], *, num_steps: Count = 1) -> Report:
    """Run some steps under a profiler and return where their time went on this rank's GPU.

    The profiler slows the host: idle time is an upper bound. Every rank must run the steps.

    Args:
        step: forward, backward and optimizer.
        num_steps: how often it is called.

    Raises:
        ValueError: without a GPU, or when the step runs nothing on it.
    """
    check_arguments(report_step, locals())
    if not torch.cuda.is_available():
        raise ValueError("step (of a host without a GPU) must run on one: nothing to report")
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        for _ in range(num_steps):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        prof.export_chrome_trace(str(path))
        return report_trace(path, num_steps=num_steps)


def report(trace: Trace, *, num_steps: int | None = None) -> Report:
    """Return where the time of a trace went; see `report_trace`."""
    num_steps = num_steps or trace.num_steps
    scale = 1e-3 / num_steps
    parts: dict[str, float] = {}
    for part, us in _attributed(trace):
        parts[part] = parts.get(part, 0.0) + us * scale
    of_phases: dict[str, list[Kernel]] = {}
    for kernel in trace.kernels:
        of_phases.setdefault(kernel.phase, []).append(kernel)
    phases = {phase: covered(kernels) * scale for phase, kernels in of_phases.items()}
    breakdown = break_down(trace.kernels, num_steps=num_steps)
    return Report(
        num_steps=num_steps,
        launches=sum(trace.launches.values()) // num_steps,
        parts=dict(sorted(parts.items(), key=lambda item: -item[1])),
        phases=dict(sorted(phases.items(), key=lambda item: -item[1])),
        breakdown=breakdown,
        levers=_levers(parts, breakdown.wall, {k.name for k in trace.kernels} | {*trace.launches}),
    )


def part_of(kernel: Kernel) -> str:
    """Return the part of a step to which a kernel belongs."""
    category = category_of(kernel.name)
    if category == "nccl":
        return _part_of_collective(kernel)
    if category == "dense products" and kernel.phase == "experts":
        return "experts by other products"
    return PART_OF_CATEGORY.get(category, category)


def _part_of_collective(kernel: Kernel) -> str:
    for part, pattern in GROUPS.items():
        if re.search(pattern, kernel.group):
            return part
    if kernel.phase in ("dispatch", "combine"):
        return "dispatch by collectives"
    what = kernel.collective or kernel.name
    found = (part for part, pattern in COLLECTIVES.items() if re.search(pattern, what))
    return next(found, "other collectives")


class _Edge(NamedTuple):
    """A kernel of a part starts (+1) or ends (-1)."""

    time: float
    change: int
    part: int


def _attributed(trace: Trace) -> Iterator[tuple[str, float]]:
    """Yield parts and microseconds, which add up to the time from first start to last end.

    Example, us: a product from 0 to 3, NCCL from 2 to 6, a product from 7 to 8: 3 and 1 are of
    products, 3 of NCCL, 1 is idle.
    """
    order = list(LIMIT_OF)
    places = {part: place for place, part in enumerate(order)}
    edges = []
    for kernel in trace.kernels:
        place = places[part_of(kernel)]
        edges += [_Edge(kernel.start, 1, place), _Edge(kernel.end, -1, place)]
    edges.sort()
    running = [0] * len(order)
    since = edges[0].time
    for edge in edges:
        part = next((p for p, number in zip(order, running, strict=True) if number), None)
        if part is not None and edge.time > since:
            yield part, edge.time - since
        running[edge.part] += edge.change
        since = edge.time
    yield from _idle(trace)


def _idle(trace: Trace) -> Iterator[tuple[str, float]]:
    """Yield causes and microseconds of gaps: nothing runs until the next kernel starts."""
    reached = trace.kernels[0].start
    for kernel in trace.kernels:
        if kernel.start > reached:
            yield _cause(trace, Range(reached, kernel.start), kernel), kernel.start - reached
        reached = max(reached, kernel.end)


def _cause(trace: Trace, gap: Range, kernel: Kernel) -> str:
    """Return why nothing ran before a kernel.

    allocator             the host took memory from the driver or gave some back meanwhile
    gaps between kernels  the kernel had been launched before: it started late, or waited
    waits of the host     the host had waited until the GPU was done, and launched then
    late launches         the host came too late without waiting
    """
    i = bisect_right(trace.allocations, gap.start, key=lambda r: r.end)
    if i < len(trace.allocations) and trace.allocations[i].start < gap.end:
        return "allocator"
    if kernel.launched is None or kernel.launched <= gap.start:
        return "gaps between kernels"
    i = bisect_left(trace.waits, gap.start, key=lambda r: r.end)
    if i < len(trace.waits) and trace.waits[i].end <= kernel.launched:
        return "waits of the host"
    return "late launches"


def _levers(parts: Mapping[str, float], wall: float, names: Iterable[str]) -> tuple[Lever, ...]:
    """Return the levers that may win most; of equal ones those first in the table."""
    names = set(names)
    found = [
        Lever(lever=advice.lever, page=advice.page, limit=LIMIT_OF[advice.parts[0]], share=share)
        for advice in TABLE
        for share in (advice.most * sum(parts.get(p, 0.0) for p in advice.parts) / wall,)
        if share >= LEAST_SHARE and advice.fits(names)
    ]
    return tuple(sorted(found, key=lambda lever: -lever.share)[:MOST_LEVERS])


def _line(what: str, ms: float, wall: float) -> tuple[str, str, str]:
    return what, f"{ms:.2f}", f"{ms / wall:.1%}"
