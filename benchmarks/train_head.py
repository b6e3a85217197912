r"""Trains a small decoder with parts of its head's products in FP8, and compares the losses.

    python -m benchmarks.train_head --seeds 0 1 2 3 4 --results benchmarks/results/fp8
    python -m benchmarks.train_head --seeds 0 --steps 3 --device cpu

A dense decoder reads text in tokens of two bytes (65,536 of them), so that its head is wide. The
runs of a seed have the same weights and batches, and differ only in the head:

    bf16            all three products in bf16
    fp8             all three in blockwise FP8, as `Precision(fp8_head=True)`
    fp8-logits      the logits in FP8, both gradients in bf16
    fp8-gradients   the logits in bf16, both gradients in FP8
    flushed         bf16, but the gradient of logits is 0 where FP8 would round it to 0
    flushed-weight  the same for the weight's gradient alone

E4M3 rounds an entry to 0 if it is less than 2^-10 / 448 of the largest entry of its block: a row of
128 columns for the gradient of hidden states, 128 rows of 128 columns for the weight's.

Letters: C tokens of a chunk, D model dim, V vocabulary, T tokens of a row, B rows of a batch.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

import torch
from torch import Tensor

from benchmarks.records import append_rows, results_path
from benchmarks.text import list_installed_folders, read_text
from benchmarks.train_fp8 import Batches, Size
from moecore.base.options.precision import Recipe
from moecore.kernels.cross_entropy import cross_entropy_
from moecore.kernels.rows.quantised import gather_row_blocks, quantise_rows
from moecore.models import Decoder, DecoderConfig, loss
from moecore.precision.head import BlockwiseHeadProducts, HeadProducts

MAKE_HEAD_PRODUCTS = loss.make_head_products
SMALLEST = 2.0**-10 / 448  # half of E4M3's smallest number over its largest
LR, WARM_UP = 6e-4, 50
Row = dict[str, Any]


class FP8Logits(BlockwiseHeadProducts):
    """Logits in FP8, both gradients in the dtype of the hidden states."""

    def compute_logits(self, hidden_CD: Tensor) -> Tensor:
        self.hidden_CD = hidden_CD
        return super().compute_logits(hidden_CD)

    def compute_cross_entropy(self, logits_CV: Tensor, labels_C: Tensor, **how: bool) -> Any:
        return HeadProducts.compute_cross_entropy(self, logits_CV, labels_C, **how)

    def write_d_hidden(self, d_logits: Any, out_CD: Tensor) -> None:
        HeadProducts.write_d_hidden(self, d_logits, out_CD)

    def add_d_weight(self, d_logits: Any, out_VD: Tensor, *, overwrites: bool) -> None:
        HeadProducts.add_d_weight(self, d_logits, out_VD, overwrites=overwrites)


class FP8Gradients(BlockwiseHeadProducts):
    """Logits in the dtype of the hidden states, both gradients in FP8."""

    def compute_logits(self, hidden_CD: Tensor) -> Tensor:
        super().compute_logits(hidden_CD)  # which keeps the operand of the weight's gradient
        return hidden_CD @ self.weight_VD.t()

    def compute_cross_entropy(self, logits_CV: Tensor, labels_C: Tensor, **how: bool) -> Any:
        total, d_logits_CV = cross_entropy_(logits_CV, labels_C, self.dtype)
        rows = quantise_rows(d_logits_CV, power_of_two=self.power_of_two)
        return total, gather_row_blocks(rows, None, None, None)


class Flushed(HeadProducts):
    """Products in the dtype of the hidden states, small entries of the logits' gradient as 0."""

    def write_d_hidden(self, d_logits: Any, out_CD: Tensor) -> None:
        super().write_d_hidden(flush(d_logits, rows=1), out_CD)

    def add_d_weight(self, d_logits: Any, out_VD: Tensor, *, overwrites: bool) -> None:
        super().add_d_weight(flush(d_logits, rows=128), out_VD, overwrites=overwrites)


class FlushedWeight(Flushed):
    """`Flushed` for the weight's gradient alone."""

    def write_d_hidden(self, d_logits: Any, out_CD: Tensor) -> None:
        HeadProducts.write_d_hidden(self, d_logits, out_CD)


def flush(x_CV: Tensor, rows: int) -> Tensor:
    """Return x with 0 where E4M3 with a scale per rows x 128 block would have 0."""
    blocks = x_CV.unflatten(0, (-1, rows)).unflatten(2, (-1, 128))
    amax = blocks.abs().amax((1, 3), keepdim=True)
    return blocks.masked_fill(blocks.abs() < amax * SMALLEST, 0).view_as(x_CV)


VARIANTS: dict[str, type[HeadProducts]] = {
    "bf16": HeadProducts,
    "fp8": BlockwiseHeadProducts,
    "fp8-logits": FP8Logits,
    "fp8-gradients": FP8Gradients,
    "flushed": Flushed,
    "flushed-weight": FlushedWeight,
}


def make_size(device: str) -> Size:
    """Return the decoder and its batches."""
    dim, layers, rows, length = (512, 4, 32, 512) if device == "cuda" else (128, 1, 2, 64)
    config = DecoderConfig(
        vocab_size=1 << 16,
        dim=dim,
        num_layers=layers,
        num_heads=dim // 64,
        num_kv_heads=dim // 64,
        head_dim=64,
        qk_norm="head",
        mlp_hidden_dim=3 * dim,
    )
    return Size(config=config, batch_size=rows, seq_len=length, bytes_per_token=2)


def train(variant: str, batches: Batches, unseen: Batches, size: Size, seed: int) -> Row:
    """Train one run; return its loss of the last tenth of the steps and its held-out loss."""
    products = VARIANTS[variant]
    how = {"recipe": Recipe()} if issubclass(products, BlockwiseHeadProducts) else {}
    loss.make_head_products = lambda weight_VD, recipe, training: products(
        weight_VD, training=training, **how
    )
    device = batches.bytes_N.device.type
    model = Decoder(size.config, device=device)
    model.init_weights(seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), LR, betas=(0.9, 0.95), weight_decay=0.1, fused=device == "cuda"
    )
    steps, losses = len(batches), []
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM_UP, 1 - 0.9 * step / steps)
    )
    for step in range(steps):
        with torch.autocast(device, torch.bfloat16):
            value = model(*batches.at(step))
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(value.detach())
    last = [x.item() for x in losses[-max(1, steps // 10) :]]
    loss.make_head_products = MAKE_HEAD_PRODUCTS  # the loss on unseen text is in bf16
    model.eval()
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        held_out = torch.stack([model(*unseen.at(i)) for i in range(len(unseen))]).mean().item()
    return {
        "op": "train_head",
        "variant": variant,
        "seed": seed,
        "steps": steps,
        "loss": statistics.fmean(last),
        "held_out_loss": held_out,
    }


def summarise(rows: list[Row]) -> list[str]:
    """Return a line per variant: mean and standard error of the losses over those of bf16."""
    lines = []
    base = {row["seed"]: row for row in rows if row["variant"] == "bf16"}
    for variant in VARIANTS:
        line = f"{variant:16}"
        for name in ("loss", "held_out_loss"):
            ratios = [r[name] / base[r["seed"]][name] for r in rows if r["variant"] == variant]
            error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
            line += f"  {name} {statistics.fmean(ratios):.4f} +- {error:.4f}" if ratios else ""
        lines.append(line)
    return lines


def main(arguments: list[str]) -> int:
    """Run every variant of every seed, and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[0])
    add("--steps", type=int, default=500)
    add("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    add("--results", type=results_path, help="folder of the record")
    args = parser.parse_args(arguments)
    size, device = make_size(args.device), torch.device(args.device)
    text = read_text(
        list_installed_folders(), most_bytes=48 << 20 if device.type == "cuda" else 1 << 20
    )
    unseen = Batches(text.held_out_N, size, steps=16, seed=None, device=device)
    rows: list[Row] = []
    for seed in args.seeds:
        batches = Batches(text.train_N, size, steps=args.steps, seed=seed, device=device)
        for variant in args.variants:
            rows.append(train(variant, batches, unseen, size, seed))
            print(
                variant, seed, f"{rows[-1]['loss']:.4f} {rows[-1]['held_out_loss']:.4f}", flush=True
            )
        if args.results is not None:
            append_rows(args.results, "benchmarks.train_head", rows[-len(args.variants) :])
    print("\n".join(summarise(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
