"""Dense linears by Transformer Engine, whose functions are defined in PyTorch: `te_definition.py`.

They are compared with moecore's own of the same scaling, whose truth is in their own tests: both
round the same operands, so the order of sums alone differs.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moecore.base.options.precision import Precision, Recipe
from moecore.kernels.experts.contract import SINK, GradTarget
from moecore.precision.apply import advance_amax, apply_precision, linear_products
from moecore.precision.te import TELinearProducts
from tests.helpers.te_definition import te_defined
from tests.precision.plain import relative_error, worst_row_error
from tests.precision.test_linear import kept_by, operands, values

RECIPES = {
    "blockwise": Recipe(backend="te"),
    "blockwise, fp32 scales": Recipe(backend="te", power_of_two=False),
    "tensorwise": Recipe(backend="te", scaling="tensorwise"),
    "tensorwise, e5m2": Recipe(backend="te", scaling="tensorwise", grad_format="e5m2"),
    "delayed": Recipe(backend="te", scaling="tensorwise", amax_history=2),
    "mxfp8": Recipe(backend="te", scaling="mxfp8"),
    "nvfp4": Recipe(backend="te", scaling="nvfp4", power_of_two=False, stochastic_rounding=False),
}
SIZES = dict(T=70, K=96, N=160)
names = pytest.mark.parametrize("name", RECIPES)


@pytest.fixture(autouse=True)
def defined() -> Iterator[None]:
    with te_defined():
        yield


def own(recipe: Recipe) -> Any:
    return linear_products(replace(recipe, backend="moecore"))


def inputs_of(recipe: Recipe, **sizes: int) -> tuple[Tensor, ...]:
    """Operands; those that are transformed are read in bf16."""
    found = operands(**SIZES | sizes)
    if recipe.scaling != "nvfp4":
        return found
    return tuple(t.detach().bfloat16().float().requires_grad_(t.requires_grad) for t in found)


@pytest.mark.parametrize("T", [70, 128, 1])
@names
def test_products_are_moecores_of_the_same_scaling(name: str, T: int) -> None:
    recipe = RECIPES[name]
    *leaves, dy = inputs_of(recipe, T=T)
    theirs = linear_products(recipe)
    assert isinstance(theirs, TELinearProducts)
    found = values(theirs, *leaves, dy=dy)
    # Transformed values of two ways to add may round to different numbers of E2M1 at a tie.
    bounds = (1e-6, 1e-6, 1e-2 if recipe.scaling == "nvfp4" else 1e-6, 1e-6)
    for ours, wanted, bound in zip(found, values(own(recipe), *leaves, dy=dy), bounds, strict=True):
        assert ours.dtype == wanted.dtype and ours.shape == wanted.shape
        assert relative_error(ours, wanted) < bound and worst_row_error(ours, wanted) < 10 * bound


@names
def test_no_tokens_and_any_shape(name: str) -> None:
    x, weight, bias, dy = inputs_of(RECIPES[name])
    products = linear_products(RECIPES[name])
    flat = values(products, x, weight, bias, dy=dy)
    leaf = x.detach().view(2, 5, 7, 96).requires_grad_()
    if RECIPES[name].amax_history == 0:
        y, dx, *rest = values(products, leaf, weight, bias, dy=dy.view(2, 5, 7, 160))
        assert torch.equal(y.view(70, 160), flat[0]) and torch.equal(dx.view(70, 96), flat[1])
        assert all(map(torch.equal, rest, flat[2:]))
    y, *grads = values(products, x.detach()[:0].requires_grad_(), weight, bias, dy=dy[:0])
    assert y.shape == (0, 160) and not any(g.any() for g in grads)


def test_delayed_scales_are_those_of_earlier_steps() -> None:
    """Two steps, in the second of which x is larger and saturates, alike in both."""
    recipe, found = RECIPES["delayed"], []
    for products in (linear_products(recipe), own(recipe)):
        x, weight, bias, dy = inputs_of(recipe)
        linear = nn.Linear(96, 160)
        apply_precision(nn.ModuleDict({"q_proj": linear}), Precision(recipe=recipe))
        linear.products = products
        with torch.no_grad():
            linear.weight.copy_(weight)
            linear.bias.copy_(bias)
        values(linear, x, dy=dy)
        values(linear.eval(), 100 * x, dy=100 * dy)  # collects nothing, in forward and backward
        linear.train()
        advance_amax(linear)
        found.append(values(linear, x.detach().mul(3).requires_grad_(), dy=dy))
        assert products.history is not None and not products.history.seen["weight"].isinf()
        seen = {n: float(t) for n, t in products.history.seen.items()}
        assert seen["input"] == pytest.approx(3 * float(x.detach().abs().max()))
        assert seen["gradient"] == pytest.approx(float(dy.abs().max()))
    for ours, wanted in zip(*found, strict=True):
        assert relative_error(ours, wanted) < 1e-6


def test_what_is_not_finite_reaches_no_history() -> None:
    x, weight, _, dy = inputs_of(RECIPES["delayed"])
    with torch.no_grad():
        x[3, 4] = torch.inf
    products = linear_products(RECIPES["delayed"])
    y = products(x, weight)
    y.backward(dy)
    assert products.history is not None
    largest = torch.cat((x[:3], x[4:])).abs().max()
    assert products.history.seen["input"] >= largest and not y[3].isfinite().any()
    assert products.history.seen["input"].isfinite()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["blockwise", "tensorwise", "mxfp8"])
def test_dtypes_and_autocast(name: str, dtype: torch.dtype) -> None:
    x, weight, bias, dy = (t.detach().to(dtype).requires_grad_() for t in inputs_of(RECIPES[name]))
    found = values(linear_products(RECIPES[name]), x, weight, bias, dy=dy.detach())
    wanted = values(own(RECIPES[name]), x, weight, bias, dy=dy.detach())
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == theirs.dtype == dtype
        assert relative_error(ours, theirs.double()) < (1e-6 if dtype == torch.float32 else 2**-8)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear_products(RECIPES[name])(x, weight).dtype == torch.bfloat16


@names
def test_repeats_and_checkpoints_have_the_same_bits(name: str) -> None:
    x, weight, bias, dy = inputs_of(RECIPES[name])
    first = values(linear_products(RECIPES[name]), x, weight, bias, dy=dy)
    again = linear_products(RECIPES[name])

    def recomputed(*leaves: Tensor) -> Tensor:
        return checkpoint(again, *leaves, use_reentrant=False)

    assert all(map(torch.equal, first, values(recomputed, x, weight, bias, dy=dy)))


def test_compiled() -> None:
    x, weight, bias, dy = inputs_of(RECIPES["blockwise"])
    products = linear_products(RECIPES["blockwise"])
    compiled = torch.compile(products, backend="aot_eager", fullgraph=True)
    expected = values(products, x, weight, bias, dy=dy)
    assert all(map(torch.equal, values(compiled, x, weight, bias, dy=dy), expected))
    delayed = torch.compile(linear_products(RECIPES["delayed"]), backend="aot_eager")
    with pytest.raises(Exception, match=r"Recipe.amax_history \(2\) must be 0 with backend \('te'"):
        delayed(x, weight)


def test_what_is_kept_and_wanted() -> None:
    x, weight, _, dy = inputs_of(RECIPES["blockwise"])
    products = linear_products(RECIPES["blockwise"])
    _, kept = kept_by(products, x, weight)
    assert {t.data_ptr() for t in kept} == {x.data_ptr(), weight.data_ptr()}
    (dx,) = torch.autograd.grad(products(x, weight.detach()), x, dy)
    (dw,) = torch.autograd.grad(products(x.detach(), weight), weight, dy)
    expected = values(products, x, weight, dy=dy)
    assert torch.equal(dx, expected[1]) and torch.equal(dw, expected[2])


def test_a_sink_may_defer_the_gradient_of_a_weight() -> None:
    x, weight, _, dy = inputs_of(RECIPES["blockwise"])
    expected = values(linear_products(RECIPES["blockwise"]), x, weight, dy=dy)[2]
    later: list[Any] = []

    class Sink:
        def defer(self, compute: Any, *operands: Any) -> bool:
            later.append((compute, operands))
            return True

    setattr(weight, SINK, lambda shape: Sink())
    products = linear_products(RECIPES["blockwise"])
    products.defers = True
    products(x, weight).backward(dy)
    assert weight.grad is None
    ((compute, of),) = later
    out = torch.ones_like(expected)
    torch.testing.assert_close(compute(*of, GradTarget(out, adds=True)), 1 + expected)


def test_who_is_quantised_and_refused() -> None:
    model = nn.ModuleDict({"q_proj": nn.Linear(96, 160), "k_proj": nn.Linear(96, 24)})
    table = apply_precision(model, Precision(recipe=RECIPES["blockwise"]))
    assert table["q_proj"].recipe is not None and table["k_proj"].recipe is None
    assert "blockwise FP8, Transformer Engine: e4m3" in repr(model["q_proj"])
    twin = copy.deepcopy(model)
    assert isinstance(twin["q_proj"].products, TELinearProducts)
    assert list(model.state_dict()) == [
        "q_proj.weight",
        "q_proj.bias",
        "k_proj.weight",
        "k_proj.bias",
    ]
    for how, message in (
        (
            dict(scaling="rowwise"),
            "Recipe.backend ('te') must be 'moecore' with scaling ('rowwise')",
        ),
        (dict(scaling="nvfp4"), "Recipe.power_of_two (True) must be False with scaling ('nvfp4')"),
        (dict(keep_hidden="fp8"), "Recipe.keep_hidden ('fp8') must be 'wide' with backend ('te')"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            Recipe(backend="te", **how)  # type: ignore[arg-type]
