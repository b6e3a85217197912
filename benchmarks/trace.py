"""Kernels of some steps on this rank's GPU, by category, with exposed communication.

Kernels of several streams overlap; so besides the sum of each category there are three shares of
the wall time: some kernel other than communication runs ("compute"), only communication runs
("exposed"), nothing runs ("idle").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from moecore.planning.report import Kernel, find_kernel_category

COMMUNICATION = ("nccl", "nvlink dispatch", "copies to peers", "host copies")


@dataclass(frozen=True, kw_only=True, slots=True)
class Breakdown:
    """Milliseconds of one step.

    Attributes:
        wall: from the first kernel's start to the last one's end, over the number of steps.
        categories: name -> sum of its kernels' times, longest first.
        exposed: time in which only communication runs.
        idle: time in which nothing runs.
        kernels: number of launches.
        longest: name -> (sum of times, launches) of the kernels with the longest sums.
        gaps: "kernel before -> kernel after" -> the same of the idle times between them.
    """

    wall: float
    categories: dict[str, float]
    exposed: float
    idle: float
    kernels: int
    longest: dict[str, tuple[float, int]]
    gaps: dict[str, tuple[float, int]]


def break_down(
    kernels: Iterable[Kernel], *, num_steps: int = 1, num_longest: int = 40
) -> Breakdown:
    """Return the breakdown of kernels.

    Example, us: a product from 0 to 3, nccl from 2 to 6, a product from 7 to 8: wall 8, exposed 3,
    idle 1.
    """
    kernels = list(kernels)
    if not kernels:
        return Breakdown(wall=0, categories={}, exposed=0, idle=0, kernels=0, longest={}, gaps={})
    scale = 1e-3 / num_steps
    sums: dict[str, float] = {}
    for kernel in kernels:
        category = find_kernel_category(kernel.name)
        sums[category] = sums.get(category, 0.0) + (kernel.end - kernel.start) * scale
    wall = max(k.end for k in kernels) - min(k.start for k in kernels)
    busy = measure_covered(kernels)
    computing = measure_covered(
        k for k in kernels if find_kernel_category(k.name) not in COMMUNICATION
    )
    times = ((k.name, k.end - k.start) for k in kernels)
    return Breakdown(
        wall=wall * scale,
        categories=dict(sorted(sums.items(), key=lambda item: -item[1])),
        exposed=(busy - computing) * scale,
        idle=(wall - busy) * scale,
        kernels=len(kernels) // num_steps,
        longest=_find_longest(times, scale, num_longest),
        gaps=_find_longest(list_gaps(kernels), scale, num_longest),
    )


def _find_longest(
    times: Iterable[tuple[str, float]], scale: float, most: int
) -> dict[str, tuple[float, int]]:
    """Return the sum and number of times by name, the largest sums first."""
    names: dict[str, tuple[float, int]] = {}
    for name, took in times:
        total, count = names.get(name, (0.0, 0))
        names[name] = (total + took * scale, count + 1)
    return dict(sorted(names.items(), key=lambda item: -item[1][0])[:most])


def list_gaps(kernels: Iterable[Kernel]) -> Iterator[tuple[str, float]]:
    """Yield each idle time, with the kernels before and after it."""
    last: Kernel | None = None
    for kernel in sorted(kernels, key=lambda k: k.start):
        if last is not None and kernel.start > last.end:
            yield f"{last.name[:50]} -> {kernel.name[:50]}", kernel.start - last.end
        if last is None or kernel.end > last.end:
            last = kernel


def measure_covered(kernels: Iterable[Kernel]) -> float:
    """Return the microseconds in which at least one of the kernels runs."""
    measure_covered, reached = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda k: k.start):
        if kernel.end > reached:
            measure_covered += kernel.end - max(kernel.start, reached)
            reached = kernel.end
    return measure_covered


def format_table(found: Breakdown) -> list[str]:
    """Return the categories as a Markdown table."""
    lines = ["| what | ms | share of the step |", "|---|---|---|"]
    rows = [*found.categories.items(), ("only communication", found.exposed), ("idle", found.idle)]
    return [*lines, *(f"| {n} | {ms:.1f} | {ms / found.wall:.1%} |" for n, ms in rows)]


def make_trace_fields(breakdown: Breakdown) -> dict[str, Any]:
    """Return the fields of a record from a breakdown."""
    return {
        "trace_wall_ms": breakdown.wall,
        "trace_ms": breakdown.categories,
        "exposed_ms": breakdown.exposed,
        "idle_ms": breakdown.idle,
        "exposed_share": breakdown.exposed / breakdown.wall,
        "kernels": breakdown.kernels,
        "longest": [[name[:120], *times] for name, times in breakdown.longest.items()],
        "gaps": [[name, *times] for name, times in breakdown.gaps.items()],
    }


def trace(step: Callable[[], object], *, num_steps: int = 1) -> Breakdown:
    """Return the breakdown of some steps on this rank's GPU."""
    return break_down(trace_kernels(step, num_steps=num_steps), num_steps=num_steps)


def trace_kernels(step: Callable[[], object], *, num_steps: int = 1) -> list[Kernel]:
    """Return the kernels of some steps on this rank's GPU."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(num_steps):
            step()
        torch.cuda.synchronize()
    kernels = []
    for event in prof.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.device_type() == torch.autograd.DeviceType.CUDA and event.duration_ns() > 0:
            start = event.start_ns() / 1e3
            end = start + event.duration_ns() / 1e3
            kernels.append(Kernel(name=event.name(), start=start, end=end))
    return kernels
