"""Products of a rank's experts by this package's kernels, in 16 bits.

Gluon kernels for Hopper multiply over a map of row tiles. Triton kernels multiply where they gather
faster, under the interpreter, and without rows.

A kernel gathers source rows while it loads them, or they are gathered beforehand where that is
faster. A gather moves R * D elements whatever F is; the product that it speeds up grows with F.

Letters: as in `contract.py`.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from moecore.kernels.common import has_hopper_kernels
from moecore.kernels.experts.base_products import Products
from moecore.kernels.experts.contract import (
    ExpertSpec,
    ExpertWeights,
    GradFlags,
    GradTarget,
    LowRankUpdate,
    ProductSource,
)
from moecore.kernels.grouped.cooperative import cooperative_activation, cooperative_gemm
from moecore.kernels.grouped.gemm import grouped_gemm, grouped_gemm_activation
from moecore.kernels.grouped.pingpong import pingpong_activation_bwd
from moecore.kernels.grouped.skeleton import Addend
from moecore.kernels.grouped.wgrad import grouped_wgrad
from moecore.kernels.rows.activation import ActivationOptions, weighted_activation_bwd
from moecore.kernels.rows.index import ExpertIndex
from moecore.kernels.rows.move import gather_used_rows
from moecore.kernels.rows.packed import gather_packed_rows
from moecore.kernels.rows.record import Rows
from moecore.kernels.rows.row_tiles import RowTiles, map_row_tiles
from moecore.kernels.triton_api import INTERPRET

Use = Literal["fc1", "recompute", "dy", "wgrad"]  # of source rows

# Smallest F for which rows are gathered before a product: docs/findings.md#gather-first
GATHER_FIRST: dict[Use, int] = {
    "fc1": 512,  # X, for FC1 and its gated activation
    "dy": 1024,  # dY, for FC2's input gradient under a gated activation and its weight gradient
    "wgrad": 2048,  # X, for FC1's weight gradient
}


class TritonProducts(Products):
    """`Products` in 16 bits by this package's kernels, on Hopper by Gluon kernels."""

    def __init__(
        self,
        index: ExpertIndex,
        activation: ActivationOptions,
        weights: ExpertWeights,
        index_cache: RowTiles | None = None,
    ) -> None:
        super().__init__(index, activation, weights, has_kernels=True)
        self.w1_eCD, self.w2_eDF = weights.w1_eCD, weights.w2_eDF
        self.hidden_dim = weights.w2_eDF.shape[2]
        length, device = index.weights_R.shape[0], index.weights_R.device
        if index_cache is None and length and has_hopper_kernels(device):
            index_cache = map_row_tiles(index.offsets_e, length)
        self.index_cache = self.tiles = index_cache

    def fc1(self, rows: Rows, *, saves_h: bool) -> tuple[Rows | None, Tensor]:
        x = self._choose_source(rows, "fc1")
        addend = self.low1.compute_addend(x)
        may_fuse = self.activation.gated and self.low1.can_fuse
        if may_fuse and self.tiles is not None and x.row_ids_R is None:
            h_RC, a_RF = cooperative_activation(
                x.rows, self.w1_eCD, self.tiles, self.weights_R, self.activation, addend=addend
            )
        elif self.activation.gated and x.row_ids_R is not None and addend is None:
            h_RC, a_RF = grouped_gemm_activation(
                x.rows, self.w1_eCD, x.row_ids_R, self.weights_R, self.offsets_e, self.activation
            )
        else:
            h_RC = self._multiply(x, self.w1_eCD.transpose(1, 2), addend)
            a_RF = self.recompute_activation(Rows(h_RC))
        return Rows(h_RC) if saves_h else None, a_RF

    def fc2(self, a_RF: Tensor) -> Tensor:
        a = ProductSource(a_RF, None)
        return self._multiply(a, self.w2_eDF.transpose(1, 2), self.low2.compute_addend(a))

    def recompute_h(self, rows: Rows) -> Rows:
        x, b_eDC = self._choose_source(rows, "recompute"), self.w1_eCD.transpose(1, 2)
        return Rows(self._multiply(x, b_eDC, self.low1.compute_addend(x)))

    def prepare_output_grad(
        self, dy: Tensor, *, has_expert_rows: bool, grad_flags: GradFlags | None = None
    ) -> ProductSource:
        return ProductSource(dy, None) if has_expert_rows else self._choose_source(Rows(dy), "dy")

    def activation_bwd(self, dy: ProductSource, h: Rows) -> tuple[Tensor, Tensor, Tensor]:
        addend = self.low2.compute_addend(dy, is_backward=True)
        may_fuse = self.activation.gated and self.low2.can_fuse
        if may_fuse and self.tiles is not None and dy.rows.shape[0]:
            operands = (dy.rows, self.w2_eDF, self.tiles, h.values, self.weights_R, self.offsets_e)
            options: Any = dict(row_ids_R=dy.row_ids_R, addend=addend)
            return pingpong_activation_bwd(*operands, self.activation, **options)
        da_RF = self._multiply(dy, self.w2_eDF, addend)
        return weighted_activation_bwd(
            h.values, da_RF, self.weights_R, self.row_map.num_rows, self.activation
        )

    def fc1_dgrad(self, dh_RC: Tensor) -> Tensor:
        dh = ProductSource(dh_RC, None)
        return self._multiply(dh, self.w1_eCD, self.low1.compute_addend(dh, is_backward=True))

    def fc1_wgrad(self, rows: Rows, dh_RC: Tensor, target: GradTarget) -> Tensor:
        x = self._choose_source(rows, "wgrad")
        options: Any = dict(row_ids_R=x.row_ids_R, transposed=True, **target._asdict())
        return grouped_wgrad(x.rows, dh_RC, self.offsets_e, **options)

    def fc2_wgrad(self, dy: ProductSource, a_RF: Tensor, target: GradTarget) -> Tensor:
        options: Any = dict(row_ids_R=dy.row_ids_R, **target._asdict())
        return grouped_wgrad(dy.rows, a_RF, self.offsets_e, **options)

    def fc1_update_grad(self, rows: Rows, dh_RC: Tensor) -> LowRankUpdate:
        dh = ProductSource(dh_RC, None, is_finite=True)
        return self.low1.compute_grads(self._choose_source(rows, "wgrad"), dh)

    def fc2_update_grad(self, dy: ProductSource, a_RF: Tensor) -> LowRankUpdate:
        return self.low2.compute_grads(ProductSource(a_RF, None, is_finite=True), dy)

    def drop_weights(self) -> None:
        del self.w1_eCD, self.w2_eDF, self.low1, self.low2

    def _choose_source(self, rows: Rows, matmul: Use) -> ProductSource:
        """Return token rows to gather by id, or already gathered if `matmul` is faster so.

        Rows that are in expert order already are read where they are.
        """
        ids_R, *places = self.row_map
        if self.tiles is None or ids_R is None:
            return ProductSource(rows.widen(), ids_R)
        if rows.scales is not None:
            wide_RD = gather_packed_rows(rows.values, rows.scales, rows.dtype, ids_R, *places)
            return ProductSource(wide_RD, None)
        gathers = self.hidden_dim >= GATHER_FIRST.get(matmul, self.hidden_dim + 1)
        # The kernels that gather while they load add no low-rank update.
        gathers |= matmul in ("fc1", "recompute") and self.low1.update is not None
        if gathers and (self.activation.gated or matmul == "wgrad") and rows.values.shape[0]:
            return ProductSource(gather_used_rows(rows.values, ids_R, *places), None)
        return ProductSource(rows.values, ids_R)

    def _multiply(self, source: ProductSource, b_eKN: Tensor, addend: Addend | None) -> Tensor:
        """Return each expert row times its expert's matrix, plus `addend` (LoRA part or None)."""
        if self.tiles is not None and source.row_ids_R is None:
            if self.low1.can_fuse:
                return cooperative_gemm(source.rows, b_eKN, self.tiles, addend=addend)
            out_RN = cooperative_gemm(source.rows, b_eKN, self.tiles)
        else:
            out_RN = grouped_gemm(source.rows, b_eKN, self.offsets_e, row_ids_R=source.row_ids_R)
        return self.low1.add_product(out_RN, addend)


def find_triton_problem(spec: ExpertSpec) -> str | None:
    """Return an error text if `TritonProducts` cannot compute experts of this spec, or None."""
    other = "use expert_backend='torch'"
    field = spec.find_torch_only_field()
    if field is not None:
        return f"{field} (True) must be False for expert_backend ('triton'): {other}"
    dtypes = (torch.bfloat16, torch.float16)
    problem = spec.find_dtype_problem(dtypes, "expert_backend ('triton')", other)
    if problem is not None:
        return problem
    if INTERPRET and spec.dtypes == {torch.bfloat16}:
        return (
            "dtype of the experts (torch.bfloat16) must be torch.float16 under Triton's "
            "interpreter, which multiplies bf16 wrongly: convert the model"
        )
    if spec.device is not None and not (INTERPRET or has_hopper_kernels(spec.device)):
        return (
            f"device of the experts ({spec.device}) must be a Hopper GPU with Triton for "
            f"expert_backend ('triton'): {other}"
        )
    return spec.find_grouped_problem()
