"""Linears in the dtype of their weight, whose weight gradients may be left for later.

    y = x @ weight^T + bias
    backward     dx = dy @ weight       dbias = sum of dy
    now, or      dweight = dy^T @ x     by autograd as of any linear, or later by the weight's sink
    later

Forward and gradients have the bits of `F.linear`, which runs where nothing can defer (no sink,
compilers, dispatch modes, no gradients). Deferring is asked for, because it costs host time in
each forward; routed experts always can.

Letters: T tokens, K input features, N output features.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moecore.base.regions import as_product
from moecore.base.torch_names import autocast_dtype, is_plain_eager
from moecore.kernels.experts.contract import GradSink, GradTarget, sink_of
from moecore.kernels.grouped.wgrad import put_grad
from moecore.moe.params import local_param


class Linear(nn.Linear):
    """x @ weight^T without bias, whatever the layout of the weight.

    Args:
        in_dim: columns of the weight.
        out_dim: rows of the weight.
        tp_shard_dim: dim of the weight that tensor parallelism cuts; None = none.
        residual: the output is added to the residual stream (smaller initial values).
        dtype: dtype of the weight.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        *,
        tp_shard_dim: int | None = None,
        residual: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_dim, out_dim, bias=False, dtype=dtype)
        self.tp_shard_dim = tp_shard_dim
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] in the dtype of x."""
        return F.linear(x, local_param(self.weight))


def deferred_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight^T + bias.

    Args:
        x: [..., K], a plain tensor.
        weight: parameter [N, K], or this rank's part of a DTensor.
        bias: parameter [N].
    """
    if is_plain_eager():
        y: Tensor = as_product(_multiply, x, weight, bias)
        return y
    return F.linear(x, local_param(weight), None if bias is None else local_param(bias))


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    weight_NK = local_param(weight)
    bias_N = None if bias is None else local_param(bias)
    sink = sink_of(weight, weight_NK.shape)
    if sink is None:
        return F.linear(x, weight_NK, bias_N)
    dtype = autocast_dtype(x)
    if dtype is not None:
        x, weight_NK = x.to(dtype), weight_NK.to(dtype)
        bias_N = None if bias_N is None else bias_N.to(dtype)
    y: Tensor = _Linear.apply(x, weight_NK, bias_N, sink)
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, sink: GradSink
    ) -> Tensor:
        wants_x, wants_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if wants_weight else None, weight_NK if wants_x else None)
        ctx.sink = sink
        return F.linear(x, weight_NK, bias_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_NK = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        dx = dweight_NK = None
        dy = grads[0]
        dy_TN = dy.reshape(-1, dy.shape[-1])
        if wants_x:
            dx = dy_TN.mm(weight_NK).view(*dy.shape[:-1], weight_NK.shape[1])
        if wants_weight:
            operands = (dy_TN, x.reshape(-1, x.shape[-1]))
            if not ctx.sink.defer(_weight_grad, *operands):
                dweight_NK = _weight_grad(*operands, GradTarget())
        return dx, dweight_NK, dy_TN.sum(0) if wants_bias else None, None


_Linear.__name__ = "moecore::deferred_linear"  # in profiles


def _weight_grad(dy_TN: Tensor, x_TK: Tensor, target: GradTarget) -> Tensor:
    """Put the gradient of the weight, [N, K], at the target; return it."""
    grad_NK = dy_TN.t().mm(x_TK)
    return put_grad(grad_NK, target.out, target.adds, target.dtype, target.scale)
