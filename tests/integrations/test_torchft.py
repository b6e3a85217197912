"""Replicas of two ranks that are killed at random: no step is lost, and all have the same state.

The steps that were made are made again by one process, of the same batches.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("torchft", reason="the replicas are torchft's, which extra `torchft` has")

from torchft.coordination import LighthouseServer

from moecore import ParallelConfig, TrainStep, build_meshes, parallelize_moe
from moecore.models import Decoder
from moecore.train import AdamW, QKClip
from tests.integrations.torchft_runs import MODEL, NUM_RANKS, ROWS, SEQ_LEN, batch_of, main
from tests.recipes.test_cluster import free_port

SERVER = multiprocessing.get_context("forkserver")  # imports once what each rank imports
SERVER.set_forkserver_preload(["moecore.integrations.torchft", main.__module__])
STEPS = int(os.environ.get("MOECORE_REPLICA_STEPS", "40"))
KILLS = max(2, STEPS // 40)
PATIENCE_S = 120.0  # for what takes seconds


class Replica:
    """Two processes of one replica."""

    def __init__(self, number: int, folder: Path, lighthouse: str, *more: int) -> None:
        self.logs = [folder / f"replica{number}-{rank}.jsonl" for rank in range(NUM_RANKS)]
        env = {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
        env |= {"TORCHFT_LIGHTHOUSE": lighthouse, "WORLD_SIZE": str(NUM_RANKS)}
        self.ranks = [
            SERVER.Process(target=main, args=(log, env | {"RANK": str(rank)}, *more))
            for rank, log in enumerate(self.logs)
        ]
        for rank in self.ranks:
            rank.start()

    @property
    def steps(self) -> int:
        """Steps that its first rank has made."""
        return sum("norm" in row for row in lines_of(self.logs[0]))

    def stop(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.join()


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a log; the last one of a killed rank may be cut."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


@contextmanager
def lighthouse() -> Iterator[str]:
    server = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=20_000, heartbeat_timeout_ms=1000
    )
    try:
        yield server.address()
    finally:
        server.shutdown()


def wait(until: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not until():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def run(folder: Path, num_replicas: int, kills: int, seed: int) -> list[dict[str, Any]]:
    """Train while replicas, or one of their ranks, are killed and come back; return all lines."""
    choose, everyone = random.Random(seed), list[Replica]()
    with lighthouse() as address:
        try:
            everyone += [Replica(i, folder, address) for i in range(num_replicas)]
            here = everyone.copy()
            for _ in range(kills):
                wait(lambda: all(one.steps for one in here), "a replica does not come")
                victim = here.pop(choose.randrange(num_replicas))
                go_on(here[0], choose.randint(1, STEPS // (2 * kills)))
                for rank in choose.choice([[0], [1], [0, 1]]):
                    victim.ranks[rank].kill()
                time.sleep(choose.uniform(0, 0.5))
                victim.stop()  # as torchrun does when a rank has died
                go_on(here[0], choose.randint(2, 4))
                here.append(Replica(len(everyone), folder, address))
                everyone.append(here[-1])
            wait(lambda: all(one.steps for one in here), "a replica does not come")
            last = max(row["place"][0] for row in lines_of(here[0].logs[0]))
            draft = folder / "draft"
            draft.write_text(str(max(STEPS, last + 30)))
            draft.rename(folder / "stop")
            ranks = [rank for one in here for rank in one.ranks]
            wait(lambda: all(rank.exitcode is not None for rank in ranks), "ranks do not end")
            assert not any(rank.exitcode for rank in ranks)
        finally:
            for one in everyone:
                one.stop()
    return [row for one in everyone for log in one.logs for row in lines_of(log)]


def go_on(one: Replica, number: int) -> None:
    """Wait until a replica has made so many steps more."""
    least = one.steps + number
    wait(lambda: one.steps >= least, "no step is made")


def replayed(made: dict[int, int]) -> list[tuple[float, list[float]]]:
    """Return norm and losses of steps with so many replicas, made by one process."""
    model = Decoder(MODEL)
    model.init_weights(0)
    parallelize_moe(model, build_meshes(ParallelConfig(), "cpu"))
    step = TrainStep(model, AdamW(model.parameters(), lr=1e-4), max_norm=1.0)
    found = []
    for number in sorted(made):
        step.num_micro_batches = made[number] * NUM_RANKS
        places = [(r, rank) for r in range(made[number]) for rank in range(NUM_RANKS)]
        losses = step.forward_backward([batch_of(number, *place) for place in places])
        done = step.finish()
        found.append((float(done.norm.total), losses.tolist()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_replicas_that_are_killed_lose_no_step(num_replicas: int, tmp_path: Path) -> None:
    rows = run(tmp_path, num_replicas, KILLS, seed=num_replicas)
    made = [row for row in rows if "norm" in row]
    sizes, digests, norms = (defaultdict[Any, set[Any]](set) for _ in range(3))
    for row in made:
        (number, _, size), rank = row["place"], row["rank"]
        sizes[number].add(size)
        digests[number, rank].add(row["digest"])
        norms[number].add((row["norm"], row["chosen"]))
    # Each step was made once, by one set of replicas, and all of them then had the same bits.
    assert len(sizes) >= STEPS and sorted(sizes) == list(range(len(sizes)))
    assert all(len(found) == 1 for found in (*sizes.values(), *digests.values(), *norms.values()))
    replicas_of = {number: max(found) for number, found in sizes.items()}
    assert num_replicas - 1 in replicas_of.values() and num_replicas in replicas_of.values()
    layers = MODEL.num_layers - len(MODEL.dense_layers)
    choices = layers * MODEL.moe.top_k * ROWS * SEQ_LEN * NUM_RANKS
    for number, (norm, losses) in enumerate(replayed(replicas_of)):
        ((found, chosen),) = norms[number]
        assert found == pytest.approx(norm, rel=1e-4) and chosen == choices * replicas_of[number]
        for row in made:
            if row["place"][0] == number:
                own = losses[row["place"][1] * NUM_RANKS + row["rank"]]
                assert row["loss"] == pytest.approx(own, rel=1e-4)
    # A kill costs each rank that stays one attempt at most.
    dropped = [row for row in rows if "norm" not in row]
    assert len(dropped) <= KILLS * (num_replicas - 1) * NUM_RANKS, dropped


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
