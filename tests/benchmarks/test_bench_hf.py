from pathlib import Path

import pytest

from tests.benchmarks.forks import rows_of

pytest.importorskip("transformers", minversion="5")

ARGUMENTS = "--preset tiny-qwen3 --layers 1 --seq-len 32 --batch-size 2 --warm-up 1 --timed 2"


@pytest.mark.slow
@pytest.mark.nightly  # test_bench_fsdp.py starts ranks by the same code
def test_all_variants_compute_the_same(tmp_path: Path) -> None:
    rows, said = rows_of("bench_hf", ARGUMENTS.split(), tmp_path, num_ranks=2)
    assert [row["variant"] for row in rows] == ["transformers", "moecore", "moecore+loss"]
    assert said.count("tokens/s/GPU") == len(rows)
    for row in rows:
        assert row["losses"] == pytest.approx(rows[0]["losses"], abs=1e-4)
        rate = 2 * 32 / row["step_ms"] * 1e3
        assert row["tokens_per_second_per_gpu"] == pytest.approx(rate, rel=1e-4)
    assert rows[0]["losses"][0] != rows[0]["losses"][-1], "it trains"
