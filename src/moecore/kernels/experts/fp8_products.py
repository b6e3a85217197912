"""Products of a rank's experts in FP8, in blocks of 128 along the dim that is summed.

    X, dY     quantised per 128 columns as source rows, before they are gathered
    A, dH     quantised from fp32 by the kernel that computes them from H
    all four  tiled and transposed from FP8, where a weight gradient reads them

H, dA and sums per source row are in the dtype of the rows. Rows that were dispatched in FP8 are
multiplied unchanged. Low-rank updates are computed in the dtype of the rows, from widened X, and
from A, dY and dH before these are quantised. Letters: as in `contract.py`; t row tiles.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from moecore.base.options.precision import Hidden, Recipe
from moecore.kernels.common import has_hopper_kernels
from moecore.kernels.experts.base_products import Products
from moecore.kernels.experts.contract import (
    MATRICES,
    ExpertSpec,
    ExpertWeights,
    GradFlags,
    GradTarget,
    LowRankUpdate,
    Operand,
    ProductSource,
)
from moecore.kernels.experts.quantised_products import QuantisedMatrices
from moecore.kernels.grouped.fp8 import fp8_gemm, fp8_wgrad
from moecore.kernels.rows.activation import (
    ActivationOptions,
    weighted_activation,
    weighted_activation_bwd,
)
from moecore.kernels.rows.e4m3 import BLOCK
from moecore.kernels.rows.index import ExpertIndex
from moecore.kernels.rows.packed import gather_packed_rows
from moecore.kernels.rows.quantised import (
    gather_row_blocks,
    quantise_rows,
    quantise_weights,
    tile_tokens,
)
from moecore.kernels.rows.quantised_activation import quantised_activation, quantised_activation_bwd
from moecore.kernels.rows.record import Rows, widen_rows
from moecore.kernels.rows.row_tiles import RowTiles, map_row_tiles
from moecore.kernels.rows.scaling import Blocks, OperandPair
from moecore.kernels.rows.shard_blocks import transpose_values

# Smallest F from which a layer in FP8 was faster: docs/findings.md#layers-in-fp8
FASTER_FROM = 384


class _Fp8Operand(NamedTuple):
    """An activation or gradient in expert order, in FP8, and the dtype of products with it."""

    rows: Blocks | None  # None = a product quantises `wide` when it reads the operand
    dtype: torch.dtype
    wide: ProductSource | None = None  # the values before quantisation, for low-rank updates


class _OutputGrads(NamedTuple):
    """FP8 gradient of the experts' output: a row per token, or per expert row if is_unsummed."""

    rows: Rows
    is_unsummed: bool
    wide: ProductSource | None = None  # dY before quantisation, for the low-rank update of w2


class BlockwiseProducts(Products):
    """`Products` of recipe "blockwise": FP8 in blocks of 128, on a CPU by plain PyTorch."""

    def __init__(
        self,
        index: ExpertIndex,
        activation: ActivationOptions,
        weights: ExpertWeights,
        recipe: Recipe,
        index_cache: RowTiles | None = None,
    ) -> None:
        has_kernels = has_hopper_kernels(index.weights_R.device)
        super().__init__(index, activation, weights, has_kernels=has_kernels)
        self.recipe = recipe
        # `pack_rows` has powers of two as scales; a low-rank update of w2 reads wide dY.
        self.accepts_packed_grads = recipe.power_of_two and weights.update2 is None
        quantise = partial(quantise_weights_blockwise, recipe=recipe)
        self.matrices = QuantisedMatrices(weights, quantise, _unpack_matrix)
        length = index.weights_R.shape[0]
        self.index_cache = self.tiles = index_cache or map_row_tiles(index.offsets_e, length)

    def prepare_rows(self, rows: Rows) -> Rows:
        return rows if rows.scales is not None else self._quantise_rows(rows.values)

    def fc1(self, rows: Rows, *, saves_h: bool) -> tuple[Rows | None, _Fp8Operand]:
        h_format = self.recipe.hidden_format if saves_h else None
        return self._activate(self._multiply_fc1(rows), h_format)

    def fc2(self, a: _Fp8Operand) -> Tensor:
        y_RD = self._multiply(self._get_fp8_operand(a), "a", a.dtype)
        return self.low2.add_product(y_RD, self.low2.compute_addend(a.wide))

    def recompute_h(self, rows: Rows) -> Rows:
        h_RC = self._multiply_fc1(rows)
        if self.recipe.hidden_format == "wide":
            return Rows(h_RC)
        return self._quantise_rows(h_RC, self.row_map.num_rows)

    def recompute_activation(self, h: Rows) -> _Fp8Operand:
        return self._activate(widen_rows(h, self.row_map.num_rows), None)[1]

    def prepare_output_grad(
        self, dy: Tensor | Rows, *, has_expert_rows: bool, grad_flags: GradFlags | None = None
    ) -> _OutputGrads:
        """Return `dy` in FP8; packed `dy` is returned unchanged."""
        if isinstance(dy, Rows):
            return _OutputGrads(dy, has_expert_rows)
        rows = self._quantise_rows(dy, self.row_map.num_rows if has_expert_rows else None)
        wide = ProductSource(dy, None if has_expert_rows else self.row_map.row_ids_R)
        return _OutputGrads(rows, has_expert_rows, wide if self.low2.update else None)

    def activation_bwd(self, dy: _OutputGrads, h: Rows) -> tuple[_Fp8Operand, Tensor, _Fp8Operand]:
        """Return dh, dweights and the activation; dh and the activation are in FP8.

        With LoRA, dh is also returned unquantised, and the activation only unquantised: it is
        quantised when it is first read.
        """
        num_rows = self.row_map.num_rows
        ids_R, slots_SK = (None, None) if dy.is_unsummed else self.row_map[:2]
        da_RF = self._multiply(gather_row_blocks(dy.rows, ids_R, slots_SK, num_rows), "dy", h.dtype)
        da_RF = self.low2.add_product(da_RF, self.low2.compute_addend(dy.wide, is_backward=True))
        operands = (da_RF, self.weights_R, num_rows, self.activation)
        if self.low1.update or self.low2.update:
            dh_RC, dweights_R, a_RF = weighted_activation_bwd(widen_rows(h, num_rows), *operands)
            wide_h, wide_a = (ProductSource(x, None, is_finite=True) for x in (dh_RC, a_RF))
            dh = _Fp8Operand(self._quantise_blocks(wide_h), h.dtype, wide_h)
            return dh, dweights_R, _Fp8Operand(None, h.dtype, wide_a)
        out = quantised_activation_bwd(h, *operands, power_of_two=self.recipe.power_of_two)
        return _Fp8Operand(out[0], h.dtype), out[1], _Fp8Operand(out[2], h.dtype)

    def fc1_dgrad(self, dh: _Fp8Operand) -> Tensor:
        dx_RD = self._multiply(self._get_fp8_operand(dh), "dh", dh.dtype)
        return self.low1.add_product(dx_RD, self.low1.compute_addend(dh.wide, is_backward=True))

    def fc1_wgrad(self, rows: Rows, dh: _Fp8Operand, target: GradTarget) -> Tensor:
        x = tile_tokens(rows, self.row_map.row_ids_R, self.tiles)
        return self._compute_wgrad(self._get_fp8_operand(dh), x, target, self.matrices.dtypes["w1"])

    def fc2_wgrad(self, dy: _OutputGrads, a: _Fp8Operand, target: GradTarget) -> Tensor:
        ids_R = None if dy.is_unsummed else self.row_map.row_ids_R
        dy_tiles = tile_tokens(dy.rows, ids_R, self.tiles)
        return self._compute_wgrad(
            dy_tiles, self._get_fp8_operand(a), target, self.matrices.dtypes["w2"]
        )

    def fc1_update_grad(self, rows: Rows, dh: _Fp8Operand) -> LowRankUpdate:
        return self.low1.compute_grads(self._widen_rows(rows), dh.wide)

    def fc2_update_grad(self, dy: _OutputGrads, a: _Fp8Operand) -> LowRankUpdate:
        return self.low2.compute_grads(a.wide, dy.wide)

    def drop_weights(self) -> None:
        del self.low1, self.low2
        self.matrices.drop_matrices()

    def _quantise_rows(self, x: Tensor, num_rows: Tensor | None = None) -> Rows:
        """Quantise the first `num_rows` rows of x (None = all rows) per 128 columns."""
        return quantise_rows(x, power_of_two=self.recipe.power_of_two, num_rows=num_rows)

    def _multiply_fc1(self, rows: Rows) -> Tensor:
        """Return FC1's output x @ w1^T, with the LoRA update of w1, from FP8 token rows x."""
        h_RC = self._multiply(gather_row_blocks(rows, *self.row_map), "x", rows.dtype)
        x = self._widen_rows(rows) if self.low1.update else None
        return self.low1.add_product(h_RC, self.low1.compute_addend(x))

    def _widen_rows(self, rows: Rows) -> ProductSource:
        """Return FP8 token rows in 16 bits or fp32; strided (dispatched) rows in expert order."""
        assert rows.scales is not None
        ids_R, *places = self.row_map
        if rows.values.is_contiguous():
            return ProductSource(widen_rows(rows), ids_R)
        if ids_R is None:
            return ProductSource(rows.widen(), None)
        wide_RD = gather_packed_rows(rows.values, rows.scales, rows.dtype, ids_R, *places)
        return ProductSource(wide_RD, None)

    def _get_fp8_operand(self, x: _Fp8Operand) -> Blocks:
        """Return the FP8 rows of an operand; quantise its unquantised rows if there are none."""
        return self._quantise_blocks(x.wide) if x.rows is None else x.rows

    def _quantise_blocks(self, wide: ProductSource | None) -> Blocks:
        """Quantise the expert rows `wide`, which must not be None, to an operand of `fp8_gemm`."""
        assert wide is not None
        num_rows = self.row_map.num_rows
        return gather_row_blocks(self._quantise_rows(wide.rows, num_rows), None, None, num_rows)

    def _activate(self, h_RC: Tensor, h_format: Hidden | None) -> tuple[Rows | None, _Fp8Operand]:
        """Return FC1's output to save, in `h_format` (None = not saved), and the FP8 activation."""
        operands = (h_RC, self.weights_R, self.row_map.num_rows, self.activation)
        a, h = quantised_activation(
            *operands, power_of_two=self.recipe.power_of_two, quantise_h=h_format == "fp8"
        )
        wide = None
        if self.low2.update:
            wide = ProductSource(weighted_activation(*operands), None, is_finite=True)
        return Rows(h_RC) if h_format == "wide" else h, _Fp8Operand(a, h_RC.dtype, wide)

    def _multiply(self, rows: Blocks, operand: Operand, dtype: torch.dtype) -> Tensor:
        """Return expert rows times w1 or w2 (as `operand` says) of their experts, in `dtype`."""
        matrix = self.matrices.get_operand(*MATRICES[operand])
        return fp8_gemm(rows, matrix, self.offsets_e, self.tiles, dtype)

    def _compute_wgrad(
        self, x: Blocks, y: Blocks, target: GradTarget, dtype: torch.dtype
    ) -> Tensor:
        """Return each expert's x^T y, written to `target`; a new tensor has `dtype`."""
        x, y = (tile_tokens(z, None, self.tiles) if z.kind == "tile" else z for z in (x, y))
        target = target._replace(dtype=target.dtype or dtype)
        return fp8_wgrad(x, y, self.tiles, **target._asdict())


def quantise_weights_blockwise(w_eNK: Tensor, recipe: Recipe, **layouts: bool) -> OperandPair:
    """Quantise matrices with a scale per 128 x 128; `layouts`: `rowwise` and `columnwise`."""
    w_eNK = w_eNK.detach().contiguous()
    return quantise_weights(w_eNK, power_of_two=recipe.power_of_two, **layouts)


def _unpack_matrix(matrix: Blocks, is_transposed: bool) -> Blocks:
    """Return an all-gathered FP8 matrix [N, K] as the operand summed over K, or N if transposed."""
    if not is_transposed:
        return matrix
    return Blocks(transpose_values(matrix.values), matrix.scales.transpose(1, 2), "block")


def find_fp8_speed_problem(spec: ExpertSpec) -> str | None:
    """Return the reason why FP8 is not supported or not faster for these experts, or None."""
    if spec.hidden_dim is not None and spec.hidden_dim < FASTER_FROM:
        return (
            f"MoEConfig.hidden_dim / etp ({spec.hidden_dim}) is less than {FASTER_FROM}, from "
            "which on FP8 was faster"
        )
    return spec.find_fp8_problem(BLOCK)
