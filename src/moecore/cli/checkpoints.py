"""The options of `moecore checkpoint`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from moecore.base.tables import UNITS

DESCRIPTION = """\
Work with checkpoints. A path is a step directory (runs/a/checkpoints/step-000100), a run (runs/a
or runs/a/checkpoints; its latest checkpoint is meant), a Hugging Face directory (with config.json
and safetensors) or one of torch.distributed.checkpoint, plain or of Megatron-Core (with
.metadata)."""


EXAMPLES = """\
examples:
  moecore checkpoint inspect runs/a                       what is in it
  moecore checkpoint inspect hf/Mixtral-8x7B --json       the same for programs
  moecore checkpoint verify runs/a/step-000100            hash every byte
  moecore checkpoint convert hf/Qwen3-30B-A3B runs/start  Hugging Face -> native, as step 0
  moecore checkpoint convert runs/a hf/mine --config hf/Qwen3-30B-A3B --dtype bfloat16
  moecore checkpoint convert megatron/iter_0001000 runs/start --config hf/Qwen3-30B-A3B
  moecore checkpoint convert runs/a megatron/release --to megatron --config hf/Qwen3-30B-A3B
  moecore checkpoint prune runs/a --keep 3 --dry-run      which would be removed

exit codes: 0 all is well, 1 a problem was found, 2 wrong usage"""


TARGETS = ("hf", "megatron", "dcp", "dcp-transformers", "native")


def add_checkpoint(rooms: Any) -> None:
    """Add the command to those of `moecore`."""
    checkpoint = rooms.add_parser(
        "checkpoint",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = checkpoint.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_readers(commands)
    _add_convert(commands)
    remove = _command(commands, "prune", "io.commands:run_prune", "remove old checkpoints of a run")
    remove.add_argument("path", type=Path, help="the run")
    remove.add_argument("--keep", type=int, required=True, help="how many of the newest stay, >= 1")
    remove.add_argument("--dry-run", action="store_true", help="only print which would go")


def _add_readers(commands: Any) -> None:
    inspect = _command(
        commands, "inspect", "io.commands:run_inspect", "print what a checkpoint holds"
    )
    inspect.add_argument("--json", action="store_true", help="print one JSON object, all tensors")
    inspect.add_argument("--tensors", action="store_true", help="list every tensor")

    verify = _command(
        commands,
        "verify",
        "io.commands:run_verify",
        "check that nothing is missing or damaged",
        "Native: the SHA-256 of every file and of the manifest. Hugging Face: headers, sizes, the "
        "index, missing layers, experts and scales; that format has no digests, so damage inside a "
        "tensor is not seen.",
    )
    for reader in (inspect, verify):
        reader.add_argument(
            "path", type=Path, help="step directory, run, Hugging Face or DCP directory"
        )
    verify.add_argument(
        "--sizes", action="store_true", help="native: sizes and headers only, no hashing"
    )


def _add_convert(commands: Any) -> None:
    convert = _command(
        commands,
        "convert",
        "io.commands:run_convert",
        "native <-> Hugging Face, Megatron-Core (torch_dist) or plain DCP",
        "One process, file to file, one tensor at a time: it needs memory for the largest tensor "
        "only. From a native checkpoint to Hugging Face unless --to names another format; from all "
        "others to a native one. Optimizer state is not converted.",
    )
    convert.add_argument("source", type=Path, help="what to read")
    convert.add_argument("target", type=Path, help="new directory; for native, a new run")
    convert.add_argument(
        "--config",
        type=Path,
        help="not from Hugging Face: the model's config.json, or its directory",
    )
    convert.add_argument(
        "--to",
        choices=TARGETS,
        help="from native: hf (default), megatron (torch_dist), dcp (names of moecore's decoder), "
        "dcp-transformers (names of transformers)",
    )
    convert.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of all float tensors; default: as stored",
    )
    convert.add_argument(
        "--layout",
        choices=("per_expert", "fused"),
        help="to Hugging Face: a tensor per expert, as published (default), or one for all",
    )
    convert.add_argument("--step", type=_step, help="to native: step (default 0)")
    convert.add_argument(
        "--max-shard-size",
        type=_size,
        metavar="SIZE",
        help="to native and Hugging Face: of a file (default 5GB)",
    )


def _command(
    commands: Any, name: str, run: str, text: str, epilog: str = ""
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}. {epilog}".strip()
    )
    parser.set_defaults(run=run)
    return parser


def _step(text: str) -> int:
    from moecore.base.fields import check_value
    from moecore.io.checkpoint.directory import Step

    try:
        step = int(text)
        check_value("step", step, Step)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a whole number >= 0 and < 10**18"
        ) from None
    return step


def _size(text: str) -> int:
    """Return bytes, from a number with KB, MB, GB or TB, or without."""
    unit = text[-2:].upper()
    number = text[:-2] if unit in UNITS else text
    try:
        size = int(float(number) * UNITS.get(unit, 1))
    except (ValueError, OverflowError):
        size = 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a size >= 1 such as 5GB or 500MB")
    return size
