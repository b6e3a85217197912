"""A rank that leaves decides how a job ends, also when others raise because it left.

And no rank outlives the launcher. Run as a script, this file launches one that waits.
"""

import fcntl
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest
import torch

from moecore.recipes.launch import launch


def leave_or_raise(codes: list[int | None]) -> int:
    code = codes[int(os.environ["RANK"])]
    if code is None:
        raise RuntimeError("connection closed by peer")
    return code


@pytest.fixture(autouse=True)
def a_slow_launcher(monkeypatch: Any) -> Iterator[None]:
    """It looks only when every rank has ended."""
    from tests.recipes.launched import forked_ranks  # not where this file is a script

    wait = connection.wait

    def wait_for_all(sentinels: list[int], timeout: float | None = None) -> list[Any]:
        for sentinel in sentinels:
            wait([sentinel])
        return wait(sentinels, timeout)

    monkeypatch.setattr(connection, "wait", wait_for_all)
    with forked_ranks():
        yield


def test_the_rank_that_left_decides() -> None:
    assert launch(leave_or_raise, [None, 3], 2) == 3


def test_a_rank_that_raised_alone_is_shown() -> None:
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="closed by peer"):
        launch(leave_or_raise, [None, 0], 2)


def die_or_stay(rank: int) -> int:
    """Be killed as `rank`; on other ranks, ignore SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if int(os.environ["RANK"]) == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
    return 0


def test_a_killed_rank_ends_the_others_at_once(monkeypatch: Any, capfd: Any) -> None:
    monkeypatch.undo()  # the slow launcher
    began = time.monotonic()
    assert launch(die_or_stay, 1, 3) == 1
    assert time.monotonic() - began < 20  # torch gives them 30 seconds
    assert "error: rank 1 ended by SIGKILL: the host may" in capfd.readouterr().err


def hold_lock(path: Path) -> int:
    """Be a rank that waits; its end frees the lock."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        path.with_suffix(".held").touch()
        time.sleep(600)
    return 0


def is_free(path: Path) -> bool:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def until(holds: Callable[[], bool], *, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.05)
    return holds()


def test_ranks_end_with_the_launcher(tmp_path: Path) -> None:
    """Started with SIGINT ignored, as a shell script starts what goes on in the background."""
    launchers = {}
    for number in (signal.SIGTERM, signal.SIGKILL):
        command = f"trap '' INT; exec {sys.executable} {__file__} {tmp_path / number.name}"
        launchers[number] = subprocess.Popen(["bash", "-c", command])
    try:
        for number, launcher in launchers.items():
            path = tmp_path / number.name
            assert until(path.with_suffix(".held").exists, seconds=120) and not is_free(path)
            launcher.send_signal(number)
            code = launcher.wait(timeout=120)
            assert code == (128 + number if number == signal.SIGTERM else -number)
            assert until(lambda path=path: is_free(path), seconds=0 if code > 0 else 120)
    finally:
        for launcher in launchers.values():
            launcher.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_says_where_it_continues(number, train, tmp_path, monkeypatch, capsys):
    """The launcher says it: Ctrl-C of `make demo` ends in one line."""
    from moecore.io import save  # not where this file is a script, whose ranks start faster so

    loop = importlib.import_module("moecore.recipes.loop")
    monkeypatch.delenv("RANK")
    monkeypatch.setattr(loop, "launch", lambda *_: 128 + number)
    args = train.parse_arguments(["--run-dir", str(tmp_path), "--ranks", "1"])
    model, root = torch.nn.Linear(2, 2), tmp_path / "checkpoints"

    def said() -> str:
        options = {"run_rank": train.run_rank, "check": lambda *_: None, "dry_run": None}
        assert loop.run_command(lambda _: args, None, **options) == 128 + number
        return capsys.readouterr().err

    anew = "there is no checkpoint yet, so the same command starts from the beginning"
    assert said() == f"moecore: stopped: {anew}\n"
    path = save(root, 3, model, None)
    assert said() == f"moecore: stopped: the same command continues from {path}\n"
    (root / "latest").write_text("damaged")
    assert "Traceback" not in (line := said()) and line.count("\n") == 1 and str(root) in line


if __name__ == "__main__":
    sys.exit(launch(hold_lock, Path(sys.argv[1]), 1))
