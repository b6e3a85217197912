import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler, MultiStepLR

from moecore.io import load, read_manifest, save
from moecore.io.checkpoint.manifest import MANIFEST
from moecore.models import Decoder, preset
from tests.io.checkpoint.fuzz import write_signed

CONFIG = preset("tiny")
Build = Sequence[Optimizer] | Optimizer


def build(seed: int = 0) -> tuple[nn.Module, list[Optimizer]]:
    """Muon for the matrices of attention, AdamW with two groups for the others."""
    torch.manual_seed(seed)
    model = Decoder(CONFIG)
    return model, optimizers_of(model)


def optimizers_of(model: nn.Module, kind: type[Optimizer] = Muon) -> list[Optimizer]:
    matrices, experts, others = [], [], []
    for name, param in model.named_parameters():
        part = experts if ".experts." in name else others
        (matrices if ".self_attn." in name and param.ndim == 2 else part).append(param)
    assert matrices and experts and others
    groups = [{"params": experts, "lr": 2e-3}, {"params": others}]
    return [kind(matrices, lr=0.02, momentum=0.9), AdamW(groups, lr=1e-3, weight_decay=0.0)]


def train(model: nn.Module, optimizers: Sequence[Optimizer], seed: int = 1) -> None:
    tokens = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(seed))
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def state_of(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """All tensors, whole, and hyperparameters, under names that no layout changes."""
    names = {param: name for name, param in model.named_parameters()}
    found: dict[str, Any] = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    for i, optimizer in enumerate(optimizers):
        for param, slots in optimizer.state.items():
            found |= {f"{i}.{slot}.{names[param]}": whole(v) for slot, v in slots.items()}
        for j, group in enumerate(optimizer.param_groups):
            found[f"{i}.groups.{j}"] = copy.deepcopy({k: group[k] for k in group if k != "params"})
    return found


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    def same(x: Any, y: Any) -> bool:
        return torch.equal(x, y) if isinstance(x, Tensor) else x == y

    both = a.keys() & b.keys()
    return sorted({key for key in both if not same(a[key], b[key])} | (a.keys() ^ b.keys()))


def test_a_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    model, optimizers = build()
    train(model, optimizers)
    optimizers[0].param_groups[0]["lr"] = 0.5  # restored, not what the next one is built with
    path = save(tmp_path, 1, model, optimizers)
    facts = read_manifest(path).facts
    assert facts.optimizer_class == "Muon, AdamW, AdamW" and facts.optimizer is not None
    assert [group["lr"] for group in facts.optimizer] == [0.5, 2e-3, 1e-3]
    saved = state_of(model, optimizers)
    train(model, optimizers, seed=2)
    other, others = build(seed=1)
    load(path, other, tuple(others))
    assert differing(state_of(other, others), saved) == []
    train(other, others, seed=2)
    assert differing(state_of(other, others), state_of(model, optimizers)) == []
    # Into those that have state: in place, and what has been trained since is gone.
    slots = {id(v) for o in others for slots in o.state.values() for v in slots.values()}
    load(path, other, others)
    assert differing(state_of(other, others), saved) == []
    assert slots == {id(v) for o in others for slots in o.state.values() for v in slots.values()}
    load(path, build()[0])  # the model alone


def _missing(model: nn.Module) -> Build:
    return optimizers_of(model)[1]


def _swapped(model: nn.Module) -> Build:
    return optimizers_of(model)[::-1]


def _exchanged(model: nn.Module) -> Build:
    """Their classes are right, their parameters are each other's."""
    muon, adamw = optimizers_of(model)
    experts, others = (group["params"] for group in adamw.param_groups)
    keep = [p for p in others if p.ndim == 2][:1]
    rest = [p for p in (*muon.param_groups[0]["params"], *others) if p is not keep[0]]
    return [Muon(keep), AdamW([{"params": experts}, {"params": rest}])]


def _other_class(model: nn.Module) -> Build:
    return optimizers_of(model, SGD)


def _one_more(model: nn.Module) -> Build:
    muon, adamw = optimizers_of(model)
    experts, others = (group["params"] for group in adamw.param_groups)
    return [muon, AdamW(experts), SGD(others)]


NOW = "is a Muon, AdamW, AdamW in the checkpoint"


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    model, optimizers = build()
    train(model, optimizers)
    return model, optimizers, save(tmp_path_factory.mktemp("run"), 1, model, optimizers)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_missing, rf"optimizer \(AdamW\) {NOW}"),
        (_swapped, rf"optimizer \(AdamW, AdamW, Muon\) {NOW}"),
        (_exchanged, r"optimizer.param_groups \(3\) hold other parameters, or in another order"),
        (_other_class, rf"optimizer \(SGD, AdamW, AdamW\) {NOW}"),
        (_one_more, rf"optimizer \(Muon, AdamW, SGD\) {NOW}"),
    ],
)
def test_other_optimizers_are_refused(saved_run, make, message):
    model, optimizers, path = saved_run
    other = build(seed=1)[0]
    made = make(other)
    several = list(made) if isinstance(made, Sequence) else [made]
    before, generator = state_of(other, several), torch.get_rng_state()
    with pytest.raises(ValueError, match=rf" 1 differ: {message}") as info:
        load(path, other, made)
    assert "\n" not in str(info.value) and differing(state_of(other, several), before) == []
    assert torch.equal(torch.get_rng_state(), generator)
    # Not strict: the state of a parameter where its optimizer has the same class, and no groups.
    with pytest.warns(UserWarning, match=rf" 1 differ: {message}"):
        load(path, other, made, strict=False)
    saved, found = slots_of(model, optimizers), slots_of(other, several)
    names = {param: name for name, param in other.named_parameters()}
    held = {(names[p], type(o)) for o in several for g in o.param_groups for p in g["params"]}
    assert found.keys() == {name for name, (kind, _) in saved.items() if (name, kind) in held}
    for name, (kind, slots) in found.items():
        assert kind is saved[name][0] and differing(slots, saved[name][1]) == []
    groups = {key: value for key, value in before.items() if ".groups." in key}
    assert groups == {k: v for k, v in state_of(other, several).items() if ".groups." in k}


def slots_of(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Name of each parameter with state -> class of its optimizer, its state."""
    names = {param: name for name, param in model.named_parameters()}
    return {names[p]: (type(o), dict(s)) for o in optimizers for p, s in o.state.items()}


def test_one_optimizer_of_a_pair_of_a_class(tmp_path: Path) -> None:
    """The record knows groups: how many optimizers of one class hold them decides about nothing."""
    model = nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in "ab"})
    a, b = ([model[name].weight] for name in "ab")
    pair = [AdamW(a, lr=0.1), AdamW(b, lr=0.2)]
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    for optimizer in pair:
        optimizer.step()
    path = save(tmp_path, 1, model, pair)
    assert read_manifest(path).facts.optimizer_class == "AdamW"
    one = AdamW([{"params": a}, {"params": b}])
    load(path, model, one)
    assert [group["lr"] for group in one.param_groups] == [0.1, 0.2]
    assert state_of(model, [one])["0.exp_avg.a.weight"].equal(pair[0].state[a[0]]["exp_avg"])
    fresh = [AdamW(a), AdamW(b)]
    load(save(tmp_path, 2, model, one), model, fresh)
    assert differing(state_of(model, fresh), state_of(model, pair)) == []
    load(save(tmp_path, 3, model, [one]), model, one)
    for wrong in (fresh[:1], fresh[::-1], [one, SGD([nn.Parameter(torch.zeros(3))])]):
        with pytest.raises(ValueError, match=r"hold other parameters|must be one of the model's"):
            load(path, model, wrong)


def test_their_schedulers_go_on(tmp_path: Path) -> None:
    model, optimizers = build()

    def schedulers_of(optimizers: Sequence[Optimizer]) -> list[LRScheduler]:
        muon, adamw = optimizers
        return [LinearLR(muon, total_iters=9), MultiStepLR(adamw, [2, 3], gamma=0.5)]

    def steps(optimizers: Sequence[Optimizer], schedulers: list[LRScheduler]) -> list[list[float]]:
        found = []
        for optimizer, scheduler in [*zip(optimizers, schedulers, strict=True)] * 3:
            optimizer.step()
            scheduler.step()
            found.append([group["lr"] for group in optimizer.param_groups])
        return found

    schedulers = schedulers_of(optimizers)
    steps(optimizers, schedulers)
    path = save(tmp_path, 1, model, optimizers, scheduler=schedulers)
    straight = steps(optimizers, schedulers)
    other, others = build(seed=1)
    fresh = schedulers_of(others)
    load(path, other, others, scheduler=tuple(fresh))
    assert steps(others, fresh) == straight
    for wrong, message in (
        (fresh[:1], r"scheduler \(LinearLR\) must have the state of the saved one, but 0._"),
        ([fresh[0], LinearLR(others[1])], r"scheduler \(LinearLR, LinearLR\) must have the"),
        (fresh[::-1], r"scheduler \(of optimizers 1, 0\) must be in the order of the opt"),
    ):
        with pytest.raises(ValueError, match=message):
            load(path, other, others, scheduler=wrong)
    load(
        save(tmp_path, 2, model, optimizers, scheduler=fresh[:1]), other, others, scheduler=fresh[0]
    )


def test_a_class_for_each_group(tmp_path: Path) -> None:
    """Somebody has signed a manifest with two classes and three groups."""
    path = save(tmp_path, 1, *build())
    values = json.loads((path / MANIFEST).read_text())
    write_signed(path, values | {"optimizer_class": "Muon, AdamW"})
    message = r"optimizer_class \('Muon, AdamW'\) must be one class, or one for each group"
    with pytest.raises(ValueError, match=message):
        load(path, *build())
