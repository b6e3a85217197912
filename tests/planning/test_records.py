"""Steps that GPUs have made, against their plans: memory, time, and which of two is faster."""

from __future__ import annotations

import json
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
from benchmarks.bench_plan import CASES

from moecore.planning import CostTable, TimePlan, dry_run, plan_peak, plan_time

PLANNING = Path(__file__).parents[2] / "benchmarks" / "results" / "planning"
RECORDS = {
    row["case"]: row
    for path in sorted(PLANNING.glob("*.jsonl"))
    for row in map(json.loads, path.read_text().splitlines())
}
ON_HOST = "qwen3, rowwise FP8"  # torch's products of it are not measured
TIMED = [case for case in RECORDS if case != ON_HOST]


@cache
def planned(case: str) -> tuple[int, int, TimePlan]:
    step = dry_run(CASES[case])
    return step.held, step.peak, plan_time(CASES[case], CostTable.of("h200-141"))


def test_there_are_enough() -> None:
    assert len(RECORDS) >= 25 and len(TIMED) >= 20


@pytest.mark.parametrize("case", RECORDS)
def test_memory(case: str) -> None:
    held, peak, _ = planned(case)
    assert max(plan_peak(CASES[case])) / 2**30 == pytest.approx(
        RECORDS[case]["peak_gib"], rel=0.003
    )
    assert held / 2**30 == pytest.approx(RECORDS[case]["held_gib"], rel=0.003)
    assert peak / 2**30 == pytest.approx(RECORDS[case]["peak_gib"], rel=0.003)


@pytest.mark.parametrize("case", TIMED)
def test_time(case: str) -> None:
    _, _, time = planned(case)
    assert time.seconds * 1e3 == pytest.approx(RECORDS[case]["step_ms"], rel=0.1)
    assert sum(time.parts.values()) == pytest.approx(time.seconds)


def test_which_is_faster() -> None:
    """Of pairs of the same work by other levers whose times differ by more than 5%."""
    pairs = [
        pair
        for pair in combinations(TIMED, 2)
        if abs(RECORDS[pair[0]]["step_ms"] / RECORDS[pair[1]]["step_ms"] - 1) > 0.05
        and CASES[pair[0]].model == CASES[pair[1]].model
        and CASES[pair[0]].batch_size == CASES[pair[1]].batch_size
        and CASES[pair[0]].seq_len == CASES[pair[1]].seq_len
    ]
    right = sum(
        (planned(a)[2].seconds < planned(b)[2].seconds)
        == (RECORDS[a]["step_ms"] < RECORDS[b]["step_ms"])
        for a, b in pairs
    )
    assert len(pairs) >= 20 and right >= 0.9 * len(pairs), (right, len(pairs))


def test_copies_to_the_host_are_the_wall_beyond_compute() -> None:
    """What cannot hide is there: an offload of all rows in few layers."""
    for case in RECORDS:
        hidden = planned(case)[2].parts["pcie"] == 0
        assert hidden == ("offloaded" not in case and "levers" not in case), case
