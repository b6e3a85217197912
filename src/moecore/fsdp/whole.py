"""Experts that no other rank holds, edp_shard = edp_replicate = 1: nothing to gather or reduce.

FSDP2 would still copy them: into a buffer to gather, out of it, their gradients into a buffer to
reduce and out of that. What is left without it is its mixed precision: cast the weights before
use, and make fp32 gradients of the mean over data ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from moecore.kernels.scaled_cast import scaled_cast
from moecore.moe.params import ParamReader, local_param


class WholeWeights(ParamReader):
    """Reads the weights of experts that are whole on this rank.

    Args:
        dtype: of the products; None = the weights' own.
        divisor: of their gradients; see the note "gradient scale" in `fsdp/shard.py`.
        keep: whether backward finds the cast weights; else it casts them again.
    """

    def __init__(self, dtype: torch.dtype | None, divisor: float, *, keep: bool) -> None:
        self.dtype = dtype
        self.divisor = divisor
        self.keep = keep
        self._cast: dict[int, Tensor] = {}  # address of a cast weight -> what it was made of

    def read(self, param: nn.Parameter) -> Tensor:
        """Return this rank's part of a parameter, in the dtype of the products, differentiably."""
        local = local_param(param)
        out: Tensor = _Read.apply(local, self.dtype or local.dtype, self.divisor)
        if out.dtype != local.dtype:
            self._cast[out.untyped_storage().data_ptr()] = local.detach()
        return out

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Within, what is saved for backward holds parameters in place of their casts."""
        cast = self._cast = {}

        def pack(tensor: Tensor) -> Any:
            local = None if self.keep else cast.get(tensor.untyped_storage().data_ptr())
            return tensor if local is None else (local, tensor.dtype, tensor.shape, tensor.stride())

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            local, dtype, shape, stride = packed
            return local.to(dtype).as_strided(shape, stride)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
        self._cast = {}


class _Read(torch.autograd.Function):
    """Cast forward; backward casts the gradient to the weight's dtype and divides it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype, divisor: float) -> Tensor:
        ctx.dtype, ctx.divisor = weight.dtype, divisor
        return weight.view_as(weight) if weight.dtype == dtype else weight.to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if grads[0].dtype == ctx.dtype and ctx.divisor == 1.0:
            return grads[0], None, None
        return scaled_cast(grads[0], ctx.dtype, 1.0 / ctx.divisor), None, None
