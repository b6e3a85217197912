"""Micro-batches in flight: gradients have the bits of one after the other, on 4 ranks.

A schedule is the number of a micro-batch for each turn. Its turns are the forwards of the parts of
the model, then their backwards in reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecore import FSDPOptions, ParallelConfig, TrainStep, build_meshes, parallelize_moe
from moecore.base.rank_checks import gather_objects
from moecore.train.rerun import drop_step
from tests.helpers.ranks import num_gpu_ranks, run_ranks
from tests.parallel.fsdp import test_unit
from tests.parallel.fsdp.units import recorded, units

WORLD, N = 4, 3
WIDE = 4096  # gathers of so wide matrices take longer than products of few rows
FREED = FSDPOptions(param_dtype=torch.bfloat16)
LAYOUTS = {"freed": FREED, "staying": replace(FREED, dense_strategy="optim")}
SCHEDULES = {
    "parts one by one": (0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2),
    "parts in turns": (0, 1, 0, 1, 0, 2, 1, 0, 2, 1, 2, 2),
}
CASES = list(product(LAYOUTS, SCHEDULES))
Part = Callable[[Any], Tensor]  # of what the part before returns
Grads = dict[str, Tensor]


class MicroBatch:
    """The turns of one."""

    def __init__(self, parts: list[Part]) -> None:
        self.parts, self.turns = parts, 2 * len(parts)
        self._edges: list[tuple[Any, Tensor]] = []
        self._grad: Tensor | None = None
        self._done = 0

    def advance(self) -> None:
        if self._done < len(self.parts):
            x = self._edges[-1][1].detach().requires_grad_() if self._edges else None
            self._edges.append((x, self.parts[self._done](x)))
        else:
            x, out = self._edges.pop()
            out.backward(self._grad)
            self._grad = None if x is None else x.grad
        self._done += 1


@cache
def made(layout: str, device_type: str) -> nn.Module:
    with torch.device(device_type):  # where wide weights are made and compared quickly
        model = test_unit.Model()
    return parallelize_moe(model, build_meshes(ParallelConfig(), device_type), fsdp=LAYOUTS[layout])


def start(layout: str, device_type: str) -> tuple[nn.Module, list[MicroBatch], TrainStep]:
    """Return a layout's model, of which all steps are dropped, and micro-batches of a new one."""
    model = made(layout, device_type)
    drop_step(model)
    micro_batches = [MicroBatch(stages_of(model, n)) for n in range(N)]
    return model, micro_batches, TrainStep(model, num_micro_batches=N)


def stages_of(model: Any, n: int) -> list[Part]:
    """Return the first blocks, and the last with a loss, as two stages on one rank call them."""

    def first(_: None) -> Tensor:
        g = torch.Generator().manual_seed(10 * n + dist.get_rank())
        model.first, model.depth = 0, 2
        found: Tensor = model(torch.randn(3, test_unit.DIM, generator=g))[-2]
        return found

    def last(x: Tensor) -> Tensor:
        model.first, model.depth = 2, test_unit.BLOCKS
        found: Tensor = model(x)[-1].float().square().mean()
        return found

    return [first, last]


def run(layout: str, device_type: str, schedule: Sequence[int]) -> tuple[Grads, list[str]]:
    """Return the gradients of a step with micro-batches in flight, and what it missed."""
    model, micro_batches, step = start(layout, device_type)
    in_flight = step.micro_batches(forwards=N * len(micro_batches[0].parts))
    with in_flight, recorded(model) as events:  # what the end of the step does is not recorded
        for n in schedule:
            micro_batches[n].advance()
    return gradients(model), misses(events, model)


@cache
def run_one_by_one(layout: str, device_type: str, order: tuple[int, ...]) -> Grads:
    model, micro_batches, step = start(layout, device_type)
    for n in order:
        with step.micro_batch():
            for _ in range(micro_batches[n].turns):
                micro_batches[n].advance()
    return gradients(model)


def gradients(model: nn.Module) -> Grads:
    return {n: p.grad.to_local().clone() for n, p in model.named_parameters()}  # type: ignore[union-attr, operator]


def ended(schedule: Iterable[int]) -> tuple[int, ...]:
    """Return micro-batches in the order of their last turns."""
    last = {n: turn for turn, n in enumerate(schedule)}
    return tuple(sorted(last, key=last.__getitem__))


def misses(events: list[str], model: nn.Module) -> list[str]:
    """Return units that stay and communicate more than once, and others not reduced every time."""
    found = []
    for unit in (unit for unit in units(model) if unit.is_sharded):
        stays, name = unit.options.is_resident, unit.options.name
        gathers, reductions = (events.count(f"{verb} {name}") for verb in ("gather", "reduce"))
        if reductions != (1 if stays else N) or (stays and gathers != 1):
            found.append(f"{name}: {gathers} gathers, {reductions} reductions")
    return found


def worker(rank: int, device: torch.device, width: int) -> list[dict[Any, Any]]:
    test_unit.DIM = width
    found: dict[Any, Any] = {}
    for layout, schedule in CASES:
        turns = SCHEDULES[schedule]
        ours, missed = run(layout, device.type, turns)
        wanted = run_one_by_one(layout, device.type, ended(turns))
        assert ours.keys() == wanted.keys() and len(ours) > 10
        wrong = [name for name, t in wanted.items() if not torch.equal(ours[name], t)]
        found[layout, schedule] = (wrong, missed)
    return gather_objects(found)


def test_gradients_have_the_bits_of_one_after_the_other() -> None:
    """What stays whole is gathered once and reduced once."""
    found = run_ranks(WORLD, worker, test_unit.DIM)
    assert found == [dict.fromkeys(CASES, ([], []))] * WORLD


@pytest.mark.gpu
def test_streams_of_micro_batches_in_flight() -> None:
    """Gathers and reductions beside compute; collectives of NCCL are not counted."""
    found = run_ranks(num_gpu_ranks(), worker, WIDE, device_type="cuda")
    assert [wrong for of_rank in found for wrong, _ in of_rank.values() if wrong] == []
