from pathlib import Path

from tests.benchmarks.forks import rows_of


def test_options_compute_the_same(tmp_path: Path) -> None:
    options = ["nothing", "gemm_last", "gemm_last+up"]
    words = ["--preset", "tiny-deepseek-v3", "--seq-len", "32", "--rounds", "1", "--options"]
    rows, _ = rows_of("bench_memory", [*words, *options], tmp_path, num_ranks=1)
    assert [row["variant"] for row in rows] == options
    assert len({(row["loss"], row["grad_norm"]) for row in rows}) == 1
