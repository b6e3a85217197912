"""Traces of training steps by torch's profiler: `--profile`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from moecore.recipes.options import RunConfig

TRACE = "trace.json.gz"
SETTLING = 10  # steps of a start that compile, allocate and warm caches


def check_profile(args: RunConfig, start: int) -> None:
    """Raise ValueError if a run from step `start` has too few steps for --profile."""
    num_steps = args.steps - start - SETTLING
    if args.profile and start < args.steps and args.profile > num_steps:
        raise ValueError(
            f"--profile ({args.profile}) must be <= {max(num_steps, 0)}, the steps that this start "
            f"has after its first {SETTLING}: raise the number of steps, or drop it"
        )


@contextmanager
def trace_steps(args: RunConfig) -> Iterator[Callable[[], None]]:
    """Return a context with a function to call after each step; rank 0 writes --profile's trace."""
    if not args.profile or dist.get_rank() > 0:
        yield lambda: None
        return
    kinds = [ProfilerActivity.CPU]
    kinds += [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    steps = schedule(wait=SETTLING - 1, warmup=1, active=args.profile, repeat=1)

    def write(profiler: profile) -> None:
        profiler.export_chrome_trace(str(args.run_dir / TRACE))

    with profile(activities=kinds, schedule=steps, on_trace_ready=write) as profiler:
        yield profiler.step
