"""The backward of a rank's experts, and the tensors that their forward saves.

Letters: as in `contract.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from moecore.kernels.experts.base_products import Products
from moecore.kernels.experts.contract import (
    ComputeGrad,
    ExpertWeights,
    GradFlags,
    GradientSender,
    GradSink,
    GradTarget,
    Magnitudes,
)
from moecore.kernels.rows.index import ExpertIndex
from moecore.kernels.rows.move import sum_rows_without_autograd
from moecore.kernels.rows.record import Rows
from moecore.kernels.rows.scaling import OperandPair


class Grads(NamedTuple):
    """Gradients from the experts' backward; None = not requested, or given to a `GradSink`."""

    x: Tensor | None = None  # [S, D], or [R, D] of expert rows if the dispatcher sums them
    w1_eCD: Tensor | None = None
    w2_eDF: Tensor | None = None
    weights_R: Tensor | None = None  # fp32, of the routing weights
    # A and B of the low-rank updates
    a1_erD: Tensor | None = None
    b1_eCr: Tensor | None = None
    a2_erF: Tensor | None = None
    b2_eDr: Tensor | None = None


@dataclass(frozen=True, slots=True)
class SavedState:
    """The tensors that the forward of a rank's experts saves for backward."""

    rows: Rows | None  # the source rows; None = backward fetches them again
    h: Rows | None  # FC1's output; None = backward recomputes FC1
    weights: ExpertWeights  # without biases
    index: ExpertIndex  # which source row each expert row reads

    def list_saved_tensors(self) -> list[Tensor | None]:
        """Return all saved tensors except quantised weights, as a list for `from_tensors`."""
        tensors: list[Tensor | None] = []
        for rows in (self.rows, self.h):
            tensors += (None, None) if rows is None else (rows.values, rows.scales)
        weights = self.weights
        return [*tensors, weights.w1_eCD, weights.w2_eDF, *weights.list_updates(), *self.index]

    @classmethod
    def from_tensors(
        cls,
        tensors: Sequence[Any],
        dtype: torch.dtype,
        quantised: tuple[OperandPair, OperandPair] | None = None,
        magnitudes: Magnitudes | None = None,
    ) -> Self:
        """Rebuild the state from the result of `list_saved_tensors`; matmuls compute in `dtype`."""
        x, x_scales, h, h_scales, w1_eCD, w2_eDF, *tail = tensors
        matrices: Any = dict(w1_eCD=w1_eCD, w2_eDF=w2_eDF)
        weights = ExpertWeights(**matrices, quantised=quantised, magnitudes=magnitudes)
        return cls(
            None if x is None else Rows(x, x_scales, dtype),
            None if h is None else Rows(h, h_scales, dtype),
            weights.replace_updates(tail[:4]),
            ExpertIndex(*tail[4:]),
        )


def compute_gradients(
    products: Products,
    state: SavedState,
    dy: Tensor | Rows,
    grad_flags: GradFlags,
    *,
    has_expert_rows: bool,
    sinks: tuple[GradSink | None, GradSink | None] = (None, None),
    sender: GradientSender | None = None,
) -> Grads:
    """Return the gradients that `grad_flags` requests, from the gradient of the experts' output.

    Args:
        products: made from the same index and weights as in forward. Its weights are freed.
        state: `state.rows` may be None if FC1 is not recomputed, and neither w1 nor its LoRA update
            has a gradient.
        dy: contiguous, maybe in FP8. The gradient of the input has the same rows.
        has_expert_rows: whether dy has a row per expert row, not per token.
        sinks: receive the gradients of w1 and w2 in place of autograd, which gets None.
        sender: receives gradients of rows and routing weights before w1's and w2's are computed.
    """
    grad = products.prepare_output_grad(dy, has_expert_rows=has_expert_rows, grad_flags=grad_flags)
    h = state.h
    has_update1, has_update2 = any(grad_flags[4:6]), any(grad_flags[6:8])
    if h is None:
        h = products.recompute_h(_prepare_rows(products, state))
    dh = dweights_R = dx = dw1 = dw2 = None
    update1: tuple[Tensor | None, Tensor | None] = (None, None)
    update2 = update1
    if grad_flags.x or grad_flags.w1_eCD or grad_flags.weights_R or has_update1:
        dh, dweights_R, a = products.activation_bwd(grad, h)
    else:
        a = products.recompute_activation(h)
    del h
    dweights_R = dweights_R if grad_flags.weights_R else None
    if sender is not None:
        dx = products.fc1_dgrad(dh)
        sender.start_sending(dx, dweights_R, *products.row_map)
    if has_update2:
        update2 = products.fc2_update_grad(grad, a)
    if grad_flags.w2_eDF:
        dw2 = _compute_grad(sinks[1], products.fc2_wgrad, grad, a)
    del a, grad
    if has_update1:
        update1 = products.fc1_update_grad(_prepare_rows(products, state), dh)
    if grad_flags.w1_eCD:
        x = _prepare_rows(products, state)
        dw1 = _compute_grad(sinks[0], products.fc1_wgrad, x, dh)
    if grad_flags.x and sender is None:
        dx = products.fc1_dgrad(dh)
        if not has_expert_rows:
            dx = sum_rows_without_autograd(dx, *products.row_map)
    products.drop_weights()  # deferred weight gradients may keep the products alive
    return Grads(dx, dw1, dw2, dweights_R, *update1, *update2)


def _compute_grad(sink: GradSink | None, compute: ComputeGrad, *operands: Any) -> Tensor | None:
    """Return a weight's gradient by `compute`, or with a sink the result of `sink.accumulate`."""
    return compute(*operands, GradTarget()) if sink is None else sink.accumulate(compute, *operands)


def _prepare_rows(products: Products, state: SavedState) -> Rows:
    """Return the source rows in the format in which `products` save them."""
    assert state.rows is not None, "the source rows were not fetched again"
    rows = products.prepare_rows(state.rows)
    return products.pack_rows(rows) if products.packs_rows else rows
