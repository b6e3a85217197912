"""The scripts as modules."""

import importlib
from types import ModuleType
from typing import Any

import pytest

ONE_RANK = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}


def make_script_fixture(name: str) -> Any:
    """Return a fixture that is a script, whose only rank is this process."""

    @pytest.fixture(name=name)
    def script(one_rank: None) -> ModuleType:
        return importlib.import_module(f"moecore.recipes.{name}")

    return script


train, pretrain, finetune, grpo = map(
    make_script_fixture, ("train", "pretrain", "finetune", "grpo")
)


@pytest.fixture
def one_rank(no_group_left: None, monkeypatch: Any) -> None:
    """Make this process the only rank of a script."""
    for name, value in ONE_RANK.items():
        monkeypatch.setenv(name, value)
