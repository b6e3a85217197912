"""Pipeline ranks in one process: each is a copy of the model that keeps its stages."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moecore.pipeline.layout import Stage
from moecore.pipeline.stages import hidden_shape, run_stage, take_stages


def stages_of(layout: str) -> list[Stage]:
    """Return the stages of a layout of single letters, such as "Ett|tmL"."""
    stages: list[Stage] = []
    layers = mtp = 0
    for index, letters in enumerate(layout.split("|")):
        t, m = letters.count("t"), letters.count("m")
        stages.append(
            Stage(
                index=index,
                embedding="E" in letters,
                layers=tuple(range(layers, layers + t)),
                mtp=tuple(range(mtp, mtp + m)),
                loss="L" in letters,
            )
        )
        layers, mtp = layers + t, mtp + m
    return stages


@dataclass(frozen=True, kw_only=True)
class Result:
    """What the last stage returned, and gradients by global name, one for each holder."""

    output: Tensor
    gradients: dict[str, list[Tensor]]
    ranks: list[nn.Module]


def run_stages(
    model: nn.Module, layout: str, num_ranks: int, inputs: Mapping[str, Any], *, backward: bool
) -> Result:
    """Run the stages of a model forward and, for a loss, backward.

    Args:
        model: the whole; it is copied.
        layout: rank r has stages r, r + num_ranks, ...
        num_ranks: pipeline ranks.
        inputs: of every stage.
        backward: whether the last stage returns a loss.
    """
    stages = stages_of(layout)
    ranks = [copy.deepcopy(model) for _ in range(num_ranks)]
    for rank, held in enumerate(ranks):
        take_stages(held, stages[rank::num_ranks])
    entered: list[Tensor | None] = []
    left: list[Tensor] = []
    for stage in stages:
        hidden = left[-1].detach().requires_grad_(backward) if left else None
        if hidden is not None and (stage.layers or stage.mtp or stage.loss):
            assert hidden.shape == hidden_shape(ranks[stage.index % num_ranks], stage, inputs)
        entered.append(hidden)
        left.append(run_stage(ranks[stage.index % num_ranks], stage, hidden, inputs))
    if backward:
        gradient = None
        for hidden, output in zip(reversed(entered), reversed(left), strict=True):
            torch.autograd.backward(output, gradient)
            gradient = None if hidden is None else hidden.grad
    gradients: dict[str, list[Tensor]] = {}
    for held in ranks:
        for name, param in held.named_parameters():
            if param.grad is not None:
                gradients.setdefault(name, []).append(param.grad)
    return Result(output=left[-1], gradients=gradients, ranks=ranks)


def assert_same(model: nn.Module, expected: Tensor, result: Result, *, table: str) -> None:
    """Compare with the whole model, whose backward has run.

    Args:
        model: the whole.
        expected: its loss.
        result: of the stages.
        table: the parameter that several ranks may hold, whose parts are added in another order.
    """
    assert torch.equal(result.output, expected)
    for name, param in model.named_parameters():
        assert (param.grad is None) == (name not in result.gradients), name
        if param.grad is None:
            continue
        found = result.gradients[name]
        if name == table:
            error = (sum(found) - param.grad).abs().max()
            assert error <= 1e-6 * param.grad.abs().max(), name
        else:
            assert len(found) == 1 and torch.equal(found[0], param.grad), name
