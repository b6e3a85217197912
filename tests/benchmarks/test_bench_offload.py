"""The benchmark of offloading on a CPU, as its users start it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
ARGUMENTS = "--preset tiny-deepseek-v3 --layers 3 --seq-len 32 --batch-size 2 --device cpu"


@pytest.mark.slow
def test_each_fraction_moves_its_share(tmp_path: Path) -> None:
    options = f"{ARGUMENTS} --min-bytes 256 --fractions 0 0.5 1 --ops step --results {tmp_path}"
    command = [sys.executable, "-m", "benchmarks.bench_offload", *options.split()]
    here = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    here |= {"PYTHONPATH": os.pathsep.join([str(REPO / "src"), str(REPO)])}
    done = subprocess.run(command, env=os.environ | here, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.iterdir()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    variants = ["none", "0.0", "0.5", "1.0"]
    assert [(row["op"], row["variant"]) for row in rows] == [("offload_step", v) for v in variants]
    assert done.stdout.count(" ms (") == len(rows)
    none, zero, half, whole = rows
    assert none["out_bytes"] == zero["out_bytes"] == 0 and none["ratio"] == 1
    assert 0 < 2 * half["out_bytes"] <= whole["out_bytes"] < whole["kept_bytes"]
    assert half["late_bytes"] == whole["late_bytes"] == 0
    assert whole["back_bytes"] == whole["out_bytes"]
