"""The functions behind `moecore plan`, `dry-run` and `report`, and the PNG of a plan."""

import json
import os
import shlex
import sys
from collections import defaultdict
from dataclasses import asdict, replace
from typing import Any

from moecore.base import get_install_command
from moecore.base.command_options import UsageError
from moecore.base.fields import NumBytes, check_arguments
from moecore.base.text import format_bytes, format_columns
from moecore.parallel.pipeline.timeline import draw
from moecore.planning.costs import CostTable
from moecore.planning.dry_run import DryRun, dry_run
from moecore.planning.flags import (
    DryRunConfig,
    PlanConfig,
    check_no_pipeline_options,
    check_no_unused_options,
    format_gpu_name,
    format_layout,
    parse_layout,
    parse_run,
    parse_search_request,
    select_gpu,
)
from moecore.planning.gpus import find_time_refusal, get_gpu
from moecore.planning.html import format_page
from moecore.planning.layouts import Layout
from moecore.planning.memory import MemoryPlan, plan_memory, plan_peak_memory
from moecore.planning.option_sets import next_change
from moecore.planning.recipe import format_python_calls, format_recipe, format_run_flags
from moecore.planning.report import report_trace
from moecore.planning.run import TrainingRun, pause_garbage_collection
from moecore.planning.search import FittingCandidate, describe_outcome, plan_layout, search
from moecore.planning.times import TimePlan, find_hidden_share, has_tp_slices, plan_time, time_step

# Recorded complete steps: (preset, GPU, number of GPUs) -> layout, tokens per second of a GPU, and
# the record under benchmarks/results.
MEASURED: dict[tuple[str, str, int], tuple[Layout, int, str]] = {
    ("qwen3-30b-a3b", "h200-141", 8): (
        Layout(ep=8, batch_size=4),
        16_159,
        "train/2026-11-20-nvidia-h200.jsonl",
    )
}


@pause_garbage_collection()
def run_plan(args: PlanConfig) -> int:
    """Run `moecore plan`; return 0, or 1 if neither the run nor any layout fits the memory."""
    check_no_unused_options(args)
    _check_output_directories(args)
    if args.explain is not None:
        return _explain_layout(args)
    if not args.parallel:  # no degree
        return _search_layouts(args)
    run = parse_run(args)
    _write_recipe(args, run)
    if args.call:
        print(format_python_calls(run))
        return 0
    table, gpu, name = _load_table(args), get_gpu(select_gpu(args)), format_gpu_name(args)
    plan = plan_memory(run)
    time = find_time_refusal(run.precision, table.gpu) or plan_time(run, table)
    _write_plan_files(args, plan, time)
    largest, pinned, host = plan.largest, plan.count_pinned_bytes(gpu), gpu.host_memory
    peak, fits = largest.num_bytes, largest.num_bytes <= gpu.memory and pinned <= host
    if args.json:
        ranks = [asdict(rank) | {"peak": rank.num_bytes} for rank in plan.ranks]
        change = None if isinstance(time, str) else next_change(time, table)
        summary = {"gpu": name, "memory": gpu.memory, "fits": fits, "ranks": ranks}
        summary |= _list_time_fields(time) | {"next": None if change is None else asdict(change)}
        print(json.dumps(summary))
        return 0 if fits else 1
    print(plan.table())
    print(
        f"peak memory, on pipeline rank {largest.pp_rank}: {format_bytes(peak)} of "
        f"{format_bytes(gpu.memory)} ({name})"
    )
    print(
        f"pinned host memory of a server: {format_bytes(pinned)} of {format_bytes(host)}"
        f"{': does not fit' * (pinned > host)}"
    )
    if peak > gpu.memory:
        kind, size = max(largest.device.items(), key=lambda item: item[1])
        print(f"does not fit: {kind} is the largest part ({format_bytes(size)})")
        print(f"options with which it fits, if there are any: --explain {format_layout(run)}")
    _print_time(args, time)
    return 0 if fits else 1


def _explain_layout(args: Any) -> int:
    """Print the plan of the layout `args.explain`; return 0, or 1 if the layout does not fit."""
    request, layout = parse_search_request(args), parse_layout(args.explain)
    plan = plan_layout(request, layout, _load_table(args))
    text = describe_outcome(request, layout, plan)
    fitting = plan if isinstance(plan, FittingCandidate) else None
    if fitting is not None:
        _write_recipe(args, fitting.run)
    if args.json:
        summary = {"gpu": format_gpu_name(args), "limit": request.max_gpu_bytes}
        summary |= {"fits": fitting is not None, "text": text}
        summary |= layout._asdict() if fitting is None else _list_layout_fields(fitting)
        print(json.dumps(summary))
    elif args.call and fitting is not None:
        print(format_python_calls(fitting.run))
    else:
        print("\n".join([text, *([] if fitting is None else [_format_command(args, fitting.run)])]))
    return 0 if fitting is not None else 1


def _describe_measurement(args: Any, first_layout: Layout) -> str:
    """Return a sentence with the measured layout and tokens/s of this model and these GPUs."""
    step = MEASURED.get((args.preset, format_gpu_name(args), args.gpus))
    if step is None:
        return "no benchmark has measured the first layout"
    layout, tokens_per_second, record = step
    measured = f"{layout} in bf16 has {tokens_per_second:,} tokens/s ({record})"
    prefix = "measured" if layout == first_layout else "no benchmark has measured the first layout"
    return f"{prefix}: {measured}"


def _format_command(args: Any, run: TrainingRun) -> str:
    """Return the `moecore plan` command with the degrees and options of a run."""
    model = ["--config", str(args.config)] if args.preset is None else ["--preset", args.preset]
    gpus = [*(["--finetune"] if args.finetune else []), "--gpus", str(args.gpus)]
    gpus += ["--gpu" if args.gpu_spec is None else "--gpu-spec", format_gpu_name(args)]
    return shlex.join(["moecore", "plan", *model, *gpus, *format_run_flags(run)])


def _search_layouts(args: Any) -> int:
    """Print the layouts that fit, best first; return exit status 0, or 1 if no layout fits."""
    request = parse_search_request(args)
    result = search(
        request,
        table=_load_table(args),
        num_results=3 if args.top is None else args.top,
        progress=lambda line: print(f"moecore: {line}", file=sys.stderr, flush=True),
    )
    fitting = result.fitting
    if fitting:
        _write_plan_files(args, fitting[0].plan, fitting[0].time)
        _write_recipe(args, fitting[0].run)
    if args.json:
        rows = [_list_layout_fields(candidate) for candidate in fitting]
        summary = {"gpu": format_gpu_name(args), "limit": request.max_gpu_bytes, "fitting": rows}
        summary |= {"refused": result.refused, "not_planned": result.num_unplanned}
        print(json.dumps(summary | {"change": result.change}))
        return 0 if fitting else 1
    if fitting and args.call:
        print(format_python_calls(fitting[0].run))
        return 0
    if fitting:
        print(result.table())
    for other in result.too_large:
        print(f"too large with all memory options: {other.layout}")
    refused = sum(result.refused.values())
    print(
        f"memory limit: {format_bytes(request.max_gpu_bytes)} ({format_gpu_name(args)} less "
        f"{request.reserve:.0%}); {refused} layouts are invalid, "
        f"{result.num_unplanned} slower layouts were not planned"
    )
    if fitting:
        _print_time(args, fitting[0].time, request.max_gpu_bytes)
        print(_describe_measurement(args, fitting[0].layout))
        print(f"command of the first layout: {_format_command(args, fitting[0].run)}")
    else:
        print(f"nothing fits; the smallest change: {result.change or 'none of those tried'}")
    return 0 if fitting else 1


def _list_layout_fields(candidate: FittingCandidate) -> dict[str, Any]:
    """Return the JSON fields of a layout: degrees, options, bytes, and times in seconds."""
    run = candidate.run
    return candidate.layout._asdict() | {
        "schedule": None if run.pipeline is None else run.pipeline.schedule,
        "num_micro_batches": run.num_micro_batches,
        "options": candidate.flags,
        "overhead": candidate.options.overhead,
        "flags": format_run_flags(candidate.run),
        "host_of_a_node": candidate.host,
        "peak": max(candidate.peaks),
        "headroom": candidate.headroom,
        **_list_time_fields(candidate.time),
    }


def _list_time_fields(time_plan: TimePlan | str) -> dict[str, Any]:
    """Return the JSON fields of a time plan, or of the reason why the time is not modelled."""
    if isinstance(time_plan, str):
        names = ("seconds", "tokens_per_second", "parts", "wall")
        return dict.fromkeys(names) | {"time_refusal": time_plan}
    return {
        "seconds": time_plan.seconds,
        "tokens_per_second": time_plan.tokens_per_gpu_second,
        "parts": time_plan.parts,
        "wall": time_plan.limit,
        "time_refusal": None,
    }


def _print_time(args: Any, time_plan: TimePlan | str, max_bytes: int | None = None) -> None:
    """Print a time plan, and the option that makes the step fastest within `max_bytes` per rank."""
    if isinstance(time_plan, str):
        print(time_plan)
        return
    print(time_plan.line)
    table = _load_table(args)
    if hides := find_hidden_share(time_plan.run, table):
        print(
            f"assumed, no run has shown it: pairs hide {hides:.0%} of the exchanges between nodes "
            "that their computation lasts for (--pairs-hide 0: none)"
        )
    kind = format_gpu_name(args)
    if has_tp_slices(time_plan.run):
        print(_describe_exposed_tp_share(table, kind))
    for attention in time_plan.run.planned_model.unmeasured:
        print(
            f"assumed, no run has shown it: the rates of {attention} attention (docs/planning.md)"
        )
    if not get_gpu(select_gpu(args)).measured:
        print(f"rates of {kind} are a data sheet's: no run on one has been compared with a plan")
    change = next_change(time_plan, table, max_bytes)
    print(f"next: {'no single change makes the step faster' if change is None else change}")


def _describe_exposed_tp_share(table: CostTable, gpu_name: str) -> str:
    """Return a line with the share of tp communication time that overlapped matmuls do not hide."""
    slices = table.slices
    if slices is None:
        return "collectives of tp count in full: the cost table has no share for sliced collectives"
    unseen = f"; no run on {gpu_name} has shown it" if table.gpu != slices.gpu else ""
    return (
        f"sliced collectives of tp count {slices.share:.0%} of their time, as measured on "
        f"{slices.gpu} ({slices.record}){unseen}"
    )


def _load_table(args: Any) -> CostTable:
    """Return the table of --table, or the shipped one, with the GPU's rates and --pairs-hide."""
    table = CostTable.of if args.table is None else CostTable.read(args.table).with_gpu
    hides = getattr(args, "pairs_hide", None)
    costs = table(select_gpu(args))
    return costs if hides is None else replace(costs, pairs_hide=hides)


def _check_output_directories(args: Any) -> None:
    """Raise ValueError, before planning, if the directory of an output file is missing."""
    for name in ("png", "timeline", "html", "write"):
        path = getattr(args, name)
        if path is not None and not path.parent.is_dir():
            raise ValueError(
                f"--{name} ({path}) must be in an existing directory: create {path.parent}"
            )


def _write_plan_files(args: Any, memory_plan: MemoryPlan, time_plan: TimePlan | str) -> None:
    """Write the files of `--png`, `--timeline` and `--html`; ValueError without matplotlib."""
    timeline = None if isinstance(time_plan, str) else time_plan.timeline
    try:
        if args.png is not None:
            draw_memory(memory_plan, args.png, get_gpu(select_gpu(args)).memory)
        if args.timeline is not None and timeline is not None:
            draw(timeline, args.timeline)
    except ImportError as error:
        raise ValueError(f"--png and --timeline must be left out: {error}") from error
    if args.html is not None:
        title = f"{args.preset or args.config}, {args.gpus} {format_gpu_name(args)}"
        print("moecore: planning the choices of the page", file=sys.stderr, flush=True)
        args.html.write_text(format_page(memory_plan, time_plan, title, _load_table(args)))
    if args.timeline is not None and timeline is None:
        reason = f"without a time ({time_plan})" if isinstance(time_plan, str) else "without stages"
        raise ValueError(f"--timeline ({args.timeline}) must be left out {reason}: drop it")


def _write_recipe(args: Any, run: TrainingRun) -> None:
    """Write the TOML of a run to the path of `--write`, if the option is set."""
    if args.write is not None:
        args.write.write_text(format_recipe(run, args.config))


def run_dry_run(args: DryRunConfig) -> int:
    """Print one rank's memory and launches; return 0, or 1 if memory exceeds the GPU's."""
    check_no_pipeline_options(args)
    run, memory = parse_run(args), get_gpu(select_gpu(args)).memory
    step = dry_run(run, args.rank)
    plan = plan_peak_memory(run)[args.rank * run.resolved.pp // run.num_gpus]
    table, fits = CostTable.of(select_gpu(args)), step.peak + step.buffers <= memory
    refusal = find_time_refusal(run.precision, table.gpu)
    rows = _sum_launches_by_kind(step, None if refusal else table)
    time = None if refusal else time_step(step, table)
    if args.json:
        sizes = {"held": step.resident_bytes, "peak": step.peak, "buffers": step.buffers}
        sizes |= {"plan": plan, "memory": memory}
        summary = {"rank": step.rank, "gpu": format_gpu_name(args), **sizes, "fits": fits}
        summary |= {name: getattr(time, name, None) for name in ("seconds", "parts")}
        print(json.dumps(summary | {"works": rows, "time_refusal": refusal}))
        return 0 if fits else 1
    print(
        f"rank {step.rank} of {args.gpus} holds {format_bytes(step.resident_bytes)} between steps"
    )
    peak = format_bytes(step.peak + step.buffers)
    peak_line = f"{peak} at most in a step, of {format_bytes(memory)} ({format_gpu_name(args)})"
    print(f"{peak_line}{'' if fits else ': does not fit'}")
    print(f"{format_bytes(plan)} by the plan, from few layers")
    line = refusal
    if time is not None:
        parts = [f"{part} {s * 1e3:.1f}" for part, s in time.parts.items() if s > 1e-4]
        line = f"{time.seconds * 1e3:.1f} ms a step, of which ms by what limits: {', '.join(parts)}"
    print(line)
    lines: list[tuple[str, ...]] = [("what runs", "times", "TFLOP", "GB moved", "ms alone")]
    for kind, (times, flops, num_bytes, seconds) in rows.items():
        milliseconds = "-" if seconds is None else f"{seconds * 1e3:.1f}"
        sums = (f"{flops / 1e12:.1f}", f"{num_bytes / 1e9:.1f}", milliseconds)
        lines.append((kind, f"{times:.0f}", *sums))
    print("\n".join(format_columns(lines)))
    return 0 if fits else 1


def _sum_launches_by_kind(step: DryRun, table: CostTable | None) -> dict[str, list[Any]]:
    """Return {kind: [launches, FLOP, bytes, serial seconds by `table`]} of a step's launches."""
    if table is not None:
        table = replace(table, slices=None)  # serial seconds, not the exposed share
    sums: defaultdict[str, list[Any]] = defaultdict(lambda: [0.0] * 4)
    for part, works in (("", step.forward_backward), ("optimizer", step.optimizer)):
        for work in works:
            seconds = 0.0 if table is None else table.seconds(work)
            numbers = (1, work.flops, work.num_bytes, seconds)
            row = sums[part or work.kind]
            row[:] = (a + b for a, b in zip(row, numbers, strict=True))
    if table is None:
        return {kind: [*row[:3], None] for kind, row in sums.items()}
    return dict(sums)


def run_report(args: Any) -> int:
    """Print the report of the profiler trace `args.trace`; return exit status 0."""
    try:
        report = report_trace(args.trace, num_steps=args.steps)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if args.json:
        facts = {"limit": report.limit_text, "limits": report.ms_by_limit}
        print(json.dumps(facts | asdict(report)))
    else:
        print(report.table())
    return 0


def draw_memory(
    plan: MemoryPlan, path: str | os.PathLike[str], gpu_bytes: NumBytes | None = None
) -> None:
    """Write a PNG of each pipeline rank's peak memory by kind, with a line at `gpu_bytes`."""
    check_arguments(draw_memory, locals())
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"draw_memory needs matplotlib: {get_install_command('bench')}"
        ) from error
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
    if gpu_bytes is not None:
        axes.axvline(gpu_bytes / 1e9, color="black", linestyle="--", label="memory of a GPU")
    axes.set(xlabel="GB", ylabel="pp rank")
    axes.set_yticks(list(places))
    axes.invert_yaxis()
    figure.legend(loc="outside right upper", fontsize=7)
    figure.savefig(path, format="png")
