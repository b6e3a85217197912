"""Forward and backward limited by the host: eager, as graphs of parts, as one graph.

    python -m benchmarks.bench_graphs --results
    torchrun --nproc-per-node 4 -m benchmarks.bench_graphs --experts 128 --results

Ranks exchange tokens by "alltoall" over NCCL, and the host waits for the sizes. On one GPU the
group has one rank with all experts: the same work and waits. Variants are models with equal weights
that alternate:

    eager             without changes
    parts             `DenseOptions.graph`: graphs of attention, router and sent rows, per block
    compiled          `DenseOptions.compile`
    compiled parts    both
    padded            each expert has a capacity, so the host waits for no size
    padded graph      the same as one graph (`GraphedForwardBackward`)

`host_ms` is the time until an idle GPU has been given all work.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness import FULL, SMOKE, time_variants
from benchmarks.records import RESULTS, append_rows, results_path
from moecore import (
    CapacityConfig,
    DenseOptions,
    FSDPOptions,
    ParallelConfig,
    TrainStep,
    build_meshes,
)
from moecore import parallelize_moe as parallelize
from moecore.models import Decoder, preset
from moecore.moe.dispatch.alltoall import AllToAllDispatcher
from moecore.moe.placement import ExpertPlacement
from moecore.parallel.model.parallel_state import get_moe_state
from moecore.train import GraphedForwardBackward
from moecore.train.graphs.regions import graph_blocks

VARIANTS: dict[str, dict[str, bool]] = {
    "eager": {},
    "parts": dict(parts=True),
    "compiled": dict(compiled=True),
    "compiled parts": dict(parts=True, compiled=True),
    "padded": dict(padded=True),
    "padded graph": dict(padded=True, whole=True),
}
WARM_UP = 5  # calls, of which graphs need four


class Job:
    """A model with a call that runs its forward and backward."""

    def __init__(
        self,
        args: argparse.Namespace,
        device: torch.device,
        *,
        parts: bool = False,
        compiled: bool = False,
        padded: bool = False,
        whole: bool = False,
    ) -> None:
        config = preset(args.preset)
        assert config.moe is not None
        capacity = CapacityConfig(factor=args.factor, pad=True) if padded else None
        moe = replace(config.moe, num_experts=args.experts, capacity=capacity)
        config = replace(config, num_layers=args.layers, moe=moe, vocab_size=4096)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = Decoder(config, device="meta", dtype=dtype)
        world = dist.get_world_size()
        parallelize(
            self.model,
            build_meshes(ParallelConfig(ep=world), device.type),
            dispatch="alltoall",
            dense=DenseOptions(compile=compiled),
            fsdp=FSDPOptions(dense_strategy="optim", experts_strategy="optim"),
        )
        self.model.to_empty(device=device)
        self.model.init_weights()
        if world == 1:
            for layer in get_moe_state(self.model).layers.values():
                placement = ExpertPlacement(
                    group=dist.group.WORLD, num_experts=args.experts, ep=1, etp=1, num_clones=0
                )
                layer.dispatcher = AllToAllDispatcher(placement)
        if parts:
            graph_blocks({f"layers.{i}": block for i, block in enumerate(self.model.layers)})
        self.step = TrainStep(self.model)
        shape = (args.batch_size, args.seq_len)
        g = torch.Generator().manual_seed(dist.get_rank())
        self.tokens_BT = torch.randint(0, 4096, shape, generator=g).to(device)
        self._run: Callable[[Tensor], Tensor] = self._forward_backward
        if whole and device.type == "cuda":
            self._run = GraphedForwardBackward(self._forward_backward, self.model)

    def run(self) -> Tensor:
        """Run forward and backward, drop the gradients, and return the loss."""
        loss = self._run(self.tokens_BT)
        self.step.drop()
        return loss

    def _forward_backward(self, tokens_BT: Tensor) -> Tensor:
        with self.step.micro_batch():
            loss = self.model(tokens_BT, tokens_BT.roll(-1, 1))
            loss.backward()
        return loss.detach()


def main() -> int:
    """Measure, print and record a row per variant."""
    args = _parse_arguments()
    is_gpu = torch.cuda.is_available()
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        if is_gpu
        else torch.device("cpu")
    )
    if is_gpu:
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        os.environ |= dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
    dist.init_process_group("nccl" if is_gpu else "gloo")
    jobs = {
        name: Job(args, device, **how) for name, how in VARIANTS.items() if name in args.variants
    }
    losses = {name: [job.run().item() for _ in range(WARM_UP)][-1] for name, job in jobs.items()}
    for names in (("eager", "parts"), ("compiled", "compiled parts"), ("padded", "padded graph")):
        found = {losses[name] for name in names if name in losses}
        if len(found) > 1:
            print(f"bench_graphs: error: losses of {names} differ: {found}", file=sys.stderr)
            return 1
    calls = {name: job.run for name, job in jobs.items()}
    timings = time_variants(calls, device=device, effort=FULL if is_gpu else SMOKE)
    first = timings[next(iter(timings))]
    common = {n: getattr(args, n) for n in ("preset", "layers", "experts", "batch_size", "seq_len")}
    common |= {"op": "graphs"}
    rows: list[dict[str, Any]] = [
        common
        | {"variant": name, "ms": t.ms, "p20": t.p20, "p80": t.p80, "host_ms": t.host_ms}
        | {"speed_up": first.ms / t.ms, "loss": losses[name]}
        for name, t in timings.items()
    ]
    if dist.get_rank() == 0:
        print("\n".join(json.dumps(row) for row in rows))
        if args.results is not None:
            append_rows(
                args.results, "benchmarks.bench_graphs", rows, num_gpus=dist.get_world_size()
            )
    return 0


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--experts", type=int, default=32, help="of all ranks")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--factor", type=float, default=1.25, help="of the padded capacity")
    parser.add_argument("--variants", nargs="+", choices=tuple(VARIANTS), default=tuple(VARIANTS))
    parser.add_argument("--results", type=results_path, nargs="?", const=str(RESULTS / "graphs"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
