"""The command line: training, checkpoints, plans, costs, reports, doctor.

Exit codes: 0 no problem; 1 a problem was found, named in one line on stderr; 2 wrong usage; 130
interrupted.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, get_args

from moecore.base.options.names import (
    GpuName,
    MomentDtype,
    PlannedDispatcher,
    PrecisionName,
    PresetName,
    ScheduleName,
    Strategy,
)
from moecore.base.tables import UNITS, bounded_line

DESCRIPTION = """\
Work with checkpoints. A path is a step directory (runs/a/step-000100), a run (runs/a; its latest
checkpoint is meant), a Hugging Face directory (with config.json and safetensors) or one of
torch.distributed.checkpoint, plain or of Megatron-Core (with .metadata)."""

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

# Commands with options of their own, and what they do.
TRAINING = {
    "train": "train a decoder of moecore on text, byte by byte",
    "pretrain": "train a decoder on a corpus",
    "finetune": "fine-tune a Hugging Face model on chats, prompts or text",
    "grpo": "train a tiny model by reinforcement learning",
    "generate": "continue a prompt with a trained model",
    "evaluate": "measure the loss of a trained model on documents",
    "recipes": "list, show and copy configs that are ready",
    "tiny-model": "make a tiny Hugging Face model and chats to try the other commands",
}
# Where those are whose module has another name.
MODULES = {"evaluate": "generate:evaluate", "recipes": "library", "tiny-model": "tiny_model"}
TARGETS = ("hf", "megatron", "dcp", "dcp-transformers", "native")
MAX_ERROR_LENGTH = 400  # characters of a usage error
USER_ERRORS = (
    ValueError,
    NotImplementedError,
    OSError,
    MemoryError,
)  # in one line, without a traceback


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; without arguments those of the process."""
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        if words and words[0] in TRAINING:
            with _interrupts_end_the_process():
                run = _training_command(words[0])
            return run(words[1:])
        args = _parser().parse_args(words)
        room, _, command = args.run.partition(":")  # what a command needs takes long to import
        with _interrupts_end_the_process():
            run = getattr(import_module(f"moecore.{room}"), command)
        result: int = run(args)
        return result
    except SystemExit as stop:  # --help, or an error that argparse has printed
        return int(stop.code or 0)
    except KeyboardInterrupt:
        return 130  # as shells have it
    except Exception as error:
        code = getattr(error, "exit_code", 1)  # of a `UsageError`
        if code == 1 and not isinstance(error, USER_ERRORS):
            raise
        text = str(error) or type(error).__name__
        if isinstance(error, MemoryError):
            text = f"this machine has too little memory for it ({text})"
        print(f"moecore: {bounded_line(text)}", file=sys.stderr)
        return code


def _training_command(name: str) -> Callable[[Sequence[str]], int]:
    """Return the function of a command of `TRAINING`."""
    module, _, function = MODULES.get(name, name).partition(":")
    command: Callable[[Sequence[str]], int]
    command = getattr(import_module(f"moecore.recipes.{module}"), function or "main")
    return command


@contextmanager
def _interrupts_end_the_process() -> Iterator[None]:
    """Within, Ctrl-C ends the process: packages swallow exceptions of what they import."""
    if threading.current_thread() is not threading.main_thread():
        yield  # other threads get no signals
        return
    before = signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors show the beginning of what was typed, in place of all of it."""

    def error(self, message: str) -> NoReturn:
        super().error(
            message if len(message) <= MAX_ERROR_LENGTH else f"{message[:MAX_ERROR_LENGTH]}..."
        )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="moecore", description="Train Mixture-of-Experts models.")
    rooms = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, text in TRAINING.items():
        rooms.add_parser(name, help=text, add_help=False)
    checkpoint = rooms.add_parser(
        "checkpoint",
        help="inspect, verify, convert and prune checkpoints",
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
    add_plan(rooms)
    add_dry_run(rooms)
    add_measure(rooms)
    add_report(rooms)
    add_doctor(rooms)
    return parser


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


DENSE, EXPERT = ("pp", "dp_replicate", "dp_shard", "cp", "tp"), ("edp_replicate", "edp_shard")
DEGREES: tuple[str, ...] = (*DENSE, *EXPERT, "ep", "etp")  # as `ParallelConfig` has them


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `run_of_options`."""
    add = parser.add_argument
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--preset", choices=get_args(PresetName), help="the model")
    help = "its Hugging Face config.json, or the directory: of any family that moecore trains"
    model.add_argument("--config", type=Path, help=help)
    add("--gpus", type=int, required=True, help="ranks of the world")
    gpu = parser.add_mutually_exclusive_group()
    gpu.add_argument("--gpu", default="h100-80", choices=get_args(GpuName), help="their kind")
    help = "their kind as TOML: fields of moecore.planning.Gpu, and like = a name to take others of"
    gpu.add_argument("--gpu-spec", type=Path, metavar="FILE", help=help)
    add("--seq-len", type=int, default=4096, help="tokens of a row")
    help = "rows of a data rank's micro-batch; with degrees; default: 1"
    add("--batch-size", type=int, help=help)
    add("--micro-batches", type=int, help="of a step, on a data rank; with degrees; default: 1")
    for name in DEGREES:
        add(f"--{name.replace('_', '-')}", type=int, help="degree; default: search")
    add("--layout", help='pipeline stages, such as "Et*3|(tt|)*29m|L"')
    add("--chunks", type=int, help="pipeline stages of a rank; not with --layout")
    add("--schedule", choices=get_args(ScheduleName), help="of pipeline stages; default: 1f1b")
    strategies = get_args(Strategy)
    help = "ZeRO of blocks; with degrees; default: optim_grads_params"
    add("--dense-strategy", choices=strategies, help=help)
    add("--fp8-param-gather", action="store_true", help="gather weights of blockwise FP8 as FP8")
    help = "how tokens travel between NVLink domains; with degrees; default: auto, in one level"
    add("--dispatcher", choices=get_args(PlannedDispatcher), help=help)
    add("--fp8-dispatch", action="store_true", help="tokens travel as FP8; with degrees")
    add("--experts-strategy", choices=strategies, help="of experts; default: as blocks")
    precisions = (*get_args(PrecisionName), "bf16")
    add("--precision", choices=precisions, help="default: bf16, or in a search as needed")
    add("--recompute", nargs="+", default=(), help="parts, as of MemoryOptions")
    add("--offload", nargs="+", default=(), help="parts, likewise")
    add("--moments", default="float32", choices=get_args(MomentDtype), help="dtype of AdamW's")
    add("--stash", action="store_true", help="experts' rows in pages, with dispatcher nvlink")
    help = "capacity of dispatcher nvlink over even loads; default: 2.0 within nodes"
    add("--row-factor", type=float, help=help)
    add("--master-remainder", action="store_true", help="bf16 weights, see moecore.train.AdamW")
    add("--state-offload", type=float, default=0.0, help="fraction of AdamW's state in host memory")


PLAN_EXAMPLE = """\
examples:
  moecore plan --preset deepseek-v3 --gpus 256 --gpu h100-80
  moecore plan --preset deepseek-v3 --gpus 256 --gpu h100-80 --explain pp=8,ep=8
  moecore plan --preset deepseek-v3 --gpus 256 --gpu h100-80 --pp 8 --tp 2 --ep 32 \\
    --schedule interleaved --chunks 4 --micro-batches 128 --dense-strategy optim \\
    --precision blockwise --fp8-param-gather --moments bfloat16 --recompute gemm_last \\
    --offload attention experts mlp"""


def add_plan(rooms: Any) -> None:
    """Add the command to those of `moecore`."""
    parser = rooms.add_parser(
        "plan",
        help="which training run fits a cluster that is not there, and what its ranks hold",
        description="Without degrees: foldings that fit, best first. With degrees: bytes by kind "
        "for each pipeline rank and the most at once, from the plan and the step that the run has.",
        epilog=PLAN_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run="planning.commands:run_plan")
    add_run_options(parser)
    add = parser.add_argument
    add("--global-batch", type=int, help="rows of a step; without degrees; default: 8 per GPU")
    add("--gpus-per-node", type=int, help="within NVLink; without degrees; default: the GPU's")
    add("--top", type=int, help="foldings to print, of four times as many plans; default: 3")
    add("--explain", metavar="PP=8,EP=8", help="why this folding is refused, or what it needs")
    add("--call", action="store_true", help="print the Python of the run, or of the best one")
    help = "write the TOML of the run, or of the best one, for moecore pretrain"
    add("--write", type=Path, metavar="FILE", help=help)
    add("--png", type=Path, metavar="FILE", help="write bars of its memory")
    add("--timeline", type=Path, metavar="FILE", help="write a PNG of its pipeline's step")
    add("--html", type=Path, metavar="FILE", help="write a page of its memory, time and stages")
    add("--table", type=Path, metavar="FILE", help="costs that `moecore measure` has written")
    help = "share of exchanges between nodes that overlapped stages hide; default: 0.93"
    add("--pairs-hide", type=float, help=help)
    add("--json", action="store_true", help="print one JSON object")


DRY_RUN_EXAMPLE = """\
example:
  moecore dry-run --rank 37 --preset deepseek-v3 --gpus 2048 --pp 16 --ep 64 \\
    --schedule 1f1b --micro-batches 4 --precision blockwise --recompute moe"""


def add_dry_run(rooms: Any) -> None:
    """Add the command to those of `moecore`."""
    parser = rooms.add_parser(
        "dry-run",
        help="what one rank of a world that is not there holds and does in a step",
        description="Runs the host's code of a training step of one rank, without its GPU and "
        "without the other ranks. Loads are balanced. Other ranks answer at once.",
        epilog=DRY_RUN_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run="planning.commands:run_dry_run")
    parser.add_argument("--rank", type=int, default=0, help="of the world")
    add_run_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_measure(rooms: Any) -> None:
    """Add the command to those of `moecore`."""
    parser = rooms.add_parser(
        "measure",
        help="what operations take on this machine's GPU, as a table for plans",
        description="Times products, attention, copies and kernels of rows on this GPU, under "
        "torchrun collectives too, and writes them as a table of costs.",
    )
    parser.set_defaults(run="planning.measure:run_measure")
    parser.add_argument("--out", type=Path, default=Path("table.json"), help="what to write")


DOCTOR_EXAMPLE = """\
example, on every host of a job as it will train:
  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
      -m moecore doctor --checkpoints /shared/runs"""


def add_doctor(rooms: Any) -> None:
    """Add the command to those of `moecore`."""
    parser = rooms.add_parser(
        "doctor",
        help="what is wrong with the machines of a job, one line each",
        description="Compares versions, environment and clocks of all ranks; looks at limits, "
        "memory, disks and peer access of their hosts; and measures their links.",
        epilog=DOCTOR_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run="parallel.doctor:run_doctor")
    help = "directory that all ranks write, which is tried; default: none"
    parser.add_argument("--checkpoints", type=Path, help=help)
    help = "seconds that ranks wait for each other; default: 60"
    parser.add_argument("--timeout", type=int, default=60, help=help)


REPORT_EXAMPLE = """\
example, for a trace of rank 0 that prof.export_chrome_trace("trace.json.gz") has written:
  moecore report trace.json.gz --steps 3"""


def add_report(rooms: Any) -> None:
    """Add the command to those of `moecore`."""
    parser = rooms.add_parser(
        "report",
        help="where a step's time went on one rank's GPU, and what to try next",
        description="Reads a Chrome trace of torch.profiler: what bounds the step, which "
        "communication nothing hides, why the GPU is idle, and the options that may win most.",
        epilog=REPORT_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run="planning.commands:run_report")
    parser.add_argument("trace", type=Path, help=".json or .json.gz, of one rank")
    parser.add_argument(
        "--steps", type=int, help="that it holds; default: as profile.step() has marked, else 1"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
