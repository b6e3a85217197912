"""Gradient norm and clipping over parameters that live on different meshes.

Every element of every gradient is counted once, on whichever mesh it is sharded or replicated, so
the norm equals that of one process. One all-reduce of one number per parameter, one host sync.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class GradientNorm:
    """The gradient before clipping.

    Attributes:
        total: L2 norm over all parameters; nan or inf when the gradient is not finite.
        non_finite: names of the parameters with a nan or inf gradient on any rank.
    """

    total: float
    non_finite: tuple[str, ...]

    @property
    def finite(self) -> bool:
        """Whether the step's gradient can be used."""
        return not self.non_finite

    def __float__(self) -> float:
        return self.total


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float) -> GradientNorm:
    """Scale all gradients so that their global L2 norm is at most `max_norm`.

    A nan or inf anywhere drops all gradients (sets them to None) on every rank and warns with the
    parameters' names: `optimizer.step()` then changes nothing anywhere, weights and state alike.

    Args:
        model: parallelized or plain; the same on every rank.
        max_norm: > 0; `math.inf` only measures.

    Returns:
        The norm before clipping, the same on every rank.

    Raises:
        ValueError: when `max_norm` is not positive.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm ({max_norm}) must be > 0: use math.inf to only measure")
    # A parameter without a gradient counts 0: a rank that left it out would reduce another length.
    params = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if not params:
        return GradientNorm(0.0, ())
    squares = torch.stack([_norm(p) for _, p in params]).double().square_()
    if _is_distributed(params):
        # A nan must survive the division and the sum, and does.
        copies = [_num_copies(p) for _, p in params]
        squares /= torch.tensor(copies, dtype=torch.float64, device=squares.device)
        dist.all_reduce(squares)
    values = squares.tolist()  # the one host sync of a step
    named = zip((name for name, _ in params), values, strict=True)
    non_finite = tuple(name for name, value in named if not math.isfinite(value))
    total = math.sqrt(sum(values))
    if non_finite:
        _drop_gradients(params, non_finite)
    elif total > max_norm:
        grads = [_local(p.grad) for _, p in params if p.grad is not None]
        torch._foreach_mul_([g for g in grads if g.numel()], max_norm / (total + 1e-6))
    return GradientNorm(total, non_finite)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _norm(param: Tensor) -> Tensor:
    """L2 norm of this rank's part of the gradient, in at least fp32."""
    dtype = torch.promote_types(param.dtype, torch.float32)
    if param.grad is None:
        return torch.zeros((), dtype=dtype, device=_local(param).device)
    return torch.linalg.vector_norm(_local(param.grad), dtype=dtype)


def _is_distributed(params: list[tuple[str, nn.Parameter]]) -> bool:
    return any(isinstance(p, DTensor) for _, p in params)


def _num_copies(param: Tensor) -> int:
    """Return how many ranks hold each element: the world over the ranks that share the tensor."""
    if not isinstance(param, DTensor):
        return dist.get_world_size()
    shards = 1
    for mesh_dim, placement in enumerate(param.placements):
        if not placement.is_replicate():
            shards *= param.device_mesh.size(mesh_dim)
    return dist.get_world_size() // shards


def _drop_gradients(params: list[tuple[str, nn.Parameter]], non_finite: tuple[str, ...]) -> None:
    shown = ", ".join(non_finite[:5]) + (" and more" if len(non_finite) > 5 else "")
    warnings.warn(f"step skipped: non-finite gradient in {shown}", stacklevel=3)
    for _, param in params:
        param.grad = None
