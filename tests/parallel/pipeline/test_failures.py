"""A pipeline rank that ends in the middle of a schedule ends all others, which say what they miss.

A rank writes how it ended. One that has not ended after HARD_S is a failure.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moecore import (
    MoEConfig,
    ParallelConfig,
    PipelineConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.models import Decoder, DecoderConfig
from tests.helpers.ranks import _share_gloo_device, forks

TIMEOUT_S, HARD_S, WORLD = 12, 60, 4
LATE = 2  # the rank that ends
CONFIG = DecoderConfig(
    vocab_size=61,
    dim=32,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_seq_len=32,
    moe=MoEConfig(dim=32, hidden_dim=24, num_experts=4, top_k=2),
)


def main(rank: int, folder: Path) -> None:
    """Train until a rank ends in its second micro-batch; in a process of its own."""
    signal.alarm(HARD_S)
    torch.set_num_threads(1)
    _share_gloo_device()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    model = Decoder(CONFIG, device="meta")
    meshes = build_meshes(ParallelConfig(pp=4), "cpu")
    parallelize_moe(model, meshes, pipeline=PipelineConfig(layout="Et|t|t|tL"))
    model.to_empty(device="cpu")
    model.init_weights()
    step = TrainStep(model, num_micro_batches=6)
    ran = []

    def count(*_: object) -> None:
        ran.append(1)
        if len(ran) == 2 and rank == LATE:
            os.kill(os.getpid(), signal.SIGKILL)

    model.model.layers[rank].register_forward_pre_hook(count)
    tokens = torch.arange(13).expand(2, -1)
    error = ""
    try:
        step.forward_backward([{"tokens_BT": tokens, "labels_BT": tokens}] * 6)
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    (folder / f"rank{rank}").write_text(json.dumps(error))
    os._exit(0)  # its connections end now, whatever gloo's threads do


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[tuple[int | None, str]]]:
    """The exit code and the error of each rank."""
    folder = tmp_path_factory.mktemp("ended")
    processes = [forks().Process(target=main, args=(rank, folder)) for rank in range(WORLD)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(HARD_S)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    paths = [folder / f"rank{rank}" for rank in range(WORLD)]
    errors = [json.loads(path.read_text()) if path.exists() else "" for path in paths]
    yield list(zip(codes, errors, strict=True))


def test_no_stage_waits_for_one_that_is_gone(ended: list[tuple[int | None, str]]) -> None:
    for rank, (code, error) in enumerate(ended):
        assert code == (-signal.SIGKILL if rank == LATE else 0)
        assert error.startswith("PipelineError: " if rank != LATE else ""), error


def test_neighbours_name_stage_and_micro_batch(ended: list[tuple[int | None, str]]) -> None:
    missed = r"PipelineError: (output|gradient) of stage \d of micro-batch \d (for|from) "
    for rank in (1, 3):
        assert re.match(missed + "pipeline rank 2, which is gone", ended[rank][1]), ended[rank]
