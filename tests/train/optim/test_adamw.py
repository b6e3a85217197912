import copy
import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate

from moecore import ParallelConfig, TrainStep, build_meshes, parallelize_moe
from moecore.io import load, save
from moecore.kernels.adamw_formats import join_master_ref
from moecore.models import Decoder, preset
from moecore.parallel.model.clip import clip_and_step
from moecore.train import AdamW
from tests.helpers.ranks import ranks_fixture
from tests.train.optim.test_host_step import make_params, train, two_groups

Optimizer = torch.optim.Optimizer
NUM_STEPS = 6
FP8 = torch.float8_e4m3fn
# Options of AdamW, and the dtype of the parameters.
KINDS: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "fp32": ({}, torch.float32),
    "bf16": ({"moment_dtype": torch.bfloat16}, torch.float32),
    "fp8": ({"moment_dtype": FP8}, torch.float32),
    "split": ({"master_remainder": True}, torch.bfloat16),
    "split fp8": ({"master_remainder": True, "moment_dtype": FP8}, torch.bfloat16),
}


def check_alike(got: list[nn.Parameter], want: list[nn.Parameter]) -> None:
    for a, b in zip(got, want, strict=True):
        rtol = 2.0**-6 if a.dtype == torch.bfloat16 else 2e-6
        torch.testing.assert_close(a, b, rtol=rtol, atol=2e-7)


def test_steps_of_torch() -> None:
    """Also of parameters of several dtypes in one group."""
    ours, torchs = make_params(), make_params()
    for params in (ours, torchs):
        params[1].data, params[2].data = params[1].data.bfloat16(), params[2].data.double()
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
    torchs, mixed = make_params(), make_params()
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


def reloaded(optimizer: AdamW) -> AdamW:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    options = (optimizer.moment_dtype, optimizer.master_remainder)
    made = AdamW(params, moment_dtype=options[0], master_remainder=options[1])
    made.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return made


COPIES: dict[str, Callable[[AdamW], AdamW]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
    "state_dict": lambda optimizer: reloaded(copy.deepcopy(optimizer)),
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("kind", KINDS)
def test_copies_go_on_to_the_bit(way: str, kind: str) -> None:
    options, dtype = KINDS[kind]
    params = make_params(dtype)
    optimizer = AdamW(params, lr=1e-2, **options)
    train(params, optimizer, range(3))
    copied = COPIES[way](optimizer)
    assert copied.moment_dtype == optimizer.moment_dtype and copied._step_supports_amp_scaling
    theirs = [p for group in copied.param_groups for p in group["params"]]
    assert all(a is not b for a, b in zip(theirs, params, strict=True))
    train(theirs, copied, range(3, NUM_STEPS))
    train(params, optimizer, range(3, NUM_STEPS))
    assert all(map(torch.equal, theirs, params))
    check_equal_values(copied, optimizer)


def check_equal_values(got: AdamW, want: AdamW) -> None:
    """Equal in what checkpoints have: the same FP8 values may have other exponents."""
    for a, b in zip(got.state, want.state, strict=True):
        x, y = got.get_stored_state(a), want.get_stored_state(b)
        assert x.keys() == y.keys() and all(x[k].dtype == y[k].dtype for k in x)
        assert all(torch.equal(x[k], y[k]) for k in x)


def test_bytes_per_parameter() -> None:
    params = [nn.Parameter(torch.ones(64, 128).bfloat16())]
    params[0].grad = torch.ones_like(params[0])
    found = {}
    for kind, (options, _) in KINDS.items():
        optimizer = AdamW(params, **options)
        optimizer.step()
        state = optimizer.state[params[0]]
        found[kind] = sum(t.nbytes for name, t in state.items() if name != "step") / 8192
    scales = 2 / 128
    assert found == {
        "fp32": 8, "bf16": 4, "fp8": 2 + scales, "split": 10, "split fp8": 4 + scales,
    }  # fmt: skip


def test_split_masters_train_as_fp32_weights_do() -> None:
    """Steps that bf16 alone would lose: a master moves by 2**-13 of it, a bf16 weight by 2**-8."""
    dtypes = (torch.bfloat16, torch.float32, torch.bfloat16)
    split, wide, lost = params = [nn.Parameter(torch.ones(300, dtype=dtype)) for dtype in dtypes]
    optimizer = AdamW([split], lr=1e-4, master_remainder=True)
    others = AdamW([wide, lost], lr=1e-4)
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        grad = (1 + torch.rand(300, generator=generator)).bfloat16()
        for param in params:
            param.grad = grad.to(param.dtype)
        optimizer.step()
        others.step()
    master = join_master_ref(split.detach(), optimizer.state[split]["remainder"])
    torch.testing.assert_close(master, wide.detach(), rtol=5e-6, atol=0)
    assert (split != 1).all() and (lost == 1).all()


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


@pytest.mark.parametrize("moment_dtype", [torch.float32, torch.bfloat16, FP8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_state_dict_keeps_moments_that_the_weights_dtype_has_no_room_for(dtype, moment_dtype):
    params = [nn.Parameter(torch.ones(3, dtype=dtype))]
    params[0].grad = torch.full_like(params[0], 1e-4)  # its square is 0 in fp16
    first = AdamW(params, moment_dtype=moment_dtype)
    first.step()
    second = AdamW(params, moment_dtype=moment_dtype)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    check_equal_values(second, first)
    assert all(t.all() for t in second.get_stored_state(params[0]).values())


def made(kind: str, params: list[nn.Parameter]) -> Optimizer:
    if kind == "torch":
        return torch.optim.AdamW(params, fused=True)
    return AdamW(params, **KINDS[kind][0])


def moments(optimizer: Optimizer, param: Tensor) -> list[Tensor]:
    own = isinstance(optimizer, AdamW)
    state = optimizer.get_stored_state(param) if own else optimizer.state[param]
    return [state[name].float() for name in ("exp_avg", "exp_avg_sq")]


@pytest.mark.parametrize("before", ["torch", "fp32", "bf16", "fp8"])
@pytest.mark.parametrize("after", ["torch", "fp32", "bf16", "fp8"])
@pytest.mark.parametrize("way", ["checkpoint", "state_dict"])
def test_checkpoints_go_every_way(before: str, after: str, way: str, tmp_path: Path) -> None:
    model = nn.Linear(64, 64)
    params = list(model.parameters())
    first = made(before, params)
    train(params, first, range(2, 4))
    want = [[t.clone() for t in moments(first, p)] for p in params]
    second = made(after, params)
    if way == "checkpoint":
        load(save(tmp_path, 1, model, first), model, second)
    else:
        second.load_state_dict(first.state_dict())
    order = ["fp8", "bf16", "fp32", "torch"]
    for param, exact in zip(params, want, strict=True):
        for a, b, least in zip(moments(second, param), exact, (2.0**-18, 2.0**-33), strict=True):
            if order.index(after) >= order.index(before) or {before, after} == {"torch", "fp32"}:
                assert torch.equal(a, b)
            else:
                rtol = 2.0**-4 * 1.01 if after == "fp8" else 2.0**-8
                torch.testing.assert_close(a, b, rtol=rtol, atol=b.abs().max().item() * least)
    if after != "torch":
        kept = second.state[params[0]]
        assert [kept[n].dtype for n in ("exp_avg", "exp_avg_sq")] == {
            "fp32": [torch.float32] * 2, "bf16": [torch.bfloat16] * 2, "fp8": [torch.uint8] * 2
        }[after]  # fmt: skip
    train(params, second, range(6, 7))


@pytest.mark.parametrize("after", ["fp32", "split fp8"])
def test_remainders_in_checkpoints(after: str, tmp_path: Path) -> None:
    """They stay as they are, and an optimizer that keeps none drops them."""
    model = nn.Linear(64, 64).bfloat16()
    params = list(model.parameters())
    first = AdamW(params, lr=1e-2, master_remainder=True)
    train(params, first, range(2, 4))
    path = save(tmp_path, 1, model, first)
    second = made(after, params)
    load(path, model, second)
    train(params, second, range(4, 5))
    if after == "split fp8":
        first.load_state_dict(made("split", params).state_dict())
        load(path, model, second)
        load(path, model, first)
        for p in params:
            assert torch.equal(second.state[p]["remainder"], first.state[p]["remainder"])
            assert first.state[p]["remainder"].any()
    else:
        assert "remainder" not in second.state[params[0]]


def test_a_strided_parameter_has_fp8_moments_too() -> None:
    plain, strided = (nn.Parameter(torch.ones(40, 60)) for _ in range(2))
    strided.data = strided.data.t().contiguous().t()
    optimizer = AdamW([plain, strided], moment_dtype=FP8)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        plain.grad = torch.randn(40, 60, generator=generator)
        strided.grad = plain.grad.clone()
        optimizer.step()
    a, b = (optimizer.state[p]["exp_avg"] for p in (plain, strided))
    assert strided.stride() == (1, 40) and b.stride() == (1, 40)
    assert torch.equal(plain, strided) and torch.equal(a, b)
    kept = optimizer.get_stored_state(strided)["exp_avg"]
    reload = AdamW([plain, strided], moment_dtype=FP8)
    reload.load_state_dict(optimizer.state_dict())
    assert torch.equal(reload.get_stored_state(strided)["exp_avg"], kept)


def test_noise_is_that_of_the_parameter() -> None:
    """Whichever others have a gradient or come first, so that replicas of ranks stay equal."""
    found = []
    for others in (True, False):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.ones(50)), nn.Parameter(torch.ones(50))]
        optimizer = AdamW(params if others else params[::-1], moment_dtype=torch.bfloat16)
        for _ in range(5):
            params[0].grad = torch.ones(50) if others else None
            params[1].grad = torch.randn(50)
            optimizer.step()
        found.append(optimizer.state[params[1]]["exp_avg"])
    assert torch.equal(*found)


def test_gradscaler_and_clipping_take_turns() -> None:
    model = nn.Linear(3, 3)
    optimizer = AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for who in ("clip", "scaler", "clip", "scaler"):
        loss = model(torch.ones(2, 3)).sum()
        (loss if who == "clip" else scaler.scale(loss)).backward()
        if who == "clip":
            clip_and_step(model, 0.1, [optimizer])
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")


def test_refusals() -> None:
    params = make_params()
    with pytest.raises(ValueError, match=r"moment_dtype .torch.float16. must be"):
        AdamW(params, moment_dtype=torch.float16)
    with pytest.raises(ValueError, match=r"master_remainder .True. must have parameters in bf16"):
        AdamW(params, master_remainder=True)
    optimizer = AdamW(params)
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(ValueError, match=r"amsgrad .True. must be False"):
        optimizer.step()
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = AdamW([{"params": [first]}, {"params": [second], "lr": 0.1}])
    optimizer.param_groups[1]["lr"] = float("nan")
    first.grad = torch.ones(2)
    with pytest.raises(ValueError, match=r"AdamWOptions\.lr \(nan\) must be"):
        optimizer.step()
    assert torch.equal(first.detach(), torch.ones(2)), "no group has moved"
    weight = nn.Embedding(4, 2, sparse=True).weight
    torch.nn.functional.embedding(torch.tensor([1]), weight, sparse=True).sum().backward()
    with pytest.raises(ValueError, match="must be dense and real"):
        AdamW([weight]).step()


def losses(folder: str | None, kind: str) -> list[float]:
    """Train a decoder with its expert and dense parameters on two meshes, one bad step included."""
    options, dtype = ({"fused": True}, torch.float32) if kind == "torch" else KINDS[kind]
    make: Callable[..., Optimizer] = torch.optim.AdamW if kind == "torch" else AdamW
    model = Decoder(replace(preset("tiny"), num_layers=2))
    model.init_weights(0)
    model.to(dtype)
    parallelize_moe(model, build_meshes(ParallelConfig(dp_shard=4, ep=2), "cpu"))
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
                for value in state.values():
                    value.zero_()
            load(path, model, optimizer)
    return found


def check_resharded(folder: str) -> None:
    """Save parts of uneven sizes and load them whole: FP8 blocks then lie elsewhere."""
    torch.manual_seed(0)
    sharded, whole = nn.Linear(24, 7).bfloat16(), nn.Linear(24, 7).bfloat16()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (4,)))
    first, second = (AdamW(m.parameters(), **KINDS["split fp8"][0]) for m in (sharded, whole))
    for step in range(3):
        x = torch.randn(3, 24, generator=torch.Generator().manual_seed(step)).bfloat16()
        sharded(x).square().sum().backward()
        first.step()
        sharded.zero_grad()
    load(save(folder, 1, sharded, first), whole, second)
    for name in ("weight", "bias"):
        saved = first.get_stored_state(sharded.get_parameter(name))
        loaded = second.get_stored_state(whole.get_parameter(name))
        for slot in ("remainder", "exp_avg", "exp_avg_sq"):
            want = saved[slot].to_local()
            got = loaded[slot].chunk(4)[dist.get_rank()]
            if slot == "remainder":
                assert torch.equal(got, want) and want.any()
            else:
                least = {"exp_avg": 2.0**-18, "exp_avg_sq": 2.0**-33}[slot]
                atol = loaded[slot].abs().max().item() * least
                torch.testing.assert_close(got, want, rtol=2.0**-4 * 1.01, atol=atol)


def partial_gradients() -> dict[str, Tensor]:
    """Step with gradients that are still to be summed over the ranks, as autograd leaves some."""
    mesh, found = init_device_mesh("cpu", (4,)), {}
    for name in ("torch", "ours", "clipped"):
        whole = DTensor.from_local(torch.ones(3), mesh, [Replicate()])
        param = nn.Parameter(whole)
        own = torch.tensor([1.0, -2.0, 0.5]) * (dist.get_rank() - 1)
        param.grad = DTensor.from_local(own, mesh, [Partial()])
        torchs, ours = torch.optim.AdamW([param], lr=0.1, fused=True), AdamW([param], lr=0.1)
        optimizer: Optimizer = torchs if name == "torch" else ours
        if name == "clipped":
            holder = nn.Module()
            holder.param = param
            norm = clip_and_step(holder, math.inf, [optimizer])
            found["norm"] = torch.tensor(norm.total)
        else:
            optimizer.step()
        parts = [torch.empty(3) for _ in range(4)]
        dist.all_gather(parts, param.detach().to_local())
        found[name] = torch.stack(parts)
    return found


def all_results(rank: int, device: torch.device, folder: str) -> dict[str, Any]:
    found = {kind: losses(None, kind) for kind in ("torch", "fp32", "split fp8")}
    found |= {f"{kind} saved": losses(f"{folder}/{kind}", kind) for kind in ("fp32", "split fp8")}
    check_resharded(f"{folder}/resharded")
    return {"losses": found, "partial": partial_gradients()}


ranks = ranks_fixture(4, all_results, in_folder=True)


def test_clipped_sharded_saved(ranks: dict[str, Any]) -> None:
    found = ranks["losses"]
    assert found["fp32"] == pytest.approx(found["torch"], abs=2e-5)
    assert found["fp32 saved"] == found["fp32"]
    assert found["split fp8 saved"] == found["split fp8"] != found["fp32"]
    assert found["split fp8"] == pytest.approx(found["torch"], abs=0.1)  # it computes in bf16


def test_partial_sums_are_summed(ranks: dict[str, Any]) -> None:
    found = ranks["partial"]
    assert all(torch.equal(part, found["ours"][0]) for part in found["ours"])
    torch.testing.assert_close(found["ours"], found["torch"])
    assert torch.equal(found["clipped"], found["ours"])
    assert found["norm"].item() == pytest.approx(2 * (1 + 4 + 0.25) ** 0.5)
