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

from moecore.base.tables import bounded_line
from moecore.cli.checkpoints import add_checkpoint
from moecore.cli.plans import add_doctor, add_dry_run, add_measure, add_plan, add_report

# Commands that parse their own options, with their help texts.
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
    parser = _Parser(prog="moecore", description="Train Mixture-of-Experts models.")
    rooms = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, text in TRAINING.items():
        rooms.add_parser(name, help=text, add_help=False)
    add_checkpoint(rooms)
    add_plan(rooms)
    add_dry_run(rooms)
    add_measure(rooms)
    add_report(rooms)
    add_doctor(rooms)
    return parser
