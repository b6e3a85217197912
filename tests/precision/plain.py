"""Linears once more, in fp64 with nothing shared."""

from torch import Tensor

from moecore.base.options.precision import Recipe
from tests.moe.fp8_reference import fp8

RECIPES = {
    "blockwise": Recipe(),
    "blockwise, fp32 scales": Recipe(power_of_two=False),
    "rowwise": Recipe(scaling="rowwise"),
    "rowwise hybrid": Recipe(scaling="rowwise", grad_format="e5m2"),
    "tensorwise": Recipe(scaling="tensorwise"),
    "tensorwise hybrid": Recipe(scaling="tensorwise", grad_format="e5m2", power_of_two=False),
}


def rounded(
    x_MK: Tensor, block: tuple[int | None, int | None], fmt: str, power_of_two: bool
) -> Tensor:
    """Return fp64 values of finite x, quantised in blocks and wide again."""
    rows, columns = (size or max(n, 1) for size, n in zip(block, x_MK.shape, strict=True))
    return fp8(x_MK, rows, columns, power_of_two, fmt)


def linear_and_gradients(
    x_TK: Tensor, weight_NK: Tensor, dy_TN: Tensor, recipe: Recipe
) -> tuple[Tensor, Tensor, Tensor]:
    """Return fp64 y, dx and dweight of quantised operands; `recipe` None of the operands."""
    activation, weight, p2 = recipe.activation_block, recipe.weight_block, recipe.power_of_two
    fmt = recipe.grad_format
    y_TN = rounded(x_TK, activation, "e4m3", p2) @ rounded(weight_NK, weight, "e4m3", p2).T
    dx_TK = rounded(dy_TN, activation, fmt, p2) @ rounded(weight_NK.T, weight, "e4m3", p2).T
    dy_NT, x_KT = dy_TN.T, x_TK.T
    dweight_NK = rounded(dy_NT, activation, fmt, p2) @ rounded(x_KT, activation, "e4m3", p2).T
    return y_TN, dx_TK, dweight_NK


def relative_error(got: Tensor, truth: Tensor) -> float:
    return ((got.double() - truth).norm() / truth.norm()).item()


def worst_row_error(got: Tensor, truth: Tensor) -> float:
    errors = (got.double() - truth).norm(dim=-1) / truth.norm(dim=-1)
    return errors.max().item()
