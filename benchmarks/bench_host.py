"""Host time of a step's forward and backward: moecore's units against FSDP2.

    python -m benchmarks.bench_host --layers 48 --tokens 64
    torchrun --nproc-per-node 2 -m benchmarks.bench_host --preset tiny --layers 48 --tokens 16

One process is rank 0 of a fake group of 8; the processes of torchrun form a group over NCCL. The
fake group queues 8 copies for each tensor of a collective, which NCCL does not: FSDP2 has one
tensor per unit there, moecore one per parameter. Both models exist in one process, and their steps
alternate. `host_ms` ends when backward returns, on an idle GPU; `step_ms` ends with the GPU's work.
Weights are not updated.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from tests.parallel.fsdp.fsdp2 import parallelize_with_fsdp2
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.harness import synchronize
from benchmarks.records import RESULTS, append_rows, results_path
from moecore import FSDPOptions, ParallelConfig, build_meshes, parallelize_moe
from moecore.models import Decoder, preset

RANKS = 8
Build = Callable[..., nn.Module]
VARIANTS: dict[str, Build] = {"fsdp2": parallelize_with_fsdp2, "moecore": parallelize_moe}


def main() -> None:
    """Print one row per variant and their ratio."""
    args = _parse_arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    runs = {name: _Run(build, args, device) for name, build in VARIANTS.items()}
    for _ in range(args.warm_up):
        for run in runs.values():
            run.step()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(args.steps):
        for name, run in runs.items():
            times[name].append(run.step())
    rows = []
    for name, found in times.items():
        host, step = (statistics.median(t) * 1e3 for t in zip(*found, strict=True))
        rows.append(
            {
                "op": "host_step",
                "provider": name,
                "preset": args.preset,
                "layers": args.layers,
                "tokens": args.tokens,
                "ranks": dist.get_world_size(),
                "group": dist.get_backend(),
                "host_ms": host,
                "step_ms": step,
                "peak_gib": runs[name].peak_bytes / 2**30,
            }
        )
    if dist.get_rank():
        return
    for row in rows:
        print(json.dumps(row))
    base, own = rows
    for key in ("host_ms", "step_ms"):
        print(f"{key}: moecore / fsdp2 = {own[key] / base[key]:.3f}")
    if args.results is not None:
        append_rows(args.results, "benchmarks.bench_host", rows)


class _Run:
    """A model with its training step."""

    def __init__(self, build: Build, args: argparse.Namespace, device: str) -> None:
        config = replace(preset(args.preset), num_layers=args.layers)
        meshes = build_meshes(ParallelConfig(), device)
        self.device, self.peak_bytes = torch.device(device), 0
        self.model: Any = Decoder(config, device="meta")
        build(self.model, meshes, fsdp=FSDPOptions(param_dtype=torch.bfloat16))
        self.model.to_empty(device=device)
        with torch.no_grad():
            for param in self.model.parameters():
                param.to_local().fill_(0.01)
        self.tokens_BT = torch.zeros((1, args.tokens), dtype=torch.int64, device=device)

    def step(self) -> tuple[float, float]:
        """Return the seconds until backward returns, and until the GPU has finished."""
        gc.collect()
        synchronize(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        self.model(self.tokens_BT, self.tokens_BT).backward()
        host = time.perf_counter() - start
        synchronize(self.device)
        total = time.perf_counter() - start
        if self.device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated()
        for param in self.model.parameters():
            param.grad = None
        return host, total


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--results", type=results_path, nargs="?", const=str(RESULTS))
    return parser.parse_args()


if __name__ == "__main__":
    main()
