"""The benchmark of pairs on two CPU ranks, as its users start it, and its sums."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest
from benchmarks.bench_pairs import beside

from moecore.planning.report import Kernel

REPO = Path(__file__).parents[2]
ARGUMENTS = (
    "--model tiny-qwen3 --layers 2 --shared-model tiny-shared --shared-layers 2 --seq-len 32 "
    "--micro-batches 3"
)


def kernel(start: float, end: float) -> Kernel:
    return Kernel(name="", start=start, end=end)


def test_the_share_beside_compute() -> None:
    products = [kernel(0, 3), kernel(5, 8)]
    assert beside([kernel(2, 6)], products) == 0.5
    assert beside([kernel(3, 5)], products) == 0
    assert beside([kernel(0, 1), kernel(6, 7)], products) == 1
    assert beside([], products) == 0


@pytest.mark.slow
def test_variants_compute_the_same(tmp_path: Path) -> None:
    launcher = "-m torch.distributed.run --standalone --nproc-per-node 2"
    command = f"{launcher} -m benchmarks.bench_pairs {ARGUMENTS}"
    here = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    here |= {"PYTHONPATH": os.pathsep.join([str(REPO / "src"), str(REPO)])}
    done = subprocess.run(
        [sys.executable, *command.split(), "--results", str(tmp_path)],
        env=os.environ | here,
        cwd=REPO,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.iterdir()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    runs = {
        key: list(those) for key, those in groupby(rows, lambda r: (r["model"], r["batch_size"]))
    }
    two = ["in turn", "pairs"]
    assert {key: [row["provider"] for row in those] for key, those in runs.items()} == {
        ("tiny-qwen3", 1): two,
        ("tiny-qwen3", 2): two,
        ("tiny-shared", 2): ["in turn", "shared apart"],
    }
    for those in runs.values():
        assert len({row["loss"] for row in those}) == 1
    assert done.stdout.count("tiny-qwen3, alltoall, batch") == 2
