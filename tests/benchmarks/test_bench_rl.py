import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the baseline is transformers' own model")

REPO = Path(__file__).parents[2]
ARGUMENTS = (
    "--preset tiny-qwen3 --layers 1 --sequences 4 --seq-len 16 --prompt 4 --max-tokens 32 "
    "--plain-tokens 48 --device cpu"
)


@pytest.mark.slow
@pytest.mark.nightly  # test_bench_fsdp.py starts ranks by the same code
def test_it_measures_what_agrees_with_transformers(tmp_path: Path) -> None:
    options = f"{ARGUMENTS} --results {tmp_path}"
    command = [sys.executable, "-m", "benchmarks.bench_rl", *options.split()]
    here = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    here |= {"PYTHONPATH": os.pathsep.join([str(REPO / "src"), str(REPO)])}
    done = subprocess.run(command, env=os.environ | here, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.iterdir()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    both = [
        (op, v)
        for op in ("rl_log_probs", "rl_grpo")
        for v in ("moecore", "moecore+invariant", "transformers")
    ]
    alone = [(op, "moecore") for op in ("rl_weights", "rl_offload", "rl_onload")]
    assert [(row["op"], row["variant"]) for row in rows] == both + alone
    assert done.stdout.count(" ms ") >= len(rows)
    rate = 4 * 16 / rows[0]["ms"] * 1e3
    assert rows[0]["tokens_per_second"] == pytest.approx(rate)
    weights, away, back = rows[6:]
    assert away["bytes"] == back["bytes"] > 1.9 * weights["bytes"]  # two moments in bf16
    assert weights["share"] == pytest.approx(weights["gbps"] / weights["copy_gbps"])
