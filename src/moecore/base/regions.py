"""Recompute regions: which results a region saves for backward instead of recomputing.

A region (`train/memory/recompute.py`) is a part of the model that backward recomputes. A torch
function mode finds torch's matrix products and attention in a region. moecore calls its own
products through `run_product` and communication through `run_and_save`. Outside of regions both
functions only call their argument.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from moecore.base.torch_private import patch_attributes

# The functions of torch whose results a region saves.
OF_TORCH = (torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.einsum)
OF_TENSORS = (Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm)
PRODUCTS = frozenset((F.linear, F.scaled_dot_product_attention, *OF_TORCH, *OF_TENSORS))


class Region(Protocol):
    """A part of the model that backward recomputes, except the results that the region saves."""

    @property
    def is_running_product(self) -> bool:
        """Whether a function inside `run_product` of this region is running."""

    def run_product(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return and save function(*args, **kwargs); recomputation returns the saved result."""

    def save_generator(self, generator: torch.Generator) -> None:
        """Record that the region draws random numbers from this generator."""


class _RegionState(threading.local):
    """The region that runs in this thread, and whether its products are recomputed."""

    region: Region | None = None
    is_recomputing: bool = False  # inside `recompute_products`


_state = _RegionState()


def is_in_region() -> bool:
    """Whether this thread runs a recompute region."""
    return _state.region is not None


@contextmanager
def intercept_products(region: Region, *, has_products: bool) -> Iterator[None]:
    """Return a context that activates `region`, which runs matrix products if `has_products`."""
    _state.region = region
    try:
        with _InterceptProducts() if has_products else nullcontext():
            yield
    finally:
        _state.region = None


class _InterceptProducts(TorchFunctionMode):
    """Passes matrix products, attention and random generators of torch calls to the region."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("generator") is not None and _state.region is not None:
            _state.region.save_generator(kwargs["generator"])
        return run_product(func, *args, **kwargs) if func in PRODUCTS else func(*args, **kwargs)


def run_product(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return function(*args, **kwargs), a matrix product, which an active region saves."""
    if _state.is_recomputing:
        return function(*args, **kwargs)
    return run_and_save(function, *args, **kwargs)


def run_and_save(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return function(*args, **kwargs), which an active region saves for its recomputation."""
    region = _state.region
    if region is None or region.is_running_product:
        return function(*args, **kwargs)
    return region.run_product(function, args, kwargs)


def is_recomputing() -> bool:
    """Whether `recompute_products` is active in this thread: no matrix products are saved."""
    return _state.is_recomputing


def recompute_products() -> AbstractContextManager[None]:
    """Return a context whose forwards save no matrix products; backward recomputes products."""
    return patch_attributes(_state, is_recomputing=True)
