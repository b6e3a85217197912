"""Products of a rank's experts in FP8 with a scale per row, or per tensor, of either operand.

Everything is quantised from the dtype of the rows, once along each dim that is summed; X and H are
kept in that dtype. dY and dH have the recipe's `grad_format`. With an `amax_history` rows have the
scales of earlier steps (`Magnitudes`); matrices always have their own. The products are torch's, or
with E5M2 those of `scaled_kernel.py`, the quantisation is plain PyTorch: these recipes are for
comparison and for what needs their formats, "blockwise" is what is fast.

Letters: as in `contract.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from moecore.base.options.precision import Recipe
from moecore.kernels.experts.contract import (
    ExpertSpec,
    ExpertWeights,
    GradTarget,
    Operand,
    ProductSource,
)
from moecore.kernels.experts.fp8_products import QuantisedProducts
from moecore.kernels.experts.torch_products import Role, TorchProducts
from moecore.kernels.grouped.scaled import (
    ALIGNED,
    PaddedRows,
    pad_rows,
    scaled_columns,
    scaled_gemm,
    scaled_rows,
    scaled_weights,
    scaled_wgrad,
)
from moecore.kernels.grouped.skeleton import Addend
from moecore.kernels.grouped.wgrad import put_grad
from moecore.kernels.rows.activation import ActivationOptions
from moecore.kernels.rows.index import ExpertIndex
from moecore.kernels.rows.scaling import Blocks, Both, add_seen_ref_
from moecore.kernels.rows.shard_blocks import transpose_values

GRADIENTS: tuple[Operand, ...] = ("dy", "dh")
# By matrix, and whether it is transposed.
MULTIPLIED: dict[tuple[Role, bool], Operand] = {
    ("w1", False): "x",
    ("w2", False): "a",
    ("w2", True): "dy",
    ("w1", True): "dh",
}


class ScaledProducts(QuantisedProducts, TorchProducts):
    """Recipes "rowwise" and "tensorwise": torch's products of FP8 operands; references on a CPU."""

    def __init__(
        self,
        index: ExpertIndex,
        activation: ActivationOptions,
        weights: ExpertWeights,
        recipe: Recipe,
    ) -> None:
        super().__init__(index, activation, weights, recipe)
        self.how = {"per_row": recipe.scaling == "rowwise", "power_of_two": recipe.power_of_two}
        self.magnitudes = weights.magnitudes
        self._collected: set[Operand] = set()

    @staticmethod
    def supports(spec: ExpertSpec) -> str | None:
        return spec.refused_in_fp8(ALIGNED)

    @staticmethod
    def quantise(w_eNK: Tensor, recipe: Recipe, **_: bool) -> Both:
        """Return one matrix of every expert as these products take it, in both layouts."""
        per_row = recipe.scaling == "rowwise"
        return scaled_weights(w_eNK.detach(), per_row=per_row, power_of_two=recipe.power_of_two)

    @staticmethod
    def gathered(matrix: Blocks, backward: bool) -> Blocks:
        """Return an operand of a matrix that was gathered, with one scale per expert."""
        values = transpose_values(matrix.values) if backward else matrix.values
        scales = matrix.scales[:, None].expand(values.shape[:2])
        return Blocks(values, scales.contiguous(), "row")

    def dy(self, dy: Tensor, *, unsummed: bool) -> ProductSource:
        """Return the gradient of each expert row's output; 0 past the last one."""
        if not unsummed:
            return super().dy(dy, unsummed=False)
        used_R = torch.arange(dy.shape[0], device=dy.device) < self.where[2]
        return ProductSource(torch.where(used_R[:, None], dy, 0), None)

    @override
    def _matrix(self, role: Role, *, backward: bool = False) -> tuple[Blocks, Operand]:
        """Return a matrix, and what is multiplied by it."""
        matrix: Blocks = super()._matrix(role, backward=backward)
        return matrix, MULTIPLIED[role, backward]

    def _operand(
        self, make: Callable[..., Blocks], operand: Operand, rows: Tensor, *where: PaddedRows
    ) -> Blocks:
        """Return rows in FP8, and collect their largest magnitude once."""
        fmt = self.recipe.grad_format if operand in GRADIENTS else "e4m3"
        how: dict[str, Any] = {**self.how, "fmt": fmt}
        if self.magnitudes is not None:
            seen = self.magnitudes.seen.get(operand)
            if seen is not None and operand not in self._collected:
                add_seen_ref_(rows, seen)
                self._collected.add(operand)
            how["amax"] = self.magnitudes.past[operand]
        return make(rows, *where, **how)

    def _rows(self, a_RK: Tensor, b: Any, addend: Addend | None) -> Tensor:
        matrix, operand = b
        a = self._operand(scaled_rows, operand, a_RK)
        return self.low1.add(scaled_gemm(a, matrix, self.offsets_e, a_RK.dtype), addend)

    def _weight_grad(
        self, source: ProductSource, y_RN: Tensor, transposed: bool, target: GradTarget
    ) -> Tensor:
        padded = pad_rows(self.offsets_e, y_RN.shape[0])
        names: tuple[Operand, Operand] = ("x", "dh") if transposed else ("dy", "a")
        of_source, of_y = (
            self._operand(scaled_columns, name, rows, padded)
            for name, rows in zip(names, (source.rows, y_RN), strict=True)
        )
        dy, x = (of_y, of_source) if transposed else (of_source, of_y)
        grad = scaled_wgrad(dy, x, padded.offsets_e, y_RN.dtype)
        dtype = target.dtype or self.dtypes[not transposed]
        return put_grad(grad, target.out, target.adds, dtype, target.scale)
