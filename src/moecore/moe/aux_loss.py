"""Auxiliary losses, attached to a layer's output, and the factors of their gradient.

The attachment is the identity in forward. Backward adds the loss's gradient, and adds the loss to
the step's total. A recomputed forward, eval mode and no_grad therefore count no loss, and the
training loop does not add auxiliary losses to its loss.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from moecore.base.params import clean_name
from moecore.base.torch_private import get_autocast_dtype


class LossFactors:
    """Factors on the gradient of a layer's auxiliary losses: scales and the weight of tokens."""

    def __init__(self) -> None:
        self.gradient_scale = 1.0
        self.loss_scale: weakref.ref[Tensor] | None = None  # see `MoEState.set_loss_scale`
        # Micro-batches of all data ranks over those with tokens; None =
        # `MoEState.announce_micro_batches` has not been called in this step.
        self.token_weight: Tensor | None = None

    def apply_token_weight(self, losses: Tensor) -> Tensor:
        """Return losses times `token_weight`; None = 1.

        The weight is the number of micro-batches over the number of micro-batches with tokens.
        """
        return losses if self.token_weight is None else losses * self.token_weight

    def compute_losses_grad(self, losses: Tensor) -> Tensor:
        """Return the gradient of each loss: `gradient_scale` times the loss scale. No host sync."""
        grad = torch.full_like(losses, self.gradient_scale)
        scale = None if self.loss_scale is None else self.loss_scale()
        return grad if scale is None else grad * scale

    def check_loss_scale(self, y: Tensor) -> None:
        """Raise ValueError if the output y is fp16 and auxiliary losses have no loss scale."""
        dtype = get_autocast_dtype(y) or y.dtype
        if dtype == torch.float16 and (self.loss_scale is None or self.loss_scale() is None):
            raise ValueError(
                f"dtype of the layer ({dtype}) must not be fp16 with auxiliary losses, which no "
                "other loss scale reaches: use TrainStep(loss_scale=DynamicLossScale())"
            )


class AuxLoss(LossFactors):
    """The auxiliary loss of a layer other than `MoELayer`, summed over a step's backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.total: Tensor | None = None  # fp32 scalar, changed in place; made by a backward

    @torch.compiler.disable  # its backward counts on the host
    def attach_loss(self, y: Tensor, loss: Tensor) -> Tensor:
        """Return y, whose backward adds `loss` to `total` and runs the loss's backward.

        `loss` is a scalar, computed from this rank's tokens. Raises ValueError for fp16 without a
        loss scale.
        """
        self.check_loss_scale(y)
        return _AttachLoss.apply(y, self.apply_token_weight(loss), self)  # type: ignore[no-any-return]

    def add_to_total(self, loss: Tensor) -> None:
        """Add a micro-batch's loss, a scalar, to the step's total."""
        if self.total is None or self.total.device != loss.device:
            self.total = torch.zeros_like(loss, dtype=torch.float32)
        self.total += loss

    def get_step_total(self, device: torch.device) -> Tensor:
        """Return the loss summed over the step's backwards, fp32 [1]."""
        if self.total is None:
            return torch.zeros(1, device=device, dtype=torch.float32)
        return self.total[None]

    def reset(self) -> None:
        """Set the step's total to 0, and drop `token_weight`."""
        self.token_weight = None
        if self.total is not None:
            self.total.zero_()


class _AttachLoss(torch.autograd.Function):
    """Identity on y. Backward returns the gradient of the loss, and adds it to `owner.total`."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, owner: AuxLoss) -> Tensor:
        """Return a detached y; save the loss, and `owner`, whose `total` the backward changes."""
        ctx.owner = owner
        ctx.save_for_backward(loss)
        return y.detach()  # not a view, as balance's

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradient of y unchanged, and of the loss; add the loss to the total."""
        (loss,) = ctx.saved_tensors
        ctx.owner.add_to_total(loss)
        return grads[0], ctx.owner.compute_losses_grad(loss), None


def list_aux_losses(model: nn.Module) -> dict[str, AuxLoss]:
    """Return module name -> `AuxLoss` for the modules that have an attribute `aux_loss`."""
    losses = ((clean_name(n), getattr(m, "aux_loss", None)) for n, m in model.named_modules())
    return {name: loss for name, loss in losses if isinstance(loss, AuxLoss)}
