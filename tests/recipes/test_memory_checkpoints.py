"""A run continues from the newest checkpoint, in the memory of its host or in its directory."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from moecore.io import latest, set_latest
from moecore.io.checkpoint.host_memory import HOST_VARIABLE
from moecore.recipes import resume
from moecore.recipes.data import RandomSteps, StepBatch
from tests.recipes.launched import metrics

RUN = (
    "--preset tiny-qwen3 --tokens random --num-layers 1 --batch-size 2 --seq-len 16 --steps 24 "
    "--sample-every 0 --checkpoint-every 10"
)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of this host's files in memory."""
    host = f"runs-{uuid.uuid4().hex[:8]}"
    monkeypatch.setenv(HOST_VARIABLE, host)
    folder = Path(f"/dev/shm/moecore-{os.getuid()}-{host}")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def run(train: ModuleType, run_dir: Path, more: str = "--memory-checkpoint-every 4") -> int:
    words = [*f"{RUN} {more}".split(), "--run-dir", str(run_dir)]
    return int(train.run_rank(train.parse_arguments(words)))


def fail_at(monkeypatch: Any, step: int) -> None:
    """End the process of a run when it reads the batch of a step."""
    read = RandomSteps.next_batch

    def next_batch(self: Any, num_micro_batches: int | None = None) -> StepBatch:
        if self._step + 1 == step:
            raise KeyboardInterrupt
        return read(self, num_micro_batches)

    monkeypatch.setattr(RandomSteps, "next_batch", next_batch)


@pytest.fixture
def killed(train: ModuleType, tmp_path: Path, memory: Path, monkeypatch: Any) -> Path:
    """A run that ended in step 19, after step 10 in its directory and step 16 in memory."""
    with monkeypatch.context() as patches, pytest.raises(KeyboardInterrupt):
        fail_at(patches, 19)
        run(train, tmp_path / "run")
    assert [path.name for path in memory.glob("*/step-*")] == ["step-000016"]
    return tmp_path / "run"


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the checkpoints that runs load."""
    names = list[str]()
    load = resume.load
    monkeypatch.setattr(resume, "load", lambda p, *a, **k: names.append(p.name) or load(p, *a, **k))
    return names


def test_the_run_goes_on_from_memory_with_the_same_numbers(
    train: ModuleType, killed: Path, memory: Path, tmp_path: Path, loaded: list[str]
) -> None:
    assert run(train, killed) == 0
    assert loaded == ["step-000016"]
    assert run(train, tmp_path / "straight", "") == 0
    assert metrics(killed) == metrics(tmp_path / "straight")
    assert not list(memory.glob("*/step-*")), "a finished run frees the memory"
    newest = latest(killed / "checkpoints")
    assert newest is not None and newest.name == "step-000024"


def test_files_that_are_lost_lead_to_the_directory(
    train: ModuleType, killed: Path, memory: Path, loaded: list[str]
) -> None:
    next(memory.rglob("*.safetensors")).unlink()
    assert run(train, killed) == 0 and loaded == ["step-000010"]
    assert [line["step"] for line in metrics(killed)] == list(range(1, 25))


@pytest.mark.parametrize("case", ["set_latest", "new directory", "without the option"])
def test_memory_is_not_taken(
    case: str, train: ModuleType, killed: Path, memory: Path, loaded: list[str]
) -> None:
    """After a rollback by hand, for another run in the same directory, and unless it is asked."""
    if case == "set_latest":
        set_latest(killed / "checkpoints" / "step-000010")
    if case == "new directory":
        shutil.rmtree(killed)
    assert run(train, killed, *[""] * (case == "without the option")) == 0
    assert loaded == ["step-000010"] * (case != "new directory")
