"""The benchmark of memory options runs on a CPU, and its options compute the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_options_compute_the_same(tmp_path: Path) -> None:
    options = ["nothing", "gemm_last", "gemm_last+up"]
    command = [sys.executable, "-m", "benchmarks.bench_memory", "--preset", "tiny-deepseek-v3"]
    command += ["--seq-len", "32", "--rounds", "1", "--results", str(tmp_path), "--options"]
    subprocess.run(command + options, cwd=ROOT, check=True, timeout=300)
    (records,) = tmp_path.glob("*.jsonl")
    rows = [json.loads(line) for line in records.open()]
    assert [row["variant"] for row in rows] == options
    assert len({(row["loss"], row["grad_norm"]) for row in rows}) == 1
