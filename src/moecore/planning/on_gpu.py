"""Steps of one rank of a world that is not there, on a GPU that is: what they hold and take.

    TrainingRun -> the model on the GPU, parallelized in a fake world -> steps of its TrainStep

Loads are even. What other ranks would send is a copy of what this rank has (`stand_ins`), so the
seconds are those of compute and of the host: no link is used, and nobody is waited for.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from moecore._fields import CountOrZero, check_arguments
from moecore.moe.forced import force_even_load
from moecore.planning.record import fake_world, quiet
from moecore.planning.run import TrainingRun, model_of, optimizer_of
from moecore.planning.stand_ins import stand_ins
from moecore.step import TrainStep

WARM_UP, TIMED = 3, 5
Inputs = list[dict[str, Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuRun:
    """Steps of one rank, behind the first ones of its run.

    Attributes:
        rank: of the world.
        held: bytes between steps.
        peak: most bytes at once: `torch.cuda.max_memory_allocated`.
        seconds: of a step without communication, from its end to that of the next; the median.
    """

    rank: int
    held: int
    peak: int
    seconds: float


def run_on_gpu(run: TrainingRun, rank: CountOrZero = 0) -> GpuRun:
    """Return what steps of one rank hold and take on the current GPU. No communication.

    Args:
        run: what is trained, and how.
        rank: of the world.

    Raises:
        ValueError: where torch has no GPU; and as `dry_run`.
    """
    check_arguments(run_on_gpu, locals())
    if run.nvlink is not None:
        raise ValueError(
            f"nvlink ({run.nvlink}) must be None on one GPU, where nobody else's memory is: use "
            "dry_run"
        )
    if not torch.cuda.is_available():
        raise ValueError("torch.cuda.is_available() (False) must be True: use dry_run without it")
    device = torch.empty(0, device="cuda").device  # the current one: meshes choose no other then
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    with started(run, rank, device) as (step, inputs):
        for _ in range(WARM_UP):
            step.forward_backward(inputs)
            step.finish()
        gc.collect()
        held = torch.cuda.memory_allocated(device) - before
        torch.cuda.reset_peak_memory_stats(device)
        ends = [mark(device)]
        for _ in range(TIMED):
            step.forward_backward(inputs)
            step.finish()
            ends.append(mark(device))
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
    seconds = statistics.median(between(a, b) for a, b in pairwise(ends)) / 1e3
    return GpuRun(rank=rank, held=held, peak=peak, seconds=seconds)


@contextmanager
def started(
    run: TrainingRun, rank: int, device: torch.device
) -> Iterator[tuple[TrainStep, Inputs]]:
    """Yield a rank's step and its micro-batches, within a world whose other ranks stand in."""
    with fake_world(run.num_gpus, rank), quiet(), stand_ins():
        model = model_of(run, device.type)
        model.to_empty(device=device)
        model.init_weights()
        force_even_load(model)
        optimizer = optimizer_of(run, model)
        step = TrainStep(model, optimizer, max_norm=1.0, num_micro_batches=run.num_micro_batches)
        sizes = (run.batch_size, run.seq_len)
        tokens_BT = torch.randint(0, run.model.vocab_size, sizes, device=device)
        inputs = {"tokens_BT": tokens_BT, "labels_BT": tokens_BT.roll(-1, 1)}
        yield step, [inputs] * run.num_micro_batches


def mark(device: torch.device) -> Any:
    """Return this time of a device."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(start: Any, end: Any) -> float:
    """Return the milliseconds between two of them."""
    return (end - start) * 1e3 if isinstance(end, float) else float(start.elapsed_time(end))
