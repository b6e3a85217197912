"""On a GPU: what offload leaves there, and how long it takes.

python -m pytest -m gpu tests/train/memory
"""

import gc
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from moecore import FSDPOptions, MoEConfig, ParallelConfig, TrainStep, build_meshes, parallelize_moe
from moecore.base.torch_private import get_local_tensor
from moecore.models import Decoder, DecoderConfig
from moecore.train import AdamW, TrainingOffload

pytestmark = pytest.mark.gpu
SIZES = dict(vocab_size=32_000, dim=2048, num_layers=8, num_heads=16, num_kv_heads=4, head_dim=128)
MOE = MoEConfig(dim=2048, hidden_dim=2048, num_experts=16, top_k=2)
CONFIG = DecoderConfig(**SIZES, moe=MOE)


def reserved() -> int:
    """Bytes of the device that torch has in this process; other processes do not count."""
    torch.cuda.synchronize()
    return torch.cuda.memory_reserved()


def seconds(action: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    action()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def bus_seconds(num_bytes: int) -> tuple[float, float]:
    """How long pinned copies of so many bytes take to the host and back, without anything else."""
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    out = min(seconds(lambda: host.copy_(device, non_blocking=True)) for _ in range(4))
    back = min(seconds(lambda: device.copy_(host, non_blocking=True)) for _ in range(4))
    return out * num_bytes / 2**30, back * num_bytes / 2**30


def test_offload_frees_the_device_at_the_speed_of_the_bus(no_group_left: None) -> None:
    def run(config: DecoderConfig = CONFIG, *, cycles: bool = False) -> list[torch.Tensor]:
        model = Decoder(config, device="meta")
        options = FSDPOptions(param_dtype=torch.bfloat16)
        parallelize_moe(model, build_meshes(ParallelConfig(), "cuda"), fsdp=options)
        model.to_empty(device="cuda").init_weights(seed=3)
        optimizer = AdamW(model.parameters(), lr=1e-3)
        step = TrainStep(model, optimizer, max_norm=1.0)
        offload = TrainingOffload(model, optimizer)
        losses = []
        for number in range(4):
            generator = torch.Generator("cuda").manual_seed(number)
            tokens = torch.randint(0, 32_000, (2, 513), generator=generator, device="cuda")
            with step.micro_batch():
                loss = model(tokens[:, :-1], tokens[:, 1:])
                loss.backward()
            step.finish()
            losses.append(loss.detach())
            del loss
            if cycles:
                before, out = torch.cuda.memory_allocated(), seconds(offload.offload)
                left, back = reserved() - reserved_before, seconds(offload.onload)
        if cycles:
            moved = sum(p.numel() for p in model.parameters()) * 12  # weights and two moments
            bus_out, bus_back = bus_seconds(moved)
            print(f"{before / 1e9:.2f} GB; {left / 2**20:.0f} MiB left")
            print(f"out {out:.3f} s of {bus_out:.3f}, back {back:.3f} s of {bus_back:.3f}")
            assert before > 15e9 and left <= 300 * 2**20
            assert out <= 1.2 * bus_out and back <= 1.2 * bus_back
        return [*losses, *(get_local_tensor(p.detach()).clone() for p in model.parameters())]

    run(replace(CONFIG, num_layers=1))  # libraries reserve their workspaces, which stay
    gc.collect()
    torch.cuda.empty_cache()
    reserved_before = reserved()
    found = run(cycles=True)
    torch.cuda.empty_cache()
    wanted = run()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
