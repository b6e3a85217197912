"""`Products`, the base class of implementations of the experts' matrix products.

    grouped_products.py  GroupedProducts    over a grouped matmul of torch or Transformer Engine
    triton_products.py   TritonProducts     this package's kernels in 16 bits
    fp8_products.py      BlockwiseProducts  blockwise FP8: kernels on Hopper, references on a CPU

An implementation chooses the formats between its products. The result of a method is therefore only
an argument of other methods of the same object. Letters: as in `contract.py`; r rank, I and O input
and output dims of a matrix.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor
from torch.nn.functional import grouped_mm

from moecore.kernels.experts.contract import (
    ExpertWeights,
    GradFlags,
    GradTarget,
    LowRankUpdate,
    ProductSource,
    RowMap,
)
from moecore.kernels.grouped.gemm import grouped_gemm
from moecore.kernels.grouped.skeleton import Addend
from moecore.kernels.grouped.wgrad import grouped_wgrad
from moecore.kernels.rows.activation import ActivationOptions, weighted_activation
from moecore.kernels.rows.index import ExpertIndex
from moecore.kernels.rows.record import Rows


class Products(Protocol):
    """FC1, activation, FC2 and their gradients, for one rank's experts in one precision.

    An object is made for one batch (`index` assigns tokens to experts) and one set of weights. In
    the methods, h is FC1's output, a is the activation times routing weights, and a prefix d means
    a gradient. `has_kernels`: moecore's kernels, not torch's, compute the LoRA matmuls.
    """

    # whether `prepare_output_grad` accepts rows that were packed by `pack_rows`, with equal results
    accepts_packed_grads: bool = False
    packs_rows: bool = False  # whether rows are saved in another format than `fc1` reads
    index_cache: Any = None  # a value computed from the index, which backward's products reuse
    activation: ActivationOptions
    weights_R: Tensor
    offsets_e: Tensor
    row_map: RowMap
    low1: LowRankProducts
    low2: LowRankProducts

    def __init__(
        self,
        index: ExpertIndex,
        activation: ActivationOptions,
        weights: ExpertWeights,
        *,
        has_kernels: bool,
    ) -> None:
        self.activation = activation
        self.weights_R, self.offsets_e = index.weights_R, index.offsets_e
        self.row_map = RowMap(index.row_ids_R, index.slots_SK, index.num_rows)
        self.low1 = LowRankProducts(weights.update1, index, has_kernels=has_kernels)
        self.low2 = LowRankProducts(weights.update2, index, has_kernels=has_kernels)

    def prepare_rows(self, rows: Rows) -> Rows:
        """Return token rows in the format that `fc1` reads; by default unchanged."""
        return rows

    def pack_rows(self, rows: Rows) -> Rows:
        """Return rows of `prepare_rows` in the format that is saved for backward."""
        return rows

    def fc1(self, rows: Rows, *, saves_h: bool) -> tuple[Rows | None, Any]:
        """Return FC1's output (None unless `saves_h`), and the activation times routing weights."""

    def fc2(self, a: Any) -> Tensor:
        """Return `a` @ w2^T, FC2's output for each expert row; `a` is the activation from `fc1`."""

    def recompute_h(self, rows: Rows) -> Rows:
        """Return FC1's output before the activation, from the result of `prepare_rows`."""

    def recompute_activation(self, h: Rows) -> Any:
        """Return the activation of FC1's output `h`, times routing weights, as `fc2` reads it."""
        h_RC = h.values if h.scales is None else h.widen()
        return weighted_activation(h_RC, self.weights_R, self.row_map.num_rows, self.activation)

    def prepare_output_grad(
        self, dy: Any, *, has_expert_rows: bool, grad_flags: GradFlags | None = None
    ) -> Any:
        """Return `dy`, the gradient of FC2's output, in the format that the other methods read.

        `dy` is a tensor, or FP8 `Rows` if `accepts_packed_grads`, with a row per token or
        (`has_expert_rows`) per expert row. `grad_flags` are the gradients that backward computes.
        """

    def activation_bwd(self, dy: Any, h: Rows) -> tuple[Any, Tensor, Any]:
        """Return gradients of FC1's output `h` and routing weights (fp32), and the activation."""

    def fc1_dgrad(self, dh: Any) -> Tensor:
        """Return `dh` @ w1, the gradient of FC1's input, with a row per expert row."""

    def fc1_wgrad(self, rows: Rows, dh: Any, target: GradTarget) -> Tensor:
        """Return w1's gradient from FC1's input and output gradient `dh`, written to `target`."""

    def fc2_wgrad(self, dy: Any, a: Any, target: GradTarget) -> Tensor:
        """Return w2's gradient from FC2's input `a` and output gradient, written to `target`."""

    def fc1_update_grad(self, rows: Rows, dh: Any) -> LowRankUpdate:
        """Return gradients of w1's LoRA A and B, from FC1's input and output gradient."""

    def fc2_update_grad(self, dy: Any, a: Any) -> LowRankUpdate:
        """Return gradients of w2's LoRA A and B, from FC2's input and output gradient."""

    def drop_weights(self) -> None:
        """Free matrices and LoRA updates; only `fc1_wgrad` and `fc2_wgrad` may run after."""


class LowRankProducts:
    """The LoRA part of one matrix's matmuls and gradients; if `update` is None, it adds nothing.

        y = x W^T + u B^T      u = x A^T      dx = dy W + v A      v = dy B
        dA = v^T x             dB = dy^T u

    The update W + B A is never formed. u and v have only r columns, the rank, so the update adds
    short products. All of them are in the dtype of the rows, also if the products with W are in
    FP8. If each row uses one of N adapters, the products with A and B run over e * N groups of
    (expert, adapter), and those with W over e experts.
    """

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
