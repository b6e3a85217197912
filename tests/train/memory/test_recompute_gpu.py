import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moecore.base.options.memory import MemoryOptions, Recomputed
from moecore.models import Decoder, preset
from moecore.train.memory.apply import apply_memory_options
from moecore.train.memory.compiled import make_inductor_options
from moecore.train.memory.recompute import recompute, share_region_outputs
from tests.train.memory.blocks import NoisyBlock

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

DEVICE = torch.device("cuda")
LATENT: tuple[Recomputed, ...] = ("norm", "activation", "rope", "mla_up_proj", "shared_experts")
PARTS: dict[str, tuple[Recomputed, ...]] = {
    "tiny-qwen3": ("norm", "rope", "qkv_proj", "moe"),
    "tiny-deepseek-v3": LATENT,
}


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def gradients(name: str, parts: tuple[Recomputed, ...]) -> dict[str, Tensor]:
    model = Decoder(preset(name), device=DEVICE, dtype=torch.bfloat16)
    apply_memory_options([*model.layers, *model.mtp], MemoryOptions(recompute=parts), DEVICE)
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 100, (2, 128), generator=g).to(DEVICE)
    for _ in range(2):
        model(tokens, tokens.roll(-1, 1)).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.usefixtures("deterministic")
def test_bits_of_a_model_that_keeps_all(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want, again, found = (gradients(name, parts) for parts in ((), (), PARTS[name]))
    assert all(torch.equal(again[n], want[n]) for n in want), "kernels that are not deterministic"
    assert found.keys() == want.keys()
    assert [n for n in want if not torch.equal(found[n], want[n])] == []


def noisy(parts: tuple[Recomputed, ...]) -> nn.Module:
    torch.manual_seed(0)
    block = NoisyBlock().to(DEVICE, torch.bfloat16)
    # The softmax does not change with it, so its gradient is rounding alone.
    block.attention.get_parameter("k_proj.bias").requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        apply_memory_options([block], MemoryOptions(recompute=parts), DEVICE)
    return block


NOISY: list[tuple[Recomputed, ...]] = [("norm", "rope"), ("qkv_proj",)]
NOISY += [("norm", "rope", "qkv_proj")]


def twice(block: nn.Module, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return gradients of two forwards and backwards, and the next random number."""
    torch.manual_seed(0)
    x_BTD = torch.randn(2, 128, 64, device=DEVICE, dtype=torch.bfloat16)
    torch.manual_seed(1)
    found: list[Tensor] = []
    for _ in range(2):
        run(x_BTD).float().square().sum().backward()
        found += [p.grad.clone() for p in block.parameters() if p.grad is not None]
        for p in block.parameters():
            p.grad = None
    return [*found, torch.rand(1, device=DEVICE)]


@pytest.mark.parametrize("parts", NOISY, ids=str)
@pytest.mark.usefixtures("deterministic")
def test_random_numbers_are_those_of_forward(parts: tuple[Recomputed, ...]) -> None:
    want, again, found = (twice(b, b) for b in map(noisy, ((), (), parts)))
    assert all(map(torch.equal, again, want)), "kernels that are not deterministic"
    assert all(map(torch.equal, found, want))


@pytest.mark.parametrize("parts", NOISY, ids=str)
def test_random_numbers_of_what_inductor_compiles(parts: tuple[Recomputed, ...]) -> None:
    found = []
    for wanted in ((), parts):
        torch.compiler.reset()
        block = noisy(())
        options = make_inductor_options([block], MemoryOptions(recompute=wanted))
        found.append(twice(block, torch.compile(block, options=options)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * float(b.abs().max()))


@pytest.mark.parametrize("parts", NOISY, ids=str)
@pytest.mark.usefixtures("deterministic")
def test_random_numbers_of_a_graph_of_forward_and_backward(parts: tuple[Recomputed, ...]) -> None:
    found = []
    for block in map(noisy, ((), parts)):
        static = torch.zeros(2, 128, 64, device=DEVICE, dtype=torch.bfloat16)
        own = [p for p in block.parameters() if p.requires_grad]
        twice(block, block)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            grads = torch.autograd.grad(block(static).float().square().sum(), own)
        torch.manual_seed(1)
        for _ in range(2):
            static.copy_(torch.ones_like(static))
            graph.replay()
            found.append([g.clone() for g in grads])
    assert not all(map(torch.equal, found[0], found[1])), "a replay draws other numbers"
    assert all(map(torch.equal, found[0], found[2])) and all(map(torch.equal, found[1], found[3]))


def test_a_backward_that_is_a_graph_of_its_own_draws_nothing() -> None:
    x = torch.randn(8, 64, device=DEVICE, requires_grad=True)
    weight = torch.randn(64, 64, device=DEVICE, requires_grad=True)
    forward, backward, stream = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph(), torch.cuda.Stream()

    def run() -> Tensor:
        with share_region_outputs():
            return recompute("part", lambda x: F.dropout(x.exp(), 0.5).sin(), (x,)) @ weight

    run().sum().backward()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.autograd.set_multithreading_enabled(False):
        forward.capture_begin()
        y = run()
        forward.capture_end()
        backward.capture_begin(pool=forward.pool())
        with pytest.raises(NotImplementedError, match="part must not draw random numbers where"):
            torch.autograd.grad(y.sum(), [x, weight])
        backward.capture_end()
