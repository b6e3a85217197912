"""Spawn ranks once, run many cases in them, and bring the results home.

A test file calls `run_ranks` in one module-scoped fixture; `worker` runs on every rank and what it
returns on rank 0 comes back. A failing rank stops all of them with its traceback.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Worker = Callable[..., Any]


def run_ranks(world_size: int, worker: Worker, *args: Any, device_type: str = "cpu") -> Any:
    """Run `worker(rank, device, *args)` on `world_size` new processes; return rank 0's result."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "result.pt")
        setup = (world_size, device_type, path, worker, args)
        mp.spawn(_main, setup, nprocs=world_size)
        return torch.load(path, weights_only=False)


def _main(
    rank: int, world_size: int, device_type: str, path: str, worker: Worker, args: Any
) -> None:
    torch.set_num_threads(1)
    _start_group(rank, world_size, device_type, store=f"{path}.store")
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    result = worker(rank, device, *args)
    if rank == 0:
        torch.save(result, path)
    dist.barrier()
    # Without destructors: gloo's threads may outlive what they use and abort the process.
    os._exit(0)


def _start_group(rank: int, world_size: int, device_type: str, *, store: str) -> None:
    if device_type == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
    )
