"""A step that runs on a GPU is launched without a wait: the host is a step ahead."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moecore import (
    BalanceConfig,
    CapacityConfig,
    FSDPOptions,
    MoEConfig,
    NVLinkOptions,
    ParallelConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.base.options.precision import Precision, Recipe
from moecore.models import Decoder, DecoderConfig
from moecore.train import AdamW, GraphedForwardBackward
from moecore.train.loss_scale import DynamicLossScale
from tests.helpers.ranks import run_ranks
from tests.helpers.waits import launched

pytestmark = pytest.mark.gpu

BALANCE = BalanceConfig(micro_batch_coef=0.01, bias_update_rate=0.01)
MOE = MoEConfig(dim=256, hidden_dim=384, num_experts=8, top_k=2, expert_bias=True, balance=BALANCE)
CONFIG = DecoderConfig(
    vocab_size=128,
    dim=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_seq_len=128,
    moe=MOE,
)
BF16 = FSDPOptions(param_dtype=torch.bfloat16)
DELAYED = Recipe(scaling="tensorwise", amax_history=4, grad_format="e5m2")
CASES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "two micro-batches": {"micro_batches": 2},
    "graph": {"is_graphed": True},
    "inputs of the host": {"inputs_on": "cpu"},
    "experts resharded": {"fsdp": replace(BF16, experts_strategy="optim_grads_params")},
    "capacity": {"moe": replace(MOE, capacity=CapacityConfig(factor=1.25))},
    "blockwise": {"precision": "blockwise"},
    "delayed scaling": {"precision": Precision(recipe=DELAYED, roles=("attention", "experts"))},
    "fp16": {
        "fsdp": FSDPOptions(param_dtype=torch.float16),
        "loss_scale": DynamicLossScale(initial=2.0**8),
    },
}


def worker(rank: int, device: torch.device, name: str) -> None:
    case = {"fsdp": BF16} | CASES[name]
    is_graphed, inputs_on = case.pop("is_graphed", False), case.pop("inputs_on", device)
    scale, number = case.pop("loss_scale", None), case.pop("micro_batches", 1)
    config = replace(CONFIG, moe=case.pop("moe", MOE))
    world = torch.distributed.get_world_size()
    if world > 1:
        case |= {"dispatcher": "nvlink", "nvlink": NVLinkOptions(row_factor=4.0)}
    model = Decoder(config, device="meta")
    parallelize_moe(model, build_meshes(ParallelConfig(ep=world)), **case)
    model.to_empty(device=device)
    model.init_weights(0)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    step = TrainStep(model, optimizer, max_norm=1.0, num_micro_batches=number, loss_scale=scale)
    tokens_BT = torch.randint(0, config.vocab_size, (2, 65), device=inputs_on)
    inputs = tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous()

    def forward_backward(tokens_BT: Tensor, labels_BT: Tensor) -> None:
        with step.micro_batch():
            step.scale(model(tokens_BT, labels_BT) / number).backward()

    graph = GraphedForwardBackward(forward_backward, model) if is_graphed else None
    for done in range(6):
        # Kernels are compiled, records made, memory allocated and graphs captured by first steps.
        watched = launched if done > 3 else nullcontext
        for _ in range(number):
            with watched("a micro-batch"):
                (graph or forward_backward)(*inputs)
        with watched("finish()"):
            result = step.finish()
        assert not result.skipped, "else nothing was computed"
    if graph is not None:
        graph.close()


@pytest.mark.parametrize("name", CASES)
def test_one_rank(name: str) -> None:
    run_ranks(1, worker, name, device_type="cuda")


@pytest.mark.gpus(2)
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_over_nvlink(name: str) -> None:
    run_ranks(2, worker, name, device_type="cuda")
