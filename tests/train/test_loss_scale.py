"""Loss scaling: a scaled step is the step without, whichever the optimizer, and fp16 is near fp32.

The scale of auxiliary losses shows where the main loss is 0: unscaled they would be off by it.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecore import (
    BalanceConfig,
    DynamicLossScale,
    FSDPOptions,
    Meshes,
    MoEConfig,
    ParallelConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.base.options.precision import Precision, Recipe
from moecore.base.rank_checks import gather_objects
from moecore.base.torch_private import get_local_tensor
from moecore.io import load, save
from moecore.models import Decoder
from moecore.precision.apply import apply_precision
from moecore.train import AdamW
from moecore.train.loss_scale import LARGEST, SMALLEST, LossScale, check_loss_scale
from tests.helpers.errors import error_of
from tests.helpers.ranks import ranks_fixture
from tests.train import test_step
from tests.train.test_step import are_equal, loss_of, weights

BALANCE = BalanceConfig(
    micro_batch_coef=0.02, sequence_coef=0.01, global_batch_coef=0.02, z_loss_coef=0.01
)
MOE = MoEConfig(
    dim=32, hidden_dim=24, num_experts=4, top_k=2, shared_hidden_dim=16, balance=BALANCE
)
CONFIG = replace(test_step.CONFIG, vocab_size=66, moe=MOE)
FP8 = replace(
    CONFIG, dim=128, head_dim=32, moe=replace(CONFIG.moe, dim=128, hidden_dim=128, num_experts=4)
)
# Experts are FSDP2 units of two ranks, or whole on a rank, which adds their gradients itself.
MESHES = {"units": {"dp_shard": 4, "ep": 2}, "whole": {"dp_shard": 2, "tp": 2, "ep": 4}}
NEAR = (
    ("units", "all losses", 1.0),
    ("whole", "all losses", 1.0),
    ("whole", "auxiliary losses alone", 0.0),
)
FP16, BF16 = {"param_dtype": torch.float16}, {"param_dtype": torch.bfloat16}
MICRO_BATCHES, NORM = 2, 0.1
BOUND = 8 * 2.0**-11  # of a gradient's relative error: eight roundings of fp16
AT_START = DynamicLossScale(initial=2.0**14, growth_interval=2)


def make(mesh="units", config=CONFIG, *, fp8=False, **fsdp) -> Decoder:
    model, meshes = Decoder(config, device="meta"), meshes_of(mesh)
    precision = Precision(recipe=Recipe()) if fp8 else None
    parallelize_moe(model, meshes, fsdp=FSDPOptions(**fsdp), precision=precision)
    model.to_empty(device="cpu")
    model.init_weights(0)
    model.data_rank = meshes.data_rank
    return model


@cache
def meshes_of(mesh: str) -> Meshes:
    return build_meshes(ParallelConfig(**MESHES[mesh]), "cpu")


def run(step: TrainStep, model: Any, *, first: int = 0, factor: float = 1.0) -> None:
    """Run a step's micro-batches; the main loss times a factor."""
    for n in range(step.num_micro_batches):
        with step.micro_batch():
            loss = loss_of(model, first + n, model.data_rank)
            step.scale_loss(loss * (factor / step.num_micro_batches)).backward()


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "moecore's": lambda m: AdamW(m.parameters(), lr=0.05, eps=1e-2),
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.05, eps=1e-2, fused=True),
    "foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.05, eps=1e-2, foreach=True),
    "the caller's": lambda m: torch.optim.AdamW(m.parameters(), lr=0.05, eps=1e-2),
}


def train(how, mesh, scale, max_norm=NORM, **options) -> tuple[list[Tensor], float]:
    """Return the weights after a step and its norm; eps keeps AdamW's first from being a sign."""
    model = make(mesh, **options)
    optimizer, owns = OPTIMIZERS[how](model), how != "the caller's"
    options = dict(max_norm=max_norm, num_micro_batches=MICRO_BATCHES, loss_scale=scale)
    step = TrainStep(model, optimizer if owns else None, **options)
    run(step, model)
    if not owns:
        step.clip()
        optimizer.step()
    norm = step.finish().norm
    return weights(model), norm.total


def exact() -> dict[str, bool]:
    """Whether steps with and without a scale are equal to the bit, by case."""
    cases: dict[str, tuple[str, str, dict[str, Any]]] = {
        "units": ("moecore's", "units", {}),
        "whole experts": ("foreach", "whole", {}),
        "bf16, not clipped": ("fused", "whole", {**BF16, "max_norm": math.inf}),
        "the caller's, not clipped": ("the caller's", "units", {"max_norm": math.inf}),
        "FP8": ("moecore's", "units", {"config": FP8, "fp8": True}),
    }
    found = {}
    for name, (how, mesh, options) in cases.items():
        (plain, norm), (scaled, same) = (
            train(how, mesh, scale, **options) for scale in (None, AT_START)
        )
        found[name] = are_equal(plain, scaled) and norm == same and norm > NORM
    return found


@cache
def gradients(mesh, factor, scale, **options) -> tuple[dict[str, Tensor], float]:
    """Return this rank's gradients without the scale, and the norm."""
    model = make(mesh, **options)
    step = TrainStep(model, num_micro_batches=MICRO_BATCHES, loss_scale=scale)
    run(step, model, factor=factor)
    norm = step.clip().total
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    found = {n: get_local_tensor(grad).clone() for n, grad in grads.items()}
    step.finish()
    return found, norm


def near_fp32(mesh, factor, dtype=FP16, **options) -> tuple[float, float, str]:
    """Return the errors of a dtype's norm and of its worst gradient, relative, and whose that is.

    A gradient that is hardly more than rounding is compared with 1e-4 of the norm.
    """
    wide, norm = gradients(mesh, factor, None, **options)
    got, near = gradients(mesh, factor, AT_START, **dtype, **options)
    assert wide.keys() == got.keys()
    errors = {
        name: float((got[name] - grad).norm() / grad.norm().clamp(min=1e-4 * norm))
        for name, grad in wide.items()
    }
    worst = max(errors, key=lambda name: errors[name])
    return abs(near / norm - 1), errors[worst], worst


def overflow() -> dict[str, Any]:
    """Steps of fp16: one good, one that overflows on rank 2 alone, then good ones."""
    model = make(**FP16)
    step = TrainStep(model, AdamW(model.parameters()), loss_scale=AT_START)
    found: dict[str, Any] = {"steps": [], "changed": []}
    for n in range(6):
        before = weights(model)
        run(step, model, factor=1e9 if n == 1 and dist.get_rank() == 2 else 1.0)
        numbers = step.finish().to_dict()
        found["steps"].append((numbers["skipped"], numbers["loss_scale"]))
        found["changed"].append(not are_equal(before, weights(model)))
    return found


def saved(folder: str) -> tuple[list[float], list[float], bool]:
    """Return the scales of two steps after a save and after its load, and if weights are equal."""

    def job(options: DynamicLossScale) -> tuple[Decoder, TrainStep, torch.optim.Optimizer]:
        model = make(**FP16)
        optimizer = AdamW(model.parameters())
        return model, TrainStep(model, optimizer, loss_scale=options), optimizer

    def go_on(model: Decoder, step: TrainStep) -> list[float]:
        scales = []
        for n in range(2):
            run(step, model, first=1 + n)
            scales.append(step.finish().to_dict()["loss_scale"])
        return scales

    model, step, optimizer = job(AT_START)
    run(step, model)
    step.finish()
    path = save(Path(folder), 1, model, optimizer, {"step": 1, **step.state_dict()})
    first, after = go_on(model, step), weights(model)
    model, step, optimizer = job(replace(AT_START, initial=2.0**8))
    step.load_state_dict(load(path, model, optimizer))
    return first, go_on(model, step), are_equal(after, weights(model))


def refusals() -> dict[str, str]:
    model = make(**FP16)
    found = {"none": error_of(lambda: TrainStep(model, AdamW(model.parameters())))}
    step = TrainStep(model, loss_scale=AT_START)

    def unscaled() -> None:
        with step.micro_batch():
            loss_of(model, 0, model.data_rank).backward()

    found["unscaled"] = error_of(unscaled)
    step.drop()
    run(step, model)
    found["not clipped"] = error_of(step.finish)
    found["state"] = error_of(lambda: step.load_state_dict({"step": 3}))
    bad = step.state_dict() | {"loss_scale": torch.tensor(math.nan)}
    found["nan"] = error_of(lambda: step.load_state_dict(bad))
    scaler, alone = torch.amp.GradScaler("cpu"), make(**FP16)
    other = replace(AT_START, growth_interval=3) if dist.get_rank() == 0 else AT_START
    found["other options"] = error_of(lambda: TrainStep(model, loss_scale=other))
    found["GradScaler"] = error_of(lambda: scaler.scale(loss_of(alone, 0)).backward())
    return found


def worker(rank: int, device: torch.device, folder: str) -> dict[str, Any]:
    return {
        "exact": gather_objects(exact()),
        "near": {
            (mesh, what): gather_objects(near_fp32(mesh, factor)) for mesh, what, factor in NEAR
        },
        "FP8": [near_fp32("units", 1.0, dtype, config=FP8, fp8=True) for dtype in (FP16, BF16)],
        "overflow": gather_objects(overflow()),
        "saved": saved(folder),
        "refusals": refusals(),
    }


found = ranks_fixture(4, worker, in_folder=True)


def test_a_scaled_step_is_the_step_without_to_the_bit(found: dict[str, Any]) -> None:
    for of_rank in found["exact"]:
        assert all(of_rank.values()), of_rank


@pytest.mark.parametrize(("mesh", "what"), [case[:2] for case in NEAR])
def test_gradients_of_fp16_are_those_of_fp32(mesh: str, what: str, found: dict[str, Any]) -> None:
    for norm, worst, name in found["near"][mesh, what]:
        assert norm < BOUND and worst < BOUND, (norm, worst, name)


def test_fp8_loses_no_more_in_fp16_than_in_bf16(found: dict[str, Any]) -> None:
    (norm, worst, name), (_, of_bf16, _) = found["FP8"]
    assert norm < BOUND and worst < of_bf16, (norm, worst, name)


def test_an_overflow_on_one_rank_skips_the_step_on_all(found: dict[str, Any]) -> None:
    """The scale halves, and doubles after two good steps that follow each other."""
    high, low = AT_START.initial, AT_START.initial / 2
    skipped, scales = (0, 1, 0, 0, 0, 0), (high, high, low, low, high, high)
    for of_rank in found["overflow"]:
        assert of_rank["steps"] == list(zip(skipped, scales, strict=True))
        assert of_rank["changed"] == [not skip for skip in skipped]


def test_a_loaded_step_goes_on_with_scale_and_count(found: dict[str, Any]) -> None:
    first, again, is_equal = found["saved"]
    assert first == again == [AT_START.initial, 2 * AT_START.initial] and is_equal


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("none", r"loss_scale \(None\) must be a DynamicLossScale for FSDPOptions.param_dtype"),
        ("unscaled", r"micro_batch\(\) must scale its loss where a loss_scale is given"),
        ("not clipped", r"finish\(\) must follow clip\(\) where a loss_scale is given"),
        ("state", r"state \(step\) must have loss_scale: "),
        ("nan", r"loss_scale \(nan\) must be a power of two >= 1.0"),
        ("other options", r"TrainStep.loss_scale \(DynamicLossScale\(.* on rank 1\) must be the"),
        ("GradScaler", r"dtype of the layer \(torch.float16\) must not be fp16 with auxiliary"),
    ],
)
def test_what_would_train_wrongly_is_one_line(case, message, found) -> None:
    error = found["refusals"][case]
    assert "\n" not in error
    with pytest.raises(ValueError, match=message):
        raise ValueError(error)


def test_models_that_can_not_be_scaled_are_refused() -> None:
    half = nn.Linear(16, 16).half()
    message = r"dtype of weight \(torch.float16\) must be torch.float32"
    with pytest.raises(ValueError, match=message):
        check_loss_scale(half, AT_START)
    check_loss_scale(half.requires_grad_(False), AT_START)
    model = nn.ModuleDict({"up_proj": nn.Linear(16, 16)})
    check_loss_scale(model, AT_START)
    recipe = Recipe(scaling="tensorwise", amax_history=2)
    apply_precision(model, Precision(recipe=recipe))
    with pytest.raises(ValueError, match="amax_history must be 0 with a loss_scale"):
        check_loss_scale(model, AT_START)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"initial": 3.0}, r"initial \(3.0\) must be a power of two"),
        ({"initial": 0.5}, r"initial \(0.5\) must be a finite number >= 1.0"),
        ({"growth_interval": 0}, r"growth_interval \(0\) must be a whole number >= 1"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DynamicLossScale(**options)


@pytest.mark.parametrize(("skipped", "limit"), [(True, SMALLEST), (False, LARGEST)])
def test_a_scale_stays_in_its_range_and_in_its_memory(skipped: bool, limit: float) -> None:
    scale = LossScale(DynamicLossScale(growth_interval=1), torch.device("cpu"))
    places = scale.value.data_ptr(), scale.num_good.data_ptr()
    for _ in range(40):
        scale.update_scale(torch.tensor(skipped))
    scale.load_state_dict(scale.state_dict())
    assert scale.value == limit and scale.num_good == 0
    assert places == (scale.value.data_ptr(), scale.num_good.data_ptr())
