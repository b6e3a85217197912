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

from moecore._compat import has_saved_tensor_hooks
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
        # Address of a cast weight -> the cast and what it was made of. The cast is held, or the
        # address could become another tensor's while this map still knows it.
        self._casts: dict[int, tuple[Tensor, Tensor]] = {}

    def read(self, param: nn.Parameter) -> Tensor:
        """Return this rank's part of a parameter, in the dtype of the products, differentiably."""
        local = local_param(param)
        out: Tensor = _Read.apply(local, self.dtype or local.dtype, self.divisor)
        if out.dtype != local.dtype and not self.keep:
            self._casts[_address(out)] = (out.detach(), local.detach())
        return out

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Within, what is saved for backward holds parameters in place of their casts.

        Not where somebody else decides what is saved (activation checkpointing, offload): torch
        asks the innermost hooks alone, so all of the experts' activations would be kept.
        """
        if has_saved_tensor_hooks():
            yield
            self._casts.clear()
            return
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
                yield
        finally:
            self._casts.clear()

    def _pack(self, tensor: Tensor) -> Any:
        """Return the tensor, or of a view of a cast what makes it again."""
        found = self._casts.get(_address(tensor))
        if found is None:
            return tensor
        cast, local = found
        assert cast.is_contiguous() and cast.storage_offset() == 0
        return local, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    local, dtype, *view = packed
    return local.to(dtype).contiguous().as_strided(*view)


class _Read(torch.autograd.Function):
    """Cast forward; backward casts the gradient to the weight's dtype and divides it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype, divisor: float) -> Tensor:
        ctx.dtype, ctx.divisor = weight.dtype, divisor
        return weight.view_as(weight) if weight.dtype == dtype else weight.to(dtype).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if grads[0].dtype == ctx.dtype and ctx.divisor == 1.0:
            return grads[0], None, None
        return scaled_cast(grads[0], ctx.dtype, 1.0 / ctx.divisor), None, None
