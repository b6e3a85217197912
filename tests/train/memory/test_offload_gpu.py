import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moecore.train.memory.streams import CopyEvent, CopyStream
from tests.train.memory.blocks import Plain, offloaded, part_of, part_or_block

pytestmark = pytest.mark.gpu

TOKENS, DIM = 8192, 512  # 16 MiB for a norm's input in fp32: 0.3 ms of PCIe
PAUSE = 20_000_000  # cycles: 10 ms, longer than all copies of a layer


def make(num_layers: int) -> Plain:
    with torch.device("cuda"):
        model = Plain(num_layers, dim=DIM, width=2)
    model.embedding.requires_grad_(False)  # whose gradient is not reproducible
    return model


def tokens(seed: int, length: int = TOKENS) -> tuple[Tensor, Tensor]:
    g = torch.Generator(device="cuda").manual_seed(seed)
    found = torch.randint(0, 64, (1, length), generator=g, device="cuda")
    return found, found.roll(-1, 1)


def gradients(model: Any, seeds: Iterable[int] = (0,), length: int = TOKENS) -> dict[str, Tensor]:
    model.zero_grad()
    losses = [model(*tokens(seed, length)) for seed in seeds]
    for loss in losses:
        loss.backward()
    return grads_of(model)


def grads_of(model: Any) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.layers.named_parameters()}


@contextmanager
def host_never_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_equal(found: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    for name, grad in want.items():
        assert torch.equal(found[name], grad), name


@contextmanager
def late(which: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within, copies out, copies back, or the compute before each of them start late."""
    start = CopyStream.start_copies

    def start_late(self: CopyStream, *args: Any) -> CopyEvent:
        if which == ("out" if self.name == "copy to host" else "back"):
            with torch.cuda.stream(self.next_stream):
                torch.cuda._sleep(PAUSE)
        return start(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(CopyStream, "start_copies", start_late)
        yield


@pytest.mark.parametrize("which", ["none", "out", "back", "compute"])
@pytest.mark.parametrize("parts", [part_of, part_or_block])
def test_late_copies_and_late_compute_give_equal_gradients(parts, which, monkeypatch) -> None:
    model = make(4)
    seeds = (0, 1)
    want, offload = gradients(model, seeds), offloaded(model, parts)
    if which == "compute":
        for layer in model.layers:
            layer.mlps[0].register_forward_pre_hook(lambda *_: torch.cuda._sleep(PAUSE))
            layer.norms[1].register_full_backward_hook(lambda *_: torch.cuda._sleep(PAUSE))
    with late(which, monkeypatch):
        for _ in range(3):
            assert_equal(gradients(model, seeds), want)
    assert offload.out_bytes > 0 and offload._pool.used_bytes == 0


class Beside(nn.Module):
    """A block whose MLP runs on a stream of its own, as shared experts do."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(DIM)])
        self.mlps = nn.ModuleList([nn.Sequential(nn.Linear(DIM, DIM), nn.GELU())])
        self.stream = stream

    def forward(self, x: Tensor) -> Tensor:
        x, current = self.norms[0](x), torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            y = self.mlps[0](x)
        x.record_stream(self.stream)
        x = x.sin() * x
        current.wait_stream(self.stream)
        y.record_stream(current)
        return x + y


@pytest.mark.parametrize("which", ["none", "out", "back"])
def test_a_part_on_a_stream_of_its_own(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, model = torch.cuda.Stream(), make(1)
    model.layers = nn.ModuleList(Beside(stream) for _ in range(5)).cuda()
    want = gradients(model)
    offloaded(model)
    with late(which, monkeypatch):
        for _ in range(3):
            assert_equal(gradients(model), want)


def peak(model: Any, length: int = TOKENS) -> int:
    for _ in range(2):
        gradients(model, length=length)
    gc.collect()  # cycles of earlier models, freed later, would count less
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model(*tokens(0, length)).backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_the_peak_is_one_layer_whatever_the_number_of_layers() -> None:
    one, two = peak(make(1)), peak(make(2))
    for num_layers in (4, 8, 16):
        model = make(num_layers)
        offload = offloaded(model)
        assert peak(model) <= one + 0.02 * (two - one), num_layers
        offload.close()


def test_the_host_never_waits() -> None:
    model = make(3)
    offloaded(model)
    gradients(model)
    with host_never_waits():
        gradients(model)


def capture(model: nn.Module, inputs: tuple[Tensor, Tensor]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            model.zero_grad()
            model(*inputs).backward()
    torch.cuda.current_stream().wait_stream(stream)
    model.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        model(*inputs).backward()
    return graph


def check_replays(plain, model, length=TOKENS, after=lambda: None) -> None:
    """Also while eager forwards, replays and eager backwards alternate."""
    want = {seed: gradients(plain, [seed], length) for seed in (0, 1, 2)}
    inputs = tuple(t.clone() for t in tokens(0, length))
    graph = capture(model, inputs)
    written = {n: p.grad for n, p in model.layers.named_parameters()}
    for seed in (1, 2, 0):
        for mine, given in zip(inputs, tokens(seed, length), strict=True):
            mine.copy_(given)
        graph.replay()
        assert_equal(written, want[seed])
    after()
    model.zero_grad()
    loss = model(*tokens(1, length))
    graph.replay()  # of seed 0, into memory of its own
    loss.backward()
    assert_equal(grads_of(model), want[1])
    assert_equal(written, want[0])
    after()


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_replays_of_a_graph_compute_what_eager_code_does(fraction: float) -> None:
    model = make(4)
    offload = offloaded(model, fraction=fraction)
    check_replays(make(4), model)
    assert offload.out_bytes > 0


def test_later_steps_need_no_more_memory() -> None:
    model = make(6)
    offload = offloaded(model)
    gradients(model)
    reserved, host = torch.cuda.memory_reserved(), offload.host_bytes
    for _ in range(5):
        gradients(model)
    assert offload.host_bytes == host and torch.cuda.memory_reserved() <= reserved * 1.05
