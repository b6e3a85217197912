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
from moecore.kernels.experts.contract import ExpertSpec, GradTarget
from moecore.kernels.experts.fp8_products import QuantisedProducts
from moecore.kernels.grouped.scaled import (
    ALIGNED,
    pad_rows,
    scaled_columns,
    scaled_gemm,
    scaled_rows,
    scaled_weights,
    scaled_wgrad,
)
from moecore.kernels.grouped.wgrad import put_grad
from moecore.kernels.rows.activation import weighted_activation, weighted_activation_bwd
from moecore.kernels.rows.move import gather_rows_plain
from moecore.kernels.rows.record import Rows
from moecore.kernels.rows.scaling import Blocks, Both


class ScaledProducts(QuantisedProducts):
    """The contract is `products.Products`; "rowwise" or "tensorwise". On a CPU, the references."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        recipe = self.recipe
        self.how = {"per_row": recipe.scaling == "rowwise", "power_of_two": recipe.power_of_two}

    @staticmethod
    def supports(spec: ExpertSpec) -> str | None:
        """Return why such experts cannot be multiplied, one line; None = they can."""
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
    def quantise(w_eNK: Tensor, recipe: Recipe) -> Both:
        """Return one matrix of every expert as these products take it. No autograd."""
        per_row = recipe.scaling == "rowwise"
        return scaled_weights(w_eNK.detach(), per_row=per_row, power_of_two=recipe.power_of_two)

    def as_kept(self, rows: Rows) -> Rows:
        """Return source rows as they came."""
        return rows

    def fc1(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return H and the weighted activation."""
        h_RC = self._fc1(rows)
        return h_RC, self.activation_again(Rows(h_RC))

    def h_as_kept(self, h_RC: Tensor) -> Rows:
        """Return H as it is."""
        return Rows(h_RC)

    def fc2(self, a_RF: Tensor) -> Tensor:
        """Return the output of each expert row."""
        return self._product(a_RF, self._w2.rows)

    def fc1_again(self, rows: Rows) -> Rows:
        """Return H alone."""
        return Rows(self._fc1(rows))

    def activation_again(self, h: Rows) -> Tensor:
        """Return the weighted activation."""
        return weighted_activation(h.values, self.weights_R, self.where[2], self.activation)

    def dy(self, dy: Tensor, *, unsummed: bool) -> Tensor:
        """Return the gradient of each expert row's output; 0 past the last one."""
        if not unsummed:
            return self._gathered(Rows(dy))
        used_R = torch.arange(dy.shape[0], device=dy.device) < self.where[2]
        return torch.where(used_R[:, None], dy, 0)

    def activation_bwd(self, dy_RD: Tensor, h: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """Return dH, the weights' gradients and the weighted activation."""
        da_RF = self._product(dy_RD, self._w2.columns)
        where = (self.weights_R, self.where[2], self.activation)
        return weighted_activation_bwd(h.values, da_RF, *where)

    def fc1_bwd(self, dh_RC: Tensor) -> Tensor:
        """Return the gradient of each expert row."""
        return self._product(dh_RC, self._w1.columns)

    def fc1_wgrad(self, rows: Rows, dh_RC: Tensor, target: GradTarget) -> Tensor:
        """Put the gradient of w1 at the target; return it."""
        return self._wgrad(dh_RC, self._gathered(rows), target, self.dtypes[0])

    def fc2_wgrad(self, dy_RD: Tensor, a_RF: Tensor, target: GradTarget) -> Tensor:
        """Put the gradient of w2 at the target; return it."""
        return self._wgrad(dy_RD, a_RF, target, self.dtypes[1])

    def _gathered(self, rows: Rows) -> Tensor:
        return gather_rows_plain(rows.widen(), *self.where)

    def _fc1(self, rows: Rows) -> Tensor:
        return self._product(self._gathered(rows), self._w1.rows)

    def _product(self, a_RK: Tensor, b: Blocks | None) -> Tensor:
        """Return each expert row times its expert's matrix, transposed."""
        assert b is not None
        rows = scaled_rows(a_RK, **self.how)
        return scaled_gemm(rows, b, self.offsets_e, a_RK.dtype)

    def _wgrad(self, x_RM: Tensor, y_RN: Tensor, target: GradTarget, dtype: torch.dtype) -> Tensor:
        padded = pad_rows(self.offsets_e, x_RM.shape[0])
        x, y = (scaled_columns(rows, padded, **self.how) for rows in (x_RM, y_RN))
        grad = scaled_wgrad(x, y, padded.offsets_e, x_RM.dtype)
        return put_grad(grad, target.out, target.adds, target.dtype or dtype, target.scale)
