"""Ctrl-C and SIGTERM: ranks end their step and save, and the same command continues."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moecore.io import latest
from moecore.recipes.interrupts import StopRequest, noting_signals
from moecore.recipes.resume import continuation
from tests.recipes.launched import launched
from tests.recipes.test_train import MEASURED

RUN = (
    "--preset tiny-qwen3 --tokens random --layers 1 --batch-size 1 --seq-len 16 --sample-bytes 0 "
    "--checkpoint-every 100000 --lr-schedule constant --warmup-steps 0"
)


def train(run_dir: Path, steps: int) -> int:
    words = [*RUN.split(), "--steps", str(steps), "--run-dir", str(run_dir)]
    run_rank = importlib.import_module("moecore.recipes.train").run_rank
    code, _ = launched(run_rank, "train.py", words, run_dir.with_suffix(".txt"))
    return code


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [{k: v for k, v in json.loads(n).items() if k not in MEASURED} for n in lines]


def send(number: int, run_dir: Path) -> None:
    """Send a signal to this process, which launches, once three steps are done."""
    end = time.monotonic() + 200
    while time.monotonic() < end and len((run_dir / "metrics.jsonl").read_bytes().splitlines()) < 3:
        time.sleep(0.02)
    os.kill(os.getpid(), number)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_has_saved_its_last_step(number: int, tmp_path: Path) -> None:
    run_dir, unbroken = tmp_path / "run", tmp_path / "unbroken"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").touch()
    sender = threading.Thread(target=send, args=(number, run_dir), daemon=True)
    sender.start()
    assert train(run_dir, 100_000) == 128 + number
    sender.join()
    done = len(lines_of(run_dir))
    saved = latest(run_dir / "checkpoints")
    assert saved is not None and saved.name == f"step-{done:06}" and 3 <= done < 10_000
    assert train(run_dir, done + 2) == train(unbroken, done + 2) == 0
    assert lines_of(run_dir) == lines_of(unbroken)


def test_a_second_interrupt_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with noting_signals() as request:
            assert request.number == 0
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            assert (request.number, codes) == (signal.SIGTERM, [])
            os.kill(os.getpid(), signal.SIGINT)
            assert codes == [130]
        assert signal.getsignal(signal.SIGTERM) == handlers[1]
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a shell's background job
        with noting_signals() as request:
            os.kill(os.getpid(), signal.SIGINT)
            assert request.number == 0
    finally:
        signal.signal(signal.SIGINT, handlers[0])
    thread = threading.Thread(target=lambda: noting_signals().__enter__(), daemon=True)
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
def test_a_stopped_run_names_its_command(
    words: list[str], command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", words)
    line = continuation(SimpleNamespace(run_dir=tmp_path))  # type: ignore[arg-type]
    assert line == f"there is no checkpoint yet, so {command} starts from the beginning"
