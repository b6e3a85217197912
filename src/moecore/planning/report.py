"""report_trace: the parts of a step's time on one GPU, its limit, and options that shorten it.

trace.json -> Trace -> one part for each microsecond -> options, by their largest gain
"""

import gzip
import json
import re
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any

from moecore.base.fields import Count, check_arguments, quote
from moecore.base.text import format_columns
from moecore.io.checkpoint.files import open_regular_file
from moecore.planning.option_sets import OPTIONS

# A kernel belongs to the first category whose pattern its name contains. Communication is first.
CATEGORIES = {
    "nccl": r"nccl",
    "nvlink dispatch": r"_spread_kernel|_reduce_kernel|limit_rows|_pack_rows",
    "copies to peers": r"Memcpy PtoP",
    "host copies": r"Memcpy (HtoD|DtoH)",
    "quantisation": r"quantise_|widen_rows|tile_tokens|gather_row_blocks"
    r"|^_?(amax|cast|pad_offsets)_|finite_amax|(block|square)_amax|pack_squares|transpose_values",
    "experts": r"_gg_|cooperative|pingpong|grouped|wgrad|_mlp|activation|gather_(packed_)?rows"
    r"|sum_rows|gather_used|map_row_tiles|_finish_bwd_kernel|sum_parts",
    "attention": r"sdpa|flash|fmha|attn|attention|_rotary_kernel|_index_scores|_select_keys"
    r"|_sum_selected_rows|_add_rows_by_key|^(delta_rule|kda)_|^convolution_(fwd|bwd)",
    "routing": r"route|router|_index|expert_counts|balance|scores|weights_kernel|_counts"
    r"|add_margins|even_bias|add_entropy|^_(split|product|sum_splits)_kernel"
    r"|plan_clones|physical_ids",
    "residual streams": r"(collapse|expand)_streams",
    "loss": r"cross_entropy|_row_statistics|_softmax_gradient",
    "dense products": r"nvjet|gemm|cutlass|cublas|splitK|_invariant_product",
    "optimizer": r"[Aa]dam|multi_tensor|foreach|lpnorm|norm_reduce|scaled_cast|_momentum_kernel",
    "pages": r"_pages_kernel|_take_rows_kernel",
    "fsdp copies": r"split_with_sizes|chunk_cat|Memcpy|Memset|CatArray|_copy_first_rows_kernel",
    "compiled": r"triton_",
}
OTHER, UNMARKED = "other", "unmarked"
MAX_BYTES = 2 * 10**8  # of an unpacked trace
MAX_CONTAINERS = 5 * 10**6  # lists and objects of a trace
MAX_TIME, MIN_TIME = 1e18, 1e-6  # in microseconds, of a time and of a duration
# The part of an NCCL kernel, by the mesh dim of its group, its profiler mark, or its collective.
NCCL = (
    ("group", "dispatch by collectives", r"^mesh_(ep|etp|ep_etp)$"),
    ("group", "tensor parallelism", r"^mesh_tp$"),
    ("group", "context parallelism", r"^mesh_cp(_inner|_outer)?$"),
    ("group", "pipeline", r"^mesh_pp$"),
    ("group", "sharding", r"^mesh_e?dp_"),
    ("phase", "dispatch by collectives", r"^(dispatch|combine)$"),
    ("collective", "dispatch by collectives", r"(?i)all_?to_?all"),
    ("collective", "pipeline", r"^(send|recv)$"),
    ("collective", "sharding", r"(?i)all_?gather|reduce_?scatter|all_?reduce"),
)
# If kernels of several parts run at once, the first part of this table counts.
PARTS = {
    "compute": ("experts", "experts by other products", "attention", "dense products"),
    "memory-bound operations": (
        *("quantisation", "routing", "residual streams", "loss", "optimizer", "pages"),
        *("fsdp copies", "compiled", OTHER),
    ),
    "communication": (
        *("dispatch by collectives", "nvlink dispatch", "copies to peers", "sharding", "pipeline"),
        *("tensor parallelism", "context parallelism", "other collectives"),
    ),
    "memory": ("host copies", "allocator"),
    "host": ("waits of the host", "late launches", "gaps between kernels"),
}
LIMIT_OF = {part: limit for limit, parts in PARTS.items() for part in parts}
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH = re.compile(r"Launch|Mem(cpy|set)")
WAIT = re.compile(r"^cu(da)?(Stream|Device|Event|Ctx)Synchronize")
ALLOCATION = re.compile(r"^cuda(Malloc|Free)(_|$)|^cuMem(Create|Map|Unmap|Release)")
NCCL_ARGS = ("Collective name", "Process Group Description")
FIX = "export one with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
LACKS = "be a trace of torch.profiler: an event lacks ts, dur or args"
MAX_GAINS, MIN_SHARE = 3, 0.01  # the least share of a step that an option may save
Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Kernel:
    """Record of one kernel on the GPU, from a trace; times are in microseconds."""

    name: str
    start: float
    end: float
    launched: float | None = None  # by the host; None = the trace has no such call
    phase: str = UNMARKED  # the innermost profiler mark of moecore around the host's call
    collective: str = ""  # the name of NCCL's collective
    group: str = ""  # the description of the collective's process group


@dataclass(frozen=True, slots=True)
class Trace:
    """The kernels of one rank's GPU in order of start time, and the host's calls."""

    kernels: Sequence[Kernel]
    launches: Collection[str]  # names of calls that launch work on the GPU
    waits: Sequence[tuple[float, float]]  # spans of synchronisations, in the order of their ends
    allocations: Sequence[tuple[float, float]]  # spans of driver calls of the allocator, as `waits`
    num_steps: int  # the number of steps that `profile.step()` marked; 1 without marks


@dataclass(frozen=True, slots=True)
class OptionGain:
    """An option that may shorten a step, and the share of the step that it can save."""

    option: str  # as text
    page: str  # of docs
    limit: str  # that the option reduces, such as "host"
    share: float  # the largest share of the step that the option saves


@dataclass(frozen=True, slots=True)
class Report:
    """The time of a step by cause, in milliseconds, largest first; `wall` is the sum."""

    num_steps: int
    wall: float
    parts: Mapping[str, float]
    gains: tuple[OptionGain, ...]  # at most three, the largest share first

    @property
    def ms_by_limit(self) -> dict[str, float]:
        """The milliseconds of a step by limit (such as "network"), largest first."""
        sums = {limit: sum(self.parts.get(p, 0.0) for p in names) for limit, names in PARTS.items()}
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    @property
    def limit_text(self) -> str:
        """Text: the limit with most time, such as memory bandwidth, and its largest part."""
        limit = next(iter(self.ms_by_limit))
        return f"{limit}, most of it {max(PARTS[limit], key=lambda p: self.parts.get(p, 0.0))}"

    def table(self) -> str:
        """Return text with the limits, their parts and the options to try."""
        lines: list[tuple[str, ...]] = [("what", "ms", "share")]
        for limit, ms in self.ms_by_limit.items():
            rows = [(f"  {part}", n) for part, n in self.parts.items() if part in PARTS[limit]]
            lines += [(w, f"{n:.2f}", f"{n / self.wall:.1%}") for w, n in [(limit, ms), *rows]]
        text = [f"{self.wall:.2f} ms a step", f"bound by {self.limit_text}", ""]
        text += format_columns(lines)
        text += ["", "next" if self.gains else "next: no known option saves 1%"]
        text += [f"  at most {x.share:.1%}: {x.option} (docs/{x.page})" for x in self.gains]
        return "\n".join(text)


def report_trace(path: str | Path, *, num_steps: Count | None = None) -> Report:
    """Return the report of one GPU's Chrome trace from torch.profiler, `.json` or `.json.gz`.

    `num_steps` None = the steps that `profile.step()` marked, or 1 without marks.
    """
    check_arguments(report_trace, locals())
    try:
        trace = _make_trace(_read_events(Path(path)))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        relation = error if isinstance(error, ValueError) else LACKS
        raise ValueError(f"path ({path!s:.200}) must {relation}") from None
    return make_report(trace, num_steps or trace.num_steps)


def make_report(trace: Trace, num_steps: int = 1) -> Report:
    """Return the report of a trace of `num_steps` steps: milliseconds per step, and options."""
    parts: dict[str, float] = {}
    for part, us in [*_attribute_busy_time(trace), *_attribute_idle_time(trace)]:
        parts[part] = parts.get(part, 0.0) + us * 1e-3 / num_steps
    wall, names = sum(parts.values()), {k.name for k in trace.kernels} | {*trace.launches}
    gains = [
        OptionGain(option.name, option.page, LIMIT_OF[option.shortens[0]], share)
        for option in OPTIONS
        if option.shortens and not any(re.search(option.unless, name) for name in names)
        for share in (option.max_share * sum(parts.get(p, 0.0) for p in option.shortens) / wall,)
        if share >= MIN_SHARE
    ]
    best = sorted(gains, key=lambda gain: -gain.share)[:MAX_GAINS]
    return Report(num_steps, wall, dict(sorted(parts.items(), key=lambda p: -p[1])), tuple(best))


@cache
def find_kernel_category(kernel_name: str) -> str:
    """Return the first of `CATEGORIES` whose pattern matches a kernel's name; "other" = none."""
    return next((c for c, pattern in CATEGORIES.items() if re.search(pattern, kernel_name)), OTHER)


def classify_kernel(kernel: Kernel) -> str:
    """Return the part of a step to which a kernel belongs: a key of `LIMIT_OF`."""
    category = find_kernel_category(kernel.name)
    if category == "dense products" and kernel.phase == "experts":
        return "experts by other products"
    parts = (
        p for field, p, pattern in NCCL if re.search(pattern, getattr(kernel, field) or kernel.name)
    )
    return next(parts, "other collectives") if category == "nccl" else category


def _attribute_busy_time(trace: Trace) -> Iterator[tuple[str, float]]:
    """Yield (part, microseconds) of intervals with kernels, with the first of `PARTS` that runs."""
    order = list(LIMIT_OF)
    edges = []
    for kernel in trace.kernels:
        place = order.index(classify_kernel(kernel))
        edges += [(kernel.start, 1, place), (kernel.end, -1, place)]
    edges.sort()
    counts, since = [0] * len(order), edges[0][0]
    for time, change, place in edges:
        part = next((p for p, number in zip(order, counts, strict=True) if number), None)
        if part is not None and time > since:
            yield part, time - since
        counts[place] += change
        since = time


def _attribute_idle_time(trace: Trace) -> Iterator[tuple[str, float]]:
    """Yield (part, microseconds) of the gaps in which no kernel runs; the part names the cause."""
    reached = trace.kernels[0].start
    for k in trace.kernels:
        if k.start > reached:
            i = bisect_right(trace.allocations, reached, key=itemgetter(1))
            j = bisect_left(trace.waits, reached, key=itemgetter(1))
            if i < len(trace.allocations) and trace.allocations[i][0] < k.start:
                cause = "allocator"
            elif k.launched is None or k.launched <= reached:  # it started late, or waited
                cause = "gaps between kernels"
            elif j < len(trace.waits) and trace.waits[j][1] <= k.launched:
                cause = "waits of the host"
            else:
                cause = "late launches"
            yield cause, k.start - reached
        reached = max(reached, k.end)


def _read_events(path: Path) -> list[Event]:
    """Return the complete ("X") events of a Chrome trace. Raises ValueError for another file."""
    raw = _read_trace_file(path)
    if len(raw) > MAX_BYTES:
        raise ValueError(f"have at most {MAX_BYTES} bytes unpacked: trace fewer steps")
    if raw.count(b"[") + raw.count(b"{") > MAX_CONTAINERS:  # an empty one takes 64 bytes and more
        raise ValueError(f"have at most {MAX_CONTAINERS} lists and objects: trace fewer steps")
    try:
        trace = json.loads(raw)
    except (ValueError, RecursionError):
        raise ValueError(f"be a Chrome trace: it is no whole JSON; {FIX}") from None
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ValueError(f"be a Chrome trace: it has no traceEvents; {FIX}")
    events: list[Event] = [
        e for e in trace["traceEvents"] if isinstance(e, dict) and e.get("ph") == "X"
    ]
    for event in events:
        numbers: list[Any] = [event.get("ts"), event.get("dur")]
        are_finite = all(type(n) in (int, float) and abs(n) < MAX_TIME for n in numbers)
        if not are_finite or not isinstance(event.get("name"), str):
            raise ValueError(
                f"have a name, finite ts and dur in each event, not {quote(event)}; {FIX}"
            )
    return events


def _read_trace_file(path: Path) -> bytes:
    """Return a file's bytes, decompressed, at most `MAX_BYTES` + 1; ValueError if unreadable."""
    try:
        is_directory = path.is_dir()
        descriptor = -1 if is_directory else open_regular_file(path, follow_symlinks=True)
    except FileNotFoundError:
        raise ValueError("be a file: it is not there") from None
    except (OSError, ValueError):
        raise ValueError(f"be a file that can be read; {FIX}") from None
    if is_directory:
        raise ValueError(
            "be a trace's file, not a directory: pass the .json or .json.gz that "
            f"prof.export_chrome_trace has written there, or {FIX}"
        )
    try:
        with open(descriptor, "rb") as file:
            is_packed = file.peek(2)[:2] == b"\x1f\x8b"
            unpacked = gzip.GzipFile(fileobj=file) if is_packed else file
            return unpacked.read(MAX_BYTES + 1) or b""  # None: a file that would wait
    except (EOFError, OSError, zlib.error):
        raise ValueError(f"be a Chrome trace: it is no whole JSON; {FIX}") from None


def _make_trace(events: list[Event]) -> Trace:
    """Return the kernels and host calls of events. ValueError unless all kernels are of one GPU."""
    # A start may be so large that start + duration == start in floating point.
    of_device = (e for e in events if e.get("cat") in DEVICE and e["dur"] >= MIN_TIME)
    on_device = [e for e in of_device if e["ts"] + e["dur"] > e["ts"]]
    if not on_device:
        raise ValueError(
            f"hold kernels of a GPU that take time, but it has none: run on a GPU, and {FIX}"
        )
    devices = {e["args"].get("device") for e in on_device}
    if len(devices) > 1:
        raise ValueError(f"hold one GPU, not {len(devices)}: export a trace on each rank")
    host = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    calls = {e["args"].get("correlation"): e for e in host if LAUNCH.search(e["name"])}
    phases = _map_launches_to_phases(events, calls)
    kernels = list[Kernel]()
    for e in sorted(on_device, key=itemgetter("ts")):
        number = e["args"].get("correlation")
        launched = calls[number]["ts"] if number in calls else None
        phase = phases.get(number, UNMARKED)
        texts = (str(e["args"].get(n) or "") for n in NCCL_ARGS)
        kernels.append(Kernel(e["name"], e["ts"], e["ts"] + e["dur"], launched, phase, *texts))

    def find_spans(pattern: re.Pattern[str]) -> Sequence[tuple[float, float]]:
        """Return (start, end) of host calls whose names match `pattern`, sorted by end."""
        spans = ((e["ts"], e["ts"] + e["dur"]) for e in host if pattern.search(e["name"]))
        return sorted(spans, key=itemgetter(1))

    steps = {e["name"] for e in events if str(e.get("name")).startswith("ProfilerStep#")}
    names = frozenset(e["name"] for e in calls.values())
    return Trace(kernels, names, find_spans(WAIT), find_spans(ALLOCATION), len(steps) or 1)


def _map_launches_to_phases(events: list[Event], host_calls: Mapping[Any, Event]) -> dict[Any, str]:
    """Return correlation number -> name of the innermost moecore mark around the launch."""
    queues: dict[Any, list[Event]] = {}
    for e in events:
        if e.get("cat") == "user_annotation" and str(e["name"]).startswith("moecore::"):
            queues.setdefault((e["pid"], e["tid"]), []).append(e)
    for marks in queues.values():
        marks.sort(key=lambda m: (-m["ts"], m["dur"]))  # the next one is last
    phases: dict[Any, str] = {}
    open_marks: dict[Any, list[Event]] = {thread: [] for thread in queues}
    for correlation, call in sorted(host_calls.items(), key=lambda item: item[1]["ts"]):
        thread, launch = (call["pid"], call["tid"]), call["ts"]
        marks = open_marks.get(thread, [])
        while queues.get(thread) and queues[thread][-1]["ts"] <= launch:
            marks.append(queues[thread].pop())
        while marks and marks[-1]["ts"] + marks[-1]["dur"] < launch:
            marks.pop()
        if marks:
            phases[correlation] = marks[-1]["name"].removeprefix("moecore::")
    return phases
