"""y = x @ weight^T + bias in MXFP8 or NVFP4, by operands that are rounded to these formats.

    forward          y  = x  (over K)             @ weight (over K)
    input gradient   dx = dy (over N, rounded     @ weight (over N)
                             at random: "nvfp4")
    weight gradient  dw = dy (over T, likewise)   @ x (over T), both transformed first: "nvfp4"

x and the weight are kept as they are, and rounded once more in backward. A weight that was gathered
packed ("nvfp4") has no values: both passes read what was gathered. The products are in bf16,
on a CPU in fp32, and what is multiplied by scales of tensors afterwards in fp32. Where tensor cores
multiply scales of blocks, operands are bytes, and a product is a group of one (`block_scaled.py`).

Letters: T tokens, K input features, N output features; formats are `kernels/rows/microscaling.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from moecore.base.options.precision import Recipe
from moecore.base.params import has_values, local_param
from moecore.kernels.common import has_block_scaled_kernels, no_autocast
from moecore.kernels.experts.contract import GradTarget
from moecore.kernels.grouped.block_scaled import block_scaled_gemm, block_scaled_wgrad
from moecore.kernels.grouped.wgrad import put_grad
from moecore.kernels.linear import Gradients, linear_op
from moecore.kernels.rows.microscaled import emulated, emulated_matrices
from moecore.kernels.rows.microscaling import (
    PACKED,
    finite_magnitude,
    transposed_matrices,
    unpacked_matrices,
)
from moecore.kernels.rows.scaling import GATHERED_KINDS, Blocks
from moecore.precision.linear import (
    Fp8Products,
    check_operands,
    gathered_as,
    max_over_cut,
    rows_of,
    with_dims_of,
)

Parts = Sequence[Tensor | None]  # E2M1 in pairs and E4M3 scales of a gathered weight, or nothing


def _linear(
    x: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    weight_amax: Tensor | None,
    packed: Tensor | None,
    packed_scales: Tensor | None,
    scaling: str,
    power_of_two: bool,
    hadamard: bool,
    stochastic_rounding: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Return y [..., N]."""
    recipe = _recipe(scaling, power_of_two, hadamard, stochastic_rounding)
    weight = _weight(weight_NK, weight_amax, (packed, packed_scales), recipe, transposed=False)
    y = with_dims_of(_product(_operand(rows_of(x), recipe), weight, recipe, dtype), x)
    return y if bias_N is None else y.add_(bias_N)


def _recipe(scaling: Any, power_of_two: bool, hadamard: bool, stochastic: bool) -> Recipe:
    how: Any = dict(power_of_two=power_of_two, hadamard=hadamard, stochastic_rounding=stochastic)
    return Recipe(scaling=scaling, **how)


def _operand(x_TK: Tensor, recipe: Recipe, **how: Any) -> Blocks:
    return emulated(x_TK, recipe, packed=has_block_scaled_kernels(x_TK.device), **how)


def _weight(
    weight_NK: Tensor, amax: Tensor | None, packed: Parts, recipe: Recipe, *, transposed: bool
) -> Blocks:
    """Return the weight as the operand [1, N, K], or transposed."""
    (values, scales), as_bytes = packed, has_block_scaled_kernels(weight_NK.device)
    if values is not None and scales is not None:
        gathered = Blocks(values[None], scales[None], PACKED, amax)
        if as_bytes:
            return transposed_matrices(gathered) if transposed else gathered
        return unpacked_matrices(gathered, recipe, transposed=transposed)
    how: Any = dict(rows=not transposed, columns=transposed, amax_e=amax, packed=as_bytes)
    operand = emulated_matrices(weight_NK[None], recipe, **how)[transposed]
    assert operand is not None, "it was asked for"
    return operand


def _product(a: Blocks, weight: Blocks, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    if a.kind == PACKED:
        return block_scaled_gemm(a, weight, _one_group(a, a.values.shape[0]), recipe, dtype)
    b_KN = weight.values[0].T
    with no_autocast(b_KN):
        return (a.values.mm(b_KN) * (a.scales * weight.scales)).to(dtype)


def _one_group(rows: Blocks, num_rows: int) -> Tensor:
    """Return the offsets of all rows as one group. No host sync."""
    return torch.full((1,), num_rows, dtype=torch.int32, device=rows.values.device)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight_NK, bias_N, weight_amax, *ctx.packed = inputs[:6]
    wants_x, wants_weight, *_ = ctx.needs_input_grad
    kept = (x if wants_weight else None, weight_NK if wants_x else None, weight_amax)
    ctx.save_for_backward(*kept)
    ctx.how = inputs[6:10]
    ctx.dtypes = (x.dtype, weight_NK.dtype, None if bias_N is None else bias_N.dtype)


def _gradients(ctx: Any, dy: Tensor) -> Gradients:
    x, weight_NK, weight_amax = ctx.saved_tensors
    dy_TN = rows_of(dy)
    recipe = _recipe(*ctx.how)
    x_dtype, weight_dtype, bias_dtype = ctx.dtypes
    wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
    dx = operands = dbias_N = None
    if wants_x:
        weight = _weight(weight_NK, weight_amax, ctx.packed, recipe, transposed=True)
        of_dy = _operand(dy_TN, recipe, is_gradient=True)
        dx = with_dims_of(_product(of_dy, weight, recipe, x_dtype), dy)
    if wants_bias:
        dbias_N = dy_TN.sum(0, dtype=torch.float32).to(bias_dtype)
    if wants_weight:
        operands = (dy_TN, rows_of(x), recipe, weight_dtype)
    return dx, operands, dbias_N


class EmulatedLinearProducts(Fp8Products):
    """What `Fp8Products` is, of recipes "mxfp8" and "nvfp4"."""

    @override
    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None, training: bool) -> Tensor:
        recipe, weight_NK = self.recipe, local_param(weight, reads=False)
        check_operands(x, weight_NK, recipe)
        packed: Parts = (None, None)
        with torch.no_grad():
            amax = None  # of the weight as it is
            if not has_values(weight_NK):
                found = gathered_as(GATHERED_KINDS.get(recipe.weight_block), weight, weight_NK)
                assert found.amax is not None, "it was gathered by it"
                amax, packed = found.amax, (found.values, found.scales)
            elif not recipe.power_of_two:  # as one rank would quantise it, like "tensorwise"
                amax = max_over_cut(finite_magnitude(weight_NK).amax().reshape(1), weight)
        how = recipe.scaling, recipe.power_of_two, recipe.hadamard, recipe.stochastic_rounding
        return self._run(_linear_op, x, weight, weight_NK, bias, amax, *packed, *how)

    forward = staticmethod(_linear)  # type: ignore[assignment]
    save = staticmethod(_save)
    gradients = staticmethod(_gradients)

    @override
    @staticmethod
    def weight_grad(  # type: ignore[override]
        dy_TN: Tensor, x_TK: Tensor, recipe: Recipe, dtype: torch.dtype, target: GradTarget
    ) -> Tensor:
        dy = _operand(dy_TN, recipe, over_rows=True, is_gradient=True)
        x = _operand(x_TK, recipe, over_rows=True)
        if x.kind == PACKED:
            group = _one_group(x, x.scales.shape[1] * recipe.multiple)
            how: Any = dict(dtype=target.dtype or dtype, adds=target.adds, scale=target.scale)
            out = None if target.out is None else target.out[None]
            return block_scaled_wgrad(dy, x, group, recipe, out=out, **how)[0]
        with no_autocast(x_TK):
            grad = dy.values.T.mm(x.values) * (dy.scales * x.scales)
        return put_grad(grad.to(dtype), target.out, target.adds, target.dtype, target.scale)


_linear_op = linear_op("emulated_linear", EmulatedLinearProducts)
