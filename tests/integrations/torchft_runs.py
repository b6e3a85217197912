"""Replicas of two ranks that train together, the model that they train, and its steps again."""

import hashlib
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecore import ParallelConfig, TrainStep, build_meshes, parallelize_moe
from moecore.base.torch_private import get_local_tensor
from moecore.models import Decoder, preset
from moecore.train import AdamW
from tests.recipes.test_cluster import free_port

TINY = preset("tiny-shared")
MODEL = replace(TINY, num_layers=2)
NUM_RANKS, ROWS, SEQ_LEN = 2, 2, 16
SERVER = multiprocessing.get_context("forkserver")  # imports once what each rank imports
SERVER.set_forkserver_preload(["moecore.integrations.torchft", __name__])
PAUSE_STEP = 10
PATIENCE_S = 120.0  # for what takes seconds


def model_of(meshes: Any, **options: Any) -> tuple[Decoder, Any, TrainStep]:
    """Return a model in fp64, its AdamW and its step, with equal weights wherever it is made."""
    model = Decoder(MODEL)
    model.init_weights(0)
    parallelize_moe(model.double(), meshes, expert_backend="sequential")  # supports fp64
    optimizer = AdamW(model.parameters(), lr=1e-4)
    return model, optimizer, TrainStep(model, optimizer, max_norm=1.0, **options)


def batch_of(step: int, replica: int, rank: int) -> dict[str, Tensor]:
    """Return the rows of a rank of a replica in a step."""
    generator = torch.Generator().manual_seed((step * 100 + replica) * 10 + rank)
    tokens_BT = torch.randint(MODEL.vocab_size, (ROWS, SEQ_LEN + 1), generator=generator)
    return {"tokens_BT": tokens_BT[:, :-1], "labels_BT": tokens_BT[:, 1:]}


def digest(model: nn.Module, optimizer: Any) -> str:
    """Return a hash of this rank's weights, biases and moments."""
    found, tensors = hashlib.sha256(), [*model.state_dict().values()]
    for param in model.parameters():
        tensors += [optimizer.prepare_state(param)[slot] for slot in ("exp_avg", "exp_avg_sq")]
    for tensor in tensors:
        found.update(
            get_local_tensor(tensor).detach().contiguous().view(torch.uint8).numpy().tobytes()
        )
    return found.hexdigest()[:16]


def num_steps(stop: Path) -> float:
    """Return how many steps are made before all end."""
    return int(stop.read_text()) if stop.exists() else math.inf


def main(
    log: Path,
    env: dict[str, str],
    strays_after: int = -1,
    first_step: int = 0,
    timeout_s: float = 20.0,
    pause_s: float = 0.0,
) -> None:
    """Train until the step in the file "stop" beside the log, to which each attempt adds a line.

    After `strays_after` attempts it is taken for one that has made steps of its own. In step
    `PAUSE_STEP`, rank 1 sleeps for `pause_s` before it averages gradients.
    """
    from moecore.integrations.torchft import Replicas

    os.environ |= env  # what torchrun sets, and TORCHFT_LIGHTHOUSE
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, optimizer, step = model_of(
        build_meshes(ParallelConfig(ep=NUM_RANKS, edp_shard=1), "cpu")
    )
    replicas = Replicas(model, optimizer, step, first_step=first_step, timeout_s=timeout_s)
    with log.open("w", buffering=1) as lines:
        attempts = 0
        while replicas.step < num_steps(log.parent / "stop"):
            place, began = replicas.begin(), time.perf_counter()
            if attempts == strays_after:
                replicas._lineage += 1
            attempts += 1
            losses = step.forward_backward([batch_of(place.step, place.replica, rank)])
            row = {"place": list(place), "rank": rank}
            time.sleep(pause_s * (place.step == PAUSE_STEP and rank == 1))
            done = replicas.finish()
            row |= {"loss": losses.item()}
            row |= {"ended": time.time(), "seconds": time.perf_counter() - began}
            if done is not None:
                chosen = sum(int(n.sum()) for n in done.metrics.tokens_per_expert.values())
                row |= {"norm": float(done.norm.total), "chosen": chosen}
                row |= {"digest": digest(model, optimizer)}
            lines.write(json.dumps(row) + "\n")
    replicas.close()
    dist.destroy_process_group()


class Replica:
    """Two processes of one replica."""

    def __init__(self, number: int, folder: Path, lighthouse: str, *more: float) -> None:
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
        log = self.logs[0]
        return log.read_bytes().count(b'"norm"') if log.exists() else 0

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
    from torchft.coordination import LighthouseServer

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


def go_on(one: Replica, number: int) -> None:
    """Wait until a replica has made so many steps more."""
    least = one.steps + number
    wait(lambda: one.steps >= least, "no step is made")


class Repetition(NamedTuple):
    """A step that one process has repeated: its gradient norm and the losses of all ranks."""

    norm: float
    losses: list[float]


def repeat_steps(num_replicas: list[int]) -> list[Repetition]:
    """Return the steps of one process; `num_replicas` has the number of replicas of each step."""
    _, _, step = model_of(build_meshes(ParallelConfig(), "cpu"))
    repetitions = list[Repetition]()
    for number, size in enumerate(num_replicas):
        places = [(replica, rank) for replica in range(size) for rank in range(NUM_RANKS)]
        step.num_micro_batches = len(places)
        losses = step.forward_backward([batch_of(number, *place) for place in places])
        repetitions.append(Repetition(float(step.finish().norm.total), losses.tolist()))
    return repetitions
