"""Linears as modules: moecore's own, and any linear with products of its choice."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moecore.base.params import local_param
from moecore.kernels.linear import LinearProducts


class Linear(nn.Linear):
    """x @ weight^T, whatever the layout of the weight; a bias is cut with its rows."""

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
        self.tp_shard_dim = tp_shard_dim  # of the weight, that tensor parallelism cuts
        self.residual = residual  # the output is added to the residual stream: smaller weights

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] in the dtype of x."""
        bias = None if self.bias is None else local_param(self.bias)
        return F.linear(x, local_param(self.weight), bias)


class ProductLinear(nn.Linear):
    """An `nn.Linear` by `products`; parameters, names and state dict are its own."""

    products: LinearProducts

    def forward(self, input: Tensor) -> Tensor:
        """Return [..., N] in the dtype of the input, or autocast's."""
        return self.products(input, self.weight, self.bias, training=self.training)

    def extra_repr(self) -> str:
        """Return the linear's own, and what its products are."""
        return f"{super().extra_repr()}, {self.products}"


PLAIN_FORWARDS = (nn.Linear.forward, Linear.forward)


def set_products(linear: nn.Linear, products: LinearProducts) -> None:
    """Give a linear these products, in place: hooks, and all else of its class, stay."""
    if not isinstance(linear, ProductLinear):
        plain: Any = type(linear)
        linear.__class__ = _class_of(plain)
    cast(ProductLinear, linear).products = products


@functools.cache
def _class_of(plain: type[nn.Linear]) -> type[ProductLinear]:
    bases = (ProductLinear, plain)
    return ProductLinear if plain is nn.Linear else type(f"Product{plain.__name__}", bases, {})
