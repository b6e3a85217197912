r"""A step over two pipeline ranks against the same step over data ranks, alternating in one run.

    torchrun --nproc-per-node 2 -m benchmarks.bench_pipeline --layers 4 --layouts "Et*3|tL"
    torchrun --nproc-per-node 2 -m benchmarks.bench_pipeline --trace traces \
        --layers 6 --layouts "Et*4|ttL" "Ett|tt|tt|L" --schedules 1f1b interleaved

The baseline shards every layer over all ranks, and each rank computes all micro-batches of its
tokens. The ranks of a pipeline compute the same micro-batches, so its step has 1 / pp of the
tokens. Tokens per second and GPU are compared: bubbles, messages and uneven stages lower them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import synchronize
from benchmarks.records import RESULTS, append_rows, results_path
from moecore import (
    FSDPOptions,
    ParallelConfig,
    PipelineConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.models import Decoder, preset
from moecore.moe.forced_routing import force_even_load
from moecore.train import AdamW

BASE = "data"
Step = Callable[[], None]


def main() -> None:
    """Print and record a row per variant; on each rank of torchrun."""
    args = _parse_arguments()
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    variants = {BASE: make(None, args)}
    for layout, schedule in zip(args.layouts, args.schedules, strict=True):
        config = PipelineConfig(layout=layout, schedule=schedule)
        variants[f"{schedule} {layout}"] = make(config, args)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(args.turns + 1):
        for name, step in variants.items():
            seconds = time_step(step, args)
            if turn:  # the first one warms up
                times[name].append(seconds)
    world = dist.get_world_size()
    rows = []
    for name, seconds in times.items():
        pp = 1 if name == BASE else world
        tokens = args.micro_batches * args.batch_size * args.seq_len * world // pp
        median = statistics.median(seconds)
        rows.append(
            {
                "op": "pipeline_step",
                "provider": name,
                **{n: getattr(args, n) for n in ("preset", "layers", "micro_batches")},
                "batch_size": args.batch_size,
                "vocab_size": args.vocab_size or preset(args.preset).vocab_size,
                "seq_len": args.seq_len,
                "step_ms": 1e3 * median,
                "fastest_ms": 1e3 * min(seconds),
                "tokens_per_second_per_gpu": tokens / median / world,
            }
        )
    if dist.get_rank() == 0:
        base = rows[0]["tokens_per_second_per_gpu"]
        for row in rows:
            print(row, f"{row['tokens_per_second_per_gpu'] / base:.3f} of {BASE}", flush=True)
        if args.results is not None:
            append_rows(args.results, "benchmarks.bench_pipeline", rows, num_gpus=world)
    if args.trace is not None:
        write_trace(list(variants.items())[-1], args)
    dist.destroy_process_group()


def make(pipeline: PipelineConfig | None, args: argparse.Namespace) -> Step:
    """Return the training step of a new model."""
    pp = -1 if pipeline is None else int(os.environ["WORLD_SIZE"])
    parallel = ParallelConfig() if pipeline is None else ParallelConfig(pp=pp)
    meshes = build_meshes(parallel, args.device)
    config = replace(preset(args.preset), num_layers=args.layers)
    if args.vocab_size is not None:
        config = replace(config, vocab_size=args.vocab_size)
    model = Decoder(config, device="meta")
    force_even_load(model)
    fsdp = FSDPOptions(param_dtype=torch.bfloat16, dense_strategy="optim")
    parallelize_moe(model, meshes, fsdp=fsdp, pipeline=pipeline)
    model.to_empty(device=args.device)
    model.init_weights()
    owner = TrainStep(
        model, AdamW(model.parameters()), max_norm=1.0, num_micro_batches=args.micro_batches
    )
    shape = (args.batch_size, args.seq_len + 1)
    same = torch.Generator(args.device).manual_seed(0)  # ranks of a pipeline share rows
    tokens = torch.randint(0, 64, shape, device=args.device, generator=same)
    inputs: dict[str, Any] = {"tokens_BT": tokens[:, :-1], "labels_BT": tokens[:, 1:].contiguous()}

    def step() -> None:
        owner.forward_backward([inputs] * args.micro_batches)
        owner.finish()

    return step


def time_step(step: Step, args: argparse.Namespace) -> float:
    """Return the slowest rank's seconds per step, the mean of a turn."""
    synchronize(args.device)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(args.steps):
        step()
    synchronize(args.device)
    seconds = torch.tensor((time.perf_counter() - start) / args.steps, device=args.device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def write_trace(variant: tuple[str, Step], args: argparse.Namespace) -> None:
    """Write the trace of one step on each rank, in the format of `Timeline.from_traces`."""
    args.trace.mkdir(parents=True, exist_ok=True)
    with torch.profiler.profile() as profile:
        variant[1]()
        synchronize(args.device)
    profile.export_chrome_trace(str(args.trace / f"{dist.get_rank()}.json"))


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--preset", default="qwen3-30b-a3b")
    add("--layers", type=int, default=4)
    add("--vocab-size", type=int, help="which weighs the head; default: the preset's")
    add("--layouts", nargs="+", default=["Et*3|tL"], help="of the stages of all ranks")
    add("--schedules", nargs="+", default=["1f1b"], help="of each layout")
    add("--micro-batches", type=int, default=16)
    add("--batch-size", type=int, default=1)
    add("--seq-len", type=int, default=4096)
    add("--turns", type=int, default=3)
    add("--steps", type=int, default=2, help="of a turn")
    add("--trace", type=Path, help="folder for a trace of the last variant")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--results", type=results_path, nargs="?", const=str(RESULTS))
    return parser.parse_args()


if __name__ == "__main__":
    main()
