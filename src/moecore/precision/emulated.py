"""y = x @ weight^T + bias in MXFP8 or NVFP4.

    forward          y  = x  (over K) @ weight (over K)
    input gradient   dx = dy (over N) @ weight (over N)
    weight gradient  dw = dy (over T) @ x      (over T)

"nvfp4" rounds dy stochastically, and applies the Hadamard transform to both operands of dw. x and
the weight are saved for backward in their dtype, and quantised again. A weight that FSDP gathered
packed ("nvfp4") has no values: forward and backward read the gathered blocks.

GPUs with tensor cores for block scales multiply the bytes (`block_scaled.py`, with one group).
Other GPUs multiply rounded operands in bf16, and a CPU in fp32.

Letters: T tokens, K input features, N output features; formats are `kernels/rows/microscaling.py`.
"""

from typing import Any

import torch
from torch import Tensor

from moecore.base.options.precision import Recipe
from moecore.base.params import has_values
from moecore.kernels.common import disable_autocast, has_block_scaled_kernels
from moecore.kernels.experts.contract import GradTarget
from moecore.kernels.grouped.block_scaled import block_scaled_gemm, block_scaled_wgrad
from moecore.kernels.grouped.wgrad import scale_and_store_grad
from moecore.kernels.rows.microscaled import quantise_microscaled, quantise_microscaled_matrices
from moecore.kernels.rows.microscaling import (
    PACKED_FORWARD,
    compute_finite_magnitude,
    transpose_matrices,
    unpack_matrices,
)
from moecore.kernels.rows.scaling import GATHERED_KINDS, Blocks
from moecore.precision.linear import (
    InputGrad,
    LinearCall,
    QuantisedProducts,
    all_reduce_max,
    flatten_rows,
    make_quantised_op,
    read_gathered_blocks,
)


def _quantise_operand(
    x: Tensor, recipe: Recipe, *, over_rows: bool = False, is_gradient: bool = False
) -> Blocks:
    """Quantise x for a matmul that sums over its columns, or over its rows with `over_rows`.

    `is_gradient` = x is dy, which "nvfp4" rounds stochastically. The values are packed on GPUs
    whose tensor cores read block scales, otherwise they are rounded numbers.
    """
    pack = has_block_scaled_kernels(x.device, recipe.scaling)
    return quantise_microscaled(x, recipe, pack=pack, over_rows=over_rows, is_gradient=is_gradient)


def _quantise_weight(weight_NK: Tensor, call: LinearCall, *, transposed: bool) -> Blocks:
    """Return the quantised weight, [1, N, K] for y, or [1, K, N] for dx if `transposed`."""
    values, scales, amax, recipe = *call[4:6], call.weight_amax, call.recipe
    is_packed = has_block_scaled_kernels(weight_NK.device, recipe.scaling)
    if values is not None:
        blocks = Blocks(values[None], scales[None], PACKED_FORWARD, amax)
        if is_packed:
            return transpose_matrices(blocks) if transposed else blocks
        return unpack_matrices(blocks, recipe, transposed=transposed)
    sides: Any = dict(rowwise=not transposed, columnwise=transposed)
    operands = quantise_microscaled_matrices(
        weight_NK[None], recipe, **sides, amax_e=amax, pack=is_packed
    )
    operand = operands.columns if transposed else operands.rows
    assert operand is not None
    return operand


def _multiply(a: Blocks, weight: Blocks, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    """Return a @ weight^T in `dtype`, [T, N]; for the input gradient, [T, K].

    `weight` is [1, N, K], or for the input gradient [1, K, N].
    """
    if a.kind == PACKED_FORWARD:
        return block_scaled_gemm(a, weight, _make_single_group(a, a.values.shape[0]), recipe, dtype)
    b_KN = weight.values[0].T
    with disable_autocast(b_KN):
        return (a.values.mm(b_KN) * (a.scales * weight.scales)).to(dtype)


def _make_single_group(rows: Blocks, num_rows: int) -> Tensor:
    """Return the group ends for a grouped kernel with one group: int32 [1] with `num_rows`."""
    return torch.full((1,), num_rows, dtype=torch.int32, device=rows.values.device)


class EmulatedLinearProducts(QuantisedProducts):
    """Computes y, dx and dw of one linear with recipe "mxfp8" or "nvfp4"."""

    def prepare(self, x: Tensor, param: Tensor, weight_NK: Tensor, training: bool) -> LinearCall:
        """Return the settings and weight tensors of one forward; x and `training` are not used.

        If FSDP all-gathered the weight in FP4, these are its FP4 values and scales. Otherwise they
        are the weight's amax over all shards, or None if scales are powers of two.
        """
        recipe = self.recipe
        with torch.no_grad():
            if not has_values(weight_NK):
                kind = GATHERED_KINDS.get(recipe.weight_block)
                blocks = read_gathered_blocks(kind, param, weight_NK)
                assert blocks.amax is not None, "gathered blocks have an amax"
                call = LinearCall(weight_amax=blocks.amax, recipe=recipe)
                return call._replace(weight_rows=blocks.values, weight_scales=blocks.scales)
            amax = None  # the weight's own
            if not recipe.power_of_two:  # shards are quantised as one rank quantises the weight
                amax = all_reduce_max(compute_finite_magnitude(weight_NK).amax().reshape(1), param)
        return LinearCall(weight_amax=amax, recipe=recipe)

    @staticmethod
    def multiply(x_TK: Tensor, weight_NK: Tensor, call: LinearCall) -> Tensor:
        """Return y = x @ weight^T, both quantised here, in `call.dtype`."""
        weight = _quantise_weight(weight_NK, call, transposed=False)
        return _multiply(_quantise_operand(x_TK, call.recipe), weight, call.recipe, call.dtype)

    @staticmethod
    def compute_input_grad(dy_TN: Tensor, weight_NK: Tensor | None, call: LinearCall) -> InputGrad:
        """Return (dx or None if `weight_NK` is None, unchanged dy for `compute_weight_grad`)."""
        if weight_NK is None:
            return None, dy_TN
        weight = _quantise_weight(weight_NK, call, transposed=True)
        dy = _quantise_operand(dy_TN, call.recipe, is_gradient=True)
        return _multiply(dy, weight, call.recipe, call.dtype), dy_TN

    @staticmethod
    def compute_weight_grad(dy: Tensor, x: Tensor, call: LinearCall, target: GradTarget) -> Tensor:
        """Return dw = dy^T x, new or in `target.out` (overwritten, or added if `accumulate`)."""
        recipe, x_TK = call.recipe, flatten_rows(x)
        of_dy = _quantise_operand(dy, recipe, over_rows=True, is_gradient=True)
        of_x = _quantise_operand(x_TK, recipe, over_rows=True)
        if of_x.kind == PACKED_FORWARD:
            group = _make_single_group(of_x, of_x.scales.shape[1] * recipe.weight_multiple)
            return block_scaled_wgrad(
                *(of_dy, of_x, group, recipe),
                out=None if target.out is None else target.out[None],
                dtype=target.dtype or call.dtype,
                accumulate=target.accumulate,
                scale=target.scale,
            )[0]
        with disable_autocast(x_TK):
            grad = of_dy.values.T.mm(of_x.values) * (of_dy.scales * of_x.scales)
        return scale_and_store_grad(grad.to(call.dtype), *target)


EmulatedLinearProducts.op = make_quantised_op("emulated_linear", EmulatedLinearProducts)
