"""Dense linears in MXFP8 and NVFP4: values and gradients, what is refused, what is kept."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moecore.base.options.precision import Precision, Recipe
from moecore.kernels.rows import microscaled
from moecore.precision.apply import apply_precision, make_linear_products
from moecore.precision.emulated import EmulatedLinearProducts
from moecore.precision.linear import Fp8Products, find_weight_problem
from tests.kernels.rows.microscaling_oracle import linear
from tests.precision.plain import relative_error, worst_row_error
from tests.precision.test_linear import operands, values

RECIPES = {
    "mxfp8": Recipe(scaling="mxfp8"),
    "nvfp4": Recipe(scaling="nvfp4"),
    "fp32 scales": Recipe(scaling="nvfp4", power_of_two=False),
    "no transform": Recipe(scaling="nvfp4", hadamard=False),
    "nearest": Recipe(scaling="nvfp4", stochastic_rounding=False),
}
SIZES = dict(T=37, K=64, N=96)


def truth_of(x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor, recipe: Recipe) -> Any:
    y, dx, dweight = linear(x.detach(), weight.detach(), dy, recipe)
    return y + bias.detach().double(), dx, dweight, dy.double().sum(0)


@pytest.mark.parametrize("name", RECIPES)
def test_products_are_those_of_quantised_operands(name: str) -> None:
    x, weight, bias, dy = operands(**SIZES)
    got = values(make_linear_products(RECIPES[name]), x, weight, bias, dy=dy)
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
    got = values(make_linear_products(RECIPES[name]), *leaves, dy=dy)
    plain = values(nn.functional.linear, *(t.double() for t in leaves), dy=dy.double())
    of_y = 0.038 if name == "mxfp8" else 0.134
    is_random = name not in ("mxfp8", "nearest")
    for ours, wanted, i in zip(got, plain, range(3), strict=True):
        expected = 0.169 if is_random and i else of_y
        assert relative_error(ours, wanted) == pytest.approx(expected, rel=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("name", RECIPES)
def test_kernels_change_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantisers are what differs between the two."""
    sizes = dict(T=700, K=256, N=384)
    leaves = [t.detach().cuda().bfloat16().requires_grad_() for t in operands(**sizes)]
    x, weight, bias, dy = leaves
    products = make_linear_products(RECIPES[name])
    found = values(products, x, weight, bias, dy=dy.detach())
    monkeypatch.setattr(microscaled, "has_kernel", lambda _: False)
    expected = values(products, x, weight, bias, dy=dy.detach())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


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
    assert find_weight_problem(torch.zeros(64, 48), RECIPES["mxfp8"]) == (
        "its weight [64, 48] is no matrix of multiples of 32"
    )
    assert type(make_linear_products(Recipe())) is Fp8Products


def test_refusals() -> None:
    products = make_linear_products(RECIPES["mxfp8"])
    refused = (
        (torch.zeros(2, 48), torch.zeros(32, 48), "no matrix of multiples of 32"),
        (torch.zeros(2, 64), torch.zeros(32, 32), "must have the columns of weight"),
    )
    for x, weight, message in refused:
        with pytest.raises(ValueError, match=re.escape(message)):
            products(x, weight)
