"""Read what torch.profiler exported: kernels of one GPU, and what the host did about them.

kernel      <- correlation ->  the host's call that launched it: when, on which thread
that call   <- thread, time ->  marks around it: `moecore::...`, autograd's backward
"""

from __future__ import annotations

import gzip
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from moecore.base.fields import check_arguments
from moecore.parallel.pipeline.timeline import ACTION
from moecore.planning.trace import UNMARKED, Kernel

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")
GRAPH = "GraphLaunch"
LAUNCH = re.compile(r"Launch|Mem(cpy|set)")
WAIT = re.compile(r"^cu(da)?(Stream|Device|Event|Ctx)Synchronize")
ALLOCATION = re.compile(r"^cuda(Malloc|Free)(_|$)|^cuMem(Create|Map|Unmap|Release)")
PIPELINE = {"F": "forward", "B": "backward", "D": "backward", "W": "weight gradients"}
FIX = "export one with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"


class Range(NamedTuple):
    """From when to when, in microseconds."""

    start: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """What one rank's GPU ran in some steps.

    Attributes:
        kernels: in the order of their starts; copies and memsets are among them.
        launches: the host's calls that put work on the GPU, by name.
        waits: in which the host waited for the GPU, in the order of their ends.
        allocations: in which the allocator took memory from the driver or gave it back, likewise.
        num_steps: as many as `profile.step()` has marked, else 1.
    """

    kernels: tuple[Kernel, ...]
    launches: Mapping[str, int]
    waits: tuple[Range, ...]
    allocations: tuple[Range, ...]
    num_steps: int


class _Call(NamedTuple):
    """The host's call that launched something."""

    start: float
    thread: tuple[Any, Any]
    is_graph: bool


class _Mark(NamedTuple):
    """A phase of the step on a thread of the host."""

    start: float
    end: float
    phase: str


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Return what a Chrome trace holds.

    Args:
        path: as `torch.profiler.profile.export_chrome_trace` writes it, `.json` or `.json.gz`.

    Raises:
        ValueError: when it is no such trace, or holds kernels of no GPU or of several.
    """
    check_arguments(read_trace, locals())
    try:
        return _trace(_events(Path(path)))
    except ValueError as error:
        raise ValueError(f"path ({os.fspath(path)}) must {error}") from None
    except (KeyError, TypeError, AttributeError):
        raise ValueError(
            f"path ({os.fspath(path)}) must be a trace of torch.profiler: an event lacks ts, dur "
            "or args"
        ) from None


def _events(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise ValueError("be a file: it is not there")
    raw = path.read_bytes()
    try:
        found = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except (ValueError, EOFError, OSError):
        raise ValueError(f"be a Chrome trace: it is no whole JSON; {FIX}") from None
    if not isinstance(found, dict) or not isinstance(found.get("traceEvents"), list):
        raise ValueError(f"be a Chrome trace: it has no traceEvents; {FIX}")
    return [event for event in found["traceEvents"] if event.get("ph") == "X"]


def _trace(events: list[dict[str, Any]]) -> Trace:
    on_device = [e for e in events if e.get("cat") in DEVICE and e["dur"] > 0]
    if not on_device:
        raise ValueError(
            f"hold kernels of a GPU, but its run had none: profile on a GPU, and {FIX}"
        )
    devices = {e["args"].get("device") for e in on_device}
    if len(devices) > 1:
        raise ValueError(f"hold one GPU, not {len(devices)}: export a trace on each rank")
    host_calls = [e for e in events if e.get("cat") in CALLS]
    calls = {
        e["args"].get("correlation"): _Call(e["ts"], (e["pid"], e["tid"]), GRAPH in e["name"])
        for e in host_calls
        if LAUNCH.search(e["name"])
    }
    phases = _phases(events, calls)
    kernels = (_kernel(e, calls, phases) for e in on_device)
    steps = {e["name"] for e in events if str(e.get("name")).startswith("ProfilerStep#")}
    return Trace(
        kernels=tuple(sorted(kernels, key=lambda k: k.start)),
        launches=Counter(e["name"] for e in host_calls if LAUNCH.search(e["name"])),
        waits=_ranges(e for e in host_calls if WAIT.search(e["name"])),
        allocations=_ranges(e for e in host_calls if ALLOCATION.search(e["name"])),
        num_steps=len(steps) or 1,
    )


def _kernel(
    event: Mapping[str, Any], calls: Mapping[Any, _Call], phases: Mapping[Any, str]
) -> Kernel:
    args = event["args"]
    correlation = args.get("correlation")
    call = calls.get(correlation)
    return Kernel(
        name=event["name"],
        start=event["ts"],
        end=event["ts"] + event["dur"],
        launched=None if call is None else call.start,
        phase=phases.get(correlation, UNMARKED),
        collective=str(args.get("Collective name") or ""),
        group=str(args.get("Process Group Description") or ""),
    )


def _ranges(events: Iterable[Mapping[str, Any]]) -> tuple[Range, ...]:
    found = (Range(e["ts"], e["ts"] + e["dur"]) for e in events)
    return tuple(sorted(found, key=lambda r: r.end))


def _phases(events: Iterable[Mapping[str, Any]], calls: Mapping[Any, _Call]) -> dict[Any, str]:
    """Return the phase of each correlation whose launch lies in one: the innermost mark's.

    Example, us on one thread: a backward from 0 to 9, a router from 2 to 5: a launch at 3 is the
    router's, at 6 the backward's, and at 10 nobody's.
    """
    of_threads: dict[Any, list[_Mark]] = {}
    for event in events:
        phase = _phase_of(str(event.get("cat")), str(event.get("name")))
        if phase is not None:
            mark = _Mark(event["ts"], event["ts"] + event["dur"], phase)
            of_threads.setdefault((event["pid"], event["tid"]), []).append(mark)
    for marks in of_threads.values():
        marks.sort(key=lambda m: (-m.start, m.end))  # the next one is last
    found: dict[Any, str] = {}
    within: dict[Any, list[_Mark]] = {thread: [] for thread in of_threads}
    for correlation, call in sorted(calls.items(), key=lambda item: item[1].start):
        if call.is_graph:
            found[correlation] = "CUDA graph"
            continue
        ahead, open_marks = of_threads.get(call.thread, []), within.get(call.thread, [])
        while ahead and ahead[-1].start <= call.start:
            open_marks.append(ahead.pop())
        while open_marks and open_marks[-1].end < call.start:
            open_marks.pop()
        if open_marks:
            found[correlation] = open_marks[-1].phase
    return found


def _phase_of(category: str, name: str) -> str | None:
    """Return the phase that a range of the host stands for; None for all others."""
    if category == "cpu_op" and name.startswith("autograd::engine::evaluate_function"):
        return "backward"
    if category != "user_annotation":
        return None
    if name.startswith("Optimizer.step#"):
        return "optimizer"
    if not name.startswith("moecore::"):
        return None
    of_pipeline = [PIPELINE[kind] for kind, *_ in ACTION.findall(name)]
    return " beside ".join(of_pipeline) or name.removeprefix("moecore::")
