from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moecore import cli
from moecore.base.fields import quote
from moecore.base.rank_checks import gather_objects
from moecore.parallel import doctor
from moecore.parallel.doctor import RankFacts, _collect_facts, find_problems
from tests.helpers.ranks import run_ranks

GIB = 2**30
ONE = RankFacts(
    host="a",
    name="node-a",
    ranks_per_host=2,
    versions={"torch": "2.13.0", "NCCL": "2.29"},
    environment={"NCCL_DEBUG": "WARN"},
    clock=100.0,
    gpu_memory=(79 * GIB, 80 * GIB),
    open_files=65536,
    shared_memory=64 * GIB,
    has_checkpoints=True,
    disk=900 * GIB,
    rates={"inside a host": 300e9, "between hosts": 40e9},
)
OTHER = replace(ONE, host="b", name="node-b", clock=100.2)
JOB = [ONE, ONE, OTHER, OTHER]


def changed(rank: int, **fields: Any) -> list[RankFacts]:
    return [replace(one, **fields) if i == rank else one for i, one in enumerate(JOB)]


def test_a_healthy_job_has_no_problem() -> None:
    assert find_problems(JOB) == find_problems([replace(ONE, ranks_per_host=None)]) == []


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        (changed(3, versions={"torch": "2.12.1", "NCCL": "2.29"}), "torch (2.13.0 on ranks 0-2,"),
        (changed(1, environment={}), "NCCL_DEBUG (WARN on ranks 0, 2-3, not set on rank 1) must"),
        (changed(2, clock=96.5), "clock of node-b (-3.5 s from that of node-a) must be within 1"),
        (changed(0, open_files=1024), "open files of rank 0 (1024) must be >= 4096: ulimit -n"),
        (changed(1, locked_memory=8 * GIB), "locked memory of rank 1 (8 GiB) must be unlimited,"),
        (changed(3, shared_memory=GIB // 16), "/dev/shm of node-b (0.0625 GiB free) must have 1"),
        (changed(1, disk=2 * GIB), "disk of checkpoints on node-a (2 GiB free) must have 10 GiB:"),
        (changed(3, sees_checkpoints=False), "directory of checkpoints on node-b (of rank 3)"),
        (changed(1, has_checkpoints=False), "--checkpoints (not given on rank 1) must be given"),
        (
            changed(3, failures=("/dev/shm must be readable by this rank",)),
            "rank 3 on node-b: /dev/shm must be readable by this rank",
        ),
        (changed(3, gpu_memory=(40 * GIB, 80 * GIB)), "GPU of rank 3 (40 GiB of 80 GiB free on"),
        (
            changed(3, peers="must have peer access from rank 2 to rank 3: use 'alltoall'"),
            "dispatcher 'nvlink' on node-b must have peer access from rank 2 to rank 3: use",
        ),
        (
            changed(3, rates={"inside a host": 300e9, "between hosts": 3.1e9}),
            "messages between hosts to rank 3 on node-b (3.1 GB/s) must be near the median (40",
        ),
        (changed(1, ranks_per_host=4), "LOCAL_WORLD_SIZE (4) of node-a must be its number of"),
        ([*JOB, OTHER], "ranks of a host (node-a: 2, node-b: 3) must be equally many: start as"),
        (
            [replace(one, fabric="ab"[i % 2]) for i, one in enumerate(JOB)],
            "ranks of one NVLink domain (ranks 0, 2) must be neighbours, on which dispatcher",
        ),
        ([ONE, OTHER, ONE, OTHER], "ranks of node-a (ranks 0, 2) must be neighbours, on which tp"),
    ],
)
def test_what_is_wrong_is_one_line(facts: list[RankFacts], line: str) -> None:
    assert any(problem.startswith(line) for problem in find_problems(facts))
    assert len(find_problems(facts)) <= 2  # some facts are wrong in two ways


def test_errors_that_nobody_raises_are_named() -> None:
    variables = {"NCCL_DEBUG": "WARN", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    found = find_problems([replace(one, environment=variables) for one in JOB])
    assert len(found) == 4
    assert found[0].startswith("TORCH_NCCL_ASYNC_ERROR_HANDLING (0) of rank 0 must be 1, else")


def collect(rank: int, device: torch.device, folder: str) -> list[RankFacts]:
    return gather_objects(_collect_facts("cpu", Path(folder) / "runs"))


def test_ranks_of_one_host_are_alike(tmp_path: Path) -> None:
    found = run_ranks(3, collect, str(tmp_path), over_gloo=True)
    # What depends on the machine, and on what else runs there, is left out.
    plain = dict(open_files=-1, shared_memory=None, disk=None, rates={})
    assert find_problems([replace(one, **plain) for one in found]) == []
    assert len({one.host for one in found}) == 1 and all(one.sees_checkpoints for one in found)
    assert all(set(one.rates) == {"inside a host"} for one in found)
    assert list((tmp_path / "runs").iterdir()) == []


def measure_apart(rank: int, device: torch.device) -> list[dict[str, float]]:
    return gather_objects(doctor._measure_receive_rates(["a", "b", "b"], "cpu"))


def test_hosts_may_have_different_numbers_of_ranks() -> None:
    rates = run_ranks(3, measure_apart, over_gloo=True)
    assert [set(of_rank) for of_rank in rates] == [
        {"between hosts"},
        {"inside a host", "between hosts"},
        {"inside a host"},
    ]
    assert all(rate > 0 for of_rank in rates for rate in of_rank.values())


def collect_apart(rank: int, device: torch.device, folder: str) -> dict[str, list[str]]:
    """Return the problems of jobs in which the ranks differ."""
    missing = Path(folder) / "file" / "x"  # cannot be made
    Path(folder).joinpath("file").touch()
    runs, other = Path(folder) / "runs", Path(folder) / "other"
    cases: dict[str, tuple[list[Path | None], dict[str, str]]] = {
        "unwritable on rank 1": ([runs, missing], {}),
        "unwritable on rank 0": ([missing, runs], {}),
        "given on rank 0": ([runs, None], {}),
        "given on rank 1": ([None, runs], {}),
        "another directory": ([runs, other], {}),
        "launcher": ([None, None], {"LOCAL_WORLD_SIZE": "x"} if rank else {}),
    }
    lines = {}
    for name, (directories, environment) in cases.items():
        with pytest.MonkeyPatch.context() as patch:
            for key, value in environment.items():
                patch.setenv(key, value)
            found = gather_objects(_collect_facts("cpu", directories[rank]))
        plain = dict(open_files=-1, shared_memory=None, disk=None, rates={}, name="node")
        lines[name] = find_problems([replace(one, **plain) for one in found])
    return lines


def test_facts_that_one_rank_cannot_read(tmp_path: Path) -> None:
    lines = run_ranks(2, collect_apart, str(tmp_path), over_gloo=True)
    failed = "must be a directory that every rank can write, which failed: Not a directory"
    path = f"--checkpoints ({quote(str(tmp_path / 'file' / 'x'))})"
    given = "must be given on all ranks: start every rank with the same command"
    assert lines == {
        "unwritable on rank 1": [f"rank 1 on node: {path} {failed}"],
        "unwritable on rank 0": [f"rank 0 on node: {path} {failed}"],
        "given on rank 0": [f"--checkpoints (not given on rank 1) {given}"],
        "given on rank 1": [f"--checkpoints (not given on rank 0) {given}"],
        "another directory": [
            "directory of checkpoints on node (of rank 1) must be that of rank 0, which all ranks "
            "write: give one on shared storage"
        ],
        "launcher": [
            "rank 1 on node: LOCAL_WORLD_SIZE ('x') must be a whole number from 1 to 2147483647: "
            "start ranks with torchrun, which sets this variable"
        ],
    }
    assert not any(any((tmp_path / name).iterdir()) for name in ("runs", "other"))


def test_a_peer_that_ends_is_one_line(tmp_path, monkeypatch, no_group_left, capfd) -> None:
    def gather_without_peer(value: Any) -> list[Any]:
        if isinstance(value, bool):  # whether rank 0 has written its file
            assert len(list(tmp_path.iterdir())) == 1
            raise RuntimeError("[pair.cc:537] Read error\nof gloo")
        return gather_objects(value)

    monkeypatch.setattr(doctor, "gather_objects", gather_without_peer)
    assert cli.main(["doctor", "--checkpoints", str(tmp_path)]) == 1
    assert capfd.readouterr().err == (
        "moecore: ranks must all take part until the end: check that all have started and still "
        "run, MASTER_ADDR and ports ([pair.cc:537] Read error of gloo)\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("variables", "arguments", "line"),
    [
        ({"RANK": "x"}, [], "RANK ('x') must be a whole number from 0 to 1: start ranks"),
        ({"RANK": "2"}, [], "RANK ('2') must be a whole number from 0 to 1: start ranks"),
        ({"WORLD_SIZE": "x"}, [], "WORLD_SIZE ('x') must be a whole number from 1 to 2147483647"),
        ({"MASTER_PORT": "x"}, [], "MASTER_PORT ('x') must be a whole number from 0 to 65535"),
        ({}, ["--timeout", "99999999999999"], "--timeout (99999999999999) must be a whole number"),
        ({}, ["--timeout", "0"], "--timeout (0) must be a whole number >= 1 and <= 86400"),
        ({}, ["--timeout", "-5"], "--timeout (-5) must be a whole number >= 1 and <= 86400"),
        ({}, ["--timeout", "1"], "ranks must find each other within 1 s: check that all have"),
    ],
)
def test_what_a_rank_is_told_before_it_has_peers(
    variables: dict[str, str],
    arguments: list[str],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    no_group_left: None,
    capfd: pytest.CaptureFixture[str],
) -> None:
    of_torchrun = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in (of_torchrun | variables).items():
        monkeypatch.setenv(name, value)
    assert cli.main(["doctor", *arguments]) == (2 if "--timeout (" in line else 1)
    printed, errors = capfd.readouterr()
    assert printed == "" and errors.startswith(f"moecore: {line}") and errors.count("\n") == 1


def test_the_command(no_group_left: None, capfd: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["doctor"])
    printed, errors = capfd.readouterr()
    assert code == bool(errors) and "1 rank(s) on " in printed and "problem(s) found" in printed
