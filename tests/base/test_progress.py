import io
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from moecore.base import progress
from moecore.base.progress import show_progress, track_progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set the time."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.delenv("RANK", raising=False)

    def set_time(seconds: float) -> None:
        now[0] = 100.0 + seconds

    return set_time


def test_lines_come_after_five_seconds_and_then_every_ten(clock, capsys) -> None:
    with show_progress("loading", unit="B") as report:
        for seconds, done in ((0, 0), (4.9, 10**9), (5, 2 * 10**9), (14, 3), (14, 3 * 10**9)):
            clock(seconds)
            if done != 3:
                report(done, 4 * 10**9)
        clock(15)
        report(4 * 10**9, 4 * 10**9)
        clock(19)
        report(5, 10)  # the next operation, which is short
        clock(23)
        report(10, 10)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "moecore: loading: 2 GB of 4 GB (50%), 5 s",
        "moecore: loading: 4 GB of 4 GB (100%), 15 s",
    ]


def test_items_are_counted(clock, capsys) -> None:
    items = []
    for item in track_progress([1, 2, 3], "tokenizing", unit="files"):
        items.append(item)
        clock(4.0 * item)
    assert items == [1, 2, 3] and list(track_progress((n for n in range(2)), "short")) == [0, 1]
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "moecore: tokenizing: 2 files of 3 files (67%), 8 s"


def test_other_ranks_show_nothing(clock, capsys, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "1")
    for item in track_progress(range(2), "tokenizing"):
        clock(20.0 * (item + 1))
    assert capsys.readouterr().err == ""


def test_a_terminal_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tqdm")
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "DELAY_S", 0)
    monkeypatch.delenv("RANK", raising=False)
    with show_progress("saving", unit="B") as report:
        time.sleep(0.2)  # tqdm's own interval
        report(50, 100)
    assert "saving:" in terminal.getvalue() and "50.0" in terminal.getvalue()
    calls: list[str] = []
    bar = SimpleNamespace(write=lambda line, file: calls.append(line))
    monkeypatch.setitem(sys.modules, "tqdm", SimpleNamespace(tqdm=bar))
    progress.print_line("saving: 1 GB")  # above the bar of a run
    assert calls == ["moecore: saving: 1 GB"]
