"""Products of a rank's experts in MXFP8 and NVFP4, by operands that are rounded to these formats.

For studying losses on GPUs without tensor cores for them (`block_scaled_products.py` is for those
that have some): each operand is rounded before the products in bf16, and a CPU multiplies in fp32.
X and H are kept in the dtype of the rows, so recomputation rounds them alike. Rows are quantised in
expert order: a tensor's scale is that of an expert's rows. Those that travelled as FP8 are widened
first.

Letters: as in `contract.py`; P expert rows, each expert's padded to whole blocks with zeros.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from moecore.base.options.precision import Recipe
from moecore.kernels.common import has_hopper_kernels
from moecore.kernels.experts.contract import ExpertSpec, GradTarget, ProductSource
from moecore.kernels.experts.fp8_products import QuantisedProducts
from moecore.kernels.experts.torch_products import TorchProducts
from moecore.kernels.grouped.gemm import grouped_gemm
from moecore.kernels.grouped.scaled_rows import pad_rows
from moecore.kernels.grouped.skeleton import Addend
from moecore.kernels.grouped.wgrad import grouped_wgrad, put_grad
from moecore.kernels.rows.index import ExpertIndex
from moecore.kernels.rows.microscaled import emulated, emulated_matrices
from moecore.kernels.rows.microscaling import OF_BACKWARD, unpacked_matrices
from moecore.kernels.rows.scaling import Blocks, Both


class EmulatedProducts(QuantisedProducts, TorchProducts):
    """The contract is `products.Products`, recipes "mxfp8" and "nvfp4"."""

    packed = False  # whether operands are bytes

    def __init__(self, index: ExpertIndex, *how: Any) -> None:
        super().__init__(index, *how)
        self.padded = pad_rows(index.offsets_e, index.row_ids_R.shape[0], self.recipe.multiple)

    @staticmethod
    def supports(spec: ExpertSpec) -> str | None:
        assert spec.recipe is not None
        return spec.refused_in_fp8(spec.recipe.multiple)

    @staticmethod
    def quantise(w_eNK: Tensor, recipe: Recipe, **layouts: Any) -> Both:
        """Return one matrix of every expert as these products take it. No autograd."""
        return emulated_matrices(w_eNK, recipe, **layouts)

    def gathered(self, matrix: Blocks, backward: bool) -> Blocks:  # type: ignore[override]
        """Return an operand of a matrix that was gathered packed."""
        return unpacked_matrices(matrix, self.recipe, transposed=backward)

    @cached_property
    def _rows_P(self) -> tuple[Tensor, Tensor]:
        """Return the row that each padded row is, -1 for zeros, and its expert; int64 [P]."""
        padded = self.padded
        row_P = torch.arange(padded.length, device=padded.place_R.device)
        source_P = row_P.new_full((padded.length + 1,), -1)
        source_P.index_copy_(0, padded.place_R, row_P[: padded.place_R.shape[0]])
        expert_P = torch.searchsorted(padded.offsets_e, row_P.int(), right=True)
        return source_P[:-1], expert_P

    def _operand(self, x: Tensor, expert: Tensor, **how: Any) -> Blocks:
        e = self.offsets_e.shape[0]
        how |= dict(expert_M=expert, num_experts=e, packed=self.packed)
        return emulated(x, self.recipe, **how)

    def _rows(self, a_RK: Tensor, b: Any, addend: Addend | None) -> Tensor:
        if not a_RK.shape[0]:
            return a_RK.new_empty(0, b.values.shape[1])
        # Matrices lie transposed for input gradients alone: what they multiply is a gradient.
        a = self._operand(a_RK, self.padded.expert_R, is_gradient=b.kind in OF_BACKWARD)
        return self.low1.add(self._multiply(a, b, a_RK.dtype), addend)

    def _multiply(self, a: Blocks, b: Blocks, dtype: torch.dtype) -> Tensor:
        """Return each expert row times its expert's matrix."""
        b_eKN = b.values.transpose(1, 2)
        if has_hopper_kernels(b_eKN.device):
            out_RN = grouped_gemm(a.values, b_eKN, self.offsets_e, dtype=torch.float32)
        else:
            out_RN = grouped_mm(a.values, b_eKN, offs=self.offsets_e)
        scales = a.scales[:-1] * b.scales
        expert_R = self.padded.expert_R.clamp(max=scales.shape[0] - 1)
        return (out_RN * scales[expert_R, None]).to(dtype)

    def _weight_grad(
        self, source: ProductSource, y_RN: Tensor, transposed: bool, target: GradTarget
    ) -> Tensor:
        source_P, expert_P = self._rows_P
        x, y = (
            self._operand(
                rows, expert_P, sources_M=source_P, over_rows=True, is_gradient=is_gradient
            )
            for rows, is_gradient in ((source.rows, not transposed), (y_RN, transposed))
        )
        target = replace(target, dtype=target.dtype or self.dtypes[not transposed])
        return self._outer(x, y, transposed, target)

    def _outer(self, x: Blocks, y: Blocks, transposed: bool, target: GradTarget) -> Tensor:
        """Put the sum of outer products over each expert's rows at the target; return it."""
        how: Any = dict(transposed=transposed, dtype=torch.float32)
        grad = grouped_wgrad(x.values, y.values, self.padded.offsets_e, **how)
        grad = grad * (x.scales * y.scales)[:-1, None, None]
        return put_grad(grad, target.out, target.adds, target.dtype, target.scale)
