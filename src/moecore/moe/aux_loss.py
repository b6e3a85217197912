"""Auxiliary losses, attached to a layer's output, and the factors of their gradient.

The attachment is the identity in forward. Backward adds the loss's gradient, and adds the loss to
the step's total. A recomputed forward, eval mode and no_grad therefore count no loss, and the
training loop does not add auxiliary losses to its loss.
"""

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from moecore.base.params import clean_name
from moecore.base.torch_private import get_autocast_dtype


class LossFactors:
    """Factors on a layer's auxiliary losses: gradient scale, loss scale, and token weight."""

    def __init__(self) -> None:
        self.gradient_scale = 1.0
        self.loss_scale: weakref.ref[Tensor] | None = None  # see `MoEState.set_loss_scale`
        # Micro-batches of all data ranks over those with tokens, for the decoder and for each
        # further prediction; None = `MoEState.announce_micro_batches` has not been called in this
        # step.
        self.token_weight: Tensor | None = None

    def compute_losses_grad(self, losses: Tensor) -> Tensor:
        """Return the gradient of each loss, `gradient_scale` * loss scale. No host sync."""
        grad = torch.full_like(losses, self.gradient_scale)
        scale = None if self.loss_scale is None else self.loss_scale()
        return grad if scale is None else grad * scale

    def check_loss_scale(self, y: Tensor) -> None:
        """Raise ValueError if the layer's output y is fp16 and no loss scale is set."""
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
    def attach_loss(self, y: Tensor, loss: Tensor, depth: int = 0) -> Tensor:
        """Return y; its backward adds the scalar `loss` to `total` and runs the backward of `loss`.

        `depth` is 0, or k in the k-th multi-token prediction. Raises ValueError if y is fp16 and no
        loss scale is set.
        """
        self.check_loss_scale(y)
        if self.token_weight is not None:
            loss = loss * self.token_weight[depth]
        return _AttachLoss.apply(y, loss, self)  # type: ignore[no-any-return]

    def get_step_total(self, device: torch.device) -> Tensor:
        """Return the loss summed over the step's backwards, fp32 [1]."""
        if self.total is None:
            return torch.zeros(1, device=device, dtype=torch.float32)
        return self.total[None]

    def reset(self) -> None:
        """Set the step's total to 0 and `token_weight` to None."""
        self.token_weight = None
        if self.total is not None:
            self.total.zero_()


class _AttachLoss(torch.autograd.Function):
    """Identity on y. Backward returns the gradient of the loss, and adds it to `owner.total`."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, owner: AuxLoss) -> Tensor:
        ctx.owner = owner
        ctx.save_for_backward(loss)
        return y.detach()  # not a view, as balance's

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (loss,), owner = ctx.saved_tensors, ctx.owner
        if owner.total is None or owner.total.device != loss.device:
            owner.total = torch.zeros_like(loss, dtype=torch.float32)
        owner.total += loss
        return grads[0], owner.compute_losses_grad(loss), None


def list_aux_losses(model: nn.Module) -> dict[str, AuxLoss]:
    """Return module name -> `AuxLoss`, for modules that have an attribute `aux_loss`."""
    losses = ((clean_name(n), getattr(m, "aux_loss", None)) for n, m in model.named_modules())
    return {name: loss for name, loss in losses if isinstance(loss, AuxLoss)}
