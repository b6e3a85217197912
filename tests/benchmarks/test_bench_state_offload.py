"""The benchmark of optimizer states on the host, on two CPU ranks, as its users start it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
ARGUMENTS = "--preset tiny --seq-len 32 --batch-size 2 --micro-batches 2 --warm-up 1 --timed 2"


@pytest.mark.slow
def test_all_variants_compute_the_same(tmp_path: Path) -> None:
    launcher = "-m torch.distributed.run --standalone --nproc-per-node 2"
    names = ["plain", "away", "host, away"]
    command = f"{launcher} -m benchmarks.bench_state_offload {ARGUMENTS} --gigabytes 1e-4".split()
    command += ["--results", str(tmp_path), "--variants", *names]
    here = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    here |= {"PYTHONPATH": os.pathsep.join([str(REPO / "src"), str(REPO)])}
    done = subprocess.run(
        [sys.executable, *command], env=os.environ | here, cwd=REPO, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.iterdir()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["variant"] for row in rows] == names
    assert done.stdout.count("GiB peak") == len(rows)
    for row in rows:
        assert row["losses"] == rows[0]["losses"]
        assert (row["pinned_gib"] > 0) == ("away" in row["variant"])
        assert 0 < row["moved_fraction"] < 1 or "away" not in row["variant"]
    assert rows[0]["losses"][0] != rows[0]["losses"][-1], "it trains"
