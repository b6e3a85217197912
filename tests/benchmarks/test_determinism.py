import json
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.determinism import DIGESTS, STEPS, Run, compare_runs

from tests.benchmarks.forks import run_command


def write(run: Run, losses: list[float], digests: dict[str, str]) -> None:
    run.run_dir.mkdir(parents=True)
    lines = [{"step": i, "loss": x, "grad_norm": 1.0} for i, x in enumerate(losses, start=1)]
    (run.run_dir / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (run.run_dir / f"0-{DIGESTS}").write_text(json.dumps(digests))


def test_a_comparison_counts_differences(tmp_path: Path) -> None:
    first = Run(case="bf16", size="tiny", folder=str(tmp_path), name="first")
    again = replace(first, name="again")
    losses = [3.0 - i / 8 for i in range(STEPS["tiny"])]
    write(first, losses, {"a": "1", "b": "2", "c": "3"})
    write(again, [*losses[:4], 2.5 + 2**-51, 1.0], {"a": "1", "b": "4", "c": "5"})
    row = compare_runs(again, first)
    assert (row["differing_losses"], row["first_difference"]) == (2, 5)
    assert (row["differing_tensors"], row["tensors"]) == (2, 3)
    row = compare_runs(first, first)
    assert (row["differing_losses"], row["differing_tensors"]) == (0, 0)
    assert row["first_difference"] is None


@pytest.mark.slow
@pytest.mark.nightly  # tests/recipes/test_determinism.py compares the same runs in fewer processes
def test_runs_are_compared_and_timed() -> None:
    words = "-m benchmarks.determinism --size tiny --cases bf16 finetune --blocks 1"
    *compared, times = run_command(words).splitlines()
    assert len(compared) == 6 and all("differing_tensors 0" in line for line in compared)
    assert times.startswith("op determinism_cost, case bf16")
