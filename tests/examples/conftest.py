"""The scripts as modules."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
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
    monkeypatch.setattr(sys, "argv", ["examples/train.py"])  # errors begin with its name
    return importlib.import_module("train")


@pytest.fixture
def finetune(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, whose rank is this process alone."""
    monkeypatch.setattr(sys, "argv", ["examples/finetune_hf.py"])
    return importlib.import_module("finetune_hf")


@pytest.fixture
def pretrain(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, whose rank is this process alone."""
    monkeypatch.setattr(sys, "argv", ["examples/pretrain.py"])
    return importlib.import_module("pretrain")


@pytest.fixture
def one_rank(no_group_left: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process the only rank of a script."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    for name, value in ONE_RANK.items():
        monkeypatch.setenv(name, value)
