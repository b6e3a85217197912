from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecore import (
    FSDPOptions,
    MoEConfig,
    MoELayer,
    ParallelConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.base.rank_checks import gather_objects
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.slow

WORLD, DIM = 2, 8
ODD = 1  # the rank that does something else
DATA, EXPERTS = ParallelConfig(), ParallelConfig(ep=2)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.more = nn.Linear(DIM, width)  # which makes units of unequal size
        self.moe = MoELayer(MoEConfig(dim=DIM, hidden_dim=8, num_experts=4, top_k=2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(torch.tanh(self.linear(x))) + self.more(x).sum(-1, keepdim=True)


class Model(nn.Module):
    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layers = nn.Linear(DIM, DIM), nn.ModuleList(map(Block, widths))

    def forward(self, x: Tensor, order: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        x = self.first(x)
        for place in order:
            x = self.layers[place](x)
        return x.square().mean()


class Rank:
    """A model on one rank, which has trained a step of two micro-batches."""

    def __init__(self, parallel: ParallelConfig, widths: tuple[int, ...], **options: Any) -> None:
        self.is_odd, self.model = dist.get_rank() == ODD, Model(widths)
        fsdp = FSDPOptions(**options)
        parallelize_moe(self.model, build_meshes(parallel, "cpu"), fsdp=fsdp)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, foreach=False)
        self.step = TrainStep(self.model, optimizer, num_micro_batches=2)
        self.train()

    def train(self, numbers: tuple[int, ...] = (0, 1), **more: Any) -> None:
        self.step.forward_backward([{"x": torch.randn(3, DIM), **more} for _ in numbers])
        self.step.finish()


def number_set(rank: Rank) -> None:
    if rank.is_odd:
        rank.step.num_micro_batches = 1
    rank.train((0,) if rank.is_odd else (0, 1))


def evaluates(rank: Rank) -> None:
    if rank.is_odd:
        rank.step.compute_losses([{"x": torch.randn(3, DIM)}])
    rank.train()


def in_eval_mode(rank: Rank) -> None:
    rank.model.train(not rank.is_odd)
    rank.train()


def autocast(rank: Rank) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=rank.is_odd):
        rank.train()


def freezes(rank: Rank) -> None:
    rank.model.layers[1].linear.requires_grad_(not rank.is_odd)
    rank.train()


def other_dtype(rank: Rank) -> None:
    if rank.is_odd:
        moe = rank.model.layers[1].moe
        moe.register_forward_pre_hook(lambda _, args: (args[0].bfloat16(),))
    rank.train()


def freezes_all(rank: Rank) -> None:
    rank.model.layers[1].requires_grad_(not rank.is_odd)
    rank.train()


def other_order(rank: Rank) -> None:
    rank.train(order=(0, 2, 1) if rank.is_odd else (0, 1, 2))


EQUAL = "other order"  # of units with equal sizes: others end the process
WHOLE = dict(dense_strategy="no_shard", embedding_strategy="no_shard")
# What the odd rank does, and what the line names.
CASES: dict[str, tuple[Callable[[Rank], None], ParallelConfig, dict[str, Any], str]] = {
    "number set": (number_set, DATA, {}, "micro-batch in the all-gather of the model (1 of 2 on"),
    "number set, whole": (number_set, DATA, WHOLE, "in the mean of 2 ranks) must be the same"),
    "evaluates": (evaluates, DATA, {}, "is_grad_enabled() in the all-gather of the model (True on"),
    "evaluates, whole": (evaluates, EXPERTS, WHOLE, "in the exchange of layers.0.moe (True on"),
    "in eval mode": (in_eval_mode, DATA, {}, "model.training in the all-gather of the model (True"),
    "autocast": (autocast, DATA, {}, "autocast in the all-gather of the model (None on rank 0"),
    "autocast, whole": (
        autocast,
        EXPERTS,
        WHOLE,
        "the dtype of tokens in the exchange of layers.0.moe",
    ),
    "other dtype": (
        other_dtype,
        EXPERTS,
        {},
        "the exchange of layers.1.moe (torch.float32 on rank 0",
    ),
    "freezes": (freezes, DATA, {}, "requires_grad in the all-gather of layers.1 (5 parameters on"),
    "freezes, whole": (freezes, DATA, WHOLE, "requires_grad of layers.1.linear.weight"),
    "freezes, replicas": (freezes, ParallelConfig(dp_replicate=2), {}, "layers.1.linear.weight"),
    "freezes all, whole": (freezes_all, DATA, WHOLE, "requires_grad of layers.1.moe.experts.w1"),
    "other order": (other_order, DATA, {}, "(layers.2 on rank 0, layers.1 on rank 1)"),
}


def worker(rank, _device, names, widths) -> list[dict[str, str]]:
    errors = {}
    for name in names:
        act, parallel, options, _ = CASES[name]
        try:
            act(Rank(parallel, widths, **options))
        except ValueError as error:
            errors[name] = str(error)
    return gather_objects(errors)


@pytest.fixture(scope="module")
def found() -> dict[str, list[dict[str, str]]]:
    """Over gloo with units of unequal size, and where these differ in order with equal ones."""
    names = [name for name in CASES if name != EQUAL]
    unequal = run_ranks(WORLD, worker, names, (8, 24, 40), over_gloo=True)
    equal = run_ranks(WORLD, worker, [EQUAL], (8, 8, 8), over_gloo=True)
    return {name: equal if name == EQUAL else unequal for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_name_what_differs(name: str, found: dict[str, list[dict[str, str]]]) -> None:
    """Before gloo gets collectives that differ: it would end the process, or hand out values."""
    for of_rank in found[name]:
        error = of_rank[name]
        assert CASES[name][-1] in error, error
        assert "must be the same on all ranks that share it: " in error and "\n" not in error
