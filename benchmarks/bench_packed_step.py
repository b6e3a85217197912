"""A training step of packed documents against one of padded rows: real tokens per second.

    python -m benchmarks.bench_packed_step --results benchmarks/results/sequences
    python -m benchmarks.bench_packed_step --preset tiny-qwen3 --row-tokens 64 --device cpu

Documents of lognormal lengths, the same for both. "padded" has one document per row, each padded to
the longest, and as many rows as fit the tokens of the packed batch; "packed" concatenates documents
in rows. Both mask padding for the experts and give it no label, and a step ends with AdamW.
Variants alternate; each batch is drawn anew.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.records import append_rows, results_path
from moecore import FSDPOptions, ParallelConfig, TrainStep, build_meshes, parallelize_moe
from moecore.models import Decoder, preset
from moecore.packing import PackedCollator, pack_lengths
from moecore.train import AdamW

Row = dict[str, Any]
Batch = dict[str, Any]


def main() -> int:
    """Measure and report."""
    args = parse_arguments()
    on_gpu = args.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(0)
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    config = dataclasses.replace(preset(args.preset), num_layers=args.layers)
    model = Decoder(config, device="meta")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    meshes = build_meshes(ParallelConfig(), args.device)
    parallelize_moe(model, meshes, loss="sum", fsdp=FSDPOptions(param_dtype=dtype))
    model.to_empty(device=args.device)
    model.init_weights()
    step = TrainStep(model, AdamW(model.parameters(), lr=1e-6), max_norm=1.0)
    batches = {"padded": make_padded_batches(args, config.vocab_size)}
    batches["packed"] = make_packed_batches(args, config.vocab_size)
    rows = measure(args, step, model, batches)
    for row in rows:
        print(
            f"{row['variant']:<8}{row['tokens_per_s']:>12,.0f} tokens/s "
            f"{row['filled']:>7.1%} filled  {row['ratio']:.2f} of padded's  loss {row['loss']:.4f}"
        )
    if args.results is not None:
        append_rows(args.results, "benchmarks.bench_packed_step", rows)
    step.close()
    return 0


def parse_arguments() -> argparse.Namespace:
    """Return the command-line arguments."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--preset", default="qwen3-30b-a3b")
    add("--layers", type=int, default=4)
    add("--row-tokens", type=int, default=4096)
    add("--rows", type=int, default=4, help="of a packed batch")
    add("--mean", type=float, default=6.0, help="of the logarithm of a document's length")
    add("--sigma", type=float, default=1.0, help="of the same")
    add("--steps", type=int, default=10, help="that count, of each variant, after two")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--results", type=results_path, help="folder for the records")
    return parser.parse_args()


def make_documents(args: argparse.Namespace, vocab_size: int) -> Callable[[int], list[Tensor]]:
    """Return a function that draws documents; all such functions draw the same ones."""
    lengths = np.random.default_rng(0)
    ids = torch.Generator().manual_seed(0)

    def draw(number: int) -> list[Tensor]:
        drawn = lengths.lognormal(args.mean, args.sigma, number).astype(int)
        return [
            torch.randint(0, vocab_size, (int(n),), generator=ids)
            for n in drawn.clip(2, args.row_tokens)
        ]

    return draw


def make_packed_batches(args: argparse.Namespace, vocab_size: int) -> Callable[[], Batch]:
    """Return a function that makes the next packed batch, of the fullest bins of a draw."""
    draw = make_documents(args, vocab_size)
    collate = PackedCollator(row_tokens=args.row_tokens, rows=args.rows)

    def make() -> Batch:
        documents = draw(64 * args.rows)
        bins = pack_lengths([len(d) for d in documents], args.row_tokens)
        return dict(collate([documents[i] for bin_ in list(bins)[: args.rows] for i in bin_]))

    return make


def make_padded_batches(args: argparse.Namespace, vocab_size: int) -> Callable[[], Batch]:
    """Return a function that makes the next padded batch, with as many rows as fit."""
    draw = make_documents(args, vocab_size)

    def make() -> Batch:
        documents = draw(8 * args.rows)
        longest, taken = 0, list[Tensor]()
        for document in documents:
            wider = max(longest, len(document))
            if taken and wider * (len(taken) + 1) > args.rows * args.row_tokens:
                break
            longest = wider
            taken.append(document)
        ids = torch.zeros(len(taken), longest, dtype=torch.int64)
        labels, padding = torch.full_like(ids, -100), torch.ones_like(ids, dtype=torch.bool)
        for i, document in enumerate(taken):
            ids[i, : len(document)], padding[i, : len(document)] = document, False
            labels[i, : len(document) - 1] = document[1:]
        num_tokens = (labels != -100).sum()
        return dict(input_ids=ids, labels=labels, padding_mask=padding, num_tokens=num_tokens)

    return make


def measure(
    args: argparse.Namespace,
    step: TrainStep,
    model: Decoder,
    batches: dict[str, Callable[[], Batch]],
) -> list[Row]:
    """Return a row per variant."""
    rows: dict[str, Row] = {}
    rates: dict[str, list[float]] = {name: [] for name in batches}
    filled: dict[str, list[float]] = {name: [] for name in batches}
    for number in range(2 + args.steps):
        for name, make in batches.items():
            batch = {
                key: x.to(args.device) if isinstance(x, Tensor) else x for key, x in make().items()
            }
            seconds, loss = time_step(step, model, batch)
            real = int((~batch["padding_mask"]).sum())
            if number >= 2:
                rates[name].append(real / seconds)
                filled[name].append(real / batch["input_ids"].numel())
            rows[name] = {"op": "packed_step", "variant": name, "loss": loss}
    for name, row in rows.items():
        row |= {key: value for key, value in vars(args).items() if key != "results"}
        row["tokens_per_s"] = statistics.median(rates[name])
        row["filled"] = statistics.mean(filled[name])
        row["ratio"] = row["tokens_per_s"] / statistics.median(rates["padded"])
    return list(rows.values())


def time_step(step: TrainStep, model: Decoder, batch: Batch) -> tuple[float, float]:
    """Run a step and return its seconds and its loss."""
    documents = {key: batch[key] for key in ("cu_seqlens", "max_seqlen") if key in batch}
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    with step.micro_batch():
        loss = model(
            batch["input_ids"],
            batch["labels"],
            num_tokens=batch["num_tokens"],
            padding_mask_BT=batch["padding_mask"],
            **documents,
        )
        loss.backward()
    step.finish()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, float(loss.detach())


if __name__ == "__main__":
    sys.exit(main())
