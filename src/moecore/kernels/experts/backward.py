"""The backward of a rank's experts, and the tensors that their forward saves.

Letters: as in `contract.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moecore.kernels.experts.contract import (
    ComputeGrad,
    ExpertWeights,
    GradientSender,
    GradSink,
    GradTarget,
    LowRankUpdate,
    Magnitudes,
    Wants,
)
from moecore.kernels.experts.products import Products
from moecore.kernels.rows.index import ExpertIndex
from moecore.kernels.rows.move import sum_rows_without_autograd
from moecore.kernels.rows.record import Rows
from moecore.kernels.rows.scaling import OperandPair


class Grads(NamedTuple):
    """The gradients that the experts' backward returns; None = not requested, or in a sink."""

    x: Tensor | None = None  # [S, D], or [R, D] of expert rows if the dispatcher sums them
    w1: Tensor | None = None
    w2: Tensor | None = None
    weights: Tensor | None = None  # fp32 [R], of the routing weights
    update1: LowRankUpdate | None = None
    update2: LowRankUpdate | None = None


@dataclass(frozen=True, slots=True)
class SavedState:
    """The tensors that the forward of a rank's experts saves for backward."""

    rows: Rows | None  # the source rows; None = backward fetches them again
    h: Rows | None  # FC1's output; None = backward recomputes FC1
    weights: ExpertWeights  # without biases
    index: ExpertIndex  # which source row each expert row reads

    def list_saved_tensors(self) -> list[Tensor | None]:
        """Return the tensors from which `of` rebuilds this state, without quantised weights."""
        tensors: list[Tensor | None] = []
        for rows in (self.rows, self.h):
            tensors += (None, None) if rows is None else (rows.values, rows.scales)
        weights = self.weights
        return [*tensors, weights.w1_eCD, weights.w2_eDF, *weights.list_updates(), *self.index]

    @classmethod
    def of(
        cls,
        tensors: Sequence[Any],
        dtype: torch.dtype,
        quantised: tuple[OperandPair, OperandPair] | None = None,
        magnitudes: Magnitudes | None = None,
    ) -> SavedState:
        """Rebuild the state from `list_saved_tensors()`; FP8 rows widen to `dtype`.

        `quantised` and `magnitudes` are fields of its weights that the list leaves out.
        """
        x, x_scales, h, h_scales, *of_weights = tensors
        w1_eCD, w2_eDF, *updates = of_weights[:6]
        weights = ExpertWeights(
            w1_eCD=w1_eCD, w2_eDF=w2_eDF, quantised=quantised, magnitudes=magnitudes
        )
        weights, index = weights.replace_updates(updates), of_weights[6:]
        rows, hidden = _make_rows(x, x_scales, dtype), _make_rows(h, h_scales, dtype)
        return cls(rows, hidden, weights, ExpertIndex(*index))


def _make_rows(values: Tensor | None, scales: Tensor | None, dtype: torch.dtype) -> Rows | None:
    """Return the rows, which with scales widen to `dtype`; None if values is None."""
    return None if values is None else Rows(values, scales, None if scales is None else dtype)


def compute_gradients(
    products: Products,
    record: SavedState,
    dy: Tensor | Rows,
    wants: Wants,
    *,
    unsummed: bool,
    sinks: tuple[GradSink | None, GradSink | None] = (None, None),
    sender: GradientSender | None = None,
) -> Grads:
    """Return the gradients that `wants` requests, from the gradient of the experts' output.

    Args:
        products: of the same index and weights as in forward; freed of weights at the end.
        record: the saved tensors; its rows may be None unless FC1 is recomputed or w1 or its update
            has a gradient.
        dy: contiguous [S, D], or [R, D] for expert rows if `unsummed`, which may be quantised. dx
            has the same rows.
        unsummed: whether dy and dx have expert rows, because the dispatcher sums them.
        sinks: of w1 and w2. A gradient that a sink accepts is returned as None.
        sender: receives dx and dweights before the gradients of the matrices are computed.
    """
    gradient = products.prepare_output_grad(dy, unsummed=unsummed, wants=wants)
    h = record.h
    if h is None:
        h = products.recompute_h(products.prepare_rows(_require_rows(record.rows)))
    dh = dweights_R = dx = dw1 = dw2 = update1 = update2 = None
    if wants.x or wants.w1 or wants.weights or wants.update1:
        dh, dweights_R, a = products.activation_bwd(gradient, h)
    else:
        a = products.recompute_activation(h)
    del h
    dweights_R = dweights_R if wants.weights else None
    if sender is not None:
        dx = products.fc1_dgrad(dh)
        sender.start_sending(dx, dweights_R, *products.row_map)
    if wants.update2:
        update2 = products.fc2_update_grad(gradient, a)
    if wants.w2:
        dw2 = _compute_or_accumulate(sinks[1], products.fc2_wgrad, gradient, a)
    del a, gradient
    if wants.update1:
        update1 = products.fc1_update_grad(products.prepare_rows(_require_rows(record.rows)), dh)
    if wants.w1:
        dw1 = _compute_or_accumulate(
            sinks[0], products.fc1_wgrad, products.prepare_rows(_require_rows(record.rows)), dh
        )
    if wants.x and sender is None:
        dx = products.fc1_dgrad(dh)
        if not unsummed:
            dx = sum_rows_without_autograd(dx, *products.row_map)
    products.drop_weights()  # deferred weight gradients may keep the products alive
    return Grads(dx, dw1, dw2, dweights_R, update1, update2)


def _compute_or_accumulate(
    sink: GradSink | None, compute: ComputeGrad, *operands: Any
) -> Tensor | None:
    """Return compute(*operands, GradTarget()), or the sink's result (None if it stores it)."""
    return compute(*operands, GradTarget()) if sink is None else sink.accumulate(compute, *operands)


def _require_rows(rows: Rows | None) -> Rows:
    """Return rows, which must not be None here."""
    assert rows is not None, "the source rows were not fetched again"
    return rows
