"""Units as a state machine: whatever runs in whatever order, numbers are those of a plain module.

A model in one process casts to bf16, so its units have buffers, and its blocks take turns in them.
What is freed becomes nan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from moecore import FSDPOptions, ParallelConfig, TrainStep, build_meshes, parallelize_moe
from moecore._autograd import is_recomputing
from moecore.shard import unit as unit_module
from moecore.shard.buffers import Buffer
from moecore.shard.unit import State, Unit
from moecore.step import drop_step
from tests.shard.units import unit_of, units

DIM, BLOCKS, LR = 8, 5, 2**-6
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "far ahead": dict(prefetch_blocks=3),
    "no prefetch": dict(prefetch_blocks=0),
    "together": dict(blocks_per_unit=2),
    "gathered once": dict(reshard_after_forward=False),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(DIM, DIM), nn.Parameter(torch.ones(DIM))
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        self.aside = nn.functional.linear(x, self.linear.weight)
        if self.fails:
            raise FloatingPointError
        return x + self.gain * torch.tanh(self.linear(x))


class Model(nn.Module):
    """Returns what each of its first `depth` blocks returns, and the head of the last.

    Attributes:
        recomputed: of how many blocks.
        is_reentrant: their checkpoints.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.depth, self.recomputed, self.is_reentrant = BLOCKS, 0, False

    def forward(self, x: Tensor) -> list[Tensor]:
        found = [self.embed(x)]
        for i, layer in enumerate(self.layers[: self.depth]):
            run = layer
            if i < self.recomputed:
                run = partial(checkpoint, layer, use_reentrant=self.is_reentrant)
            found.append(run(found[-1]))
        return [*found[1:], self.head(found[-1])]


class Plain:
    """The oracle: weights in fp32, of which a bf16 module computes; gradients are added in fp32."""

    def __init__(self) -> None:
        self.model = Model()
        self.weights = [p.detach().clone() for p in self.model.parameters()]
        self.grads: list[Tensor | None] = [None] * len(self.weights)
        self.model.bfloat16()

    def take_gradients(self) -> None:
        for i, param in enumerate(self.model.parameters()):
            if param.grad is not None:
                new, old = param.grad.float(), self.grads[i]
                self.grads[i] = new if old is None else old + new
            param.grad = None

    def update(self) -> None:
        for param, weight, grad in zip(
            self.model.parameters(), self.weights, self.grads, strict=True
        ):
            if grad is not None:
                weight.add_(grad, alpha=-LR)
            param.data.copy_(weight)
        self.drop()

    def drop(self) -> None:
        self.grads = [None] * len(self.weights)


class Pair:
    """The parallelized model and its oracle, which do the same."""

    def __init__(self, **options: Any) -> None:
        fsdp = FSDPOptions(param_dtype=torch.bfloat16, **options)
        meshes = build_meshes(ParallelConfig(), "cpu")
        self.model: Any = parallelize_moe(Model(), meshes, fsdp=fsdp)
        self.plain, self.batches = Plain(), 0
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)

    def batch(self) -> Tensor:
        self.batches += 1
        return torch.randn(3, DIM, generator=torch.Generator().manual_seed(self.batches))

    def forward(self, x: Tensor, *, depth: int = BLOCKS) -> tuple[list[Tensor], list[Tensor]]:
        self.model.depth = self.plain.model.depth = depth
        found, expected = self.model(x), self.plain.model(x.bfloat16())
        for ours, want in zip(found, expected, strict=True):
            assert torch.equal(ours, want), "a forward computed with other weights"
        return found, expected

    def backward(self, outputs: tuple[list[Tensor], list[Tensor]], which: int = -1) -> None:
        for output in outputs:
            output[which].float().square().mean().backward()
        self.plain.take_gradients()

    def check(self) -> None:
        """Compare gradients and weights; nothing is in use, and a buffer has one holder."""
        for (name, p), grad, weight in zip(
            self.model.named_parameters(), self.plain.grads, self.plain.weights, strict=True
        ):
            assert isinstance(p, DTensor), name
            assert torch.equal(p.to_local(), weight), name
            assert (p.grad is None) == (grad is None), name
            assert grad is None or torch.equal(p.grad.to_local(), grad), name
        held = [unit for unit in units(self.model) if unit.state is not State.SHARDED]
        assert all(unit.buffer is not None and unit.buffer.holder is unit for unit in held)
        assert not any(unit.in_use or unit.runs for unit in units(self.model))


def train(pair: Pair, depth: int) -> None:
    pair.backward(pair.forward(pair.batch(), depth=depth))


def train_inner(pair: Pair, depth: int) -> None:
    """Backward of an inner block's output, after the whole forward."""
    pair.backward(pair.forward(pair.batch()), depth - 1)


def train_around(pair: Pair, depth: int) -> None:
    """Evaluate and read between forward and backward."""
    outputs = pair.forward(pair.batch())
    evaluate(pair, depth)
    read(pair, depth)
    pair.backward(outputs)


def train_twice(pair: Pair, depth: int) -> None:
    """One graph has two backwards."""
    outputs = pair.forward(pair.batch())
    for output in outputs:
        output[-1].float().square().mean().backward(retain_graph=True)
    pair.plain.take_gradients()
    pair.backward(outputs, depth - 1)


def train_recomputed(pair: Pair, depth: int) -> None:
    pair.model.recomputed, pair.model.is_reentrant = depth, bool(pair.batches % 2)
    train(pair, BLOCKS)
    pair.model.recomputed = 0


def train_a_block(pair: Pair, depth: int) -> None:
    """One block alone, outside of the model's forward."""
    grads = []
    x = pair.batch().bfloat16()
    for model in (pair.model, pair.plain.model):
        leaf = x.clone().requires_grad_()
        model.layers[depth - 1](leaf).float().square().mean().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)
    pair.plain.take_gradients()


def ask_for_an_input(pair: Pair, depth: int) -> None:
    """The gradient of a value inside of the model, and of no parameter."""
    outputs = pair.forward(pair.batch())
    grads = [torch.autograd.grad(out[-1].float().sum(), out[depth - 1])[0] for out in outputs]
    assert torch.equal(*grads)


def announced(pair: Pair, depth: int) -> None:
    """A step of several micro-batches, with an evaluation in one; it begins without gradients."""
    drop(pair, depth)
    step = TrainStep(pair.model, pair.optimizer, num_micro_batches=depth)
    for n in range(depth):
        with step.micro_batch():
            if n == 1:
                evaluate(pair, depth)
            train(pair, BLOCKS)
    step.finish()
    pair.plain.update()


def evaluate(pair: Pair, depth: int) -> None:
    with torch.no_grad():
        pair.forward(pair.batch(), depth=depth)


def forward_alone(pair: Pair, depth: int) -> None:
    pair.forward(pair.batch(), depth=depth)


def fail(pair: Pair, depth: int) -> None:
    block = pair.model.layers[depth - 1]
    block.fails, pair.model.depth = True, BLOCKS
    with pytest.raises(FloatingPointError):
        pair.model(pair.batch())
    block.fails = False


def run_a_block(pair: Pair, depth: int) -> None:
    """One block alone, as for a look at its output."""
    x = pair.batch().bfloat16()
    blocks = [model.layers[depth - 1] for model in (pair.model, pair.plain.model)]
    with torch.no_grad():
        assert torch.equal(*(block(x) for block in blocks))


def read(pair: Pair, depth: int) -> None:
    assert all(isinstance(p, DTensor) for p in pair.model.parameters())
    assert all(isinstance(t, DTensor) for t in pair.model.state_dict().values())


def update(pair: Pair, depth: int) -> None:
    pair.optimizer.step()
    pair.optimizer.zero_grad()
    pair.plain.update()


def drop(pair: Pair, depth: int) -> None:
    drop_step(pair.model)
    pair.optimizer.zero_grad()
    pair.plain.drop()


Act = Callable[[Pair, int], None]
ACTS: tuple[Act, ...] = (train, train_inner, train_around, train_twice, announced, evaluate)
ACTS += (
    train_recomputed,
    train_a_block,
    ask_for_an_input,
    forward_alone,
    fail,
    run_a_block,
    read,
    update,
    drop,
)


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    if dist.is_initialized():
        dist.destroy_process_group()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def freed_is_nan() -> Iterator[None]:
    free = Unit.free

    def free_and_fill(unit: Unit) -> None:
        was_held = unit.state is not State.SHARDED
        free(unit)
        if was_held and unit.buffer is not None:
            with torch.no_grad():
                unit.buffer.flat(unit.device).fill_(torch.nan)

    with patch.object(Unit, "free", free_and_fill):
        yield


def play(pair: Pair, acts: list[tuple[Act, int]]) -> None:
    with freed_is_nan():
        for act, depth in acts:
            act(pair, depth)
            pair.check()


@pytest.mark.parametrize("options", OPTIONS)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    acts=st.lists(st.tuples(st.sampled_from(ACTS), st.integers(1, BLOCKS)), min_size=1, max_size=8)
)
def test_any_order_computes_what_a_plain_module_does(
    options: str, acts: list[tuple[Act, int]]
) -> None:
    play(Pair(**OPTIONS[options]), acts)


def test_blocks_take_turns_in_two_buffers() -> None:
    pair = Pair()
    found = [unit_of(pair.model, layer) for layer in pair.model.layers]
    buffers = [unit.buffer for unit in found if unit is not None]
    assert len(buffers) == BLOCKS and len({id(b) for b in buffers}) == 2
    assert all(a is not b for a, b in pairwise(buffers))
    play(pair, [(train, BLOCKS)])
    held = [unit for unit in units(pair.model) if unit.state is not State.SHARDED]
    assert held == []


# -------------------------------------------------------------------------------------------------
# What is broken must show.


@contextmanager
def no_gather_in_backward(pair: Pair) -> Iterator[None]:
    fill = Unit._fill

    def broken(unit: Unit, views: Any) -> None:
        if not is_recomputing():  # the same question as whether a backward runs
            fill(unit, views)

    with patch.object(Unit, "_fill", broken):
        yield


@contextmanager
def no_wait(pair: Pair) -> Iterator[None]:
    """Whole parameters are registered before they are there."""

    def broken(unit: Unit) -> None:
        if unit._views is None:
            unit._make_views()
        unit.state = State.WHOLE

    with patch.object(Unit, "wait", broken):
        yield


@contextmanager
def one_memory(pair: Pair) -> Iterator[None]:
    """Two neighbours have buffers of their own, which are the same memory."""
    first, second = (unit_of(pair.model, layer) for layer in pair.model.layers[:2])
    assert first is not None and second is not None and first.buffer is not None
    second.buffer = Buffer(first.buffer.numel, first.buffer.dtype)
    second.buffer._flat = first.buffer.flat(first.device)
    yield


@contextmanager
def stale(pair: Pair) -> Iterator[None]:
    """What stays is not freed behind an evaluation."""
    with patch.object(Unit, "free", lambda unit: unit.register(whole=False)):
        yield


BREAKS = {"no gather": no_gather_in_backward, "no wait": no_wait, "one memory": one_memory}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_unit_is_noticed(name: str) -> None:
    pair = Pair()
    with BREAKS[name](pair), pytest.raises((AssertionError, RuntimeError)):
        play(pair, [(train, BLOCKS)])


def test_weights_of_before_an_update_are_noticed() -> None:
    pair = Pair()
    train(pair, BLOCKS)
    with stale(pair):
        evaluate(pair, BLOCKS)
        update(pair, BLOCKS)
        with pytest.raises(AssertionError, match="other weights"):
            evaluate(pair, BLOCKS)


def test_what_autograd_saved_of_a_freed_unit_cannot_be_read() -> None:
    """`aside` is no output of its module, so nothing gathers its weight for backward."""
    pair = Pair()
    pair.forward(pair.batch())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        pair.model.layers[0].aside.sum().backward()


def test_versions_are_what_notices_it() -> None:
    pair = Pair()
    with patch.object(unit_module, "set_versions", lambda *_: None):
        pair.forward(pair.batch())
        pair.model.layers[0].aside.sum().backward()
