import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from moecore import (
    BalanceConfig,
    FSDPOptions,
    MoEConfig,
    ParallelConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.base.rank_checks import gather_objects
from moecore.io import latest, load, save
from moecore.models import Decoder, DecoderConfig
from tests.helpers.errors import error_of
from tests.helpers.ranks import ranks_fixture

BALANCE = BalanceConfig(micro_batch_coef=0.01, bias_update_rate=0.01)
CONFIG = DecoderConfig(
    vocab_size=61,
    dim=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_seq_len=32,
    moe=MoEConfig(dim=32, hidden_dim=24, num_experts=4, top_k=2, expert_bias=True, balance=BALANCE),
)
MICRO_BATCHES, STEPS, NORM = 3, 2, 0.1
MARKS = ("router", "dispatch", "experts", "combine", "clip", "optimizer", "finish")


def make(seed: int = 0) -> Decoder:
    model = Decoder(CONFIG, device="meta")
    # In bf16 routers are units of their own, and experts keep their casts.
    fsdp = FSDPOptions(param_dtype=torch.bfloat16, experts_strategy="optim")
    parallelize_moe(model, build_meshes(ParallelConfig(ep=2), "cpu"), fsdp=fsdp)
    model.to_empty(device="cpu")
    model.init_weights(seed)
    return model


def adamw(model: nn.Module, *, fused: bool = True) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-2, fused=fused)


def loss_of(model: nn.Module, n: int, rank: int | None = None) -> Tensor:
    """The loss of a batch of a rank, by default this one."""
    g = torch.Generator().manual_seed(10 * n + (dist.get_rank() if rank is None else rank))
    tokens = torch.randint(0, CONFIG.vocab_size, (2, 9), generator=g)
    loss: Tensor = model(tokens[:, :-1], tokens[:, 1:].contiguous())
    return loss


def run(step: TrainStep, model: nn.Module, *, first: int = 0) -> None:
    for n in range(step.num_micro_batches):
        with step.micro_batch():
            (loss_of(model, first + n) / step.num_micro_batches).backward()


def weights(*models: nn.Module) -> list[Tensor]:
    return [t.to_local() if hasattr(t, "to_local") else t for m in models for t in values(m)]


def values(model: nn.Module) -> list[Any]:
    return [t.detach().clone() for t in model.state_dict().values()]


def are_equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) > 10 and all(map(torch.equal, a, b))


def train(how: str) -> tuple[list[Tensor], list[float]]:
    """Weights and norms of steps that an owner runs as a whole, or in pieces."""
    model = make()
    optimizer = adamw(model, fused=how == "fused")
    own = None if how == "pieces" else optimizer
    step = TrainStep(model, own, max_norm=NORM, num_micro_batches=MICRO_BATCHES)
    norms = []
    for n in range(STEPS):
        run(step, model, first=MICRO_BATCHES * n)
        if how == "pieces":
            step.clip()
            optimizer.step()
            optimizer.zero_grad()
        done = step.finish()
        assert done.norm is not None and not bool(done.is_skipped)
        norms.append(done.norm.total)
    assert not {"found_inf", "grad_scale"} & vars(optimizer).keys()
    return weights(model), norms


def wrong_orders() -> dict[str, str]:
    model = make()
    optimizer = adamw(model)
    step = TrainStep(model, optimizer, num_micro_batches=2)
    found = {"nothing": error_of(step.finish), "clip": error_of(step.clip)}
    found["outside"] = error_of(lambda: loss_of(model, 0).backward())
    with step.micro_batch():
        loss_of(model, 0).backward()
        found["within"] = error_of(step.finish)
        found["nested"] = error_of(step.micro_batch().__enter__)
        found["drop within"] = error_of(step.drop)
    found["too few"] = error_of(step.finish)
    found["number"] = error_of(lambda: setattr(step, "num_micro_batches", 3))
    with step.micro_batch():
        loss_of(model, 0).backward()
    found["too many"] = error_of(step.micro_batch().__enter__)
    step.finish()
    found["twice"] = error_of(step.finish)
    found["zero"] = error_of(lambda: setattr(step, "num_micro_batches", 0))
    found["plain"] = error_of(lambda: TrainStep(nn.Linear(2, 2)))
    found["norm"] = error_of(lambda: TrainStep(model, max_norm=0.0))
    groups = [list(model.parameters()), [model.lm_head.weight]]
    found["groups"] = error_of(lambda: TrainStep(model, clip_groups=groups))
    found["scheduler"] = error_of(lambda: TrainStep(model, schedule(optimizer)))
    found["part"] = error_of(lambda: without_one_parameter(model))
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    batches = [{"tokens_BT": tokens, "labels_BT": tokens}] * 2
    with torch.no_grad():
        found["no_grad"] = error_of(lambda: step.forward_backward(batches))
    model.requires_grad_(False)
    found["frozen"] = error_of(lambda: step.forward_backward(batches))
    return found


def schedule(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, float)


def without_one_parameter(model: Decoder) -> None:
    step = TrainStep(model, torch.optim.SGD(list(model.parameters())[1:], lr=0.1))
    run(step, model)
    step.finish()


def broken_off(how: str, folder: str) -> bool:
    """Whether a step after one that broke off is that of a new model, to the bit."""
    models = make(), make()
    for model in models:
        optimizer = adamw(model)
        step = TrainStep(model, optimizer, max_norm=NORM, num_micro_batches=2)
        if model is models[0]:
            save(Path(folder) / how, 1, model, optimizer)
            with step.micro_batch():
                loss_of(model, 7).backward()
            with suppress(FloatingPointError), step.micro_batch():
                loss_of(model, 8)
                if how == "an exception":
                    raise FloatingPointError
            if how == "an exception":
                for refused in (step.finish, step.micro_batch().__enter__):
                    assert "must not follow an exception in the step" in error_of(refused)
            if how == "load":
                load(latest(Path(folder) / how), model)
            else:
                step.drop()
        if how == "a backward outside":
            assert error_of(lambda m=model: loss_of(m, 9).backward()) != "no error"
        run(step, model)
        step.finish()
    return are_equal(*map(weights, models))


def not_finite(*, fused: bool) -> tuple[bool, bool, int]:
    """Whether nothing changed, whether it is said, and tokens of the step after, with one less."""
    model = make()
    step = TrainStep(model, adamw(model, fused=fused), num_micro_batches=2)
    before = weights(model)
    for n in range(2):
        with step.micro_batch():
            (loss_of(model, n) * (math.nan if dist.get_rank() == n else 1)).backward()
    done = step.finish()
    is_same = are_equal(before, weights(model))
    step.num_micro_batches = 1
    run(step, model)
    counts = step.finish().metrics.tokens_per_expert
    assert not are_equal(before, weights(model))
    return is_same, bool(done.is_skipped), int(sum(n.sum() for n in counts.values()))


def two_models() -> tuple[bool, list[str], float, float]:
    """Two parts under one step: the weights of each alone, metrics, and norms."""
    together, alone = (make(0), make(1)), (make(0), make(1))
    step = TrainStep(together, [adamw(m) for m in together])
    with step.micro_batch():
        for model in together:
            loss_of(model, 0).backward()
    done, squares = step.finish(), 0.0
    for model in alone:
        one = TrainStep(model, adamw(model))
        run(one, model)
        norm = one.finish().norm
        squares += norm.total**2
    is_same = are_equal(weights(*together), weights(*alone))
    return is_same, list(done.metrics.tokens_per_expert), done.norm.total, math.sqrt(squares)


def numbers() -> tuple[dict[str, float], float, list[float]]:
    """A step's numbers on this rank, with a learning rate that a scheduler then changes in place.

    The second step is not finite.
    """
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25), fused=True)
    step = TrainStep(model, optimizer)
    run(step, model)
    done = step.finish()
    optimizer.param_groups[0]["lr"].fill_(0.5)
    with step.micro_batch():
        (loss_of(model, 0) * math.nan).backward()
    bad = step.finish().to_dict()
    return done.to_dict(), done.norm.total, [bad["skipped"], bad["lr"], bad["grad_norm"]]


def marks() -> list[str]:
    model = make()
    step = TrainStep(model, adamw(model))
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        run(step, model)
        step.finish()
    return sorted({e.name for e in prof.events() if e.name.startswith("moecore::")})


def worker(rank: int, device: torch.device, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {how: train(how) for how in ("fused", "whole", "pieces")}
    found["orders"] = wrong_orders()
    for how in ("an exception", "drop", "load", "a backward outside"):
        found[f"after {how}"] = broken_off(how, folder)
    found["not finite"] = [not_finite(fused=fused) for fused in (True, False)]
    found["two"] = two_models()
    found["numbers"] = gather_objects(numbers())
    found["marks"] = marks()
    return found


found = ranks_fixture(2, worker, in_folder=True)


def test_a_whole_step_is_its_pieces(found: dict[str, Any]) -> None:
    (whole, norms), (pieces, same) = found["whole"], found["pieces"]
    assert are_equal(whole, pieces) and norms == same
    assert all(norm > NORM for norm in norms), "clipped"
    fused, again = found["fused"]
    assert again == pytest.approx(norms, rel=1e-5)
    for a, b in zip(fused, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("nothing", r"finish\(\) must follow num_micro_batches \(2\) micro-batches, but 0 are"),
        ("too few", r"finish\(\) must follow num_micro_batches \(2\) micro-batches, but 1 are"),
        ("twice", r"finish\(\) must follow num_micro_batches \(2\) micro-batches, but 0 are"),
        ("too many", r"micro_batch\(\) must come at most num_micro_batches \(2\) times"),
        ("within", r"finish\(\) must not be within a micro_batch\(\)"),
        ("nested", r"micro_batch\(\) must not be within a micro_batch\(\)"),
        ("drop within", r"drop\(\) must not be within a micro_batch\(\)"),
        ("outside", "backward must run within `with step.micro_batch"),
        ("clip", r"optimizer \(AdamW\) must be None for clip\(\)"),
        ("number", r"num_micro_batches \(3\) must be set between steps"),
        ("zero", r"num_micro_batches \(0\) must be a whole number >= 1"),
        ("scheduler", r"optimizer \(.*LambdaLR.*\) must be an Optimizer or"),
        ("plain", r"model \(Linear\) must be parallelized"),
        ("norm", r"max_norm \(0.0\) must be a number > 0"),
        (
            "groups",
            r"clip_groups \(\d+ parameters\) must have each of the \d+ trained par",
        ),
        ("no_grad", r"forward_backward\(\) must run with gradients: call it outside of torch.no_g"),
        ("frozen", r"loss \(without a gradient\) must depend on a trained parameter"),
        ("part", r"optimizer \(SGD\) must hold model.embed_tokens.weight"),
    ],
)
def test_a_wrong_order_is_one_line(order: str, message: str, found: dict[str, Any]) -> None:
    error = found["orders"][order]
    assert "\n" not in error
    with pytest.raises(ValueError, match=message):
        raise ValueError(error)


@pytest.mark.parametrize("how", ["an exception", "drop", "load", "a backward outside"])
def test_a_step_that_broke_off_leaves_nothing(how: str, found: dict[str, Any]) -> None:
    assert found[f"after {how}"]


def test_a_gradient_that_is_not_finite_changes_nothing(found: dict[str, Any]) -> None:
    """And the next step may have another number of micro-batches."""
    tokens = 2 * 2 * 8 * CONFIG.moe.top_k * CONFIG.num_layers
    assert found["not finite"] == [(True, True, tokens)] * 2


def test_models_share_a_step(found: dict[str, Any]) -> None:
    is_same, names, norm, expected = found["two"]
    assert is_same and norm == pytest.approx(expected, rel=1e-6)
    assert names == [f"{i}.model.layers.{n}.mlp" for i in range(2) for n in range(2)]


def test_phases_are_marked_in_a_profile(found: dict[str, Any]) -> None:
    assert {f"moecore::{name}" for name in MARKS} <= set(found["marks"])


def test_a_result_is_one_dict_for_loggers_the_same_on_every_rank(found: dict[str, Any]) -> None:
    first, *others = [shown for shown, *_ in found["numbers"]]
    assert all(other == first for other in others)
    shown, total, (skipped, lr, norm) = found["numbers"][0]
    assert (shown["grad_norm"], shown["skipped"], shown["lr"]) == (total, 0.0, 0.25)
    assert (skipped, lr) == (1.0, 0.5) and math.isnan(norm)
    layers = [f"model.layers.{n}.mlp" for n in range(CONFIG.num_layers)]
    assert {f"router_entropy/{name}" for name in layers} <= shown.keys()
    assert all(0 < shown[f"router_entropy/{name}"] <= math.log(4) + 1e-6 for name in layers)
    for name in layers:
        assert sum(shown[f"expert_load/{name}/{e}"] for e in range(4)) == pytest.approx(4)
