r"""Optimizer state in host memory, and optimizer steps on the host: time and memory of a step.

    torchrun --nproc-per-node 1 -m benchmarks.bench_state_offload --preset qwen3-30b-a3b \
        --layers 6 --batch-size 16 --seq-len 4096 --micro-batches 4 --gigabytes 16

    plain           AdamW on the GPU
    away            the same with `--gigabytes` of its state on the host between steps
                    (StateOffload): copies run beside forward and backward
    host            HostAdamW for `--host-fraction` of the parameters' bytes
    host, away      both
    plain again     the first once more, which shows the drift of the clocks

All train the native decoder on random tokens from the same weights, with fp32 weights and moments
and bf16 compute (fp32 on CPUs), one after the other in one run. A step lasts from the end of the
step before to its own end, on the slowest rank; the median counts. The peak is that of the timed
steps. Losses of one step must agree. With several ranks set OMP_NUM_THREADS to the cores of a rank,
for steps on the host. Rank 0 prints a table; `--results` appends a row per variant to
<folder>/<day>-<gpu>.jsonl.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import statistics
import sys
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.records import append_rows, results_path
from moecore import (
    DenseOptions,
    FSDPOptions,
    Meshes,
    ParallelConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.models import Decoder, DecoderConfig, preset
from moecore.recipes.metrics import Moment
from moecore.train import AdamW, HostAdamW, StateOffload

Row = dict[str, Any]
MAX_NORM = 1.0
BYTES_OF_STATE = 8  # per parameter


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """Where a run keeps and steps its optimizer state.

    Attributes:
        on_host: whether HostAdamW steps parameters.
        away: whether state is in host memory between steps.
    """

    on_host: bool = False
    away: bool = False


VARIANTS = {
    "plain": Variant(),
    "away": Variant(away=True),
    "host": Variant(on_host=True),
    "host, away": Variant(on_host=True, away=True),
    "plain again": Variant(),
}


def main() -> int:
    """Run the variants on the ranks of torchrun, and report."""
    args = parse_arguments()
    if "WORLD_SIZE" not in os.environ:
        print("bench_state_offload: error: start it with torchrun -m", file=sys.stderr)
        return 2
    config = preset(args.preset)
    if args.layers is not None:
        config = dataclasses.replace(config, num_layers=args.layers)
    meshes = build_meshes(ParallelConfig(ep=int(os.environ["WORLD_SIZE"])))
    rows: list[Row] = []
    for name in args.variants:
        row = {"op": "state_offload", "variant": name} | describe(args, config)
        rows.append(row | run(VARIANTS[name], args, config, meshes))
        if dist.get_rank() == 0:
            print(format_row(rows[-1], rows[0]), flush=True)
    if dist.get_rank() == 0 and args.results is not None:
        append_rows(args.results, "benchmarks.bench_state_offload", rows)
    dist.barrier()
    return 0


def parse_arguments() -> argparse.Namespace:
    """Return the command-line arguments."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--preset", default="qwen3-30b-a3b")
    add("--layers", type=int, help="cut it to so many (None = all)")
    add("--batch-size", type=int, default=16, help="sequences per rank and micro-batch")
    add("--seq-len", type=int, default=4096)
    add("--micro-batches", type=int, default=1)
    add("--gigabytes", type=float, default=16.0, help="of 1e9 bytes that leave each rank")
    add("--host-fraction", type=float, default=0.5)
    add("--warm-up", type=int, default=3, help="steps that do not count")
    add("--timed", type=int, default=5, help="steps that do")
    add("--lr", type=float, default=1e-4)
    add("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    add("--results", type=results_path, help="folder for the records")
    return parser.parse_args()


def describe(args: argparse.Namespace, config: DecoderConfig) -> Row:
    """Return the fields that distinguish two rows, besides the variant."""
    return {
        "preset": args.preset,
        "layers": config.num_layers,
        "num_gpus": dist.get_world_size(),
        "batch_size": args.batch_size,
        "seq_len": args.seq_len,
        "micro_batches": args.micro_batches,
        "host_fraction": args.host_fraction,
        "num_threads": torch.get_num_threads(),
    }


def build(config: DecoderConfig, meshes: Meshes) -> Decoder:
    """Return the model, the same for every variant."""
    on_gpu = meshes.device_type == "cuda"
    model = Decoder(config, device="meta")
    parallelize_moe(
        model,
        meshes,
        dense=DenseOptions(compile=on_gpu),
        fsdp=FSDPOptions(param_dtype=torch.bfloat16 if on_gpu else torch.float32),
    )
    model.to_empty(device=meshes.device_type)
    model.init_weights(0)
    return model


def run(variant: Variant, args: argparse.Namespace, config: DecoderConfig, meshes: Meshes) -> Row:
    """Train one variant and free its memory; collective."""
    try:
        return train(variant, args, config, meshes)
    finally:
        gc.collect()
        if meshes.device_type == "cuda":
            torch.cuda.empty_cache()


def train(variant: Variant, args: argparse.Namespace, config: DecoderConfig, meshes: Meshes) -> Row:
    """Return losses, times and bytes of one variant."""
    device = torch.device(meshes.device_type)
    model = build(config, meshes)
    optimizer: AdamW
    if variant.on_host:
        fraction = args.host_fraction
        optimizer = HostAdamW(model.parameters(), lr=args.lr, host_fraction=fraction)
    else:
        optimizer = AdamW(model.parameters(), lr=args.lr)
    num_params = sum(_get_local(p).numel() for p in model.parameters())
    moved = min(args.gigabytes * 1e9 / (BYTES_OF_STATE * num_params), 1.0)
    offload = None
    if variant.away:
        offload = StateOffload(optimizer, model, fraction=moved)
    step = TrainStep(model, optimizer, max_norm=MAX_NORM, num_micro_batches=args.micro_batches)
    generator = torch.Generator().manual_seed(dist.get_rank())
    moments, losses = [], []
    for number in range(args.warm_up + args.timed):
        if number == args.warm_up and device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        shape = (args.micro_batches, args.batch_size, args.seq_len + 1)
        tokens = torch.randint(0, config.vocab_size, shape, generator=generator)
        losses.append(forward_backward(model, step, tokens.to(device)))
        step.finish()
        moments.append(Moment(device))
    moments[-1].wait_for_gpu()
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    held = 0 if offload is None else offload.host_bytes
    if offload is not None:
        offload.close()
    step.close()
    return summarize_times(moments, args, device) | {
        "losses": reduce_losses(torch.stack(losses)),
        "params": num_params,
        "peak_gib": peak / 2**30,
        "pinned_gib": held / 2**30,
        "moved_fraction": moved if variant.away else 0.0,
    }


def forward_backward(model: Decoder, step: TrainStep, tokens: Tensor) -> Tensor:
    """Run the micro-batches of a step and return its loss."""
    total = torch.zeros((), device=tokens.device)
    for tokens_BT in tokens:
        with step.micro_batch():
            loss = model(tokens_BT[:, :-1], tokens_BT[:, 1:]) / len(tokens)
            loss.backward()
        total += loss.detach()
    return total


def summarize_times(moments: list[Moment], args: argparse.Namespace, device: torch.device) -> Row:
    """Return median, minimum and maximum of the slowest rank's step times; collective."""
    times = [before.seconds_until(end) for before, end in pairwise(moments)][-args.timed :]
    slowest = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    found = [seconds * 1e3 for seconds in slowest.tolist()]
    return {"step_ms": statistics.median(found), "least_ms": min(found), "most_ms": max(found)}


def reduce_losses(losses: Tensor) -> list[float]:
    """Return the mean loss of each step over all ranks; collective."""
    dist.all_reduce(losses)
    return [round(x, 5) for x in (losses / dist.get_world_size()).tolist()]


def format_row(row: Row, first: Row) -> str:
    """Return a line with the row and its ratios to the first variant."""
    apart = max(abs(a - b) for a, b in zip(row["losses"], first["losses"], strict=True))
    added = (row["step_ms"] - first["step_ms"]) / 1e3
    return (
        f"{row['variant']:<14}{row['step_ms']:>9.1f} ms ({row['least_ms']:.1f} to "
        f"{row['most_ms']:.1f}) {added:>+8.3f} s {row['step_ms'] / first['step_ms']:>6.3f} x "
        f"{row['peak_gib']:>7.1f} GiB peak {row['pinned_gib']:>6.1f} GiB pinned, "
        f"losses apart {apart:.5f}"
    )


def _get_local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # without destructors, see moecore/recipes/launch.py
