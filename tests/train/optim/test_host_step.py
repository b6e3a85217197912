import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from moecore import ParallelConfig, TrainStep, build_meshes, parallelize_moe
from moecore.base.torch_private import get_local_tensor
from moecore.io import load, save
from moecore.models import Decoder, preset
from moecore.train import AdamW, HostAdamW, StateOffload
from moecore.train.memory.host import Slabs
from moecore.train.optim import host_step
from tests.helpers.ranks import ranks_fixture
from tests.train.optim.late_stream import late_copies  # noqa: F401, a fixture
from tests.train.optim.test_state_offload import sharded_run as offloaded_run

NUM_STEPS = 5
SIZES = [(50, 30), (7,), (2, 30, 41), (), (0, 4), (640,), (130, 3)]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are cut, and chunks hold parts of several."""
    monkeypatch.setattr(host_step, "CHUNK", 300)


def make_params(dtype=torch.float32, device="cpu", sizes=SIZES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(size, generator=generator) for size in sizes]
    return [nn.Parameter(value.to(device, dtype)) for value in found]


def train(params, optimizer, steps=range(NUM_STEPS), **signals) -> None:
    """Step; one parameter has no gradient at first, and every other step is skipped if asked."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for i, param in enumerate(params):
            grad = torch.randn(param.shape, generator=generator).to(param.device, param.dtype)
            param.grad = None if i == 2 and step < 2 else grad
        for name, value in signals.items():
            on = value * (step % 2) if name == "found_inf" else value
            setattr(optimizer, name, torch.tensor(on, device=params[0].device))
        optimizer.step()
        for name in signals:
            delattr(optimizer, name)


def two_groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": params[:2], "lr": torch.tensor(3e-2), "betas": (0.5, 0.9)},
        {"params": params[2:], "weight_decay": 0.0, "eps": 1e-3},
    ]


def equal_state(a: Optimizer, b: Optimizer) -> bool:
    params = [[p for group in one.param_groups for p in group["params"]] for one in (a, b)]
    return all(
        a.state[x].keys() == b.state[y].keys()
        and all(torch.equal(a.state[x][k].cpu(), b.state[y][k].cpu()) for k in a.state[x])
        for x, y in zip(*params, strict=True)
    )


@pytest.mark.parametrize("signals", [{}, {"grad_scale": 1.7}, {"grad_scale": 0.3, "found_inf": 1}])
@pytest.mark.parametrize("host_fraction", [0, 0.3, 1])
@pytest.mark.parametrize("late", [False, True])
def test_bits_of_adamw(late, host_fraction, signals, request) -> None:
    if late:
        request.getfixturevalue("late_copies")
    ours, theirs = make_params(), make_params()
    first = HostAdamW(two_groups(ours), lr=1e-2, host_fraction=host_fraction)
    second = AdamW(two_groups(theirs), lr=1e-2)
    train(ours, first, **signals)
    train(theirs, second, **signals)
    on_host = sum(param.nbytes for param in first.host_params)
    total = sum(param.nbytes for param in ours)
    assert on_host == host_fraction * total or 0 < on_host <= host_fraction * total
    assert all(map(torch.equal, ours, theirs)) and equal_state(first, second)
    before = copy.deepcopy(ours)
    train(ours, first, range(1, 2), found_inf=1)  # a skipped one changes nothing
    assert all(map(torch.equal, ours, before)) and equal_state(first, second)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_stepped_in_fp32_at_least(dtype: torch.dtype) -> None:
    """Oracle: torch's fused AdamW on widened weights, rounded after each step."""
    wide = torch.promote_types(dtype, torch.float32)
    ours, theirs = make_params(dtype), make_params(dtype)
    first = HostAdamW(ours, lr=1e-2, host_fraction=1)
    rounded = [nn.Parameter(param.detach().to(wide)) for param in theirs]
    second = torch.optim.AdamW(rounded, lr=1e-2, fused=True)
    for step in range(NUM_STEPS):
        train(ours, first, range(step, step + 1))
        train(theirs, torch.optim.SGD(theirs, lr=0.0), range(step, step + 1))
        for param, other in zip(theirs, rounded, strict=True):
            other.grad = None if param.grad is None else param.grad.to(wide)
        second.step()
        for other in rounded:
            other.data = other.data.to(dtype).to(wide)
    assert all(torch.equal(a, b.to(dtype)) for a, b in zip(ours, rounded, strict=True))
    assert {s["exp_avg"].dtype for p, s in first.state.items() if p in first.host_params} == {wide}


@pytest.mark.parametrize("how", ["checkpoint", "state_dict"])
@pytest.mark.parametrize("there_and_back", [False, True])
def test_goes_on_from_adamw_and_back(how: str, there_and_back: bool, tmp_path: Path) -> None:
    def build(host: bool) -> tuple[nn.Module, Optimizer]:
        model = nn.Sequential(nn.Linear(9, 40), nn.Linear(40, 7))
        if host:
            return model, HostAdamW(model.parameters(), lr=1e-2, host_fraction=0.6)
        return model, AdamW(model.parameters(), lr=1e-2)

    (model, first), (other, second) = build(there_and_back), build(not there_and_back)
    train(list(model.parameters()), first, range(3))
    train(list(other.parameters()), second, range(7, 9))
    if how == "checkpoint":
        load(save(tmp_path, 1, model, first), other, second)
    else:
        other.load_state_dict(model.state_dict())
        second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert equal_state(first, second)
    for one, optimizer in ((model, first), (other, second)):
        train(list(one.parameters()), optimizer, range(3, 6))
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert equal_state(first, second)


def test_copies_groups_and_closures() -> None:
    params = make_params()
    optimizer = HostAdamW(params[:3], lr=1e-2, host_fraction=0.5)
    chosen = set(optimizer.host_params)
    optimizer.add_param_group({"params": [*params[3:], nn.Parameter(torch.zeros(9000))]})
    assert params[4] not in chosen < optimizer.host_params  # of a larger sum
    seen: list[int] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = sum(param.square().sum() for param in params)
        loss.backward()
        return loss

    assert optimizer.step(closure) > optimizer.step(closure) and len(seen) == 2
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        theirs = [p for group in copied.param_groups for p in group["params"]][: len(params)]
        assert copied.host_fraction == 0.5 and len(copied.host_params)
        assert copied.host_params <= {p for g in copied.param_groups for p in g["params"]}
        train(theirs, copied, range(1))
    train(params, optimizer, range(1))
    assert all(map(torch.equal, params, theirs))


def test_short_host_memory_is_one_line_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    params = make_params()
    optimizer = HostAdamW(params, host_fraction=1)

    def short(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: out of memory\nCompile with ...")

    with monkeypatch.context() as patch:
        patch.setattr(Slabs, "allocate_slab", short)
        message = r"host_fraction .1. of .* must fit .*: lower it"
        with pytest.raises(MemoryError, match=message) as e:
            train(params, optimizer, range(1))
    assert "\n" not in str(e.value) and all(map(torch.equal, params, make_params()))
    train(params, optimizer)
    others = make_params()
    train(others, AdamW(others))
    assert all(map(torch.equal, params, others))


def test_refusals() -> None:
    params = make_params()
    with pytest.raises(ValueError, match=r"host_fraction .-1. must be"):
        HostAdamW(params, host_fraction=-1)
    optimizer = HostAdamW(params, host_fraction=1)
    optimizer.param_groups[0]["maximize"] = True
    with pytest.raises(ValueError, match=r"maximize .True. must be False"):
        train(params, optimizer, range(1))
    assert all(map(torch.equal, params, make_params()))
    weight = nn.Embedding(4, 2, sparse=True).weight
    nn.functional.embedding(torch.tensor([1]), weight, sparse=True).sum().backward()
    with pytest.raises(ValueError, match="must be dense and real"):
        HostAdamW([weight], host_fraction=1).step()


def sharded_run(kind: str, folder: str) -> dict[str, Any]:
    """Train a decoder with uneven shards, clipped; a bad step, a resume in the other optimizer."""
    host_step.CHUNK = 1000
    model = Decoder(replace(preset("tiny"), num_layers=2))
    model.init_weights(0)
    parallelize_moe(model, build_meshes(ParallelConfig(dp_shard=3), "cpu"))
    first = AdamW(model.parameters(), lr=1e-2)
    second = HostAdamW(model.parameters(), lr=1e-2, host_fraction=0.5)
    if kind == "both":
        StateOffload(first, model, fraction=0.7)
        StateOffload(second, model, fraction=0.7)
    optimizer: Optimizer = second if kind != "plain" else first
    owner, losses, chosen = TrainStep(model, optimizer, max_norm=0.1), [], 0
    for step in range(6):
        tokens = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(step))
        with owner.micro_batch():
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
        if step == 1:
            model.get_parameter("model.norm.weight").grad.to_local()[:] = float("nan")
        assert bool(owner.finish().is_skipped) == (step == 1)
        losses.append(loss.item())
        if kind != "plain" and step in (2, 4):
            path = save(f"{folder}/{kind}", step, model, optimizer)
            optimizer = first if optimizer is second else second
            load(path, model, optimizer)
            owner = TrainStep(model, optimizer, max_norm=0.1)
    chosen = sum(get_local_tensor(param).nbytes for param in second.host_params)
    share = chosen / sum(get_local_tensor(param).nbytes for param in model.parameters())
    state = [optimizer.state[p][k] for p in model.parameters() for k in ("exp_avg", "exp_avg_sq")]
    return {"losses": losses, "share": share, "state": [get_local_tensor(x).clone() for x in state]}


def all_runs(rank: int, device: torch.device, folder: str) -> dict[str, Any]:
    found = {kind: sharded_run(kind, folder) for kind in ("plain", "host", "both")}
    offloaded = {"plain": offloaded_run(None), "away": offloaded_run(f"{folder}/away")}
    return {"host": found, "offload": offloaded}


runs = ranks_fixture(3, all_runs, in_folder=True)


def test_shards_clipping_skips_and_checkpoints(runs: dict[str, Any]) -> None:
    plain = runs["host"]["plain"]
    for kind in ("host", "both"):
        found = runs["host"][kind]
        assert found["losses"] == plain["losses"]
        assert all(map(torch.equal, found["state"], plain["state"])) and 0.3 < found["share"] < 0.55


def test_offloaded_state_with_shards_skips_and_checkpoints(runs: dict[str, Any]) -> None:
    plain, other = runs["offload"]["plain"], runs["offload"]["away"]
    assert plain["losses"] == other["losses"]
    assert all(map(torch.equal, plain["state"], other["state"]))
    shares = other["shares"]
    assert shares[0] == shares[1] == set()  # nothing to send before the first step
    assert all(places == {"away"} for places in shares[2::2])
    assert all(places == {"coming"} for places in shares[3::2])
