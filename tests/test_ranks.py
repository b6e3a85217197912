"""What `run_ranks` promises to the tests that use it."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.helpers.ranks import run_ranks


def look(rank: int, device: torch.device) -> list[tuple[int, str | None, int]]:
    found: list[tuple[int, str | None, int]] = [(0, None, 0)] * dist.get_world_size()
    dist.all_gather_object(found, (rank, os.environ.get("MOECORE_TEST"), hash("w13")))
    return found


def fail(rank: int, device: torch.device, bad: int) -> None:
    if rank == bad:
        raise ValueError(f"rank {rank} is bad")
    time.sleep(600)  # stopped before; in a collective, its own error may come first


@pytest.mark.parametrize("environ", ["one", "another"])
def test_ranks_know_the_environment_and_one_hashes_otherwise(
    environ: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOECORE_TEST", environ)
    ranks, environs, hashes = zip(*run_ranks(3, look), strict=True)
    assert ranks == (0, 1, 2) and set(environs) == {environ}
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize("bad", [0, 1])
def test_a_failing_rank_stops_all_with_its_traceback(bad: int) -> None:
    with pytest.raises(Exception, match=rf"Process {bad} terminated(?s:.*)rank {bad} is bad"):
        run_ranks(2, fail, bad)
