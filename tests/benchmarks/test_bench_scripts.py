"""Scripts of benchmarks, tiny and on CPUs: variants compute the same, and rows are recorded."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import bench_pipeline_context

from tests.benchmarks.forks import rows_of


@pytest.mark.slow
@pytest.mark.nightly  # test_bench_fsdp.py starts ranks by the same code
def test_transformers_and_moecore_compute_the_same(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5")
    words = "--preset tiny-qwen3 --layers 1 --seq-len 32 --batch-size 2 --warm-up 1 --timed 2"
    rows, said = rows_of("bench_hf", words.split(), tmp_path, num_ranks=2)
    assert [row["variant"] for row in rows] == ["transformers", "moecore", "moecore+loss"]
    assert said.count("tokens/s/GPU") == len(rows)
    for row in rows:
        assert row["losses"] == pytest.approx(rows[0]["losses"], abs=1e-4)
        rate = 2 * 32 / row["step_ms"] * 1e3
        assert row["tokens_per_second_per_gpu"] == pytest.approx(rate, rel=1e-4)
    assert rows[0]["losses"][0] != rows[0]["losses"][-1], "it trains"


def test_memory_options_compute_the_same(tmp_path: Path) -> None:
    options = ["nothing", "gemm_last", "gemm_last+up"]
    words = ["--preset", "tiny-deepseek-v3", "--seq-len", "32", "--rounds", "1", "--options"]
    rows, _ = rows_of("bench_memory", [*words, *options], tmp_path, num_ranks=1)
    assert [row["variant"] for row in rows] == options
    assert len({(row["loss"], row["grad_norm"]) for row in rows}) == 1


@pytest.mark.slow
@pytest.mark.nightly  # as most scripts of benchmarks
def test_each_fraction_moves_its_share(tmp_path: Path) -> None:
    words = (
        "--preset tiny-deepseek-v3 --layers 3 --seq-len 32 --batch-size 2 --device cpu "
        "--min-bytes 256 --fractions 0 0.5 1 --ops step"
    )
    rows, said = rows_of("bench_offload", words.split(), tmp_path, num_ranks=1)
    variants = ["none", "0.0", "0.5", "1.0"]
    assert [(row["op"], row["variant"]) for row in rows] == [("offload_step", v) for v in variants]
    assert said.count(" ms (") == len(rows)
    none, zero, half, whole = rows
    assert none["out_bytes"] == zero["out_bytes"] == 0 and none["ratio"] == 1
    assert 0 < 2 * half["out_bytes"] <= whole["out_bytes"] < whole["kept_bytes"]
    assert half["late_bytes"] == whole["late_bytes"] == 0
    assert whole["back_bytes"] == whole["out_bytes"]


def test_ways_to_keep_rows_compute_the_same(tmp_path: Path) -> None:
    sizes = "--layers 2 --experts 4 --tokens 33 --seq-len 33 --row-factor 1.1"
    words = f"--preset tiny-qwen3 {sizes}".split()
    rows, _ = rows_of("bench_stash", words, tmp_path, num_ranks=1)
    assert [row["variant"] for row in rows] == ["room", "pages", "factor", "exact"]
    assert all(row["ms"] > 0 and row["row_factor"] == 1.1 for row in rows)


@pytest.mark.slow
@pytest.mark.nightly  # test_bench_fsdp.py starts ranks by the same code
def test_offloaded_states_compute_the_same(tmp_path: Path) -> None:
    names = ["plain", "away", "host, away"]
    words = (
        "--preset tiny --seq-len 32 --batch-size 2 --micro-batches 2 --warm-up 1 --timed 2 "
        "--gigabytes 1e-4 --variants"
    )
    rows, said = rows_of("bench_state_offload", [*words.split(), *names], tmp_path, num_ranks=2)
    assert [row["variant"] for row in rows] == names and said.count("GiB peak") == len(rows)
    for row in rows:
        assert row["losses"] == rows[0]["losses"]
        assert (row["pinned_gib"] > 0) == ("away" in row["variant"])
        assert 0 < row["moved_fraction"] < 1 or "away" not in row["variant"]
    assert rows[0]["losses"][0] != rows[0]["losses"][-1], "it trains"


@pytest.mark.slow
@pytest.mark.nightly  # test_bench_fsdp.py starts ranks by the same code
def test_slices_of_tp_compute_the_same(tmp_path: Path) -> None:
    words = "--layers tiny --seq-lens 64 --batch-sizes 2 --warm-up 1 --steps 1 --rounds 1"
    rows, said = rows_of("bench_tp", words.split(), tmp_path, num_ranks=2)
    assert [row["provider"] for row in rows] == ["in turn", "sliced", "alone"]
    assert [row["chosen"] for row in rows] == [True, False, False]  # slices are small
    for row in rows:
        assert 0 < row["difference"] <= 0.02 and row["times_error"] <= 2
        assert row["exposed_ms"] == row["step_ms"] - rows[2]["step_ms"]
    assert said.count("tiny, tp 2, batch 2 x 64, slices") == 1


@pytest.mark.slow
@pytest.mark.nightly  # test_bench_fsdp.py starts ranks by the same code
def test_an_engine_agrees_with_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the baseline is transformers' own model")
    words = (
        "--preset tiny-qwen3 --layers 1 --sequences 4 --seq-len 16 --prompt 4 --max-tokens 32 "
        "--plain-tokens 48 --device cpu"
    )
    rows, said = rows_of("bench_rl", words.split(), tmp_path, num_ranks=1)
    both = [
        (op, v)
        for op in ("rl_log_probs", "rl_grpo")
        for v in ("moecore", "moecore+invariant", "transformers")
    ]
    alone = [(op, "moecore") for op in ("rl_weights", "rl_offload", "rl_onload")]
    assert [(row["op"], row["variant"]) for row in rows] == both + alone
    assert said.count(" ms ") >= len(rows)
    rate = 4 * 16 / rows[0]["ms"] * 1e3
    assert rows[0]["tokens_per_second"] == pytest.approx(rate)
    weights, away, back = rows[6:]
    assert away["bytes"] == back["bytes"] > 1.9 * weights["bytes"]  # two moments in bf16
    assert weights["share"] == pytest.approx(weights["gbps"] / weights["copy_gbps"])


@pytest.mark.slow
@pytest.mark.nightly
def test_transfers_of_attention_are_repeated() -> None:
    """Each exchange is recorded with its bytes, so the patches reach the collectives."""
    words = "--part attention --tokens 256 --heads qwen3-30b-a3b --seconds 1 --device cpu"
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command = [sys.executable, "-m", *launcher, "benchmarks.bench_context_parallel", *words.split()]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    sent = re.findall(r"way (\w+)  .*sent_bytes (\d+)", said)
    assert [way for way, _ in sent] == ["p2p", "allgather", "a2a"]
    assert all(int(num_bytes) > 0 for _, num_bytes in sent)


def test_the_first_rank_of_a_pipeline_runs_alone() -> None:
    words = "--preset tiny-qwen3 --layers 4 --pp 2 --micro-batches 2 --lengths 32 64 --device cpu"
    command = [sys.executable, "-m", "benchmarks.bench_pipeline_context", *words.split()]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.count("step_s") == 4 and "{'offload': 64, 'none': 64}: 1.00" in said


def test_a_length_that_does_not_fit_has_a_record(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_steps(memory: Any, tokens: int, _: Any) -> float:
        if memory is None or tokens == 32:
            raise torch.OutOfMemoryError
        return 1.0

    rows = list[Any]()
    words = "--lengths 32 64 --device cpu --results benchmarks/results/pipeline"
    monkeypatch.setattr("sys.argv", ["bench_pipeline_context", *words.split()])
    monkeypatch.setattr(bench_pipeline_context, "run_steps", run_steps)
    monkeypatch.setattr(bench_pipeline_context, "append_rows", lambda *args: rows.extend(args[2]))
    assert bench_pipeline_context.main() == 0
    assert "{'offload': 64, 'none': 0}: nan" in capsys.readouterr().out
    assert [(row["variant"], row["tokens"], row["fits"]) for row in rows] == [
        *(("offload", 32, False), ("offload", 64, True)),
        *(("none", 32, False), ("none", 64, False)),
    ]
