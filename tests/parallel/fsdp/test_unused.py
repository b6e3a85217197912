"""Ranks that run modules in vain: gradients are those of one process that adds all ranks' losses.

Units are of unequal size, so collectives in another order fit no tensor and end the process.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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
from tests.helpers.ranks import ranks_fixture
from tests.helpers.whole import by_turns
from tests.parallel.fsdp.test_skipped import DIM, Grads, differing, grads_of, row, run_in_pairs
from tests.parallel.fsdp.units import recorded

pytestmark = pytest.mark.slow

WORLD, MICRO_BATCHES = 4, 2
MOE = MoEConfig(dim=DIM, hidden_dim=8, num_experts=4, top_k=2)
WIDTHS = (DIM, 2 * DIM, 3 * DIM, 3 * DIM // 2)


class Block(nn.Module):
    """Adds to `x`; one that is dropped returns it."""

    def __init__(self, width: int, *, moe: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, width), nn.Linear(width, DIM)
        self.moe = MoELayer(MOE) if moe else None
        self.is_dropped = False

    def forward(self, x: Tensor, first: Tensor | None = None) -> Tensor:
        if self.is_dropped:
            return x
        x = x + self.down(torch.tanh(self.up(x))) + (0 if first is None else first)
        return x if self.moe is None else x + self.moe(x)


Forward = Callable[["Model", Tensor, int], Tensor | None]


class Model(nn.Module):
    def __init__(self, run: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.run, self.first = run, nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList(Block(w, moe=w > DIM) for w in WIDTHS)
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, number: int) -> Tensor | None:
        return self.run(self, x, number)

    def loss(self, x: Tensor) -> Tensor:
        return self.head(x).square().mean()


def branches(model: Model, x: Tensor, number: int) -> Tensor:
    """Runs two blocks, of which one enters the loss."""
    x = model.first(x)
    one, two = model.layers[1](x), model.layers[2](x)
    return model.loss(model.layers[3](two if number % 2 else one))


def branches_alone(model: Model, x: Tensor, number: int) -> Tensor:
    """Blocks read no value with a gradient."""
    one, two = model.layers[1](x), model.layers[2](x)
    return model.loss(two if number % 2 else one)


def extra_loss(model: Model, x: Tensor, number: int) -> Tensor:
    x = model.layers[1](model.first(x))
    extra = model.layers[2](x).square().mean()
    return model.loss(x) + (extra if number % 2 else 0)


def detached(model: Model, x: Tensor, number: int) -> Tensor:
    x = model.first(x)
    y = model.layers[1](x)
    return model.loss(model.layers[2](x + (y if number % 2 else y.detach())))


def without_grad(model: Model, x: Tensor, number: int) -> Tensor:
    x = model.first(x)
    with torch.set_grad_enabled(number % 2 > 0):
        y = model.layers[1](x)
    return model.loss(model.layers[2](x + y))


def constant(model: Model, x: Tensor, number: int) -> Tensor:
    loss = model.loss(model.layers[2](model.layers[1](model.first(x))))
    return loss if number % 2 else torch.zeros((), requires_grad=True) * 1.0


def no_loss(model: Model, x: Tensor, number: int) -> Tensor | None:
    loss = model.loss(model.layers[2](model.layers[1](model.first(x))))
    return loss if number % 2 else None


def twice(model: Model, x: Tensor, number: int) -> Tensor:
    x = model.layers[1](model.first(x))
    again = model.layers[1](model.layers[2](x))
    return model.loss(again if number % 2 else x)


def reads_first(model: Model, x: Tensor, number: int) -> Tensor:
    """Blocks read the first value, too, whose gradient comes last."""
    first = model.first(x)
    x = first
    for place, layer in enumerate(model.layers):
        x = layer(x, first if (place + number) % 2 else first.detach())
    return model.loss(x)


def dropped(model: Model, x: Tensor, number: int) -> Tensor:
    x = model.first(x)
    for place, layer in enumerate(model.layers):
        layer.is_dropped = (place + number) % 3 == 0  # type: ignore[assignment]
        x = layer(x)
    return model.loss(x)


def recomputed(model: Model, x: Tensor, number: int, *, is_reentrant: bool) -> Tensor:
    x = model.first(x)
    one, two = (checkpoint(model.layers[i], x, use_reentrant=is_reentrant) for i in (1, 2))
    return model.loss(two if number % 2 else one)


def skipped(model: Model, x: Tensor, number: int) -> Tensor:
    """Skips blocks that are recomputed by a reentrant checkpoint elsewhere."""
    x = model.first(x)
    for place, layer in enumerate(model.layers):
        if (place + number) % 3:
            x = checkpoint(layer, x, use_reentrant=True)
    return model.loss(x)


class Case(NamedTuple):
    run: Forward
    parallel: ParallelConfig = ParallelConfig()
    options: Mapping[str, Any] = MappingProxyType({})
    has_step: bool = True
    in_pairs: bool = False


ONCE, UNSHARDED = dict(dense_strategy="optim"), dict(dense_strategy="no_shard")
ALL_WHOLE = UNSHARDED | dict(embedding_strategy="no_shard")
EXPERTS = ParallelConfig(ep=2)
AGAIN = partial(recomputed, is_reentrant=False)
CASES = {
    "branches": Case(branches),
    "branches, plain loop": Case(branches, has_step=False),
    "branches, replicas": Case(branches, ParallelConfig(dp_replicate=2)),
    "branches, gathered once": Case(branches, options=ONCE),
    "branches, whole": Case(branches, options=ALL_WHOLE),
    "branches, experts elsewhere": Case(branches, EXPERTS),
    "branches, experts elsewhere, in pairs": Case(branches, EXPERTS, in_pairs=True),
    "branches, experts elsewhere, whole": Case(branches, ParallelConfig(ep=4), UNSHARDED),
    "branches of inputs": Case(branches_alone),
    "extra loss, experts elsewhere": Case(extra_loss, EXPERTS),
    "detached": Case(detached),
    "no_grad": Case(without_grad),
    "constant": Case(constant),
    "constant, gathered once": Case(constant, options=ONCE),
    "no loss": Case(no_loss),
    "twice": Case(twice),
    "reads the first value": Case(reads_first),
    "reads the first value, experts elsewhere": Case(reads_first, EXPERTS),
    "dropped": Case(dropped),
    "dropped, experts elsewhere": Case(dropped, EXPERTS),
    "recomputed": Case(AGAIN),
    "recomputed, experts elsewhere": Case(AGAIN, EXPERTS),
    "recomputed, reentrant": Case(partial(recomputed, is_reentrant=True)),
    "skipped, reentrant": Case(skipped),
}


RUNS = list(dict.fromkeys(case.run for case in CASES.values()))


def wanted_of(place: int) -> Grads:
    """Return the gradients of one process, which all layouts of one of `RUNS` share."""
    plain = Model(RUNS[place])
    for i in range(MICRO_BATCHES):
        for number in range(i, i + WORLD):
            loss = plain(row(number), number)
            if loss is not None:
                (loss / WORLD).backward()
    return grads_of(plain)


@cache
def made(parallel, options, has_step) -> tuple[Model, TrainStep | None]:
    """Return a model of a layout, which changes what it runs from step to step."""
    model = Model(branches)
    parallelize_moe(model, build_meshes(parallel, "cpu"), fsdp=FSDPOptions(**dict(options)))
    return model, TrainStep(model, num_micro_batches=MICRO_BATCHES) if has_step else None


def gradients(rank: int, case: Case, wanted: Grads) -> list[str]:
    """Return the names of parameters with another gradient than a plain process has."""
    model, step = made(case.parallel, tuple(case.options.items()), case.has_step)
    model.run = case.run
    for layer in model.layers:
        layer.is_dropped = False  # type: ignore[assignment]
    if step is not None:
        step.drop()
    if step is not None and case.in_pairs:
        wrong = run_in_pairs(step, model, range(rank, rank + MICRO_BATCHES))
        return wrong + differing(model, wanted, 1e-5)
    for i in range(MICRO_BATCHES):
        with step.micro_batch() if step is not None else nullcontext():
            loss = model(row(rank + i), rank + i)
            if loss is not None:
                loss.backward()
    return differing(model, wanted, 1e-5)


def frozen(model: Model, x: Tensor, number: int) -> Tensor:
    """A tower that is not trained, and a part under `no_grad`."""
    x = model.layers[0](x)
    with torch.no_grad():
        x = model.layers[1](x)
    return model.loss(model.layers[3](model.layers[2](x)))


def collectives(_rank: int) -> list[str]:
    """Return what equal ranks communicate in a backward behind frozen blocks."""
    model = Model(frozen)
    model.layers[:2].requires_grad_(False)
    parallelize_moe(model, build_meshes(ParallelConfig(), "cpu"))
    loss = model(row(0), 0)
    with recorded(model) as events:
        loss.backward()
    return [event for event in events if event.startswith(("gather", "reduce"))]


def worker(rank: int, _device: torch.device, names: list[str]) -> Any:
    wanted = by_turns(range(len(RUNS)), wanted_of)
    found: dict[str, Any] = {
        name: gradients(rank, CASES[name], wanted[RUNS.index(CASES[name].run)]) for name in names
    }
    return gather_objects(found | {"frozen": collectives(rank)})


found = ranks_fixture(WORLD, worker, "name")


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_one_process(name: str, found: Any) -> None:
    assert [of_rank[name] for of_rank in found] == [[]] * WORLD


def test_frozen_blocks_communicate_nothing_in_backward(found: Any) -> None:
    assert found[0]["frozen"] == [
        "gather layers.3",
        "gather layers.3.moe.experts",
        "gather layers.2",
        "gather layers.2.moe.experts",
        "reduce layers.3.moe.experts",
        "reduce layers.3",
        "gather layers.1",  # ahead
        "gather layers.1.moe.experts",
        "reduce layers.2.moe.experts",
        "reduce layers.2",
        "reduce the model",
    ]
