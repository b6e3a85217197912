"""Auxiliary losses where ranks or micro-batches have no tokens: means over those that have some."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecore import MoELayer, ParallelConfig, TrainStep, build_meshes, parallelize_moe
from moecore.moe.balance import LOSS_NAMES
from tests.helpers.ranks import run_ranks
from tests.moe.moe_cases import BASE, leaves, make_layer
from tests.moe.reference import moe_reference
from tests.moe.test_balance import only

pytestmark = pytest.mark.slow

WORLD, COEF = 3, 0.5
# Whether each rank has tokens, in each micro-batch.
CASES: dict[str, list[tuple[bool, ...]]] = {
    "no rank": [(False, False, False)],
    "two ranks, all later": [(False, False, True), (False, False, False)],
    "both": [(False, False, False), (True, False, True), (True, True, False)],
}


class Model(nn.Module):
    """A layer alone, so that a loss of 0 leaves the auxiliary losses."""

    def __init__(self, layer: MoELayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, padding_mask_BT: Tensor | None = None) -> Tensor:
        return self.layer(x, padding_mask_BT).sum() * 0


def tokens(rank: int, place: int) -> Tensor:
    return torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(10 * place + rank))


def expected(name: str, case: list[tuple[bool, ...]]) -> tuple[float, Tensor]:
    """Return the mean of the losses of what has tokens, and the router's gradient."""
    config = replace(BASE, balance=only(name, COEF))
    params, by_step = leaves(make_layer(config)), []
    seen_E = torch.zeros(config.num_experts)
    for place, have in enumerate(case):
        outs = [moe_reference(tokens(r, place), params, config) for r in range(WORLD) if have[r]]
        seen_E = seen_E + sum(out.counts_E for out in outs)
        share_E = seen_E / seen_E.sum().clamp(min=1)
        losses = [
            COEF * config.num_experts * (share_E * out.mean_scores_E).sum()
            if name == "global_batch"
            else out.losses[name]
            for out in outs
        ]
        by_step += [torch.stack(losses).mean()] if losses else []
    if not by_step:
        return 0.0, torch.zeros_like(params["router.weight"])
    mean = torch.stack(by_step).mean()
    mean.backward()
    return float(mean), params["router.weight"].grad


def found_of(rank: int, name: str, case: list[tuple[bool, ...]], how: str, loss: Any) -> Any:
    config = replace(BASE, balance=only(name, COEF))
    model: Any = Model(make_layer(config))
    parallelize_moe(model, build_meshes(ParallelConfig(), "cpu"), loss=loss)
    step = TrainStep(model, num_micro_batches=len(case))
    batches = []
    for place, have in enumerate(case):
        x = tokens(rank, place)
        if how == "rows" and not have[rank]:
            x = x[:0]
        batches.append(dict(x=x, padding_mask_BT=torch.full(x.shape[:2], not have[rank])))
    if how == "rows":
        step.announce(batches)
        for batch in batches:
            with step.micro_batch():
                model(batch["x"]).backward()
    else:
        step.forward_backward(batches)
    grad = model.layer.router.weight.grad
    grad = torch.zeros(()) if grad is None else grad.full_tensor()
    return float(step.finish().metrics.aux_losses["layer"][LOSS_NAMES.index(name)]), grad


def worker(rank: int, _device: torch.device) -> Any:
    wrong = []
    for name in LOSS_NAMES:
        for label, case in CASES.items():
            value, grad = expected(name, case)
            ways = [("padding", "mean"), ("rows", "sum")]
            for how, loss in ways if label == "both" else ways[:1]:
                got, got_grad = found_of(rank, name, case, how, loss)
                near = abs(got - value) <= 1e-5 * abs(value)
                near &= bool((got_grad - grad).abs().max() <= 1e-5 * grad.abs().max())
                wrong += [] if near else [(name, label, how, got, value)]
    every: list[Any] = [None] * WORLD
    dist.all_gather_object(every, wrong)
    return every


def test_what_has_no_tokens_weighs_nothing() -> None:
    assert run_ranks(WORLD, worker) == [[]] * WORLD
