"""Steps of a decoder that offloads a fraction of its saved tensors: time and peak memory.

    python -m benchmarks.bench_offload --results benchmarks/results/memory
    python -m benchmarks.bench_offload --preset tiny-qwen3 --layers 3 --seq-len 32 --device cpu

One native decoder on one device: bf16 compute on fp32 weights, random tokens, randomly initialised
routers. "none" is the step without offload. Each other variant offloads a fraction of the tensors
saved by norms, attention, dense MLPs, shared experts, experts and the rest of a block, in all
layers but the last. Variants alternate within every round, so clock drift affects all of them. Two
ops: forward and backward, and these with clipping and AdamW ("step").

    kept     bytes that blocks save for backward, storages from --min-bytes up, without weights
    moved    bytes copied to the host in a step; as many are copied back
    late     bytes that backward waited for: needed before their copy had started
    freed    peak of "none" minus the variant's peak

Requirement for 20% of the kept bytes: a step of at most 1.015 times "none"'s.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import harness
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
from moecore.moe.experts import Experts
from moecore.train import AdamW
from moecore.train.memory.offload import MIN_BYTES, Offload
from moecore.train.memory.parts import find_parts

Row = dict[str, Any]
NONE = "none"
FRACTIONS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
OPS = ("fwd_bwd", "step")


class Bench:
    """A model with its optimizer and batch; variants attach and detach its offload.

    Args:
        args: of the command line.
        config: of the decoder.
        meshes: of one rank.
    """

    def __init__(self, args: argparse.Namespace, config: DecoderConfig, meshes: Meshes) -> None:
        self.device = torch.device(args.device)
        is_gpu = self.device.type == "cuda"
        self.model = Decoder(config, device="meta")
        dtype = torch.bfloat16 if is_gpu else torch.float32
        parallelize_moe(
            self.model,
            meshes,
            dense=DenseOptions(compile=args.compile_dense),
            fsdp=FSDPOptions(param_dtype=dtype, dense_strategy="optim"),
        )
        self.model.to_empty(device=self.device)
        self.model.init_weights()
        self.optimizer = AdamW(self.model.parameters(), lr=1e-6)
        self.step = TrainStep(self.model, self.optimizer, max_norm=1.0)
        g = torch.Generator().manual_seed(0)
        shape = (args.batch_size, args.seq_len)
        tokens_BT = torch.randint(0, config.vocab_size, shape, generator=g)
        self.tokens_BT = tokens_BT.to(self.device)
        self.labels_BT = tokens_BT.roll(-1, 1).to(self.device)
        self.offload = Offload(
            self.device, min_bytes=args.min_bytes, max_host_bytes=args.max_host_bytes
        )
        blocks = list(self.model.layers)
        self.names: dict[nn.Module, str] = {
            part.module: part.kind for block in blocks for part in find_parts(block)
        }
        self.names |= {m: "experts" for m in self.model.modules() if isinstance(m, Experts)}
        self.names = {m: name for m, name in self.names.items() if name != "moe"}
        self.names |= dict.fromkeys(blocks, "rest")

    def prepare(self, variant: str) -> None:
        """Set the offload of a variant, and drop gradients."""
        self.offload.detach()
        if variant != NONE:
            self.offload.fraction = float(variant)
            self.offload.attach(list(self.model.layers), self.names.get)
        self.optimizer.zero_grad()
        self.step.drop()

    def loss(self) -> Tensor:
        """Run a forward and return its loss."""
        return self.model(self.tokens_BT, self.labels_BT)

    def fwd_bwd(self) -> Tensor:
        """Run forward and backward."""
        with self.step.micro_batch():
            loss = self.loss()
            loss.backward()
        return loss.detach()

    def whole_step(self) -> None:
        """Run forward, backward and the optimizer."""
        self.fwd_bwd()
        self.step.finish()

    def kept_bytes(self) -> int:
        """Return the bytes saved by a forward of all blocks, including the last."""
        self.prepare(NONE)
        self.offload.fraction, before = 0.0, self.offload.candidate_bytes
        self.offload.attach([*self.model.layers, nn.Identity()], self.names.get)
        self.fwd_bwd()
        return self.offload.candidate_bytes - before

    def gradients(self) -> list[Tensor]:
        """Return the gradients and the loss of a forward and backward."""
        loss = self.fwd_bwd()
        return [loss, *(p.grad for p in self.model.parameters() if p.grad is not None)]


def main() -> int:
    """Measure, print and record."""
    args = parse_arguments()
    config = dataclasses.replace(preset(args.preset), num_layers=args.layers)
    bench = Bench(args, config, build_meshes(ParallelConfig(), args.device))
    variants = [NONE, *map(str, args.fractions)]
    problem = describe_difference(bench, variants)
    if problem:
        print(f"bench_offload: error: {problem}: no numbers", file=sys.stderr)
        return 1
    common = describe(args, config) | {"kept_bytes": bench.kept_bytes()}
    rows = []
    calls = {"fwd_bwd": bench.fwd_bwd, "step": bench.whole_step}
    effort = harness.FULL if bench.device.type == "cuda" else harness.SMOKE
    for op in args.ops:
        for row in measure(bench, calls[op], variants, effort):
            rows.append({"op": f"offload_{op}"} | common | row)
            print(format_row(rows[-1]), flush=True)
    if args.results is not None:
        append_rows(args.results, "benchmarks.bench_offload", rows)
    bench.step.close()
    return 0


def parse_arguments() -> argparse.Namespace:
    """Return the command-line arguments."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--preset", default="qwen3-30b-a3b")
    add("--layers", type=int, default=6)
    add("--batch-size", type=int, default=4)
    add("--seq-len", type=int, default=4096)
    add("--fractions", type=float, nargs="+", default=FRACTIONS)
    add("--ops", nargs="+", default=OPS, choices=OPS)
    add("--min-bytes", type=int, default=MIN_BYTES, help="smaller storages stay")
    add("--max-host-bytes", type=int, help="of pinned memory (None = no limit)")
    add("--compile-dense", action="store_true", help="what compiled regions keep is the rest's")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--results", type=results_path, help="folder for the records")
    return parser.parse_args()


def describe(args: argparse.Namespace, config: DecoderConfig) -> Row:
    """Return the fields that distinguish two records, besides the variant."""
    return {
        "preset": args.preset,
        "layers": config.num_layers,
        "batch_size": args.batch_size,
        "seq_len": args.seq_len,
        "min_bytes": args.min_bytes,
        "compile_dense": args.compile_dense,
    }


def describe_difference(bench: Bench, variants: list[str]) -> str | None:
    """Return why gradients of variants differ from "none", or None if they agree.

    On a GPU two runs of "none" may differ, because sums have no fixed order: variants may differ by
    twice as much.
    """
    bench.prepare(NONE)
    want = [grad.clone() for grad in bench.gradients()]
    bench.prepare(NONE)
    limit = 2 * compute_distance(bench.gradients(), want)
    apart = {}
    for name in variants[1:]:
        bench.prepare(name)
        apart[name] = compute_distance(bench.gradients(), want)
    bench.prepare(NONE)
    worst = max(apart, key=lambda name: apart[name])
    if apart[worst] > limit:
        return f"gradients with fraction {worst} differ by {apart[worst]:.3g}, not {limit:.3g}"
    return None


def compute_distance(grads: list[Tensor], want: list[Tensor]) -> float:
    """Return the largest difference of two lists of gradients, relative to their maxima."""
    pairs = zip(grads, want, strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs)


def measure(
    bench: Bench, call: Callable[[], Any], variants: list[str], effort: harness.Effort
) -> list[Row]:
    """Return a row per variant."""
    timings = harness.time_variants(
        dict.fromkeys(variants, call), device=bench.device, effort=effort, prepare=bench.prepare
    )
    rows = []
    for name in variants:
        timing = timings[name]
        rows.append(
            dataclasses.asdict(timing)
            | {"variant": name, "ratio": timing.ms / timings[NONE].ms}
            | measure_bytes(bench, call, name)
        )
    return rows


def measure_bytes(bench: Bench, call: Callable[[], Any], variant: str) -> Row:
    """Return the bytes that a call of a variant moves, and its peak."""
    offload = bench.offload
    bench.prepare(variant)
    names = ("out_bytes", "back_bytes", "late_bytes")
    before = {name: getattr(offload, name) for name in names}
    peak = harness.measure_peak(call, device=bench.device)
    if peak is None:
        call()
    moved = {name: getattr(offload, name) - before[name] for name in names}
    return moved | {"peak_bytes": peak, "host_bytes": offload.host_bytes}


def format_row(row: Row) -> str:
    """Return the row as a line."""
    share = row["out_bytes"] / row["kept_bytes"]
    rate = (row["out_bytes"] + row["back_bytes"]) / row["ms"] / 1e6
    peak = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.2f} GiB"
    return (
        f"{row['op']:<16}{row['variant']:>5} {row['ms']:>9.2f} ms ({row['p20']:.2f}-"
        f"{row['p80']:.2f}) x{row['ratio']:.4f}  moved {row['out_bytes'] / 1e9:>7.3f} GB "
        f"({share:.1%} of {row['kept_bytes'] / 1e9:.3f} kept), {rate:.1f} GB/s both ways, late "
        f"{row['late_bytes'] / 1e9:.3f} GB  peak {peak}  host {row['host_bytes'] / 2**30:.2f} GiB"
    )


if __name__ == "__main__":
    sys.exit(main())
