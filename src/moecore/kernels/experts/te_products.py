"""Grouped matmuls of a rank's experts by Transformer Engine, in 16 bits or by its own recipes.

Each product is a list of products, one per expert, whose sizes are read on the host: one host sync
per forward, none in backward. With a recipe every operand is quantised from the dtype of the rows
where it is multiplied, along the dim that is summed. X and H are saved in that dtype. The index
pads each expert's rows (`Recipe.row_multiple`), and these rows are zero in X, A, dY and dH: they
change no scale and no gradient. Infinities of X and dY become NaN, because Transformer Engine
saturates them; infinities of matrices do not.

Letters: as in `contract.py`.
"""

from typing import Any

import torch
from torch import Tensor

from moecore.base import transformer_engine as te
from moecore.base.options.precision import Recipe
from moecore.kernels.experts.contract import (
    LEAVE_OUT,
    MATRICES,
    ExpertSpec,
    ExpertWeights,
    GradTarget,
    Operand,
    Role,
)
from moecore.kernels.experts.grouped_products import Matmuls
from moecore.kernels.grouped.wgrad import scale_and_store_grad
from moecore.kernels.rows.e4m3 import BLOCK
from moecore.kernels.rows.index import ExpertIndex

ACCUMULATED = (torch.float32, torch.bfloat16)  # dtypes in which a product adds to a gradient


class TEMatmuls(Matmuls):
    """`Matmuls` by Transformer Engine, in 16 bits or by its recipes."""

    def __init__(
        self,
        index: ExpertIndex,
        weights: ExpertWeights,
        recipe: Recipe | None = None,
        index_cache: list[int] | None = None,
    ) -> None:
        """`index_cache` is each expert's row count; None = read it (host sync)."""
        self.recipe, self.saturates = recipe, recipe is not None
        self.w1_eCD, self.w2_eDF = weights.w1_eCD, weights.w2_eDF
        self.dtypes = {"w1": weights.w1_eCD.dtype, "w2": weights.w2_eDF.dtype}
        self.index_cache = self.splits = index_cache or read_rows_per_expert(index, recipe)
        self._matrices: dict[Operand, Any] = {}  # by what is multiplied by them

    def multiply(self, rows_RK: Tensor, operand: Operand) -> Tensor:
        """Compute `Matmuls.multiply` by TE; results of unused rows of the buffer are undefined."""
        role, is_backward = MATRICES[operand]
        w_eNK = self.w1_eCD if role == "w1" else self.w2_eDF
        if operand not in self._matrices:
            self._matrices[operand] = self._make_operands(w_eNK, "weight", over_rows=is_backward)
        out_RN = rows_RK.new_empty(rows_RK.shape[0], w_eNK.shape[2 if is_backward else 1])
        num_rows = sum(self.splits)
        if num_rows:
            role_of_rows: te.Operand = "gradient" if is_backward else "activation"
            rows = self._make_operands(rows_RK, role_of_rows, over_rows=False)
            layout: te.Layout = "NN" if is_backward else "TN"
            matrices = self._matrices[operand]
            te.multiply_quantised_experts(matrices, rows, layout, [out_RN[:num_rows]], self.splits)
        return out_RN

    def compute_weight_grad(
        self, dy_RN: Tensor, x_RK: Tensor, role: Role, target: GradTarget
    ) -> Tensor:
        out, dtype = target.out, target.dtype or self.dtypes[role]
        is_direct = out is not None and target.scale == 1.0 and out.dtype in ACCUMULATED
        adds = is_direct and target.accumulate
        shape = (len(self.splits), dy_RN.shape[1], x_RK.shape[1])
        grad = out.view(shape) if is_direct else dy_RN.new_empty(shape, dtype=dtype)  # type: ignore[union-attr]
        if sum(self.splits):
            dy = self._make_operands(dy_RN, "gradient", over_rows=True)
            x = self._make_operands(x_RK, "activation", over_rows=True)
            te.multiply_quantised_experts(
                x, dy, "NT", list(grad.unbind()), self.splits, accumulates=adds
            )
        elif not adds:
            grad.zero_()
        if is_direct:
            return out  # type: ignore[return-value]
        return scale_and_store_grad(grad, *target)

    def drop_weights(self) -> None:
        del self.w1_eCD, self.w2_eDF
        self._matrices.clear()

    def _make_operands(self, matrix: Tensor, operand: te.Operand, *, over_rows: bool) -> Any:
        """Split rows, or matrices ("weight"), by expert, and quantise each by the recipe."""
        splits = [matrix.shape[1]] * matrix.shape[0] if operand == "weight" else self.splits
        x_RK = matrix.reshape(-1, matrix.shape[-1])[: sum(splits)]
        if self.recipe is None:
            return x_RK.split(splits)
        return te.quantise_experts(x_RK, splits, self.recipe, operand, over_rows=over_rows)


def find_te_problem(spec: ExpertSpec) -> str | None:
    """Return an error text if Transformer Engine cannot compute experts of this spec, or None."""
    field, recipe = spec.find_torch_only_field(), spec.recipe
    if field is not None:
        return f"{field} (True) must be False for expert_backend ('te'): use expert_backend='torch'"
    if recipe is not None and recipe.amax_history:
        return (
            f"Recipe.amax_history ({recipe.amax_history}) must be 0 for experts, which keep no "
            f"history: {LEAVE_OUT}"
        )
    multiple = 1 if recipe is None else recipe.weight_multiple
    multiple = BLOCK if recipe is not None and recipe.scaling == "blockwise" else multiple
    if (problem := spec.find_fp8_size_problem(multiple)) is not None:
        return problem
    if spec.device is not None and spec.device.type not in ("cpu", "meta"):
        dtypes = (torch.bfloat16,) if recipe is not None else (torch.bfloat16, torch.float16)
        if (problem := spec.find_dtype_problem(dtypes, "expert_backend ('te')")) is not None:
            return problem
    return spec.find_grouped_problem() or te.find_recipe_problem(recipe, spec.device)


def read_rows_per_expert(index: ExpertIndex, recipe: Recipe | None) -> list[int]:
    """Return the number of rows of each expert. Host sync.

    Raises a ValueError if such a number is no multiple of the recipe's row alignment.
    """
    ends = index.offsets_e.tolist()
    splits = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    multiple = 1 if recipe is None else recipe.row_multiple
    if any(n % multiple for n in splits):
        raise ValueError(
            f"rows of each expert ({splits}) must be multiples of {multiple} for Transformer "
            f"Engine's products: build_index(..., multiple={multiple})"
        )
    return splits
