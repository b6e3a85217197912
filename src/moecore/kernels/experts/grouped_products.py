"""The products of a rank's experts over one grouped matmul of expert rows, gathered in memory.

    here                   TorchMatmuls     torch's grouped matmul, any device
    quantised_products.py  ScaledMatmuls    FP8 with a scale per row or per tensor
                           EmulatedMatmuls  MXFP8 and NVFP4
    te_products.py         TEMatmuls        Transformer Engine's

Letters: as in `contract.py`.
"""

from typing import Any, Protocol

from torch import Tensor
from torch.nn.functional import grouped_mm

from moecore.base.transformer_engine import replace_infinities
from moecore.kernels.experts.base_products import Products
from moecore.kernels.experts.contract import (
    MATRICES,
    ExpertWeights,
    GradFlags,
    GradTarget,
    LowRankUpdate,
    Operand,
    ProductSource,
    Role,
)
from moecore.kernels.grouped.wgrad import scale_and_store_grad
from moecore.kernels.rows.activation import (
    ActivationOptions,
    weighted_activation,
    weighted_activation_bwd,
)
from moecore.kernels.rows.index import ExpertIndex
from moecore.kernels.rows.move import gather_rows_without_autograd, zero_rows_without_slot
from moecore.kernels.rows.record import Rows


class Matmuls(Protocol):
    """Grouped matmuls of expert rows with w1 and w2, and their weight gradients."""

    has_low_rank_kernels: bool = False  # whether this package's kernels multiply low-rank updates
    saturates: bool = False  # whether infinities become finite, so that they must be NaN before
    index_cache: Any = None  # as for `Products`
    wants: GradFlags | None = None  # the gradients that the running backward computes

    # return the weighted activation as `multiply` reads it, and its gradients likewise
    activate: Any = staticmethod(weighted_activation)
    activate_bwd: Any = staticmethod(weighted_activation_bwd)

    def multiply(self, rows_RK: Any, operand: Operand) -> Tensor:
        """Return rows of an operand times its matrix per expert: x w1^T, a w2^T, dy w2 or dh w1."""

    def compute_weight_grad(self, dy: Any, x: Any, role: Role, target: GradTarget) -> Tensor:
        """Return each expert's dy^T x, the gradient of w1 or w2 (`role`), written to `target`."""

    packs_rows: bool = False  # whether `pack_rows` changes the format

    def pack_rows(self, rows: Rows) -> Rows:
        """Return rows of FC1's input or output in the format that is saved for backward."""
        return rows

    def drop_weights(self) -> None:
        """Free w1 and w2; only `compute_weight_grad` may be called after this call."""


class TorchMatmuls(Matmuls):
    """`Matmuls` by torch's grouped matmul, on any device."""

    def __init__(self, index: ExpertIndex, weights: ExpertWeights) -> None:
        self.w1_eCD, self.w2_eDF = weights.w1_eCD, weights.w2_eDF
        self.offsets_e = index.offsets_e

    def multiply(self, rows_RK: Tensor, operand: Operand) -> Tensor:
        role, is_backward = MATRICES[operand]
        w_eNK = self.w1_eCD if role == "w1" else self.w2_eDF
        b_eKN = w_eNK if is_backward else w_eNK.transpose(1, 2)
        if not rows_RK.shape[0]:
            return rows_RK.new_empty(0, b_eKN.shape[2])
        return grouped_mm(rows_RK, b_eKN, offs=self.offsets_e)

    def compute_weight_grad(self, dy: Tensor, x: Tensor, role: Role, target: GradTarget) -> Tensor:
        if x.shape[0]:
            grad = grouped_mm(dy.t(), x, offs=self.offsets_e)
        else:
            grad = dy.new_zeros(self.offsets_e.shape[0], dy.shape[1], x.shape[1])
        return scale_and_store_grad(grad, *target)

    def drop_weights(self) -> None:
        del self.w1_eCD, self.w2_eDF


class GroupedProducts(Products):
    """`Products` that gather token rows in expert order, then call grouped matmuls `matmuls`."""

    def __init__(
        self,
        index: ExpertIndex,
        activation: ActivationOptions,
        weights: ExpertWeights,
        matmuls: Matmuls,
    ) -> None:
        super().__init__(index, activation, weights, has_kernels=matmuls.has_low_rank_kernels)
        self.matmuls, self.index_cache = matmuls, matmuls.index_cache
        self.packs_rows = matmuls.packs_rows

    def pack_rows(self, rows: Rows) -> Rows:
        return self.matmuls.pack_rows(rows)

    def fc1(self, rows: Rows, *, saves_h: bool) -> tuple[Rows | None, Any]:
        h = Rows(self._multiply(self._gather_by_expert(rows), "x"))
        activate = self.matmuls.activate if self.low2.update is None else weighted_activation
        a = activate(h.values, self.weights_R, self.row_map.num_rows, self.activation)
        return None if not saves_h else self.pack_rows(h) if self.packs_rows else h, a

    def fc2(self, a: Any) -> Tensor:
        return self._multiply(a, "a")

    def recompute_h(self, rows: Rows) -> Rows:
        h = Rows(self._multiply(self._gather_by_expert(rows), "x"))
        return self.pack_rows(h) if self.packs_rows else h

    def prepare_output_grad(
        self, dy: Tensor, *, has_expert_rows: bool, grad_flags: GradFlags | None = None
    ) -> Tensor:
        """Return FC2's output gradient in expert order: `dy`, gathered unless has_expert_rows."""
        self.matmuls.wants = grad_flags
        if not has_expert_rows:
            return self._gather_by_expert(Rows(dy))
        if self.matmuls.saturates:  # rows of no choice may hold anything
            return replace_infinities(zero_rows_without_slot(dy, self.row_map.slots_SK))
        return dy

    def activation_bwd(self, dy_RD: Tensor, h: Rows) -> tuple[Any, Tensor, Any]:
        da_RF, num_rows = self._multiply(dy_RD, "dy"), self.row_map.num_rows
        is_wide = self.low1.update or self.low2.update  # whose gradients read wide rows
        activate_bwd = weighted_activation_bwd if is_wide else self.matmuls.activate_bwd
        h_RC = h.values if h.scales is None else h.widen()
        return activate_bwd(h_RC, da_RF, self.weights_R, num_rows, self.activation)

    def fc1_dgrad(self, dh: Any) -> Tensor:
        return self._multiply(dh, "dh")

    def fc1_wgrad(self, rows: Rows, dh: Any, target: GradTarget) -> Tensor:
        return self.matmuls.compute_weight_grad(dh, self._gather_by_expert(rows), "w1", target)

    def fc2_wgrad(self, dy_RD: Tensor, a: Any, target: GradTarget) -> Tensor:
        return self.matmuls.compute_weight_grad(dy_RD, a, "w2", target)

    def fc1_update_grad(self, rows: Rows, dh_RC: Tensor) -> LowRankUpdate:
        x = ProductSource(self._gather_by_expert(rows), None)
        return self.low1.compute_grads(x, ProductSource(dh_RC, None, is_finite=True))

    def fc2_update_grad(self, dy_RD: Tensor, a_RF: Tensor) -> LowRankUpdate:
        a = ProductSource(a_RF, None, is_finite=True)
        return self.low2.compute_grads(a, ProductSource(dy_RD, None))

    def drop_weights(self) -> None:
        del self.low1, self.low2
        self.matmuls.drop_weights()

    def _gather_by_expert(self, rows: Rows) -> Tensor:
        """Return token rows in expert order, widened if they are FP8."""
        x_SD = rows.widen()
        if self.matmuls.saturates:
            x_SD = replace_infinities(x_SD)
        ids_R, *places = self.row_map
        return x_SD if ids_R is None else gather_rows_without_autograd(x_SD, ids_R, *places)

    def _multiply(self, rows_RK: Any, operand: Operand) -> Tensor:
        """Return expert rows times their experts' w1 or w2 (as `operand` says), with LoRA."""
        out_RN = self.matmuls.multiply(rows_RK, operand)
        role, is_backward = MATRICES[operand]
        low = self.low1 if role == "w1" else self.low2
        if low.update is None:
            return out_RN
        rows = ProductSource(rows_RK, None)
        return low.add_product(out_RN, low.compute_addend(rows, is_backward=is_backward))
