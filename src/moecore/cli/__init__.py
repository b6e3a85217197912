"""The command line: training, checkpoints, plans, costs, reports, doctor.

Exit codes: 0 no problem; 1 a problem was found, named in one line on stderr; 2 wrong usage; 130
interrupted.
"""

from __future__ import annotations

import difflib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NoReturn

from moecore.base import __version__, get_install_command
from moecore.base.text import format_error_line

USAGE = """\
usage: moecore [-h] [--version] COMMAND ...

Train Mixture-of-Experts models.
"""
# The commands by group, with their help texts.
GROUPS = {
    "training": {
        "train": "train a decoder of moecore on text, byte by byte",
        "pretrain": "train a decoder on a corpus",
        "finetune": "fine-tune a Hugging Face model on chats, prompts or text",
        "grpo": "train a Hugging Face model by reinforcement learning (GRPO)",
        "recipes": "list, show and copy ready configs",
        "tiny-model": "make a tiny Hugging Face model and chats to try the other commands",
    },
    "trained models": {
        "generate": "continue a prompt with a trained model",
        "evaluate": "measure the loss of a trained model on documents",
        "checkpoint": "inspect, verify, convert and prune checkpoints",
    },
    "plans": {
        "plan": "choose the layout of a training run without its GPUs; print memory and time",
        "dry-run": "print the memory and operations of a rank's step, without GPUs",
        "measure": "what operations take on this machine's GPU, as a table for plans",
    },
    "diagnosis": {
        "report": "where a step's time went on one rank's GPU, and what to try next",
        "doctor": "what is wrong with the machines of a job, one line each",
    },
}
SUBCOMMANDS = {
    "recipes": {
        "list": "print all recipes, a line each",
        "show": "print one recipe",
        "copy": "write one recipe into a directory, to change it there",
    },
    "checkpoint": {
        "inspect": "print what a checkpoint holds",
        "verify": "check that nothing is missing or damaged",
        "convert": "native <-> Hugging Face, Megatron-Core (torch_dist) or plain DCP",
        "prune": "remove old checkpoints of a run",
    },
}
# The commands that parse their own options: they start ranks, which end with code 2 at an error.
TRAINING = ("train", "pretrain", "finetune", "grpo")
# The dataclass of the options of each other command, and the function that runs with it.
CONFIGS = {
    "recipes list": ("recipes.library:ListConfig", "recipes.library:run_list"),
    "recipes show": ("recipes.library:ShowConfig", "recipes.library:run_show"),
    "recipes copy": ("recipes.library:CopyConfig", "recipes.library:run_copy"),
    "tiny-model": ("recipes.tiny_model:TinyModelConfig", "recipes.tiny_model:run_tiny_model"),
    "generate": ("recipes.generate:GenerateConfig", "recipes.generate:run_generate"),
    "evaluate": ("recipes.generate:EvaluateConfig", "recipes.generate:run_evaluate"),
    "checkpoint inspect": ("cli.options:InspectConfig", "io.commands:run_inspect"),
    "checkpoint verify": ("cli.options:VerifyConfig", "io.commands:run_verify"),
    "checkpoint convert": ("cli.options:ConvertConfig", "io.commands:run_convert"),
    "checkpoint prune": ("cli.options:PruneConfig", "io.commands:run_prune"),
    "plan": ("planning.flags:PlanConfig", "planning.commands:run_plan"),
    "dry-run": ("planning.flags:DryRunConfig", "planning.commands:run_dry_run"),
    "measure": ("cli.options:MeasureConfig", "planning.measure:run_measure"),
    "report": ("cli.options:ReportConfig", "planning.commands:run_report"),
    "doctor": ("cli.options:DoctorConfig", "parallel.doctor:run_doctor"),
}
# Errors that are printed in one line, without a traceback.
USER_ERRORS = (ValueError, NotImplementedError, OSError, MemoryError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command of `argv` (None = sys.argv[1:]) and return its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        return _run_command(words)
    except SystemExit as stop:  # --help
        return int(stop.code or 0)
    except KeyboardInterrupt:
        return 130  # as shells have it
    except ModuleNotFoundError as error:
        if error.name not in ("transformers", "tokenizers"):
            raise
        line = f"{error.name} must be installed for this command: {get_install_command('hf')}"
        print(f"moecore: {line}", file=sys.stderr)
        return 1
    except Exception as error:
        code = getattr(error, "exit_code", 1)  # of a `UsageError`
        if code == 1 and not isinstance(error, USER_ERRORS):
            raise
        text = str(error) or type(error).__name__
        if isinstance(error, MemoryError):
            text = f"this machine has too little memory for it ({text})"
        print(f"moecore: {format_error_line(text)}", file=sys.stderr)
        return code


def _run_command(words: Sequence[str]) -> int:
    name, subcommand = [*words[:2], "", ""][:2]
    commands = {name: text for group in GROUPS.values() for name, text in group.items()}
    if name in ("-h", "--help"):
        print(USAGE)
        for group, texts in GROUPS.items():
            print(f"{group}:\n{_list_commands(texts)}\n")
        print("moecore COMMAND --help prints the options of a command.")
        return 0
    if name == "--version":
        print(f"moecore {__version__}")
        return 0
    if name in TRAINING:
        with _exit_at_interrupt():
            run = _import_object(f"recipes.{name}:main")
        return run(words[1:])  # type: ignore[no-any-return]
    if name not in commands:
        _raise_usage_error("COMMAND", name, commands)
    if name not in SUBCOMMANDS:
        return _run_with_options(name, words[1:])
    subcommands = SUBCOMMANDS[name]
    if subcommand in ("-h", "--help"):
        print(f"usage: moecore {name} [-h] COMMAND ...\n\n{_list_commands(subcommands, name)}")
        return 0
    if subcommand not in subcommands:
        _raise_usage_error(f"COMMAND of moecore {name}", subcommand, subcommands)
    return _run_with_options(f"{name} {subcommand}", words[2:])


def _list_commands(texts: dict[str, str], group: str = "") -> str:
    """Return a line for each command in `texts`; `group` is the first word of subcommands."""
    prefix = f"moecore {group} " if group else ""
    return "\n".join(f"  {prefix}{name:<11} {text}" for name, text in texts.items())


def _raise_usage_error(word_kind: str, word: str, choices: dict[str, str]) -> NoReturn:
    """Raise a UsageError for a word that is not a key of `choices`; suggest a close key."""
    close = difflib.get_close_matches(word[:80], choices, n=1)
    hint = f"did you mean {close[0]}?" if close else "see --help"
    raise _import_object("base.command_options:UsageError")(
        f"{word_kind} ({word[:80]!r}) must be one of {', '.join(choices)}: {hint}"
    )


def _run_with_options(name: str, words: Sequence[str]) -> int:
    with _exit_at_interrupt():
        options, run = map(_import_object, CONFIGS[name])
        parse, usage_error = map(
            _import_object, ("recipes.parser:parse", "base.command_options:UsageError")
        )
    try:
        config = parse(options, words, prog=f"moecore {name}")
    except ValueError as error:
        raise usage_error(str(error)) from None
    return run(config)  # type: ignore[no-any-return]


def _import_object(path: str) -> Any:
    """Import and return the object at "module:name" in moecore, which can take seconds."""
    module, _, name = path.partition(":")
    return getattr(import_module(f"moecore.{module}"), name)


@contextmanager
def _exit_at_interrupt() -> Iterator[None]:
    """Return a context in which Ctrl-C ends the process: some imports swallow KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield  # other threads get no signals
        return
    before = signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
