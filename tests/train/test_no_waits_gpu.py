from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moecore import (
    BalanceConfig,
    CapacityConfig,
    DispatchOptions,
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
from tests.helpers.waits import SLEEP, launched

pytestmark = pytest.mark.gpu

BALANCE = BalanceConfig(micro_batch_coef=0.01, bias_update_rate=0.01)
MOE = MoEConfig(dim=256, hidden_dim=384, num_experts=8, top_k=2, expert_bias=True, balance=BALANCE)
SIZES = dict(vocab_size=128, dim=256, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64)
CONFIG = DecoderConfig(**SIZES, max_seq_len=128, moe=MOE)
BF16 = FSDPOptions(param_dtype=torch.bfloat16)
DELAYED = Recipe(scaling="tensorwise", amax_history=4, grad_format="e5m2")
CASES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "two micro-batches": {"number": 2},
    "graph": {"is_graphed": True},
    "inputs of the host": {"inputs_on": "cpu"},
    "experts resharded": {"fsdp": replace(BF16, experts_strategy="optim_grads_params")},
    "capacity": {"moe": replace(MOE, capacity=CapacityConfig(factor=1.25))},
    "blockwise": {"precision": "blockwise"},
    "delayed scaling": {"precision": Precision(recipe=DELAYED, roles=("attention", "experts"))},
    "fp16": {
        "fsdp": FSDPOptions(param_dtype=torch.float16),
        "scale": DynamicLossScale(initial=2.0**8),
    },
}


def build(device, *, number=1, scale=None, moe=MOE, **options) -> tuple[Decoder, TrainStep]:
    world = torch.distributed.get_world_size()
    if world > 1:
        room = NVLinkOptions(row_factor=4.0)
        options["dispatch"] = DispatchOptions(name="nvlink", nvlink=room)
    model = Decoder(replace(CONFIG, moe=moe), device="meta")
    parallelize_moe(model, build_meshes(ParallelConfig(ep=world)), **{"fsdp": BF16} | options)
    model.to_empty(device=device)
    model.init_weights(0)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    how = {"max_norm": 1.0, "num_micro_batches": number, "loss_scale": scale}
    return model, TrainStep(model, optimizer, **how)


def inputs_on(device: torch.device | str) -> tuple[Tensor, Tensor]:
    tokens_BT = torch.randint(0, CONFIG.vocab_size, (2, 65), device=device)
    return tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous()


def worker(rank: int, device: torch.device, name: str) -> None:
    case = dict(CASES[name])
    is_graphed, number = case.pop("is_graphed", False), case.get("number", 1)
    inputs = inputs_on(case.pop("inputs_on", device))
    model, step = build(device, **case)

    def forward_backward(tokens_BT: Tensor, labels_BT: Tensor) -> None:
        with step.micro_batch():
            step.scale_loss(model(tokens_BT, labels_BT) / number).backward()

    graph = GraphedForwardBackward(forward_backward, model) if is_graphed else None
    for done in range(6):
        # Kernels are compiled, records made, memory allocated and graphs captured by first steps.
        watched = launched if done > 3 else nullcontext
        for _ in range(number):
            with watched("a micro-batch"):
                (graph or forward_backward)(*inputs)
        with watched("finish()"):
            result = step.finish()
        assert not result.is_skipped, "else nothing was computed"
    if graph is not None:
        graph.close()


def sleeping_backward(rank: int, device: torch.device) -> None:
    model, step = build(device, number=2)
    tokens_BT, labels_BT = inputs_on(device)
    ends = []

    def sleep(_: Tensor) -> None:
        torch.cuda._sleep(SLEEP)
        ends.append(torch.cuda.current_stream().record_event())

    model.register_forward_hook(lambda module, args, loss: loss.register_hook(sleep) and None)
    for _ in range(3):
        step.forward_backward([dict(tokens_BT=tokens_BT, labels_BT=labels_BT)] * 2)
        is_ahead = not ends[-1].query()
        step.finish()
    assert is_ahead, "forward_backward() has waited for the last backward"


@pytest.mark.parametrize("name", CASES)
def test_one_rank(name: str) -> None:
    run_ranks(1, worker, name, device_type="cuda")


@pytest.mark.gpus(2)
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_over_nvlink(name: str) -> None:
    run_ranks(2, worker, name, device_type="cuda")


@pytest.mark.gpus(2)
def test_a_step_that_may_run_again_waits_for_no_backward() -> None:
    run_ranks(2, sleeping_backward, device_type="cuda")
