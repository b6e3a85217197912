from pathlib import Path

from tests.benchmarks.forks import rows_of


def test_ways_to_keep_rows_compute_the_same(tmp_path: Path) -> None:
    sizes = "--layers 2 --experts 4 --tokens 33 --seq-len 33 --row-factor 1.1"
    words = f"--preset tiny-qwen3 {sizes}".split()
    rows, _ = rows_of("bench_stash", words, tmp_path, num_ranks=1)
    assert [row["variant"] for row in rows] == ["room", "pages", "factor", "exact"]
    assert all(row["ms"] > 0 and row["row_factor"] == 1.1 for row in rows)
