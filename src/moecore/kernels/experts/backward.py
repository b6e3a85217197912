"""The backward of a rank's experts: six products become three, with H and the activation between.

Letters: as in `contract.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from moecore.kernels.experts.contract import GradientSender, GradTarget
from moecore.kernels.experts.products import Source, TorchProducts
from moecore.kernels.rows.activation import ActivationOptions, weighted_activation
from moecore.kernels.rows.index import ExpertIndex
from moecore.kernels.rows.move import sum_rows_plain
from moecore.kernels.rows.record import Rows


class Wants(NamedTuple):
    """Which gradients are asked for; x is that of source rows, or of expert rows unsummed."""

    x: bool
    w1: bool
    w2: bool
    weights: bool


class Grads(NamedTuple):
    """The gradients; None where not wanted."""

    x: Tensor | None = None
    w1: Tensor | None = None
    w2: Tensor | None = None
    weights: Tensor | None = None


class Saved(NamedTuple):
    """What the forward keeps.

    Attributes:
        values, scales: the source rows' (`Rows`); None where backward refetches them.
        w1_eCD, w2_eDF: the weights.
        row_ids_R, weights_R, slots_SK, offsets_e: the index.
        h_RC: FC1's output; None where FC1 runs again.
    """

    values: Tensor | None
    scales: Tensor | None
    w1_eCD: Tensor
    w2_eDF: Tensor
    row_ids_R: Tensor
    weights_R: Tensor
    slots_SK: Tensor
    offsets_e: Tensor
    h_RC: Tensor | None

    @property
    def rows(self) -> Rows:
        """The source rows."""
        assert self.values is not None, "refetched rows were not put back"
        return Rows(self.values, self.scales, None if self.scales is None else self.w1_eCD.dtype)

    @property
    def expert_index(self) -> ExpertIndex:
        """Which source row each expert row reads."""
        return ExpertIndex(self.row_ids_R, self.weights_R, self.slots_SK, self.offsets_e)


def differentiate(
    products: TorchProducts,
    activation: ActivationOptions,
    saved: Saved,
    dy: Tensor,
    wants: Wants,
    *,
    unsummed: bool,
    targets: tuple[GradTarget, GradTarget] = (GradTarget(), GradTarget()),
    sender: GradientSender | None = None,
) -> Grads:
    """Return the gradients of an output.

    Args:
        products: of the saved index.
        activation: between the two products.
        saved: by the forward.
        dy: contiguous [S, D], or [R, D] when unsummed; dx comes back alike.
        wants: which gradients.
        unsummed: whether dy and dx are those of expert rows.
        targets: where the gradients of w1 and w2 go.
        sender: gets dx and dweights before those of w1 and w2 are computed.
    """
    w1_eCD, w2_eDF, weights_R = saved.w1_eCD, saved.w2_eDF, saved.weights_R
    dy_rows = Source(dy, None) if unsummed else products.source(Rows(dy), "dy")
    h_RC = saved.h_RC
    if h_RC is None:
        x = products.source(saved.rows, "fc1_again")
        h_RC = products.product(x, w1_eCD.transpose(1, 2))
    dh_RC, dweights_R = h_RC, None  # replaced where a gradient needs them
    if wants.x or wants.w1 or wants.weights:
        dh_RC, dweights_R, a_RF = products.activation_bwd(dy_rows, w2_eDF, h_RC, weights_R)
    else:
        a_RF = weighted_activation(h_RC, weights_R, products.where[2], activation)
    dx = dw1 = dw2 = None
    dweights_R = dweights_R if wants.weights else None
    if sender is not None:
        dx = products.rows(dh_RC, w1_eCD)
        sender.start(dx, dweights_R, *products.where)
    if wants.w2:
        dw2 = products.weight_grad(dy_rows, a_RF, False, targets[1])
    del a_RF, dy_rows
    if wants.w1:
        x = products.source(saved.rows, "wgrad")
        dw1 = products.weight_grad(x, dh_RC, True, targets[0])
        del x  # gathered rows, as large as those of dx
    if wants.x and sender is None:
        dx = products.rows(dh_RC, w1_eCD)
        if not unsummed:
            dx = sum_rows_plain(dx, *products.where)
    return Grads(dx, dw1, dw2, dweights_R)
