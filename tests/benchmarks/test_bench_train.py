import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.bench_train import find_committed, list_runs, split_arguments, train

from tests.benchmarks.forks import REPO, rows_of

ARGUMENTS = (
    "--preset tiny-qwen3 --tokens random --routing balanced --seq-len 32 --batch-size 2"
    " --warm-up 1 --timed 2"
)


@pytest.mark.slow
def test_a_run_prints_and_records_its_row(tmp_path: Path) -> None:
    words = f"{ARGUMENTS} --run-dir {tmp_path / 'run'}".split()
    (row,), said = rows_of("bench_train", words, tmp_path / "results", num_ranks=2)
    check(row, said)


def check(row: dict[str, Any], said: str) -> None:
    assert "tokens_per_second_per_gpu" in said
    assert (row["op"], row["preset"], row["num_gpus"], row["ep"]) == ("train", "tiny-qwen3", 2, 2)
    assert row["tokens_per_step"] == 2 * 2 * 32 and len(row["losses"]) == 3
    rate = row["tokens_per_second_per_gpu"]
    assert rate == pytest.approx(row["tokens_per_step"] / 2 / row["step_ms"] * 1e3, rel=1e-4)
    assert row["mfu"] == pytest.approx(row["tflops_per_gpu"] / row["ceiling_tflops"], rel=1e-4)
    assert row["load_max_over_mean"] == 1.0, "balanced"


@pytest.mark.parametrize("more", ["", "--fp8-head", "--fp8-param-gather --fp8-dispatch --fp8-head"])
def test_the_baseline_in_bf16_has_no_products_in_fp8(more: str) -> None:
    """A head in FP8 has no precision to take its recipe from there, and was refused."""
    own, rest = split_arguments(f"--precision blockwise --against-bf16 {more}".split())
    args = train.parse_arguments(rest)
    bf16, run = list_runs(own, args)
    assert bf16.make_precision() is None
    precision = run.make_precision()
    assert precision is not None and precision.fp8_head == ("--fp8-head" in more)
    fsdp = replace(run.fsdp, fp8_param_gather=False)
    sharding = replace(run.sharding, fp8_dispatch=False)
    same = replace(run, precision=None, fp8={}, fsdp=fsdp, sharding=sharding)
    assert bf16 == same, "nothing else differs"


def test_the_row_beside_has_the_same_arguments() -> None:
    """In any order and with any `--results`; a run with one option more has no row."""
    path = sorted((REPO / "benchmarks/results/train").glob("*.jsonl"))[-1]
    row = json.loads(path.read_text().splitlines()[-1])
    command, _, _ = row["command"].partition(" --results")
    first, *options = command.split(" --")
    command = " --".join([first, "results elsewhere", *reversed(options)])
    assert find_committed(command, row["num_gpus"]) == row
    assert find_committed(command + " --latent-dim 77", row["num_gpus"]) is None
    assert find_committed(command, 77) is None
