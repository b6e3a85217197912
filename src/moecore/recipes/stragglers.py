"""Stragglers: ranks whose own work in a phase of a step takes longer than on the other ranks.

    data                    the host reads this rank's batch
    forward and backward    all micro-batches of the step
    optimizer               clipping and the update

A rank that waits for another rank is not slow. The time of a phase therefore excludes each interval
in which this rank is in a collective of torch.distributed, from the call to the end of the wait. On
GPUs, CUDA events on the compute stream bound each interval and each phase, except for "data", which
is host work. The host reads the events after the step is complete, so that the step has no
synchronisation. Waits inside a kernel (dispatcher "nvlink") or inside a CUDA graph are not
excluded: all ranks then have equal times, and a slow rank may stay unnoticed.

The steps whose expert loads are logged are measured, and one all-gather of three numbers per rank
in a later step compares the ranks. Other steps have no measurement.
"""

import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from statistics import median_low
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.base.rank_checks import gather_objects
from moecore.base.streams import copy_to_device
from moecore.base.torch_private import all_gather_single, patch_attributes, wrap_collectives
from moecore.parallel.fsdp.transport import StreamEvent
from moecore.recipes.metrics import Moment

DATA, COMPUTE, OPTIMIZER = PHASES = ("data", "forward and backward", "optimizer")
# A rank is slow if its phase exceeds the median over ranks by this share of the median step.
THRESHOLDS = {"cuda": 0.1, "cpu": 0.5}  # CPU ranks share cores, so their times are noisy
NUM_IN_A_ROW = 2  # measurements of a slow rank before its alarm

Span = tuple[Moment, Moment]
CPU = torch.device("cpu")


class PhaseTimer:
    """Measures the seconds of each phase of a step on this rank, without collectives."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: dict[str, tuple[Span, list[Span]]] = {}  # phase -> its span and its waits

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Return a context whose duration, excluding collectives, is the time of `phase`."""
        device = CPU if phase == DATA else self._device
        stream = torch.cuda.current_stream() if device.type == "cuda" else None
        thread, waits = threading.get_ident(), list[Span]()

        def is_waiting() -> bool:  # a save in the background has its own thread
            """Whether a collective that is called now makes this phase wait."""
            if stream is None:
                return threading.get_ident() == thread
            is_compute = torch.cuda.current_stream() == stream
            return is_compute and not torch.cuda.is_current_stream_capturing()

        def exclude(function: Callable[..., Any]) -> Callable[..., Any]:
            """Wrap `function` so that the phase's time does not include its calls."""

            @wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                if not is_waiting():
                    return function(*args, **kwargs)
                began = Moment(device)
                try:
                    return function(*args, **kwargs)
                finally:
                    waits.append((began, Moment(device)))

            return call

        began = Moment(device)
        with (
            wrap_collectives(exclude),
            patch_attributes(StreamEvent, wait=exclude(StreamEvent.wait)),
        ):
            yield
        self._spans[phase] = (began, Moment(device)), waits

    def read(self) -> list[float]:
        """Return the seconds of each of `PHASES`. The device must have completed the step."""
        return [
            began.seconds_until(ended) - sum(a.seconds_until(b) for a, b in waits)
            for (began, ended), waits in map(self._spans.__getitem__, PHASES)
        ]


class Stragglers:
    """Compares the times of a step's phases between ranks. The constructor is collective."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._hosts: list[str] = gather_objects(socket.gethostname())
        self._streaks = Counter[tuple[int, str]]()  # rank and phase -> measurements in a row
        self.times: list[float] | None = None  # of this rank, which no all-gather has sent yet

    def gather(self) -> Tensor | None:
        """All-gather phase times; return fp32 seconds [ranks, phases], or None without times."""
        if self.times is None:
            return None
        times_P = torch.tensor(self.times, dtype=torch.float32, device=CPU)
        times_P = copy_to_device(times_P, self._device)
        self.times, times_of_ranks = None, times_P.new_empty(dist.get_world_size() * len(PHASES))
        all_gather_single(times_of_ranks, times_P)
        return times_of_ranks.view(-1, len(PHASES))

    def find_alarms(self, step: int, times_RP: list[list[float]]) -> list[str]:
        """Return one line for each rank that is slow in `NUM_IN_A_ROW` consecutive measurements.

        `times_RP` is in seconds. The line names the phase with the largest excess over the median.
        """
        medians_P = [median_low(times_R) for times_R in zip(*times_RP, strict=True)]
        limit, lines = THRESHOLDS[self._device.type] * sum(medians_P), list[str]()
        for rank, times_P in enumerate(times_RP):
            excess_P = [time - median for time, median in zip(times_P, medians_P, strict=True)]
            largest = max(excess_P)
            for phase, excess, median in zip(PHASES, excess_P, medians_P, strict=True):
                is_slow = excess == largest > limit
                streak = self._streaks[rank, phase] = is_slow * (self._streaks[rank, phase] + 1)
                if streak == NUM_IN_A_ROW:
                    seconds = median + excess
                    lines.append(
                        f"alarm at step {step}: rank {rank} on {self._hosts[rank]} is slow: {phase}"
                        f" takes {seconds:.3g} s, {seconds / max(median, 1e-6):.3g} times the "
                        "median of the ranks"
                    )
        return lines
