"""Measurement of a call: times, saved and peak bytes, kernel launches and host syncs.

Every round runs each variant once, in a new order: clock drift affects all of them equally, and so
does the variant before (a GPU at its power limit is slower after a hot variant than after a cool
one). The median counts, with the 20th and 80th percentile. On a GPU each call is timed by two CUDA
events, and nothing waits for the device between calls: the host runs ahead as in training. Before
each call a buffer larger than the L2 is read, so that no variant finds its inputs there. (The
writes of a written buffer would overlap the timed call.)
"""

from __future__ import annotations

import gc
import math
import random
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

Call = Callable[[], Any]

WARM_UP_S = 1.0  # until a GPU at its power limit has settled
FLUSH_BYTES = 256 << 20  # the L2 of an H200 holds 60 MB
CYCLES_PER_MS = 2_000_000  # of a GPU at about 2 GHz; only the length of a pause depends on it


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """Limits on the duration of a measurement.

    Attributes:
        seconds: for all rounds of a group of variants.
        least: fewest rounds.
        most: most rounds.
        warm_up_s: seconds before the first round that counts.
    """

    seconds: float
    least: int
    most: int
    warm_up_s: float = WARM_UP_S


FULL = Effort(seconds=2.0, least=12, most=100)
QUICK = Effort(seconds=0.5, least=5, most=20, warm_up_s=0.3)
SMOKE = Effort(seconds=0.1, least=3, most=5, warm_up_s=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Milliseconds of one variant.

    Attributes:
        ms: median.
        p20, p80: percentiles.
        repeats: number of timed calls.
        host_ms: least host time of the call with an idle GPU; None on a CPU.
    """

    ms: float
    p20: float
    p80: float
    repeats: int
    host_ms: float | None = None


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` (0 to 1) of the values are, linearly interpolated.

    Example: of [10, 20, 40], share 0.5 is 20 and share 0.75 is 30.

    Raises:
        ValueError: if there are no values.
    """
    if not values:
        raise ValueError("values ([]) must not be empty: time at least one call")
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def time_variants(
    variants: dict[str, Call],
    *,
    device: torch.device,
    effort: Effort,
    prepare: Callable[[str], Any] = lambda name: None,
    lead_ms: float = 0.0,
) -> dict[str, Timing]:
    """Time the variants, each once per round, in orders that are the same in every run.

    Args:
        variants: name -> call.
        device: of the calls.
        effort: limits on the duration.
        prepare: called with the variant's name before each of its calls; not timed.
        lead_ms: the GPU pauses for this time before each call, so that the launches of a short
            call queue up and its kernels run back to back.

    Returns:
        Name -> timing, over the same number of rounds.
    """
    clock = _GpuClock(device, lead_ms) if device.type == "cuda" else _HostClock()
    rounds = _warm_up(variants, clock, effort, prepare)
    spans: dict[str, list[Any]] = {name: [] for name in variants}
    order, shuffle = list(variants), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            prepare(name)
            spans[name].append(clock.span(variants[name]))
    clock.wait()
    timings = {}
    for name, call in variants.items():
        times = [clock.milliseconds(span) for span in spans[name]]
        timings[name] = Timing(
            ms=percentile(times, 0.5),
            p20=percentile(times, 0.2),
            p80=percentile(times, 0.8),
            repeats=len(times),
            host_ms=_measure_host_ms(partial(prepare, name), call, clock),
        )
    return timings


def _warm_up(
    variants: dict[str, Call], clock: Any, effort: Effort, prepare: Callable[[str], Any]
) -> int:
    """Run rounds for `effort.warm_up_s`, at least two; return how many rounds fit the effort."""
    start = time.perf_counter()
    rounds, seconds = 0, 0.0
    while rounds < 2 or time.perf_counter() - start < effort.warm_up_s:
        began = time.perf_counter()
        for name, call in variants.items():
            prepare(name)
            clock.span(call)
        clock.wait()
        rounds, seconds = rounds + 1, time.perf_counter() - began
    fitting = int(effort.seconds / max(seconds, 1e-6))
    return min(max(fitting, effort.least), effort.most)


def _measure_host_ms(prepare: Call, call: Call, clock: Any) -> float | None:
    """Return the least host time of a call with an idle GPU; None on a CPU."""
    if isinstance(clock, _HostClock):
        return None
    times = []
    for _ in range(3):
        prepare()
        clock.wait()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    clock.wait()
    return min(times)


class _GpuClock:
    """CUDA events around a call, after a flush of the L2 and an optional pause."""

    def __init__(self, device: torch.device, lead_ms: float) -> None:
        self.flush = torch.ones(FLUSH_BYTES // 4, device=device)
        self.cycles = int(lead_ms * CYCLES_PER_MS)

    def span(self, call: Call) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.sum()
        if self.cycles:
            torch.cuda._sleep(self.cycles)
        start.record()
        call()
        stop.record()
        return start, stop

    def wait(self) -> None:
        torch.cuda.synchronize()

    def milliseconds(self, span: tuple[torch.cuda.Event, torch.cuda.Event]) -> float:
        return span[0].elapsed_time(span[1])


class _HostClock:
    """The host's clock, for CPU calls, which return when they are done."""

    def span(self, call: Call) -> float:
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3

    def wait(self) -> None:
        pass

    def milliseconds(self, span: float) -> float:
        return span


@dataclass(frozen=True, slots=True)
class Saved:
    """Bytes that a forward saves for its backward.

    Attributes:
        hook_bytes: storages saved by autograd, each counted once and in full.
        allocated_bytes: the same by the allocator, which includes memory that autograd does not
            know of; None on a CPU.
    """

    hook_bytes: int
    allocated_bytes: int | None


class _SavedTensor:
    """A tensor saved by autograd; freed when no graph needs it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def measure_saved(
    forward: Callable[[], Tensor], *, parameters: Iterable[Tensor], inputs: Iterable[Tensor]
) -> Saved:
    """Count the bytes that a forward saves for backward, with its inputs, without its parameters.

    The allocator's count is the memory left by the call, minus the output if only the caller holds
    it, plus the saved inputs, which existed before.

    Args:
        forward: returns the output, with its graph; called once.
        parameters: tensors that are not counted, nor are their views.
        inputs: tensors that exist before, and count if they are saved.
    """
    refs: list[weakref.ref[_SavedTensor]] = []

    def pack(tensor: Tensor) -> _SavedTensor:
        kept = _SavedTensor(tensor)
        refs.append(weakref.ref(kept))
        return kept

    gc.collect()
    before = _get_allocated()
    with saved_tensors_hooks(pack, lambda kept: kept.tensor):
        y = forward()
    gc.collect()
    after = _get_allocated()

    owned = {_get_storage_address(p) for p in parameters}
    sizes = {}
    for kept in filter(None, (ref() for ref in refs)):
        sizes[_get_storage_address(kept.tensor)] = kept.tensor.untyped_storage().nbytes()
    sizes = {address: size for address, size in sizes.items() if address not in owned}
    if before is None or after is None:
        return Saved(sum(sizes.values()), None)
    earlier = sum(sizes.get(address, 0) for address in {_get_storage_address(x) for x in inputs})
    output = 0 if _get_storage_address(y) in sizes else y.untyped_storage().nbytes()
    return Saved(sum(sizes.values()), after - before - output + earlier)


def _get_storage_address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _get_allocated() -> int | None:
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def synchronize(device: torch.device | str) -> None:
    """Wait for the device; a CPU has no work left."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def measure_peak(call: Call, *, device: torch.device) -> int | None:
    """Return the most bytes that a call allocates; None on a CPU."""
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def count_launches(call: Call, *, device: torch.device) -> int | None:
    """Return the number of kernels that a call launches, without the copy engine's operations.

    None on a CPU, or if the profiler records no kernel.
    """
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    on_device = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return len([e for e in on_device if not e.name.startswith(("Memcpy", "Memset"))]) or None


def count_syncs(call: Call, *, device: torch.device) -> int | None:
    """Return how often a call makes the host wait for the device; None on a CPU.

    The call first runs with syncs forbidden; if it raises, a second run counts the warnings.
    """
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        call()
        return 0
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            call()
        return max(1, sum("synchronizing" in str(w.message) for w in caught))
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
