"""Low-rank updates in the products of a rank's experts: W + B A per expert, which is never formed.

    y = x W^T + u B^T      u = x A^T      dx = dy W + v A      v = dy B
    dA = v^T x             dB = dy^T u

u and v have r columns: what is added to a product is a short product, and the gradients of A and B
are those of two narrow matrices. All of it is in the dtype of rows, whatever the others are in.

Letters: as in `contract.py`; r rank, I and O what a matrix reads and writes.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn.functional import grouped_mm

from moecore.kernels.experts.contract import ExpertWeights, LowRankUpdate, ProductSource
from moecore.kernels.grouped.gemm import grouped_gemm
from moecore.kernels.grouped.skeleton import Addend
from moecore.kernels.grouped.wgrad import grouped_wgrad

Role = Literal["w1", "w2"]


class LowRankProducts:
    """What the updates of two matrices add to products, and their gradients."""

    def __init__(self, weights: ExpertWeights, offsets_e: Tensor, *, has_kernels: bool) -> None:
        self._updates = {"w1": weights.update1, "w2": weights.update2}
        self._offsets_e, self._has_kernels = offsets_e, has_kernels
        self._narrow: dict[tuple[Role, bool], Tensor] = {}  # u and v, which gradients read again

    def has(self, role: Role) -> bool:
        """Whether a matrix has an update."""
        return self._updates[role] is not None

    def forward(self, role: Role, x: ProductSource) -> Addend | None:
        """Return what is added to the product of x and a matrix; None = nothing."""
        update = self._updates[role]
        return update and Addend(self._u(role, x), update.b_eOr.transpose(1, 2))

    def backward(self, role: Role, dy: ProductSource) -> Addend | None:
        """Return what is added to the input gradient of that product; None = nothing."""
        update = self._updates[role]
        return update and Addend(self._v(role, dy), update.a_erI)

    def add(self, out_RN: Tensor, addend: Addend | None) -> Tensor:
        """Return a product with its addend, added in place."""
        if addend is None:
            return out_RN
        if self._has_kernels:
            return grouped_gemm(*addend, self._offsets_e, out=out_RN)
        return out_RN.add_(self._product(ProductSource(addend.rows_Rr, None), addend.b_erN))

    def grad(
        self, role: Role, x: ProductSource | Tensor, dy: ProductSource | Tensor
    ) -> LowRankUpdate:
        """Return the gradients of A and B; tensors are 0 past the last expert's rows."""
        u_Rr, v_Rr = self._u(role, _source(x)), self._v(role, _source(dy))
        return LowRankUpdate(self._outer(v_Rr, x), self._outer(dy, u_Rr))

    def drop(self) -> None:
        """Drop the updates, and what was computed with them."""
        self._updates.clear()
        self._narrow.clear()

    def _u(self, role: Role, x: ProductSource) -> Tensor:
        return self._kept(role, x, False)

    def _v(self, role: Role, dy: ProductSource) -> Tensor:
        return self._kept(role, dy, True)

    def _kept(self, role: Role, source: ProductSource, is_v: bool) -> Tensor:
        """Return rows times the narrow side, computed once."""
        found, update = self._narrow.get((role, is_v)), self._updates[role]
        if found is None:
            assert update is not None
            b_eKr = update.b_eOr if is_v else update.a_erI.transpose(1, 2)
            found = self._narrow[role, is_v] = self._product(source, b_eKr)
        return found

    def _product(self, source: ProductSource, b_eKN: Tensor) -> Tensor:
        if self._has_kernels:
            rows = source.rows
            return grouped_gemm(rows, b_eKN, self._offsets_e, row_ids_R=source.row_ids_R)
        rows_RK = _gathered(source)
        if not rows_RK.shape[0]:
            return rows_RK.new_empty(0, b_eKN.shape[2])
        return grouped_mm(rows_RK, b_eKN, offs=self._offsets_e)

    def _outer(self, left: ProductSource | Tensor, right: ProductSource | Tensor) -> Tensor:
        """Return the sum of left^T right over each expert's rows, [e, columns, columns]."""
        if not self._has_kernels:
            left_RM, right_RN = _gathered(_source(left)), _gathered(_source(right))
            if not left_RM.shape[0]:
                e = self._offsets_e.shape[0]
                return left_RM.new_zeros(e, left_RM.shape[1], right_RN.shape[1])
            return grouped_mm(left_RM.t(), right_RN, offs=self._offsets_e)
        # The kernel's x may be gathered and hold anything past an expert's rows, its y may not;
        # of two that may be either, the narrow one is x, whose side of a tile is the shorter one.
        swaps = isinstance(right, ProductSource)
        if isinstance(left, Tensor) and isinstance(right, Tensor):
            swaps = right.shape[1] < left.shape[1]
        x, y = (right, left) if swaps else (left, right)
        assert isinstance(y, Tensor)
        x = _source(x)
        ids_R = x.row_ids_R
        return grouped_wgrad(x.rows, y, self._offsets_e, row_ids_R=ids_R, transposed=swaps)


def _source(x: ProductSource | Tensor) -> ProductSource:
    return ProductSource(x, None) if isinstance(x, Tensor) else x


def _gathered(source: ProductSource) -> Tensor:
    ids_R = source.row_ids_R
    return source.rows if ids_R is None else source.rows.index_select(0, ids_R)
