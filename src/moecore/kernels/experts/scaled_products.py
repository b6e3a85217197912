"""Products of a rank's experts in FP8 with a scale per row, or per tensor, of either operand.

Everything is quantised from the dtype of the rows, once along each dim that is summed; X and H are
kept in that dtype. dY and dH, which are multiplied along both, take one pass for both. They have
the recipe's `grad_format`. With an `amax_history` rows have the scales of earlier steps
(`Magnitudes`); matrices always have their own. The products are torch's, or with E5M2 those of
`scaled_kernel.py`: these recipes are for comparison and for what needs their formats, "blockwise"
is what is fast.

Letters: as in `contract.py`.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch import Tensor
from typing_extensions import override

from moecore.base.options.precision import Recipe
from moecore.kernels.experts.contract import (
    ExpertSpec,
    GradTarget,
    Operand,
    ProductSource,
)
from moecore.kernels.experts.fp8_products import QuantisedProducts
from moecore.kernels.experts.torch_products import Role, TorchProducts
from moecore.kernels.grouped.scaled import scaled_gemm, scaled_wgrad
from moecore.kernels.grouped.scaled_rows import (
    ALIGNED,
    amax_of_rows,
    pad_offsets,
    scaled_matrices,
    scaled_rows,
)
from moecore.kernels.grouped.skeleton import Addend
from moecore.kernels.grouped.wgrad import put_grad
from moecore.kernels.rows.index import ExpertIndex
from moecore.kernels.rows.scaling import Blocks, Both
from moecore.kernels.rows.shard_blocks import transpose_values

GRADIENTS: tuple[Operand, ...] = ("dy", "dh")
# By matrix, and whether it is transposed.
MULTIPLIED: dict[tuple[Role, bool], Operand] = {
    ("w1", False): "x",
    ("w2", False): "a",
    ("w2", True): "dy",
    ("w1", True): "dh",
}


def _format(recipe: Recipe) -> dict[str, Any]:
    return dict(per_row=recipe.scaling == "rowwise", power_of_two=recipe.power_of_two)


class ScaledProducts(QuantisedProducts, TorchProducts):
    """Recipes "rowwise" and "tensorwise": torch's products of FP8 operands; references on a CPU."""

    def __init__(self, index: ExpertIndex, *how: Any) -> None:
        super().__init__(index, *how)
        self.magnitudes = self.weights.magnitudes
        # by operand and whether its columns: made beside the other layout
        self._beside: dict[tuple[Operand, bool], Blocks] = {}

    @staticmethod
    def supports(spec: ExpertSpec) -> str | None:
        return spec.refused_in_fp8(ALIGNED)

    @staticmethod
    def quantise(w_eNK: Tensor, recipe: Recipe, **layouts: bool) -> Both:
        """Return one matrix of every expert as these products take it."""
        return scaled_matrices(w_eNK, **_format(recipe), **layouts)

    @staticmethod
    def gathered(matrix: Blocks, backward: bool) -> Blocks:
        """Return an operand of a matrix that was gathered, with one scale per expert."""
        values = transpose_values(matrix.values) if backward else matrix.values
        scales = matrix.scales[:, None].expand(values.shape[:2])
        return Blocks(values, scales.contiguous(), "row")

    @override
    def _matrix(self, role: Role, *, backward: bool = False) -> tuple[Blocks, Operand]:
        """Return a matrix, and what is multiplied by it."""
        matrix: Blocks = super()._matrix(role, backward=backward)
        return matrix, MULTIPLIED[role, backward]

    @cached_property
    def _padded_e(self) -> Tensor:
        return pad_offsets(self.offsets_e)

    def _operand(self, operand: Operand, rows: Tensor, *, columns: bool = False) -> Blocks:
        """Return rows in FP8, or their columns; of gradients the other layout is kept for later."""
        found = self._beside.pop((operand, columns), None)
        if found is not None:
            return found
        is_gradient, how = operand in GRADIENTS, _format(self.recipe)
        both = is_gradient and self._is_wanted(operand, not columns)
        if self.magnitudes is not None:
            # Forward collects those of X and A.
            seen = self.magnitudes.seen.get(operand) if is_gradient or not columns else None
            amax = self.magnitudes.past[operand]
            if amax is not None and not self.magnitudes.is_sure:
                amax = amax_of_rows(rows, self.offsets_e, amax)
            how |= {"amax": amax, "seen": seen}
        made = scaled_rows(
            rows,
            self.offsets_e,
            self._padded_e if columns or both else None,
            fmt=self.recipe.grad_format if is_gradient else "e4m3",
            rows=both or not columns,
            columns=both or columns,
            **how,
        )
        other = made[not columns]
        if other is not None:
            self._beside[operand, not columns] = other
        result = made[columns]
        assert result is not None, "it was asked for"
        return result

    def _is_wanted(self, operand: Operand, columns: bool) -> bool:
        """Whether backward asks for a layout of a gradient, once more."""
        wants = self.wants
        if wants is None:
            return False
        if columns:
            return wants.w2 if operand == "dy" else wants.w1
        return operand == "dh" and wants.x

    def _rows(self, a_RK: Tensor, b: Any, addend: Addend | None) -> Tensor:
        matrix, operand = b
        a = self._operand(operand, a_RK)
        return self.low1.add(scaled_gemm(a, matrix, self.offsets_e, a_RK.dtype), addend)

    def _weight_grad(
        self, source: ProductSource, y_RN: Tensor, transposed: bool, target: GradTarget
    ) -> Tensor:
        names: tuple[Operand, Operand] = ("x", "dh") if transposed else ("dy", "a")
        of_source, of_y = (
            self._operand(name, rows, columns=True)
            for name, rows in zip(names, (source.rows, y_RN), strict=True)
        )
        dy, x = (of_y, of_source) if transposed else (of_source, of_y)
        grad = scaled_wgrad(dy, x, self._padded_e, y_RN.dtype)
        dtype = target.dtype or self.dtypes[not transposed]
        return put_grad(grad, target.out, target.adds, dtype, target.scale)
