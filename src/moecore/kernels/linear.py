"""y = x @ weight^T + bias with exchangeable products, and a weight gradient that may be deferred.

    forward          y  = x @ weight^T + bias
    backward         dx = dy @ weight       dbias = sum of dy
    now, or later    dweight = dy^T @ x     by autograd, or when the weight's sink computes it

`PlainProducts` multiply in the dtype of the weight, with the bits of `F.linear`, which runs itself
if nothing can be deferred: without a sink, under compilers and dispatch modes, and without
gradients. Deferring must be enabled (`LinearProducts.defers`), because it costs host time in each
forward. Routed experts always defer. `precision/linear.py` has the products in FP8.

Letters: T tokens, K input features, N output features.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from moecore.base.params import get_local_param
from moecore.base.regions import run_product
from moecore.base.torch_private import get_autocast_dtype, is_plain_eager
from moecore.kernels.experts.contract import GradSink, GradTarget, find_sink
from moecore.kernels.grouped.wgrad import scale_and_store_grad

Gradients = tuple[Tensor | None, tuple[Any, ...] | None, Tensor | None]


class LinearProducts(ABC):
    """The forward and backward matmuls of one linear layer, in one precision."""

    defers = False  # whether the weight's sink may compute its gradient later: `GradSink.defer`
    differentiable_twice = False  # whether second derivatives are supported; otherwise they raise
    forward: ClassVar[Callable[..., Tensor]]  # (x, weight, bias, *others) -> y
    # setup_context(ctx, (x, weight, bias, *others), y), as that of an `autograd.Function`.
    setup_context: ClassVar[Callable[..., None]]
    # compute_gradients(ctx, dy) -> dx, operands of `compute_weight_grad`, dbias; None = not needed.
    compute_gradients: ClassVar[Callable[..., Gradients]]
    # compute_weight_grad(*operands, target) puts dweight at a `GradTarget` and returns it.
    compute_weight_grad: ClassVar[Callable[..., Tensor]]

    @abstractmethod
    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, training: bool = True
    ) -> Tensor:
        """Return x [..., K] @ weight^T + bias. If they are DTensors, local tensors are multiplied.

        In eval mode (`training` False) FP8 products record no largest magnitudes.
        """


def linear(args: tuple[Any, ...], products: type[LinearProducts], sink: GradSink | None) -> Tensor:
    """Return x @ weight^T + bias as one autograd node, computed by the functions of `products`.

    `args` are as in `products.forward`. `sink` (`GradSink`) receives the weight's gradient and may
    compute it after backward; None = autograd receives it.
    """
    y: Tensor = _LinearFunction.apply(*args, products, sink)
    return y


def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    """Return gradients of x, weight (None if deferred) and bias, and Nones for further inputs."""
    products, sink = ctx.products, ctx.sink
    dx, operands, dbias_N = products.compute_gradients(ctx, *grads)
    dweight_NK = None
    if operands is not None and (
        sink is None or not sink.defer(products.compute_weight_grad, *operands)
    ):
        dweight_NK = products.compute_weight_grad(*operands, GradTarget())
    input_grads: tuple[Tensor | None, ...] = (dx, dweight_NK, dbias_N)
    if torch.is_grad_enabled() and not products.differentiable_twice:
        input_grads = tuple(
            g if g is None else _DifferentiableOnce.apply(g.detach().requires_grad_())
            for g in input_grads
        )
    return *input_grads, *[None] * (len(ctx.needs_input_grad) - 3)


class _DifferentiableOnce(torch.autograd.Function):
    """The identity, whose backward raises a NotImplementedError."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:
        raise NotImplementedError(
            "linears in FP8 have no second derivatives: leave them out by an override of Precision"
        )


class _LinearFunction(torch.autograd.Function):
    """The autograd node of `linear`: apply(x, weight, bias, *others, products, sink) returns y."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *inputs, products, sink = args
        y: Tensor = products.forward(*inputs)
        products.setup_context(ctx, inputs, y)
        ctx.products, ctx.sink = products, sink
        return y

    backward = staticmethod(backward)


_LinearFunction.__name__ = "moecore::linear"  # in profiles


class PlainProducts(LinearProducts):
    """Matmuls of a linear layer in the dtype of its weight, with the bits of `F.linear`."""

    differentiable_twice = True

    @override
    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, training: bool = True
    ) -> Tensor:
        if self.defers and is_plain_eager():
            y: Tensor = run_product(self._multiply, x, weight, bias)
            return y
        return F.linear(x, get_local_param(weight), None if bias is None else get_local_param(bias))

    def __repr__(self) -> str:
        return "plain products"

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x @ weight^T + bias by `linear` with a gradient sink, otherwise by `F.linear`."""
        weight_NK = get_local_param(weight)
        bias_N = None if bias is None else get_local_param(bias)
        sink = find_sink(weight, weight_NK.shape)
        if sink is None:
            return F.linear(x, weight_NK, bias_N)
        dtype = get_autocast_dtype(x)
        if dtype is not None:
            x, weight_NK = x.to(dtype), weight_NK.to(dtype)
            bias_N = None if bias_N is None else bias_N.to(dtype)
        return linear((x, weight_NK, bias_N), PlainProducts, sink)

    forward = staticmethod(F.linear)

    @override
    @staticmethod
    def setup_context(ctx: Any, inputs: Any, y: Tensor) -> None:
        wants_x, wants_weight, *_ = ctx.needs_input_grad
        x, weight_NK, _ = inputs
        ctx.save_for_backward(x if wants_weight else None, weight_NK if wants_x else None)

    @override
    @staticmethod
    def compute_gradients(ctx: Any, dy: Tensor) -> Gradients:
        x, weight_NK = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        dy_TN = dy.reshape(-1, dy.shape[-1])
        dx = dy_TN.mm(weight_NK).view(*dy.shape[:-1], weight_NK.shape[1]) if wants_x else None
        operands = (dy_TN, x.reshape(-1, x.shape[-1])) if wants_weight else None
        return dx, operands, dy_TN.sum(0) if wants_bias else None

    @override
    @staticmethod
    def compute_weight_grad(dy_TN: Tensor, x_TK: Tensor, target: GradTarget) -> Tensor:
        return scale_and_store_grad(dy_TN.t().mm(x_TK), *target)
