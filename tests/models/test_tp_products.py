"""Products as parts of their exchanges, against exchanges in turn: values, gradients, saved bytes.

    python -m pytest tests/models/test_tp_products.py            3 ranks on CPU: the reference
    python -m pytest tests/models/test_tp_products.py -m gpu     2 GPUs: torch's symmetric memory

Errors of a sliced exchange, against exchanges in turn in fp64, are at most twice those of exchanges
in turn in the same dtype.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecore.base.options.precision import Recipe
from moecore.base.regions import recompute_products
from moecore.base.torch_private import get_storage_key
from moecore.kernels.experts.contract import SINK
from moecore.kernels.linear import PlainProducts
from moecore.models import tp_products
from moecore.models.tensor_parallel import TensorParallel
from moecore.precision.apply import make_linear_products
from moecore.precision.plain import Linear, set_products
from moecore.train.memory.recompute import recompute, share_region_outputs
from tests.helpers.ranks import ranks_fixture, run_ranks
from tests.helpers.saved import list_saved
from tests.helpers.sliced import sliced
from tests.moe.test_deferred_linear import Sink

B = 2
DTYPES = (torch.float32, torch.bfloat16)
SIZES = {"cpu": (5, 12, 8), "cuda": (256, 512, 384)}  # t, D, N
FP8_SIZES = (64, 128, 256)  # of which ranks have whole scale blocks
FROZEN = ("nothing", "x", "weights")
PROJECTIONS = ("q", "k", "v", "o")
FLOOR = 1e-7


class Layer(nn.Module):
    """Three products that read the same x, and one of what they make."""

    tp: TensorParallel | None

    def __init__(self, tp, device, dtype, sizes=None) -> None:
        super().__init__()
        self.tp = tp
        _, D, N = sizes or SIZES[device.type]
        self.q, self.k, self.v = Linear(D, N), Linear(D, N // 2), Linear(D, N // 2)
        self.o = Linear(N, D)
        g = torch.Generator().manual_seed(tp.rank)
        for param in self.parameters():
            values = torch.randn(param.shape, generator=g) / param.shape[1] ** 0.5
            param.data = values.bfloat16().to(device, dtype)

    def forward(self, x_BtD: Tensor) -> Tensor:
        q, k, v = tp_products.apply_column_linears(x_BtD, (self.q, self.k, self.v), self.tp)
        return tp_products.apply_row_linear(q * torch.cat((k, v), -1).sigmoid(), self.o, self.tp)


def inputs(tp, device, dtype, sizes=None) -> list[Tensor]:
    """Return x and the gradient of y, of which no sequence is contiguous with the next."""
    t, D, _ = sizes or SIZES[device.type]
    g = torch.Generator().manual_seed(10 + tp.rank)
    both = torch.randn(2, B, t + 1, D, generator=g).bfloat16().to(device, dtype)
    return list(both[:, :, 1:])


def computed(layer: Layer, x: Tensor, dy: Tensor, frozen: str = "nothing") -> dict[str, Tensor]:
    """Return y and all gradients."""
    layer.zero_grad()
    layer.requires_grad_(frozen != "weights")
    x = x.detach().requires_grad_(frozen != "x")
    y = layer(x)
    y.backward(dy)
    found = {"y": y.detach(), "x": x.grad}
    found |= {name: layer.get_submodule(name).weight.grad for name in PROJECTIONS}
    return {name: value for name, value in found.items() if value is not None}


def error(got: Tensor, truth: Tensor) -> float:
    """Return the largest error of an element, over the tensor's largest element."""
    return ((got.double() - truth).abs().max() / truth.abs().max()).item()


def compare(tp: TensorParallel, device: torch.device) -> dict[tuple[Any, str], Any]:
    """Return the errors in turn and sliced of each tensor, and how often slices travelled."""
    found = {}
    for dtype in DTYPES:
        layer, exact = (Layer(tp, device, d) for d in (dtype, torch.float64))
        x, dy = inputs(tp, device, dtype)
        for frozen in FROZEN:
            truth = computed(exact, x.double(), dy.double(), frozen)
            plain = computed(layer, x, dy, frozen)
            with sliced() as counts:
                ours = computed(layer, x, dy, frozen)
            assert ours.keys() == plain.keys() == truth.keys()
            assert all(value.dtype == dtype for value in ours.values())
            errors = {n: (error(plain[n], truth[n]), error(ours[n], truth[n])) for n in truth}
            found[dtype, frozen] = errors, dict(counts)
    return found


def saved_bytes(function: Callable[[], Any]) -> int:
    """Return the bytes of storages that a forward saves."""
    kept = {get_storage_key(x): x for x in list_saved(function)}
    return sum(x.untyped_storage().nbytes() for x in kept.values())


def deferred(tp: TensorParallel, x: Tensor, dy: Tensor) -> list[bool]:
    """Return whether deferred gradients are those that autograd has."""
    layer, sinks = Layer(tp, x.device, x.dtype), {}
    with sliced():
        want = computed(layer, x, dy)
        for name in PROJECTIONS:
            linear = layer.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            set_products(linear, PlainProducts())
            linear.products.defers = True  # type: ignore[attr-defined, union-attr]
            sinks[name] = Sink(defers=True)
            setattr(linear.weight, SINK, lambda _, name=name: sinks[name])
        found = computed(layer, x, dy)
    assert set(want) - set(found) == set(PROJECTIONS)
    later = {name: sink.later() for name, sink in sinks.items()}
    return [torch.equal(value, (found | later)[name]) for name, value in want.items()]


def recomputed(tp: TensorParallel, x: Tensor, dy: Tensor) -> tuple[list[bool], dict[str, int]]:
    """Return whether a region has the same gradients, and how often slices travelled."""
    layer = Layer(tp, x.device, x.dtype)
    with sliced() as counts:
        want = computed(layer, x, dy)
        counts.clear()
        region, leaf = Layer(tp, x.device, x.dtype), x.detach().requires_grad_()
        with share_region_outputs():
            y = recompute("layer", region, (leaf,))
        y.backward(dy)
    found = {"y": y, "x": leaf.grad}
    found |= {name: region.get_submodule(name).weight.grad for name in PROJECTIONS}
    return [torch.equal(want[name], found[name]) for name in want], dict(counts)


def in_fp8(tp: TensorParallel, device: torch.device) -> tuple[dict[str, float], dict[str, int]]:
    """Return errors against one process with all ranks' parts, and how often slices travelled."""
    ranks = [replace(tp, rank=rank) for rank in range(tp.size)]
    layers = [Layer(one, device, torch.float32, FP8_SIZES) for one in ranks]
    for linear in (m for layer in layers for m in layer.modules() if isinstance(m, Linear)):
        set_products(linear, make_linear_products(Recipe()))
    parts = zip(*(inputs(one, device, torch.float32, FP8_SIZES) for one in ranks), strict=True)
    x, dy = (torch.cat(part, 1) for part in parts)
    with sliced() as counts:
        found = computed(layers[tp.rank], tp.slice_local_tokens(x), tp.slice_local_tokens(dy))
    for layer in layers:
        layer.tp = None
    alone = [computed(layer, x, dy) for layer in layers]
    want = alone[tp.rank] | {
        n: tp.slice_local_tokens(torch.stack([one[n] for one in alone]).sum(0)) for n in "xy"
    }
    return {n: error(found[n], want[n].double()) for n in want}, dict(counts)


def compiled(tp: TensorParallel, x: Tensor, dy: Tensor) -> tuple[float, dict[str, int]]:
    """Return the worst error of compiled code, and how often slices travelled."""
    layer = Layer(tp, x.device, x.dtype)
    want = computed(layer, x, dy)
    layer.compile(backend="aot_eager")
    with sliced() as counts:
        found = computed(layer, x, dy)
    return max(error(found[n], want[n].double()) for n in want), dict(counts)


def worker(rank: int, device: torch.device) -> dict[str, Any]:
    group = dist.group.WORLD
    of_all = TensorParallel(group, rank, group.size())
    pair = dist.new_group([0, 1])
    found = {f"tp {of_all.size}": compare(of_all, device)}
    if rank > 1:
        return found
    tp = TensorParallel(pair, rank, 2)
    x, dy = inputs(tp, device, torch.float32)
    found["tp 2"] = compare(tp, device)
    found["fp8"], found["compiled"] = in_fp8(tp, device), compiled(tp, x, dy)
    found["deferred"], found["recomputed"] = deferred(tp, x, dy), recomputed(tp, x, dy)
    layer, leaf = Layer(tp, device, x.dtype), x.detach().requires_grad_()
    in_turn = saved_bytes(lambda: layer(leaf))
    with sliced():
        found["bytes"] = in_turn, saved_bytes(lambda: layer(leaf))
        (dx,) = torch.autograd.grad(layer(leaf).sum(), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            dx.sum().backward()
    return found


results = ranks_fixture(3, worker)


def check(found: dict[tuple[Any, str], Any]) -> None:
    assert len(found) == len(DTYPES) * len(FROZEN)
    for (_, frozen), (errors, counts) in found.items():
        assert len(errors) == {"nothing": 6, "x": 5, "weights": 2}[frozen]
        wrong = {n: pair for n, pair in errors.items() if not pair[1] <= 2 * pair[0] + FLOOR}
        assert not wrong, (frozen, wrong)
        # Of each sequence: forward, and backward, which sends no gradient of a frozen x.
        assert counts == {"all_gather": 2 * B, "all_to_all": (1 if frozen == "x" else 2) * B}


@pytest.mark.parametrize("tp", [2, 3])
def test_a_sliced_exchange_is_as_exact_as_exchanges_in_turn(results, tp) -> None:
    check(results[f"tp {tp}"])


@pytest.mark.gpu
@pytest.mark.gpus(2)
def test_symmetric_memory_is_as_exact_as_exchanges_in_turn() -> None:
    found = run_ranks(2, worker, device_type="cuda")
    check(found["tp 2"])
    assert found["bytes"][0] == found["bytes"][1]
    assert all(found["deferred"]) and all(found["recomputed"][0])


def test_products_in_fp8_are_those_of_one_process(results: dict[str, Any]) -> None:
    """Exchanges stay in turn; a scale is of a row's or a matrix's part that a rank has whole."""
    errors, counts = results["fp8"]
    assert len(errors) == 6 and max(errors.values()) <= 1e-6, errors
    assert not counts


def test_compiled_code_exchanges_in_turn(results: dict[str, Any]) -> None:
    worst, counts = results["compiled"]
    assert worst <= 1e-6 and not counts


def test_gradients_that_are_deferred(results: dict[str, Any]) -> None:
    assert results["deferred"] == [True] * 6


def test_a_region_exchanges_nothing_again(results: dict[str, Any]) -> None:
    same, counts = results["recomputed"]
    assert same == [True] * 6 and counts == {"all_gather": 2 * B, "all_to_all": 2 * B}


def test_a_forward_saves_what_it_saves_in_turn(results: dict[str, Any]) -> None:
    in_turn, ours = results["bytes"]
    assert in_turn == ours > 0


def test_which_products_can_be_part_of_an_exchange() -> None:
    x = torch.ones(1, 4, 32)
    with torch.autocast("cpu"):
        assert tp_products.find_overlap_problem(Linear(32, 32), x) is not None
    assert tp_products.find_overlap_problem(Linear(32, 32), x) is None
    assert tp_products.find_overlap_problem(nn.Linear(32, 32, bias=False), x) is None
    changed = [Linear(32, 32) for _ in range(4)]
    changed[0].register_forward_hook(lambda *_: None)
    changed[1].forward = changed[0].forward  # type: ignore[method-assign]
    changed[2].to(torch.bfloat16)
    set_products(changed[3], make_linear_products(Recipe()))
    subclass = type("LoraLinear", (Linear,), {"forward": lambda self, x: x})
    for linear in (*changed, nn.Linear(32, 32), subclass(32, 32)):
        assert tp_products.find_overlap_problem(linear, x) is not None, linear


def test_when_exchanges_stay_in_turn() -> None:
    tp: Any = TensorParallel(group=None, rank=0, size=2)  # type: ignore[arg-type]
    x, linears = torch.ones(1, 4, 32), (Linear(32, 32),)
    assert tp_products.find_sliced_exchange(tp, x, 1 << 30, 32, linears) is None  # on CPUs
    with sliced():
        assert tp_products.find_sliced_exchange(tp, x, 4, 32, linears) is not None
        with recompute_products():
            assert tp_products.find_sliced_exchange(tp, x, 4, 32, linears) is None
        compiled = torch.compile(
            lambda x: tp_products.find_sliced_exchange(tp, x, 4, 32, linears) is None,
            backend="eager",
        )
        assert compiled(x)
