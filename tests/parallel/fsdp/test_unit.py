"""Units as a state machine: whatever runs in whatever order, numbers are those of a plain module.

A model in one process casts to bf16, so its units have buffers, and its blocks take turns in them.
What is freed becomes nan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from moecore import FSDPOptions, ParallelConfig, TrainStep, build_meshes, parallelize_moe
from moecore.base.torch_private import get_local_tensor
from moecore.parallel.fsdp import params as params_module
from moecore.parallel.fsdp.unit import State, Unit
from moecore.train import AdamW, HostAdamW
from moecore.train.rerun import drop_step
from tests.helpers.parts import on_parts
from tests.parallel.fsdp.units import units

DIM, BLOCKS, LR = 8, 5, 2**-6
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "far ahead": dict(prefetch_blocks=3),
    "no prefetch": dict(prefetch_blocks=0),
    "together": dict(blocks_per_unit=2),
    "gathered once": dict(dense_strategy="optim"),
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
    """Returns what each of its blocks `first` to `depth` returns, and the head of the last.

    Attributes:
        first, depth: the part that runs; a first one reads tokens, another what one before returns.
        recomputed: of how many blocks.
        is_reentrant: their checkpoints.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.first, self.depth = 0, BLOCKS
        self.recomputed, self.is_reentrant = 0, False

    def forward(self, x: Tensor) -> list[Tensor]:
        found = [x if self.first else self.embed(x)]
        for i, layer in enumerate(self.layers[self.first : self.depth], self.first):
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
        fsdp = FSDPOptions(**{"param_dtype": torch.bfloat16, **options})
        meshes = build_meshes(ParallelConfig(), "cpu")
        self.model: Any = parallelize_moe(Model(), meshes, fsdp=fsdp)
        self.plain, self.batches = Plain(), 0
        self.flights: list[Flight] = []  # whose backward may come
        self.optimizer = on_parts(torch.optim.SGD)(self.model.parameters(), lr=LR)

    def batch(self) -> Tensor:
        self.batches += 1
        return torch.randn(3, DIM, generator=torch.Generator().manual_seed(self.batches))

    def forward(self, x: Tensor, *, depth: int = BLOCKS) -> tuple[list[Tensor], list[Tensor]]:
        self.model.depth = self.plain.model.depth = depth
        found, expected = self.model(x), self.plain.model(x.bfloat16())
        for ours, want in zip(found, expected, strict=True):
            assert torch.equal(ours, want), "a forward computed with other weights"
        return found, expected

    def update(self) -> None:
        """Follow an optimizer's step: no earlier forward may have its backward."""
        self.flights.clear()
        self.plain.update()

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
        assert not any(unit.is_in_use or any(unit.runs) for unit in units(self.model))


class Flight:
    """A micro-batch of both models: forwards of its parts, then their backwards in reverse.

    Args:
        cuts: before which blocks a part begins, as stages of a pipeline on one rank.
    """

    def __init__(self, pair: Pair, cuts: Sequence[int] = ()) -> None:
        self._pair, self._done, self._batch = pair, 0, pair.batch()
        self._parts = list(pairwise([0, *cuts, BLOCKS]))
        # Of each model, per part: what it read, and what it gave the next one or the loss.
        self._edges: list[list[tuple[Tensor, Tensor]]] = [[], []]

    @property
    def is_done(self) -> bool:
        return self._done == 2 * len(self._parts)

    def advance(self) -> None:
        """Run the next forward, or when there is none the next backward."""
        if not self.is_done:
            self._forward() if self._done < len(self._parts) else self._backward()
            self._done += 1

    def _forward(self) -> None:
        first, depth = self._parts[self._done]
        models = (self._pair.model, self._pair.plain.model)
        for model, edges, x in zip(models, self._edges, self._inputs(), strict=True):
            model.first, model.depth = first, depth
            found = model(x)
            edges.append((x, found[-1] if depth == BLOCKS else found[-2]))
            model.first, model.depth = 0, BLOCKS
        assert torch.equal(*(edges[-1][1] for edges in self._edges)), "other weights"

    def _inputs(self) -> list[Tensor]:
        if not self._done:
            return [self._batch, self._batch.bfloat16()]
        return [edges[-1][1].detach().requires_grad_() for edges in self._edges]

    def _backward(self) -> None:
        part = 2 * len(self._parts) - 1 - self._done
        for edges in self._edges:
            out = edges[part][1]
            if part + 1 < len(self._parts):
                out.backward(edges[part + 1][0].grad)
            else:
                out.float().square().mean().backward()
        self._pair.plain.take_gradients()


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
    grads, x = [], pair.batch().bfloat16()
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
    pair.update()


def launch(pair: Pair, depth: int) -> None:
    """A forward, or that of a part, whose backward may come later or never."""
    pair.flights.append(Flight(pair, (depth,) if depth < BLOCKS else ()))
    pair.flights[-1].advance()


def advance(pair: Pair, depth: int) -> None:
    if pair.flights:
        pair.flights[depth % len(pair.flights)].advance()


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
    pair.update()


def drop(pair: Pair, depth: int) -> None:
    pair.flights.clear()
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
    launch,
    advance,
    advance,
    read,
    update,
    drop,
)


@contextmanager
def freed_is_nan() -> Iterator[None]:
    free = Unit.reshard

    def free_and_fill(unit: Unit) -> None:
        was_held = unit.state is not State.SHARDED
        free(unit)
        if was_held and unit.buffer is not None:
            with torch.no_grad():
                flat = unit.buffer.get_flat(unit.device)
                flat.fill_(torch.nan if flat.is_floating_point() else 0x7F)  # nan in e4m3

    with patch.object(Unit, "reshard", free_and_fill):
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
def test_any_order_computes_what_a_plain_module_does(options, acts) -> None:
    play(Pair(**OPTIONS[options]), acts)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("options", OPTIONS)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    number=st.integers(1, 4),
    cut=st.integers(0, BLOCKS - 1),
    turns=st.lists(st.integers(0, 5), max_size=16),
    is_complete=st.booleans(),
    recomputed=st.integers(0, BLOCKS),
    is_reentrant=st.booleans(),
)
def test_micro_batches_in_flight_come_in_any_order(
    options: str,
    number: int,
    cut: int,
    turns: list[int],
    is_complete: bool,
    recomputed: int,
    is_reentrant: bool,
) -> None:
    """Two steps; a turn advances a micro-batch, or evaluates. What stays whole is reduced once."""
    pair = Pair(**OPTIONS[options])
    pair.model.recomputed, pair.model.is_reentrant = recomputed, is_reentrant
    step = TrainStep(pair.model, pair.optimizer, num_micro_batches=number)
    cuts = (cut,) if cut else ()
    with freed_is_nan(), reductions(pair) as reduced:
        for _ in range(2):
            reduced.clear()
            with step.micro_batches(forwards=number * (len(cuts) + 1)):
                flights = [Flight(pair, cuts) for _ in range(number)]
                for turn in turns:
                    flights[turn].advance() if turn < number else evaluate(pair, turn)
                    assert is_reduced(pair) == all(flight.is_done for flight in flights)
                while is_complete and not is_reduced(pair):
                    next(flight for flight in flights if not flight.is_done).advance()
                    assert is_reduced(pair) == all(flight.is_done for flight in flights)
            pair.check()
            assert len(reduced) == len(set(reduced))
            step.finish()
            pair.update()
            pair.check()


@contextmanager
def reductions(pair: Pair) -> Iterator[list[Tensor]]:
    """Record the parameters that stay whole when their gradients are reduced."""
    found: list[Tensor] = []
    with ExitStack() as stack:
        for unit in units(pair.model):
            for param in unit.params if unit.options.is_resident else ():
                handle = param.sharded.register_post_accumulate_grad_hook(found.append)
                stack.callback(handle.remove)
        yield found


def is_reduced(pair: Pair) -> bool:
    """Whether what stays whole, as the root does, has the gradient of a step."""
    return pair.model.embed.weight.grad is not None


@pytest.mark.parametrize("end", [TrainStep.finish, TrainStep.drop])
def test_a_backward_after_its_step_is_refused(end: Callable[[TrainStep], Any]) -> None:
    pair = Pair()
    step = TrainStep(pair.model, pair.optimizer)
    with step.micro_batch():
        late, _ = pair.forward(pair.batch())
    end(step)
    with step.micro_batch():
        with pytest.raises(RuntimeError, match="must come before finish"):
            late[-1].sum().backward()
        train(pair, BLOCKS)
    pair.check()


def scale(pair: Pair) -> None:
    with torch.no_grad():
        pair.model.layers[1].gain.mul_(1.5)


def add_to_tensor(pair: Pair) -> None:
    """Change it as a loop of one's own does, below autograd."""
    with torch.no_grad():
        pair.model.layers[1].gain.to_local().add_(0.5)


def take_step(pair: Pair) -> None:
    pair.optimizer.step()


def step_of(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[[Pair], None]:
    """A step of an optimizer whose writes nobody counts."""

    def step(pair: Pair) -> None:
        make(pair.model.parameters(), lr=0.1, **options).step()

    step.__name__ = "-".join((make.__name__, *options))
    return step


STEPS = [
    step_of(torch.optim.SGD, foreach=True),
    step_of(torch.optim.AdamW, foreach=True),
    step_of(torch.optim.AdamW, fused=True),
    step_of(AdamW),
    step_of(HostAdamW, host_fraction=1.0),
]


@pytest.mark.parametrize("options", [*OPTIONS, "without a copy"])
@pytest.mark.parametrize("change", [scale, add_to_tensor, take_step, *STEPS])
def test_a_backward_of_parameters_that_have_changed_is_refused(change, options) -> None:
    """As plain PyTorch refuses it. A resident unit computes with the values of the forward."""
    pair = Pair(**OPTIONS.get(options, dict(param_dtype=None)))
    x = pair.batch()
    pair.model(x)[-1].sum().backward()
    grads = [get_local_tensor(p.grad).clone() for p in pair.model.parameters()]
    loss = pair.model(x)[-1].sum()
    change(pair)
    pair.optimizer.zero_grad()
    if options == "gathered once":
        loss.backward()
        for param, grad in zip(pair.model.parameters(), grads, strict=True):
            assert torch.equal(get_local_tensor(param.grad), grad)
    else:
        with pytest.raises(RuntimeError, match="must not change between a forward and its backw"):
            loss.backward()


def test_micro_batches_in_flight_are_all_of_a_step() -> None:
    pair = Pair()
    step = TrainStep(pair.model, pair.optimizer, num_micro_batches=2)
    with step.micro_batch():
        train(pair, BLOCKS)
    with pytest.raises(ValueError, match="must be all of a step, but 1"), step.micro_batches():
        pass
    step.drop()
    with pytest.raises(ValueError, match="forwards"), step.micro_batches(forwards=0):
        pass
    with step.micro_batches(), pytest.raises(ValueError, match="leave it first"):
        step.finish()
    step.finish()


def test_a_part_may_be_another_object_each_time() -> None:
    """As torch 2.14 returns it: the whole parameters, which are the shards here, stay."""
    model: Any = parallelize_moe(Model(), build_meshes(ParallelConfig(), "cpu"))
    with patch.object(params_module, "get_local_tensor", lambda t: get_local_tensor(t).detach()):
        outputs = model(torch.randn(3, DIM))
        with torch.no_grad():
            model(torch.randn(3, DIM))
        outputs[-1].sum().backward()
    assert all(p.grad is not None for p in model.layers[0].parameters())


def test_a_forward_that_finds_no_memory_ends_like_any_that_fails() -> None:
    """A block that runs another of the same buffer; then training continues."""
    pair = Pair()
    first, third = pair.model.layers[0], pair.model.layers[2]
    with (
        patch.object(first, "forward", lambda x: third(x)),
        pytest.raises(RuntimeError, match="must not run at one time"),
    ):
        pair.model(pair.batch())
    play(pair, [(train, BLOCKS), (update, 1), (train, BLOCKS)])


def test_what_autograd_saved_of_a_freed_unit_cannot_be_read() -> None:
    """`aside` is no output of its module, so nothing gathers its weight for backward."""
    pair = Pair()
    pair.forward(pair.batch())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        pair.model.layers[0].aside.sum().backward()
