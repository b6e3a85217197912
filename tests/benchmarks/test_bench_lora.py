from pathlib import Path

import pytest

from tests.benchmarks.forks import rows_of

pytest.importorskip(
    "peft", minversion="0.21", reason="the adapters are peft's, which the extra `test` has"
)

ARGUMENTS = "--preset tiny-qwen3 --layers 1 --seq-len 32 --batch-size 2 --warm-up 1 --timed 2"


@pytest.mark.slow
@pytest.mark.nightly  # test_bench_fsdp.py starts ranks by the same code
def test_adapters_train(tmp_path: Path) -> None:
    words = f"{ARGUMENTS} --rank 4 --lr 0.01".split()
    (row,), said = rows_of("bench_lora", words, tmp_path, num_ranks=2)
    assert said.count("tokens/s/GPU") == 1 and row["losses"][-1] < row["losses"][0] - 0.05
    rate = 2 * 32 / row["step_ms"] * 1e3
    assert row["tokens_per_second_per_gpu"] == pytest.approx(rate, rel=1e-4)
