"""Stragglers: ranks whose own work in a phase of a step is slower than on other ranks; slow links.

    data                    the host reads this rank's batch
    forward and backward    all micro-batches of the step
    optimizer               clipping and the update

A rank that waits for another rank is not slow. The time of a phase therefore excludes each interval
in which this rank is in a collective of torch.distributed, from the call to the end of the wait. On
GPUs, CUDA events on the compute stream bound each interval and each phase, except for "data", which
is host work. The host reads the events after the step is complete, so that the step has no
synchronisation. Waits inside a kernel (dispatcher "nvlink") or inside a CUDA graph are not
excluded: all ranks then have equal times, and a slow rank may stay unnoticed.

In a measured step, each rank also sends a message to the next rank and to its counterpart on the
next host. A slow link delays both of its ranks. The time of a link is therefore the smaller time of
its two ranks. The exchange begins after a collective, so that no rank waits for a late rank.

The steps whose expert loads are logged are measured, and one all-gather of up to five numbers per
rank in a later step compares the ranks. Other steps have no measurement.
"""

import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import pairwise
from statistics import median_low
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.base.rank_checks import gather_objects, shift_ranks
from moecore.base.streams import copy_to_device
from moecore.base.torch_private import (
    all_gather_single,
    is_gloo,
    patch_attributes,
    wrap_collectives,
)
from moecore.parallel.fsdp.transport import StreamEvent
from moecore.recipes.metrics import Moment

DATA, COMPUTE, OPTIMIZER = PHASES = ("data", "forward and backward", "optimizer")
# A rank is slow if its phase exceeds the median over ranks by this share of the median step.
THRESHOLDS = {"cuda": 0.1, "cpu": 0.5}  # CPU ranks share cores, so their times are noisy
LINK_FACTORS = {"cuda": 1.5, "cpu": 3.0}  # a slow link's time over the median of similar links
LINK_BYTES, LINK_RUNS = 1 << 23, 3  # of a message; the fastest run counts
NUM_IN_A_ROW = 2  # measurements of a slow rank or link before its alarm

Span = tuple[Moment, Moment]
CPU = torch.device("cpu")


class PhaseTimer:
    """Measures the seconds of each phase of a step on this rank, without collectives."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: dict[str, tuple[Span, list[Span]]] = {}  # phase -> its span and its waits
        self.link_spans: list[list[Span]] = []  # of `Stragglers.exchange_messages`

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
        """Return the seconds of each of `PHASES`, and of an exchange at each distance of ranks.

        The device must have completed the step.
        """
        phases = [
            began.seconds_until(ended) - sum(a.seconds_until(b) for a, b in waits)
            for (began, ended), waits in map(self._spans.__getitem__, PHASES)
        ]
        return phases + [min(a.seconds_until(b) for a, b in spans) for spans in self.link_spans]


class Stragglers:
    """Compares phases of a step, and links, between ranks. The constructor is collective."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._hosts: list[str] = gather_objects(socket.gethostname())
        size, ranks_per_host = len(self._hosts), self._hosts.count(self._hosts[0])
        # Between two ranks, there is no other link to compare with.
        self._distances = sorted({d for d in (1, ranks_per_host) if d < size and size > 2})
        self._streaks = Counter[tuple[int, Any]]()  # rank and phase or distance -> in a row
        self.times: list[float] | None = None  # of this rank, which no all-gather has sent yet

    def gather(self) -> Tensor | None:
        """All-gather times; return fp32 seconds [ranks, phases + distances], None = no times."""
        if self.times is None:
            return None
        times_P = torch.tensor(self.times, dtype=torch.float32, device=CPU)
        times_P = copy_to_device(times_P, self._device)
        self.times, times_of_ranks = None, times_P.new_empty(len(self._hosts) * len(times_P))
        all_gather_single(times_of_ranks, times_P)
        return times_of_ranks.view(len(self._hosts), -1)

    def exchange_messages(self) -> list[list[Span]]:
        """Send messages to the ranks at each distance; return the spans. Collective, no host sync.

        All ranks must call this method directly after a collective.
        """
        world: Any = dist.group.WORLD
        device = CPU if is_gloo(world, self._device.type) else self._device
        spans = list[list[Span]]()
        for distance in self._distances:
            outgoing, incoming = torch.empty(2, LINK_BYTES, dtype=torch.uint8, device=device)
            moments = [Moment(device)]
            for _ in range(LINK_RUNS):
                shift_ranks(outgoing, incoming, distance)
                moments.append(Moment(device))
            spans.append([*pairwise(moments)])
        return spans

    def find_alarms(self, step: int, times: list[list[float]]) -> list[str]:
        """Return one line for each rank or link that is slow in consecutive measurements.

        `times` is in seconds, as from `gather`. There are `NUM_IN_A_ROW` such measurements. A line
        about a rank names the phase with the largest excess over the median.
        """
        times_RP = [of_rank[: len(PHASES)] for of_rank in times]
        lines = [*self._find_slow_phases(times_RP)]
        for i, distance in enumerate(self._distances, len(PHASES)):
            lines += self._find_slow_links(distance, [of_rank[i] for of_rank in times])
        return [f"alarm at step {step}: {line}" for line in lines]

    def _find_slow_links(self, distance: int, times_R: list[float]) -> Iterator[str]:
        """Yield a line for each slow link from a rank to rank + `distance`."""
        size, hosts = len(times_R), self._hosts
        peers = [(rank + distance) % size for rank in range(size)]
        links_R = [min(time, times_R[peer]) for time, peer in zip(times_R, peers, strict=True)]
        is_inside = [hosts[rank] == hosts[peer] for rank, peer in enumerate(peers)]
        for rank, (peer, seconds) in enumerate(zip(peers, links_R, strict=True)):
            similar = [t for t, k in zip(links_R, is_inside, strict=True) if k == is_inside[rank]]
            median = median_low(similar)
            is_slow = seconds > LINK_FACTORS[self._device.type] * median
            streak = self._streaks[rank, distance] = is_slow * (self._streaks[rank, distance] + 1)
            if streak == NUM_IN_A_ROW:
                yield (
                    f"the link from rank {rank} on {hosts[rank]} to rank {peer} on {hosts[peer]} "
                    f"is slow: {LINK_BYTES >> 20} MiB take {seconds:.3g} s, "
                    f"{seconds / median:.3g} times the median of links "
                    f"{'inside' if is_inside[rank] else 'between'} hosts"
                )

    def _find_slow_phases(self, times_RP: list[list[float]]) -> Iterator[str]:
        """Yield a line for each rank with a slow phase."""
        medians_P = [median_low(times_R) for times_R in zip(*times_RP, strict=True)]
        limit = THRESHOLDS[self._device.type] * sum(medians_P)
        for rank, times_P in enumerate(times_RP):
            excess_P = [time - median for time, median in zip(times_P, medians_P, strict=True)]
            largest = max(excess_P)
            for phase, excess, median in zip(PHASES, excess_P, medians_P, strict=True):
                is_slow = excess == largest > limit
                streak = self._streaks[rank, phase] = is_slow * (self._streaks[rank, phase] + 1)
                if streak == NUM_IN_A_ROW:
                    seconds = median + excess
                    yield (
                        f"rank {rank} on {self._hosts[rank]} is slow: {phase} takes {seconds:.3g} "
                        f"s, {seconds / max(median, 1e-6):.3g} times the median of the ranks"
                    )
