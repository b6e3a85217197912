"""y = x @ weight^T + bias by Transformer Engine.

    forward          y  = x  (over K)             @ weight (over K)
    input gradient   dx = dy (over N)             @ weight (over N)
    weight gradient  dw = dy (over T)             @ x      (over T)

x and the weight are saved for backward in their dtype, and quantised again. Linears of one input
therefore save it once. Rows are padded with zeros to the recipe's multiple. With "tensorwise" the
amax of a weight is the maximum over the ranks that shard it. `AmaxHistory` has delayed scales.

Letters: T tokens, K input features, N output features.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from moecore.base import transformer_engine as te
from moecore.base.options.precision import Recipe
from moecore.base.params import check_has_values
from moecore.base.torch_private import is_plain_eager
from moecore.kernels.experts.contract import GradTarget
from moecore.kernels.grouped.wgrad import scale_and_store_grad
from moecore.kernels.rows.cast import compute_amax
from moecore.kernels.rows.e4m3 import compute_block_scale_ref
from moecore.kernels.rows.scaling import LARGEST
from moecore.precision.linear import (
    InputGrad,
    LinearCall,
    QuantisedProducts,
    all_reduce_max,
    flatten_rows,
    make_quantised_op,
)


def _quantise_operand(
    x_RC: Tensor,
    recipe: Recipe,
    operand: te.Operand,
    past_amax: Tensor | None,
    new_amax: Tensor | None = None,
    *,
    over_rows: bool = False,
) -> Any:
    """Quantise a matrix with the scale of `past_amax`, or of its own amax if that is None or 0.

    The matmul sums over columns, or over rows with `over_rows`. `new_amax`, fp32 [1], is raised in
    place to the matrix's amax. Operands other than "weight" are padded by rows of zeros.
    """
    x_RC = te.replace_infinities(x_RC.detach().contiguous())
    if operand != "weight":  # rows of zeros change no scale
        x_RC = pad(x_RC, (0, 0, 0, -x_RC.shape[0] % recipe.row_multiple))
    if past_amax is None and new_amax is None:
        return te.quantise(x_RC, recipe, operand, over_rows=over_rows)
    fmt = recipe.grad_format if operand == "gradient" else "e4m3"
    scale_amax = compute_amax(x_RC, past_amax).amax().reshape(1)
    _, scale = compute_block_scale_ref(scale_amax, recipe.power_of_two, LARGEST[fmt])
    return te.quantise(x_RC, recipe, operand, over_rows=over_rows, scale=scale, amax_out=new_amax)


class TELinearProducts(QuantisedProducts):
    """Computes y, dx and dw of one linear by Transformer Engine, for recipes with backend "te"."""

    def prepare(self, x: Tensor, param: Tensor, weight_NK: Tensor, training: bool) -> LinearCall:
        """Return a `LinearCall` with the amax tensors; ValueError if TE cannot multiply x."""
        recipe, history = self.recipe, self.history
        check_has_values(weight_NK)
        problem = te.find_recipe_problem(recipe, x.device)
        if problem is not None:
            raise ValueError(problem)
        if history is not None and not is_plain_eager():
            raise ValueError(
                f"Recipe.amax_history ({recipe.amax_history}) must be 0 with backend ('te') under "
                "torch.compile and dispatch modes: use backend='moecore'"
            )
        seen = {} if history is None else history.get_current_amax(x.device, training=training)
        weight_amax = self.get_past_amax("weight")
        if weight_amax is None and recipe.scaling == "tensorwise":
            with torch.no_grad():  # shards of a weight share a scale
                weight_amax = all_reduce_max(compute_amax(weight_NK), param).amax().reshape(1)
        return LinearCall(
            x_amax=self.get_past_amax("input"),
            weight_amax=weight_amax,
            dy_amax=self.get_past_amax("gradient"),
            x_new_amax=seen.get("input"),
            weight_new_amax=seen.get("weight"),
            dy_new_amax=seen.get("gradient"),
            recipe=recipe,
        )

    @staticmethod
    def multiply(x_TK: Tensor, weight_NK: Tensor, call: LinearCall) -> Tensor:
        """Return y = x @ weight^T, both quantised here, in `call.dtype`."""
        if not x_TK.numel() or x_TK.is_meta:
            return x_TK.new_zeros(x_TK.shape[0], weight_NK.shape[0], dtype=call.dtype)
        x = _quantise_operand(x_TK, call.recipe, "activation", call.x_amax, call.x_new_amax)
        amaxes = call.weight_amax, call.weight_new_amax
        weight = _quantise_operand(weight_NK, call.recipe, "weight", *amaxes)
        return te.multiply_quantised(weight, x, "TN", call.dtype)

    @staticmethod
    def compute_input_grad(dy_TN: Tensor, weight_NK: Tensor | None, call: LinearCall) -> InputGrad:
        """Return (dx or None if `weight_NK` is None, unchanged dy for `compute_weight_grad`)."""
        if weight_NK is None:
            return None, dy_TN
        if not dy_TN.shape[0] or dy_TN.is_meta:
            return dy_TN.new_zeros(dy_TN.shape[0], weight_NK.shape[1], dtype=call.dtype), dy_TN
        recipe, amax = call.recipe, call.weight_amax
        dy = _quantise_operand(dy_TN, recipe, "gradient", call.dy_amax, call.dy_new_amax)
        weight = _quantise_operand(weight_NK, recipe, "weight", amax, over_rows=True)
        return te.multiply_quantised(weight, dy, "NN", call.dtype), dy_TN

    @staticmethod
    def compute_weight_grad(dy: Tensor, x: Tensor, call: LinearCall, target: GradTarget) -> Tensor:
        """Return dw = dy^T x, new or in `target.out` (overwritten, or added if `accumulate`)."""
        x_TK, recipe = flatten_rows(x), call.recipe
        if not dy.shape[0] or dy.is_meta:
            grad = dy.new_zeros(dy.shape[1], x_TK.shape[1], dtype=call.dtype)
        else:
            amaxes = call.dy_amax, call.dy_new_amax
            of_dy = _quantise_operand(dy, recipe, "gradient", *amaxes, over_rows=True)
            of_x = _quantise_operand(x_TK, recipe, "activation", call.x_amax, over_rows=True)
            grad = te.multiply_quantised(of_x, of_dy, "NT", call.dtype)
        return scale_and_store_grad(grad, *target)


TELinearProducts.op = make_quantised_op("te_linear", TELinearProducts)
