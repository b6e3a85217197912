"""The arguments of `moecore train`, and the configs that they stand for."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import torch

from moecore.base.options.dispatch import DISPATCHERS, NVLinkOptions
from moecore.base.options.layer import MoEConfig
from moecore.base.options.memory import (
    GEMM_LAST,
    OFFLOADED,
    RECOMPUTED,
    MemoryOptions,
    StashOptions,
)
from moecore.base.options.names import ScheduleName
from moecore.base.options.precision import PrecisionName
from moecore.models import DecoderConfig, preset
from moecore.moe.backends import EXPERT_BACKENDS
from moecore.parallel.mesh import ParallelConfig
from moecore.parallel.pipeline.schedule import PipelineConfig
from moecore.recipes.data import VOCAB_SIZE
from moecore.recipes.optimizer import RECIPE
from moecore.recipes.records import add_records, help_of, parse
from moecore.train.loss_scale import DynamicLossScale

DEGREES = tuple(field.name for field in fields(ParallelConfig))
OPEN_DEGREES = tuple(field.name for field in fields(ParallelConfig) if field.default == -1)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the arguments of a run; None = those of the command line."""
    parser = argparse.ArgumentParser(
        prog="moecore train",
        description="Train a Mixture-of-Experts decoder on text, byte by byte.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--config", type=Path, metavar="FILE", help="TOML; a flag beside it wins")
    add("--preset", default="tiny", help="which decoder, see moecore.models.PRESETS")
    add("--experts", default="auto", choices=EXPERT_BACKENDS, help="how experts multiply")
    add("--data", type=Path, nargs="+", default=[], metavar="FILE", help='text, or jsonl "text"')
    add("--steps", type=positive_int, default=400, help="optimizer steps of the whole run")
    add("--bias-rate", type=float, help="step of the expert bias (None = the preset's)")
    add("--quantile", action="store_true", help="sigmoid scores, a bias solved for even loads")
    add("--bias-per-micro-batch", action="store_true", help="of --quantile: solved before choosing")
    add("--layers", type=positive_int, help="cut the preset to so many layers (None = all)")
    add("--tokens", default="text", choices=("text", "random"), help="random: over the vocabulary")
    add(
        "--dispatcher",
        default="auto",
        choices=DISPATCHERS,
        help="how tokens travel",
    )
    add("--row-factor", type=positive, help="of nvlink: capacity over even loads (None = 2)")
    add("--exact-rows", action="store_true", help="nvlink: room for what comes, at a host sync")
    add(
        "--recompute",
        nargs="+",
        default=(),
        choices=("gemm_last", *RECOMPUTED),
        help="what backward computes again; gemm_last costs no product",
    )
    add(
        "--offload",
        nargs="+",
        default=(),
        choices=OFFLOADED,
        help="parts of a block whose activations lie in host memory until backward",
    )
    add("--offload-fraction", type=float, default=1.0, help="of their bytes, in [0, 1]")
    add("--stash", action="store_true", help="experts' rows in pages, where there is room for more")
    add("--clones", action="store_true", help="clones of hot experts on ranks with few tokens")
    add("--gather-once", action="store_true", help="keep dense parameters gathered for backward")
    add("--keep-experts", action="store_true", help="keep gathered or cast experts for backward")
    add(
        "--blocks-per-unit",
        type=positive_int,
        default=1,
        help="blocks whose parameters are gathered together",
    )
    add("--fp8-gather", action="store_true", help="gather weights of blockwise products as FP8")
    add("--no-overlap", action="store_true", help="nvlink: weight gradients after the exchange")
    add("--send-again", action="store_true", help="nvlink: send rows again instead of keeping them")
    add("--fp8-head", action="store_true", help="the head of the loss by --precision blockwise too")
    add(
        "--fp8-dispatch",
        action="store_true",
        help="tokens travel between ranks and are kept as FP8",
    )
    add("--compile", action="store_true", help="torch.compile around the MoE layers")
    add("--graph-dense", action="store_true", help="CUDA graphs of what is between exchanges")
    add("--expert-loads-every", type=count, default=10, help="steps; load of each expert, 0 = none")
    add("--prompt", type=non_empty, default="def ", help="what the sample continues")
    add("--sample-bytes", type=count, default=200, help="length of the sample; 0 = none")
    add("--layout", help="of pipeline stages, such as 'Et*3|(tt|)*29m|L' (None = even)")
    add(
        "--schedule",
        dest="pipeline_schedule",  # [schedule] is the table of the learning rate
        default="1f1b",
        choices=get_args(ScheduleName),
        help="of pipeline stages",
    )
    add_common(parser, DEGREES)
    parser.set_defaults(run_dir=Path("runs/demo"), batch_size=8, seq_len=256, eval_every=0)
    parser.set_defaults(**{"optimizer.lr": 3e-3})
    return parse(parser, sys.argv[1:] if arguments is None else arguments)


def add_common(parser: argparse.ArgumentParser, degrees: Sequence[str]) -> None:
    """Add what all recipes of text share; each sets its defaults."""
    add = parser.add_argument
    add("--run-dir", type=Path, help="all that a run leaves goes here")
    add("--batch-size", type=positive_int, help="rows per data rank and micro-batch")
    add("--grad-accum", type=positive_int, default=1, help="micro-batches per step")
    add("--seq-len", type=positive_int, help="tokens of a row, and most of a document's piece")
    add("--aux-loss", type=float, help="balance loss coefficient (None = the model's)")
    add("--dtype", choices=DTYPES, help="of compute (None = float32 on CPU, bfloat16 on GPU)")
    add(
        "--precision",
        choices=get_args(PrecisionName),
        help="products in FP8, on Hopper (None = all in --dtype)",
    )
    add("--cuda-graph", action="store_true", help="forward and backward as one CUDA graph")
    add("--seed", type=count, default=0, help="of the order of the data, and of new weights")
    add("--eval-every", type=count, help="steps between losses on held-out data; 0 = none")
    add("--checkpoint-every", type=count, default=100, help="steps; 0 = no checkpoint at all")
    add("--profile", type=count, default=0, help="steps to trace for `moecore report`; 0 = none")
    add(
        "--peak-tflops",
        type=positive,
        help="of one device, for MFU (None = bfloat16 of GPUs that moecore plan knows)",
    )
    add("--ranks", type=positive_int, help="processes (None = one per GPU, 2 on CPU, torchrun's)")
    add("--plain-host", action="store_true", help="no CPUs beside the GPU, no garbage by hand")
    add_degrees(parser, degrees)
    add_records(parser, RECIPE)


def add_degrees(parser: argparse.ArgumentParser, degrees: Sequence[str]) -> None:
    """Add a flag for each parallel degree, with its text of `ParallelConfig`."""
    texts = help_of(ParallelConfig)
    for degree in degrees:
        default = {"ep": "1, 2, 4 or 8, the largest that fits"}.get(degree, "1")
        default = "what is left" if degree in OPEN_DEGREES else default
        text = f"{texts[degree].removesuffix('.')} (None = {default})"
        parser.add_argument(f"--{degree.replace('_', '-')}", type=int, help=text, metavar="N")


def positive_int(text: str, minimum: int = 1) -> int:
    """Read an integer >= a minimum."""
    # 18 digits fit into int64, which seeds and shapes are.
    if not text.isdecimal() or len(text) > 18 or int(text) < minimum:
        raise argparse.ArgumentTypeError(
            f"({text}) must be a whole number >= {minimum} and < 10^18"
        )
    return int(text)


def count(text: str) -> int:
    """Read an integer >= 0."""
    return positive_int(text, minimum=0)


def non_empty(text: str) -> str:
    """Read a text of at least one character."""
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def positive(text: str) -> float:
    """Read a finite number > 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"({text}) must be a number > 0")
    return value


def model_config(args: argparse.Namespace) -> DecoderConfig:
    """Return the preset, with the balance that the arguments ask for."""
    config = preset(args.preset)
    if args.tokens == "text" and config.vocab_size < VOCAB_SIZE:
        raise ValueError(
            f"--preset ({args.preset}) must have vocab_size ({config.vocab_size}) >= {VOCAB_SIZE}, "
            "because tokens are bytes: use tiny, or --tokens random"
        )
    if args.seq_len > config.max_seq_len:
        raise ValueError(
            f"--seq-len ({args.seq_len}) must be <= max_seq_len ({config.max_seq_len}) of "
            f"--preset {args.preset}"
        )
    if args.layers is not None:
        if args.layers > config.num_layers:
            raise ValueError(
                f"--layers ({args.layers}) must be <= num_layers ({config.num_layers}) of "
                f"--preset {args.preset}"
            )
        config = replace(config, num_layers=args.layers)
    moe = moe_of(config)
    if args.aux_loss is not None:
        moe = replace(moe, balance=replace(moe.balance, micro_batch_coef=args.aux_loss))
    if args.quantile or args.bias_per_micro_batch or args.bias_rate is not None:
        moe = _with_bias(moe, args)
    return replace(config, moe=moe)


def moe_of(config: DecoderConfig) -> MoEConfig:
    """Return the config of the MoE layers.

    Raises:
        ValueError: for a dense model.
    """
    if config.moe is None:
        raise ValueError("the model must have MoE layers: choose another --preset or --hf-config")
    return config.moe


def compute_dtype(args: argparse.Namespace, device: torch.device) -> torch.dtype:
    """Return the dtype of activations."""
    return DTYPES[args.dtype or ("bfloat16" if device.type == "cuda" else "float32")]


def loss_scale(args: argparse.Namespace, device: torch.device) -> DynamicLossScale | None:
    """Return the loss scale of fp16, and None for other dtypes."""
    return DynamicLossScale() if compute_dtype(args, device) == torch.float16 else None


def prompt_bytes(args: argparse.Namespace) -> bytes:
    """Return what the sample continues, UTF-8 or not."""
    return bytes(args.prompt.encode(errors="surrogateescape"))


def _with_bias(moe: MoEConfig, args: argparse.Namespace) -> MoEConfig:
    """Return a layer whose expert bias moves; by quantiles all the way by default."""
    rate = args.bias_rate
    if rate is None:
        rate = 1.0 if args.quantile else moe.balance.bias_update_rate
    balance = replace(
        moe.balance,
        bias_update="quantile" if args.quantile else "sign",
        bias_update_rate=rate,
        bias_per_micro_batch=args.bias_per_micro_batch,
    )
    scores = "sigmoid" if args.quantile else moe.score_function
    return replace(moe, expert_bias=True, score_function=scores, balance=balance)


def memory_options(args: argparse.Namespace) -> MemoryOptions:
    """Return what is computed again in backward, and where experts' rows lie until then."""
    parts = tuple(args.recompute)
    if len(parts) > 1 and "gemm_last" in parts:  # stands for more than one part
        parts = (*GEMM_LAST, *(part for part in parts if part != "gemm_last"))
    return MemoryOptions(
        recompute="gemm_last" if parts == ("gemm_last",) else parts,
        offload=tuple(args.offload),
        offload_fraction=args.offload_fraction,
        stash=StashOptions() if args.stash else None,
    )


def pipeline_config(args: argparse.Namespace) -> PipelineConfig | None:
    """Return the stages; None without --pp."""
    if (args.pp or 1) == 1:
        return None
    return PipelineConfig(layout=args.layout, schedule=args.pipeline_schedule)


def nvlink_options(args: argparse.Namespace) -> NVLinkOptions | None:
    """Return the choices of the nvlink dispatcher; None = none is set."""
    if not any((args.row_factor, args.exact_rows, args.no_overlap, args.send_again)):
        return None
    factor = "exact" if args.exact_rows else args.row_factor or NVLinkOptions().row_factor
    return NVLinkOptions(
        overlap_weight_grads=not args.no_overlap,
        row_factor=factor,
        keep_rows=not args.send_again,
        # A degree of -1 is not known yet.
        max_tokens=args.batch_size * args.seq_len // max(1, args.tp or 1) // max(1, args.cp or 1),
    )


def parallel_config(
    args: argparse.Namespace, world_size: int, *, num_experts: int
) -> ParallelConfig:
    """Return the degrees; without --ep the largest power of two up to 8 that fits."""
    values = ((name, getattr(args, name, None)) for name in DEGREES)
    degrees: dict[str, Any] = {name: int(value) for name, value in values if value is not None}
    if "ep" not in degrees:
        product = math.prod(
            max(degrees.get(d, 1), 1) for d in ("pp", "etp", "edp_shard", "edp_replicate")
        )
        fits = [n for n in (1, 2, 4, 8) if world_size % (n * product) == 0]
        degrees["ep"] = max((n for n in fits if num_experts % n == 0), default=1)
    return ParallelConfig(**degrees)
