"""One rank of a replica that trains with others, and the model that it trains."""

import hashlib
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecore import ParallelConfig, TrainStep, build_meshes, parallelize_moe
from moecore.base.torch_private import get_local_tensor
from moecore.models import Decoder, preset
from moecore.train import AdamW

TINY = preset("tiny-shared")
MODEL = replace(TINY, num_layers=2)
NUM_RANKS, ROWS, SEQ_LEN = 2, 2, 16


def model_of(meshes: Any, **options: Any) -> tuple[Decoder, Any, TrainStep]:
    """Return a model, its AdamW and its step, with equal weights wherever it is made."""
    model = Decoder(MODEL)
    model.init_weights(0)
    parallelize_moe(model, meshes, dispatch="auto")
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


def main(log: Path, env: dict[str, str], strays_after: int = -1, first_step: int = 0) -> None:
    """Train until the step in the file "stop" beside the log, to which each attempt adds a line.

    After `strays_after` attempts it is taken for one that has made steps of its own.
    """
    from moecore.integrations.torchft import Replicas

    os.environ |= env  # what torchrun sets, and TORCHFT_LIGHTHOUSE
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, optimizer, step = model_of(
        build_meshes(ParallelConfig(ep=NUM_RANKS, edp_shard=1), "cpu")
    )
    replicas = Replicas(model, optimizer, step, first_step=first_step, timeout_s=20)
    with log.open("w", buffering=1) as lines:
        attempts = 0
        while replicas.step < num_steps(log.parent / "stop"):
            place = replicas.begin()
            if attempts == strays_after:
                replicas._lineage += 1
            attempts += 1
            losses = step.forward_backward([batch_of(place.step, place.replica, rank)])
            done = replicas.finish()
            row = {"place": list(place), "rank": rank, "loss": losses.item()}
            if done is not None:
                chosen = sum(int(n.sum()) for n in done.metrics.tokens_per_expert.values())
                row |= {"norm": float(done.norm.total), "chosen": chosen}
                row |= {"digest": digest(model, optimizer)}
            lines.write(json.dumps(row) + "\n")
    replicas.close()
    dist.destroy_process_group()
