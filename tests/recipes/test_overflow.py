import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from moecore.moe.dispatch.exchange import ExchangeError
from tests.recipes.launched import launched
from tests.recipes.odd_ranks import overflow, run_overflowing, too_many_rows

ARGUMENTS = (
    "--preset tiny-qwen3 --tokens random --num-layers 1 --batch-size 1 --seq-len 16 --steps 3"
    " --row-factor 1.05 --sample-every 0"
)
NEEDED = r"--row-factor \(1.05\) must be >= 1.37 for its expert rows of one layer: start again"


def test_one_rank_overflows_and_both_end(tmp_path: Path) -> None:
    words = [*ARGUMENTS.split(), "--run-dir", str(tmp_path / "run")]
    code, said = launched(run_overflowing, "train.py", words, tmp_path / "said.txt")
    assert code == 1, said
    line = rf"rank 1: {NEEDED} from the last checkpoint with --row-factor 1.37 or more"
    errors = [text for text in said.splitlines() if "error" in text]
    assert len(errors) == 1 and re.fullmatch(rf".*moecore: error: {line}", errors[0]), said
    assert "Traceback" not in said


def arguments(run_dir: Path) -> list[str]:
    return [*ARGUMENTS.split(), "--checkpoint-every", "0", "--run-dir", str(run_dir)]


def fail(train: ModuleType, monkeypatch: Any, error: Exception) -> None:
    build = train.build_job

    def build_job(args: Any) -> Any:
        job = build(args)
        overflow(job, error)
        return job

    monkeypatch.setattr(train, "build_job", build_job)


def test_a_late_rank_is_one_line_too(train, tmp_path, monkeypatch, capsys) -> None:
    fail(train, monkeypatch, ExchangeError("rank 3 must come to a dispatch"))
    assert train.run_rank(train.parse_arguments(arguments(tmp_path))) == 1
    assert "error: rank 0: rank 3 must come to a dispatch: start again\n" in capsys.readouterr().err


def test_a_bug_keeps_its_traceback(train: ModuleType, tmp_path: Path, monkeypatch: Any) -> None:
    fail(train, monkeypatch, RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        train.run_rank(train.parse_arguments(arguments(tmp_path)))


def test_an_overflow_of_the_last_step_is_found(train, tmp_path, monkeypatch) -> None:
    """Its first poll is that of the only step, its second the check at the end."""
    fail(train, monkeypatch, too_many_rows())
    args = train.parse_arguments([*arguments(tmp_path), "--steps", "1"])
    assert train.run_rank(args) == 1
