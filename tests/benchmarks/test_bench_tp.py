"""The benchmark of exchanges over tp on two CPU ranks, as its users start it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
ARGUMENTS = "--layers tiny --seq-lens 64 --batch-sizes 2 --warm-up 1 --steps 1 --rounds 1"


@pytest.mark.slow
@pytest.mark.nightly  # test_bench_fsdp.py starts ranks by the same code
def test_variants_compute_the_same(tmp_path: Path) -> None:
    launcher = "-m torch.distributed.run --standalone --nproc-per-node 2"
    command = f"{launcher} -m benchmarks.bench_tp {ARGUMENTS}"
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
    assert [row["provider"] for row in rows] == ["in turn", "sliced", "alone"]
    assert [row["chosen"] for row in rows] == [True, False, False]  # slices are small
    for row in rows:
        assert 0 < row["difference"] <= 0.02 and row["times_error"] <= 2
        assert row["exposed_ms"] == row["step_ms"] - rows[2]["step_ms"]
    assert done.stdout.count("tiny, tp 2, batch 2 x 64, slices") == 1
