"""parallelize_moe on ranks that communicate: groups, what must agree, models without MoE layers."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moecore import Meshes, ParallelConfig, build_meshes
from tests.ranks import run_ranks

WORLD = 4
TIMEOUT = timedelta(seconds=77)


def timeouts() -> dict[str, timedelta]:
    """Every group of three foldings, with the time that its collectives wait."""
    cpu = torch.device("cpu")
    dist.group.WORLD._get_backend(cpu)._set_default_timeout(TIMEOUT)  # as init_process_group gives
    found = {}
    for p in (
        ParallelConfig(tp=2, ep=2, etp=2),
        ParallelConfig(pp=2, tp=2, ep=2),
        ParallelConfig(cp=2, tp=2, edp_replicate=2, ep=2),
    ):
        for name, group in groups_of(build_meshes(p, "cpu")).items():
            found[f"{name} of {p}"] = group._get_backend(cpu).options._timeout
    return found


def groups_of(meshes: Meshes) -> dict[str, dist.ProcessGroup]:
    found = {
        f"{view} {dim}": getattr(meshes, view).get_group(dim)
        for view in ("dense", "expert", "dense_fsdp", "expert_fsdp")
        for dim in getattr(meshes, view).mesh_dim_names
    }
    joined = ("dispatch_group", "micro_batch_group", "stage_group")
    return found | {n: g for n in joined if (g := getattr(meshes, n)) is not None}


CASES: dict[str, Callable[[], Any]] = {"timeouts": timeouts}


def worker(rank: int, device: torch.device) -> dict[str, Any]:
    return {name: case() for name, case in CASES.items()}


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return run_ranks(WORLD, worker)


def test_every_group_takes_the_timeout_of_the_default_group(results: dict[str, Any]) -> None:
    names = {name.split(" of ")[0] for name in results["timeouts"]}
    assert {"dispatch_group", "micro_batch_group", "stage_group", "expert_fsdp edp_shard"} <= names
    assert set(results["timeouts"].values()) == {TIMEOUT}
