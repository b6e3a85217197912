r"""The lengths of rows that the first rank of a pipeline can train, with and without offload.

    python -m benchmarks.bench_pipeline_context --results benchmarks/results/pipeline
    python -m benchmarks.bench_pipeline_context --preset tiny-qwen3 --layers 4 --pp 2 \
        --micro-batches 4 --lengths 32 64 --device cpu

    offload   the saved tensors of all parts are in pinned host memory until their backward
    none      every activation stays on the GPU until its backward

This process is rank 0 of a fake process group of `--pp` ranks, which receives no values, so memory
and the time of kernels and copies are those of a real pipeline and results are not. With 1F1B this
rank has the most micro-batches in flight. A length fits if two steps of it run within `--gib`. Each
length has its record as soon as it is measured; without `step_s` it does not fit.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from dataclasses import replace
from functools import partial
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch

from benchmarks.bench_fit import is_gpu
from benchmarks.harness import synchronize
from benchmarks.records import append_rows, results_path
from moecore import (
    FSDPOptions,
    ParallelConfig,
    PipelineConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.base.options.memory import MemoryOptions
from moecore.models import Decoder, preset
from moecore.planning.run import fake_world
from moecore.train import AdamW

Row = dict[str, Any]
VARIANTS = {  # a step that fails may leave memory, so the variant that fits more is first
    "offload": MemoryOptions(offload=("norm", "attention", "experts", "rest")),
    "none": None,
}


def main() -> int:
    """Measure and report."""
    args = parse_arguments()
    if is_gpu(args):
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(args.gib * 2**30 / total)
    keys = ("preset", "layers", "pp", "micro_batches", "gib")
    options = {"op": "pipeline_context"} | {key: getattr(args, key) for key in keys}
    longest = dict.fromkeys(VARIANTS, 0)
    for name, memory in VARIANTS.items():
        for tokens in args.lengths:
            found = measure(memory, tokens, args)
            print(f"{name} {tokens} tokens: {found or 'does not fit'}", flush=True)
            if found:
                longest[name] = max(longest[name], tokens)
            row = options | {"variant": name, "tokens": tokens, "fits": bool(found)} | found
            if args.results is not None:
                append_rows(args.results, "benchmarks.bench_pipeline_context", [row])
    ratio = longest["offload"] / longest["none"] if longest["none"] else float("nan")
    print(f"{longest}: {ratio:.2f}", flush=True)
    return 0


def parse_arguments() -> argparse.Namespace:
    """Return the command-line arguments."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--preset", default="qwen3-30b-a3b")
    add("--layers", type=int, default=16, help="of all stages")
    add("--pp", type=int, default=4)
    add("--micro-batches", type=int, default=4, help="of one row each")
    add("--gib", type=float, default=48.0, help="memory of the GPU that may be used")
    kibi = [n * 1024 for n in (24, 28, 72)]
    add("--lengths", type=int, nargs="+", default=kibi, help="tokens of a row")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--results", type=results_path, help="folder or .jsonl file of records")
    return parser.parse_args()


def measure(memory: MemoryOptions | None, tokens: int, args: argparse.Namespace) -> Row:
    """Return the time and peak memory of the second step; empty if memory runs out."""
    gc.collect()
    if is_gpu(args):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        with fake_world(args.pp):
            seconds = run_steps(memory, tokens, args)
    except torch.OutOfMemoryError:
        return {}
    peak = torch.cuda.max_memory_allocated() if is_gpu(args) else 0
    return {"step_s": round(seconds, 4), "peak_gib": round(peak / 2**30, 2)}


def run_steps(memory: MemoryOptions | None, tokens: int, args: argparse.Namespace) -> float:
    """Run two steps of the first rank; return the seconds of the second."""
    meshes = build_meshes(ParallelConfig(pp=args.pp), args.device)
    config = replace(preset(args.preset), num_layers=args.layers, max_seq_len=tokens)
    model = Decoder(config, device="meta", dtype=torch.bfloat16)
    parallelize = partial(parallelize_moe, model, meshes, pipeline=PipelineConfig())
    parallelize(fsdp=FSDPOptions(param_dtype=torch.bfloat16), memory=memory)
    model.to_empty(device=args.device)
    model.init_weights()
    optimizer = AdamW(model.parameters(), lr=1e-4, moment_dtype=torch.bfloat16)
    step = TrainStep(model, optimizer, max_norm=1.0, num_micro_batches=args.micro_batches)
    g = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(0, config.vocab_size, (1, tokens), generator=g).to(args.device)
    batch = {"tokens_BT": tokens_BT, "labels_BT": tokens_BT.roll(-1, 1)}
    seconds = 0.0
    try:
        for _ in range(2):
            synchronize(args.device)
            start = time.perf_counter()
            step.forward_backward([batch] * args.micro_batches)
            step.finish()
            synchronize(args.device)
            seconds = time.perf_counter() - start
    finally:
        step.close()
    return seconds


if __name__ == "__main__":
    sys.exit(main())
