"""Replicas of two ranks that are killed at random: no step is lost, and all have the same state.

The steps that were made are made again by one process, of the same batches.
"""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("torchft", reason="the replicas are torchft's, which extra `torchft` has")

from benchmarks.kills import Plan, count_problems, read_newest_step, run_replicas

from moecore import ParallelConfig, TrainStep, build_meshes, parallelize_moe
from moecore.models import Decoder
from moecore.train import AdamW, QKClip
from tests.integrations.torchft_runs import (
    MODEL,
    PAUSE_STEP,
    Replica,
    go_on,
    lighthouse,
    lines_of,
    wait,
)


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_replicas_that_are_killed_lose_no_step(num_replicas: int, tmp_path: Path) -> None:
    """The run also checks that each step was made once, and that its replicas had the same bits."""
    plan = Plan(steps=40, every=(5, 15), num_replicas=num_replicas, timeout_s=20.0, seed=0)
    figures = run_replicas(plan, tmp_path)
    assert figures["steps"] >= plan.steps and figures["kills"] >= 2 and figures["timeouts"] == 0
    assert 0 < figures["full_steps"] < figures["steps"]
    assert count_problems(figures) == 0
    # A kill costs each replica that stays one attempt at most.
    assert figures["lost_steps"] <= figures["kills"] * (num_replicas - 1)


@pytest.mark.slow
def test_a_replica_that_made_steps_apart_ends(tmp_path: Path) -> None:
    """The first two have a step in common that the third one does not know."""
    with lighthouse() as address:
        replicas = [Replica(i, tmp_path, address, -1, 5) for i in range(2)]
        try:
            wait(lambda: all(one.steps for one in replicas), "a replica does not come")
            stray = Replica(2, tmp_path, address, 3, 5)
            replicas.append(stray)
            wait(lambda: all(rank.exitcode == 1 for rank in stray.ranks), "a stray goes on")
            go_on(replicas[0], 3)
            assert all(rank.exitcode is None for one in replicas[:2] for rank in one.ranks)
        finally:
            for one in replicas:
                one.stop()
    rows = [row for one in replicas for log in one.logs for row in lines_of(log)]
    made = [row["place"] for row in rows if "norm" in row]
    strayed = 1 + max(step for step, _, size in made if size == 3)
    assert {size for step, _, size in made if step == strayed} == {2}
    assert min(step for step, _, _ in made) == 5, "steps go on behind those of a checkpoint"
    digests = defaultdict[Any, set[str]](set)
    for row in rows:
        if "norm" in row:
            digests[row["place"][0], row["rank"]].add(row["digest"])
    assert all(len(found) == 1 for found in digests.values())


@pytest.mark.slow
def test_a_rank_that_waits_longer_than_another_does_not_end_its_replica(tmp_path: Path) -> None:
    """Rank 0 misses the lost replica 3 seconds before rank 1 begins to wait for it."""
    with lighthouse() as address:
        stays, leaves = (Replica(i, tmp_path, address, -1, 0, 6.0, (3, 1000)[i]) for i in range(2))
        try:
            wait(lambda: read_newest_step([leaves]) == PAUSE_STEP - 1, "no step is made")
            time.sleep(1)
            leaves.ranks[0].kill()  # rank 1 sleeps, and keeps its connections
            wait(
                lambda: read_newest_step([stays]) > PAUSE_STEP + 3,
                "the other replica does not go on",
            )
            assert all(rank.exitcode is None for rank in stays.ranks)
        finally:
            stays.stop(), leaves.stop()


@pytest.mark.parametrize("aborted", [None, RuntimeError("aborted")])
def test_an_aborted_group_makes_no_stray(monkeypatch, aborted):
    """Over NCCL what a dead replica leaves behind is read as its lineage."""
    from moecore.integrations.torchft import Replicas

    here, nothing = object.__new__(Replicas), lambda *_: None
    how = dict(errored=nothing, report_error=nothing, should_commit=lambda: False)
    here._manager, here._step = SimpleNamespace(**how), SimpleNamespace(drop=nothing)
    here._group, here._lineage = SimpleNamespace(errored=lambda: aborted), 5
    monkeypatch.setattr(Replicas, "_gather_lineages", lambda _: ([0, 5], [0, 1]))
    monkeypatch.setattr(Replicas, "_average_gradients", nothing)
    monkeypatch.setattr(Replicas, "_reduce_counts", nothing)
    if aborted is not None:
        assert here.finish() is None
    else:
        with pytest.raises(RuntimeError, match="must be those of the others"):
            here.finish()


@pytest.mark.parametrize("needed", [0.0, 2.0])
def test_rows_that_do_not_fit_skip_the_step_of_all(monkeypatch, needed):
    """Else their replica alone would skip it, and the others step by its gradients."""
    from moecore.integrations.torchft import Replicas

    capacity = SimpleNamespace(
        owners=[None, SimpleNamespace(compute_min_capacity_factor=lambda _: torch.tensor(needed))]
    )
    here, sent = object.__new__(Replicas), list[torch.Tensor]()
    here._records = [SimpleNamespace(capacity=None), SimpleNamespace(capacity=capacity)]
    here._model, here._device = nn.Linear(2, 2), torch.device("cpu")
    here._model(torch.ones(1, 2)).sum().backward()
    monkeypatch.setattr(here, "_all_reduce_over_replicas", lambda tensors, op: sent.extend(tensors))
    here._average_gradients()
    assert all(grad.isfinite().all() for grad in sent) == (needed == 0.0) and len(sent) == 3


def test_qk_clip_is_refused() -> None:
    from moecore.integrations.torchft import Replicas

    here = object.__new__(Replicas)
    here._model = Decoder(MODEL)
    QKClip(here._model)
    with pytest.raises(ValueError, match=r"^QKClip must not watch the model of Replicas"):
        here.begin()


def test_a_sum_of_losses_is_refused() -> None:
    from moecore.integrations.torchft import Replicas

    model = Decoder(MODEL)
    parallelize_moe(model, build_meshes(ParallelConfig(), "cpu"), loss="sum")
    optimizer = AdamW(model.parameters())
    with pytest.raises(ValueError, match=r"^loss \('sum'\) of parallelize_moe must be 'mean'"):
        Replicas(model, optimizer, TrainStep(model, optimizer))
