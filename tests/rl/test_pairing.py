"""Under activation checkpointing every recompute gets the choices of its own forward.

The truth is the same replay without checkpointing, which `test_replay.py` holds against
`moe_reference`.
"""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moecore import MoELayer
from moecore.rl import RouterReplay
from moecore.rl.choices import Choices
from tests.moe.moe_cases import BASE, make_layer
from tests.rl import replay_cases

Case = tuple[list[Tensor], Choices, dict[str, Tensor]]
Order = Callable[[list[Tensor]], None]


@pytest.mark.parametrize("order", replay_cases.ORDERS)
@pytest.mark.parametrize("mode", ["non-reentrant", "reentrant"])
@pytest.mark.parametrize("name", ["capacity", "deepseek-mtp"])
def test_recompute_gets_the_choices_of_its_forward(name, mode, order) -> None:
    """Three forwards wait for their backward; the live router would choose otherwise."""
    inputs = replay_cases.batches(3)
    choices = replay_cases.recorded(replay_cases.make_model(replay_cases.CONFIGS[name]), inputs)
    plain, model = (
        replay_cases.make_model(replay_cases.CONFIGS[name]),
        replay_cases.make_model(replay_cases.CONFIGS[name], mode),
    )
    for changed in (plain, model):
        replay_cases.randomize(changed, 3, only="router.weight")
    assert replay_cases.other_choices(choices, replay_cases.recorded(plain, inputs))
    with RouterReplay(plain).replay(choices):
        expected = replay_cases.train(plain, inputs, replay_cases.ORDERS[order])
    with RouterReplay(model).replay(choices):
        found = replay_cases.train(model, inputs, replay_cases.ORDERS[order])
    assert replay_cases.equal(found, expected)


@pytest.fixture(scope="module")
def case() -> Case:
    """Three batches, their choices by another router, and what replay without recompute gives."""
    inputs = replay_cases.batches(3)
    choices = replay_cases.recorded(replay_cases.make_model(replay_cases.CONFIGS["shared"]), inputs)
    return inputs, choices, replayed(inputs, choices, replay_cases.fifo)


def replayed(inputs: list[Tensor], choices: Choices, order: Order) -> dict[str, Tensor]:
    """What a replay by other routers, without recompute, computes."""
    model = changed_model()
    with RouterReplay(model).replay(choices):
        return replay_cases.train(model, inputs, order)


def changed_model(mode: replay_cases.Mode = "none") -> nn.Module:
    model = replay_cases.make_model(replay_cases.CONFIGS["shared"], mode)
    replay_cases.randomize(model, 3, only="router.weight")
    return model


def in_thread(work: Callable[[], Any]) -> None:
    """Run where a GPU's backward runs: in another thread than forward, with its own numbering."""
    failures: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


@pytest.mark.parametrize("when", ["late", "late, in a thread", "in a thread"])
@pytest.mark.parametrize("mode", ["non-reentrant", "reentrant"])
def test_backward_after_the_replay_or_in_another_thread(case, mode, when) -> None:
    inputs, choices, expected = case
    model = changed_model(mode)
    losses: list[Tensor] = []
    run = in_thread if "thread" in when else lambda work: work()
    with RouterReplay(model).replay(choices):
        replay_cases.train(model, inputs, losses.extend)
        if "late" not in when:
            run(lambda: replay_cases.fifo(losses))
    live = model(inputs[0])
    if "late" in when:
        run(lambda: replay_cases.fifo(losses))
    assert replay_cases.equal(replay_cases.results(model, losses), expected)
    assert all(layer.get_part("router").tape is None for layer in replay_cases.layers_of(model))
    assert torch.equal(model(inputs[0]), live)


class Nested(nn.Module):
    """A reentrant checkpoint around checkpointed blocks: its backwards start inside recomputes."""

    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.block = block
        self.reentrant = reentrant

    def forward(self, *args: Any) -> Any:
        return checkpoint(self._inner, *args, use_reentrant=self.reentrant)

    def _inner(self, *args: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=self.reentrant)


def nested_model(*, reentrant: bool) -> nn.Module:
    model: Any = changed_model()
    for i, block in enumerate(model.model.layers):
        model.model.layers[i] = Nested(block, reentrant)
    return model


def renamed(choices: Choices) -> Choices:
    return {name.replace(".mlp", ".block.mlp"): ids for name, ids in choices.items()}


def without_names(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace(".block.", "."): value for name, value in found.items()}


@pytest.mark.parametrize("order", replay_cases.ORDERS)
def test_nested_non_reentrant_checkpointing(case: Case, order: str) -> None:
    inputs, choices, _ = case
    model, expected = (
        nested_model(reentrant=False),
        replayed(inputs, choices, replay_cases.ORDERS[order]),
    )
    with RouterReplay(model).replay(renamed(choices)):
        found = replay_cases.train(model, inputs, replay_cases.ORDERS[order])
    assert replay_cases.equal(without_names(found), expected)


@pytest.mark.parametrize("threaded", [False, True])
def test_nested_reentrant_checkpointing_needs_select(case: Case, threaded: bool) -> None:
    inputs, choices, expected = case
    run = in_thread if threaded else lambda work: work()
    model = nested_model(reentrant=True)
    replay = RouterReplay(model)
    message = r"recompute of layer 'model\.layers.*select"
    with pytest.raises(NotImplementedError, match=message), replay.replay(renamed(choices)):
        run(lambda: replay_cases.train(model, inputs, replay_cases.fifo))

    def selecting(losses: list[Tensor]) -> None:
        for i, loss in enumerate(losses):
            replay.select(i)
            run(loss.backward)

    with replay.replay(renamed(choices)):
        found = replay_cases.train(model, inputs, selecting)
    assert replay_cases.equal(without_names(found), expected)


class Long(nn.Module):
    """Makes many autograd nodes after its model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        y = self.model(x)
        for _ in range(1000):
            y = y * 1
        return y


def test_nested_backwards_whose_nodes_are_numbered_like_a_forward(case: Case) -> None:
    """Another thread counts its nodes from 0: those it makes can look like another forward's."""
    inputs, choices, _ = case
    model = Long(nested_model(reentrant=True))
    outputs: list[Tensor] = []
    starts: list[int] = []

    def forwards() -> None:
        for x in inputs:
            starts.append(torch.autograd._get_sequence_nr())
            outputs.append(model(x))

    def backward() -> None:
        one = torch.ones((), requires_grad=True)
        while torch.autograd._get_sequence_nr() < starts[2] + 100:
            _ = one * 1
        outputs[0].sum().backward()
        assert torch.autograd._get_sequence_nr() < starts[2] + 1000

    of_inner = {f"model.{n}": ids for n, ids in renamed(choices).items()}
    replay = RouterReplay(model).replay(of_inner)
    with pytest.raises(NotImplementedError, match="matches 0"), replay:
        in_thread(forwards)
        in_thread(backward)


def test_select_orders_forwards_as_a_schedule_does(case: Case) -> None:
    inputs, choices, _ = case
    model, expected = changed_model("non-reentrant"), replayed(inputs, choices, replay_cases.lifo)
    turned = {name: [ids[2], ids[0], ids[1]] for name, ids in choices.items()}
    replay = RouterReplay(model)
    model.zero_grad()
    with replay.replay(turned):
        losses = []
        for x, i in zip(inputs, (1, 2, 0), strict=True):
            replay.select(i)
            losses.append(model(x, x.roll(-1, 1)))
        replay.select(0)  # no longer right for recomputes, whose forwards autograd tells
        replay_cases.lifo(losses)
    assert replay_cases.equal(replay_cases.results(model, losses), expected)


def test_a_forward_from_outside_the_replay_is_refused(case: Case) -> None:
    """Its recompute would get the choices of another batch."""
    inputs, choices, _ = case
    model = changed_model("non-reentrant")
    one = {name: ids[:1] for name, ids in choices.items()}
    plain, replay = model(inputs[1], inputs[1]), RouterReplay(model)
    with pytest.raises(NotImplementedError, match="matches 0"), replay.replay(one):
        own = model(inputs[0], inputs[0])
        replay_cases.together([plain, own])
    plain = model(inputs[1], inputs[1])
    with pytest.raises(NotImplementedError, match="matches 0"), replay.replay(one):
        model(inputs[0], inputs[0])
        plain.backward()


def test_a_late_backward_inside_another_replay_is_refused(case: Case) -> None:
    inputs, choices, _ = case
    model = changed_model("non-reentrant")
    replay = RouterReplay(model)
    with replay.replay({name: ids[:1] for name, ids in choices.items()}):
        late = model(inputs[0], inputs[0])
    other = {name: ids[1:2] for name, ids in choices.items()}
    message = "must not be recorded or replayed already"
    with pytest.raises(ValueError, match=message), replay.replay(other):
        model(inputs[1], inputs[1])
        late.backward()


def test_calls_of_a_part_of_the_model_are_refused_in_recompute(case: Case) -> None:
    inputs, choices, _ = case
    model: Any = changed_model("non-reentrant")
    one = {name: ids[:1] for name, ids in choices.items()}
    message = "forward of the replayed Decoder"
    with pytest.raises(NotImplementedError, match=message), RouterReplay(model).replay(one):
        model.model(inputs[0]).sum().backward()
    part = RouterReplay(model.model)
    with part.replay({name.removeprefix("model."): ids for name, ids in one.items()}):
        model.model(inputs[0]).sum().backward()


class Twice(nn.Module):
    """One layer that runs twice in a forward."""

    def __init__(self, layer: MoELayer, *, recompute: bool) -> None:
        super().__init__()
        self.layer = layer
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=False) if self.recompute else self.layer(x)
        return x


def test_a_layer_that_runs_twice_in_a_forward() -> None:
    layer, x = make_layer(BASE), torch.randn(6, 32, requires_grad=True)
    model = Twice(layer, recompute=False)
    replay = RouterReplay(model)
    with replay.record():
        expected = model(x)
    choices = replay.choices()
    assert len(choices["layer"]) == 2
    with replay.replay(choices):
        assert torch.equal(model(x), expected)
    with pytest.raises(NotImplementedError, match="more than once"), replay.replay(choices):
        replay.select(0)
        model(x)
    twice = Twice(layer, recompute=True)
    with pytest.raises(NotImplementedError, match="matches 2"), RouterReplay(twice).replay(choices):
        twice(x).sum().backward()


def test_checkpoint_around_the_whole_model(case: Case) -> None:
    inputs, choices, expected = case
    model = changed_model()

    def call(x: Tensor) -> Tensor:
        return checkpoint(model, x, x.roll(-1, 1), use_reentrant=False)

    replay = RouterReplay(model)
    model.zero_grad()
    with replay.replay(choices):
        losses = [call(x) for x in inputs]
        replay_cases.fifo(losses)
    assert replay_cases.equal(replay_cases.results(model, losses), expected)
