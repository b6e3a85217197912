import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moecore.io import latest
from moecore.recipes.launch import StopRequest, launch, record_stop_signals
from moecore.recipes.resume import describe_continuation
from tests.recipes.launched import MEASURED, forked_ranks, launched

RUN = (
    "--preset tiny-qwen3 --tokens random --num-layers 1 --batch-size 1 --seq-len 16 "
    "--sample-every 0 "
    "--checkpoint-every 100000 --lr-schedule constant --warmup-steps 0"
)


@pytest.fixture(autouse=True)
def interrupts_are_not_ignored() -> Iterator[None]:
    """A background job of a shell ignores SIGINT, and so would the launcher in a test of it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def train(run_dir: Path, steps: int) -> int:
    words = [*RUN.split(), "--steps", str(steps), "--run-dir", str(run_dir)]
    run_rank = importlib.import_module("moecore.recipes.train").run_rank
    code, _ = launched(run_rank, "train.py", words, run_dir.with_suffix(".txt"))
    return code


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [{k: v for k, v in json.loads(n).items() if k not in MEASURED} for n in lines]


def send(number: int, run_dir: Path, before: int) -> None:
    """Send a signal to this process, which launches, once three more steps are done."""
    end, metrics = time.monotonic() + 200, run_dir / "metrics.jsonl"
    while time.monotonic() < end and len(metrics.read_bytes().splitlines()) < before + 3:
        time.sleep(0.02)
    os.kill(os.getpid(), number)


@pytest.mark.slow
def test_a_run_that_is_stopped_has_saved_its_last_step(tmp_path: Path) -> None:
    run_dir, unbroken = tmp_path / "run", tmp_path / "unbroken"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").touch()
    done = 0
    for number in (signal.SIGINT, signal.SIGTERM):
        args = (number, run_dir, before := done)
        sender = threading.Thread(target=send, args=args, daemon=True)
        sender.start()
        assert train(run_dir, 3000) == 128 + number
        sender.join()
        done = len(lines_of(run_dir))
        saved = latest(run_dir / "checkpoints")
        assert saved is not None and saved.name == f"step-{done:06}"
        assert before + 3 <= done < 3000
    assert train(run_dir, done + 2) == train(unbroken, done + 2) == 0
    assert lines_of(run_dir) == lines_of(unbroken)


def finish_or_stop(folder: Path) -> int:
    """Be a rank that notes signals and ends with a code; rank 0 ends before rank 1."""
    rank = int(os.environ["RANK"])
    with record_stop_signals() as request:
        (folder / str(rank)).touch()
        while not request.number:
            time.sleep(0.02)
        time.sleep(rank / 2)
        (folder / f"{rank} has ended").touch()
    return int((folder / "code").read_text())


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (130, 143), (143, 143)])
def test_the_launcher_waits_for_ranks_that_save(code: int, expected: int, tmp_path: Path) -> None:
    (tmp_path / "code").write_text(str(code))
    before = signal.getsignal(signal.SIGTERM)

    def send() -> None:
        end = time.monotonic() + 100
        while time.monotonic() < end:
            has_begun = all((tmp_path / rank).exists() for rank in "01")
            if has_begun and signal.getsignal(signal.SIGTERM) is not before:
                os.kill(os.getpid(), signal.SIGTERM)
                return
            time.sleep(0.02)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    with forked_ranks():
        assert launch(finish_or_stop, tmp_path, 2) == expected
    sender.join()
    assert all((tmp_path / f"{rank} has ended").exists() for rank in "01")


def test_a_second_interrupt_does_not_wait(monkeypatch: Any) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with record_stop_signals() as request:
            assert request.number == 0
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            assert (request.number, codes) == (signal.SIGTERM, [])
            os.kill(os.getpid(), signal.SIGINT)
            assert codes == [130]
        assert signal.getsignal(signal.SIGTERM) == handlers[1]
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a shell's background job
        with record_stop_signals() as request:
            os.kill(os.getpid(), signal.SIGINT)
            assert request.number == 0
    finally:
        signal.signal(signal.SIGINT, handlers[0])
    thread = threading.Thread(target=lambda: record_stop_signals().__enter__(), daemon=True)
    thread.start()
    thread.join()
    assert StopRequest().number == 0


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["/bin/moecore", "pretrain", "a b.toml"], "moecore pretrain 'a b.toml'"),
        (["/x/moecore/__main__.py", "train"], "moecore train"),
        (["/bin/pytest", "x"], "the same command"),
    ],
)
def test_a_stopped_run_names_its_command(words, command, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", words)
    line = describe_continuation(SimpleNamespace(run_dir=tmp_path, checkpoint_dir=None))  # type: ignore[arg-type]
    assert line == f"there is no checkpoint yet, so {command} starts from the beginning"
