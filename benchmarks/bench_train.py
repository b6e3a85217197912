r"""A whole training step: tokens/s, TFLOP/s, share of the dense ceiling, memory, where time goes.

    torchrun --nproc-per-node 8 -m benchmarks.bench_train --preset qwen3-30b-a3b --compile-dense \
        --seq-len 4096 --batch-size 4 --dispatcher nvlink --row-factor 1.05 \
        --routing balanced --tokens random

    torchrun --nproc-per-node 1 -m benchmarks.bench_train --preset qwen3-30b-a3b --num-layers 6 \
        --compile-dense --dense-strategy optim --experts-strategy optim_grads_params \
        --seq-len 4096 --batch-size 2 --expert-bias --score-function sigmoid \
        --bias-update quantile --bias-update-rate 1 --bias-per-micro-batch \
        --lr 3e-4 --schedule-steps 400 --precision blockwise --against-bf16

    torchrun --nproc-per-node 1 -m benchmarks.bench_train --preset qwen3-30b-a3b --num-layers 4 \
        --compile-dense --seq-len 4096 --batch-size 4 --lr 3e-4 --tokens random --routing balanced \
        --skip-spikes-rollback-after 3 --timed 20 --checks 6

It is the loop of `moecore train` with that command's arguments; `--routing`, `--warm-up`,
`--timed`, `--against-bf16`, `--trace` and `--results` are its own. As there, ranks do not meet
between steps and the host is a step ahead. A step's time is that from the end of the one before it
to its own, on the device, so the times add up to that of all steps, data and metrics included; it
is the slowest rank's. Power and clock are rank 0's, means over those steps. TFLOP/s count 6 FLOPs
per active parameter and causal attention (`models/size.py`); the ceiling is a large square bf16
product of the same run, on warm GPUs, whatever `--precision` is. Rank 0 prints the row and, if one
with the same arguments is committed, that one beside it; `--results` appends it to
<folder>/<day>-<gpu>.jsonl. `over_bf16` is the rate over that of the run without `--precision`,
`--fp8-head`, `--fp8-param-gather` and `--fp8-dispatch`, which `--against-bf16` makes just before in
the same process.

`--checks N` measures the cost of a run's checks instead: N pairs of blocks of `--timed` steps, of
which one block has hang watch, phase times, [skip_spikes] and report (metrics, alarms, goodput),
and the other block has none of them. The mean step of the slowest rank is compared in each pair.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import shlex
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.expert_loads import force_expert_loads
from benchmarks.power import PowerLog
from benchmarks.records import RESULTS, Environment, append_row, append_rows, results_path
from benchmarks.trace import Breakdown, format_table, make_trace_fields, trace
from moecore.base.options.dispatch import NVLinkOptions
from moecore.base.torch_private import patch_attributes
from moecore.models import DecoderConfig
from moecore.models.size import active_params, flops_per_token, num_params
from moecore.moe.forced_routing import force_even_load
from moecore.recipes import train
from moecore.recipes.corpus_training import CorpusTraining
from moecore.recipes.data import BatchShape
from moecore.recipes.errors import ARGUMENT_ERRORS, RUN_ERRORS, print_rank_error, print_run_error
from moecore.recipes.loop import open_report, print_on_rank_0, report_steps, train_step
from moecore.recipes.metrics import LaunchedStep, Metrics, Moment
from moecore.recipes.process import bind_to_gpu, disable_garbage_collection
from moecore.recipes.train import TrainConfig

CEILING_SIDE = 8192
CEILING_SECONDS = 2.0
GRAPH_WARM_UP = 3
Row = dict[str, Any]
# Options that a row shows, beside preset and number of GPUs.
SHOWN = (
    "batch_size",
    "seq_len",
    "grad_accum",
    "layers",
    "routing",
    "quantile",
    "bias_per_micro_batch",
    "tokens",
    "dispatcher",
    "row_factor",
    "exact_rows",
    "experts",
    "compile",
    "graph_dense",
    "cuda_graph",
    "recompute",
    "offload",
    "stash",
    "clones",
    "gather_once",
    "keep_experts",
    "precision",
    "blocks_per_unit",
    "fp8_gather",
    "no_overlap",
    "send_again",
    "fp8_dispatch",
    "fp8_head",
    "ep",
    "cp",
    "tp",
    "dp_shard",
)
RATE = "tokens_per_second_per_gpu"
PRINTED = (
    RATE,
    "tflops_per_gpu",
    "mfu",
    "step_ms",
    "over_bf16",
    "peak_gib",
    "exposed_share",
    "power_watts",
    "sm_mhz",
)


def main() -> int:
    """Train, measure and report on the ranks of torchrun."""
    own, rest = split_arguments(sys.argv[1:])
    if "WORLD_SIZE" not in os.environ:
        print("bench_train: error: start it with torchrun --nproc-per-node N -m", file=sys.stderr)
        return 2
    try:
        args = train.parse_arguments([*rest, "--checkpoint-every", "0", "--sample-every", "0"])
    except ARGUMENT_ERRORS as error:
        return print_rank_error(error, int(os.environ["RANK"]))
    steps = own.warm_up + max(1, 2 * own.checks) * (own.timed + 1)
    args = dataclasses.replace(args, steps=max(args.steps, steps))
    rows: list[Row] = []
    for run in list_runs(own, args):
        try:
            check_arguments(own, args)
            job = train.build_job(run)
            if own.routing == "balanced":
                force_even_load(job.model)
            elif own.routing != "learned":
                force_expert_loads(job.model, parse_shares(own.routing))
            if not run.plain_host:
                bind_to_gpu()
        except ARGUMENT_ERRORS as error:
            return print_rank_error(error, int(os.environ["RANK"]))
        try:
            row = measure_checks(job, own) if own.checks else measure(job, own)
        except RUN_ERRORS as error:
            return print_run_error(error, run)
        if own.checks:
            print_on_rank_0(json.dumps(row))
            if dist.get_rank() == 0 and own.results is not None:
                num_gpus = dist.get_world_size()
                append_rows(own.results, "benchmarks.bench_train", [row], num_gpus=num_gpus)
            break
        row["ceiling_tflops"] = measure_ceiling(job.device)
        row["mfu"] = row["tflops_per_gpu"] / row["ceiling_tflops"]
        rows.append(row)
        if len(rows) == 2:
            row["over_bf16"] = row[RATE] / rows[0][RATE]
        if dist.get_rank() == 0:
            report(row, own.results)
        del job
        free_memory()
    dist.barrier()
    return 0


def free_memory() -> None:
    """Free objects in cycles, which `time_steps` hides from the collector."""
    gc.enable()
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def list_runs(own: argparse.Namespace, args: TrainConfig) -> list[TrainConfig]:
    """Return the arguments of each run; with --against-bf16 a run without FP8 is first."""
    fsdp = dataclasses.replace(args.fsdp, fp8_param_gather=False)  # which bf16 weights refuse
    sharding = dataclasses.replace(args.sharding, fp8_dispatch=False)
    bf16 = dataclasses.replace(args, precision=None, fp8={}, fsdp=fsdp, sharding=sharding)
    return [bf16, args] if own.against_bf16 else [args]


def check_arguments(own: argparse.Namespace, args: TrainConfig) -> None:
    """Raise ValueError for this script's options that cannot be combined with the others."""
    if args.cuda_graph and own.warm_up < GRAPH_WARM_UP:
        raise ValueError(
            f"--warm-up ({own.warm_up}) must be >= {GRAPH_WARM_UP} with --cuda-graph, whose "
            "first steps are eager ones and the capture"
        )
    if own.against_bf16 and args.precision is None:
        raise ValueError("--precision (None) must be set with --against-bf16: use blockwise")


def parse_shares(routing: str) -> dict[int, float]:
    """Return the share of each expert id in a text like "0:0.05,7:0.02"."""
    try:
        pairs = [pair.split(":") for pair in routing.split(",")]
        return {int(expert): float(share) for expert, share in pairs}
    except ValueError:
        raise ValueError(
            f"--routing ({routing}) must be learned, balanced, or shares by expert: 0:0.05,7:0.02"
        ) from None


def split_arguments(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return this script's arguments and the arguments of `moecore train`."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog="All other options are those of moecore train: see its --help.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    who = "who gets a token: learned, balanced, or shares of choices by expert, as 0:0.05,7:0.02"
    add("--routing", default="learned", help=who)
    add("--warm-up", type=int, default=5, help="steps that do not count")
    add("--timed", type=int, default=10, help="steps that do")
    add("--against-bf16", action="store_true", help="of --precision: run without it before")
    add("--checks", type=int, default=0, help="pairs of blocks with and without checks")
    add("--trace", action="store_true", help="profile one more step")
    add("--results", type=results_path, help="folder for the record")
    return parser.parse_known_args(arguments)


def measure(job: CorpusTraining, own: argparse.Namespace) -> Row:
    """Return the row of one run, without the ceiling; collective."""
    seconds, metrics, power = time_steps(job, warm_up=own.warm_up, timed=own.timed)
    row = describe_run(job, seconds, metrics, own.routing) | power
    if own.trace and job.device.type == "cuda":
        row |= break_down_step(job, first_step=own.warm_up + own.timed + 1)
    job.owner.check()  # no row of steps whose tokens got lost
    return row


def measure_checks(job: CorpusTraining, own: argparse.Namespace) -> Row:
    """Return the cost of a run's checks by alternating blocks of steps; collective."""
    numbers, means_P2 = count(1), list[list[float]]()
    with disable_garbage_collection(), job.hangs.watch(), open_report(job) as report:

        def run_block(num_steps: int, *, has_checks: bool) -> float:
            """Return the mean seconds of all steps but the first, on the slowest rank."""
            queue, ends = deque[LaunchedStep](), list[Moment]()
            with nullcontext() if has_checks else skip_checks(job):
                for step in range(num_steps):
                    queue.append(train_step(job, next(numbers)))
                    ends.append(queue[-1].ended)
                    pending = 1 if step < num_steps - 1 else 0
                    report_steps(job, queue, report if has_checks else None, pending=pending)
            mean = torch.tensor(ends[0].seconds_until(ends[-1]) / (num_steps - 1))
            dist.all_reduce(mean := mean.to(job.device), op=dist.ReduceOp.MAX)
            return mean.item()

        run_block(own.warm_up, has_checks=True)
        for pair in range(own.checks):
            order = (True, False) if pair % 2 else (False, True)
            means = {on: run_block(own.timed + 1, has_checks=on) for on in order}
            means_P2.append([means[False], means[True]])
    costs_P = [with_checks / without - 1 for without, with_checks in means_P2]
    return {
        "op": "checks",
        "preset": job.args.preset,
        "layers": job.args.model.get("num_layers"),
        "num_gpus": dist.get_world_size(),
        "block_steps": own.timed,
        "step_ms": statistics.median(without for without, _ in means_P2) * 1e3,
        "cost": statistics.median(costs_P),
        "cost_of_pairs": [round(cost, 5) for cost in costs_P],
    }


@contextmanager
def skip_checks(job: CorpusTraining) -> Iterator[None]:
    """Return a context in which steps have no checks for hangs, stragglers and spikes."""

    def ignore(*_: Any) -> None:
        pass

    args = dataclasses.replace(job.args, expert_loads_every=0)
    with (
        patch_attributes(job, args=args),
        patch_attributes(job.owner, _spikes=None),
        patch_attributes(job.hangs, enter=ignore),
        patch_attributes(job.spikes, record=ignore),
    ):
        yield


def time_steps(
    job: CorpusTraining, *, warm_up: int, timed: int
) -> tuple[list[float], list[Metrics], dict[str, float]]:
    """Return seconds and power of the timed steps on this rank, and the metrics of all steps."""
    _, warm = run_steps(job, range(1, warm_up + 1))
    gc.collect()
    gc.freeze()
    if not job.args.plain_host:
        gc.disable()
    # Of what a graph holds, its capture alone is counted.
    if job.device.type == "cuda" and not job.args.cuda_graph:
        torch.cuda.reset_peak_memory_stats()
    dist.barrier()
    start = Moment(job.device)
    sampled = job.device if dist.get_rank() == 0 else torch.device("cpu")
    with PowerLog(sampled) as power:
        ends, metrics = run_steps(job, range(warm_up + 1, warm_up + timed + 1))
    seconds = [before.seconds_until(end) for before, end in pairwise([start, *ends])]
    return seconds, warm + metrics, power.summary()


def run_steps(job: CorpusTraining, steps: range) -> tuple[list[Moment], list[Metrics]]:
    """Run steps to their end; return the end of each and its metrics."""
    launched: list[LaunchedStep] = []
    metrics = []
    for step in steps:
        launched.append(train_step(job, step))
        metrics += [done.read_metrics()[0] for done in launched[-2:-1]]
    metrics += [done.read_metrics()[0] for done in launched[-1:]]
    return [done.ended for done in launched], metrics


def describe_run(
    job: CorpusTraining, seconds: list[float], metrics: list[Metrics], routing: str
) -> Row:
    """Return the row of one run; collective."""
    config, world = job.model.config, dist.get_world_size()
    slowest = torch.tensor(seconds, dtype=torch.float64, device=job.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    step_s = statistics.median(slowest.tolist())
    rate = _count_tokens(job.shape) / step_s / world
    flops = flops_per_token(config, job.shape.seq_len)
    peak = torch.zeros(2, dtype=torch.float64, device=job.device)
    if job.device.type == "cuda":
        stats = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        peak = torch.tensor(stats, dtype=torch.float64, device=job.device) / 2**30
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    optimizer = job.args.optimizer
    return {
        "op": "train",
        "preset": job.args.preset,
        "num_gpus": world,
        "parameters": num_params(config),
        "active_parameters": active_params(config),
        **list_options(job.args, config, routing),
        "optimizer": optimizer.optimizer,
        "moment_dtype": optimizer.moment_dtype,
        "qk_clip": job.args.qk_clip,
        "ep": job.meshes.parallel.ep,
        "tokens_per_step": _count_tokens(job.shape),
        "step_ms": step_s * 1e3,
        "slowest_step_ms": max(slowest.tolist()) * 1e3,
        RATE: rate,
        "flops_per_token": flops,
        "tflops_per_gpu": rate * flops / 1e12,
        "peak_gib": peak[0].item(),
        "reserved_gib": peak[1].item(),
        "losses": [m["loss"] for m in metrics],
        "load_max_over_mean": metrics[-1]["expert_load_max_over_mean"],
        "rank_loads": [round(m["rank_load_max_over_mean"], 3) for m in metrics],
    }


def list_options(args: TrainConfig, config: DecoderConfig, routing: str) -> Row:
    """Return the options that distinguish two runs, by their names in the records."""
    sharding, fsdp, nvlink = args.sharding, args.fsdp, args.nvlink or NVLinkOptions()
    assert config.moe is not None
    values = {name: getattr(args, name) for name in SHOWN if hasattr(args, name)}
    values |= {name: args.parallel.get(name) for name in ("ep", "cp", "tp", "dp_shard")}
    values |= {
        "layers": args.model.get("num_layers"),
        "routing": routing,
        "quantile": config.moe.balance.bias_update == "quantile",
        "bias_per_micro_batch": config.moe.balance.bias_per_micro_batch,
        "dispatcher": sharding.dispatcher,
        "row_factor": None if nvlink == NVLinkOptions() else nvlink.row_factor,
        "exact_rows": nvlink.row_factor == "exact",
        "experts": sharding.expert_backend,
        "compile": sharding.compile_dense,
        "graph_dense": sharding.graph_dense,
        "recompute": args.memory.recompute,
        "offload": args.memory.offload,
        "stash": sharding.stash or args.stash is not None,
        "clones": sharding.clones or args.clones is not None,
        "gather_once": fsdp.dense_strategy == "optim",
        "keep_experts": (fsdp.experts_strategy or fsdp.dense_strategy) == "optim",
        "blocks_per_unit": fsdp.blocks_per_unit,
        "fp8_gather": fsdp.fp8_param_gather,
        "no_overlap": not nvlink.overlap_weight_grads,
        "send_again": not nvlink.keep_rows,
        "fp8_dispatch": sharding.fp8_dispatch,
        "fp8_head": args.fp8.get("fp8_head", False),
    }
    return {name: values[name] for name in SHOWN}


def break_down_step(job: CorpusTraining, *, first_step: int) -> Row:
    """Run one more step on every rank, and return its breakdown on rank 0."""
    dist.barrier()
    return make_trace_fields(trace(lambda: train_step(job, first_step).read_metrics()))


def measure_ceiling(device: torch.device) -> float:
    """Return the TFLOP/s of a large square bf16 product at the clocks of a busy GPU."""
    n = CEILING_SIDE if device.type == "cuda" else 256
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    count, stop = 0, time.perf_counter() + (CEILING_SECONDS if device.type == "cuda" else 0.01)
    start = time.perf_counter()
    while time.perf_counter() < stop:
        for _ in range(20):
            a @ b
        if device.type == "cuda":
            torch.cuda.synchronize()
        count += 20
    return count * 2 * n**3 / (time.perf_counter() - start) / 1e12


def report(row: Row, folder: Path | None) -> None:
    """Print the row and a committed row of the same arguments, and append the row."""
    command = shlex.join(["-m", "benchmarks.bench_train", *sys.argv[1:]])
    ours = find_committed(command, row["num_gpus"])
    for name in (f for f in PRINTED if f in row):
        beside = f"   committed {ours[name]:.4g}" if ours and name in ours else ""
        print(f"{name:<28}{row[name]:.4g}{beside}")
    losses = row["losses"]
    loads = f"load {row['load_max_over_mean']:.2f}, of ranks {row['rank_loads'][-1]:.2f}"
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {loads}")
    if "trace_ms" in row:
        found = Breakdown(
            wall=row["trace_wall_ms"],
            categories=row["trace_ms"],
            exposed=row["exposed_ms"],
            idle=row["idle_ms"],
            kernels=row["kernels"],
            longest={},
            gaps={name: (ms, count) for name, ms, count in row["gaps"]},
        )
        print("\n".join(format_table(found)))
        for name, (ms, count) in list(found.gaps.items())[:12]:
            print(f"idle {ms:.2f} ms, {count} times: {name}", flush=True)
    if folder is None:
        return
    environment = dataclasses.replace(Environment.here(), command=command)
    append_row(folder, environment, {k: _round(v) for k, v in row.items()})


def find_committed(command: str, num_gpus: int) -> Row | None:
    """Return the newest committed row of the same command on as many GPUs, or None."""
    same = _read_arguments(command)
    for path in sorted((RESULTS / "train").glob("*.jsonl"), reverse=True):
        for row in map(json.loads, reversed(path.read_text().splitlines())):
            if row.get("num_gpus") == num_gpus and _read_arguments(row["command"]) == same:
                return row
    return None


def _read_arguments(command: str) -> list[str]:
    """Return the words of a command in a fixed order, without those of `--results`."""
    words = shlex.split(command)
    if "--results" in words:
        start = words.index("--results")
        del words[start : start + 2]
    return sorted(words)


def _count_tokens(shape: BatchShape) -> int:
    """Return the tokens of a step; rows have no padding here."""
    return shape.data_ranks * shape.grad_accum * shape.batch_size * shape.seq_len


def _round(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, list):
        return [_round(v) for v in value]
    return {k: _round(v) for k, v in value.items()} if isinstance(value, dict) else value


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # without destructors, see moecore/recipes/launch.py
