"""When a part of a model is a graph, when it runs as it is, and whose memory is whose.

Fakes replay here; what real graphs compute is proved in test_graphed_blocks_gpu.py.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moecore.base.saved_tensors import use_packer
from moecore.kernels.experts.contract import SINK
from moecore.moe.micro_batch import MicroBatch
from moecore.train.graphs import graphed_part as gp
from moecore.train.graphs import graphed_part as module
from tests.train.graphs.graph_fakes import FakeRecorder, fake_graphs


class Two(nn.Module):
    """A product, a buffer and a value that nobody trains."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor, offset: Tensor | None = None, *, turns: int = 1) -> Any:
        y = self.linear(x).tanh() * self.scale * turns
        if offset is not None:
            y = y + offset
        return y, (y.detach() > 0).int()


@pytest.fixture
def fake() -> Iterator[FakeRecorder]:
    with fake_graphs() as found:
        yield found


def graphed(may_run: Callable[[], bool] | None = None) -> Two:
    model = Two()
    part = gp.GraphedPart("two", model.forward, list(model.modules()), gp.GraphMemory(), may_run)
    model.forward = part  # type: ignore[method-assign]
    return model


def warm(model: nn.Module, *args: Any, calls: int = gp.WARM_UP, **kwargs: Any) -> None:
    for _ in range(calls):
        model(*args, **kwargs)[0].sum().backward()
    model.zero_grad()


def x_of(n: int, rows: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(n)
    return torch.randn(rows, 4, generator=generator).requires_grad_()


def test_replays_compute_what_the_method_does(fake: FakeRecorder) -> None:
    model, plain = graphed(), Two()
    offset = torch.ones(3)
    warm(model, x_of(0), offset)
    for n in range(1, 4):
        found = []
        for m in (model, plain):
            x = x_of(n)
            y, sign = m(x, offset * n)
            (y.square().sum() + 3 * y[0, 0]).backward()
            found.append(
                [y.detach().clone(), sign.clone(), x.grad, *(p.grad for p in m.parameters())]
            )
        torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
        assert not sign.requires_grad
    assert (fake.captures, fake.replays) == (2, 2 * 3)


def test_gradients_are_memory_of_their_own(fake: FakeRecorder) -> None:
    model = graphed()
    warm(model, x_of(0))
    first, second = x_of(1), x_of(2)
    model(first)[0].sum().backward()
    kept = first.grad.clone(), model.linear.weight.grad.clone()
    grad = model.linear.weight.grad
    model.zero_grad()
    model(second)[0].sum().backward()
    assert torch.equal(first.grad, kept[0]) and torch.equal(grad, kept[1])


def test_a_forward_in_flight_has_graphs_of_its_own(fake: FakeRecorder) -> None:
    model, plain = graphed(), Two()
    warm(model, x_of(0))
    losses = [model(x_of(n))[0].square().sum() for n in (1, 2)]
    assert fake.captures == 4
    for n in (1, 0):  # out of order
        losses[n].backward()
    for n in (1, 2):
        plain(x_of(n))[0].square().sum().backward()
    torch.testing.assert_close(model.linear.weight.grad, plain.linear.weight.grad)
    for n in (3, 4):
        model(x_of(n))  # dropped: no backward can come
    warm(model, x_of(5))
    assert fake.captures == 4


def test_a_forward_has_the_slot_of_its_first_part_in_all(fake: FakeRecorder) -> None:
    """Beside a backward that has left the last part, and not the first."""
    memory, parts = gp.GraphMemory(), [Two(), Two()]
    for i, part in enumerate(parts):
        part.forward = gp.GraphedPart(f"part {i}", part.forward, [part, part.linear], memory)  # type: ignore[method-assign]
    first, last = parts
    for part in parts:
        warm(part, x_of(0))
    middle = first(x_of(1))[0]
    loss = last(torch.nn.functional.pad(middle.detach(), (0, 1)).requires_grad_())[0].sum()
    other = first(x_of(2))[0]
    loss.backward()
    last(torch.nn.functional.pad(other.detach(), (0, 1)).requires_grad_())
    used = [list(part.forward._pairs) for part in parts]  # type: ignore[attr-defined]
    assert used[0] == used[1] == memory.slots and len(memory.slots) == 2
    middle.sum().backward()
    third = first(x_of(3))[0]
    assert len(memory.slots) == 2 and third.grad_fn is not None


def test_a_backward_comes_once_and_before_the_next_forward(fake: FakeRecorder) -> None:
    model = graphed()
    warm(model, x_of(0))
    loss = model(x_of(1))[0].sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="must come once"):
        loss.backward()


WAYS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "other shapes": lambda model, x: model(x[:2]),
    "another value": lambda model, x: model(x, turns=2),
    "one more tensor": lambda model, x: model(x, torch.ones(3)),
    "no gradient of the input": lambda model, x: model(x.detach()),
    "eval mode": lambda model, x: model.eval()(x),
    "a hook inside": lambda model, x: (model.linear.register_forward_hook(print), model(x))[1],
    "frozen": lambda model, x: (model.linear.bias.requires_grad_(False), model(x))[1],
    "activation checkpointing": lambda model, x: checkpoint(model, x, use_reentrant=False),
    "autocast": lambda model, x: torch.autocast("cpu")(model)(x),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_a_graph_does_not_hold_runs_as_it_is(way: str, fake: FakeRecorder) -> None:
    found = []
    for model in (graphed(), Two()):
        warm(model, x_of(0))
        x = x_of(1)
        y, _ = WAYS[way](model, x)
        y.float().square().sum().backward()
        found.append([y.detach(), x.grad, model.linear.weight.grad])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    assert fake.replays == 0


def test_without_gradients_nothing_is_replayed(fake: FakeRecorder) -> None:
    model = graphed()
    warm(model, x_of(0))
    with torch.no_grad():
        model(x_of(1))
    assert fake.captures == 0


def test_parameters_that_move_are_captured_anew(fake: FakeRecorder) -> None:
    model, plain = graphed(), Two()
    warm(model, x_of(0), calls=gp.WARM_UP + 1)
    with torch.no_grad():
        moved = {name: value + 1 for name, value in model.state_dict().items()}
    for m in (model, plain):
        m.load_state_dict(moved, assign=True)
        warm(m, x_of(1))
    assert fake.captures == 2, "the call that notices is the first of a warm-up"
    warm(model, x_of(1), calls=1)
    assert fake.captures == 4
    torch.testing.assert_close(model(x_of(2))[0], plain(x_of(2))[0], rtol=0, atol=0)


def test_no_tensor_gets_an_address_of_a_capture(fake: FakeRecorder) -> None:
    """All ranks see the change of a tensor, whatever memory their allocators have free."""
    model = graphed()
    model.register_buffer("shift", torch.tensor(1.0))  # which no backward reads
    warm(model, x_of(0), calls=gp.WARM_UP + 1)
    address = model.shift.data_ptr()
    model.shift = None
    assert address not in {torch.tensor(float(n)).data_ptr() for n in range(64)}


def test_whoever_takes_gradients_of_parameters_sees_no_capture(fake: FakeRecorder) -> None:
    model, seen = graphed(), []
    weight = model.linear.weight
    setattr(weight, SINK, seen.append)
    weight.register_hook(lambda grad: seen.append("hook"))
    warm(model, x_of(0), calls=gp.WARM_UP + 1)
    assert seen == ["hook"] * (gp.WARM_UP + 1) and model.linear.weight is weight


def test_packers_outside_of_a_part_are_not_asked(fake: FakeRecorder) -> None:
    model, asked = graphed(), []
    warm(model, x_of(0))
    with use_packer(asked.append):
        model(x_of(1))[0].sum().backward()
    assert fake.captures == 2 and not asked


def test_a_part_that_may_not_run_is_a_plain_call(fake: FakeRecorder) -> None:
    model = graphed(may_run=lambda: False)
    warm(model, x_of(0), calls=gp.WARM_UP + 2)
    assert fake.captures == 0


def test_a_copy_has_graphs_of_its_own(fake: FakeRecorder) -> None:
    model = graphed()
    warm(model, x_of(0), calls=gp.WARM_UP + 1)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.linear.weight.zero_()
        other.linear.bias.zero_()
    warm(other, x_of(0), calls=gp.WARM_UP + 1)
    assert fake.captures == 4 and not other(x_of(1))[0].any() and model(x_of(1))[0].any()


def test_a_capture_that_fails_says_where(fake, monkeypatch) -> None:
    def fail(*args: Any) -> Any:
        raise ValueError("operation not permitted")

    model = graphed()
    warm(model, x_of(0))
    monkeypatch.setattr(module, "_capture_graph", fail)
    with pytest.raises(RuntimeError, match=r"two could not be captured.*\(operation not permitted"):
        model(x_of(1))
    assert type(model.linear.weight) is nn.Parameter


def test_forms_are_equal_but_for_tensors() -> None:
    a, b = torch.ones(2), torch.zeros(3)
    value = ((a, 1), {"x": [b, None]}, MicroBatch(num_sequences=2, padding_mask_T=a))
    tensors: list[Tensor] = []
    form = gp.flatten_tensors(value, tensors)
    assert [x is y for x, y in zip(tensors, (a, b, a), strict=True)] == [True] * 3
    again: list[Tensor] = []
    assert form == gp.flatten_tensors(gp.unflatten_tensors(form, [b, a, b]), again)
    assert [x is y for x, y in zip(again, (b, a, b), strict=True)] == [True] * 3
    for other in (
        ((a, 2), *value[1:]),
        ((a, 1), value[1], MicroBatch(num_sequences=3, padding_mask_T=a)),
        ((a, 1), value[1], MicroBatch(num_sequences=2)),
        ([a, 1], *value[1:]),
    ):
        assert form != gp.flatten_tensors(other, [])
