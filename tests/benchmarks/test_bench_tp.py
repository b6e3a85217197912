import json
from pathlib import Path

import pytest

from tests.benchmarks.forks import run_command

ARGUMENTS = "--layers tiny --seq-lens 64 --batch-sizes 2 --warm-up 1 --steps 1 --rounds 1"


@pytest.mark.slow
@pytest.mark.nightly  # test_bench_fsdp.py starts ranks by the same code
def test_variants_compute_the_same(tmp_path: Path) -> None:
    words = f"-m benchmarks.bench_tp {ARGUMENTS} --results {tmp_path}"
    said = run_command(words, num_ranks=2)
    (file,) = tmp_path.iterdir()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["provider"] for row in rows] == ["in turn", "sliced", "alone"]
    assert [row["chosen"] for row in rows] == [True, False, False]  # slices are small
    for row in rows:
        assert 0 < row["difference"] <= 0.02 and row["times_error"] <= 2
        assert row["exposed_ms"] == row["step_ms"] - rows[2]["step_ms"]
    assert said.count("tiny, tp 2, batch 2 x 64, slices") == 1
