"""Products: what a region does not run again (`recompute.py`), whoever calls it.

A region finds matrix products and attention of torch itself. What it cannot know is called by one
of these functions: outside of regions they call what they are given.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

# What a region does not run again.
OF_TORCH = (torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.einsum)
OF_TENSORS = (Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm)
PRODUCTS = frozenset((F.linear, F.scaled_dot_product_attention, *OF_TORCH, *OF_TENSORS))


class Region(Protocol):
    """What keeps the results of products."""

    @property
    def is_multiplying(self) -> bool:
        """Whether a product of it runs."""

    def multiply(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a product and keep its result; in a second run, return that."""

    def draw(self, generator: torch.Generator) -> None:
        """Note that what runs draws from a generator of its own."""


class _ThisThread(threading.local):
    """What runs in this thread."""

    region: Region | None = None
    is_recomputing: bool = False  # a product that is marked so runs


_state = _ThisThread()


def is_in_region() -> bool:
    """Whether a region runs."""
    return _state.region is not None


@contextmanager
def finding_products(region: Region, *, has_products: bool) -> Iterator[None]:
    """Within, one region runs; `has_products` also finds torch's own products, in host time."""
    _state.region = region
    try:
        with _FindProducts() if has_products else nullcontext():
            yield
    finally:
        _state.region = None


class _FindProducts(TorchFunctionMode):
    """Takes a region's products to it."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("generator") is not None and _state.region is not None:
            _state.region.draw(kwargs["generator"])
        return as_product(func, *args, **kwargs) if func in PRODUCTS else func(*args, **kwargs)


def as_product(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a product that the search does not know, such as a quantised one or attention."""
    if _state.is_recomputing:
        return function(*args, **kwargs)
    return run_and_save(function, *args, **kwargs)


def run_and_save(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call what no region runs again: communication."""
    region = _state.region
    if region is None or region.is_multiplying:
        return function(*args, **kwargs)
    return region.multiply(function, args, kwargs)


def is_recomputing() -> bool:
    """Whether a region runs products again, so that their results are not kept."""
    return _state.is_recomputing


@contextmanager
def recompute_products() -> Iterator[None]:
    """Within, a region runs products again, so that their results are not kept."""
    before, _state.is_recomputing = _state.is_recomputing, True
    try:
        yield
    finally:
        _state.is_recomputing = before
