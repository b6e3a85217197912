"""Saved rows of experts in pages, against room for a skewed load in every layer: memory and time.

    python -m benchmarks.bench_stash --results

One GPU runs a decoder whose layers have room for `--room` times the routed rows, like a rank whose
factor allows for a load of that skew. All rows stay on the rank, so its load is the mean. The
variants alternate on one model: "room" saves all rows that there is room for, "pages" only the
routed rows (`MemoryOptions.stash`). "factor" has room for `--row-factor` times the routed rows,
like a rank that repeats steps with more rows. "exact" has no further room, like a dispatcher that
waits for counts. No step is repeated here: a repeat would take the time of another step and leave a
larger factor. `kept` is the memory between forward and backward, including pools of pages, less the
memory before; `peak` is the most memory, likewise. `host ms` is the time in which the host launches
a forward and backward on an idle GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import sys
import time
from typing import Any

import torch
from tests.train.memory.towers import RoomyDispatcher, part_of
from torch import Tensor

from benchmarks.harness import FULL, SMOKE, time_variants
from benchmarks.records import RESULTS, append_rows, results_path
from moecore import FSDPOptions, ParallelConfig, StashOptions, TrainStep, build_meshes
from moecore import parallelize_moe as parallelize
from moecore.models import Decoder, preset
from moecore.moe.layer import MoELayer
from moecore.parallel.model.parallel_state import get_moe_state
from moecore.train.memory.stash import Stash

VARIANTS = ("room", "pages", "factor", "exact")


class Bench:
    """A model that saves rows as a variant says."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.args, self.is_gpu = args, torch.cuda.is_available()
        config = preset(args.preset)
        assert config.moe is not None
        moe = dataclasses.replace(
            config.moe, num_experts=args.experts, top_k=min(config.moe.top_k, args.experts)
        )
        config = dataclasses.replace(config, num_layers=args.layers, moe=moe, vocab_size=4096)
        self.model = Decoder(config, device="meta")
        dtype = torch.bfloat16 if self.is_gpu else torch.float32
        options = FSDPOptions(param_dtype=dtype, dense_strategy="optim")
        parallelize(self.model, build_meshes(ParallelConfig(), self.device.type), fsdp=options)
        self.model.to_empty(device=self.device)
        self.model.init_weights()
        self.step = TrainStep(self.model)
        shape = (args.tokens // args.seq_len, args.seq_len)
        g = torch.Generator().manual_seed(0)
        self.tokens_BT = torch.randint(0, 4096, shape, generator=g).to(self.device)
        self.layers: list[MoELayer] = list(get_moe_state(self.model).layers.values())
        for layer in self.layers:
            dispatcher = layer.dispatcher = RoomyDispatcher()
            dispatcher.num_experts = args.experts
        sizes = StashOptions(factor=args.factor)
        self.stash = Stash(self.device, sizes, len(self.layers))

    def prepare(self, variant: str) -> None:
        """Set how rows are saved."""
        self.stash.detach()
        rooms = {"exact": 1, "factor": self.args.row_factor}
        for layer in self.layers:
            layer.dispatcher.room = rooms.get(variant, self.args.room)
        if variant == "pages":
            self.stash.attach(list(self.model.layers), part_of)
        self.step.drop()

    def loss(self) -> Tensor:
        """Run a forward and return its loss."""
        return self.model(self.tokens_BT, self.tokens_BT.roll(-1, 1))

    def forward_backward(self) -> Tensor:
        """Run forward and backward."""
        with self.step.micro_batch():
            loss = self.loss()
            loss.backward()
        self.step.drop()
        return loss.detach()

    def host_ms(self, variant: str) -> float:
        """Return the median host time of a forward and backward in milliseconds."""
        self.prepare(variant)
        found = []
        for _ in range(7):
            self._settle()
            start = time.perf_counter()
            self.forward_backward()
            found.append(1e3 * (time.perf_counter() - start))
        return statistics.median(found)

    def sizes(self, variant: str) -> dict[str, int]:
        """Return the saved and the peak bytes of a second forward and backward."""
        self.stash.close()
        self._settle()
        before = torch.cuda.memory_allocated() if self.is_gpu else 0
        self.prepare(variant)
        self.forward_backward()
        self._settle()
        if not self.is_gpu:
            return {"kept": 0, "peak": 0}
        torch.cuda.reset_peak_memory_stats()
        with self.step.micro_batch():
            loss = self.loss()
            kept = torch.cuda.memory_allocated() - before
            loss.backward()
        peak = torch.cuda.max_memory_allocated() - before
        self.step.drop()
        return {"kept": kept, "peak": peak}

    def _settle(self) -> None:
        self.step.drop()
        gc.collect()
        if self.is_gpu:
            torch.cuda.synchronize()


def main() -> int:
    """Measure, print and record a row per variant."""
    args = _parse_arguments()
    bench = Bench(args)
    losses = set()
    sizes = {}
    for variant in VARIANTS:
        sizes[variant] = bench.sizes(variant)
        losses.add(bench.forward_backward().item())
    if len(losses) > 1:
        print(f"bench_stash: error: losses differ ({losses}): no numbers", file=sys.stderr)
        return 1
    effort = FULL if bench.is_gpu else SMOKE
    calls = dict.fromkeys(VARIANTS, bench.forward_backward)
    how: dict[str, Any] = dict(device=bench.device, effort=effort, prepare=bench.prepare)
    timings = time_variants(calls, **how)
    host_ms = {variant: bench.host_ms(variant) for variant in VARIANTS}
    bench.stash.wait_and_raise_errors()
    common = {name: getattr(args, name) for name in ("preset", "layers", "experts", "tokens")}
    common |= {"room": args.room, "factor": args.factor, "row_factor": args.row_factor}
    rows = [
        common
        | {"variant": name, "ms": timings[name].ms, "p20": timings[name].p20}
        | {"p80": timings[name].p80, "over_room": timings[name].ms / timings["room"].ms}
        | {"host ms": host_ms[name]}
        | sizes[name]
        | {"kept_over_room": sizes[name]["kept"] / max(sizes["room"]["kept"], 1)}
        for name in VARIANTS
    ]
    print("\n".join(json.dumps(row) for row in rows))
    if args.results is not None:
        append_rows(args.results, "benchmarks.bench_stash", rows)
    return 0


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--experts", type=int, default=16, help="of the rank")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--room", type=int, default=5, help="times the rows that come")
    parser.add_argument("--factor", type=float, default=1.1, help="of the pages")
    parser.add_argument("--row-factor", type=float, default=1.5, help="times the rows that come")
    parser.add_argument("--results", type=results_path, nargs="?", const=str(RESULTS / "skew"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
