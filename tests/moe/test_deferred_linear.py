import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moecore.kernels.experts.contract import SINK, GradTarget
from moecore.precision.apply import defer_linears

SHAPES = [(5, 8), (2, 3, 8), (0, 8), (8,)]


class Sink:
    """Keeps a gradient's computation, where it may."""

    def __init__(self, *, defers: bool) -> None:
        self.defers, self.kept = defers, list[tuple[Any, tuple[Any, ...]]]()

    def defer(self, compute: Any, *operands: Any) -> bool:
        if self.defers:
            self.kept.append((compute, operands))
        return self.defers

    def later(self) -> Tensor:
        ((compute, operands),) = self.kept
        found: Tensor = compute(*operands, GradTarget())
        return found


class Own(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def twins(*, defers: bool, bias: bool) -> tuple[nn.Linear, nn.Linear, Sink]:
    torch.manual_seed(0)
    plain, sink = nn.Linear(8, 16, bias=bias), Sink(defers=defers)
    ours = copy.deepcopy(plain)
    defer_linears(ours)
    setattr(ours.weight, SINK, lambda shape: sink)
    return plain, ours, sink


@pytest.mark.parametrize("is_cast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("defers", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_are_those_of_a_plain_linear(shape, defers, is_cast) -> None:
    for bias in (False, True):
        plain, ours, sink = twins(defers=defers, bias=bias)
        x, found = torch.randn(shape), []
        for linear in (plain, ours):
            leaf = x.clone().requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
                y = linear(leaf)
            y.float().square().sum().backward()
            found.append([y, leaf.grad, *([linear.bias.grad] if bias else [])])
        assert all(map(torch.equal, *found)) and (ours.weight.grad is None) == defers
        grad = sink.later().to(plain.weight.dtype) if defers else ours.weight.grad
        assert torch.equal(grad, plain.weight.grad)


def test_frozen_weights_and_inputs_without_gradients_cost_no_product() -> None:
    _, ours, sink = twins(defers=True, bias=True)
    ours(torch.randn(5, 8)).sum().backward()
    assert len(sink.kept) == 1
    ours.weight.requires_grad_(False)
    x = torch.randn(5, 8, requires_grad=True)
    ours(x).sum().backward()
    assert len(sink.kept) == 1 and x.grad is not None


def test_names_and_copies_stay_and_own_forwards_too() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Own(8, 4, bias=False))
    names, x = list(model.state_dict()), torch.randn(3, 8)
    want = model(x)
    defer_linears(model)
    defer_linears(model)  # nothing more
    assert [type(m).__name__ for m in model] == ["ProductLinear", "Own"]
    assert list(model.state_dict()) == names and torch.equal(copy.deepcopy(model)(x), want)


def test_compilers_see_a_plain_linear() -> None:
    plain, ours, sink = twins(defers=True, bias=True)
    x = torch.randn(3, 8)
    y = torch.compile(ours, backend="aot_eager", fullgraph=True)(x)
    y.sum().backward()
    plain(x).sum().backward()
    assert torch.equal(y, plain(x)) and not sink.kept
    assert torch.equal(ours.weight.grad, plain.weight.grad)
