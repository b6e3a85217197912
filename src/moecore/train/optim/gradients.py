"""The closure, the gradients and the scale of gradients, which optimizer steps read."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def run_closure(closure: Callable[[], Any] | None) -> Any:
    """Return `closure()`, called with gradients enabled; None without a closure."""
    with torch.enable_grad():
        return None if closure is None else closure()


def get_grad(param: Tensor) -> Tensor:
    """Return `param.grad` in the parameter's placements; ValueError if it is sparse or complex."""
    grad = param.grad
    assert grad is not None, "the caller skips parameters without one"
    if grad.is_sparse or not param.is_floating_point():
        raise ValueError(
            f"the gradient of a parameter {tuple(param.shape)} must be dense and real: use an "
            "optimizer of torch for it"
        )
    if isinstance(param, DTensor) and grad.placements != param.placements:  # type: ignore[attr-defined]
        grad = grad.redistribute(placements=param.placements)  # type: ignore[attr-defined]
    return grad  # it may have been a partial sum


def get_scale_signals(
    optimizer: torch.optim.Optimizer, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Return `optimizer.grad_scale` and `optimizer.found_inf` as scalars on `device`, or None.

    Clipping sets both. A step divides gradients by grad_scale, and is skipped if found_inf > 0.
    """
    signals = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
    grad_scale, found_inf = (None if x is None else x.to(device).view(()) for x in signals)
    return grad_scale, found_inf
