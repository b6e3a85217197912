import re
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from moecore.recipes import hangs
from moecore.recipes.hangs import find_missing_ranks, format_report, summarize_collectives
from tests.recipes.launched import launched
from tests.recipes.odd_ranks import run_hanging

RUN = (
    "--preset tiny-qwen3 --tokens random --num-layers 2 --batch-size 1 --seq-len 16 --steps 6 "
    "--sample-every 0 --checkpoint-every 0 --hang-timeout 4"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "of_rank_1", "of_rank_0"),
    [
        ("data", "phase 'data'", "phase 'data of other ranks'"),
        ("layer", "phase 'forward and backward'", "phase 'forward and backward'"),
    ],
)
def test_the_report_names_the_rank_that_did_not_arrive(
    place: str, of_rank_1: str, of_rank_0: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("MOECORE_TEST_DELAY", place)
    words = [*RUN.split(), "--run-dir", str(tmp_path / "run")]
    code, said = launched(run_hanging, "train.py", words, tmp_path / "said.txt")
    assert code == 1
    report = said[said.index("moecore: error: ") :].splitlines()
    assert said.count("moecore: error: ") == 1 and len(report) == 3, said
    assert "within --hang-timeout (4 s), but other ranks wait for rank 1: " in report[0]
    found = {line.split()[1]: line for line in report[1:]}
    host = socket.gethostname()
    stack = r'at File "\S*tests/recipes/odd_ranks.py", line \d+ in stop$'
    assert re.match(rf"  rank 1 on {host} for \d+ s: step 2, in {of_rank_1}, {stack}", found["1"])
    start = rf"  rank 0 on {host} for \d+ s: step 2, in {of_rank_0}, at File .*, waits in "
    assert re.match(rf"{start}gloo:\w+, number \d+ of gloo group \d+", found["0"]), found["0"]


def test_a_report_that_fails_ends_its_rank(monkeypatch: Any, capfd: Any) -> None:
    def read_nothing() -> None:
        raise KeyError("entries")

    store = dist.HashStore()
    store.set(hangs.KEY, "")  # another rank's timeout
    world = SimpleNamespace(get_group_store=lambda: SimpleNamespace(clone=lambda: store))
    monkeypatch.setattr(hangs.dist, "group", SimpleNamespace(WORLD=world))
    monkeypatch.setattr(hangs, "read_flight_recorder", read_nothing)
    monkeypatch.setattr(hangs, "get_default_timeout", lambda: None)
    for name in ("get_rank", "get_world_size"):
        monkeypatch.setattr(hangs.dist, name, lambda: 1)
    monkeypatch.setattr(hangs.os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as ended:
        hangs.HangWatch(0.1)._run()
    assert ended.value.code == 1 and "KeyError: 'entries'" in capfd.readouterr().err


def record(rank: int, waits: Any = None, phase: str = "forward and backward", **last: int) -> Any:
    place = {"step": 3, "phase": phase, "frame": "a.py:1 in f", "seconds": 9.0, "host": "a"}
    return {"rank": rank, "waits": waits, "last": last} | place


def test_ranks_that_wait_for_each_other_in_a_row() -> None:
    """0 waits for 1 in group a, 1 for 2 in group b, and 2 computes."""
    chain = [
        record(0, ["a", 5, "gloo:all_reduce"], a=5),
        record(1, ["b", 7, "gloo:all_reduce"], a=4, b=7),
        record(2, b=6),
        record(3, a=5),  # it computes, too, and nobody waits for it
    ]
    assert find_missing_ranks(chain, 4) == [2]
    assert find_missing_ranks(chain, 5) == [4]  # it has written nothing
    chain[2] = record(2, ["c", 1, "gloo:all_reduce"], b=6, c=1)
    assert find_missing_ranks([*chain[:3]], 3) == [2]
    chain[2] = record(2, ["a", 6, "gloo:all_reduce"], a=6, b=6)
    assert find_missing_ranks([*chain[:3]], 3) == [0, 1, 2]  # a cycle
    same = [record(rank, ["a", 5, "nccl:all_reduce"], a=5) for rank in range(3)]
    assert find_missing_ranks(same, 3) == []


def test_without_a_flight_recorder_the_phases_decide() -> None:
    places = [record(0), record(1, phase="data"), record(2, phase="data of other ranks")]
    assert find_missing_ranks(places, 3) == [1]
    assert find_missing_ranks([record(0), record(1)], 2) == []
    on_device = record(0) | {"frame": 'File "/a/torch/cuda/streams.py", line 9 in synchronize'}
    assert find_missing_ranks([on_device, record(1)], 2) == [1]
    assert find_missing_ranks([on_device, on_device | {"rank": 1}], 2) == []


def test_equal_records_are_one_line() -> None:
    waits = ["gloo group 0 (default_pg)", 4, "gloo:all_reduce"]
    records = [record(rank, waits, **{waits[0]: 4}) for rank in (0, 2, 3)]
    lines = format_report(records, 5, 60.0).splitlines()
    assert lines[0].startswith(
        "moecore: error: a step must end within --hang-timeout (60 s), but other ranks wait for "
        "ranks 1, 4: "
    )
    assert lines[1:] == [
        "  ranks 0, 2, 3 on a for 9 s: step 3, in phase 'forward and backward', at a.py:1 in f, "
        "waits in gloo:all_reduce, number 4 of gloo group 0 (default_pg)",
        "  ranks 1, 4: stopped, ended, or blocked outside of Python",
    ]


def test_collectives_are_counted_by_group() -> None:
    def entry(group: str, number: int, *, retired: bool, is_p2p: bool = False) -> dict[str, Any]:
        numbers = {"collective_seq_id": number, "p2p_seq_id": number, "is_p2p": is_p2p}
        name = "nccl:all_reduce"
        return {"profiling_name": name, "process_group": [group, ""], "retired": retired} | numbers

    entries = [
        entry("0", 1, retired=True),
        entry("1", 3, retired=False),
        entry("0", 2, retired=False),
        entry("1", 9, retired=True, is_p2p=True),
    ]
    assert summarize_collectives(entries) == {
        "last": {"nccl group 0": 2, "nccl group 1": 3},
        "waits": ["nccl group 1", 3, "nccl:all_reduce"],
    }
