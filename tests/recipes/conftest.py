"""The scripts as modules."""

from __future__ import annotations

from types import ModuleType

import pytest

ONE_RANK = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}


@pytest.fixture
def train(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, whose rank is this process alone."""
    from moecore.recipes import train

    return train


@pytest.fixture
def finetune(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, whose rank is this process alone."""
    from moecore.recipes import finetune

    return finetune


@pytest.fixture
def pretrain(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, whose rank is this process alone."""
    from moecore.recipes import pretrain

    return pretrain


@pytest.fixture
def one_rank(no_group_left: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process the only rank of a script."""
    for name, value in ONE_RANK.items():
        monkeypatch.setenv(name, value)
