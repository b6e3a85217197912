"""AdamW: torch's steps, state and signals; half the moments without a training that stalls."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from moecore import ParallelConfig, TrainStep, build_meshes, parallelize_moe
from moecore.checkpoint import load, save
from moecore.fsdp.clip import step_clipped
from moecore.models import Decoder, preset
from moecore.optim import AdamW
from tests.ranks import run_ranks

Optimizer = torch.optim.Optimizer
NUM_STEPS = 6


def make_params() -> list[nn.Parameter]:
    torch.manual_seed(0)
    sizes = [(5, 3), (7,), (2, 3, 4), (), (0, 4)]
    return [nn.Parameter(torch.randn(size)) for size in sizes]


def train(params: list[nn.Parameter], optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for i, param in enumerate(params):
            # One has no gradient at first, so that step counts differ.
            missing = i == 1 and step < 2
            grad = torch.randn(param.shape, generator=generator).to(param.dtype)
            param.grad = None if missing else grad
        optimizer.step()


def check_alike(got: list[nn.Parameter], want: list[nn.Parameter]) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-7)


def two_groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": params[:2], "lr": torch.tensor(3e-2), "betas": (0.5, 0.9)},
        {"params": params[2:], "weight_decay": 0.0, "eps": 1e-3},
    ]


def test_steps_of_torch() -> None:
    ours, torchs = make_params(), make_params()
    ours[2].data, torchs[2].data = ours[2].data.double(), torchs[2].data.double()
    train(ours, AdamW(two_groups(ours), lr=1e-2), range(NUM_STEPS))
    train(torchs, torch.optim.AdamW(two_groups(torchs), lr=1e-2, fused=True), range(NUM_STEPS))
    check_alike(ours, torchs)


def test_schedulers_closures_and_hooks_are_torchs() -> None:
    (param,) = params = [nn.Parameter(torch.ones(3))]
    optimizer = AdamW(params, lr=1.0, weight_decay=0.0)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(optimizer.param_groups[0]["lr"]))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = param.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    scheduler.step()
    assert optimizer.step(closure).item() == pytest.approx(0.0, abs=1e-6)
    assert seen == [1.0, 0.5] and param[0].item() == pytest.approx(-0.5)


@pytest.mark.parametrize("fused", [False, True])
def test_goes_on_from_torch_and_back(fused: bool) -> None:
    ours, torchs, mixed = make_params(), make_params(), make_params()
    train(torchs, torch.optim.AdamW(torchs, lr=1e-2), range(NUM_STEPS))
    first = torch.optim.AdamW(mixed, lr=1e-2, fused=fused)
    train(mixed, first, range(2))
    second = AdamW(mixed)
    second.load_state_dict(first.state_dict())
    train(mixed, second, range(2, 4))
    third = torch.optim.AdamW(mixed, fused=fused)
    third.load_state_dict(second.state_dict())
    train(mixed, third, range(4, NUM_STEPS))
    check_alike(mixed, torchs)
    train(ours, AdamW(ours, lr=1e-2), range(NUM_STEPS))
    check_alike(ours, torchs)


COPIES: dict[str, Callable[[AdamW, AdamW], AdamW]] = {
    "deepcopy": lambda optimizer, _: copy.deepcopy(optimizer),
    "pickle": lambda optimizer, _: pickle.loads(pickle.dumps(optimizer)),
}


def test_half_moments_go_on_to_the_bit() -> None:
    whole, halted = make_params(), make_params()
    train(whole, AdamW(whole, lr=1e-2, moment_dtype=torch.bfloat16), range(NUM_STEPS))
    first = AdamW(halted, lr=1e-2, moment_dtype=torch.bfloat16)
    train(halted, first, range(3))
    second = AdamW(halted, moment_dtype=torch.bfloat16)
    second.load_state_dict(first.state_dict())
    train(halted, second, range(3, NUM_STEPS))
    assert all(map(torch.equal, halted, whole))
    kept = {s[name].dtype for s in second.state.values() for name in ("exp_avg", "exp_avg_sq")}
    assert kept == {torch.bfloat16}


@pytest.mark.parametrize("name", COPIES)
def test_copies_keep_the_dtype_of_moments(name: str) -> None:
    params = make_params()
    optimizer = AdamW(params, moment_dtype=torch.bfloat16)
    train(params, optimizer, range(2))
    copied = COPIES[name](optimizer, optimizer)
    assert copied.moment_dtype == torch.bfloat16 and copied._step_supports_amp_scaling
    theirs = [p for group in copied.param_groups for p in group["params"]]
    train(theirs, copied, range(2, 4))
    train(params, optimizer, range(2, 4))
    assert all(map(torch.equal, theirs, params))


def test_small_second_moments_fall_again() -> None:
    """Rounded to nearest, a second moment of beta2 = 0.999 stays for ever where it once was."""
    param = nn.Parameter(torch.zeros(4096))
    optimizer = AdamW([param], lr=0.0, moment_dtype=torch.bfloat16)
    param.grad = torch.ones_like(param)
    optimizer.step()
    start = optimizer.state[param]["exp_avg_sq"].float().mean()
    param.grad = torch.zeros_like(param)
    for _ in range(300):
        optimizer.step()
    end = optimizer.state[param]["exp_avg_sq"].float().mean()
    assert end / start == pytest.approx(0.999**300, rel=0.01)


@pytest.mark.parametrize("moment_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_state_dict_keeps_moments_that_the_weights_dtype_has_no_room_for(
    dtype: torch.dtype, moment_dtype: torch.dtype
) -> None:
    params = [nn.Parameter(torch.ones(3, dtype=dtype))]
    params[0].grad = torch.full_like(params[0], 1e-4)  # its square is 0 in fp16
    first = AdamW(params, moment_dtype=moment_dtype)
    first.step()
    second = AdamW(params, moment_dtype=moment_dtype)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for name in ("exp_avg", "exp_avg_sq"):
        a, b = first.state[params[0]][name], second.state[params[0]][name]
        assert a.dtype == b.dtype == moment_dtype and torch.equal(a, b) and a.all()


@pytest.mark.parametrize("before", ["torch", "fp32", "bf16"])
@pytest.mark.parametrize("after", ["torch", "fp32", "bf16"])
def test_checkpoints_go_every_way(before: str, after: str, tmp_path: Path) -> None:
    def make(name: str, model: nn.Module) -> Optimizer:
        if name == "torch":
            return torch.optim.AdamW(model.parameters(), fused=True)
        dtype = torch.bfloat16 if name == "bf16" else torch.float32
        return AdamW(model.parameters(), moment_dtype=dtype)

    model = nn.Linear(64, 64)
    params = list(model.parameters())
    first = make(before, model)
    train(params, first, range(2, 4))
    path = save(tmp_path, 1, model, first)
    second = make(after, model)
    train(params, second, range(4, 6))
    load(path, model, second)
    want = torch.bfloat16 if after == "bf16" else torch.float32
    for param in params:
        a, b = first.state[param]["exp_avg"], second.state[param]["exp_avg"]
        assert b.dtype == want
        exact = before != "bf16" and after != "bf16"
        torch.testing.assert_close(a.float(), b.float(), rtol=0 if exact else 2.0**-8, atol=0)
    train(params, second, range(6, 7))


def test_noise_is_that_of_the_parameter() -> None:
    """Whichever others have a gradient, so that replicas on other ranks stay equal."""
    found = []
    for others in (True, False):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.ones(50)), nn.Parameter(torch.ones(50))]
        optimizer = AdamW(params, moment_dtype=torch.bfloat16)
        for _ in range(5):
            params[0].grad = torch.ones(50) if others else None
            params[1].grad = torch.randn(50)
            optimizer.step()
        found.append(optimizer.state[params[1]]["exp_avg"])
    assert torch.equal(*found)


def test_parameters_of_several_dtypes_in_one_group() -> None:
    ours, torchs = make_params(), make_params()
    for params in (ours, torchs):
        params[1].data, params[2].data = params[1].data.bfloat16(), params[2].data.double()
    train(ours, AdamW(ours, lr=1e-2), range(NUM_STEPS))
    train(torchs, torch.optim.AdamW(torchs, lr=1e-2, fused=True), range(NUM_STEPS))
    for a, b in zip(ours, torchs, strict=True):
        tolerance = 2.0**-6 if a.dtype == torch.bfloat16 else 2e-6
        torch.testing.assert_close(a, b, rtol=tolerance, atol=2e-7)


def test_gradscaler_and_clipping_take_turns() -> None:
    model = nn.Linear(3, 3)
    optimizer = AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for who in ("clip", "scaler", "clip", "scaler"):
        loss = model(torch.ones(2, 3)).sum()
        (loss if who == "clip" else scaler.scale(loss)).backward()
        if who == "clip":
            step_clipped(model, 0.1, [optimizer])
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")


def test_refusals() -> None:
    params = make_params()
    with pytest.raises(ValueError, match=r"moment_dtype .torch.float16. must be"):
        AdamW(params, moment_dtype=torch.float16)
    optimizer = AdamW(params)
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(ValueError, match=r"amsgrad .True. must be False"):
        optimizer.step()
    weight = nn.Embedding(4, 2, sparse=True).weight
    torch.nn.functional.embedding(torch.tensor([1]), weight, sparse=True).sum().backward()
    with pytest.raises(ValueError, match="must be dense and real"):
        AdamW([weight]).step()


def losses(folder: str | None, own: bool, moment_dtype: torch.dtype) -> list[float]:
    """Train a decoder with its expert and dense parameters on two meshes, one bad step included."""
    model = Decoder(preset("tiny"))
    model.init_weights(0)
    parallelize_moe(model, build_meshes(ParallelConfig(dp_shard=4, ep=2), "cpu"))
    make: Callable[..., Optimizer] = torch.optim.AdamW
    options: dict[str, Any] = {"fused": True}
    if own:
        make, options = AdamW, {"moment_dtype": moment_dtype}
    optimizer = make(model.parameters(), lr=1e-2, **options)
    owner, found = TrainStep(model, optimizer, max_norm=0.1), []
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 256, (2, 17), generator=generator)
        with owner.micro_batch():
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
        if step == 2:
            model.get_parameter("model.norm.weight").grad.to_local()[:] = float("nan")
        norm = owner.finish().norm
        assert norm is not None and norm.finite == (step != 2)
        found.append(loss.item())
        if folder is not None and step == 3:
            path = save(folder, step, model, optimizer)
            for state in optimizer.state.values():
                state["exp_avg"].zero_()
            load(path, model, optimizer)
    return found


def partial_gradients() -> dict[str, Tensor]:
    """Step with gradients that are still to be summed over the ranks, as autograd leaves some."""
    mesh = init_device_mesh("cpu", (4,))
    found = {}
    for name in ("torch", "ours", "clipped"):
        whole = DTensor.from_local(torch.ones(3), mesh, [Replicate()])
        param = nn.Parameter(whole)
        own = torch.tensor([1.0, -2.0, 0.5]) * (dist.get_rank() - 1)
        param.grad = DTensor.from_local(own, mesh, [Partial()])
        if name == "torch":
            optimizer: Optimizer = torch.optim.AdamW([param], lr=0.1, fused=True)
        else:
            optimizer = AdamW([param], lr=0.1)
        if name == "clipped":
            holder = nn.Module()
            holder.param = param
            norm = step_clipped(holder, math.inf, [optimizer])
            found["norm"] = torch.tensor(norm.total)
        else:
            optimizer.step()
        parts = [torch.empty(3) for _ in range(4)]
        dist.all_gather(parts, param.detach().to_local())
        found[name] = torch.stack(parts)
    return found


def all_results(rank: int, device: torch.device, folder: str) -> dict[str, Any]:
    return {"losses": all_losses(folder), "partial": partial_gradients()}


def all_losses(folder: str) -> dict[str, list[float]]:
    return {
        "torch": losses(None, False, torch.float32),
        "ours": losses(None, True, torch.float32),
        "saved": losses(f"{folder}/fp32", True, torch.float32),
        "half": losses(None, True, torch.bfloat16),
        "half saved": losses(f"{folder}/bf16", True, torch.bfloat16),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_ranks(4, all_results, str(tmp_path_factory.mktemp("runs")))


def test_clipped_sharded_saved(ranks: dict[str, Any]) -> None:
    found = ranks["losses"]
    assert found["ours"] == pytest.approx(found["torch"], abs=2e-5)
    assert found["saved"] == found["ours"]
    assert found["half saved"] == found["half"] != found["ours"]
    assert found["half"] == pytest.approx(found["torch"], abs=2e-2)


def test_partial_sums_are_summed(ranks: dict[str, Any]) -> None:
    found = ranks["partial"]
    assert all(torch.equal(part, found["ours"][0]) for part in found["ours"])
    torch.testing.assert_close(found["ours"], found["torch"])
    assert torch.equal(found["clipped"], found["ours"])
    assert found["norm"].item() == pytest.approx(2 * (1 + 4 + 0.25) ** 0.5)
