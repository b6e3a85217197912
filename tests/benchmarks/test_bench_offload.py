from pathlib import Path

import pytest

from tests.benchmarks.forks import rows_of

ARGUMENTS = "--preset tiny-deepseek-v3 --layers 3 --seq-len 32 --batch-size 2 --device cpu"


@pytest.mark.slow
@pytest.mark.nightly  # as most scripts of benchmarks
def test_each_fraction_moves_its_share(tmp_path: Path) -> None:
    words = f"{ARGUMENTS} --min-bytes 256 --fractions 0 0.5 1 --ops step".split()
    rows, said = rows_of("bench_offload", words, tmp_path, num_ranks=1)
    variants = ["none", "0.0", "0.5", "1.0"]
    assert [(row["op"], row["variant"]) for row in rows] == [("offload_step", v) for v in variants]
    assert said.count(" ms (") == len(rows)
    none, zero, half, whole = rows
    assert none["out_bytes"] == zero["out_bytes"] == 0 and none["ratio"] == 1
    assert 0 < 2 * half["out_bytes"] <= whole["out_bytes"] < whole["kept_bytes"]
    assert half["late_bytes"] == whole["late_bytes"] == 0
    assert whole["back_bytes"] == whole["out_bytes"]
