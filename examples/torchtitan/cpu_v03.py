"""Runs torchtitan 0.3 on CPU ranks: torchtitan.train after a few patches.

    torchrun --nproc_per_node 2 examples/torchtitan/cpu_v03.py --module MODULE --config CONFIG

torchtitan knows no CPU. What it is given here, in this process alone:
- the CPU as the device type, and the calls of a device module that torch.cpu has not;
- `barrier` without device ids, which gloo refuses;
- `all_to_all` of pieces of different sizes, which gloo has only for one tensor;
- no sleep at the end of a run.
"""

from __future__ import annotations

import time
import types
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def prepare() -> None:
    """Patch torch, then import torchtitan, then patch that."""
    if getattr(torch.cpu, "memory_stats", None) is None:
        _patch_torch()
    import torchtitan.trainer as trainer

    sleep = dict(sleep=lambda seconds: None, perf_counter=time.perf_counter)
    trainer.time = types.SimpleNamespace(**sleep)  # it sleeps 2 s at the end of each run


def _patch_torch() -> None:
    import torch._utils

    torch._utils._get_available_device_type = lambda: "cpu"
    cpu: Any = torch.cpu
    cpu.get_device_name = lambda device=None: "CPU"
    cpu.get_device_properties = lambda device=None: types.SimpleNamespace(total_memory=2**34)
    cpu.reset_peak_memory_stats = cpu.empty_cache = lambda: None
    cpu.memory_stats = lambda device=None: {}
    barrier = dist.barrier
    dist.barrier = lambda *args, device_ids=None, **kwargs: barrier(*args, **kwargs)
    dist.all_to_all = _all_to_all


def _all_to_all(outputs: list[Tensor], inputs: list[Tensor], group: Any = None) -> None:
    sizes_in, sizes_out = ([len(piece) for piece in pieces] for pieces in (inputs, outputs))
    received = torch.cat(outputs)
    dist.all_to_all_single(received, torch.cat(inputs), sizes_out, sizes_in, group=group)
    for output, piece in zip(outputs, received.split(sizes_out), strict=True):
        output.copy_(piece)


if __name__ == "__main__":
    prepare()
    from torchtitan.train import main

    main()
