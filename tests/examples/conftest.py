"""The script as a module."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def train(no_group_left: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script, whose rank is this process alone."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    train = importlib.import_module("train")

    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    yield train
