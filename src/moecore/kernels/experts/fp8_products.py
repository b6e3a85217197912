"""Products of a rank's experts in FP8, in blocks of 128 along the dim that is summed.

    X, dY     quantised per 128 columns as source rows, before they are gathered
    A, dH     quantised from fp32 by the kernel that computes them from H
    all four  tiled and transposed from FP8, where a weight gradient reads them

H, dA and sums per source row are in the dtype of the rows. Rows that were dispatched in FP8 are
multiplied unchanged. Low-rank updates are computed in the dtype of the rows, from widened X, and
from A, dY and dH before these are quantised. Letters: as in `contract.py`; t row tiles.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from moecore.base.options.precision import Hidden, Recipe
from moecore.kernels.common import has_hopper_kernels
from moecore.kernels.experts.contract import (
    MATRICES,
    ExpertSpec,
    ExpertWeights,
    GradTarget,
    LowRankUpdate,
    Operand,
    ProductSource,
    RowMap,
    Wants,
)
from moecore.kernels.experts.low_rank import LowRankProducts
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


class _OperandBlocks(NamedTuple):
    """The activation A or dH in expert order as an FP8 operand, and the dtype of its product."""

    rows: Blocks | None  # None = quantised of `wide` where they are needed
    dtype: torch.dtype
    wide: ProductSource | None = None  # the values before quantisation, for low-rank updates


class _OutputGrads(NamedTuple):
    """dY, the gradient of the output, in FP8: of source rows, or of expert rows if is_unsummed."""

    rows: Rows
    is_unsummed: bool
    wide: ProductSource | None = None  # dY before quantisation, for the low-rank update of w2


class BlockwiseProducts:
    """FC1, activation, FC2 and their gradients for a rank's experts, in FP8 blocks of 128.

    Implements `products.Products` for the recipe "blockwise". A CPU runs the references.
    """

    def __init__(
        self,
        index: ExpertIndex,
        activation: ActivationOptions,
        weights: ExpertWeights,
        recipe: Recipe,
        index_cache: RowTiles | None = None,
    ) -> None:
        self.activation, self.recipe = activation, recipe
        self.row_map = RowMap(index.row_ids_R, index.slots_SK, index.num_rows)
        self.weights_R, self.offsets_e = index.weights_R, index.offsets_e
        self.matrices = QuantisedMatrices(
            weights, partial(quantise_weights_blockwise, recipe=recipe), _unpack_matrix
        )
        has_kernels = has_hopper_kernels(index.row_ids_R.device)
        self.low1 = LowRankProducts(weights.update1, index.offsets_e, has_kernels=has_kernels)
        self.low2 = LowRankProducts(weights.update2, index.offsets_e, has_kernels=has_kernels)
        length = index.row_ids_R.shape[0]
        self.index_cache = self.tiles = index_cache or map_row_tiles(index.offsets_e, length)

    def prepare_rows(self, rows: Rows) -> Rows:
        """Quantise source rows to FP8; rows that were dispatched in FP8 are returned unchanged."""
        return rows if rows.scales is not None else self._quantise(rows.values)

    def fc1(self, rows: Rows, *, keep: bool) -> tuple[Rows | None, _OperandBlocks]:
        """Return H [R, C] as saved for backward, None unless `keep`, and the FP8 activation."""
        h_RC = self._multiply_fc1(rows)
        return self._activate(h_RC, self.recipe.hidden if keep else None)

    def fc2(self, a: _OperandBlocks) -> Tensor:
        """Return a @ w2^T [R, D], the output of each expert row, in the dtype of the rows."""
        y_RD = self._multiply(self._make_blocks(a), "a", a.dtype)
        return self.low2.add(y_RD, self.low2.compute_forward_addend(a.wide))

    def recompute_h(self, rows: Rows) -> Rows:
        """Recompute H from source rows, in the dtype of the rows or in FP8 (`Recipe.hidden`)."""
        h_RC = self._multiply_fc1(rows)
        return (
            Rows(h_RC)
            if self.recipe.hidden == "wide"
            else self._quantise(h_RC, self.row_map.num_rows)
        )

    def recompute_activation(self, h: Rows) -> _OperandBlocks:
        """Return act(H) times the routing weight of each row, in FP8."""
        return self._activate(widen_rows(h, self.row_map.num_rows), None)[1]

    @property
    def accepts_packed_grads(self) -> bool:
        """Whether `dy` may be given FP8 rows: powers of two as scales, no low-rank update of w2."""
        return self.recipe.power_of_two and self.low2.update is None

    def prepare_output_grad(
        self, dy: Tensor | Rows, *, unsummed: bool, wants: Wants | None = None
    ) -> _OutputGrads:
        """Quantise the gradient of the output, [S, D] or unsummed [R, D], unless it is FP8."""
        if isinstance(dy, Rows):
            return _OutputGrads(dy, unsummed)
        rows = self._quantise(dy, self.row_map.num_rows if unsummed else None)
        wide = ProductSource(dy, None if unsummed else self.row_map.row_ids_R)
        return _OutputGrads(rows, unsummed, wide if self.low2.update else None)

    def activation_bwd(
        self, dy: _OutputGrads, h: Rows
    ) -> tuple[_OperandBlocks, Tensor, _OperandBlocks]:
        """Return dH in FP8, gradients of routing weights (fp32 [R]) and act(H) * weight in FP8.

        With a low-rank update, dH is also kept in the dtype of the rows, the last result only so.
        """
        row_ids_R, slots_SK, num_rows = self.row_map
        if dy.is_unsummed:
            dy_rows = gather_row_blocks(dy.rows, None, None, num_rows)
        else:
            dy_rows = gather_row_blocks(dy.rows, row_ids_R, slots_SK, num_rows)
        da_RF = self._multiply(dy_rows, "dy", h.dtype)
        del dy_rows
        da_RF = self.low2.add(da_RF, self.low2.compute_backward_addend(dy.wide))
        if self.low1.update or self.low2.update:
            h_RC = widen_rows(h, num_rows)
            dh_RC, dweights_R, a_RF = weighted_activation_bwd(
                h_RC, da_RF, self.weights_R, num_rows, self.activation
            )
            sources = (ProductSource(x, None, is_finite=True) for x in (dh_RC, a_RF))
            of_h, of_a = (_OperandBlocks(None, h.dtype, x) for x in sources)
            return of_h._replace(rows=self._make_blocks(of_h)), dweights_R, of_a
        dh, dweights_R, a = quantised_activation_bwd(
            h,
            da_RF,
            self.weights_R,
            num_rows,
            self.activation,
            power_of_two=self.recipe.power_of_two,
        )
        return _OperandBlocks(dh, h.dtype), dweights_R, _OperandBlocks(a, h.dtype)

    def fc1_dgrad(self, dh: _OperandBlocks) -> Tensor:
        """Return the input gradient of FC1, [R, D], one row per expert row."""
        dx_RD = self._multiply(self._make_blocks(dh), "dh", dh.dtype)
        return self.low1.add(dx_RD, self.low1.compute_backward_addend(dh.wide))

    def fc1_wgrad(self, rows: Rows, dh: _OperandBlocks, target: GradTarget) -> Tensor:
        """Return the gradient of w1: `target.out`, overwritten or added to, or a new tensor."""
        x = tile_tokens(rows, self.row_map.row_ids_R, self.tiles)
        return self._weight_grad(self._make_blocks(dh), x, target, self.matrices.dtypes["w1"])

    def fc2_wgrad(self, dy: _OutputGrads, a: _OperandBlocks, target: GradTarget) -> Tensor:
        """Return the gradient of w2: `target.out`, overwritten or added to, or a new tensor."""
        dy_tiles = tile_tokens(
            dy.rows, None if dy.is_unsummed else self.row_map.row_ids_R, self.tiles
        )
        return self._weight_grad(dy_tiles, self._make_blocks(a), target, self.matrices.dtypes["w2"])

    def fc1_update_grad(self, rows: Rows, dh: _OperandBlocks) -> LowRankUpdate:
        """Return the gradients of A and B of the low-rank update of w1."""
        return self.low1.compute_update_grads(self._widen(rows), dh.wide)

    def fc2_update_grad(self, dy: _OutputGrads, a: _OperandBlocks) -> LowRankUpdate:
        """Return the gradients of A and B of the low-rank update of w2."""
        return self.low2.compute_update_grads(a.wide, dy.wide)

    def drop_weights(self) -> None:
        """Free matrices and low-rank updates; only `fc1_wgrad` and `fc2_wgrad` may run after."""
        del self.low1, self.low2
        self.matrices.drop()

    def _quantise(self, x: Tensor, num_rows: Tensor | None = None) -> Rows:
        """Quantise rows per 128 columns; rows from num_rows on are skipped, None = no such rows."""
        return quantise_rows(x, power_of_two=self.recipe.power_of_two, num_rows=num_rows)

    def _multiply_fc1(self, rows: Rows) -> Tensor:
        """Return H = x @ w1^T [R, C], with the low-rank update, from FP8 source rows."""
        h_RC = self._multiply(gather_row_blocks(rows, *self.row_map), "x", rows.dtype)
        x = self._widen(rows) if self.low1.update else None
        return self.low1.add(h_RC, self.low1.compute_forward_addend(x))

    def _widen(self, rows: Rows) -> ProductSource:
        """Widen FP8 source rows; dispatched (strided) rows are gathered in expert order, too."""
        assert rows.scales is not None
        if rows.values.is_contiguous():
            return ProductSource(widen_rows(rows), self.row_map.row_ids_R)
        wide_RD = gather_packed_rows(rows.values, rows.scales, rows.dtype, *self.row_map)
        return ProductSource(wide_RD, None)

    def _make_blocks(self, x: _OperandBlocks) -> Blocks:
        """Return the FP8 operand of expert rows, quantised now if only wide rows exist."""
        if x.rows is not None:
            return x.rows
        assert x.wide is not None
        num_rows = self.row_map.num_rows
        return gather_row_blocks(self._quantise(x.wide.rows, num_rows), None, None, num_rows)

    def _activate(
        self, h_RC: Tensor, h_format: Hidden | None
    ) -> tuple[Rows | None, _OperandBlocks]:
        """Return H in `h_format` (None = not saved), and the quantised weighted activation."""
        weights_R, num_rows = self.weights_R, self.row_map.num_rows
        a, h = quantised_activation(
            h_RC,
            weights_R,
            num_rows,
            self.activation,
            power_of_two=self.recipe.power_of_two,
            quantise_h=h_format == "fp8",
        )
        wide = None
        if self.low2.update:
            a_RF = weighted_activation(h_RC, weights_R, num_rows, self.activation)
            wide = ProductSource(a_RF, None, is_finite=True)
        return Rows(h_RC) if h_format == "wide" else h, _OperandBlocks(a, h_RC.dtype, wide)

    def _multiply(self, rows: Blocks, operand: Operand, dtype: torch.dtype) -> Tensor:
        """Return each expert row times its expert's matrix, which `operand` selects, in `dtype`."""
        matrix = self.matrices.get_operand(*MATRICES[operand])
        return fp8_gemm(rows, matrix, self.offsets_e, self.tiles, dtype)

    def _weight_grad(self, x: Blocks, y: Blocks, target: GradTarget, dtype: torch.dtype) -> Tensor:
        """Return x^T y per expert in `target.out`, overwritten or added to, or a new tensor."""
        x, y = (tile_tokens(z, None, self.tiles) if z.kind == "tile" else z for z in (x, y))
        return fp8_wgrad(
            x,
            y,
            self.tiles,
            out=target.out,
            adds=target.adds,
            dtype=target.dtype or dtype,
            scale=target.scale,
        )


def quantise_weights_blockwise(w_eNK: Tensor, recipe: Recipe, **layouts: bool) -> OperandPair:
    """Quantise matrices in blocks of 128 x 128; `layouts`: flags `rows`, `columns`. No autograd."""
    w_eNK = w_eNK.detach().contiguous()
    return quantise_weights(w_eNK, power_of_two=recipe.power_of_two, **layouts)


def _unpack_matrix(matrix: Blocks, is_transposed: bool) -> Blocks:
    """Return an all-gathered FP8 matrix as the operand for sums over K, or N if is_transposed."""
    if not is_transposed:
        return matrix
    return Blocks(transpose_values(matrix.values), matrix.scales.transpose(1, 2), "block")


def find_fp8_speed_problem(spec: ExpertSpec) -> str | None:
    """Return a one-line reason why FP8 is unsupported or not faster for these experts, or None."""
    if spec.hidden_dim is not None and spec.hidden_dim < FASTER_FROM:
        return (
            f"MoEConfig.hidden_dim / etp ({spec.hidden_dim}) is less than {FASTER_FROM}, from "
            "which on FP8 was faster"
        )
    return spec.find_fp8_problem(BLOCK)
