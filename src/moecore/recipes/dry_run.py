"""--dry-run: the resolved options, the plan of memory and time and the first batch of a run."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import torch

from moecore.base.options.dispatch import NVLinkOptions
from moecore.base.options.names import GpuName
from moecore.base.options.precision import Precision
from moecore.base.tables import shown_bytes
from moecore.models import DecoderConfig
from moecore.parallel.mesh import ParallelConfig
from moecore.planning import (
    OptimizerOptions,
    TrainingRun,
    TransformersModel,
    plan_memory,
    plan_time,
)
from moecore.planning.costs import CostTable
from moecore.planning.gpus import are_peers, domain_of, gpu_of, peers_of, time_refusal
from moecore.recipes.data import StepBatch
from moecore.recipes.optimizer import optimizer_of

MAX_TOKENS = 64  # of the first row that are printed


def add_dry_run(parser: argparse.ArgumentParser) -> None:
    """Add --dry-run and the machine that it plans for."""
    add = parser.add_argument_group("dry run").add_argument
    add("--dry-run", action="store_true", help="print options, plan and first batch; train nothing")
    add("--gpus", type=int, help="ranks of the plan (None = those that would start)")
    add("--gpu", choices=get_args(GpuName), default="h100-80", help="the GPU of the plan")


def planned_run(
    args: argparse.Namespace,
    model: DecoderConfig | TransformersModel,
    records: dict[str, Any],
    parallel: ParallelConfig,
    num_gpus: int,
) -> TrainingRun:
    """Return the run of the options as `moecore.planning` describes it, in bf16."""
    if isinstance(model, DecoderConfig):
        model = replace(model, max_seq_len=max(model.max_seq_len, args.seq_len))
    optimizer, sharding = optimizer_of(args), records["sharding"]
    domain = domain_of(args.gpu, num_gpus)
    peers = peers_of(args.gpu, domain)
    has_nvlink = are_peers(parallel.ep * parallel.etp, peers)
    has_nvlink &= sharding.dispatcher in ("auto", "nvlink")
    is_hierarchical = sharding.dispatcher == "hierarchical"
    return TrainingRun(
        model=model,
        num_gpus=num_gpus,
        parallel=parallel,
        seq_len=args.seq_len,
        batch_size=args.batch_size,
        num_micro_batches=args.grad_accum,
        pipeline=records["pipeline"],
        fsdp=replace(records["fsdp"], param_dtype=torch.bfloat16),
        memory=records["memory"],
        precision=records["fp8"] or Precision.of(args.precision),
        optimizer=OptimizerOptions(
            moment_dtype=optimizer.moment_dtype,
            master_remainder=optimizer.master_remainder,
            offload_fraction=optimizer.state_offload,
        ),
        nvlink=records["nvlink"] or NVLinkOptions() if has_nvlink or is_hierarchical else None,
        dispatcher="hierarchical" if is_hierarchical else "auto",
        ranks_per_domain=domain,
        num_peers=peers,
        fp8_dispatch=sharding.fp8_dispatch,
    )


def print_dry_run(
    args: argparse.Namespace,
    toml: str,
    run: TrainingRun | None,
    read_batch: Callable[[], StepBatch],
    decode: Callable[[list[int]], str],
) -> int:
    """Print options, plan and first batch; return 0, or 1 if the plan does not fit the GPU.

    Args:
        args: of the command.
        toml: the resolved options.
        run: to plan; None = there are no plans of such a run.
        read_batch: reads the first batch, after the plan is printed.
        decode: makes text of token ids.

    Raises:
        ValueError, NotImplementedError: for a model that is not planned or data that are missing.
    """
    print(toml)
    fits = True
    if run is None:
        print("no plan: moecore.planning does not model adapters and reference models yet")
    else:
        fits = print_plan(args, run)
    print_batch(read_batch(), decode)
    return 0 if fits else 1


def print_plan(args: argparse.Namespace, run: TrainingRun) -> bool:
    """Print memory by kind and the time of a step; return whether the run fits the GPU."""
    plan, gpu = plan_memory(run), gpu_of(args.gpu)
    peak, memory = plan.largest.num_bytes, gpu.memory
    print(f"plan for {run.num_gpus} {args.gpu}:")
    print(plan.table())
    time = time_refusal(run.precision, args.gpu) or plan_time(run, CostTable.of(args.gpu)).line
    print(time)
    fits = peak <= memory
    verdict = "fits" if fits else "does not fit: moecore plan finds options that do"
    print(f"peak memory {shown_bytes(peak)} of {shown_bytes(memory)}: {verdict}")
    return fits


def print_batch(batch: StepBatch, decode: Callable[[list[int]], str]) -> None:
    """Print the shape of rank 0's first batch and the beginning of its first row."""
    micro_batches, rows, tokens = batch.tokens_ABT.shape
    labels, real, _, total = batch.counts().tolist()
    print(
        f"first batch of rank 0: {micro_batches} micro-batch(es) of {rows} row(s) of {tokens} "
        f"tokens; {real} of {total} tokens are no padding, {labels} have labels"
    )
    row = batch.tokens_ABT[0, 0, :MAX_TOKENS].tolist()
    print(f"first tokens: {row}")
    print(f"first text: {decode(row)!r}")
