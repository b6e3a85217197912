"""The benchmark of sharded steps on two CPU ranks, as its users start it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
ARGUMENTS = "--seq-len 32 --batch-sizes 1 2 --warm-up 1 --steps 2 --rounds 2 --lr 0.02"


def start(arguments: str, launcher: str = "") -> subprocess.CompletedProcess[str]:
    command = f"{launcher} -m benchmarks.bench_fsdp {arguments}"
    here = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    here |= {"PYTHONPATH": os.pathsep.join([str(REPO / "src"), str(REPO)])}
    return subprocess.run(
        [sys.executable, *command.split()],
        env=os.environ | here,
        cwd=REPO,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny-dense", "tiny-qwen3 --ep 2"])
def test_variants_compute_the_same(model: str, tmp_path: Path) -> None:
    arguments = f"--model {model} {ARGUMENTS} --variants fsdp2 moecore --results {tmp_path}"
    done = start(arguments, "-m torch.distributed.run --standalone --nproc-per-node 2")
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.iterdir()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["provider"] for row in rows] == ["fsdp2", "moecore"] * 2
    assert [row["batch_size"] for row in rows] == [1, 1, 2, 2]
    for theirs, ours in zip(rows[::2], rows[1::2], strict=True):
        for loss in ("first_loss", "last_loss"):
            assert ours[loss] == pytest.approx(theirs[loss], rel=1e-5)
    assert rows[-1]["last_loss"] < rows[0]["first_loss"], "it trains"


@pytest.mark.slow
def test_what_needs_a_gpu_is_one_line() -> None:
    done = start("--model tiny-dense")
    assert done.returncode == 2
    assert "--variants (megatron-fsdp) must run on GPUs, with --ep (1) 1" in done.stderr
