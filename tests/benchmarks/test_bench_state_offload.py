from pathlib import Path

import pytest

from tests.benchmarks.forks import rows_of

ARGUMENTS = "--preset tiny --seq-len 32 --batch-size 2 --micro-batches 2 --warm-up 1 --timed 2"


@pytest.mark.nightly  # test_bench_fsdp.py starts ranks by the same code
@pytest.mark.slow
def test_all_variants_compute_the_same(tmp_path: Path) -> None:
    names = ["plain", "away", "host, away"]
    words = [*f"{ARGUMENTS} --gigabytes 1e-4 --variants".split(), *names]
    rows, said = rows_of("bench_state_offload", words, tmp_path, num_ranks=2)
    assert [row["variant"] for row in rows] == names and said.count("GiB peak") == len(rows)
    for row in rows:
        assert row["losses"] == rows[0]["losses"]
        assert (row["pinned_gib"] > 0) == ("away" in row["variant"])
        assert 0 < row["moved_fraction"] < 1 or "away" not in row["variant"]
    assert rows[0]["losses"][0] != rows[0]["losses"][-1], "it trains"
