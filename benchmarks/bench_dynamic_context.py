r"""Training steps with one cp per micro-batch against a fixed cp: tokens per second.

    torchrun --nproc-per-node 2 -m benchmarks.bench_dynamic_context \
        --results benchmarks/results/sequences
    torchrun --nproc-per-node 2 -m benchmarks.bench_dynamic_context \
        --preset tiny-qwen3 --device cpu --layers 1 --row-tokens 256 --rows 2 --steps 1

"static" computes the rows of a `CorpusLoader`, one per micro-batch, over all ranks. "dynamic" gets
the documents of rows of the same corpus from a `ScheduledLoader`, with at most as many tokens per
rank and micro-batch. Documents are as long as the text files of this Python installation, with four
bytes per token, or their lengths are drawn (`--lengths`); token ids are random and routing is even.
A worker reads ahead.

Both models exist at once, and their steps alternate. Tokens do not count padding. A time is the
slowest rank's, from the arrival of the batch to the end of the optimizer; `wait_ms` is the wait of
a step for its batch.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.packing_baselines import DISTRIBUTIONS, draw_lengths
from benchmarks.records import append_rows, results_path
from benchmarks.text import list_installed_folders, sort_files
from moecore import (
    ContextOptions,
    DispatchOptions,
    FSDPOptions,
    NVLinkOptions,
    ParallelConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.models import Decoder, DecoderConfig, document_cost, preset
from moecore.moe.forced_routing import force_even_load
from moecore.packing import CorpusLoader, CorpusOptions, CorpusSource, PackedBatch, ScheduledLoader
from moecore.packing.collate import get_length_multiple
from moecore.train import AdamW

Row = dict[str, Any]
MODULE = "benchmarks.bench_dynamic_context"
BYTES_PER_TOKEN = 4


class Inputs(NamedTuple):
    """A rank's inputs of one step.

    Attributes:
        micro_batches: inputs of the decoder.
        cps: cp of each micro-batch.
        tokens: this rank's share of the documents' tokens.
        held: this rank's share of all tokens with padding.
    """

    micro_batches: list[Row]
    cps: tuple[int, ...]
    tokens: int
    held: int


class Documents:
    """Random token ids of documents by number, drawn on access."""

    def __init__(self, lengths: Any, vocab_size: int) -> None:
        self.lengths, self.vocab_size = lengths, vocab_size

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Any:
        draw = np.random.default_rng(index)
        return draw.integers(0, self.vocab_size, int(self.lengths[index]))


def main() -> int:
    """Measure and report."""
    args = parse_arguments()
    rank, world = (int(os.environ.get(name, d)) for name, d in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    rows = measure(args, {name: make(args, world) for name, make in VARIANTS.items()})
    for row in rows if rank == 0 else ():
        print(
            f"{row['variant']:<8}{row['tokens_per_s']:>12,.0f} tokens/s {row['ratio']:.2f} of "
            f"static's  padding {row['padding_share']:.1%}  wait {row['wait_ms']:.0f} ms  "
            f"loss {row['loss']:.4f}  micro-batches by cp {row['cps']}",
            flush=True,
        )
    if rank == 0 and args.results is not None:
        append_rows(args.results, MODULE, rows, num_gpus=world)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def parse_arguments() -> argparse.Namespace:
    """Return the command-line arguments."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--preset", default="qwen3-30b-a3b")
    add("--layers", type=int, default=4)
    add("--lengths", default="files", choices=("files", *DISTRIBUTIONS))
    add("--row-tokens", type=int, default=65536, help="the longest document")
    add("--rows", type=int, default=8, help="of a step")
    add("--documents", default="whole", choices=("whole", "split"), help="how rows are made")
    add("--way", default="auto", help="of static's attention, and of dynamic's")
    add("--steps", type=int, default=8, help="that count, of each variant, after two")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--results", type=results_path, help="folder or .jsonl file of records")
    return parser.parse_args()


def make_lengths(args: argparse.Namespace) -> Any:
    """Return the lengths of documents."""
    if args.lengths != "files":
        return draw_lengths(args.lengths, 20_000)
    sizes = (
        path.stat().st_size // BYTES_PER_TOKEN for path in sort_files(list_installed_folders())
    )
    return [size for size in sizes if size]


class Variant(ABC):
    """A model that trains on the batches of its loader.

    Args:
        args: of the command line.
        parallel: degrees.
        context: options of context parallelism.
    """

    def __init__(
        self, args: argparse.Namespace, parallel: ParallelConfig, context: ContextOptions
    ) -> None:
        self.args, on_gpu = args, args.device == "cuda"
        self.meshes = build_meshes(parallel, args.device)
        self.config: DecoderConfig = dataclasses.replace(
            preset(args.preset), num_layers=args.layers, max_seq_len=2 * args.row_tokens
        )
        model = Decoder(self.config, device="meta")
        dtype = torch.bfloat16 if on_gpu else torch.float32
        fsdp = FSDPOptions(param_dtype=dtype, dense_strategy="optim")
        room = NVLinkOptions(max_tokens=args.row_tokens // dist.get_world_size(), row_factor=1.05)
        dispatch = DispatchOptions(nvlink=room)
        parallelize_moe(
            model, self.meshes, dispatch=dispatch, context=context, fsdp=fsdp, loss="sum"
        )
        model.to_empty(device=args.device)
        model.init_weights()
        force_even_load(model)
        adamw = AdamW(model.parameters(), lr=1e-6)
        self.step = TrainStep(model, adamw, max_norm=1.0, num_micro_batches=args.rows)
        self.loader: Any = self.make_loader(
            CorpusSource(
                name="all", documents=Documents(make_lengths(args), self.config.vocab_size)
            ),
            CorpusOptions(
                row_tokens=args.row_tokens,
                documents=args.documents,
                multiple=get_length_multiple(parallel.cp),
            ),
        )

    @abstractmethod
    def make_loader(self, source: CorpusSource, options: CorpusOptions) -> Any:
        """Return an iterator of batches."""

    @abstractmethod
    def next(self) -> Inputs:
        """Return the inputs of the next step."""

    def run(self, inputs: Inputs) -> float:
        """Run a training step and return this rank's part of the loss."""
        self.step.num_micro_batches = len(inputs.cps)
        losses = self.step.forward_backward(inputs.micro_batches)
        self.step.finish()
        return float((losses / torch.tensor(inputs.cps, device=losses.device)).sum())


class Static(Variant):
    """All ranks together compute each row."""

    def __init__(self, args: argparse.Namespace, world: int) -> None:
        super().__init__(args, ParallelConfig(cp=world, ep=world), ContextOptions(way=args.way))

    def make_loader(self, source: CorpusSource, options: CorpusOptions) -> Any:
        return CorpusLoader([source], options, rows=self.args.rows, workers=1)

    def next(self) -> Inputs:
        batch: PackedBatch = next(self.loader)
        world = dist.get_world_size()
        names = {"input_ids": "tokens_BT", "labels": "labels_BT", "padding_mask": "padding_mask_BT"}
        shared = {"num_tokens": int(batch["num_tokens"]), "max_seqlen": batch["max_seqlen"]}
        rows = []
        for number in range(self.args.rows):
            row: Row = {to: batch[of][number, None] for of, to in names.items()}  # type: ignore[literal-required]
            borders = batch["cu_seqlens"] - number * self.args.row_tokens
            row["cu_seqlens"] = borders[(borders >= 0) & (borders <= self.args.row_tokens)]
            rows.append({name: x.to(self.args.device) for name, x in row.items()} | shared)
        tokens, held = int((~batch["padding_mask"]).sum()), batch["padding_mask"].numel()
        return Inputs(rows, (world,) * len(rows), tokens // world, held // world)


class Dynamic(Variant):
    """Each micro-batch has its own cp."""

    def __init__(self, args: argparse.Namespace, world: int) -> None:
        context = ContextOptions(way=args.way, dynamic=True)
        super().__init__(args, ParallelConfig(ep=world), context)

    def make_loader(self, source: CorpusSource, options: CorpusOptions) -> Any:
        ranks = self.meshes.data_ranks
        return ScheduledLoader(
            [source],
            options,
            rows=self.args.rows,
            max_tokens=self.args.row_tokens // ranks,
            cost=document_cost(self.config),
            data_rank=self.meshes.data_rank,
            data_ranks=ranks,
            workers=1,
        )

    def next(self) -> Inputs:
        batch = next(self.loader)
        _, tokens, _, held = batch.count_labels_and_tokens().tolist()
        return Inputs(batch.inputs(self.args.device), batch.cps, tokens, held)


VARIANTS: dict[str, Callable[[argparse.Namespace, int], Variant]] = {
    "static": Static,
    "dynamic": Dynamic,
}


def measure(args: argparse.Namespace, variants: dict[str, Variant]) -> list[Row]:
    """Return a row per variant; collective."""
    found: dict[str, list[list[float]]] = {name: [] for name in variants}
    cps: dict[str, Counter[int]] = {name: Counter() for name in variants}
    for _ in range(2 + args.steps):
        for name, variant in variants.items():
            asked = time.perf_counter()
            inputs = variant.next()
            wait = time.perf_counter() - asked
            seconds, loss = time_step(variant, inputs)
            sums = torch.tensor([inputs.tokens, inputs.held, loss], dtype=torch.float64)
            most = torch.tensor([seconds, wait], dtype=torch.float64)
            sums, most = sums.to(args.device), most.to(args.device)
            dist.all_reduce(sums)
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
            found[name].append([*sums.tolist(), *most.tolist()])
            cps[name].update(inputs.cps)
    rows = []
    for name, steps in found.items():
        tokens, held, losses, seconds_, waits = (list(of) for of in zip(*steps[2:], strict=True))
        row = {"op": "dynamic_context_step", "variant": name, "loss": losses[-1]}
        row |= {key: value for key, value in vars(args).items() if key != "results"}
        row["tokens_per_s"] = sum(tokens) / sum(seconds_)
        row["step_ms"] = 1e3 * statistics.median(seconds_)
        row["wait_ms"] = 1e3 * statistics.median(waits)
        row["padding_share"] = 1 - sum(tokens) / sum(held)
        row["cps"] = {str(cp): cps[name][cp] for cp in sorted(cps[name])}  # of rank 0
        rows.append(row)
    for row in rows:
        row["ratio"] = row["tokens_per_s"] / rows[0]["tokens_per_s"]
    return rows


def time_step(variant: Variant, inputs: Inputs) -> tuple[float, float]:
    """Run a step and return its seconds and this rank's part of its loss."""
    on_gpu = variant.args.device == "cuda"
    dist.barrier()
    if on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    loss = variant.run(inputs)
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - start, loss


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # without destructors, see moecore/recipes/launch.py
