"""Products of a rank's experts by Transformer Engine, in 16 bits or by its own recipes.

Each product is a list of products, one per expert, whose sizes come from the host: one host sync
per forward, none in backward. By a recipe everything is quantised from the dtype of the rows, along
the dim that is summed, where it is multiplied: rows of X and matrices in forward and once more in
backward. X and H are kept in that dtype. The index pads each expert's rows (`Recipe.rows`), and
these rows are zero in X, A, dY and dH: they change no scale and no gradient. Infinities of X and dY
become NaN, because Transformer Engine saturates them; those of matrices do not.

Letters: as in `contract.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moecore.base import te_names
from moecore.base.options.precision import Recipe
from moecore.kernels.experts.contract import (
    LEAVE_OUT,
    ExpertSpec,
    ExpertWeights,
    GradTarget,
    ProductSource,
)
from moecore.kernels.experts.torch_products import Role, TorchProducts, Use
from moecore.kernels.grouped.skeleton import Addend
from moecore.kernels.grouped.wgrad import put_grad
from moecore.kernels.rows.activation import ActivationOptions
from moecore.kernels.rows.e4m3 import BLOCK
from moecore.kernels.rows.index import ExpertIndex
from moecore.kernels.rows.move import clear_unnamed
from moecore.kernels.rows.record import Rows

ACCUMULATED = (torch.float32, torch.bfloat16)  # dtypes in which a product adds to a gradient


class TEProducts(TorchProducts):
    """The contract is `products.Products`, recipes those of backend "te" or None."""

    def __init__(
        self,
        index: ExpertIndex,
        activation: ActivationOptions,
        weights: ExpertWeights,
        recipe: Recipe | None = None,
        of_index: list[int] | None = None,
    ) -> None:
        super().__init__(index, activation, weights)
        self.recipe = recipe
        self.dtypes = weights.w1_eCD.dtype, weights.w2_eDF.dtype
        self.of_index = self.splits = of_index or splits_on_host(index, recipe)
        self._made: dict[tuple[Role, bool], Any] = {}  # by role and whether for input gradients

    @staticmethod
    def supports(spec: ExpertSpec) -> str | None:
        field, recipe = spec.not_plain(), spec.recipe
        if field is not None:
            return (
                f"{field} (True) must be False for expert_backend ('te'): use "
                "expert_backend='torch'"
            )
        if recipe is not None and recipe.amax_history:
            return (
                f"Recipe.amax_history ({recipe.amax_history}) must be 0 for experts, which keep no "
                f"history: {LEAVE_OUT}"
            )
        multiple = 1 if recipe is None else recipe.multiple
        multiple = BLOCK if recipe is not None and recipe.scaling == "blockwise" else multiple
        for name, size in (("dim", spec.dim), ("hidden_dim / etp", spec.hidden_dim)):
            if size is not None and size % multiple:
                return (
                    f"MoEConfig.{name} ({size}) must be a multiple of {multiple} for experts in "
                    f"this FP8: {LEAVE_OUT}"
                )
        is_gpu = spec.device is not None and spec.device.type not in ("cpu", "meta")
        taken = ({torch.bfloat16},) if recipe is not None else ({torch.bfloat16}, {torch.float16})
        if is_gpu and spec.dtypes is not None and spec.dtypes not in taken:
            shown = ", ".join(sorted(str(dtype) for dtype in spec.dtypes))
            return (
                f"dtype of the experts ({shown}) must be torch.bfloat16 for expert_backend ('te'): "
                "convert the model, or set FSDPOptions.param_dtype"
            )
        return spec.ungrouped() or te_names.why_not(recipe, spec.device)

    def dy(self, dy: Tensor, *, unsummed: bool) -> ProductSource:
        if unsummed and self.recipe is not None:  # padding may hold anything
            dy = te_names.without_infinities(clear_unnamed(dy, self.where[1]))
        return super().dy(dy, unsummed=unsummed)

    def _source(self, rows: Rows, use: Use) -> ProductSource:
        if self.recipe is not None:
            rows = Rows(te_names.without_infinities(rows.widen()))
        return super()._source(rows, use)

    def drop_weights(self) -> None:
        super().drop_weights()
        self._made.clear()

    def _matrix(self, role: Role, *, backward: bool = False) -> Any:
        """Return the operands of a matrix of every expert, their columns, and the layout."""
        w_eNK = self.w1_eCD if role == "w1" else self.w2_eDF
        if (role, backward) not in self._made:
            self._made[role, backward] = self._operands(w_eNK, "weight", over_rows=backward)
        layout = "NN" if backward else "TN"
        return self._made[role, backward], w_eNK.shape[2 if backward else 1], layout

    def _operands(self, x: Tensor, operand: te_names.Operand, *, over_rows: bool) -> Any:
        """Return expert rows, or a matrix [e, N, K] of every expert, as operands of products."""
        splits = [x.shape[1]] * x.shape[0] if operand == "weight" else self.splits
        x_RK = x.reshape(-1, x.shape[-1])[: sum(splits)]
        if self.recipe is None:
            return x_RK.split(splits)
        return te_names.quantise_experts(x_RK, splits, self.recipe, operand, over_rows=over_rows)

    def _rows(self, a_RK: Tensor, b: Any, addend: Addend | None) -> Tensor:
        matrices, num_columns, layout = b
        out_RN = a_RK.new_empty(a_RK.shape[0], num_columns)
        used = sum(self.splits)
        if used:
            # Matrices for input gradients multiply gradients.
            operand: te_names.Operand = "gradient" if layout == "NN" else "activation"
            rows = self._operands(a_RK, operand, over_rows=False)
            te_names.multiply_experts(matrices, rows, layout, [out_RN[:used]], self.splits)
        return self.low1.add(out_RN, addend) if a_RK.shape[0] else out_RN

    def _weight_grad(
        self, source: ProductSource, y_RN: Tensor, transposed: bool, target: GradTarget
    ) -> Tensor:
        # The first factor, whose columns are the gradient's rows, is dH or dY.
        first, second = (y_RN, source.rows) if transposed else (source.rows, y_RN)
        out, dtype = target.out, target.dtype or self.dtypes[not transposed]
        is_direct = out is not None and target.scale == 1.0 and out.dtype in ACCUMULATED
        adds, shape = is_direct and target.adds, (len(self.splits), first.shape[1], second.shape[1])
        grad = out.view(shape) if is_direct else first.new_empty(shape, dtype=dtype)  # type: ignore[union-attr]
        if sum(self.splits):
            dy = self._operands(first, "gradient", over_rows=True)
            x = self._operands(second, "activation", over_rows=True)
            te_names.multiply_experts(x, dy, "NT", list(grad.unbind()), self.splits, adds=adds)
        elif not adds:
            grad.zero_()
        if is_direct:
            assert out is not None
            return out
        return put_grad(grad, out, target.adds, target.dtype, target.scale)


def splits_on_host(index: ExpertIndex, recipe: Recipe | None) -> list[int]:
    """Return how many rows each expert has, on the host. The host sync of a forward."""
    ends = index.offsets_e.tolist()
    splits = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    multiple = 1 if recipe is None else recipe.rows
    if any(n % multiple for n in splits):
        raise ValueError(
            f"rows of each expert ({splits}) must be multiples of {multiple} for Transformer "
            f"Engine's products: build_index(..., multiple={multiple})"
        )
    return splits
