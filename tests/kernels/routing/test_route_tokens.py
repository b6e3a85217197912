from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moecore.kernels.routing import route_tokens as module
from moecore.kernels.routing.route import route
from moecore.kernels.routing.route_tokens import route_tokens
from moecore.kernels.routing.router_logits import router_logits
from tests.kernels.choices import SIGMOID
from tests.kernels.routing.test_router_logits import BF16, FP32, inputs, upstream

OPTIONS = replace(SIGMOID, scale=1.5)
T, D, E = 19, 40, 12


def in_two(x: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, ...]:
    bias, selection, options = others
    logits = router_logits(x, weight, bias)
    return logits, *route(logits, selection, options)


def results(run: Any, tensors: tuple[Tensor, ...], uses: tuple[bool, bool]) -> list[Tensor]:
    """Outputs, and gradients of a use of the weights, of the logits, or of both."""
    device = tensors[0].device.type
    leaves = [t.detach().requires_grad_() for t in tensors]
    selection = torch.linspace(-0.1, 0.1, E, device=device)
    logits, ids, weights = run(*leaves, selection, OPTIONS)
    assert not ids.requires_grad
    outputs = [weights[:, 1:], logits]
    grads = [upstream(T, n, device) for n in (OPTIONS.top_k - 1, E)]
    used = [(y, g) for y, g, is_used in zip(outputs, grads, uses, strict=True) if is_used]
    torch.autograd.backward(*zip(*used, strict=True))  # type: ignore[arg-type]
    return [logits, ids, weights, *(leaf.grad for leaf in leaves)]  # type: ignore[list-item]


@pytest.mark.parametrize("weight_dtype", [BF16, FP32])
@pytest.mark.parametrize("uses", [(True, False), (False, True), (True, True)])
def test_bits_are_those_of_two_operations(device, weight_dtype, uses) -> None:
    tensors = inputs(T, D, E, device, weight_dtype)
    one, two = (results(run, tensors, uses) for run in (route_tokens, in_two))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_one_node_saves_what_two_save(device: str) -> None:
    kept = {}
    for name, run in (("one", route_tokens), ("two", in_two)):
        leaves = [t.requires_grad_() for t in inputs(T, D, E, device, BF16)]
        saved: list[tuple[torch.Size, torch.dtype]] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: saved.append((t.shape, t.dtype)) or t, lambda t: t
        ):
            logits, _, weights = run(*leaves, None, OPTIONS)
        kept[name] = sorted(saved, key=str)
        name_of = logits.grad_fn.name()
        assert (name_of == weights.grad_fn.name()) == (name == "one")
    assert kept["one"] == kept["two"]


def test_a_second_derivative_is_refused(device: str) -> None:
    leaves = [t.requires_grad_() for t in inputs(T, D, E, device, BF16)]
    weights = route_tokens(*leaves, None, OPTIONS)[2]
    (dx,) = torch.autograd.grad(weights.square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError):
        dx.float().sum().backward()


def test_without_a_kernel_there_are_two_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RouteTokens", None)
    tensors = inputs(T, D, E, "cpu", FP32, x_dtype=FP32)
    logits, ids, weights = route_tokens(*tensors, None, OPTIONS)
    expected = in_two(*tensors, None, OPTIONS)
    assert all(torch.equal(a, b) for a, b in zip((logits, ids, weights), expected, strict=True))


def test_what_cannot_be_done_is_refused(device: str) -> None:
    x, weight, bias = inputs(T, D, E, device, BF16)
    weight.requires_grad_()
    with pytest.raises(ValueError, match="must agree in D and E"):
        route_tokens(x[:, :-1], weight, bias, None, OPTIONS)
    with pytest.raises(ValueError, match=r"E|experts"):
        route_tokens(x, weight[:2], bias[:2], None, OPTIONS)
