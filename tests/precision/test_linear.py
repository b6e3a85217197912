import copy
import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moecore.base.options.precision import Recipe
from moecore.kernels.meta import record_launches_on_meta
from moecore.moe.amax_history import AmaxHistory, advance_amax_histories, push_amax
from moecore.precision.emulated import EmulatedLinearProducts
from moecore.precision.linear import Fp8Products, InputCastCache
from tests.helpers.saved import list_saved
from tests.precision.plain import RECIPES, relative_error


def operands(T: int = 70, K: int = 144, N: int = 160) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, weight and bias, which require gradients, and dy."""
    torch.manual_seed(0)
    x = (torch.randn(T, K) * torch.exp(torch.randn(T, 1))).requires_grad_()
    weight, bias = torch.randn(N, K) / K**0.5, torch.randn(N)
    dy = torch.randn(T, N) * torch.exp(torch.randn(T, 1)) * 1e-4
    return x, weight.requires_grad_(), bias.requires_grad_(), dy


def kept_by(products: Fp8Products, x: Tensor, weight: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return y and what its backward keeps."""
    found: list[Tensor] = []
    kept = list_saved(lambda: found.append(products(x, weight)))
    return found[0], kept


def values(make: Any, *leaves: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    y = make(*leaves)
    return y, *torch.autograd.grad(y, leaves, dy)


def test_what_is_not_wanted_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    from moecore.precision import linear as module

    made: list[tuple[bool, bool]] = []
    real = module.quantise_matrix

    def record(*args: Any, rowwise: bool = True, columnwise: bool = True, **kwargs: Any) -> Any:
        made.append((rowwise, columnwise))
        return real(*args, rowwise=rowwise, columnwise=columnwise, **kwargs)

    monkeypatch.setattr(module, "quantise_matrix", record)
    x, weight, _, dy = operands()
    with torch.no_grad():
        Fp8Products(Recipe())(x, weight)
    assert made == [(True, False), (True, False)]  # x and weight
    made.clear()
    y, kept = kept_by(Fp8Products(Recipe()), x, weight.detach())
    assert [t.numel() for t in kept] == [weight.numel()]
    y.backward(dy)
    assert made == [(True, False), (True, False), (True, False), (False, True)]  # dy and weight
    made.clear()
    y = Fp8Products(Recipe())(x.detach(), weight)
    y.backward(dy)
    assert made == [(True, True), (True, False), (False, True)]


@pytest.mark.parametrize("recipe", [*RECIPES.values(), Recipe(scaling="mxfp8")], ids=str)
def test_second_derivatives_are_refused(recipe: Recipe) -> None:
    """Of each gradient and in each leaf, also where dy is a constant; the first ones stay."""
    x, weight, bias, dy = operands(K=128)
    products = (EmulatedLinearProducts if recipe.is_emulated else Fp8Products)(recipe)
    first = torch.autograd.grad(products(x, weight, bias), (x, weight, bias), dy)
    found = torch.autograd.grad(products(x, weight, bias), (x, weight, bias), dy, create_graph=True)
    for once, grad in zip(first, found, strict=True):
        assert torch.equal(once, grad)
        with pytest.raises(NotImplementedError, match="have no second derivatives"):
            (grad.square().sum() + x.sum()).backward()


def test_backward_keeps_x_in_one_byte() -> None:
    x, weight, _, _ = operands(256)
    _, kept = kept_by(Fp8Products(Recipe()), x, weight)
    sizes = [t.numel() * t.element_size() for t in kept if t.data_ptr() != weight.data_ptr()]
    assert sum(sizes) == x.numel() + 4 * x.numel() // 128


def test_one_input_of_several_is_quantised_once() -> None:
    x, weight, _, dy = operands()
    inputs = InputCastCache()
    q, k = Fp8Products(Recipe(), inputs), Fp8Products(Recipe(), inputs)
    truth = values(Fp8Products(Recipe()), x, weight, dy=dy)
    both = values(lambda x, w: q(x, w) + k(x, w), x, weight, dy=dy)
    assert torch.equal(both[1], 2 * truth[1]) and torch.equal(both[2], 2 * truth[2])
    y, kept = kept_by(q, x, weight)
    assert {t.data_ptr() for t in kept} == {t.data_ptr() for t in kept_by(k, x, weight)[1]}
    with torch.no_grad():
        x.data.mul_(2)  # not seen by autograd, and so left to the modules that come again
    assert torch.equal(q(x, weight), 2 * y)
    with torch.no_grad():
        x.mul_(2)
    assert torch.equal(k(x, weight), 4 * y) and inputs._operands is not None
    with torch.inference_mode():
        found = x * 1
        y = q(found, weight)
        found.mul_(2)  # which has no version
        assert torch.equal(k(found, weight), 2 * y)
    del x
    assert inputs._operands is not None  # autograd holds x


def test_an_input_that_is_gone_is_freed() -> None:
    _, weight, _, _ = operands()
    inputs, x = InputCastCache(), torch.randn(16, 144)
    Fp8Products(Recipe(), inputs)(x, weight)
    assert inputs._operands is not None
    del x
    assert inputs._operands is None and copy.deepcopy(inputs)._operands is None


@pytest.mark.parametrize("T", [64, 70])
def test_an_output_may_change_in_place(T: int) -> None:
    x, weight, bias, dy = operands(T)
    for shape in ((T, 144), (2, T // 2, 144)):
        leaves = (x.detach().view(shape).requires_grad_(), weight, bias)
        products, grad = Fp8Products(Recipe()), dy.view(*shape[:-1], -1)
        out_of_place = values(lambda *a, f=products: f(*a) * 2, *leaves, dy=grad)
        in_place = values(lambda *a, f=products: f(*a).mul_(2), *leaves, dy=grad)
        assert all(map(torch.equal, in_place, out_of_place))


def test_no_copy_of_a_weight_is_stale() -> None:
    """Fused optimizers and FSDP2 change weights without a new version."""
    x, weight, _, dy = operands()
    products = Fp8Products(Recipe())
    values(products, x, weight, dy=dy)
    weight.data.mul_(-1.5)
    fresh = values(Fp8Products(Recipe()), x, weight.detach().clone().requires_grad_(), dy=dy)
    assert all(map(torch.equal, values(products, x, weight, dy=dy), fresh))


HISTORY = Recipe(scaling="tensorwise", amax_history=2, power_of_two=False)
CPU = torch.device("cpu")


def test_history_worked_example() -> None:
    """The numbers of `amax_history.py`."""
    history, scaled_by = AmaxHistory(2), []
    for step in ([3.0, 5.0], [2.0], [1.0], [1.0]):
        for micro_batch in step:
            past = history.get_max_amax("input")
            scaled_by.append(micro_batch if past is None else past.item())
            seen = history.get_current_amax(CPU, training=True)["input"]
            seen.copy_(seen.clamp(min=micro_batch))
        advance_amax_histories([history], CPU, None)
    assert scaled_by == [3, 5, 5, 5, 2] and history.recorded_amax["input"].tolist() == [1, 1]
    before = history.recorded_amax["input"].clone()
    advance_amax_histories([history], CPU, None)  # no training forward since
    assert torch.equal(history.recorded_amax["input"], before)
    assert history.get_max_amax("gradient").item() == 0  # type: ignore[union-attr]
    assert not history.has_all_amax


def test_history_of_a_replayed_graph() -> None:
    """A replay adds to `seen` as a training forward does, but runs no Python."""
    history = AmaxHistory(2)
    seen = history.get_current_amax(CPU, training=True)["input"]
    for amax in (3.0, 2.0, 1.0):
        seen.fill_(amax)
        advance_amax_histories([history], CPU, None)
    assert history.recorded_amax["input"].tolist() == [1, 2]


def test_history_of_a_rank_that_comes_later() -> None:
    """Steps that other ranks alone had are there for its first training forward."""
    history = AmaxHistory(2)
    assert history.get_max_amax("weight") is None  # as on all ranks
    advance_amax_histories([history], CPU, None)  # a step of no rank
    push_amax([history], torch.tensor([3.0, 2.0, 0.0]))
    assert [history.get_max_amax(o).item() for o in history.operands] == [3, 2, 0]  # type: ignore[union-attr]
    assert not history.has_all_amax
    push_amax([history], torch.tensor([0.0, 0.0, 1.0]))
    assert history.has_all_amax


@pytest.mark.parametrize("size", [1e-9, 1e4])
def test_operands_that_no_step_had_are_scaled_by_their_own(size: float) -> None:
    """Behind a first step of zeros no bit differs from the first step of others."""
    x, weight, _, dy = operands()
    late, first = Fp8Products(HISTORY), Fp8Products(HISTORY)
    values(late, torch.zeros_like(x, requires_grad=True), weight, dy=torch.zeros_like(dy))
    advance_amax_histories([late.history], CPU, None)
    larger = (size * x.detach()).requires_grad_()
    for _ in range(2):  # micro-batches
        found = values(late, larger, weight, dy=size * dy)
        wanted = values(first, larger, weight, dy=size * dy)
        assert all(torch.equal(a, b) and a.any() for a, b in zip(found, wanted, strict=True))
    advance_amax_histories([late.history], CPU, None)
    assert late.history.has_all_amax
    assert late.history.get_max_amax("gradient") == (size * dy).abs().max()


def test_delayed_scaling_uses_and_makes_the_history() -> None:
    x, weight, _, dy = operands()
    delayed, current = (Fp8Products(replace(HISTORY, amax_history=n)) for n in (2, 0))
    first = values(delayed, x, weight, dy=dy)
    assert all(map(torch.equal, first, values(current, x, weight, dy=dy)))
    seen = {name: value.item() for name, value in delayed.history.current_amax.items()}
    assert seen == {
        "input": x.abs().max().item(),
        "weight": weight.abs().max().item(),
        "gradient": dy.abs().max().item(),
    }
    advance_amax_histories([delayed.history], CPU, None)
    with torch.no_grad():
        larger = 2 * x
        y, limit = delayed(larger, weight), x.abs().max()
        assert relative_error(y, current(larger.clamp(-limit, limit), weight).double()) < 1e-6
        assert not delayed.history.current_amax["input"].any()  # evaluation adds nothing
    second = values(delayed, x, weight, dy=dy)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("recipe", [HISTORY, RECIPES["rowwise hybrid"]])
def test_compiled_as_eager(recipe: Recipe) -> None:
    x, weight, bias, dy = operands()
    eager, traced = Fp8Products(recipe), Fp8Products(recipe)
    compiled = torch.compile(lambda x, w, b: traced(x, w, b), backend="aot_eager", fullgraph=True)
    for _ in range(3):
        ours = values(compiled, x, weight, bias, dy=dy)
        truth = values(eager, x, weight, bias, dy=dy)
        assert all(map(torch.equal, ours, truth))
        for products in (eager, traced):
            if products.history is not None:
                advance_amax_histories([products.history], CPU, None)
    if traced.history is not None:
        assert traced.history.get_max_amax("gradient").item() == dy.abs().max().item()  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["tile", "block", "row", "tensor"])
def test_compilers_know_how_casts_are_laid_out(kind: str) -> None:
    x = torch.randn(256, 128)
    args = (x, None, kind, "e4m3", True, True, True)
    torch.library.opcheck(torch.ops.moecore.fp8_cast.default, args, test_utils="test_faketensor")


LAUNCHES = {  # of forward and backward: casts, and what finds their scales
    "blockwise": ((), ()),
    "rowwise": (("zeros", "amax_kernel"), 2 * ("zeros", "amax_kernel")),
    "tensorwise": (2 * ("amax_parts_kernel",), ("amax_parts_kernel",)),
    "delayed": ((), ()),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_launches_and_operations(name: str) -> None:
    """What a linear launches, and that little else passes torch's dispatcher."""
    history = {"scaling": "tensorwise", "amax_history": 2}
    products = Fp8Products(Recipe(**history if name == "delayed" else {"scaling": name}))  # type: ignore[arg-type]
    new: Any = partial(torch.empty, device="meta", dtype=torch.bfloat16)
    x, weight = new(2, 64, 256, requires_grad=True), new(384, 256, requires_grad=True)
    dy, launched = new(2, 64, 384), SeenOperations()
    with record_launches_on_meta(lambda kernel, _: launched.names.append(kernel)):
        if products.history is not None:
            products(x, weight).backward(dy)
            push_amax([products.history], torch.zeros(3, device="meta"))
            launched.names.clear()
            x.grad = weight.grad = None
        with launched:
            y = products(x, weight)
        forward, launched.names = launched.names, []
        with launched:
            y.backward(dy)
    rows_alone = ("cast_rows_kernel",) if name == "rowwise" else ("cast_kernel",)
    of_forward, of_backward = LAUNCHES[name]
    assert sorted(forward) == sorted((*of_forward, "cast_kernel", *rows_alone, "_scaled_mm_v2"))
    both = 2 * ("cast_kernel", "_scaled_mm_v2")
    assert sorted(launched.names) == sorted((*of_backward, *both))
    assert launched.operations <= 40, launched.operations
    assert x.grad is not None and x.grad.shape == x.shape and weight.grad.shape == weight.shape


class SeenOperations(TorchDispatchMode):
    """Names of what computes something, and the number of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.operations = 0

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        name = f._schema.name.removeprefix("aten::")
        if not (f.is_view or name in ("empty", "_unsafe_view", "detach")):
            self.names.append(name)
        return f(*args, **kwargs or {})


def test_refusals() -> None:
    x, weight, _, _ = operands()
    products = Fp8Products(Recipe())
    for call, message in (
        (lambda: products(x, weight[:, :40]), "but its weight [160, 40] is no matrix of"),
        (lambda: products(x[:, :16], weight), "must have the columns of weight ([160, 144])"),
        (lambda: products(x, weight.to(torch.float8_e4m3fn)), "float8_e4m3fn"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)) as error:
            call()
        assert "\n" not in str(error.value)
