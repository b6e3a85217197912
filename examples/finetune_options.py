"""The arguments of finetune_hf.py."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from options import DEGREES, add_common, check_wandb, whole

SHARDING = tuple(d for d in DEGREES if d not in ("pp", "cp", "tp"))  # of transformers models


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
    add("--eval-data", type=Path, nargs="+", default=[], metavar="FILE", help="held-out files")
    add("--eval-share", type=share, default=0.05, help="of --data, held out without --eval-data")
    add("--epochs", type=whole, default=1, help="times that all of --data is read")
    add("--max-steps", type=whole, help="optimizer steps of the whole run (None = of --epochs)")
    add("--recompute", action="store_true", help="activations again in backward: less memory")
    add_common(parser, SHARDING)
    parser.set_defaults(
        run_dir=Path("runs/tuned"), batch_size=4, seq_len=1024, lr=1e-5, eval_every=50
    )
    parser.set_defaults(schedule_steps=None, expert_loads_every=10)  # no options here
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
    check_wandb(args)
