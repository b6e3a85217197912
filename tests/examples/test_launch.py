"""A rank that leaves decides how a job ends, also when others raise because it left."""

from __future__ import annotations

import os
import sys
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from launch import launch

ENVIRONMENT = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
    "WORLD_SIZE",
    "OMP_NUM_THREADS",
)


def leave_or_raise(codes: list[int | None]) -> int:
    code = codes[int(os.environ["RANK"])]
    if code is None:
        raise RuntimeError("connection closed by peer")
    return code


@pytest.fixture(autouse=True)
def a_slow_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks only when every rank has ended, and leaves the environment as it was."""
    wait = connection.wait

    def wait_for_all(sentinels: list[int], timeout: float | None = None) -> list[Any]:
        for sentinel in sentinels:
            wait([sentinel])
        return wait(sentinels, timeout)

    monkeypatch.setattr(connection, "wait", wait_for_all)
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, os.environ.get(name, "1"))


def test_the_rank_that_left_decides() -> None:
    assert launch(leave_or_raise, [None, 3], 2) == 3


def test_a_rank_that_raised_alone_is_shown() -> None:
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="closed by peer"):
        launch(leave_or_raise, [None, 0], 2)
