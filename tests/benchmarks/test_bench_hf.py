"""The benchmark of a transformers model on two CPU ranks, as its users start it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", minversion="5")

REPO = Path(__file__).parents[2]
ARGUMENTS = "--preset tiny-qwen3 --layers 1 --seq-len 32 --batch-size 2 --warm-up 1 --timed 2"


@pytest.mark.slow
def test_all_variants_compute_the_same(tmp_path: Path) -> None:
    launcher = "-m torch.distributed.run --standalone --nproc-per-node 2"
    command = f"{launcher} -m benchmarks.bench_hf {ARGUMENTS} --results {tmp_path}".split()
    here = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    here |= {"PYTHONPATH": os.pathsep.join([str(REPO / "src"), str(REPO)])}
    done = subprocess.run(
        [sys.executable, *command], env=os.environ | here, cwd=REPO, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.iterdir()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["variant"] for row in rows] == ["transformers", "moecore", "moecore+loss"]
    assert done.stdout.count("tokens/s/GPU") == len(rows)
    for row in rows:
        assert row["losses"] == pytest.approx(rows[0]["losses"], abs=1e-4)
        rate = 2 * 32 / row["step_ms"] * 1e3
        assert row["tokens_per_second_per_gpu"] == pytest.approx(rate, rel=1e-4)
    assert rows[0]["losses"][0] != rows[0]["losses"][-1], "it trains"
