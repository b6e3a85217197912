"""y = x @ weight^T + bias by Transformer Engine, by its own recipes.

    forward          y  = x  (over K)             @ weight (over K)
    input gradient   dx = dy (over N)             @ weight (over N)
    weight gradient  dw = dy (over T)             @ x      (over T)

x and the weight are kept as they are, so linears of one input keep it once, and quantised once more
in backward. Rows are padded with zeros to what the recipe takes. Of "tensorwise" what scales a
weight is the largest magnitude of the ranks that cut it, and delayed scales are those of
`AmaxHistory`, whose steps are optimizer steps.

Letters: T tokens, K input features, N output features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from moecore.base import te_names
from moecore.base.options.precision import Recipe
from moecore.base.params import check_values, local_param
from moecore.base.torch_private import is_plain_eager
from moecore.kernels.experts.contract import GradTarget
from moecore.kernels.grouped.wgrad import put_grad
from moecore.kernels.linear import Gradients, linear_op
from moecore.kernels.rows.cast import amax
from moecore.kernels.rows.e4m3 import block_scale_ref
from moecore.kernels.rows.scaling import LARGEST
from moecore.precision.linear import (
    Fp8Products,
    check_operands,
    max_over_cut,
    rows_of,
    with_dims_of,
)


def _linear(
    x: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    x_amax: Tensor | None,
    weight_amax: Tensor | None,
    dy_amax: Tensor | None,
    x_seen: Tensor | None,
    weight_seen: Tensor | None,
    dy_seen: Tensor | None,
    scaling: str,
    power_of_two: bool,
    grad_format: str,
    hadamard: bool,
    stochastic_rounding: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Return y [..., N]; what is of dy is for backward."""
    recipe = _recipe(scaling, power_of_two, grad_format, hadamard, stochastic_rounding)
    if not x.numel() or x.is_meta:
        return x.new_zeros(*x.shape[:-1], weight_NK.shape[0], dtype=dtype)
    of_x = _operand(rows_of(x), recipe, "activation", x_amax, x_seen)
    weight = _operand(weight_NK, recipe, "weight", weight_amax, weight_seen)
    y = with_dims_of(te_names.multiply(weight, of_x, "TN", dtype), x)
    return y if bias_N is None else y.add_(bias_N)


def _recipe(
    scaling: Any, power_of_two: bool, grad_format: Any, hadamard: bool, stochastic: bool
) -> Recipe:
    how: Any = dict(power_of_two=power_of_two, grad_format=grad_format, hadamard=hadamard)
    return Recipe(scaling=scaling, stochastic_rounding=stochastic, backend="te", **how)


def _operand(
    x_RC: Tensor,
    recipe: Recipe,
    operand: te_names.Operand,
    largest: Tensor | None,
    seen: Tensor | None = None,
    *,
    over_rows: bool = False,
) -> Any:
    """Return a matrix as an operand, by a largest magnitude: its own where none, or 0, is given."""
    x_RC = te_names.without_infinities(x_RC.detach().contiguous())
    if operand != "weight":  # zeros, which change no scale
        x_RC = pad(x_RC, (0, 0, 0, -x_RC.shape[0] % recipe.rows))
    if largest is None and seen is None:
        return te_names.quantise(x_RC, recipe, operand, over_rows=over_rows)
    fmt = recipe.grad_format if operand == "gradient" else "e4m3"
    used = amax(x_RC, largest).amax().reshape(1)
    _, scale = block_scale_ref(used, recipe.power_of_two, LARGEST[fmt])
    return te_names.quantise(x_RC, recipe, operand, over_rows=over_rows, scale=scale, seen=seen)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight_NK, bias_N, x_amax, weight_amax, dy_amax = inputs[:6]
    wants_x, wants_weight, *_ = ctx.needs_input_grad
    kept = (x if wants_weight else None, weight_NK if wants_x else None)
    ctx.save_for_backward(*kept, x_amax, weight_amax, dy_amax)
    ctx.dy_seen = inputs[8]  # grows from one backward to the next, so autograd must not check it
    ctx.how = inputs[9:14]
    ctx.dtypes = (x.dtype, weight_NK.dtype, None if bias_N is None else bias_N.dtype)


def _gradients(ctx: Any, dy: Tensor) -> Gradients:
    x, weight_NK, x_amax, weight_amax, dy_amax = ctx.saved_tensors
    recipe, (x_dtype, weight_dtype, bias_dtype) = _recipe(*ctx.how), ctx.dtypes
    wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
    dx = operands = dbias_N = None
    dy_TN, seen = rows_of(dy), ctx.dy_seen
    if wants_x:
        if dy_TN.shape[0] and not dy.is_meta:
            of_dy = _operand(dy_TN, recipe, "gradient", dy_amax, seen)
            weight = _operand(weight_NK, recipe, "weight", weight_amax, over_rows=True)
            dx, seen = with_dims_of(te_names.multiply(weight, of_dy, "NN", x_dtype), dy), None
        else:
            dx = dy.new_zeros(*dy.shape[:-1], weight_NK.shape[1], dtype=x_dtype)
    if wants_bias:
        dbias_N = dy_TN.sum(0, dtype=torch.float32).to(bias_dtype)
    if wants_weight:
        operands = (dy_TN, rows_of(x), dy_amax, x_amax, seen, recipe, weight_dtype)
    return dx, operands, dbias_N


class TELinearProducts(Fp8Products):
    """What `Fp8Products` is, of recipes of backend "te"."""

    @override
    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None, training: bool) -> Tensor:
        recipe, weight_NK = self.recipe, local_param(weight)
        check_operands(x, weight_NK, recipe)
        check_values(weight_NK)
        problem = te_names.why_not(recipe, x.device)
        if problem is not None:
            raise ValueError(problem)
        if self.history is not None and not is_plain_eager():
            raise ValueError(
                f"Recipe.amax_history ({recipe.amax_history}) must be 0 with backend ('te') under "
                "torch.compile and dispatch modes: use backend='moecore'"
            )
        history = self.history
        seen = {} if history is None else history.record(x.device, training=training)
        weight_amax = self._past("weight")
        if weight_amax is None and recipe.scaling == "tensorwise":  # as one rank would quantise it
            with torch.no_grad():
                weight_amax = max_over_cut(amax(weight_NK), weight).amax().reshape(1)
        how = (
            self._past("input"),
            weight_amax,
            self._past("gradient"),
            *(seen.get(operand) for operand in ("input", "weight", "gradient")),
            recipe.scaling,
            recipe.power_of_two,
            recipe.grad_format,
            recipe.hadamard,
            recipe.stochastic_rounding,
        )
        return self._run(_linear_op, x, weight, weight_NK, bias, *how)

    forward = staticmethod(_linear)  # type: ignore[assignment]
    save = staticmethod(_save)
    gradients = staticmethod(_gradients)

    @override
    @staticmethod
    def weight_grad(  # type: ignore[override]
        dy_TN: Tensor,
        x_TK: Tensor,
        dy_amax: Tensor | None,
        x_amax: Tensor | None,
        dy_seen: Tensor | None,
        recipe: Recipe,
        dtype: torch.dtype,
        target: GradTarget,
    ) -> Tensor:
        if not dy_TN.shape[0] or dy_TN.is_meta:
            grad = dy_TN.new_zeros(dy_TN.shape[1], x_TK.shape[1], dtype=dtype)
        else:
            dy = _operand(dy_TN, recipe, "gradient", dy_amax, dy_seen, over_rows=True)
            x = _operand(x_TK, recipe, "activation", x_amax, over_rows=True)
            grad = te_names.multiply(x, dy, "NT", dtype)
        return put_grad(grad, target.out, target.adds, target.dtype, target.scale)


_linear_op = linear_op("te_linear", TELinearProducts)
