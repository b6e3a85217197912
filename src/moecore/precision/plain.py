"""`Linear`, which multiplies local shards, and `ProductLinear`, whose matmuls are exchangeable."""

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moecore.base.params import get_local_param
from moecore.kernels.linear import LinearProducts
from moecore.moe.stored_weights import apply_to_blocks


class Linear(nn.Linear):
    """An `nn.Linear` that multiplies the local shard of a DTensor weight and bias.

    `tp_shard_dim` is the dim of the weight that tensor parallelism shards; None = replicated. If
    `residual`, the output is added to the residual stream.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        *,
        tp_shard_dim: int | None = None,
        residual: bool = False,
        bias: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_dim, out_dim, bias=bias, dtype=dtype)
        self.tp_shard_dim = tp_shard_dim  # dim of the weight that tensor parallelism shards
        self.residual = residual  # whether the output is added to the residual stream

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ weight^T + bias."""
        bias = None if self.bias is None else get_local_param(self.bias)
        return F.linear(x, get_local_param(self.weight), bias)


class ProductLinear(nn.Linear):
    """An `nn.Linear` with the same state dict; `self.products` (set later) computes the matmuls."""

    products: LinearProducts

    def forward(self, input: Tensor) -> Tensor:
        """Return input @ weight^T + bias, in the dtype of the input or the dtype of autocast."""
        return self.products(input, self.weight, self.bias, training=self.training)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Apply `fn` to parameters (`to_empty`, `to`); of a stored weight, to its blocks."""
        apply_to_blocks(self, fn, functools.partial(super()._apply, fn, recurse))
        return self

    def extra_repr(self) -> str:
        """Return the linear's sizes and a description of its matmuls."""
        return f"{super().extra_repr()}, {self.products}"


PLAIN_FORWARDS = (nn.Linear.forward, Linear.forward)


def set_products(linear: nn.Linear, products: LinearProducts) -> None:
    """Make `products` compute a linear's matmuls, in place; its class becomes `ProductLinear`."""
    if not isinstance(linear, ProductLinear):
        plain: Any = type(linear)
        linear.__class__ = _make_product_class(plain)
    cast(ProductLinear, linear).products = products


@functools.cache
def _make_product_class(linear_class: type[nn.Linear]) -> type[ProductLinear]:
    """Return the subclass of `linear_class` whose forward calls `products`."""
    bases = (ProductLinear, linear_class)
    return (
        ProductLinear
        if linear_class is nn.Linear
        else type(f"Product{linear_class.__name__}", bases, {})
    )
