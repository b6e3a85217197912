"""Quantisation once more, block by block in fp64 with nothing shared, and a model's parts."""

import math

import torch
from torch import Tensor

from moecore.base.options.precision import Recipe

RECIPES = {
    "blockwise": Recipe(),
    "blockwise, fp32 scales": Recipe(power_of_two=False),
    "rowwise": Recipe(scaling="rowwise"),
    "rowwise hybrid": Recipe(scaling="rowwise", grad_format="e5m2"),
    "tensorwise": Recipe(scaling="tensorwise"),
    "tensorwise hybrid": Recipe(scaling="tensorwise", grad_format="e5m2", power_of_two=False),
}
FORMATS = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}


def rounded(
    x_MK: Tensor, block: tuple[int | None, int | None], fmt: str, power_of_two: bool
) -> Tensor:
    """Return fp64 values of finite x, quantised in blocks and wide again."""
    dtype, largest = FORMATS[fmt]
    out_MK = torch.zeros(x_MK.shape, dtype=torch.float64)
    rows, columns = (size or max(n, 1) for size, n in zip(block, x_MK.shape, strict=True))
    for i in range(0, x_MK.shape[0], rows):
        for k in range(0, x_MK.shape[1], columns):
            part = x_MK[i : i + rows, k : k + columns].float()
            scale = _scale(part.abs().max().item(), largest, power_of_two)
            values = (part * torch.tensor(1.0 / scale)).clamp(-largest, largest).to(dtype)
            out_MK[i : i + rows, k : k + columns] = values.double() * scale
    return out_MK


def _scale(amax: float, largest: float, power_of_two: bool) -> float:
    if not power_of_two:
        return max((torch.tensor(amax) / largest).item(), 2.0**-126)
    mantissa, exponent = math.frexp(amax / largest)  # [0.5, 1)
    return max(2.0 ** (exponent - (mantissa == 0.5)), 2.0**-126)


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
