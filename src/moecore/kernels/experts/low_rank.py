"""Products with a low-rank update of each expert's matrix, W + B A, which is never formed.

    y = x W^T + u B^T      u = x A^T      dx = dy W + v A      v = dy B
    dA = v^T x             dB = dy^T u

u and v have only r columns, so the update adds short products. All of them are in the dtype of the
rows, also if the products with W are in FP8. If each row uses one of N adapters, the products with
A and B run over e * N groups of (expert, adapter), and those with W over e experts.

Letters: as in `contract.py`; r rank, I and O input and output dims of a matrix.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import grouped_mm

from moecore.kernels.experts.contract import LowRankUpdate, ProductSource
from moecore.kernels.grouped.gemm import grouped_gemm
from moecore.kernels.grouped.skeleton import Addend
from moecore.kernels.grouped.wgrad import grouped_wgrad
from moecore.kernels.rows.index import ExpertIndex


class LowRankProducts:
    """The LoRA part of one matrix's matmuls and gradients; if `update` is None, it adds nothing."""

    def __init__(
        self, update: LowRankUpdate | None, index: ExpertIndex, *, has_kernels: bool
    ) -> None:
        self.update, self._has_kernels = update, has_kernels
        # whether kernels that multiply W can add an addend, whose groups are then the experts
        self.can_fuse = index.offsets_g is None
        self._offsets_g = index.offsets_e if index.offsets_g is None else index.offsets_g
        self._addends: dict[bool, Addend] = {}  # by whether it is of the backward

    def compute_addend(
        self, rows: ProductSource | None, *, is_backward: bool = False
    ) -> Addend | None:
        """Return the LoRA part's factors: (x A^T, B^T), in backward (dy B, A); None = no LoRA."""
        if self.update is not None and is_backward not in self._addends:
            a_erI, b_eOr = self.update
            first, second = b_eOr, a_erI
            if not is_backward:
                first, second = a_erI.transpose(1, 2), b_eOr.transpose(1, 2)
            self._addends[is_backward] = Addend(self._multiply(rows, first), second)
        return self._addends.get(is_backward)

    def add_product(self, out_RN: Tensor, addend: Addend | None) -> Tensor:
        """Add the product of the addend's two factors to `out_RN` in place, and return it."""
        if addend is None:
            return out_RN
        if self._has_kernels:
            return grouped_gemm(*addend, self._offsets_g, out=out_RN)
        return out_RN.add_(self._multiply(ProductSource(addend.rows_Rr, None), addend.b_erN))

    def compute_grads(self, x: ProductSource | None, dy: ProductSource | None) -> LowRankUpdate:
        """Return LoRA's gradients of A and B from the matmul's input x and output gradient dy."""
        u, v = self.compute_addend(x), self.compute_addend(dy, is_backward=True)
        assert u is not None and v is not None and x is not None and dy is not None
        u_Rr, v_Rr = (ProductSource(addend.rows_Rr, None, is_finite=True) for addend in (u, v))
        return LowRankUpdate(self._sum_outer_products(v_Rr, x), self._sum_outer_products(dy, u_Rr))

    def _multiply(self, source: ProductSource | None, b_eKN: Tensor) -> Tensor:
        """Return each expert row of `source` times its group's matrix, [expert rows, N]."""
        assert source is not None, "a matrix with an update needs its rows"
        if self._has_kernels:
            ids_R = source.row_ids_R
            return grouped_gemm(source.rows, b_eKN, self._offsets_g, row_ids_R=ids_R)
        rows_RK = source.gather_expert_rows()
        if not rows_RK.shape[0]:
            return rows_RK.new_empty(0, b_eKN.shape[2])
        return grouped_mm(rows_RK, b_eKN, offs=self._offsets_g)

    def _sum_outer_products(self, lhs: ProductSource, rhs: ProductSource) -> Tensor:
        """Return each group's lhs^T rhs over its rows, [e, columns of lhs, columns of rhs]."""
        if self._has_kernels:
            # x, the narrow side of a tile, may be gathered and hold anything past an expert's rows.
            narrower = rhs.rows.shape[1] < lhs.rows.shape[1]
            swaps = lhs.is_finite and (narrower or not rhs.is_finite)
            x, y = (rhs, lhs) if swaps else (lhs, rhs)
            return grouped_wgrad(
                x.rows, y.rows, self._offsets_g, row_ids_R=x.row_ids_R, transposed=swaps
            )
        lhs_RM, rhs_RN = lhs.gather_expert_rows(), rhs.gather_expert_rows()
        if not lhs_RM.shape[0]:
            shape = (self._offsets_g.shape[0], lhs_RM.shape[1], rhs_RN.shape[1])
            return lhs_RM.new_zeros(shape)
        return grouped_mm(lhs_RM.t(), rhs_RN, offs=self._offsets_g)
