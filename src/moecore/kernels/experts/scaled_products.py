"""Products of a rank's experts in FP8 with a scale per row, or per tensor, of either operand.

Everything is quantised from the dtype of the rows, once along each dim that is summed; X and H are
kept in that dtype. The products are torch's, the quantisation is plain PyTorch: these recipes are
for comparison and for what needs their formats, "blockwise" is what is fast.

Letters: as in `contract.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moecore.base.options.precision import Recipe
from moecore.kernels.experts.contract import ExpertSpec, GradTarget, ProductSource
from moecore.kernels.experts.fp8_products import QuantisedProducts
from moecore.kernels.experts.torch_products import TorchProducts
from moecore.kernels.grouped.scaled import (
    ALIGNED,
    pad_rows,
    scaled_columns,
    scaled_gemm,
    scaled_rows,
    scaled_weights,
    scaled_wgrad,
)
from moecore.kernels.grouped.skeleton import Addend
from moecore.kernels.grouped.wgrad import put_grad
from moecore.kernels.rows.scaling import Blocks, Both
from moecore.kernels.rows.shard_blocks import transpose_values


class ScaledProducts(QuantisedProducts, TorchProducts):
    """Recipes "rowwise" and "tensorwise": torch's products of FP8 operands; references on a CPU."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        recipe = self.recipe
        self.how = {"per_row": recipe.scaling == "rowwise", "power_of_two": recipe.power_of_two}

    @staticmethod
    def supports(spec: ExpertSpec) -> str | None:
        assert spec.recipe is not None
        for field, value, wanted in (
            ("grad_format", spec.recipe.grad_format, "e4m3"),
            ("amax_history", spec.recipe.amax_history, 0),
        ):
            if value != wanted:
                return (
                    f"Recipe.{field} ({value!r}) must be {wanted!r} for experts, whose products "
                    "take e4m3 with scales of its own values: use it, or give this recipe to dense "
                    "linears alone (Precision.roles)"
                )
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

    def _rows(self, a_RK: Tensor, b: Any, addend: Addend | None) -> Tensor:
        out = scaled_gemm(scaled_rows(a_RK, **self.how), b, self.offsets_e, a_RK.dtype)
        return self.low1.add(out, addend)

    def _weight_grad(
        self, source: ProductSource, y_RN: Tensor, transposed: bool, target: GradTarget
    ) -> Tensor:
        padded = pad_rows(self.offsets_e, y_RN.shape[0])
        x, y = (scaled_columns(rows, padded, **self.how) for rows in (source.rows, y_RN))
        grad = scaled_wgrad(*((y, x) if transposed else (x, y)), padded.offsets_e, y_RN.dtype)
        dtype = target.dtype or self.dtypes[not transposed]
        return put_grad(grad, target.out, target.adds, dtype, target.scale)
