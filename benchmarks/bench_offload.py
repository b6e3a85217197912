r"""Steps of a decoder that offloads a fraction of what it keeps for backward: time and peak memory.

    python -m benchmarks.bench_offload --results benchmarks/results/memory
    python -m benchmarks.bench_offload --preset tiny-qwen3 --layers 3 --seq-len 32 --device cpu

One native decoder on one device, bf16 compute on fp32 weights, random tokens, a fresh router's
choice. "none" is the step without any offload, and each other variant offloads a fraction of what
norms, attention, dense MLPs, shared experts, experts and the rest of a block keep, in all layers
but the last. Variants take turns within every round, so clocks drift for all alike. Two ops:
forward and backward, and these with clipping and AdamW ("step").

    kept     bytes that blocks save for backward, storages from --min-bytes up, without weights
    moved    bytes that go out in a step; as many come back
    late     bytes that backward had to wait for: asked for before a copy was under way
    freed    peak of "none" minus own peak

Required of 20% of the kept bytes: a step of at most 1.015 of "none"'s time.
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
    """A model, its optimizer, its batch, and its offload, which variants attach and detach.

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
        """Offload as the variant does, and drop gradients."""
        self.offload.detach()
        if variant != NONE:
            self.offload.fraction = float(variant)
            self.offload.attach(list(self.model.layers), self.names.get)
        self.optimizer.zero_grad()
        self.step.drop()

    def loss(self) -> Tensor:
        """Return the loss of a forward."""
        return self.model(self.tokens_BT, self.labels_BT)

    def fwd_bwd(self) -> Tensor:
        """Run forward and backward."""
        with self.step.micro_batch():
            loss = self.loss()
            loss.backward()
        return loss.detach()

    def whole_step(self) -> None:
        """Run a step."""
        self.fwd_bwd()
        self.step.finish()

    def kept_bytes(self) -> int:
        """Return what the blocks of a forward keep, the last one too."""
        self.prepare(NONE)
        self.offload.fraction, before = 0.0, self.offload.candidate_bytes
        self.offload.attach([*self.model.layers, nn.Identity()], self.names.get)
        self.fwd_bwd()
        return self.offload.candidate_bytes - before

    def gradients(self) -> list[Tensor]:
        """Return gradients and the loss, of a forward and backward."""
        loss = self.fwd_bwd()
        return [loss, *(p.grad for p in self.model.parameters() if p.grad is not None)]


def main() -> int:
    """Measure, print and record."""
    args = parse()
    config = dataclasses.replace(preset(args.preset), num_layers=args.layers)
    bench = Bench(args, config, build_meshes(ParallelConfig(), args.device))
    variants = [NONE, *map(str, args.fractions)]
    problem = disagreement(bench, variants)
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
            print(line_of(rows[-1]), flush=True)
    if args.results is not None:
        append_rows(args.results, "benchmarks.bench_offload", rows)
    bench.step.close()
    return 0


def parse() -> argparse.Namespace:
    """Return the arguments."""
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
    """Return what distinguishes two records beside the variant."""
    return {
        "preset": args.preset,
        "layers": config.num_layers,
        "batch_size": args.batch_size,
        "seq_len": args.seq_len,
        "min_bytes": args.min_bytes,
        "compile_dense": args.compile_dense,
    }


def disagreement(bench: Bench, variants: list[str]) -> str | None:
    """Return why a variant computes other gradients; None = all of them agree.

    On a GPU two runs without offload may differ (sums in no fixed order): by as much may variants.
    """
    bench.prepare(NONE)
    want = [grad.clone() for grad in bench.gradients()]
    bench.prepare(NONE)
    limit = 2 * distance(bench.gradients(), want)
    apart = {}
    for name in variants[1:]:
        bench.prepare(name)
        apart[name] = distance(bench.gradients(), want)
    bench.prepare(NONE)
    worst = max(apart, key=lambda name: apart[name])
    if apart[worst] > limit:
        return f"gradients with fraction {worst} differ by {apart[worst]:.3g}, not {limit:.3g}"
    return None


def distance(grads: list[Tensor], want: list[Tensor]) -> float:
    """Return the largest difference of two lists of gradients, over the largest of each."""
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
            | bytes_of(bench, call, name)
        )
    return rows


def bytes_of(bench: Bench, call: Callable[[], Any], variant: str) -> Row:
    """Return what a call of a variant moves and holds."""
    offload = bench.offload
    bench.prepare(variant)
    names = ("out_bytes", "back_bytes", "late_bytes")
    before = {name: getattr(offload, name) for name in names}
    peak = harness.measure_peak(call, device=bench.device)
    if peak is None:
        call()
    moved = {name: getattr(offload, name) - before[name] for name in names}
    return moved | {"peak_bytes": peak, "host_bytes": offload.host_bytes}


def line_of(row: Row) -> str:
    """Return a row as it is printed."""
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
