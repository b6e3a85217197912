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
from typing import Any, NoReturn

from moecore.base import __version__
from moecore.base.tables import format_error_line
from moecore.cli.checkpoints import add_checkpoint

# The commands by group, with their help texts.
GROUPS = {
    "training": {
        "train": "train a decoder of moecore on text, byte by byte",
        "pretrain": "train a decoder on a corpus",
        "finetune": "fine-tune a Hugging Face model on chats, prompts or text",
        "grpo": "train a Hugging Face model by reinforcement learning (GRPO)",
        "recipes": "list, show and copy configs that are ready",
        "tiny-model": "make a tiny Hugging Face model and chats to try the other commands",
    },
    "trained models": {
        "generate": "continue a prompt with a trained model",
        "evaluate": "measure the loss of a trained model on documents",
        "checkpoint": "inspect, verify, convert and prune checkpoints",
    },
    "plans": {
        "plan": "which training run fits a cluster that is not there, and what its ranks hold",
        "dry-run": "what one rank of a world that is not there holds and does in a step",
        "measure": "what operations take on this machine's GPU, as a table for plans",
    },
    "diagnosis": {
        "report": "where a step's time went on one rank's GPU, and what to try next",
        "doctor": "what is wrong with the machines of a job, one line each",
    },
}
# The commands that parse their own options.
TRAINING = (*GROUPS["training"], "generate", "evaluate")
# Where those are whose module has another name.
MODULES = {"evaluate": "generate:evaluate", "recipes": "library", "tiny-model": "tiny_model"}
# The commands with a dataclass of options: the dataclass, and the function that runs with it.
CONFIGS = {
    "plan": ("planning.flags:PlanConfig", "planning.commands:run_plan"),
    "dry-run": ("planning.flags:DryRunConfig", "planning.commands:run_dry_run"),
    "measure": ("cli.plans:MeasureConfig", "planning.measure:run_measure"),
    "report": ("cli.plans:ReportConfig", "planning.commands:run_report"),
    "doctor": ("cli.plans:DoctorConfig", "parallel.doctor:run_doctor"),
}
MAX_ERROR_LENGTH = 400  # characters of a usage error
USER_ERRORS = (
    ValueError,
    NotImplementedError,
    OSError,
    MemoryError,
)  # in one line, without a traceback


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; argv None = sys.argv[1:]."""
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        if words and words[0] in TRAINING:
            with _interrupts_end_the_process():
                run = _training_command(words[0])
            return run(words[1:])
        if words and words[0] in CONFIGS:
            return _run_with_options(words[0], words[1:])
        args = _parser().parse_args(words)
        with _interrupts_end_the_process():
            run = _import(args.run)
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
        print(f"moecore: {format_error_line(text)}", file=sys.stderr)
        return code


def _training_command(name: str) -> Callable[[Sequence[str]], int]:
    """Return the function of a command of `TRAINING`."""
    module, _, function = MODULES.get(name, name).partition(":")
    command: Callable[[Sequence[str]], int]
    command = getattr(import_module(f"moecore.recipes.{module}"), function or "main")
    return command


def _run_with_options(name: str, words: Sequence[str]) -> int:
    """Run a command of `CONFIGS` and return its exit code."""
    with _interrupts_end_the_process():
        options, run = map(_import, CONFIGS[name])
        parse, usage_error = map(_import, ("recipes.parser:parse", "base.fields:UsageError"))
    try:
        config = parse(options, words, prog=f"moecore {name}")
    except ValueError as error:
        raise usage_error(str(error)) from None
    result: int = run(config)
    return result


def _import(path: str) -> Any:
    """Return a name of a module of moecore; imports of a command take seconds."""
    module, _, name = path.partition(":")
    return getattr(import_module(f"moecore.{module}"), name)


@contextmanager
def _interrupts_end_the_process() -> Iterator[None]:
    """Context in which Ctrl-C exits at once: some packages swallow exceptions of imports."""
    if threading.current_thread() is not threading.main_thread():
        yield  # other threads get no signals
        return
    before = signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _Parser(argparse.ArgumentParser):
    """A parser that shortens long error messages."""

    def error(self, message: str) -> NoReturn:
        super().error(
            message if len(message) <= MAX_ERROR_LENGTH else f"{message[:MAX_ERROR_LENGTH]}..."
        )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="moecore",
        usage="moecore [-h] [--version] COMMAND ...",
        description="Train Mixture-of-Experts models.",
        epilog=_commands_text(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"moecore {__version__}")
    rooms = parser.add_subparsers(
        prog="moecore", required=True, metavar="COMMAND", help=argparse.SUPPRESS
    )
    for name in (*TRAINING, *CONFIGS):
        rooms.add_parser(name, add_help=False)
    add_checkpoint(rooms)
    return parser


def _commands_text() -> str:
    """Return the commands in groups, one a line."""
    lines = []
    for group, commands in GROUPS.items():
        lines += [f"{group}:", *(f"  {name:<11} {text}" for name, text in commands.items()), ""]
    return "\n".join([*lines, "moecore COMMAND --help prints the options of a command."])
