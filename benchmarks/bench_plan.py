"""Memory and time of the steps of many runs, as records that plans must match.

    python -m benchmarks.bench_plan --results benchmarks/results/planning
    torchrun --nproc-per-node 2 -m benchmarks.bench_plan --results benchmarks/results/planning
    python -m benchmarks.bench_plan --only tiny

Each case is a `TrainingRun` (`CASES`), built as in a dry run, with even loads. `held_gib` is the
memory between steps, `peak_gib` the most in a step. `step_ms` is the median from the end of one
step to the end of the next, with the host ahead. `host_ms` is the time in which the host queues a
step for an idle GPU. `tests/planning/test_records.py` plans the same runs.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.records import append_rows, results_path
from moecore import FSDPOptions, MemoryOptions, NVLinkOptions, ParallelConfig, PipelineConfig
from moecore.base.options.precision import Precision, Recipe
from moecore.models import preset
from moecore.moe.forced_routing import force_even_load
from moecore.planning import OptimizerOptions, TrainingRun
from moecore.planning.run import build_model, build_optimizer
from moecore.train.step import TrainStep

WARM_UP, TIMED = 3, 7
GIB = 2**30
Row = dict[str, Any]


def _make_cases() -> Iterator[tuple[str, TrainingRun]]:
    tiny = preset("tiny-qwen3")
    yield "tiny", TrainingRun(model=tiny, num_gpus=1, seq_len=32, batch_size=2)
    qwen = TrainingRun(model=replace(preset("qwen3-30b-a3b"), num_layers=3), num_gpus=1)
    for rows in (1, 2, 4, 8):
        yield f"qwen3, {rows} rows", replace(qwen, batch_size=rows)
    yield "qwen3, a row of 16,384", replace(qwen, seq_len=16384)
    yield "qwen3, a row of 32,768", replace(qwen, seq_len=32768)
    yield "qwen3, 4 micro-batches", replace(qwen, num_micro_batches=4)
    kept = FSDPOptions(param_dtype=torch.bfloat16, dense_strategy="optim")
    yield "qwen3, weights stay", replace(qwen, batch_size=2, fsdp=kept, num_micro_batches=2)
    rows = replace(qwen, batch_size=24)
    memory: dict[str, MemoryOptions] = {
        "norms, activations and rope again": MemoryOptions(recompute="gemm_last"),
        "FC1 again": MemoryOptions(recompute=("expert_fc1",)),
        "MoE layers again": MemoryOptions(recompute=("moe",)),
        "queries, keys and values again": MemoryOptions(recompute=("qkv_proj", "rope")),
        "experts offloaded": MemoryOptions(offload=("experts",)),
        "attention offloaded": MemoryOptions(offload=("attention", "norm")),
    }
    for name, options in memory.items():
        yield f"qwen3, {name}", replace(rows, memory=options)
    state: dict[str, OptimizerOptions] = {
        "bf16 moments": OptimizerOptions(moment_dtype="bfloat16"),
        "FP8 moments": OptimizerOptions(moment_dtype="float8_e4m3fn"),
        "bf16 weights with remainders": OptimizerOptions(master_remainder=True),
        "half of the state offloaded": OptimizerOptions(offload_fraction=0.5),
        "state offloaded": OptimizerOptions(offload_fraction=1.0),
    }
    for name, optimizer in state.items():
        yield f"qwen3, {name}", replace(qwen, batch_size=2, optimizer=optimizer)
    yield "qwen3, blockwise FP8", replace(rows, precision=Precision.of(Recipe(keep_hidden="wide")))
    yield "qwen3, rowwise FP8", replace(rows, precision=Precision.of("rowwise"))
    olmoe = TrainingRun(model=replace(preset("olmoe-1b-7b"), num_layers=8), num_gpus=1)
    yield "olmoe, a row", olmoe
    yield "olmoe, 4 rows", replace(olmoe, batch_size=4)
    both = MemoryOptions(recompute="gemm_last", offload=("experts",))
    yield "olmoe, levers", replace(olmoe, batch_size=4, memory=both)
    mixtral = TrainingRun(model=replace(preset("mixtral-8x7b"), num_layers=2), num_gpus=1)
    yield "mixtral, 2 rows", replace(mixtral, batch_size=2)
    deepseek = preset("deepseek-v3")
    assert deepseek.moe is not None
    few = replace(deepseek.moe, num_experts=32, num_groups=1, top_groups=1)
    deepseek = replace(deepseek, num_layers=5, moe=few, vocab_size=32768)
    small = OptimizerOptions(master_remainder=True, moment_dtype="bfloat16")
    latent = TrainingRun(model=deepseek, num_gpus=1, optimizer=small)
    yield "deepseek, a row", latent
    up = MemoryOptions(recompute=("norm", "mla_up_proj"))
    yield "deepseek, projections again", replace(latent, batch_size=2, memory=up)
    two = replace(qwen, num_gpus=2, batch_size=2)
    yield "2 GPUs, qwen3, data ranks", two
    yield "2 GPUs, qwen3, ep 2", replace(two, parallel=ParallelConfig(ep=2))
    room = NVLinkOptions(row_factor=1.25)
    yield "2 GPUs, qwen3, ep 2, nvlink", replace(two, parallel=ParallelConfig(ep=2), nvlink=room)
    yield "2 GPUs, qwen3, tp 2", replace(two, parallel=ParallelConfig(tp=2, ep=2))
    yield "2 GPUs, qwen3, cp 2", replace(two, parallel=ParallelConfig(cp=2, ep=2))
    stages = PipelineConfig(layout="Et*2|tL")
    yield (
        "2 GPUs, qwen3, pp 2",
        replace(two, parallel=ParallelConfig(pp=2), pipeline=stages, num_micro_batches=8),
    )


CASES = dict(_make_cases())


def main() -> int:
    """Measure and report."""
    args = parse_arguments()
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device(args.device, int(os.environ.get("LOCAL_RANK", 0)))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    start_group(device, ranks)
    rows = []
    for name, run in CASES.items():
        if (
            run.num_gpus != ranks
            or not name.startswith(args.only)
            or (name == "tiny") == bool(device.type == "cuda")
        ):
            continue
        row = {"case": name} | measure(run, device)
        if dist.get_rank() == 0:
            shown = (f"{row[key]:>10.2f}" for key in ("held_gib", "peak_gib", "step_ms", "host_ms"))
            print(f"{name:<44}", *shown, flush=True)
            rows.append(row)
    if args.results is not None and rows:
        append_rows(args.results, "benchmarks.bench_plan", rows, num_gpus=ranks)
    dist.destroy_process_group()
    return 0


def parse_arguments() -> argparse.Namespace:
    """Return the command-line arguments."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="how a case's name begins")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--results", type=results_path, help="folder for the records")
    return parser.parse_args()


def start_group(device: torch.device, ranks: int) -> None:
    """Create the default group: torchrun's, or a group of one rank."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    how: dict[str, Any] = {} if ranks > 1 else dict(store=dist.HashStore(), rank=0, world_size=1)
    dist.init_process_group(backend, **how)


def measure(run: TrainingRun, device: torch.device) -> Row:
    """Return the memory and times of a run's steps, the most over ranks; collective."""
    free_memory(device)
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    model = build_model(run, device.type)
    model.to_empty(device=device)
    model.init_weights()
    force_even_load(model)
    optimizer = build_optimizer(run, model)
    step = TrainStep(model, optimizer, max_norm=1.0, num_micro_batches=run.num_micro_batches)
    sizes = (run.batch_size, run.seq_len)
    tokens_BT = torch.randint(0, run.model.vocab_size, sizes, device=device)
    inputs = [{"tokens_BT": tokens_BT, "labels_BT": tokens_BT.roll(-1, 1)}] * run.num_micro_batches
    host = [measure_host_time(step, inputs, device) for _ in range(WARM_UP)][-1]
    gc.collect()
    held = peak = 0
    if device.type == "cuda":
        held = torch.cuda.memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()
    ends = [record_time(device)]
    for _ in range(TIMED):
        step.forward_backward(inputs)
        step.finish()
        ends.append(record_time(device))
    if device.type == "cuda":
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    step_ms = statistics.median(compute_milliseconds(a, b) for a, b in pairwise(ends))
    step.close()
    numbers = torch.tensor([held / GIB, peak / GIB, step_ms, host * 1e3], dtype=torch.float64)
    numbers = numbers.to(device)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    names = ("held_gib", "peak_gib", "step_ms", "host_ms")
    return dict(zip(names, (round(x, 3) for x in numbers.tolist()), strict=True))


def measure_host_time(step: TrainStep, inputs: list[Row], device: torch.device) -> float:
    """Return the seconds in which the host queues a step for an idle device."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step.forward_backward(inputs)
    step.finish()
    return time.perf_counter() - start


def record_time(device: torch.device) -> Any:
    """Return the current time of the device: an event, or seconds."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def compute_milliseconds(start: Any, end: Any) -> float:
    """Return the milliseconds between two times of `record_time`."""
    return (end - start) * 1e3 if isinstance(end, float) else float(start.elapsed_time(end))


def free_memory(device: torch.device) -> None:
    """Free the memory of the case before."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
