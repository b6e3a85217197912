"""Ranks of a benchmark's script, forked: a start by command is interpreters that import.

`test_bench_train.py` starts one as its users do.
"""

import importlib
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from tests.helpers.ranks import run_ranks

REPO = Path(__file__).parents[2]


def run(name: str, words: list[str], *, num_ranks: int, code: int = 0) -> str:
    """Run the script on CPU ranks until it ends with `code`; return what rank 0 prints."""
    found, said = run_ranks(num_ranks, rank_of_script, num_ranks, name, words)
    assert found == code, said
    return said


def rows_of(name: str, words: list[str], folder: Path, *, num_ranks: int) -> tuple[list[Any], str]:
    """Return the rows that it records in this empty folder, and what rank 0 prints."""
    said = run(name, [*words, "--results", str(folder)], num_ranks=num_ranks)
    (file,) = folder.glob("*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()], said


def rank_of_script(rank, device, num_ranks, name, words) -> tuple[int, str]:
    """Be a rank of the script, in the group of these ranks."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
    sys.argv = [name, *words]
    said = StringIO()
    with patch.object(dist, "init_process_group"), redirect_stdout(said), redirect_stderr(said):
        code = importlib.import_module(f"benchmarks.{name}").main()
    return code, said.getvalue()


def run_command(words: str, *, num_ranks: int = 0) -> str:
    """Run Python, or torchrun with `num_ranks`, on CPUs as users do; return what it prints."""
    launcher = f"-m torch.distributed.run --standalone --nproc-per-node {num_ranks} "
    command = [sys.executable, *f"{launcher * (num_ranks > 0)}{words}".split()]
    here = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    here |= {"PYTHONPATH": os.pathsep.join([str(REPO / "src"), str(REPO)])}
    done = subprocess.run(command, env=os.environ | here, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
