"""The benchmark of LoRA on two CPU ranks, as its users start it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip(
    "peft", minversion="0.21", reason="the adapters are peft's, which the extra `test` has"
)

REPO = Path(__file__).parents[2]
ARGUMENTS = "--preset tiny-qwen3 --layers 1 --seq-len 32 --batch-size 2 --warm-up 1 --timed 2"


@pytest.mark.slow
def test_adapters_train(tmp_path: Path) -> None:
    launcher = "-m torch.distributed.run --standalone --nproc-per-node 2"
    how = f"{ARGUMENTS} --rank 4 --lr 0.01 --results {tmp_path}"
    command = f"{launcher} -m benchmarks.bench_lora {how}".split()
    here = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    here |= {"PYTHONPATH": os.pathsep.join([str(REPO / "src"), str(REPO)])}
    done = subprocess.run(
        [sys.executable, *command], env=os.environ | here, cwd=REPO, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.iterdir()
    (row,) = [json.loads(line) for line in file.read_text().splitlines()]
    assert done.stdout.count("tokens/s/GPU") == 1
    assert row["losses"][-1] < row["losses"][0] - 0.05
    rate = 2 * 32 / row["step_ms"] * 1e3
    assert row["tokens_per_second_per_gpu"] == pytest.approx(rate, rel=1e-4)
