import socket
import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from moecore.recipes import stragglers
from moecore.recipes.stragglers import COMPUTE, PHASES, PhaseTimer, Stragglers
from tests.helpers.ranks import run_ranks
from tests.recipes.launched import launched
from tests.recipes.odd_ranks import run_delayed

RUN = (
    "--preset tiny-qwen3 --tokens random --num-layers 2 --batch-size 1 --seq-len 16 --steps 6 "
    "--sample-every 0 --checkpoint-every 0 --expert-loads-every 2"
)
CPU = torch.device("cpu")


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_the_line_names_the_slow_rank_and_its_phase(phase, tmp_path, monkeypatch) -> None:
    """Its peer waits in an exchange of the forward, or in a reduction: it has no line."""
    monkeypatch.setenv("MOECORE_TEST_DELAY", phase)
    words = [*RUN.split(), "--run-dir", str(tmp_path / "run")]
    code, said = launched(run_delayed, "train.py", words, tmp_path / "said.txt")
    assert code == 0, said
    alarms = [line for line in said.splitlines() if "is slow" in line]
    (line,) = [line for line in alarms if "the link" not in line]  # which a busy machine slows
    start = f"alarm at step 6: rank 1 on {socket.gethostname()} is slow: {phase} takes "
    assert line.startswith(start), line
    assert float(line.split(" s, ")[1].split()[0]) > 1.5  # times the median


@pytest.mark.slow
def test_the_line_names_both_ranks_of_a_slow_link(tmp_path, monkeypatch) -> None:
    """The link to the slow sender, and the link from the rank that receives late, are fast."""
    monkeypatch.setenv("MOECORE_TEST_DELAY", "link")
    words = [*RUN.split(), "--ep", "1", "--run-dir", str(tmp_path / "run")]
    code, said = launched(run_delayed, "train.py", words, tmp_path / "said.txt", 3)
    assert code == 0, said
    (line,) = [line for line in said.splitlines() if "is slow" in line]
    host = socket.gethostname()
    start = f"alarm at step 6: the link from rank 1 on {host} to rank 2 on {host} is slow: 8 MiB "
    assert line.startswith(start) and line.endswith("median of links inside hosts"), line


def test_links_between_hosts_are_compared_with_each_other() -> None:
    with patch.object(stragglers, "gather_objects", lambda host: [*"aaabbb"]):
        watch = Stragglers(CPU)
    phases = [0.0, 1.0, 0.1]
    # Of three ranks of a host, the middle one exchanges no message with another host.
    to_next, to_host = [0.5, 0.1, 0.5] * 2, [0.5] * 6
    even = [[*phases, *of_rank] for of_rank in zip(to_next, to_host, strict=True)]
    assert watch.find_alarms(1, even) == watch.find_alarms(2, even) == []
    to_host[1] = to_host[4] = 2.0
    slow = [[*phases, *of_rank] for of_rank in zip(to_next, to_host, strict=True)]
    assert watch.find_alarms(3, slow) == []
    assert watch.find_alarms(4, slow) == [
        f"alarm at step 4: the link from rank {rank} on {host} to rank {peer} on {other} is slow: "
        "8 MiB take 2 s, 4 times the median of links between hosts"
        for rank, host, peer, other in ((1, "a", 4, "b"), (4, "b", 1, "a"))
    ]


def test_a_rank_is_named_once_until_it_is_fast_again() -> None:
    with patch.object(stragglers, "gather_objects", lambda host: ["a", "b", "c"]):
        watch = Stragglers(CPU)
    even = [[0.0, 1.0, 0.1]] * 3
    slow = [[0.0, 1.0, 0.1], [0.0, 1.6, 0.1], [0.0, 1.0, 0.1]]  # the limit is 1 + 1.1 / 2
    even, slow = ([[*times, 0.1] for times in of_ranks] for of_ranks in (even, slow))  # one link
    runs = [slow, slow, slow, even, slow, even, slow, slow]
    lines = [watch.find_alarms(step, times) for step, times in enumerate(runs)]
    assert [step for step, found in enumerate(lines) if found] == [1, 7]
    text = (
        "rank 1 on b is slow: forward and backward takes 1.6 s, 1.6 times the median of the ranks"
    )
    assert lines[1] == [f"alarm at step 1: {text}"]
    watch.find_alarms(8, even)
    both = [
        [0.0, 1.0, 0.1, 0.1],
        [0.9, 1.6, 0.1, 0.1],
        [0.0, 1.0, 0.1, 0.1],
    ]  # the phase after a delay
    watch.find_alarms(8, both)
    (line,) = watch.find_alarms(8, both)
    assert "rank 1 on b is slow: data takes 0.9 s" in line
    small = [[0.0, 1.0, 0.1, 0.1], [0.01, 1.5, 0.1, 0.1], [0.0, 1.0, 0.1, 0.1]]  # 1% a step in data
    assert watch.find_alarms(9, small) == watch.find_alarms(10, small) == []


def time_phases(rank: int, device: torch.device) -> tuple[float, float, float]:
    """Return the time of a phase in which rank 1 sleeps of each rank, and a collective's cost."""
    timer, x = PhaseTimer(device), torch.zeros(1)
    with timer.measure(COMPUTE):
        work = dist.all_reduce(x, async_op=True)
        time.sleep(0.4 * rank)
        work.wait()
        dist.all_reduce(x)
    for phase in set(PHASES) - {COMPUTE}:
        with timer.measure(phase):
            pass
    of_ranks: list[Any] = [None, None]
    dist.all_gather_object(of_ranks, timer.read()[PHASES.index(COMPUTE)])
    return of_ranks[0], of_ranks[1], x.item()


def test_a_collective_is_not_the_time_of_the_rank_that_waits() -> None:
    waits, sleeps, _ = run_ranks(2, time_phases, over_gloo=True)
    assert waits < 0.2 and 0.4 <= sleeps < 0.6


def test_methods_are_restored() -> None:
    before = dict(vars(dist.ProcessGroup)), vars(dist.Work)["wait"]
    timer = PhaseTimer(CPU)
    with pytest.raises(RuntimeError, match="a step"), timer.measure(COMPUTE):
        assert vars(dist.Work)["wait"] is not before[1]
        raise RuntimeError("a step")
    assert (dict(vars(dist.ProcessGroup)), vars(dist.Work)["wait"]) == before
