"""`moecore plan`, `dry-run` and `report`: the commands, and a plan's picture."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections import defaultdict
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, get_args

import torch

from moecore.base.fields import NumBytes, UsageError, check_arguments
from moecore.base.options.dispatch import NVLinkOptions
from moecore.base.options.fsdp import FSDPOptions, Strategy
from moecore.base.options.memory import GEMM_LAST, MemoryOptions, StashOptions
from moecore.base.options.precision import Precision, PrecisionName
from moecore.base.tables import columns, shown_bytes
from moecore.models import PRESETS
from moecore.models.config import DecoderConfig
from moecore.parallel.mesh import ParallelConfig
from moecore.parallel.pipeline.config import PipelineConfig
from moecore.parallel.pipeline.orders import PAIRING, ScheduleName
from moecore.parallel.pipeline.timeline import draw
from moecore.planning.costs import CostTable
from moecore.planning.dry_run import DryRun, dry_run
from moecore.planning.foldings import ANY, FOLDING, Folding, SearchRequest
from moecore.planning.gpus import GPUS, NODE
from moecore.planning.levers import next_change
from moecore.planning.memory import MemoryPlan, plan_memory, plan_peak
from moecore.planning.report import report_trace
from moecore.planning.run import (
    MomentDtype,
    OptimizerOptions,
    TrainingRun,
    call_of,
    flags_of,
    new_garbage,
)
from moecore.planning.search import Fitting, explained, planned, search, shown_levers
from moecore.planning.stored import stages_of
from moecore.planning.times import TimePlan, plan_time, time_step

PLAN_EXAMPLE = """\
examples:
  moecore plan --preset deepseek-v3 --gpus 256 --gpu h100-80
  moecore plan --preset deepseek-v3 --gpus 256 --gpu h100-80 --explain pp=8,ep=8
  moecore plan --preset deepseek-v3 --gpus 256 --gpu h100-80 --pp 8 --ep 32 \\
    --schedule interleaved --chunks 2 --micro-batches 64 --precision blockwise --recompute moe"""

DEGREES = tuple(field.name for field in fields(ParallelConfig))


def add_plan(rooms: Any) -> None:
    """Add the command to those of `moecore`."""
    parser = rooms.add_parser(
        "plan",
        help="which training run fits a cluster that is not there, and what its ranks hold",
        description="Without degrees: foldings that fit, best first. With degrees: bytes by kind "
        "for each pipeline rank and the most at once, from the plan and the step that the run has.",
        epilog=PLAN_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run_plan)
    add_run_options(parser)
    add = parser.add_argument
    add("--global-batch", type=int, help="rows of a step; without degrees; default: 8 per GPU")
    add("--gpus-per-node", type=int, help="within NVLink; without degrees; default: 8")
    add("--top", type=int, help="foldings to plan in full; without degrees; default: 3")
    add("--explain", metavar="PP=8,EP=8", help="why this folding is refused, or what it needs")
    add("--call", action="store_true", help="print the Python of the run, or of the best one")
    add("--png", type=Path, metavar="FILE", help="write bars of its memory")
    add("--timeline", type=Path, metavar="FILE", help="write a PNG of its pipeline's step")
    add("--table", type=Path, metavar="FILE", help="costs that `moecore measure` has written")
    help = "share of exchanges that overlapped stages hide; default: 0, as measured with NCCL; 0.93 "
    add("--pairs-hide", type=float, help=f"{help}is what Megatron-Core's report has")
    add("--json", action="store_true", help="print one JSON object")


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `run_of_options`."""
    add = parser.add_argument
    add("--preset", required=True, choices=tuple(PRESETS), help="the model")
    add("--gpus", type=int, required=True, help="ranks of the world")
    add("--gpu", default="h100-80", choices=tuple(GPUS), help="its kind")
    add("--seq-len", type=int, default=4096, help="tokens of a row")
    add("--batch-size", type=int, help="rows of a data rank's micro-batch; with degrees; default: 1")
    add("--micro-batches", type=int, help="of a step, on a data rank; with degrees; default: 1")
    for name in DEGREES:
        add(f"--{name.replace('_', '-')}", type=int, help="degree; default: search")
    add("--layout", help='pipeline stages, such as "Et*3|(tt|)*29m|L"')
    add("--chunks", type=int, help="pipeline stages of a rank; not with --layout")
    add("--schedule", choices=get_args(ScheduleName), help="of pipeline stages; default: 1f1b")
    strategies = get_args(Strategy)
    help = "ZeRO of blocks; with degrees; default: optim_grads_params"
    add("--dense-strategy", choices=strategies, help=help)
    add("--fp8-param-gather", action="store_true", help="gather weights of blockwise FP8 as FP8")
    add("--experts-strategy", choices=strategies, help="of experts; default: as blocks")
    precisions = (*get_args(PrecisionName), "bf16")
    add("--precision", choices=precisions, help="default: bf16, or in a search as needed")
    add("--recompute", nargs="+", default=(), help="parts, as of MemoryOptions")
    add("--offload", nargs="+", default=(), help="parts, likewise")
    add("--moments", default="float32", choices=get_args(MomentDtype), help="dtype of AdamW's")
    add("--stash", action="store_true", help="experts' rows in pages, with dispatcher nvlink")
    help = "capacity of dispatcher nvlink over even loads; default: 2.0 within nodes"
    add("--row-factor", type=float, help=help)
    add("--master-remainder", action="store_true", help="bf16 weights, see moecore.train.AdamW")
    add("--state-offload", type=float, default=0.0, help="fraction of AdamW's state in host memory")


@new_garbage()
def run_plan(args: Any) -> int:
    """Print the plan, or what a search finds; 1 where nothing fits."""
    _refuse_unread(args)
    if args.explain is not None:
        return _explain(args)
    if not _has_degrees(args):
        return _search(args)
    run = run_of_options(args)
    if args.call:
        print(call_of(run))
        return 0
    plan, time = plan_memory(run), plan_time(run, _table(args))
    peaks = [rank.num_bytes for rank in plan.ranks]
    _write(args, plan, time)
    largest, memory = plan.largest, GPUS[args.gpu].memory
    fits = max(peaks) <= memory
    if args.json:
        ranks = [
            asdict(rank) | {"peak": peak} for rank, peak in zip(plan.ranks, peaks, strict=True)
        ]
        found = {"gpu": args.gpu, "memory": memory, "fits": fits, "ranks": ranks}
        change = next_change(time, _table(args))
        found |= _numbers(time) | {"next": None if change is None else asdict(change)}
        print(json.dumps(found))
        return 0 if fits else 1
    print(plan.table())
    print(
        f"pipeline rank {peaks.index(max(peaks))} has most at once: {shown_bytes(max(peaks))} of "
        f"{shown_bytes(memory)} ({args.gpu})"
    )
    print(f"pinned host memory of a node: {shown_bytes(plan.node_host_bytes)}")
    if not fits:
        kind, size = max(largest.device.items(), key=lambda item: item[1])
        print(f"does not fit: {kind} is the largest part ({shown_bytes(size)})")
        print(f"options with which it fits, if there are any: --explain {_as_folding(run)}")
    _print_time(args, time)
    return 0 if fits else 1


# Options that some modes of the command do not read.
OF_SEARCHES = ("global_batch", "gpus_per_node")
OF_STAGES = ("layout", "chunks", "schedule")
STRATEGIES = ("dense_strategy", "experts_strategy", "fp8_param_gather")
OF_RUNS = ("batch_size", "micro_batches", *OF_STAGES, *STRATEGIES)


def _has_degrees(args: Any) -> bool:
    return any(getattr(args, name) is not None for name in DEGREES)


def _refuse_unread(args: Any) -> None:
    """Raise a UsageError for the first option that is given and that would not be read."""
    if args.explain is not None:
        unread, why = (*DEGREES, *OF_RUNS, "top", "png", "timeline"), "--explain has all degrees"
    elif not _has_degrees(args):
        unread, why = OF_RUNS, "a search has its own: give degrees, such as --ep 8, or drop it"
    else:
        unread, why = (*OF_SEARCHES, "top"), "degrees are given, so nothing is searched"
        if (args.pp or 1) == 1:
            unread, why = (*unread, *OF_STAGES), f"{why}, and there are no stages without --pp"
    for name in unread:
        if (value := getattr(args, name)) not in (None, False):
            raise UsageError(f"--{name.replace('_', '-')} ({value}) must be left out: {why}")


def _explain(args: Any) -> int:
    """Print what is planned of one folding; 1 where it is refused or too large."""
    request, folding = _request(args), _folding(args.explain)
    found = planned(request, folding, _table(args))
    fits = isinstance(found, Fitting)
    text = explained(request, folding, found)
    if args.json:
        row = _row(found) if isinstance(found, Fitting) else folding.named()
        print(json.dumps({"gpu": args.gpu, "limit": request.limit, "fits": fits, "text": text} | row))
    elif args.call and isinstance(found, Fitting):
        print(call_of(found.run))
    else:
        print(text)
        if isinstance(found, Fitting):
            print(_command(args, found.run))
    return 0 if fits else 1


def _command(args: Any, run: TrainingRun) -> str:
    """Return the command that plans a run with its degrees and options."""
    model = ["--preset", args.preset, "--gpus", str(args.gpus), "--gpu", args.gpu]
    return shlex.join(["moecore", "plan", *model, *flags_of(run)])


def _tell(line: str) -> None:
    print(f"moecore: {line}", file=sys.stderr, flush=True)


def _search(args: Any) -> int:
    """Print what fits, best first."""
    request = _request(args)
    top = 3 if args.top is None else args.top
    result = search(request, table=_table(args), wanted=top, most_planned=top, progress=_tell)
    found = result.fitting
    if found:
        _write(args, found[0].plan, found[0].time)
    if args.json:
        rows = [_row(candidate) for candidate in found]
        others = dict(refused=result.refused, not_planned=result.not_planned, change=result.change)
        print(json.dumps({"gpu": args.gpu, "limit": request.limit, "fitting": rows, **others}))
        return 0 if found else 1
    if found and args.call:
        print(call_of(found[0].run))
        return 0
    if found:
        print(result.table())
    for other in result.too_large:
        print(f"too large with all levers: {other.folding}")
    refused = sum(result.refused.values())
    print(
        f"of {shown_bytes(request.limit)} a rank ({args.gpu} less {request.reserve:.0%}); "
        f"{refused} foldings refused by rules, {result.not_planned} behind these not planned"
    )
    if found:
        _print_time(args, found[0].time, request.limit)
        print(f"the first one: {_command(args, found[0].run)}")
    else:
        print(f"nothing fits; the smallest change: {result.change or 'none of those tried'}")
    return 0 if found else 1


def _row(found: Fitting) -> dict[str, Any]:
    run = found.run
    return found.folding.named() | {
        "schedule": None if run.pipeline is None else run.pipeline.schedule,
        "num_micro_batches": run.num_micro_batches,
        "levers": shown_levers(found),
        "overhead": found.levers.overhead,
        "flags": flags_of(found.run),
        "host_of_a_node": found.plan.node_host_bytes,
        "peak": max(found.peaks),
        "headroom": found.headroom,
        **_numbers(found.time),
    }


def _numbers(time: TimePlan) -> dict[str, Any]:
    names = ("seconds", "tokens_per_second", "parts", "wall")
    return {name: getattr(time, name) for name in names}


def _print_time(args: Any, time: TimePlan, limit: int | None = None) -> None:
    """Print how long a step takes, and what to change."""
    print(time.line)
    change = next_change(time, _table(args), limit)
    print(f"next: {'nothing of what is known gains' if change is None else change}")


def _table(args: Any) -> CostTable:
    table = CostTable.of if args.table is None else CostTable.read(args.table).on
    hides = getattr(args, "pairs_hide", None)
    found = table(args.gpu)
    return found if hides is None else replace(found, pairs_hide=hides)


def _write(args: Any, plan: MemoryPlan, time: TimePlan) -> None:
    """Write the pictures that are asked for."""
    try:
        if args.png is not None:
            draw_memory(plan, args.png, GPUS[args.gpu].memory)
        if args.timeline is not None and time.timeline is not None:
            draw(time.timeline, args.timeline)
    except ImportError as error:
        raise ValueError(f"--png and --timeline must be left out: {error}") from error
    if args.timeline is not None and time.timeline is None:
        raise ValueError(f"--timeline ({args.timeline}) must be left out without stages: drop it")


def _as_folding(run: TrainingRun) -> str:
    """Return the folding of a run, as `--explain` reads it."""
    p = run.resolved
    named = {name: getattr(p, name) for name in FOLDING[:5]}
    if run.pipeline is not None:
        named["chunks"] = len(stages_of(run)) // p.pp
    return ",".join(f"{k}={v}" for k, v in (named | {"batch_size": run.batch_size}).items())


def _folding(text: str) -> Folding:
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name.strip() not in FOLDING or not value.isdecimal() or int(value) < 1:
            names = ", ".join(FOLDING)
            raise ValueError(f"--explain ({part!r}) must be NAME=NUMBER, of {names}: use pp=8,ep=8")
        found[name.strip()] = int(value)
    found.setdefault("chunks", 2 if found.get("pp", 1) > 1 else 1)
    return Folding(**found)


def _model(args: Any) -> DecoderConfig:
    """Return the preset, for rows as long as they are asked for."""
    model = PRESETS[args.preset]
    return replace(model, max_seq_len=max(model.max_seq_len, args.seq_len))


def _request(args: Any) -> SearchRequest:
    options, memory = _optimizer(args), _memory(args)
    is_plain = options == OptimizerOptions()
    precision: Any = ANY if args.precision is None else _precision(args)
    return SearchRequest(
        model=_model(args),
        num_gpus=args.gpus,
        gpu=args.gpu,
        gpus_per_node=NODE if args.gpus_per_node is None else args.gpus_per_node,
        seq_len=args.seq_len,
        global_batch=args.global_batch,
        memory=ANY if memory == MemoryOptions() else memory,
        precision=precision,
        optimizer=ANY if is_plain else options,
        nvlink=NVLinkOptions(row_factor=args.row_factor) if _has_room(args) else ANY,
    )


def _precision(args: Any) -> Precision | None:
    return Precision.of(None if args.precision == "bf16" else args.precision)


def _memory(args: Any) -> MemoryOptions:
    named = {"gemm_last": GEMM_LAST}
    parts: Any = tuple(each for part in args.recompute for each in named.get(part, (part,)))
    return MemoryOptions(
        recompute="gemm_last" if args.recompute == ["gemm_last"] else parts,
        offload=tuple(args.offload),
        stash=StashOptions() if args.stash else None,
    )


def _has_room(args: Any) -> bool:
    """Whether dispatcher nvlink has a room, so that it is chosen."""
    return args.stash or args.row_factor is not None


def _optimizer(args: Any) -> OptimizerOptions:
    return OptimizerOptions(
        moment_dtype=args.moments,
        master_remainder=args.master_remainder,
        offload_fraction=args.state_offload,
    )


def run_of_options(args: Any) -> TrainingRun:
    """Return the run of the options."""
    given = {name: getattr(args, name) for name in DEGREES}
    degrees = {name: value for name, value in given.items() if value is not None}
    pipeline = None
    if (args.pp or 1) > 1:
        pipeline = PipelineConfig(
            layout=args.layout, chunks=args.chunks, schedule=args.schedule or "1f1b"
        )
    return TrainingRun(
        model=_model(args),
        num_gpus=args.gpus,
        parallel=ParallelConfig(**degrees),
        seq_len=args.seq_len,
        batch_size=1 if args.batch_size is None else args.batch_size,
        num_micro_batches=1 if args.micro_batches is None else args.micro_batches,
        pipeline=pipeline,
        fsdp=FSDPOptions(
            param_dtype=torch.bfloat16,
            dense_strategy=args.dense_strategy or "optim_grads_params",
            experts_strategy=args.experts_strategy,
            fp8_param_gather=args.fp8_param_gather,
        ),
        memory=_memory(args),
        precision=_precision(args),
        optimizer=_optimizer(args),
        nvlink=_nvlink(args, ParallelConfig(**degrees), pipeline),
    )


def _nvlink(
    args: Any, parallel: ParallelConfig, pipeline: PipelineConfig | None
) -> NVLinkOptions | None:
    """Return the capacity of nvlink, inside of a node; None = all-to-all."""
    if _has_room(args):
        return NVLinkOptions(row_factor=args.row_factor)
    degrees = parallel.resolve(args.gpus)
    group = degrees.ep * degrees.etp
    overlaps = pipeline is not None and pipeline.schedule in PAIRING
    return None if group == 1 or NODE % group or overlaps else NVLinkOptions()


DRY_RUN_EXAMPLE = """\
example:
  moecore dry-run --rank 37 --preset deepseek-v3 --gpus 2048 --pp 16 --ep 64 \\
    --schedule 1f1b --micro-batches 4 --precision blockwise --recompute moe"""


def add_dry_run(rooms: Any) -> None:
    """Add the command to those of `moecore`."""
    parser = rooms.add_parser(
        "dry-run",
        help="what one rank of a world that is not there holds and does in a step",
        description="Runs the host's code of a training step of one rank, without its GPU and "
        "without the other ranks. Loads are balanced. Other ranks answer at once.",
        epilog=DRY_RUN_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run_dry_run)
    parser.add_argument("--rank", type=int, default=0, help="of the world")
    add_run_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run_dry_run(args: Any) -> int:
    """Print what a rank holds and does; 1 where it does not fit."""
    run, memory = run_of_options(args), GPUS[args.gpu].memory
    found = dry_run(run, args.rank)
    plan = plan_peak(run)[args.rank * run.resolved.pp // run.num_gpus]
    table, fits = CostTable.of(args.gpu), found.peak + found.buffers <= memory
    rows, time = _rows(found, table), time_step(found, table)
    if args.json:
        sizes = {"held": found.held, "peak": found.peak, "buffers": found.buffers}
        sizes |= {"plan": plan, "memory": memory}
        whole = {"rank": found.rank, "gpu": args.gpu, **sizes, "fits": fits}
        whole |= {"seconds": time.seconds, "parts": time.parts, "works": rows}
        print(json.dumps(whole))
        return 0 if fits else 1
    print(f"rank {found.rank} of {args.gpus} holds {shown_bytes(found.held)} between steps")
    most = shown_bytes(found.peak + found.buffers)
    at_most = f"{most} at most in a step, of {shown_bytes(memory)} ({args.gpu})"
    print(f"{at_most}{'' if fits else ': does not fit'}")
    print(f"{shown_bytes(plan)} by the plan, from few layers")
    parts = [f"{part} {s * 1e3:.1f}" for part, s in time.parts.items() if s > 1e-4]
    print(f"{time.seconds * 1e3:.1f} ms a step, of which ms by what limits: {', '.join(parts)}")
    lines: list[tuple[str, ...]] = [("what runs", "times", "TFLOP", "GB moved", "ms alone")]
    for kind, (times, flops, moved, seconds) in rows.items():
        sums = (f"{flops / 1e12:.1f}", f"{moved / 1e9:.1f}", f"{seconds * 1e3:.1f}")
        lines.append((kind, f"{times:.0f}", *sums))
    print("\n".join(columns(lines)))
    return 0 if fits else 1


def _rows(found: DryRun, table: CostTable) -> dict[str, list[float]]:
    """Return by kind: how many, FLOP, bytes, seconds."""
    sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * 4)
    for part, works in (("", found.forward_backward), ("optimizer", found.optimizer)):
        for work in works:
            numbers = (1, work.flops, work.num_bytes, table.seconds(work))
            row = sums[part or work.kind]
            row[:] = (a + b for a, b in zip(row, numbers, strict=True))
    return dict(sums)


REPORT_EXAMPLE = """\
example, for a trace of rank 0 that prof.export_chrome_trace("trace.json.gz") has written:
  moecore report trace.json.gz --steps 3"""


def add_report(rooms: Any) -> None:
    """Add the command to those of `moecore`."""
    parser = rooms.add_parser(
        "report",
        help="where a step's time went on one rank's GPU, and what to try next",
        description="Reads a Chrome trace of torch.profiler: what bounds the step, which "
        "communication nothing hides, why the GPU is idle, and the options that may win most.",
        epilog=REPORT_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run_report)
    parser.add_argument("trace", type=Path, help=".json or .json.gz, of one rank")
    parser.add_argument(
        "--steps", type=int, help="that it holds; default: as profile.step() has marked, else 1"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run_report(args: Any) -> int:
    """Print the report."""
    try:
        found = report_trace(args.trace, num_steps=args.steps)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if args.json:
        facts = {"limit": found.limit, "limits": found.limits}
        print(json.dumps(facts | asdict(found)))
    else:
        print(found.table())
    return 0


def draw_memory(
    plan: MemoryPlan, path: str | os.PathLike[str], memory: NumBytes | None = None
) -> None:
    """Write a PNG of a plan.

    Args:
        plan: of all pipeline ranks.
        path: of the file.
        memory: of a GPU in bytes, drawn as a line; None = no line.

    Raises:
        ImportError: without matplotlib.
    """
    check_arguments(draw_memory, locals())
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("draw_memory needs matplotlib: pip install 'moecore[bench]'") from error

    kinds = list(dict.fromkeys(kind for rank in plan.ranks for kind in rank.device))
    figure = Figure(figsize=(9.0, 1.6 + 0.4 * len(plan.ranks)), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    places, ends = range(len(plan.ranks)), [0.0] * len(plan.ranks)
    for i, kind in enumerate(kinds):
        sizes = [rank.device.get(kind, 0) / 1e9 for rank in plan.ranks]
        colour = (f"C{i % 10}", 1.0 if i < 10 else 0.5)
        axes.barh(places, sizes, left=ends, label=kind, color=colour)
        ends = [end + size for end, size in zip(ends, sizes, strict=True)]
    if memory is not None:
        axes.axvline(memory / 1e9, color="black", linestyle="--", label="memory of a GPU")
    axes.set(xlabel="GB", ylabel="pp rank")
    axes.set_yticks(list(places))
    axes.invert_yaxis()
    figure.legend(loc="outside right upper", fontsize=7)
    figure.savefig(path, format="png")
