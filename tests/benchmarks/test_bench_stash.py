"""The benchmark of pages runs on a CPU: every way to keep rows computes the same loss."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_ways_to_keep_rows_compute_the_same(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.bench_stash", "--preset", "tiny-qwen3"]
    command += ["--layers", "2", "--experts", "4", "--tokens", "33", "--seq-len", "33"]
    command += ["--row-factor", "1.1", "--results", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    (records,) = tmp_path.glob("*.jsonl")
    rows = [json.loads(line) for line in records.open()]
    assert [row["variant"] for row in rows] == ["room", "pages", "factor", "exact"]
    assert all(row["ms"] > 0 and row["row_factor"] == 1.1 for row in rows)
