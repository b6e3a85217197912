"""Products of a rank's experts by this package's kernels, in 16 bits.

A kernel gathers source rows while it loads them, or they are gathered beforehand where that is
faster. A gather moves R * D elements whatever F is; the product that it speeds up grows with F.

Letters: as in `contract.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moecore.kernels.common import INTERPRET, has_hopper_kernels
from moecore.kernels.experts.contract import (
    ExpertSpec,
    GradTarget,
    ProductSource,
)
from moecore.kernels.experts.torch_products import TorchProducts, Use
from moecore.kernels.grouped.cooperative import cooperative_activation, cooperative_gemm
from moecore.kernels.grouped.gemm import grouped_gemm, grouped_gemm_activation
from moecore.kernels.grouped.pingpong import pingpong_activation_bwd
from moecore.kernels.grouped.skeleton import Addend
from moecore.kernels.grouped.wgrad import grouped_wgrad
from moecore.kernels.rows.index import ExpertIndex
from moecore.kernels.rows.move import gather_used_rows
from moecore.kernels.rows.packed import gather_packed_rows
from moecore.kernels.rows.record import Rows
from moecore.kernels.rows.row_tiles import RowTiles, map_row_tiles

# Smallest F for which rows are gathered before a product: "gather first", docs/findings/kernels.md
GATHER_FIRST: dict[Use, int] = {
    "fc1": 512,  # X, for FC1 and its gated activation
    "dy": 1024,  # dY, for FC2's input gradient under a gated activation and its weight gradient
    "wgrad": 2048,  # X, for FC1's weight gradient
}


class TritonProducts(TorchProducts):
    """Triton kernels that gather while they load: what the interpreter runs, and empty inputs."""

    has_kernels = True

    @staticmethod
    def supports(spec: ExpertSpec) -> str | None:
        field = spec.not_plain()
        if field is not None:
            return (
                f"{field} (True) must be False for expert_backend ('triton'): use "
                "expert_backend='torch'"
            )
        if spec.dtypes is not None and spec.dtypes not in ({torch.bfloat16}, {torch.float16}):
            shown = ", ".join(sorted(str(dtype) for dtype in spec.dtypes))
            return (
                f"dtype of the experts ({shown}) must be torch.bfloat16 or torch.float16 for "
                "expert_backend ('triton'): convert the model or use expert_backend='torch'"
            )
        if INTERPRET and spec.dtypes == {torch.bfloat16}:
            return (
                "dtype of the experts (torch.bfloat16) must be torch.float16 under Triton's "
                "interpreter, which multiplies bf16 wrongly: convert the model"
            )
        if spec.device is not None and not (INTERPRET or has_hopper_kernels(spec.device)):
            return (
                f"device of the experts ({spec.device}) must be a Hopper GPU with Triton for "
                "expert_backend ('triton'): use expert_backend='torch'"
            )
        return spec.ungrouped()

    def _source(self, rows: Rows, use: Use) -> ProductSource:
        """Return source rows, which the kernels gather."""
        return ProductSource(rows.widen(), self.where[0])

    def _fc1(self, x: ProductSource, addend: Addend | None) -> tuple[Tensor, Tensor]:
        """Return H and the weighted activation, which a gated one's kernel computes with it."""
        if x.row_ids_R is None or not self.activation.gated or addend is not None:
            return super()._fc1(x, addend)
        where = (x.row_ids_R, self.weights_R, self.offsets_e)
        return grouped_gemm_activation(x.rows, self.w1_eCD, *where, self.activation)

    def _product(self, source: ProductSource, b_eKN: Tensor, addend: Addend | None) -> Tensor:
        if source.row_ids_R is None:
            return self._rows(source.rows, b_eKN, addend)
        out = grouped_gemm(source.rows, b_eKN, self.offsets_e, row_ids_R=source.row_ids_R)
        return self.low1.add(out, addend)

    def _rows(self, a_RK: Tensor, b_eKN: Tensor, addend: Addend | None) -> Tensor:
        return self.low1.add(grouped_gemm(a_RK, b_eKN, self.offsets_e), addend)

    def _weight_grad(
        self, source: ProductSource, y_RN: Tensor, transposed: bool, target: GradTarget
    ) -> Tensor:
        return grouped_wgrad(
            source.rows,
            y_RN,
            self.offsets_e,
            row_ids_R=source.row_ids_R,
            transposed=transposed,
            out=target.out,
            adds=target.adds,
            dtype=target.dtype,
            scale=target.scale,
        )


class HopperProducts(TritonProducts):
    """Gluon kernels for Hopper over a map of row tiles, and Triton's where those gather better."""

    def __init__(self, index: ExpertIndex, *how: Any, of_index: RowTiles | None = None) -> None:
        super().__init__(index, *how)
        self.hidden_dim = self.w2_eDF.shape[2]
        length = index.row_ids_R.shape[0]
        self.of_index = self.tiles = of_index or map_row_tiles(index.offsets_e, length)

    def activation_bwd(self, dy: ProductSource, h: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """Return dH, the weights' gradients and the activation, a gated one's in one pass."""
        if not self.activation.gated or not dy.rows.shape[0]:
            return super().activation_bwd(dy, h)
        where = (self.tiles, h.values, self.weights_R, self.offsets_e)
        addend = self.low2.backward(dy)
        how = (*where, self.activation)
        return pingpong_activation_bwd(
            dy.rows, self.w2_eDF, *how, row_ids_R=dy.row_ids_R, addend=addend
        )

    def _source(self, rows: Rows, use: Use) -> ProductSource:
        """Return source rows, or gathered ones where the product is faster by more than that."""
        if rows.scales is not None:
            wide = (rows.values, rows.scales, rows.dtype)
            return ProductSource(gather_packed_rows(*wide, *self.where), None)
        gathers = self.hidden_dim >= GATHER_FIRST.get(use, self.hidden_dim + 1)
        # Those that gather while they load add no low-rank update.
        gathers |= use in ("fc1", "fc1_again") and self.low1.update is not None
        if gathers and (self.activation.gated or use == "wgrad") and rows.values.shape[0]:
            return ProductSource(gather_used_rows(rows.values, *self.where), None)
        return ProductSource(rows.values, self.where[0])

    def _fc1(self, x: ProductSource, addend: Addend | None) -> tuple[Tensor, Tensor]:
        if x.row_ids_R is not None or not self.activation.gated:
            return super()._fc1(x, addend)
        where = (self.tiles, self.weights_R, self.activation)
        return cooperative_activation(x.rows, self.w1_eCD, *where, addend=addend)

    def _rows(self, a_RK: Tensor, b_eKN: Tensor, addend: Addend | None) -> Tensor:
        return cooperative_gemm(a_RK, b_eKN, self.tiles, addend=addend)
