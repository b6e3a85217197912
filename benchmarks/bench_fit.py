"""The number of layers of a decoder that fit on one GPU, by options for state and activations.

    python -m benchmarks.bench_fit --results benchmarks/results/memory
    python -m benchmarks.bench_fit --preset tiny-qwen3 --seq-len 32 --most 3 --device cpu

    plain     fp32 weights, gradients and moments, bf16 compute, every activation saved
    state     bf16 weights and gradients, AdamW with remainders and FP8 moments
    levers    the same with `MemoryOptions` of `RECOMPUTE`

A number of layers fits if two steps of it run: the second one has all state and gradients. Two
small models give the bytes per layer and a first guess, which is then raised or lowered until a
number fits and the next one does not.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
import torch.distributed as dist

from benchmarks.records import append_rows, results_path
from moecore import FSDPOptions, ParallelConfig, TrainStep, build_meshes, parallelize_moe
from moecore.base.options.memory import MemoryOptions
from moecore.models import Decoder, preset
from moecore.parallel.mesh import Meshes
from moecore.train import AdamW

Row = dict[str, Any]
RECOMPUTE = ("norm", "rope", "qkv_proj")
SMALL = (2, 4)


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """Options for the weights, the optimizer state and the activations."""

    weights: torch.dtype = torch.float32
    optimizer: dict[str, Any] = field(default_factory=dict)
    memory: MemoryOptions | None = None


LEAST_STATE = {"master_remainder": True, "moment_dtype": torch.float8_e4m3fn}
VARIANTS = {
    "plain": Variant(),
    "state": Variant(weights=torch.bfloat16, optimizer=LEAST_STATE),
    "levers": Variant(
        weights=torch.bfloat16, optimizer=LEAST_STATE, memory=MemoryOptions(recompute=RECOMPUTE)
    ),
}


def main() -> int:
    """Measure and report."""
    args = parse_arguments()
    backend = "nccl" if args.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    meshes = build_meshes(ParallelConfig(), args.device)
    rows: list[Row] = []
    for name in args.variants:
        row = {"op": "fit", "variant": name, "preset": args.preset}
        row |= {"batch_size": args.batch_size, "seq_len": args.seq_len}
        rows.append(row | find_max_layers(VARIANTS[name], args, meshes))
        ratio = rows[-1]["layers"] / rows[0]["layers"]
        print(
            f"{name:<8}{rows[-1]['layers']:>4} layers, {ratio:.2f} of {rows[0]['variant']}'s; "
            f"{rows[-1]['bytes_per_layer'] / 1e9:.2f} GB a layer",
            flush=True,
        )
    if args.results is not None:
        append_rows(args.results, "benchmarks.bench_fit", rows)
    return 0


def parse_arguments() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--preset", default="qwen3-30b-a3b")
    add("--batch-size", type=int, default=4)
    add("--seq-len", type=int, default=4096)
    add("--most", type=int, default=48, help="layers that are tried at most")
    add("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--results", type=results_path, help="folder for the records")
    return parser.parse_args()


def find_max_layers(variant: Variant, args: argparse.Namespace, meshes: Meshes) -> Row:
    """Return the largest number of layers that fits, and the bytes of a layer at the peak."""
    peaks = [measure_peak(variant, n, args, meshes) for n in SMALL]
    if None in peaks:
        raise SystemExit(f"bench_fit: error: {SMALL[-1]} layers do not fit")
    per_layer = max((peaks[1] - peaks[0]) / (SMALL[1] - SMALL[0]), 1)
    room = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() if is_gpu(args) else 0
    number = SMALL[0] + int((room - peaks[0]) // per_layer) if room else args.most
    number = min(max(number, SMALL[1]), args.most)
    fits = {SMALL[1]: True}

    def does_fit(number: int) -> bool:
        if number not in fits:
            fits[number] = measure_peak(variant, number, args, meshes) is not None
        return fits[number]

    while not does_fit(number):
        number -= 1
    while number < args.most and does_fit(number + 1):
        number += 1
    return {"layers": number, "bytes_per_layer": per_layer}


def is_gpu(args: argparse.Namespace) -> bool:
    """Return whether the model runs on a GPU."""
    return bool(args.device == "cuda")


def measure_peak(
    variant: Variant,
    num_layers: int,
    args: argparse.Namespace,
    meshes: Meshes,
    lengths: Sequence[int] = (),
) -> int | None:
    """Return the peak memory of the steps of `train`, or None if they run out of memory."""
    if is_gpu(args):
        torch.cuda.reset_peak_memory_stats()
    try:
        train(variant, num_layers, args, meshes, lengths)
    except torch.OutOfMemoryError:
        return None
    finally:
        gc.collect()
        if is_gpu(args):
            torch.cuda.empty_cache()
    return torch.cuda.max_memory_allocated() if is_gpu(args) else 0


def train(
    variant: Variant,
    num_layers: int,
    args: argparse.Namespace,
    meshes: Meshes,
    lengths: Sequence[int] = (),
) -> None:
    """Run a step for each of `lengths`, or two steps of `args.seq_len` tokens."""
    lengths = lengths or (args.seq_len, args.seq_len)
    config = dataclasses.replace(
        preset(args.preset), num_layers=num_layers, max_seq_len=max(lengths)
    )
    model = Decoder(config, device="meta", dtype=variant.weights)
    options = FSDPOptions(param_dtype=torch.bfloat16)
    parallelize_moe(model, meshes, fsdp=options, memory=variant.memory)
    model.to_empty(device=args.device)
    model.init_weights()
    optimizer = AdamW(model.parameters(), lr=1e-4, **variant.optimizer)
    step = TrainStep(model, optimizer, max_norm=1.0)
    try:
        for number, length in enumerate(lengths):
            g = torch.Generator().manual_seed(number)
            shape = (args.batch_size, length)
            tokens = torch.randint(0, config.vocab_size, shape, generator=g).to(args.device)
            with step.micro_batch():
                model(tokens, tokens.roll(-1, 1)).backward()
            step.finish()
        if is_gpu(args):
            torch.cuda.synchronize()
    finally:
        step.close()


if __name__ == "__main__":
    sys.exit(main())
