"""What runs on this rank's GPU in some steps; `moecore.planning.report` sums it up."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from moecore.planning.report import Breakdown, Kernel, break_down


def trace(step: Callable[[], object], *, num_steps: int = 1) -> Breakdown:
    """Profile some steps on this rank's GPU."""
    return break_down(kernels_of(step, num_steps=num_steps), num_steps=num_steps)


def kernels_of(step: Callable[[], object], *, num_steps: int = 1) -> list[Kernel]:
    """Return what ran on this rank's GPU in some steps."""
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
