import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from moecore.recipes import goodput
from moecore.recipes.goodput import WALL_TIME, WallTime
from moecore.recipes.report import RunReport
from moecore.recipes.train import TrainConfig
from tests.recipes import test_pretrain

corpus = test_pretrain.corpus


def test_the_uses_of_two_starts_add_up(tmp_path: Path, monkeypatch: Any) -> None:
    """A start of 10 s with 30 s of steps; after 50 s another one, which repeats 12 s of them."""
    clock = [1000.0]
    monkeypatch.setattr(goodput.time, "time", lambda: clock[0])
    monkeypatch.setattr(goodput, "find_process_start", lambda: 990.0)
    first = WallTime(tmp_path / WALL_TIME)
    first.add("steps", 30.0)
    first.add("evaluate", 5.0)
    clock[0] = 1040.0
    first.save()
    monkeypatch.setattr(goodput, "find_process_start", lambda: 1090.0)
    clock[0] = 1100.0
    second = WallTime(tmp_path / WALL_TIME, lost_seconds=12.0, load_seconds=4.0)
    second.add("steps", 22.0)
    clock[0] = 1130.0
    assert second.seconds == {
        "down": 50.0,
        "start": 16.0,
        "load": 4.0,
        "steps": 40.0,
        "evaluate": 5.0,
        "lost steps": 12.0,
    }
    assert second.compute_goodput() == pytest.approx(40 / 140)
    assert second.format() == (
        "goodput 28.6% of 140 s: down 50.0 s, steps 40.0 s, start 16.0 s, other 13.0 s, "
        "lost steps 12.0 s, evaluate 5.0 s, load 4.0 s"
    )
    second.save()
    monkeypatch.setattr(goodput, "find_process_start", lambda: 1090.0)
    clock[0] = 1150.0  # a later stage of the same process, whose last entry was at 1130
    third = WallTime(tmp_path / WALL_TIME)
    assert third.seconds["start"] == 36.0 and third.seconds["down"] == 50.0


@pytest.mark.parametrize("content", ["", "{", "[]", '{"began": 1}', '{"seconds": 3}', "x" * 70000])
def test_a_damaged_file_begins_anew(tmp_path: Path, content: str) -> None:
    (tmp_path / WALL_TIME).write_text(content)
    wall_time = WallTime(tmp_path / WALL_TIME)
    assert 0 < time.time() - wall_time.began < 1e5 and wall_time.seconds["down"] == 0


@pytest.mark.slow
def test_a_run_and_its_continuation_have_one_wall_time(corpus: Path, tmp_path: Path) -> None:
    words = test_pretrain.words(corpus, tmp_path)
    said = test_pretrain.run_in_forks(words)
    assert re.search(r"goodput \d+\.\d% of \d+ s: ", said)
    saved: dict[str, Any] = json.loads((tmp_path / WALL_TIME).read_text())
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    total = sum(line["step_seconds"] for line in lines)
    assert saved["seconds"]["steps"] == pytest.approx(total)
    assert {"start", "save", "evaluate"} <= saved["seconds"].keys()
    assert all(0 < line["goodput"] <= 1 for line in lines)
    words[words.index("--steps") + 1] = str(test_pretrain.STEPS + 2)
    test_pretrain.run_in_forks(words)
    continued = json.loads((tmp_path / WALL_TIME).read_text())
    assert continued["began"] == saved["began"]
    assert continued["seconds"]["steps"] > saved["seconds"]["steps"]
    assert continued["seconds"]["lost steps"] == saved["seconds"]["load"] == 0
    assert 0 < continued["seconds"]["load"] < continued["seconds"]["start"]


def test_the_error_that_ends_a_run_is_not_replaced(tmp_path: Path, monkeypatch: Any) -> None:
    """A full disk may end the run and refuse the file of the wall time, too."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    report = RunReport(TrainConfig(run_dir=tmp_path), start=0)
    monkeypatch.setattr(WallTime, "save", refuse)
    with pytest.raises(RuntimeError, match="the step failed"), report:
        raise RuntimeError("the step failed")
