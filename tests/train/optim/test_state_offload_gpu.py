"""On a GPU: memory is free while state is away, and no copy overtakes what it copies.

python -m pytest -m gpu tests/train/optim
"""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from moecore import FSDPOptions, ParallelConfig, TrainStep, build_meshes, parallelize_moe
from moecore.io import load, save
from moecore.models import Decoder, preset
from moecore.train import AdamW, GraphedForwardBackward, HostAdamW, StateOffload
from moecore.train.memory.host import MovedStorage
from moecore.train.memory.streams import CopyStream
from tests.helpers.ranks import run_ranks
from tests.train.optim.test_state_offload import away, state_of

pytestmark = pytest.mark.gpu
DIM, NUM_BLOCKS, TOKENS = 1024, 8, 8192
SLEEP = 40_000_000  # cycles, about 20 ms


class Net(nn.Module):
    """32 MiB of weights, 64 MiB of moments, 256 MiB of activations."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(NUM_BLOCKS))
        self.cuda()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator(device="cuda").manual_seed(step)
        x = torch.randn(TOKENS, DIM, generator=generator, device="cuda")
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def run(fraction: float | None, make: Any = AdamW) -> dict[str, Any]:
    """Train; return weights, state, and bytes at the peak and at the end of a forward."""
    gc.collect()
    start, net = torch.cuda.memory_allocated(), Net()
    optimizer = make(net.parameters(), lr=1e-3)
    offload = None
    if fraction is not None:
        offload = StateOffload(optimizer, net, fraction=fraction)
    train(net, optimizer, range(2))
    torch.cuda.synchronize()
    ends: list[int] = []
    hook = net.register_forward_hook(lambda *_: ends.append(torch.cuda.memory_allocated()))
    torch.cuda.reset_peak_memory_stats()
    train(net, optimizer, range(2, 5))
    torch.cuda.synchronize()
    hook.remove()
    found = {
        "peak": torch.cuda.max_memory_allocated() - start,
        "forward": ends[-1] - start,
        "params": [p.detach().clone() for p in net.parameters()],
    }
    if offload is not None:
        offload.close()
    return found | {"state": state_of(optimizer)}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(
        torch.equal(x, y) for k in ("params", "state") for x, y in zip(a[k], b[k], strict=True)
    )


@pytest.mark.parametrize("fraction", [0.4, 1.0])
def test_memory_is_free_in_forward_and_steps_have_the_same_bits(fraction: float) -> None:
    run(None)  # what libraries allocate once
    plain, other = run(None), run(fraction)
    assert same(plain, other)
    state = sum(t.nbytes for t in plain["state"] if t.ndim)
    away_bytes = pytest.approx(fraction * state, rel=0.2)
    assert plain["forward"] - other["forward"] == away_bytes
    assert plain["peak"] - other["peak"] == away_bytes


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, HostAdamW])
def test_other_optimizers(make: Any) -> None:
    def built(params: Any, lr: float) -> torch.optim.Optimizer:
        if make is torch.optim.SGD:
            return make(params, lr=lr, momentum=0.9)
        return make(params, lr=lr)

    assert same(run(None, built), run(1.0, built))


@pytest.mark.parametrize("late", ["copies", "model", "both"])
def test_late_streams_change_nothing(late: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a tensor leaves on the GPU is nan at once, and copies or the model come late."""
    plain = run(None)
    leave, copy, hold = MovedStorage.move_to_host, CopyStream.copy, CopyStream.wait_for_event
    calls = [0]

    def poisoned(storage: MovedStorage) -> None:
        storage.memory.fill_(255)  # nan in every float dtype
        leave(storage)

    def late_copy(stream: Any, target: Tensor, source: Tensor) -> None:
        calls[0] += 1
        if late != "model" and calls[0] % 8 == 1:
            with torch.cuda.stream(stream.next_stream):
                torch.cuda._sleep(SLEEP)
        copy(stream, target, source)

    def late_work(net: nn.Module, *_: Any) -> None:
        if late != "copies":
            torch.cuda._sleep(SLEEP)

    def late_hold(stream: Any, event: Any) -> None:
        late_work(None)
        hold(stream, event)

    monkeypatch.setattr(MovedStorage, "move_to_host", poisoned)
    monkeypatch.setattr(CopyStream, "copy", late_copy)
    monkeypatch.setattr(CopyStream, "wait_for_event", late_hold)
    hook = register_optimizer_step_post_hook(late_work)
    try:
        assert same(plain, run(1.0))
    finally:
        hook.remove()
    assert calls[0] > 100


def test_no_host_sync() -> None:
    net = Net()
    optimizer = AdamW(net.parameters())
    StateOffload(optimizer, net)
    train(net, optimizer, range(3))
    torch.cuda.synchronize()
    x = torch.randn(TOKENS, DIM, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        net(x).square().mean().backward()
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_memory_is_pinned_once() -> None:
    net = Net()
    optimizer = AdamW(net.parameters())
    offload = StateOffload(optimizer, net)
    train(net, optimizer, range(2))
    state = sum(t.nbytes for t in state_of(optimizer) if t.ndim)
    assert all(slab.memory.is_pinned() for slab in offload._copies._slabs["cuda"].slabs)
    assert state <= offload.host_bytes <= 2 * state
    torch.cuda.synchronize()
    pinned = torch.cuda.host_memory_stats()["num_host_alloc"]
    for step in range(2, 4):
        train(net, optimizer, range(step, step + 1))
        torch.cuda.synchronize()
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == pinned


def make_decoder() -> Decoder:
    """Return a sharded decoder on this rank's GPU."""
    model, fsdp = Decoder(preset("tiny"), device="meta"), FSDPOptions(param_dtype=torch.bfloat16)
    parallelize_moe(model, build_meshes(ParallelConfig(), "cuda"), dispatch="local", fsdp=fsdp)
    model.to_empty(device="cuda")
    model.init_weights(0)
    return model


def graphed_run(kind: str, folder: str) -> dict[str, list[float]]:
    """Train a decoder by a graph or eagerly, evaluate, save and load; return losses and norms."""
    model = make_decoder()
    optimizer = AdamW(model.parameters(), lr=3e-3)
    offload = StateOffload(optimizer, model) if "away" in kind else None
    owner = TrainStep(model, optimizer, max_norm=0.5, num_micro_batches=2)

    def forward_backward(tokens_ABT: Tensor) -> Tensor:
        losses = []
        for tokens_BT in tokens_ABT:
            with owner.micro_batch():
                loss = model(tokens_BT, tokens_BT.roll(-1, 1)) / 2
                loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses)

    call: Any = GraphedForwardBackward(forward_backward, model) if "graph" in kind else None
    losses, norms = [], []
    for step in range(7):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 256, (2, 4, 128), generator=generator).cuda()
        losses += (call or forward_backward)(tokens).tolist()
        done = owner.finish()
        norms.append(done.norm.total)
        if step in (1, 5):
            with torch.no_grad():
                model(tokens[0], tokens[1])
            assert offload is None or away(optimizer, offload) == 1
        if step == 5 and offload is not None:
            path = save(f"{folder}/{kind}", step, model, optimizer)
            for state in optimizer.state.values():
                state["exp_avg"].zero_()
            load(path, model, optimizer)
    if call is not None:
        call.close()
    return {"losses": losses, "norms": norms}


def all_runs(rank: int, device: torch.device, folder: str) -> dict[str, Any]:
    kinds = ("eager", "eager again", "eager away", "graph", "graph away")
    return {kind: graphed_run(kind, folder) for kind in kinds}


def test_shards_graphs_and_checkpoints(tmp_path: Any) -> None:
    found = run_ranks(1, all_runs, str(tmp_path), device_type="cuda")
    want, again = found["eager"]["losses"], found["eager again"]["losses"]
    apart = max(abs(a - b) for a, b in zip(want, again, strict=True))
    for kind in ("eager away", "graph", "graph away"):
        assert found[kind]["losses"] == pytest.approx(want, abs=max(4 * apart, 1e-6)), kind
        assert found[kind]["norms"] == pytest.approx(found["eager"]["norms"], rel=1e-3), kind
