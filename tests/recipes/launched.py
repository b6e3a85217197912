"""Ranks of the commands that fork from this process: Note "starts" of helpers/ranks.py.

A start by command is three interpreters that import, ten times the work of a run.
"""

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.multiprocessing as mp

from moecore.recipes.launch import launch
from tests.helpers.ranks import forks, run_ranks

# Other numbers in every run.
MEASURED = (
    *("tokens_per_second", "step_seconds", "goodput"),
    *("memory_rss_gib", "data_wait_share"),
)


@contextmanager
def forked_ranks() -> Iterator[None]:
    """Let `launch` fork ranks, and leave the environment as it was."""
    forks()  # whose server has imported
    with patch.object(torch.multiprocessing, "spawn", _fork), patch.dict(os.environ):
        yield


def launched(run_rank, script, words, said, num_ranks=2) -> tuple[int, str]:
    """Launch ranks with these arguments; return the exit code and what they print to stderr."""
    with forked_ranks():
        code = launch(_said, (run_rank, [script, *words], said), num_ranks)
    return code, said.read_text()


def _said(args: tuple[Callable[[Any], int], list[str], Path]) -> int:
    from moecore.recipes import train

    run_rank, sys.argv, said = args
    with said.open("a") as file, redirect_stderr(file):
        return run_rank(train.parse_arguments())


def _fork(run: Callable[..., None], args: tuple[Any, ...], nprocs: int, join: bool) -> Any:
    environ = dict(os.environ)
    return mp.start_processes(_start, (environ, run, args), nprocs, join, start_method="forkserver")


def _start(rank: int, environ: dict[str, str], run: Callable[..., None], args: Any) -> None:
    os.environ.clear()  # a fork has the server's, which is older
    os.environ.update(environ)
    run(rank, *args)


def run_in_forks(command, words, *, num_ranks=2, code=0, without=()) -> str:
    """Run the ranks of a command, not what starts them; return what rank 0 prints.

    To them the packages `without` are not installed.
    """
    found, said = run_ranks(num_ranks, rank_of_command, command, num_ranks, words, without)
    assert found == code, said
    return said


def rank_of_command(rank, device, command, num_ranks, words, without=()) -> tuple[int, str]:
    """Be a rank of a command; return its exit code and what it prints."""
    sys.modules.update(dict.fromkeys(without))  # type: ignore[arg-type]  # then imports fail
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
    script, said = importlib.import_module(f"moecore.recipes.{command}"), StringIO()
    errors = importlib.import_module("moecore.recipes.errors")
    errors.RANK_0_PRINTS_S = 0  # no rank's end ends the others here
    with redirect_stdout(said), redirect_stderr(said):
        code = script.run_rank(script.parse_arguments(words))
    return code, said.getvalue()


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert all(0 <= line["data_wait_share"] <= 1 for line in lines)
    return [{k: v for k, v in line.items() if k not in MEASURED} for line in lines]
