from pathlib import Path

import pytest
from benchmarks.bench_fsdp import find_longest_launches

from tests.benchmarks.forks import rows_of, run

ARGUMENTS = "--seq-len 32 --batch-sizes 1 2 --warm-up 1 --steps 2 --rounds 2 --lr 0.02"


@pytest.mark.slow
@pytest.mark.nightly  # test_against_fsdp2.py has the bits of both
@pytest.mark.parametrize("model", ["tiny-dense", "tiny-qwen3 --ep 2"])
def test_variants_compute_the_same(model: str, tmp_path: Path) -> None:
    words = f"--model {model} {ARGUMENTS} --variants fsdp2 moecore".split()
    rows, _ = rows_of("bench_fsdp", words, tmp_path, num_ranks=2)
    assert [row["provider"] for row in rows] == ["fsdp2", "moecore"] * 2
    assert [row["batch_size"] for row in rows] == [1, 1, 2, 2]
    for theirs, ours in zip(rows[::2], rows[1::2], strict=True):
        for loss in ("first_loss", "last_loss"):
            assert ours[loss] == pytest.approx(theirs[loss], rel=1e-5)
    assert rows[-1]["last_loss"] < rows[0]["first_loss"], "it trains"


@pytest.mark.slow
def test_what_needs_a_gpu_is_one_line() -> None:
    said = run("bench_fsdp", ["--model", "tiny-dense"], num_ranks=1, code=2)
    assert "--variants (megatron-fsdp) must run on GPUs, with --ep (1) 1" in said


def test_the_longest_kernel_of_each_collective_has_its_blocks() -> None:
    names = ("ncclSymkDevKernel_AllGather(a)", "ncclDevKernel_AllGather", "gemm_AllGather")
    sizes = ((3, [2, 2, 1]), (2, [24, 1, 1]), (9, [132, 1, 1]))
    kernels = [
        dict(cat="kernel", name=name, dur=us, args=dict(grid=grid))
        for name, (us, grid) in zip(names, sizes, strict=True)
    ]
    assert find_longest_launches([{"ph": "M"}, *kernels]) == dict(
        all_gather_kernel="ncclSymkDevKernel_AllGather", all_gather_blocks=4, all_gather_us=3
    )
