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
from typing import NoReturn

from moecore.base import __version__
from moecore.base.tables import format_error_line
from moecore.cli.checkpoints import add_checkpoint
from moecore.cli.plans import add_doctor, add_dry_run, add_measure, add_plan, add_report

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
        args = _parser().parse_args(words)
        room, _, command = args.run.partition(":")  # imports of a command take seconds
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
        print(f"moecore: {format_error_line(text)}", file=sys.stderr)
        return code


def _training_command(name: str) -> Callable[[Sequence[str]], int]:
    """Return the function of a command of `TRAINING`."""
    module, _, function = MODULES.get(name, name).partition(":")
    command: Callable[[Sequence[str]], int]
    command = getattr(import_module(f"moecore.recipes.{module}"), function or "main")
    return command


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
    for name in TRAINING:
        rooms.add_parser(name, add_help=False)
    add_checkpoint(rooms)
    add_plan(rooms)
    add_dry_run(rooms)
    add_measure(rooms)
    add_report(rooms)
    add_doctor(rooms)
    return parser


def _commands_text() -> str:
    """Return the commands in groups, one a line."""
    lines = []
    for group, commands in GROUPS.items():
        lines += [f"{group}:", *(f"  {name:<11} {text}" for name, text in commands.items()), ""]
    return "\n".join([*lines, "moecore COMMAND --help prints the options of a command."])
