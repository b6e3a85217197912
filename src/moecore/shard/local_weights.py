"""Experts that no other rank holds, edp_shard = edp_replicate = 1: nothing to gather or reduce.

A unit would still copy them: into a buffer to gather, out of it, their gradients into a buffer to
reduce and out of that. What is left without it is its mixed precision: cast the weights before
use, and make gradients of the weights' dtype of the mean over data ranks. Products in FP8 take no
cast: they quantise the weights as they are.

    forward     weight, fp32 -> cast, bf16 -> products
    backward    products -> fp32 sums / data ranks, added to weight.grad in the kernel     (Sink)
                products -> bf16 gradient -> fp32 / data ranks -> autograd        (where it can not)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moecore._autograd import has_gradient_hooks, leaf_of, storage_key, will_run
from moecore.kernels.experts.contract import GradSink, GradTarget
from moecore.kernels.rows.scaled_cast import scaled_cast
from moecore.memory.saved import Handle, packing
from moecore.moe.params import ParamReader, grad_placements, local_param


class WholeWeights(ParamReader):
    """Reads the weights of experts that are whole on this rank.

    Args:
        dtype: of the products; None = the weights' own.
        divisor: of their gradients; see the note "gradient scale" in `shard/apply.py`.
        keep: whether backward finds the cast weights, and the micro-batches of one step that are
            announced share them; else each casts them again.
    """

    def __init__(self, dtype: torch.dtype | None, divisor: float, *, keep: bool) -> None:
        super().__init__(keep=keep)
        self.dtype = dtype
        self.divisor = divisor
        # Storage of a cast weight -> the cast and what it was made of. The cast is held, or the
        # key could become another storage's while this map still has it.
        self._casts: dict[int, tuple[Tensor, Tensor]] = {}

    def read(self, param: nn.Parameter, *, cast: bool = True) -> Tensor:
        """Return this rank's part of a parameter, in the dtype of the products, differentiably."""
        dtype = self.dtype if cast and self.dtype is not None else param.dtype
        if torch.compiler.is_compiling():
            out: Tensor = _Read.apply(local_param(param), dtype, self.divisor, None)
            return out
        local, shared = _local(param), None
        if dtype != local.dtype and self.keep:
            shared = self.copies.get(param, [param], lambda: local.to(dtype).contiguous())
        out = _Read.apply(param, dtype, self.divisor, shared)
        if dtype == local.dtype or self.keep:
            self._made[storage_key(out)] = out
        else:
            self._casts[storage_key(out)] = (out.detach(), local)
        return out

    def sink(self, param: nn.Parameter, matrices: Tensor) -> GradSink | None:
        """Return what adds a gradient to `param.grad`, if that is where autograd would add it."""
        node = matrices.grad_fn
        while node is not None and node.next_functions:
            node = node.next_functions[0][0]
        if node is None or leaf_of(node) is not param:
            return None
        return Sink(param, matrices.shape, node, 1.0 / self.divisor)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Within, what is saved for backward holds parameters in place of their casts."""
        try:
            with packing(self._pack):
                yield
        finally:
            self._casts.clear()
            self._made.clear()

    def _pack(self, tensor: Tensor) -> Handle | None:
        """Return what makes a view of a cast again."""
        found = self._casts.get(storage_key(tensor))
        if found is None:
            return super()._pack(tensor)
        cast, local = found
        assert cast.is_contiguous() and cast.storage_offset() == 0
        return _CastAgain(
            local, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
        )


class _CastAgain(NamedTuple):
    """A view of a weight's cast, which backward makes once more."""

    local: Tensor
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt

    def unpack(self) -> Tensor:
        cast = self.local.to(self.dtype).contiguous()
        return cast.as_strided(self.shape, self.stride, self.offset)


class Sink:
    """Puts a weight's gradient into `param.grad` while it is computed, scaled and not rounded.

    Autograd would round it to the dtype of the products, scale it in a second pass and add it in a
    third. Where anybody else wants to see it (hooks of the parameter, `autograd.grad`, other
    inputs, a graph of the backward), it goes that way. Hooks of autograd's own node are not seen.

    Args:
        param: the weight.
        shape: in which products see this rank's part; the same order in memory.
        node: of autograd, which would add to its gradient.
        scale: of the gradient.
    """

    def __init__(self, param: nn.Parameter, shape: torch.Size, node: Any, scale: float) -> None:
        self.param, self.shape, self.node, self.scale = param, shape, node, scale

    def open(self) -> GradTarget | None:
        """Return where the running backward puts the gradient; None = to autograd."""
        param = self.param
        if torch.is_grad_enabled() or has_gradient_hooks(param) or not will_run(self.node):
            return None
        if param.grad is None:
            return GradTarget(None, param.dtype, self.scale)
        grad = _local(param.grad)
        fits = grad.dtype == param.dtype and grad.is_contiguous() and not param.grad.requires_grad
        if not fits or _placements(param.grad) != grad_placements(param):
            return None
        return GradTarget(grad.view(self.shape), None, self.scale)

    def close(self, grad: Tensor) -> None:
        """Take the gradient that went there."""
        if self.param.grad is None:
            self.param.grad = _like(self.param, grad.view(_local(self.param).shape))


@torch.no_grad()
def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part, without a graph."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _placements(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.placements if isinstance(tensor, DTensor) else ()


def _like(param: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of a rank's part as that of the parameter."""
    if not isinstance(param, DTensor):
        return grad
    return DTensor.from_local(
        grad,
        param.device_mesh,
        grad_placements(param),
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def _whole_sums(param: Tensor, grad: Tensor) -> Tensor:
    """Add the parts that the etp ranks have of what they hold alike (LoRA's A and B)."""
    if not isinstance(param, DTensor) or grad.placements == param.placements:  # type: ignore[attr-defined]
        return grad
    found: Tensor = grad.redistribute(placements=param.placements)  # type: ignore[attr-defined]
    return found


class _Read(torch.autograd.Function):
    """Cast forward; backward casts the gradient to the weight's dtype and divides it."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, dtype: torch.dtype, divisor: float, cast: Tensor | None
    ) -> Tensor:
        ctx.set_materialize_grads(False)  # a sink has taken it: nothing is added here, not zeros
        ctx.weight, ctx.divisor = weight, divisor
        if cast is not None:
            return cast.detach()
        local = _local(weight)
        return local.view_as(local) if local.dtype == dtype else local.to(dtype).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad, weight = grads[0], ctx.weight
        if grad is None:
            return None, None, None, None
        if grad.dtype != weight.dtype or ctx.divisor != 1.0:
            grad = scaled_cast(grad, weight.dtype, 1.0 / ctx.divisor)
        return _whole_sums(weight, _like(weight, grad)), None, None, None
