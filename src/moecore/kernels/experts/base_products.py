"""`Products`, the base class of implementations of the experts' matrix products.

    grouped_products.py  GroupedProducts    over a grouped matmul of torch or Transformer Engine
    triton_products.py   TritonProducts     this package's kernels in 16 bits
    fp8_products.py      BlockwiseProducts  blockwise FP8: kernels on Hopper, references on a CPU

An implementation chooses the formats between its products. The result of a method is therefore only
an argument of other methods of the same object. Letters: as in `contract.py`.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from moecore.kernels.experts.contract import (
    ExpertWeights,
    GradFlags,
    GradTarget,
    LowRankUpdate,
    RowMap,
)
from moecore.kernels.experts.low_rank import LowRankProducts
from moecore.kernels.rows.activation import ActivationOptions, weighted_activation
from moecore.kernels.rows.index import ExpertIndex
from moecore.kernels.rows.record import Rows


class Products(Protocol):
    """FC1, activation, FC2 and their gradients, for one rank's experts in one precision.

    An object is made for one batch (`index` assigns tokens to experts) and one set of weights. In
    the methods, h is FC1's output, a is the activation times routing weights, and a prefix d means
    a gradient. If `has_kernels`, moecore's kernels multiply LoRA updates.
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
