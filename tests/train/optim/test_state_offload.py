import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from moecore import ParallelConfig, TrainStep, build_meshes, parallelize_moe
from moecore.base.torch_private import get_local_tensor
from moecore.io import load, save
from moecore.models import Decoder, preset
from moecore.train import AdamW, StateOffload
from moecore.train.memory.host import MovedStorage
from moecore.train.optim import state_offload
from moecore.train.optim.state_offload import select_largest
from tests.train.optim.late_stream import late_copies  # noqa: F401, a fixture

NUM_BLOCKS, NUM_STEPS = 4, 4


class Net(nn.Module):
    """Four blocks of odd sizes, one with a weight that is not contiguous."""

    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [(24, 40), (40, 33), (33, 40), (40, 24)]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in sizes)
        self.layers[1].weight = nn.Parameter(torch.randn(40, 33).mul_(0.1).t())
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            call = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
            x = call.tanh()
        return x


def pair(**options: Any) -> tuple[tuple[Net, Net], list[AdamW], StateOffload]:
    """Return two equal nets and their optimizers; the state of the second one is offloaded."""
    nets = Net(), Net()
    optimizers = [AdamW(net.parameters(), lr=1e-2) for net in nets]
    return nets, optimizers, StateOffload(optimizers[1], nets[1], **options)


def batch(step: int) -> Tensor:
    return torch.randn(8, 24, generator=torch.Generator().manual_seed(step))


def train(net, optimizer, steps=range(NUM_STEPS), parts=1) -> None:
    for step in steps:
        for x in batch(step).chunk(parts):
            net(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def state_of(optimizer: Optimizer) -> list[Tensor]:
    """This rank's part of each state tensor."""
    return [
        get_local_tensor(value).clone()
        for group in optimizer.param_groups
        for param in group["params"]
        for _, value in sorted(optimizer.state[param].items())
        if isinstance(value, Tensor)
    ]


def away(optimizer: Optimizer, offload: StateOffload) -> float:
    """Share of the state's bytes that lies in host memory."""
    slabs = [s.memory for kind in offload._copies._slabs.values() for s in kind.slabs]
    spans = [(m.data_ptr(), m.data_ptr() + m.numel()) for m in slabs]
    there = total = 0
    for tensors in optimizer.state.values():
        for tensor in map(get_local_tensor, (v for v in tensors.values() if isinstance(v, Tensor))):
            if tensor.ndim:
                total += tensor.nbytes
                there += tensor.nbytes * any(a <= tensor.data_ptr() < b for a, b in spans)
    return there / max(total, 1)


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a tensor leaves behind, on either side, is nan at once."""
    leave, arrive = MovedStorage.move_to_host, MovedStorage.move_to_device

    def poisoned_leave(storage: MovedStorage) -> None:
        storage.memory.fill_(255)  # nan in every float dtype
        leave(storage)

    def poisoned_arrive(storage: MovedStorage) -> None:
        arrive(storage)
        storage.host.fill_(255)

    monkeypatch.setattr(MovedStorage, "move_to_host", poisoned_leave)
    monkeypatch.setattr(MovedStorage, "move_to_device", poisoned_arrive)


def places_of(net: Net, optimizer: Optimizer, offload: StateOffload) -> list[float]:
    """Watch how much is away after each block's forward and before each block's backward.

    What is on its way back counts as back.
    """
    found: list[float] = []

    def share() -> float:
        parts = (part for part in offload._parts if part.place == "coming")
        coming = sum(moved.host.nbytes for part in parts for moved in part.storages)
        total = sum(t.nbytes for t in state_of(optimizer) if t.ndim)
        return round(away(optimizer, offload) - coming / total, 3)

    def after(_: nn.Module, __: Any, output: Tensor) -> None:
        found.append(share())
        if output.requires_grad:
            output.register_hook(lambda _: found.append(share()))

    for layer in net.layers:
        layer.register_forward_hook(after)
    return found


@pytest.mark.parametrize("recompute", [False, True])
def test_state_leaves_and_comes_back_block_by_block(recompute: bool) -> None:
    net = Net(recompute=recompute)
    optimizer = AdamW(net.parameters())
    offload = StateOffload(optimizer, net)
    train(net, optimizer, range(1))
    found = places_of(net, optimizer, offload)
    net(batch(1)).sum().backward()
    forward = found[:NUM_BLOCKS]
    assert forward == sorted(forward) and forward[-1] == 1 and 0 < forward[0] < 0.5
    backward = found[NUM_BLOCKS:]
    assert backward == sorted(backward, reverse=True)
    assert backward[0] == 1 and backward[-1] == 0 and len(set(backward)) == NUM_BLOCKS
    assert {part.place for part in offload._parts} == {"coming"}
    optimizer.step()
    assert away(optimizer, offload) == 0


@pytest.mark.usefixtures("poison", "late_copies")
def test_loops_that_accumulate_or_skip() -> None:
    """A scaler that finds inf never steps; plain micro-batches bring the state back too early."""
    nets, optimizers, offload = pair()
    for step in range(NUM_STEPS):
        for net, optimizer in zip(nets, optimizers, strict=True):
            net(batch(step)).sum().backward()
            if step != 2:
                train(net, optimizer, range(step, step + 1), parts=2)
            optimizer.zero_grad()
        assert offload._parts == [] or step == 2
    nets[1](batch(0))
    assert away(optimizers[1], offload) == 1 and {p.place for p in offload._parts} == {"away"}
    assert all(map(torch.equal, nets[0].parameters(), nets[1].parameters()))


@pytest.mark.usefixtures("poison", "late_copies")
@pytest.mark.parametrize("how", ["checkpoint", "state_dict"])
def test_state_is_saved_and_loaded_while_it_is_away(how: str, tmp_path: Path) -> None:
    net, other = Net(), Net()
    optimizer, fresh = AdamW(net.parameters(), lr=1e-2), AdamW(other.parameters(), lr=1e-2)
    offloads = StateOffload(optimizer, net), StateOffload(fresh, other)
    train(net, optimizer, range(2))
    train(other, fresh, range(5, 6))
    for one, owner, offload in ((net, optimizer, offloads[0]), (other, fresh, offloads[1])):
        one(batch(0))  # an evaluation
        assert away(owner, offload) == 1
    if how == "checkpoint":
        load(save(tmp_path, 1, net, optimizer), other, fresh)
    else:
        other.load_state_dict(net.state_dict())
        fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(map(torch.equal, state_of(optimizer), state_of(fresh)))
    train(net, optimizer, range(2, 4))
    train(other, fresh, range(2, 4))
    assert all(map(torch.equal, net.parameters(), other.parameters()))


def test_short_host_memory_is_one_line_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    nets, optimizers, offload = pair(fraction=0.5)
    for net, optimizer in zip(nets, optimizers, strict=True):
        train(net, optimizer, range(1))

    def short(*_: Any) -> None:
        raise RuntimeError("CUDA error: out of memory\nCompile with ...")

    with monkeypatch.context() as patch:
        patch.setattr(offload._copies, "reserve_like", short)
        with pytest.raises(MemoryError, match=r"fraction .0.5. of .* must fit .*: lower it") as e:
            nets[1](batch(1))
    assert "\n" not in str(e.value)
    for net, optimizer in zip(nets, optimizers, strict=True):
        train(net, optimizer, range(1, 3))
    assert all(map(torch.equal, nets[0].parameters(), nets[1].parameters()))


def test_short_device_memory_in_backward_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the step, which tries again."""
    nets, optimizers, offload = pair()
    train(nets[0], optimizers[0], range(2))
    train(nets[1], optimizers[1], range(1))
    refused: list[Any] = []

    def short(part: Any) -> None:
        refused.append(part)
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(offload, "_copy_part_back", short)
        nets[1](batch(1)).square().sum().backward()
        with pytest.raises(torch.OutOfMemoryError):
            optimizers[1].step()
    assert len(refused) == NUM_BLOCKS and away(optimizers[1], offload) == 1
    optimizers[1].step()
    assert all(map(torch.equal, nets[0].parameters(), nets[1].parameters()))


@pytest.mark.usefixtures("poison", "late_copies")
def test_memory_that_torch_cannot_resize_stays_and_shared_memory_stays_shared() -> None:
    """Of three moments one is numpy's, and two are one tensor's memory."""
    nets, optimizers, offload = pair()
    moments = []
    for net, optimizer in zip(nets, optimizers, strict=True):
        train(net, optimizer, range(1))
        states = [optimizer.state[net.layers[i].bias] for i in (0, 2)]  # both of 40 elements
        states[0]["exp_avg"] = torch.from_numpy(states[0]["exp_avg"].numpy().copy())
        states[1]["exp_avg"] = states[0]["exp_avg_sq"].detach()
        moments.append([state["exp_avg"] for state in states] + [states[0]["exp_avg_sq"]])
    nets[1](batch(9))
    address = moments[1][0].data_ptr()
    assert 0 < away(optimizers[1], offload) < 1
    offload.bring_state_back()
    resized, shared, other = moments[1]
    assert resized.data_ptr() == address and shared.data_ptr() == other.data_ptr()
    assert all(map(torch.equal, moments[0], moments[1]))


def test_refusals_and_choice() -> None:
    net = Net()
    optimizer = AdamW(net.parameters())
    with pytest.raises(ValueError, match=r"fraction .1.5. must be"):
        StateOffload(optimizer, net, fraction=1.5)
    offload = StateOffload(optimizer, net)
    with pytest.raises(ValueError, match=r"optimizer .AdamW. must not have a StateOffload already"):
        StateOffload(optimizer, net)
    offload.close()
    offload.close()
    StateOffload(optimizer, net).close()
    sizes = {"a": 1, "b": 6, "c": 3, "d": 2}
    assert select_largest(0.5, sizes) == {"b"} and select_largest(0.7, sizes) == {"b", "d"}
    assert select_largest(1, sizes) == set(sizes) and select_largest(0, sizes) == set()
    parts = state_offload._divide_into_parts({"a": 1, "b": 6, "c": 3}, 2)
    assert parts == [["a", "b"], ["c"]]


def sharded_run(folder: str | None) -> dict[str, Any]:
    """Train a decoder in two micro-batches a step, with uneven shards, a bad step, a resume.

    The ranks of `test_host_step.py` run it.
    """
    model = Decoder(replace(preset("tiny"), num_layers=2))
    model.init_weights(0)
    parallelize_moe(model, build_meshes(ParallelConfig(dp_shard=3), "cpu"))
    optimizer = AdamW(model.parameters(), lr=1e-2)
    offload = None if folder is None else StateOffload(optimizer, model)
    owner = TrainStep(model, optimizer, max_norm=0.1, num_micro_batches=2)
    losses, shares = [], []
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        for tokens in torch.randint(0, 256, (2, 2, 17), generator=generator):
            with owner.micro_batch():
                loss = model(tokens[:, :-1], tokens[:, 1:])
                loss.backward()
            if offload is not None:
                shares.append({part.place for part in offload._parts})
        if step == 2:
            model.get_parameter("model.norm.weight").grad.to_local()[:] = float("nan")
        assert bool(owner.finish().is_skipped) == (step == 2)
        losses.append(loss.item())
        if offload is not None and step == 3:
            with torch.no_grad():
                model(tokens[:, :-1], tokens[:, 1:])
            assert away(optimizer, offload) == 1
            path = save(folder, step, model, optimizer)
            for tensor in state_of(optimizer):
                assert tensor.isfinite().all()
            for state in optimizer.state.values():
                state["exp_avg"].zero_()
            load(path, model, optimizer)
    return {"losses": losses, "shares": shares, "state": state_of(optimizer)}
