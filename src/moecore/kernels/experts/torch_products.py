"""Products of a rank's experts by torch's grouped product, around gathers in memory.

Letters: as in `contract.py`.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor
from torch.nn.functional import grouped_mm

from moecore.kernels.experts.contract import (
    ExpertSpec,
    ExpertWeights,
    GradTarget,
    LowRankUpdate,
    ProductSource,
    Wants,
)
from moecore.kernels.experts.low_rank import LowRankProducts
from moecore.kernels.grouped.skeleton import Addend
from moecore.kernels.grouped.wgrad import put_grad
from moecore.kernels.rows.activation import (
    ActivationOptions,
    weighted_activation,
    weighted_activation_bwd,
)
from moecore.kernels.rows.index import ExpertIndex
from moecore.kernels.rows.move import gather_rows_plain
from moecore.kernels.rows.record import Rows

Use = Literal["fc1", "fc1_again", "dy", "wgrad"]
Role = Literal["w1", "w2"]


class TorchProducts:
    """The contract is `products.Products`. Any strides, any device; a subclass has kernels."""

    has_kernels = False  # for products with low-rank updates
    takes_packed = False
    # see the contract
    of_index: Any = None
    wants: Wants | None = None

    def __init__(
        self, index: ExpertIndex, activation: ActivationOptions, weights: ExpertWeights
    ) -> None:
        self.activation = activation
        self.w1_eCD, self.w2_eDF = weights.w1_eCD, weights.w2_eDF
        self.where = (index.row_ids_R, index.slots_SK, index.num_rows)
        self.weights_R, self.offsets_e = index.weights_R, index.offsets_e
        how = dict(has_kernels=self.has_kernels)
        self.low1 = LowRankProducts(weights.update1, index.offsets_e, **how)
        self.low2 = LowRankProducts(weights.update2, index.offsets_e, **how)

    @staticmethod
    def supports(spec: ExpertSpec) -> str | None:
        return spec.ungrouped()

    def as_kept(self, rows: Rows) -> Rows:
        return rows

    def fc1(self, rows: Rows, *, keep: bool) -> tuple[Rows | None, Tensor]:
        x = self._source(rows, "fc1")
        h_RC, a_RF = self._fc1(x, self.low1.forward(x))
        return Rows(h_RC) if keep else None, a_RF

    def fc1_again(self, rows: Rows) -> Rows:
        x = self._source(rows, "fc1_again")
        return Rows(self._product(x, self._matrix("w1"), self.low1.forward(x)))

    def activation_again(self, h: Rows) -> Tensor:
        return weighted_activation(h.values, self.weights_R, self.where[2], self.activation)

    def fc2(self, a_RF: Tensor) -> Tensor:
        return self._rows(a_RF, self._matrix("w2"), self.low2.forward(ProductSource(a_RF, None)))

    def dy(self, dy: Tensor, *, unsummed: bool) -> ProductSource:
        return ProductSource(dy, None) if unsummed else self._source(Rows(dy), "dy")

    def activation_bwd(self, dy: ProductSource, h: Rows) -> tuple[Tensor, Tensor, Tensor]:
        da_RF = self._product(dy, self._matrix("w2", backward=True), self.low2.backward(dy))
        where = (self.weights_R, self.where[2], self.activation)
        return weighted_activation_bwd(h.values, da_RF, *where)

    def fc1_bwd(self, dh_RC: Tensor) -> Tensor:
        addend = self.low1.backward(ProductSource(dh_RC, None))
        return self._rows(dh_RC, self._matrix("w1", backward=True), addend)

    def fc1_wgrad(self, rows: Rows, dh_RC: Tensor, target: GradTarget) -> Tensor:
        return self._weight_grad(self._source(rows, "wgrad"), dh_RC, True, target)

    def fc2_wgrad(self, dy: ProductSource, a_RF: Tensor, target: GradTarget) -> Tensor:
        return self._weight_grad(dy, a_RF, False, target)

    def fc1_update_grad(self, rows: Rows, dh_RC: Tensor) -> LowRankUpdate:
        dh = ProductSource(dh_RC, None, is_finite=True)
        return self.low1.grad(self._source(rows, "wgrad"), dh)

    def fc2_update_grad(self, dy: ProductSource, a_RF: Tensor) -> LowRankUpdate:
        return self.low2.grad(ProductSource(a_RF, None, is_finite=True), dy)

    def drop_weights(self) -> None:
        del self.w1_eCD, self.w2_eDF, self.low1, self.low2

    def _matrix(self, role: Role, *, backward: bool = False) -> Any:
        """Return a matrix of every expert, as `_rows` multiplies rows by it."""
        w_eNK = self.w1_eCD if role == "w1" else self.w2_eDF
        return w_eNK if backward else w_eNK.transpose(1, 2)

    def _source(self, rows: Rows, use: Use) -> ProductSource:
        """Return rows for a product, gathered here; quantised ones come out wide."""
        return ProductSource(gather_rows_plain(rows.widen(), *self.where), None)

    def _fc1(self, x: ProductSource, addend: Addend | None) -> tuple[Tensor, Tensor]:
        h_RC = self._product(x, self._matrix("w1"), addend)
        return h_RC, self.activation_again(Rows(h_RC))

    def _product(self, source: ProductSource, b_eKN: Tensor, addend: Addend | None) -> Tensor:
        """Return each expert row's source row times its expert's matrix, and the addend."""
        return self._rows(source.rows, b_eKN, addend)

    def _rows(self, a_RK: Tensor, b_eKN: Tensor, addend: Addend | None) -> Tensor:
        """Return each expert row times its expert's matrix, and the addend."""
        if not a_RK.shape[0]:
            return a_RK.new_empty(0, b_eKN.shape[2])
        return self.low1.add(grouped_mm(a_RK, b_eKN, offs=self.offsets_e), addend)

    def _weight_grad(
        self, source: ProductSource, y_RN: Tensor, transposed: bool, target: GradTarget
    ) -> Tensor:
        """Put the gradient of a matrix [e, M, N], or transposed, at the target; return it."""
        left, right = (y_RN, source.rows) if transposed else (source.rows, y_RN)
        if source.rows.shape[0]:
            grad = grouped_mm(left.t(), right, offs=self.offsets_e)
        else:
            grad = left.new_zeros(self.offsets_e.shape[0], left.shape[1], right.shape[1])
        return put_grad(grad, target.out, target.adds, target.dtype, target.scale)
