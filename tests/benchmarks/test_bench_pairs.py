from itertools import groupby
from pathlib import Path

import pytest
from benchmarks.bench_pairs import compute_overlap

from moecore.planning.report import Kernel
from tests.benchmarks.forks import rows_of

ARGUMENTS = (
    "--model tiny-qwen3 --layers 2 --shared-model tiny-shared --shared-layers 2 --seq-len 32 "
    "--micro-batches 3"
)


def kernel(start: float, end: float) -> Kernel:
    return Kernel(name="", start=start, end=end)


def test_the_share_beside_compute() -> None:
    products = [kernel(0, 3), kernel(5, 8)]
    assert compute_overlap([kernel(2, 6)], products) == 0.5
    assert compute_overlap([kernel(3, 5)], products) == 0
    assert compute_overlap([kernel(0, 1), kernel(6, 7)], products) == 1
    assert compute_overlap([], products) == 0


@pytest.mark.slow
@pytest.mark.nightly  # test_bench_fsdp.py starts ranks by the same code
def test_variants_compute_the_same(tmp_path: Path) -> None:
    rows, said = rows_of("bench_pairs", ARGUMENTS.split(), tmp_path, num_ranks=2)
    runs = {
        key: list(those) for key, those in groupby(rows, lambda r: (r["model"], r["batch_size"]))
    }
    two = ["in turn", "pairs"]
    assert {key: [row["provider"] for row in those] for key, those in runs.items()} == {
        ("tiny-qwen3", 1): two,
        ("tiny-qwen3", 2): two,
        ("tiny-shared", 2): ["in turn", "shared apart"],
    }
    for those in runs.values():
        assert len({row["loss"] for row in those}) == 1
    assert said.count("tiny-qwen3, alltoall, batch") == 2
