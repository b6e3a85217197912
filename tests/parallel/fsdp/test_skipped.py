from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moecore import (
    DispatchOptions,
    FSDPOptions,
    MoEConfig,
    MoELayer,
    ParallelConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.base.rank_checks import gather_objects
from tests.families.transformers.family_models import batch, loss_of, tiny_model
from tests.helpers.ranks import ranks_fixture
from tests.helpers.whole import Held, by_turns, part_of

pytestmark = pytest.mark.slow

WORLD, DIM, DEPTH, MICRO_BATCHES = 4, 16, 5, 2
MOE = MoEConfig(dim=DIM, hidden_dim=8, num_experts=4, top_k=2)
# Blocks that one rank skips in one micro-batch; the ranks take turns.
SKIPPED = [(), (1,), (0, 1), (4,), (0, 2, 4), (0, 1, 2, 3, 4)]
# Where numbers start and how far those of ranks are apart, see `number_of`. From 5 on a rank skips
# all in both micro-batches, beside one that skips nothing.
OF_ALL, OF_EXPERTS = [(0, 1), (5, 1)], [(5, 1), (1, 0)]
OPTIONS: dict[str, tuple[ParallelConfig, dict[str, Any]]] = {
    "freed": (ParallelConfig(), {}),
    "no prefetch": (ParallelConfig(), dict(prefetch_blocks=0)),
    "together": (ParallelConfig(), dict(blocks_per_unit=2)),
    "gathered once": (ParallelConfig(dp_replicate=2), dict(dense_strategy="optim")),
    "bf16, routers apart": (ParallelConfig(), dict(param_dtype=torch.bfloat16)),
    "whole": (ParallelConfig(), dict(dense_strategy="no_shard")),
    "experts elsewhere": (ParallelConfig(ep=2), {}),
    "experts elsewhere, whole": (ParallelConfig(ep=4), dict(dense_strategy="no_shard")),
    "experts elsewhere, in pairs": (ParallelConfig(ep=2), {}),
    "experts elsewhere, far ahead, in pairs": (ParallelConfig(ep=4), dict(prefetch_blocks=3)),
    "experts elsewhere, bf16, in pairs": (ParallelConfig(ep=4), dict(param_dtype=torch.bfloat16)),
    "experts elsewhere, two levels, in pairs": (ParallelConfig(ep=4), {}),
    "experts elsewhere, gathered once, in pairs": (
        ParallelConfig(ep=2),
        dict(dense_strategy="optim"),
    ),
    "experts elsewhere, tokens as FP8": (ParallelConfig(ep=2), {}),
    "experts elsewhere, two levels, tokens as FP8": (ParallelConfig(ep=4), {}),
}
IMAGES = ("ernie4_5_vl_moe", "glm4v_moe", "qwen3_omni_moe", "qwen3_vl_moe")
IMAGE, IMAGE_INPUTS = slice(2, 6), ("pixel_values", "image_grid_thw")  # of their batches


class Block(nn.Module):
    def __init__(self, place: int) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(DIM, DIM), nn.Parameter(torch.ones(DIM))
        self.moe = MoELayer(MOE) if place % 2 else None

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gain * torch.tanh(self.linear(x))
        return x if self.moe is None else x + self.moe(x)


class Model(nn.Module):
    """Runs the first or the second of two linears, and skips blocks; `never` no rank uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.never = (nn.Linear(DIM, DIM) for _ in range(3))
        self.layers = nn.ModuleList(Block(place) for place in range(DEPTH))
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, number: int) -> Tensor:
        x = (self.second if number % 2 else self.first)(x)
        for place, layer in enumerate(self.layers):
            if place not in SKIPPED[number % len(SKIPPED)]:
                x = layer(x)
        return self.head(x).square().mean()


def row(number: int) -> Tensor:
    return torch.randn(3, DIM, generator=torch.Generator().manual_seed(number))


Grads = list[Tensor | None]  # of parameters in their order


def grads_of(model: nn.Module) -> Grads:
    return [param.grad for param in model.parameters()]


def differing(model: nn.Module, wanted: Grads, bound: float) -> list[str]:
    """Return the names of parameters of which this rank has another gradient than is wanted."""
    found = []
    for (name, param), grad in zip(model.named_parameters(), wanted, strict=True):
        if param.grad is None or grad is None:
            same = param.grad is grad
        else:
            error = (Held.of(param.grad).local - part_of(grad, param.grad)).abs()
            same = bool((error <= bound * grad.abs().max()).all())
        found += [] if same else [name]
    return found


def number_of(rank: int, i: int, start: int, apart: int) -> int:
    """Return what a rank's micro-batch runs; with `apart` 0 there is a block that none runs."""
    return start + apart * rank * (i + 1)


def made(*, is_bf16: bool) -> Model:
    """Return a model, with weights that bf16 has if only its sums are to be rounded."""
    model = Model()
    for param in model.parameters() if is_bf16 else ():
        param.data = param.bfloat16().float()
    return model


def wanted_of(key: tuple[int, int, int]) -> Grads:
    """Return the gradients of one process, which all options share."""
    start, apart, is_bf16 = key
    plain = made(is_bf16=bool(is_bf16))
    for i in range(MICRO_BATCHES):
        for rank in range(WORLD):
            number = number_of(rank, i, start, apart)
            (plain(row(number), number) / WORLD).backward()
    return grads_of(plain)


def skipping(rank: int, asked: Collection[str]) -> dict[str, list[str]]:
    found, starts = {}, dict.fromkeys((*OF_ALL, *OF_EXPERTS))
    wanted = by_turns([(*start, is_bf16) for start in starts for is_bf16 in (0, 1)], wanted_of)
    for name, (parallel, options) in ((n, of) for n, of in OPTIONS.items() if n in asked):
        is_bf16 = "param_dtype" in options
        model, levels = made(is_bf16=is_bf16), 2 if "two levels" in name else None
        parallelize_moe(
            model,
            build_meshes(parallel, "cpu", ranks_per_domain=levels),
            dispatch=DispatchOptions(name="hierarchical" if levels else "auto", fp8="FP8" in name),
            fsdp=FSDPOptions(**options),
        )
        step, found[name] = TrainStep(model, num_micro_batches=MICRO_BATCHES), list[str]()
        for start, apart in OF_EXPERTS if "elsewhere" in name else OF_ALL:
            numbers = [number_of(rank, i, start, apart) for i in range(MICRO_BATCHES)]
            step.drop()
            if "in pairs" in name:
                found[name] += run_in_pairs(step, model, numbers)
            else:
                for number in numbers:
                    with step.micro_batch():
                        model(row(number), number).backward()
            bound = 0.1 if is_bf16 or "FP8" in name else 1e-5
            found[name] += differing(model, wanted[start, apart, is_bf16], bound)
    return found


def run_in_pairs(step: TrainStep, model: nn.Module, numbers: Sequence[int]) -> list[str]:
    """Run each forward beside the backward of the micro-batch before, and then behind it.

    Returns the names of losses and parameters that pairs give other bits.
    """
    found = list[dict[str, Tensor | None]]()
    for pair in (step.side_by_side, one_by_one):
        step.drop()
        losses = list[Tensor]()
        with step.micro_batches():
            losses.append(model(row(numbers[0]), numbers[0]))
            for number in numbers[1:]:
                forward = partial(model, row(number), number)
                losses.append(pair(forward, losses[-1].backward))
            losses[-1].backward()
        of_params = {
            n: None if p.grad is None else Held.of(p.grad).local.clone()
            for n, p in model.named_parameters()
        }
        found.append({f"loss {i}": loss.detach() for i, loss in enumerate(losses)} | of_params)
    beside, behind = found
    return [
        n for n, x in behind.items() if not (x is beside[n] is None or torch.equal(x, beside[n]))
    ]


def one_by_one(forward: Callable[[], Any], backward: Callable[[], None]) -> Any:
    found = forward()
    backward()
    return found


def mixed_batch(model: nn.Module, of_rank: int) -> dict[str, Any]:
    """Return a rank's batch: of every other rank one without images."""
    inputs = batch(model, of_rank)
    if of_rank % 2:
        inputs = {n: x for n, x in inputs.items() if n not in IMAGE_INPUTS}
        inputs["input_ids"][:, IMAGE] = 52  # which is no special token
        inputs = {n: x * 0 if "token_type" in n else x for n, x in inputs.items()}
    return inputs


def wanted_of_family(family: str) -> Grads:
    plain = tiny_model(family)
    for of_rank in range(WORLD):
        (loss_of(plain, mixed_batch(plain, of_rank)) / WORLD).backward()
    return grads_of(plain)


def text_beside_images(rank: int, asked: Collection[str]) -> dict[str, list[str]]:
    found, families = {}, [family for family in IMAGES if family in asked]
    for family, wanted in by_turns(families, wanted_of_family).items():
        model = tiny_model(family)
        inputs = mixed_batch(model, rank)
        parallelize_moe(model, build_meshes(ParallelConfig(ep=2, edp_shard=2), "cpu"))
        loss_of(model, inputs).backward()
        found[family] = differing(model, wanted, 1e-4)
    return found


def worker(rank: int, _device: torch.device, asked: list[str]) -> Any:
    found = skipping(rank, asked) | text_beside_images(rank, asked)
    return gather_objects(found)


found = ranks_fixture(WORLD, worker, "name")


@pytest.mark.parametrize("name", [*OPTIONS, *IMAGES])
def test_gradients_are_those_of_one_process(name: str, found: Any) -> None:
    assert [of_rank[name] for of_rank in found] == [[]] * WORLD
