import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

from moecore.io import latest, set_latest
from moecore.recipes.data import RandomSteps, StepBatch
from moecore.recipes.rollback import LeftOut, SpikeStreak
from moecore.train.spikes import SpikeOptions
from tests.recipes.launched import metrics

RUN = (
    "--preset tiny-qwen3 --tokens random --num-layers 1 --batch-size 2 --seq-len 16 --steps 28 "
    "--sample-every 0 --checkpoint-every 10 --skip-spikes-rollback-after 2 --lr 1e-2 "
    "--skip-spikes-factor 4 --lr-schedule constant --warmup-steps 0"
)


def plant(monkeypatch: Any, spikes: set[int], *, has_spikes: bool) -> None:
    """Let batches be one token that repeats; those of `spikes` stay random, or are not there."""
    read = RandomSteps.next_batch

    def next_batch(self: Any, num_micro_batches: int | None = None) -> StepBatch:
        batch = read(self, num_micro_batches)
        while self._step in spikes and not has_spikes:
            batch = read(self, num_micro_batches)
        if self._step not in spikes:
            batch.tokens_ABT.fill_(3 + self._step % 2)
            batch.labels_ABT.fill_(3 + self._step % 2)
        return batch

    monkeypatch.setattr(RandomSteps, "next_batch", next_batch)


def run(train: ModuleType, run_dir: Path, more: str = "") -> int:
    return train.run_rank(
        train.parse_arguments([*f"{RUN} {more}".split(), "--run-dir", str(run_dir)])
    )


def test_a_run_after_a_rollback_is_a_run_without_the_data(train, tmp_path, monkeypatch, capsys):
    """Also where it is killed behind the rollback, and continues from the checkpoint before."""
    with monkeypatch.context() as patches:
        plant(patches, {24, 25}, has_spikes=True)
        assert run(train, tmp_path / "run") == 0
    line = "rollback to step 20 because of spikes: leaving out batches 24 to 25"
    assert capsys.readouterr().out.count(line) == 1
    lines = metrics(tmp_path / "run")
    assert lines[19].pop("left_out") == [[24, 25]]
    assert [n["step"] for n in lines] == list(range(1, 29)) and not any(n["skipped"] for n in lines)
    with monkeypatch.context() as patches:
        plant(patches, {24, 25}, has_spikes=False)
        assert run(train, tmp_path / "without") == 0
    assert lines == metrics(tmp_path / "without")
    newest = latest(tmp_path / "run" / "checkpoints")
    assert newest is not None and newest.name == "step-000028"
    set_latest(newest.with_name("step-000020"))
    with monkeypatch.context() as patches:
        plant(patches, {24, 25}, has_spikes=True)
        assert run(train, tmp_path / "run") == 0
    assert "rollback" not in capsys.readouterr().out
    again = metrics(tmp_path / "run")
    assert again[19].pop("left_out") == [[24, 25]] and again == lines


def test_spikes_without_an_end_end_the_run(train, tmp_path, monkeypatch, capsys) -> None:
    plant(monkeypatch, set(range(23, 99)), has_spikes=True)
    assert run(train, tmp_path) == 1
    said = capsys.readouterr()
    assert "spikes must end after 3 rollbacks to step 20" in said.err
    assert all(f"leaving out batches {n} to {n + 1}\n" in said.out for n in (23, 25, 27))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[19]["left_out"] == [[23, 24], [25, 26], [27, 28]]


def test_without_a_checkpoint_a_run_goes_on(train, tmp_path, monkeypatch) -> None:
    plant(monkeypatch, {24, 25}, has_spikes=True)
    assert run(train, tmp_path, "--checkpoint-every 28") == 0
    lines = metrics(tmp_path)
    assert [n["step"] for n in lines] == list(range(1, 29)) and lines[23]["loss"] > 3
    assert not any("left_out" in n for n in lines)
    newest = latest(tmp_path / "checkpoints")
    assert newest is not None and newest.name == "step-000028"


def test_rollbacks_need_checkpoints(train: ModuleType, tmp_path: Path, capsys: Any) -> None:
    assert run(train, tmp_path, "--checkpoint-every 0") == 2
    said = capsys.readouterr().err
    assert "--skip-spikes-rollback-after (2) must go with --checkpoint-every > 0: set" in said


def test_spikes_are_counted_in_a_row() -> None:
    options = SpikeOptions(window=16, factor=4.0, rollback_after=3)
    calm = [1.0 + 0.01 * (i % 4) for i in range(16)]
    streak, lengths = SpikeStreak(options, calm), []
    losses = [1.0, 2.0, math.nan, 1.01, 2.0, 1.0, 1.02, 1.5]
    for step, loss in enumerate(losses):
        streak.record(step, {"loss": loss, "grad_norm": 1.0, "skipped": float(step == 5)})
        lengths.append(streak.length)
    assert lengths == [0, 1, 2, 0, 1, 2, 0, 1] and not streak.is_persistent
    overflow = {"loss": 1.0, "grad_norm": math.inf, "skipped": 1.0}
    streak.record(8, overflow | {"loss_scale": 2.0})  # fp16 lowers its scale
    assert streak.length == 0
    for step in (9, 10, 11, 12):
        streak.record(step, overflow)
    assert (streak.length, streak.last_step, streak.is_persistent) == (3, 11, True)
    for none in (SpikeStreak(None), SpikeStreak(SpikeOptions())):
        none.record(1, overflow)
        assert not none.is_persistent


def test_the_batches_of_steps() -> None:
    """The example of the file."""
    left_out = LeftOut([[22, 23]])
    assert [left_out.find_batch(step) for step in (1, 21, 22, 23)] == [1, 21, 24, 25]
    assert [left_out.count_before(step) for step in (1, 21, 22, 23)] == [0, 0, 2, 0]
    twice = LeftOut([[22, 23], [24, 24], [1, 1]])
    assert [twice.find_batch(step) for step in (1, 20, 21)] == [2, 21, 25]
    assert [twice.count_before(step) for step in (1, 20, 21)] == [1, 0, 3]
