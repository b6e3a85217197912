"""The arguments of finetune_hf.py."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from options import DEGREES, DTYPES, MOMENT_DTYPES, count, positive, whole

from moecore.base.options.precision import PrecisionName

SHARDING = tuple(d for d in DEGREES if d not in ("pp", "tp"))  # of transformers models


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the arguments of a run; None = those of the command line."""
    parser = argparse.ArgumentParser(
        description="Fine-tune a Hugging Face Mixture-of-Experts model on chats, prompts or text.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="DIR", help="config, tokenizer and weights")
    add(
        "--data",
        type=Path,
        nargs="+",
        required=True,
        metavar="FILE",
        help='.jsonl of "messages", "prompt" and "completion", or "text"; else plain text',
    )
    add("--run-dir", type=Path, default=Path("runs/tuned"), help="all that a run leaves goes here")
    add("--eval-data", type=Path, nargs="+", default=[], metavar="FILE", help="held-out files")
    add("--eval-share", type=share, default=0.05, help="of --data, held out without --eval-data")
    add("--eval-every", type=count, default=50, help="steps; 0 = no evaluation at all")
    add("--epochs", type=whole, default=1, help="times that all of --data is read")
    add("--max-steps", type=whole, help="optimizer steps of the whole run (None = of --epochs)")
    add("--batch-size", type=whole, default=4, help="rows per data rank and micro-batch")
    add("--grad-accum", type=whole, default=1, help="micro-batches per step")
    add("--seq-len", type=whole, default=1024, help="tokens of a row, and most of a sequence")
    add("--lr", type=positive, default=1e-5, help="peak of warm-up and cosine")
    add("--aux-loss", type=positive, help="balance loss coefficient (None = no such loss)")
    add("--recompute", action="store_true", help="activations again in backward: less memory")
    add("--dtype", choices=DTYPES, help="of compute (None = float32 on CPU, bfloat16 on GPU)")
    add(
        "--precision",
        choices=get_args(PrecisionName),
        help="products in FP8, on Hopper (None = all in --dtype)",
    )
    add("--moment-dtype", default="float32", choices=MOMENT_DTYPES, help="of AdamW")
    add("--seed", type=count, default=0, help="of the order of examples")
    add("--checkpoint-every", type=count, default=100, help="steps; 0 = no checkpoint at all")
    add("--wandb", metavar="PROJECT", help="log to Weights & Biases too")
    add("--ranks", type=whole, help="processes (None = one per GPU, 2 on CPU, torchrun's)")
    for degree in SHARDING:
        flag, text = f"--{degree.replace('_', '-')}", "parallel degree (None = what fits)"
        add(flag, type=int, help=text, metavar="N")
    return parser.parse_args(arguments)


def share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"({text}) must be a number in [0, 1)")
    return value


def check_arguments(args: argparse.Namespace, config: Any) -> None:
    """Raise ValueError for what would fail after the model is loaded."""
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if longest and args.seq_len > longest:
        raise ValueError(
            f"--seq-len ({args.seq_len}) must be <= max_position_embeddings ({longest}) of --model"
        )
    if args.wandb and importlib.util.find_spec("wandb") is None:
        raise ValueError(f"--wandb ({args.wandb}) must have wandb installed: pip install wandb")
