"""moecore grpo learns, and goes on behind a checkpoint bit for bit."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from types import ModuleType

import pytest

from moecore.io import set_latest
from moecore.io.checkpoint.directory import directory_of
from tests.recipes.test_train import metrics

pytest.importorskip("transformers", minversion="5")
STEPS, SAVED = 30, 24


@pytest.fixture
def grpo(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, whose rank is this process alone."""
    from moecore.recipes import grpo

    return grpo


@pytest.mark.slow
@pytest.mark.nightly  # the engine has its numbers in tests/rl
def test_the_reward_rises_and_a_stopped_run_goes_on(grpo: ModuleType, tmp_path: Path) -> None:
    words = f"--steps {STEPS} --batch-size 8 --seq-len 128 --checkpoint-every {SAVED}"
    args = grpo.parse_arguments([*words.split(), "--run-dir", str(tmp_path)])
    assert grpo.run_rank(args) == 0
    straight = metrics(tmp_path)
    rewards = [line["reward"] for line in straight]
    # 128 responses of a random policy have 0.08, with a standard error of 0.02.
    assert mean(rewards[:3]) < 0.15 and min(rewards[-5:]) > 0.35
    set_latest(directory_of(tmp_path / "checkpoints", SAVED))
    assert grpo.run_rank(args) == 0
    assert metrics(tmp_path) == straight


def test_points(grpo: ModuleType) -> None:
    prompt = [3, grpo.PLUS, 4, grpo.EQUALS]
    points = {(7, grpo.END): 1, (7, 1): 0.5, (6, grpo.END): 0.5, (grpo.END,): 0, (6, 7): 0}
    assert {response: grpo.reward(prompt, list(response)) for response in points} == points
    assert grpo.until_end([7, grpo.END, 3]) == [7, grpo.END] and grpo.until_end([1, 2]) == [1, 2]
