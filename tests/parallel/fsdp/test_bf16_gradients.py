from typing import Any

import pytest
import torch
from torch import Tensor

from moecore import FSDPOptions, ParallelConfig, TrainStep, build_meshes, parallelize_moe
from moecore.base.torch_private import get_local_tensor
from moecore.models import Decoder
from moecore.moe.router import Router
from moecore.train import AdamW
from tests.helpers.ranks import ranks_fixture
from tests.parallel.small_decoder import small_decoder

MICRO_BATCHES = 3
CONFIG = small_decoder(32, 24)
# Whole experts, whose gradients go through sinks; units, reduced per micro-batch or at the end.
LAYOUTS: dict[str, tuple[ParallelConfig, dict[str, Any]]] = {
    "whole": (ParallelConfig(ep=4), {}),
    "sharded": (ParallelConfig(ep=2), {}),
    "gathered once": (ParallelConfig(ep=2), {"dense_strategy": "optim"}),
    "reduced in bf16": (ParallelConfig(ep=2), {"reduce_dtype": torch.bfloat16}),
}


def make(layout: str, dtype: torch.dtype) -> Decoder:
    """Return a model that computes in bf16, with weights of a dtype that hold bf16 values."""
    parallel, options = LAYOUTS[layout]
    model = Decoder(CONFIG)
    model.init_weights()
    model.bfloat16().to(dtype)
    for module in model.modules():
        if isinstance(module, Router):
            module.float()
    fsdp = FSDPOptions(param_dtype=torch.bfloat16, **options)
    return parallelize_moe(model, build_meshes(parallel, "cpu"), fsdp=fsdp)


def gradients(layout: str, dtype: torch.dtype, rank: int) -> list[dict[str, Tensor]]:
    """Return this rank's parts after each micro-batch of a step, and step."""
    model = make(layout, dtype)
    optimizer = AdamW(model.parameters(), master_remainder=dtype == torch.bfloat16)
    owner = TrainStep(model, optimizer, num_micro_batches=MICRO_BATCHES)
    found = []
    for n in range(MICRO_BATCHES):
        g = torch.Generator().manual_seed(10 * n + rank)
        tokens = torch.randint(0, CONFIG.vocab_size, (2, 13), generator=g)
        with owner.micro_batch():
            (model(tokens[:, :-1], tokens[:, 1:].contiguous()) / MICRO_BATCHES).backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append({name: get_local_tensor(grad).clone() for name, grad in grads.items()})
    for name, param in model.named_parameters():
        want = torch.float32 if ".router." in name else dtype
        assert param.dtype == get_local_tensor(param.grad).dtype == want, name
    assert not owner.finish().is_skipped
    return found


def worst_errors(rank: int, device: torch.device) -> dict[str, float]:
    """Return the largest error over its bound, by layout."""
    found = {}
    for layout in LAYOUTS:
        wide, narrow = (gradients(layout, t, rank) for t in (torch.float32, torch.bfloat16))
        worst = torch.zeros(())
        for name, total in wide[-1].items():
            sums = [step[name] for step in wide if name in step]
            parts = [b - a for a, b in zip([torch.zeros_like(total), *sums], sums, strict=False)]
            # Each part and each sum is rounded once, by 2**-8 of it.
            size = sum(part.abs() for part in (*parts, *sums))
            if layout == "reduced in bf16":  # what each of four ranks adds partly cancels
                size = size + 4 * 3 * size.max()
            apart = (narrow[-1][name].float() - total).abs()
            worst = torch.maximum(worst, (apart / (size * 2.0**-8 + 1e-12)).max())
        torch.distributed.all_reduce(worst, op=torch.distributed.ReduceOp.MAX)
        found[layout] = worst.item()
    return found


worst = ranks_fixture(4, worst_errors)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_lose_what_adding_in_bf16_loses(worst: dict[str, float], layout: str) -> None:
    assert 0 < worst[layout] <= 1
