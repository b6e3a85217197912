"""Micro-batches in flight: gradients and counts have the bits of one after the other, on 4 ranks.

A schedule is the number of a micro-batch for each turn. Its turns are the forwards of the parts of
the model, then their backwards in reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecore import FSDPOptions, MoEConfig, ParallelConfig, TrainStep, build_meshes, parallelize_moe
from moecore.models import Decoder, DecoderConfig
from moecore.parallel.model.parallel_state import moe_state
from moecore.train.rerun import drop_step
from tests.helpers.grids import asked_for, beside
from tests.helpers.ranks import num_gpu_ranks, run_ranks
from tests.parallel.fsdp import test_unit
from tests.parallel.fsdp.units import recorded, units

WORLD, N = 4, 3
WIDE = 4096  # gathers of so wide matrices take longer than products of few rows
CONFIG = DecoderConfig(
    vocab_size=60,
    dim=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_seq_len=32,
    moe=MoEConfig(dim=32, hidden_dim=24, num_experts=4, top_k=2),
)
FREED = FSDPOptions(param_dtype=torch.bfloat16)
STAYING = replace(FREED, dense_strategy="optim")
REPLICAS = ParallelConfig(dp_replicate=2, dp_shard=2, edp_shard=4)
LAYOUTS = {
    "freed": (ParallelConfig(ep=2), FREED),
    "staying": (ParallelConfig(ep=2), STAYING),
    "staying, but for experts": (REPLICAS, replace(STAYING, experts_strategy="optim_grads_params")),
    "staying, experts whole": (ParallelConfig(dp_shard=2, tp=2, ep=4), STAYING),
    "freed, in two parts": (ParallelConfig(), FREED),
    "staying, in two parts": (ParallelConfig(), STAYING),
}
LAST_FIRST = "the last one first"
SCHEDULES = {
    "forwards first": (0, 1, 2, 0, 1, 2),
    "one forward, one backward": (0, 1, 0, 2, 1, 2),
    LAST_FIRST: (0, 1, 2, 2, 1, 0),
}
PARTS = {
    "parts one by one": (0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2),
    "parts in turns": (0, 1, 0, 1, 0, 2, 1, 0, 2, 1, 2, 2),
}
Part = Callable[[Any], Tensor]  # of what the part before returns
CASES = [
    (layout, schedule, told)
    for layout in LAYOUTS
    for schedule in (PARTS if layout.endswith("parts") else SCHEDULES)
    for told in (True, False)
    if told or schedule in (LAST_FIRST, "parts in turns")
]
# Of the two schedules that end in the order in which they begin, a layout has one each time.
NIGHTLY = [
    (layout, list(SCHEDULES)[place % 2], True)
    for place, layout in enumerate(LAYOUTS)
    if not layout.endswith("parts")
]


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
def made(layout: str, device_type: str) -> Any:
    parallel, options = LAYOUTS[layout]
    meshes = build_meshes(parallel, device_type)
    if layout.endswith("parts"):
        with torch.device(device_type):  # where wide weights are made and compared quickly
            staged = test_unit.Model()
        parallelize_moe(staged, meshes, fsdp=options)
        return staged
    model = Decoder(CONFIG, device="meta")
    parallelize_moe(model, meshes, fsdp=options)
    model.to_empty(device=device_type)
    model.init_weights()
    return model


def start(layout: str, device_type: str) -> tuple[nn.Module, list[MicroBatch]]:
    """Return a layout's model, of which all steps are dropped, and micro-batches of a new one."""
    model = made(layout, device_type)
    drop_step(model)
    if layout.endswith("parts"):
        return model, [MicroBatch(stages_of(model, n)) for n in range(N)]
    tp = LAYOUTS[layout][0].tp
    return model, [MicroBatch([partial(loss_of, model, tp, n)]) for n in range(N)]


def loss_of(model: Decoder, tp: int, n: int, _: None) -> Tensor:
    g = torch.Generator().manual_seed(10 * n + dist.get_rank() // tp)
    tokens = torch.randint(0, CONFIG.vocab_size, (2, 13), generator=g)
    loss: Tensor = model(tokens[:, :-1], tokens[:, 1:].contiguous()) / N
    return loss


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


def run(
    layout: str, device_type: str, schedule: Iterable[int], *, told: bool
) -> tuple[dict[str, Tensor], list[str]]:
    """Return gradients and counts of a step with micro-batches in flight, and what it missed."""
    model, micro_batches = start(layout, device_type)
    step = TrainStep(model, num_micro_batches=N)
    if not told:
        del step
    forwards = N * len(micro_batches[0].parts)
    in_flight = step.micro_batches(forwards=forwards) if told else nullcontext()
    with in_flight, recorded(model) as events:  # what the end of the step does is not recorded
        for n in schedule:
            micro_batches[n].advance()
    return found_in(model), misses(events, model)


@cache
def run_one_by_one(
    layout: str, device_type: str, order: tuple[int, ...], *, told: bool
) -> dict[str, Tensor]:
    model, micro_batches = start(layout, device_type)
    step = TrainStep(model, num_micro_batches=N)
    if not told:
        del step
    for n in order:
        with step.micro_batch() if told else nullcontext():
            for _ in range(micro_batches[n].turns):
                micro_batches[n].advance()
    return found_in(model)


def found_in(model: nn.Module) -> dict[str, Tensor]:
    layers = moe_state(model).layers
    found = {f"counts {n}": each.tracker.counts.choices_E.clone() for n, each in layers.items()}
    return found | {n: p.grad.to_local().clone() for n, p in model.named_parameters()}  # type: ignore[union-attr, operator]


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


def compare(cases: Iterable[tuple[str, str, bool]], device_type: str) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for layout, schedule, told in cases:
        turns = (PARTS | SCHEDULES)[schedule]
        ours, missed = run(layout, device_type, turns, told=told)
        wanted = run_one_by_one(layout, device_type, ended(turns), told=told)
        assert ours.keys() == wanted.keys() and len(ours) > 10
        wrong = [name for name, t in wanted.items() if not torch.equal(ours[name], t)]
        found[layout, schedule, told] = (wrong, missed)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    return {case: [one[case] for one in every] for case in found}


def worker(rank: int, device: torch.device, cases: list[tuple[str, str, bool]]) -> dict[Any, Any]:
    return compare(cases, device.type)


def gpu_worker(rank: int, device: torch.device) -> dict[Any, Any]:
    test_unit.DIM = WIDE
    return compare([case for case in CASES if case[0].endswith("parts")], device.type)


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[Any, Any]:
    return run_ranks(WORLD, worker, asked_for(request, "layout", "schedule", "told"))


@pytest.mark.parametrize(("layout", "schedule", "told"), beside(CASES, NIGHTLY, several=True))
def test_gradients_have_the_bits_of_one_after_the_other(
    layout: str, schedule: str, told: bool, found: dict[Any, Any]
) -> None:
    """Told, what stays whole is gathered once and reduced once."""
    for wrong, missed in found[layout, schedule, told]:
        assert wrong == []
        assert missed == [] or not told


@pytest.mark.gpu
def test_streams_of_micro_batches_in_flight() -> None:
    """Gathers and reductions beside compute; collectives of NCCL are not counted."""
    found = run_ranks(num_gpu_ranks(), gpu_worker, device_type="cuda")
    assert {case: [wrong for wrong, _ in ranks if wrong] for case, ranks in found.items()} == {
        case: [] for case in found
    }
