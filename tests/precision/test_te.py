"""Dense linears by Transformer Engine, whose functions are defined in PyTorch: `te_definition.py`.

They are compared with moecore's own of the same scaling, whose truth is in their own tests: both
round the same operands, so the order of sums alone differs.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moecore.base.options.precision import Precision, Recipe
from moecore.precision.amax import advance_amax
from moecore.precision.apply import apply_precision, make_linear_products
from moecore.precision.te import TELinearProducts
from tests.helpers import te_definition
from tests.helpers.te_definition import te_defined
from tests.precision.plain import relative_error, worst_row_error
from tests.precision.test_linear import operands, values

RECIPES = te_definition.RECIPES | {
    "delayed": Recipe(backend="te", scaling="tensorwise", amax_history=2)
}
SIZES = dict(T=70, K=96, N=160)


@pytest.fixture(autouse=True)
def defined() -> Iterator[None]:
    with te_defined():
        yield


def own(recipe: Recipe) -> Any:
    return make_linear_products(replace(recipe, backend="moecore"))


def inputs_of(recipe: Recipe, **sizes: int) -> tuple[Tensor, ...]:
    """Operands; those that are transformed are read in bf16."""
    found = operands(**SIZES | sizes)
    if recipe.scaling != "nvfp4":
        return found
    return tuple(t.detach().bfloat16().float().requires_grad_(t.requires_grad) for t in found)


@pytest.mark.parametrize("T", [70, 1])
@pytest.mark.parametrize("name", RECIPES)
def test_products_are_moecores_of_the_same_scaling(name: str, T: int) -> None:
    recipe = RECIPES[name]
    *leaves, dy = inputs_of(recipe, T=T)
    theirs = make_linear_products(recipe)
    assert isinstance(theirs, TELinearProducts)
    found = values(theirs, *leaves, dy=dy)
    # Transformed values of two ways to add may round to different numbers of E2M1 at a tie.
    bounds = (1e-6, 1e-6, 1e-2 if recipe.scaling == "nvfp4" else 1e-6, 1e-6)
    for ours, wanted, bound in zip(found, values(own(recipe), *leaves, dy=dy), bounds, strict=True):
        assert ours.dtype == wanted.dtype and ours.shape == wanted.shape
        assert relative_error(ours, wanted) < bound and worst_row_error(ours, wanted) < 10 * bound


def test_delayed_scales_are_those_of_earlier_steps() -> None:
    """Two steps, in the second of which x is larger and saturates, alike in both."""
    recipe, found = RECIPES["delayed"], []
    for products in (make_linear_products(recipe), own(recipe)):
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
        assert products.history is not None and not products.history.current_amax["weight"].isinf()
        seen = {n: float(t) for n, t in products.history.current_amax.items()}
        assert seen["input"] == pytest.approx(3 * float(x.detach().abs().max()))
        assert seen["gradient"] == pytest.approx(float(dy.abs().max()))
    for ours, wanted in zip(*found, strict=True):
        assert relative_error(ours, wanted) < 1e-6


def test_what_is_not_finite_reaches_no_history() -> None:
    x, weight, _, dy = inputs_of(RECIPES["delayed"])
    with torch.no_grad():
        x[3, 4] = torch.inf
    products = make_linear_products(RECIPES["delayed"])
    y = products(x, weight)
    y.backward(dy)
    largest = torch.cat((x[:3], x[4:])).abs().max()
    assert products.history.current_amax["input"] >= largest and not y[3].isfinite().any()
    assert products.history.current_amax["input"].isfinite()


def test_a_history_is_refused_under_compile() -> None:
    x, weight, *_ = inputs_of(RECIPES["delayed"])
    delayed = torch.compile(make_linear_products(RECIPES["delayed"]), backend="aot_eager")
    with pytest.raises(Exception, match=r"Recipe.amax_history \(2\) must be 0 with backend \('te'"):
        delayed(x, weight)


def test_who_is_quantised() -> None:
    model = nn.ModuleDict({"q_proj": nn.Linear(96, 160), "k_proj": nn.Linear(96, 24)})
    table = apply_precision(model, Precision(recipe=RECIPES["blockwise"]))
    assert table["q_proj"].recipe is not None and table["k_proj"].recipe is None
    assert "blockwise FP8, Transformer Engine: e4m3" in repr(model["q_proj"])
    twin = copy.deepcopy(model)
    assert isinstance(twin["q_proj"].products, TELinearProducts)
    names = [f"{linear}.{name}" for linear in ("q_proj", "k_proj") for name in ("weight", "bias")]
    assert list(model.state_dict()) == names
