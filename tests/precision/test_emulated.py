"""Dense linears in MXFP8 and NVFP4: values and gradients, what is refused, what is kept."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moecore.base.options.precision import Precision, Recipe
from moecore.kernels.experts.contract import SINK
from moecore.kernels.rows import microscaled
from moecore.precision.apply import apply_precision, linear_products
from moecore.precision.emulated import EmulatedLinearProducts
from moecore.precision.linear import Fp8Products, weight_problem
from tests.kernels.rows.microscaling_oracle import linear
from tests.precision.plain import relative_error, worst_row_error
from tests.precision.test_linear import kept_by, operands, values

RECIPES = {
    "mxfp8": Recipe(scaling="mxfp8"),
    "nvfp4": Recipe(scaling="nvfp4"),
    "fp32 scales": Recipe(scaling="nvfp4", power_of_two=False),
    "no transform": Recipe(scaling="nvfp4", hadamard=False),
    "nearest": Recipe(scaling="nvfp4", stochastic_rounding=False),
}
both = pytest.mark.parametrize("scaling", ["mxfp8", "nvfp4"])
SIZES = dict(T=70, K=96, N=160)


def truth_of(x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor, recipe: Recipe) -> Any:
    y, dx, dweight = linear(x.detach(), weight.detach(), dy, recipe)
    return y + bias.detach().double(), dx, dweight, dy.double().sum(0)


@pytest.mark.parametrize("name", RECIPES)
def test_products_are_those_of_quantised_operands(name: str) -> None:
    x, weight, bias, dy = operands(**SIZES)
    got = values(linear_products(RECIPES[name]), x, weight, bias, dy=dy)
    # Transformed values of two ways to add may round to different numbers of E2M1 at a tie.
    bounds = (1e-6, 1e-6, 1e-2 if RECIPES[name].hadamard else 1e-6, 1e-6)
    truth = truth_of(x, weight, bias, dy, RECIPES[name])
    for ours, wanted, bound in zip(got, truth, bounds, strict=True):
        assert ours.dtype == torch.float32
        assert relative_error(ours, wanted) < bound and worst_row_error(ours, wanted) < 10 * bound


@pytest.mark.parametrize("name", RECIPES)
def test_error_against_fp32(name: str) -> None:
    """Normal numbers: two operands of 2.7% each in E4M3, 9.5% in E2M1, there at random one of 14%.

    Independent errors add up in squares: 3.8%, 13.4%, 16.9%. A tenth more is allowed.
    """
    torch.manual_seed(0)
    x, weight, dy = torch.randn(512, 96), torch.randn(160, 96), torch.randn(512, 160)
    leaves = (x.requires_grad_(), weight.requires_grad_())
    got = values(linear_products(RECIPES[name]), *leaves, dy=dy)
    plain = values(nn.functional.linear, *(t.double() for t in leaves), dy=dy.double())
    of_y = 0.038 if name == "mxfp8" else 0.134
    is_random = name not in ("mxfp8", "nearest")
    for ours, wanted, i in zip(got, plain, range(3), strict=True):
        expected = 0.169 if is_random and i else of_y
        assert relative_error(ours, wanted) == pytest.approx(expected, rel=0.1)


@both
@pytest.mark.parametrize("T", [0, 1, 129])
def test_any_number_of_tokens_in_any_shape(T: int, scaling: Any) -> None:
    x, weight, _, dy = operands(2 * T, 96, 160)
    products = linear_products(Recipe(scaling=scaling))
    flat = values(products, x, weight, dy=dy)
    deep = values(products, x.view(2, T, 96), weight, dy=dy.view(2, T, 160))
    assert deep[0].shape == (2, T, 160) and deep[1].shape == (2, T, 96)
    for got, truth in zip(deep, flat, strict=True):
        assert torch.equal(got.reshape(truth.shape), truth)
        assert got.isfinite().all()


@both
def test_dtypes(scaling: Any) -> None:
    x, weight, bias, dy = operands(**SIZES)
    products = linear_products(Recipe(scaling=scaling, **_nearest(scaling)))
    for dtype in (torch.bfloat16, torch.float16):
        dy16 = (dy * 1e4).to(dtype)
        found = values(products, x.to(dtype), weight.to(dtype), bias, dy=dy16)
        assert [t.dtype for t in found] == [dtype] * 3 + [torch.float32]
        wide = (x.to(dtype).float(), weight.to(dtype).float(), bias)
        truth = values(products, *wide, dy=dy16.float())
        for got, wanted in zip(found, truth, strict=True):
            assert relative_error(got, wanted.double()) < 2.0**-8
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = products(x, weight)
    dx, dweight = torch.autograd.grad(y, (x, weight), dy.bfloat16())
    assert (y.dtype, dx.dtype, dweight.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert torch.equal(y, products(x, weight).bfloat16())  # summed in fp32


def _nearest(scaling: str) -> dict[str, bool]:
    return {} if scaling == "mxfp8" else dict(stochastic_rounding=False)


@both
def test_what_is_kept_and_wanted(scaling: Any) -> None:
    x, weight, _, dy = operands(**SIZES)
    products = linear_products(Recipe(scaling=scaling))
    whole = values(products, x, weight, dy=dy)
    y, kept = kept_by(products, x, weight.detach())
    assert [t.numel() for t in kept] == [weight.numel()]  # and no x
    assert torch.equal(torch.autograd.grad(y, x, dy)[0], whole[1])
    y, kept = kept_by(products, x.detach(), weight)
    assert [t.numel() for t in kept] == [x.numel()]
    assert torch.equal(torch.autograd.grad(y, weight, dy)[0], whole[2])


@pytest.mark.parametrize("name", RECIPES)
def test_repeats_checkpoints_and_compiled_code_have_the_same_bits(name: str) -> None:
    x, weight, bias, dy = operands(**SIZES)
    products = linear_products(RECIPES[name])
    whole = values(products, x, weight, bias, dy=dy)

    def again(*leaves: Tensor) -> Tensor:
        return checkpoint(products, *leaves, use_reentrant=False)  # type: ignore[no-any-return]

    compiled = torch.compile(lambda *a: products(*a), fullgraph=True, backend="aot_eager")
    for make in (products, copy.deepcopy(products), again, compiled):
        found = values(make, x, weight, bias, dy=dy)
        assert all(torch.equal(a, b) for a, b in zip(found, whole, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("name", RECIPES)
def test_kernels_change_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantisers are what differs between the two."""
    sizes = dict(T=700, K=256, N=384)
    leaves = [t.detach().cuda().bfloat16().requires_grad_() for t in operands(**sizes)]
    x, weight, bias, dy = leaves
    products = linear_products(RECIPES[name])
    found = values(products, x, weight, bias, dy=dy.detach())
    monkeypatch.setattr(microscaled, "has_kernel", lambda _: False)
    expected = values(products, x, weight, bias, dy=dy.detach())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@both
def test_a_sink_may_defer_the_gradient_of_a_weight(scaling: Any) -> None:
    x, weight, _, dy = operands(**SIZES)
    whole = values(linear_products(Recipe(scaling=scaling)), x, weight, dy=dy)
    later: list[Any] = []

    class Later:
        def defer(self, compute: Any, *given: Any) -> bool:
            later.append((compute, given))
            return True

    parameter = nn.Parameter(weight.detach())
    setattr(parameter, SINK, lambda shape: Later())
    products = linear_products(Recipe(scaling=scaling))
    products.defers = True
    y = products(x.detach(), parameter)
    y.backward(dy)
    assert parameter.grad is None and len(later) == 1
    from moecore.kernels.experts.contract import GradTarget

    compute, given = later[0]
    out = torch.ones_like(whole[2])
    compute(*given, GradTarget(out=out, adds=True))
    assert torch.equal(out, whole[2] + 1)


def test_who_is_quantised() -> None:
    """By "mxfp8" sizes are multiples of 32, by "nvfp4" of 16."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up_proj, self.down_proj = nn.Linear(64, 48), nn.Linear(48, 64)
            self.gate_proj = nn.Linear(64, 96)

    for scaling, names in (
        ("mxfp8", ["gate_proj"]),
        ("nvfp4", ["down_proj", "gate_proj", "up_proj"]),
    ):
        model = Model()
        recipe = Recipe(scaling=scaling)  # type: ignore[arg-type]
        table = apply_precision(model, Precision(recipe=recipe, roles=("mlp",)))
        assert sorted(n for n, found in table.items() if found.recipe is not None) == names
        assert isinstance(model.gate_proj.products, EmulatedLinearProducts)
        assert f"{scaling.upper()}, emulated" in repr(model.gate_proj)
    assert weight_problem(torch.zeros(64, 48), RECIPES["mxfp8"]) == (
        "its weight [64, 48] is no matrix of multiples of 32"
    )
    assert type(linear_products(Recipe())) is Fp8Products


def test_refusals() -> None:
    products = linear_products(RECIPES["mxfp8"])
    refused = (
        (torch.zeros(2, 48), torch.zeros(32, 48), "no matrix of multiples of 32"),
        (torch.zeros(2, 64), torch.zeros(32, 32), "must have the columns of weight"),
    )
    for x, weight, message in refused:
        with pytest.raises(ValueError, match=re.escape(message)):
            products(x, weight)
