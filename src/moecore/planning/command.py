"""`moecore plan`: what each pipeline rank of a run holds, as a table or as JSON."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, fields
from typing import Any, get_args

import torch

from moecore.memory.options import MemoryOptions
from moecore.mesh import ParallelConfig
from moecore.models import PRESETS
from moecore.pipeline.config import PipelineConfig
from moecore.pipeline.orders import ScheduleName
from moecore.planning.gpus import GPUS
from moecore.planning.memory import plan_memory
from moecore.planning.run import MomentDtype, OptimizerOptions, TrainingRun
from moecore.precision.roles import Precision, PrecisionName
from moecore.shard.options import FSDPOptions, Strategy
from moecore.tables import shown_bytes

EXAMPLE = """\
example:
  moecore plan --preset deepseek-v3 --gpus 256 --gpu h100-80 --pp 8 --ep 32 \\
    --schedule interleaved --chunks 2 --micro-batches 64 --precision blockwise --recompute moe"""


def add_plan(rooms: Any) -> None:
    """Add the command to those of `moecore`."""
    parser = rooms.add_parser(
        "plan",
        help="what a training run holds on each rank of a cluster that is not there",
        description="Prints bytes by kind for each pipeline rank, from the plan and the forward "
        "that the run itself has. What an operation needs while it runs is not counted.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run_plan)
    add = parser.add_argument
    add("--preset", required=True, choices=tuple(PRESETS), help="the model")
    add("--gpus", type=int, required=True, help="ranks of the world")
    add("--gpu", default="h100-80", choices=tuple(GPUS), help="its kind")
    add("--seq-len", type=int, default=4096, help="tokens of a row")
    add("--batch-size", type=int, default=1, help="rows of a micro-batch of a data rank")
    add("--micro-batches", type=int, default=1, help="of a step, on a data rank")
    for field in fields(ParallelConfig):
        add(f"--{field.name.replace('_', '-')}", type=int, default=field.default, help="degree")
    add("--layout", help='pipeline stages, such as "Et*3|(tt|)*29m|L"')
    add("--chunks", type=int, help="pipeline stages of a rank; not with --layout")
    add("--schedule", default="1f1b", choices=get_args(ScheduleName), help="of pipeline stages")
    strategies = get_args(Strategy)
    add("--dense-strategy", default="optim_grads_params", choices=strategies, help="ZeRO of blocks")
    add("--experts-strategy", choices=strategies, help="of experts; default: as blocks")
    add("--precision", choices=get_args(PrecisionName), help="of products; default: bf16")
    add("--recompute", nargs="+", default=(), help="parts, as of MemoryOptions")
    add("--offload", nargs="+", default=(), help="parts, likewise")
    add("--moments", default="float32", choices=get_args(MomentDtype), help="dtype of AdamW's")
    add("--master-remainder", action="store_true", help="bf16 weights, see moecore.optim.AdamW")
    add("--state-offload", type=float, default=0.0, help="fraction of AdamW's state in host memory")
    add("--json", action="store_true", help="print one JSON object")


def run_plan(args: Any) -> int:
    """Print the plan; 1 where it does not fit."""
    plan = plan_memory(_run(args))
    largest, memory = plan.largest, GPUS[args.gpu].memory
    fits = largest.num_bytes <= memory
    if args.json:
        ranks = [asdict(rank) | {"num_bytes": rank.num_bytes} for rank in plan.ranks]
        print(json.dumps({"gpu": args.gpu, "memory": memory, "fits": fits, "ranks": ranks}))
        return 0 if fits else 1
    print(plan.table())
    print(
        f"pipeline rank {largest.pp_rank} holds most: {shown_bytes(largest.num_bytes)} of "
        f"{shown_bytes(memory)} ({args.gpu})"
    )
    if not fits:
        kind, size = max(largest.device.items(), key=lambda item: item[1])
        print(f"does not fit: {kind} is the largest part ({shown_bytes(size)})")
    return 0 if fits else 1


def _run(args: Any) -> TrainingRun:
    degrees = {field.name: getattr(args, field.name) for field in fields(ParallelConfig)}
    pipeline = None
    if args.pp > 1:
        pipeline = PipelineConfig(layout=args.layout, chunks=args.chunks, schedule=args.schedule)
    return TrainingRun(
        model=PRESETS[args.preset],
        num_gpus=args.gpus,
        parallel=ParallelConfig(**degrees),
        seq_len=args.seq_len,
        batch_size=args.batch_size,
        num_micro_batches=args.micro_batches,
        pipeline=pipeline,
        fsdp=FSDPOptions(
            param_dtype=torch.bfloat16,
            dense_strategy=args.dense_strategy,
            experts_strategy=args.experts_strategy,
        ),
        memory=MemoryOptions(
            recompute="gemm_last" if args.recompute == ["gemm_last"] else tuple(args.recompute),
            offload=tuple(args.offload),
        ),
        precision=Precision.of(args.precision),
        optimizer=OptimizerOptions(
            moment_dtype=args.moments,
            master_remainder=args.master_remainder,
            offload_fraction=args.state_offload,
        ),
    )
