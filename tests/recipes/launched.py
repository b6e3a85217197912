"""`launch` of the scripts in this process, whose ranks fork: Note "starts" of helpers/ranks.py.

A start of moecore train by command is three interpreters that import; test_train.py kills one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.multiprocessing as mp

from moecore.recipes.launch import launch
from tests.helpers.ranks import forks


@contextmanager
def forked_ranks() -> Iterator[None]:
    """Let `launch` fork ranks, and leave the environment as it was."""
    forks()  # whose server has imported
    with patch.object(torch.multiprocessing, "spawn", _fork), patch.dict(os.environ):
        yield


def launched(
    run_rank: Callable[[Any], int], script: str, words: list[str], said: Path
) -> tuple[int, str]:
    """Launch two ranks with these arguments; return the exit code and what they print to stderr."""
    with forked_ranks():
        code = launch(_said, (run_rank, [script, *words], said), 2)
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
