"""Runs torchtitan 0.2.2 on CPU ranks: torchtitan.train after a few patches.

    torchrun --nproc_per_node 4 examples/torchtitan/cpu.py --job.config_file FILE.toml

torchtitan knows no CPU. What it is given here, in this process alone:
- the CPU as the device type, and the calls of a device module that torch.cpu has not;
- `torch.histc` of whole numbers, which the CPU lacks: the same counts through float64;
- `barrier` without device ids, which gloo refuses;
- attention of DTensors cut by heads, on the local heads: the CPU's kernel has no DTensor rule;
- stock's permutation for EP in its own CPU code instead of Triton's;
- no sleep at the end of a run.
"""

from __future__ import annotations

import time
import types
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard


def prepare() -> None:
    """Patch torch, then import torchtitan, then patch that."""
    if getattr(torch.cpu, "memory_stats", None) is None:
        _patch_torch()
    import torchtitan.models.moe.utils as moe_utils
    import torchtitan.train as train

    fill = moe_utils.generate_permute_indices
    if not isinstance(fill, partial):
        moe_utils.generate_permute_indices = partial(fill, use_cpu=True)
    sleep = dict(sleep=lambda seconds: None, perf_counter=time.perf_counter)
    train.time = types.SimpleNamespace(**sleep)  # it sleeps 2 s at the end of each run


def _patch_torch() -> None:
    import torch._utils

    torch._utils._get_available_device_type = lambda: "cpu"
    cpu: Any = torch.cpu
    cpu.get_device_name = lambda device=None: "CPU"
    cpu.get_device_properties = lambda device=None: types.SimpleNamespace(total_memory=2**34)
    cpu.reset_peak_memory_stats = cpu.empty_cache = lambda: None
    cpu.memory_stats = lambda device=None: {}
    histc, barrier = torch.histc, dist.barrier

    @wraps(histc)
    def histc_of_ints(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if x.is_floating_point():
            return histc(x, *args, **kwargs)
        return histc(x.double(), *args, **kwargs).to(x.dtype)

    attention = F.scaled_dot_product_attention

    @wraps(attention)
    def attention_of_heads(q: Any, k: Any, v: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(q, DTensor):
            return attention(q, k, v, **kwargs)
        assert q.placements == k.placements == v.placements == (Shard(1),)
        out = attention(q.to_local(), k.to_local(), v.to_local(), **kwargs)
        return DTensor.from_local(out, q.device_mesh, q.placements)

    F.scaled_dot_product_attention = attention_of_heads
    torch.histc = histc_of_ints
    dist.barrier = lambda *args, device_ids=None, **kwargs: barrier(*args, **kwargs)


if __name__ == "__main__":
    prepare()
    from torchtitan.train import Trainer, main

    main(Trainer)
