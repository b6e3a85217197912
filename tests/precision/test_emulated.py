import pytest
import torch
from torch import nn

from moecore.base.options.precision import Precision, Recipe
from moecore.kernels.rows import microscaled
from moecore.precision.apply import apply_precision, make_linear_products
from moecore.precision.emulated import EmulatedLinearProducts
from moecore.precision.linear import Fp8Products, find_weight_problem
from tests.precision.test_linear import operands, values

RECIPES = {
    "mxfp8": Recipe(scaling="mxfp8"),
    "nvfp4": Recipe(scaling="nvfp4"),
    "fp32 scales": Recipe(scaling="nvfp4", power_of_two=False),
    "no transform": Recipe(scaling="nvfp4", hadamard=False),
    "nearest": Recipe(scaling="nvfp4", stochastic_rounding=False),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", RECIPES)
def test_kernels_change_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantisers are what differs between the two."""
    sizes = dict(T=700, K=256, N=384)
    leaves = [t.detach().cuda().bfloat16().requires_grad_() for t in operands(**sizes)]
    x, weight, bias, dy = leaves
    products = make_linear_products(RECIPES[name])
    found = values(products, x, weight, bias, dy=dy.detach())
    monkeypatch.setattr(microscaled, "has_cast_kernel", lambda _: False)
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
