"""Where a step's time went on one rank's GPU, what bounds the step, and what to try next.

trace.json -> Trace -> each microsecond of its steps belongs to one part -> levers, by share
"""

from __future__ import annotations

import gzip
import json
import os
import re
import tempfile
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from moecore._fields import Count, check_arguments
from moecore.pipeline.timeline import ACTION
from moecore.tables import columns

CATEGORIES = {
    "nccl": r"nccl",
    "nvlink dispatch": r"_spread_kernel|_reduce_kernel|limit_rows|_pack_rows",
    "nvlink clones": r"_(store|receive)_(weights|grads)_kernel",
    "copies to peers": r"Memcpy PtoP",
    "host copies": r"Memcpy (HtoD|DtoH)",
    "quantisation": r"quantise_|widen_rows|tile_tokens|gather_row_blocks|^_(amax|cast)_kernel"
    r"|block_amax|transpose_values",
    "experts": r"_gg_|cooperative|pingpong|grouped|wgrad|_mlp|activation|gather_(packed_)?rows"
    r"|sum_rows|gather_used|map_row_tiles|_finish_bwd_kernel|sum_parts",
    "routing": r"route|router|_index|expert_counts|balance|scores|weights_kernel|_counts"
    r"|add_margins|even_bias|add_entropy|^_(split|product|sum_splits)_kernel"
    r"|plan_clones|physical_ids",
    "loss": r"cross_entropy",
    "attention": r"sdpa|flash|fmha|attn|attention|_rotary_kernel",
    "dense products": r"nvjet|gemm|cutlass|cublas|splitK",
    "optimizer": r"[Aa]dam|multi_tensor|foreach|lpnorm|norm_reduce|scaled_cast|_momentum_kernel",
    "pages": r"_pages_kernel|_take_rows_kernel",
    "fsdp copies": r"split_with_sizes|chunk_cat|Memcpy|Memset|CatArray|_copy_used_kernel",
    "compiled": r"triton_",
}
COMMUNICATION = ("nccl", "nvlink dispatch", "nvlink clones", "copies to peers", "host copies")
OTHER = "other"
UNMARKED = "unmarked"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """One launch on the device.

    Attributes:
        name: of the function.
        start: in microseconds.
        end: likewise.
        launched: when the host asked for it; None = not known.
        phase: of the step, by the marks around its launch.
        collective: what NCCL does in it.
        group: the process group's description, such as "mesh_ep".
    """

    name: str
    start: float
    end: float
    launched: float | None = None
    phase: str = UNMARKED
    collective: str = ""
    group: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Breakdown:
    """Milliseconds of one step.

    Attributes:
        wall: from the first kernel's start to the last one's end, over the steps.
        categories: name -> sum of its kernels' times, longest first.
        exposed: only communication ran.
        idle: nothing ran.
        kernels: launches.
        longest: name -> (sum of times, launches) of the kernels that took longest in all.
    """

    wall: float
    categories: dict[str, float]
    exposed: float
    idle: float
    kernels: int
    longest: dict[str, tuple[float, int]]


@cache
def category_of(name: str) -> str:
    """Return the category of a kernel."""
    found = (c for c, pattern in CATEGORIES.items() if re.search(pattern, name))
    return next(found, OTHER)


def break_down(
    kernels: Iterable[Kernel], *, num_steps: int = 1, num_longest: int = 40
) -> Breakdown:
    """Sum up kernels; see `Breakdown`.

    Example, us: a product from 0 to 3, nccl from 2 to 6, a product from 7 to 8: wall 8, exposed 3,
    idle 1.
    """
    kernels = list(kernels)
    if not kernels:
        return Breakdown(wall=0, categories={}, exposed=0, idle=0, kernels=0, longest={})
    scale = 1e-3 / num_steps
    sums: dict[str, float] = {}
    names: dict[str, tuple[float, int]] = {}
    for kernel in kernels:
        took, category = kernel.end - kernel.start, category_of(kernel.name)
        sums[category] = sums.get(category, 0.0) + took * scale
        total, count = names.get(kernel.name, (0.0, 0))
        names[kernel.name] = (total + took * scale, count + 1)
    wall = max(k.end for k in kernels) - min(k.start for k in kernels)
    busy = covered(kernels)
    computing = covered(k for k in kernels if category_of(k.name) not in COMMUNICATION)
    longest = sorted(names.items(), key=lambda item: -item[1][0])[:num_longest]
    return Breakdown(
        wall=wall * scale,
        categories=dict(sorted(sums.items(), key=lambda item: -item[1])),
        exposed=(busy - computing) * scale,
        idle=(wall - busy) * scale,
        kernels=len(kernels) // num_steps,
        longest=dict(longest),
    )


def covered(kernels: Iterable[Kernel]) -> float:
    """Return the microseconds in which at least one of the kernels runs."""
    covered, reached = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda k: k.start):
        if kernel.end > reached:
            covered += kernel.end - max(kernel.start, reached)
            reached = kernel.end
    return covered


def table(found: Breakdown) -> list[str]:
    """Return the categories as a Markdown table."""
    lines = ["| what | ms | share of the step |", "|---|---|---|"]
    rows = [*found.categories.items(), ("only communication", found.exposed), ("idle", found.idle)]
    return [*lines, *(f"| {n} | {ms:.1f} | {ms / found.wall:.1%} |" for n, ms in rows)]


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


# Where several run at once, the first part of this table counts: what computes hides the rest.
PARTS = {
    "compute": ("experts", "experts by other products", "attention", "dense products"),
    "memory-bound operations": (
        "quantisation",
        "routing",
        "loss",
        "optimizer",
        "pages",
        "fsdp copies",
        "compiled",
        "other",
    ),
    "communication": (
        "dispatch by collectives",
        "dispatch by nvlink",
        "sharding",
        "pipeline",
        "tensor parallelism",
        "context parallelism",
        "clones",
        "other collectives",
    ),
    "memory": ("host copies", "allocator"),
    "host": ("waits of the host", "late launches", "gaps between kernels"),
}
LIMIT_OF = {part: limit for limit, parts in PARTS.items() for part in parts}


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """When a lever may help.

    Attributes:
        parts: of which it takes something away.
        most: how much of them at most, by bytes or arithmetic.
        lever: what to try.
        page: of docs, with its section.
        unless: a pattern of names of kernels and launches that show that it is pulled already, or
            cannot be.
    """

    parts: tuple[str, ...]
    lever: str
    page: str
    most: float = 1.0
    unless: str = r"(?!)"

    def fits(self, names: Collection[str]) -> bool:
        """Whether no name speaks against it."""
        return not any(re.search(self.unless, name) for name in names)


# A part with several levers has the one that costs least first.
TABLE = (
    Advice(
        parts=("allocator",),
        lever="PYTORCH_ALLOC_CONF=expandable_segments:True, then MemoryOptions(recompute="
        '"gemm_last")',
        page="performance.md#when-memory-runs-out",
    ),
    Advice(
        parts=("host copies",),
        lever="a smaller MemoryOptions.offload_fraction, and recompute in its place",
        page="memory.md#offload",
    ),
    Advice(
        parts=("dispatch by collectives",),
        lever='parallelize_moe(dispatcher="nvlink") where ep x etp ranks share a host',
        page="dispatchers.md#nvlink",
    ),
    Advice(
        parts=("dispatch by collectives",),
        lever='PipelineConfig(schedule="overlapped") or TrainStep.side_by_side: a forward beside '
        "a backward",
        page="pipeline.md#schedules",
    ),
    Advice(
        parts=("dispatch by nvlink",),
        lever="NVLinkOptions(fp8_dispatch=True)",
        page="dispatchers.md#tokens-as-fp8",
        most=1 / 8,  # one of four transfers in half its bytes
    ),
    Advice(
        parts=("sharding",),
        lever="FSDPOptions(prefetch_blocks=2)",
        page="sharding.md#units",
    ),
    Advice(
        parts=("sharding",),
        lever='FSDPOptions(dense_strategy="optim", experts_strategy="optim") with several '
        "micro-batches",
        page="sharding.md#strategies",
    ),
    Advice(
        parts=("pipeline",),
        lever="balanced_layout, then another PipelineConfig.schedule or more chunks",
        page="pipeline.md#schedules",
    ),
    Advice(
        parts=("tensor parallelism",),
        lever="a smaller ParallelConfig.tp: ep for experts, cp for long sequences",
        page="guide.md#degrees",
    ),
    Advice(
        parts=("context parallelism",),
        lever="another ContextOptions.way, or a smaller ParallelConfig.cp",
        page="sequences.md#which-way",
    ),
    Advice(
        parts=("clones",),
        lever="a smaller CloneOptions.per_rank",
        page="balancing.md#skewed-loads",
    ),
    Advice(
        parts=("waits of the host", "late launches", "gaps between kernels"),
        lever="GraphedForwardBackward: forward and backward as one launch",
        page="cuda_graphs.md",
        unless=r"GraphLaunch|SendRecv",  # its dispatcher waits for sizes
    ),
    Advice(
        parts=("waits of the host", "late launches"),
        lever="parallelize_moe(graph_dense=True): parts of blocks as graphs",
        page="cuda_graphs.md#graphs-of-parts",
        unless=r"GraphLaunch|_spread_kernel",
    ),
    Advice(
        parts=("late launches",),
        lever="fewer launches: more tokens per micro-batch, less tp, FSDPOptions("
        "blocks_per_unit=4)",
        page="performance.md#what-each-option-does",
    ),
    Advice(
        parts=("experts by other products",),
        lever='parallelize_moe(expert_backend="auto"): grouped products',
        page="parallelize.md",
    ),
    Advice(
        parts=("experts", "dense products"),
        lever='parallelize_moe(precision="auto"), or "blockwise" for dense products too',
        page="precision.md#recipes",
        most=1 / 2,  # FP8 has twice the peak of bf16
        unless=r"quantise_",
    ),
    Advice(
        parts=("other",),
        lever="parallelize_moe(compile_dense=True)",
        page="performance.md#what-each-option-does",
        unless=r"^triton_",
    ),
    Advice(
        parts=("optimizer",),
        lever="moecore.optim.AdamW(moment_dtype=torch.bfloat16)",
        page="performance.md#adamw",
        most=3 / 8,  # 20 bytes per parameter in place of the 32 of torch's with clipping
    ),
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
