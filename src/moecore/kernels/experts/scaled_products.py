"""Grouped matmuls of a rank's experts in FP8, with a scale per row or per tensor of an operand.

Everything is quantised from the dtype of the rows, once along each dim that is summed; X and H are
kept in that dtype. dY and dH, which are multiplied along both, take one pass for both. They have
the recipe's `grad_format`. With an `amax_history` rows have the scales of earlier steps
(`Magnitudes`); matrices always have their own. The products are torch's, or with E5M2 those of
`scaled.py`: these recipes are for comparison and for what needs their formats, "blockwise"
is what is fast.

Letters: as in `contract.py`.
"""

from __future__ import annotations

from functools import cached_property, partial

from torch import Tensor

from moecore.base.options.precision import Recipe
from moecore.kernels.common import has_hopper_kernels
from moecore.kernels.experts.contract import (
    MATRICES,
    ExpertWeights,
    GradTarget,
    Operand,
    Role,
)
from moecore.kernels.experts.grouped_products import Matmuls
from moecore.kernels.experts.quantised_matrices import QuantisedMatrices
from moecore.kernels.grouped.scaled import scaled_gemm, scaled_wgrad
from moecore.kernels.grouped.scaled_rows import (
    amax_of_rows,
    pad_offsets,
    scaled_matrices,
    scaled_rows,
)
from moecore.kernels.grouped.wgrad import put_grad
from moecore.kernels.rows.index import ExpertIndex
from moecore.kernels.rows.scaling import Blocks, OperandPair
from moecore.kernels.rows.shard_blocks import transpose_values

GRADIENTS: tuple[Operand, ...] = ("dy", "dh")


class ScaledMatmuls(Matmuls):
    """Recipes "rowwise" and "tensorwise": torch's products of FP8 operands; references on a CPU."""

    def __init__(self, index: ExpertIndex, weights: ExpertWeights, recipe: Recipe) -> None:
        self.recipe, self.offsets_e = recipe, index.offsets_e
        self.has_low_rank_kernels = has_hopper_kernels(index.row_ids_R.device)
        self.magnitudes = weights.magnitudes
        quantise = partial(quantise_by_rows, recipe=recipe)
        self.matrices = QuantisedMatrices(weights, quantise, _unpack)
        # by operand and whether its columns: the layout that was made together with the other one
        self._other_layouts: dict[tuple[Operand, bool], Blocks] = {}

    def multiply(self, rows_RK: Tensor, operand: Operand) -> Tensor:
        matrix = self.matrices.operand(*MATRICES[operand])
        a = self._operand(operand, rows_RK)
        return scaled_gemm(a, matrix, self.offsets_e, rows_RK.dtype)

    def weight_grad(self, dy_RN: Tensor, x_RK: Tensor, role: Role, target: GradTarget) -> Tensor:
        dy = self._operand("dh" if role == "w1" else "dy", dy_RN, columns=True)
        x = self._operand("x" if role == "w1" else "a", x_RK, columns=True)
        grad_eNK = scaled_wgrad(dy, x, self._padded_e, dy_RN.dtype)
        dtype = target.dtype or self.matrices.dtypes[role]
        return put_grad(grad_eNK, target.out, target.adds, dtype, target.scale)

    def drop_weights(self) -> None:
        self.matrices.drop()

    @cached_property
    def _padded_e(self) -> Tensor:
        return pad_offsets(self.offsets_e)

    def _operand(self, operand: Operand, rows: Tensor, *, columns: bool = False) -> Blocks:
        """Return rows in FP8, or their columns; of gradients the other layout is kept for later."""
        layout = self._other_layouts.pop((operand, columns), None)
        if layout is not None:
            return layout
        is_gradient = operand in GRADIENTS
        has_both_layouts = is_gradient and self._is_wanted(operand, not columns)
        amax = new_amax = None
        if self.magnitudes is not None:
            # Forward collects those of X and A.
            if is_gradient or not columns:
                new_amax = self.magnitudes.seen.get(operand)
            amax = self.magnitudes.past[operand]
            if amax is not None and not self.magnitudes.is_sure:
                amax = amax_of_rows(rows, self.offsets_e, amax)
        layouts = scaled_rows(
            rows,
            self.offsets_e,
            self._padded_e if columns or has_both_layouts else None,
            per_row=self.recipe.scaling == "rowwise",
            power_of_two=self.recipe.power_of_two,
            fmt=self.recipe.grad_format if is_gradient else "e4m3",
            rows=has_both_layouts or not columns,
            columns=has_both_layouts or columns,
            amax=amax,
            seen=new_amax,
        )
        other = layouts[not columns]
        if other is not None:
            self._other_layouts[operand, not columns] = other
        layout = layouts[columns]
        assert layout is not None, "this layout was requested"
        return layout

    def _is_wanted(self, operand: Operand, columns: bool) -> bool:
        """Whether the backward reads a layout of a gradient later."""
        wants = self.wants
        if wants is None:
            return False
        if columns:
            return wants.w2 if operand == "dy" else wants.w1
        return operand == "dh" and wants.x


def quantise_by_rows(w_eNK: Tensor, recipe: Recipe, **layouts: bool) -> OperandPair:
    """Return one matrix of every expert as the operands of these matmuls."""
    per_row, power_of_two = recipe.scaling == "rowwise", recipe.power_of_two
    return scaled_matrices(w_eNK, per_row=per_row, power_of_two=power_of_two, **layouts)


def _unpack(matrix: Blocks, is_transposed: bool) -> Blocks:
    """Return an operand of an all-gathered matrix, which has one scale per expert."""
    values = transpose_values(matrix.values) if is_transposed else matrix.values
    scales = matrix.scales[:, None].expand(values.shape[:2])
    return Blocks(values, scales.contiguous(), "row")
