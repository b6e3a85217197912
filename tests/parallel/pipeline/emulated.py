"""Pipeline ranks in one process: each is a copy of the model that keeps its stages."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moecore.families.family import find_family
from moecore.parallel.pipeline.layout import Stage
from moecore.parallel.pipeline.stages import StagedModel, get_hidden_shape, remove_other_stages


def staged(model: nn.Module) -> StagedModel:
    return find_family(model).make_staged_model(model)


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
            ),
        )
        layers, mtp = layers + t, mtp + m
    return stages


@dataclass(frozen=True, kw_only=True)
class Result:
    """What the last stage returned, and which shapes entered stages that run something."""

    output: Tensor
    shapes: list[tuple[int, ...]]
    ranks: Sequence[nn.Module]


def run_stages(model, layout, num_ranks, inputs, *, backward) -> Result:
    """Run the stages of a model on copies of it, of which rank r keeps r, r + num_ranks, ..."""
    ranks = [copy.deepcopy(model) for _ in range(num_ranks)]
    for rank, held in enumerate(ranks):
        remove_other_stages(staged(held), stages_of(layout)[rank::num_ranks])
    return run_on(ranks, layout, inputs, backward=backward)


def run_on(ranks, layout, inputs, *, backward) -> Result:
    """Run the stages of a model forward and, for a loss, backward.

    Args:
        ranks: models; rank r has stages r, r + len(ranks), ...
        layout: of the stages.
        inputs: of every stage.
        backward: whether the last stage returns a loss.
    """
    entered: list[Tensor | None] = []
    left: list[Tensor] = []
    shapes = []
    for stage in stages_of(layout):
        model = ranks[stage.index % len(ranks)]
        hidden = left[-1].detach().requires_grad_(backward) if left else None
        if hidden is not None and (stage.layers or stage.mtp or stage.loss):
            assert hidden.shape == get_hidden_shape(staged(model), stage, inputs)
            shapes.append(tuple(hidden.shape))
        entered.append(hidden)
        left.append(staged(model)(stage=stage, hidden=hidden, **inputs))
    if backward:
        gradient = None
        for hidden, output in zip(reversed(entered), reversed(left), strict=True):
            torch.autograd.backward(output, gradient)
            gradient = None if hidden is None else hidden.grad
    return Result(output=left[-1], shapes=shapes, ranks=ranks)


def assert_same(model: nn.Module, expected: Tensor, result: Result, *, table: str) -> None:
    """Compare with the whole model, whose backward has run.

    Args:
        model: the whole.
        expected: its loss.
        result: of the stages.
        table: the parameter that several ranks may hold, whose parts are added in another order.
    """
    gradients: dict[str, list[Tensor]] = {}
    for held in result.ranks:
        for name, param in held.named_parameters():
            if param.grad is not None:
                gradients.setdefault(name, []).append(param.grad)
    assert torch.equal(result.output, expected)
    for name, param in model.named_parameters():
        assert (param.grad is None) == (name not in gradients), name
        if param.grad is None:
            continue
        found = gradients[name]
        if name == table:
            error = (sum(found) - param.grad).abs().max()
            assert error <= 1e-6 * param.grad.abs().max(), name
        else:
            assert len(found) == 1 and torch.equal(found[0], param.grad), name
