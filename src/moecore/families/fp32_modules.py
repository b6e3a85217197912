"""Selects the tensors that stay fp32 in a model that computes in fp16 or bf16.

Selection biases always stay fp32, because their updates are below the resolution of bf16. In a
transformers model the tensors that `from_pretrained(dtype=...)` keeps in fp32 stay fp32 too: names
that match a pattern of the class, and tensors that the class creates in fp32 for any dtype.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from types import MethodType
from typing import Any

import torch
from torch import nn

from moecore.families.transformers.lora import get_base_tensors, select_trained_copies
from moecore.families.transformers.stock import find_outermost_models, is_transformers_module

SELECTION_BIASES = ("e_score_correction_bias", "expert_bias")
HALF_DTYPES = (torch.float16, torch.bfloat16)


def is_selection_bias(name: str) -> bool:
    """Whether `name` is a router bias that affects only the selection of experts."""
    return name.endswith(SELECTION_BIASES)


def make_fp32_predicate(
    model: nn.Module | None, compute_dtype: torch.dtype | None
) -> Callable[[str], bool]:
    """Return a predicate on tensor names: whether the tensor stays fp32 in 16-bit training."""
    half = None if model is None else _find_half_dtype(model, compute_dtype)
    stocks = list(_make_stock_dtypes(model, half).values()) if model is not None and half else []
    return lambda name: is_selection_bias(name) or any(s.is_fp32(name) for s in stocks)


def set_dtypes(model: nn.Module, dtype: torch.dtype | None) -> frozenset[str]:
    """Cast tensors that `from_pretrained` loads in fp32 to fp32, in place; return their names."""
    # Buffers that transformers casts to the compute dtype, such as tables of decay rates, are cast
    # while their module runs. They are saved without the cast.
    half = _find_half_dtype(model, dtype)
    if half is None:
        return frozenset()
    stocks = _make_stock_dtypes(model, half)
    tensors = _get_named_tensors(model)
    fp32_ids = {id(t) for n, t in tensors.items() if is_selection_bias(n)}
    for hf, stock in stocks.items():
        hf_tensors = _get_named_tensors(hf)
        for originals in (get_base_tensors(hf, hf_tensors), select_trained_copies(hf, hf_tensors)):
            fp32_ids |= {id(t) for n, t in originals.items() if stock.is_fp32(n)}
    fp32_names = frozenset(n for n, t in tensors.items() if id(t) in fp32_ids)
    for name, tensor in tensors.items():
        if name in fp32_names and tensor.dtype in HALF_DTYPES:
            tensor.data = tensor.data.float()
    for hf, stock in stocks.items():
        for prefix, module in hf.named_modules():
            buffer_names = [
                n for n, b in module._buffers.items() if b is not None and b.dtype != half
            ]
            if cast := [n for n in buffer_names if f"{prefix}.{n}" in stock.half]:
                _cast_buffers_in_forward(module, cast, half)
    return fp32_names


def _cast_buffers_in_forward(module: nn.Module, names: Sequence[str], dtype: torch.dtype) -> None:
    """Wrap a module's forward so that the buffers `names` have `dtype` only while it runs."""
    # A method, because recomputation calls only the forward and no hooks, and because copies of a
    # module (`copy_modules`) have its methods and no wrappers.
    forward: Any = module.forward
    is_class_forward = isinstance(forward, MethodType) and forward.__self__ is module

    def call_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # A wrapper is bound to the module; a copy of the module has the forward of its class.
        return (forward if self is module else partial(type(self).forward, self))(*args, **kwargs)

    function = forward.__func__ if is_class_forward else call_forward

    def forward_with_cast(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        buffers = {name: self._buffers[name] for name in names}
        self._buffers.update({n: b.to(dtype) for n, b in buffers.items() if b is not None})
        try:
            return function(self, *args, **kwargs)
        finally:
            self._buffers.update(buffers)

    if is_class_forward:  # transformers reads the names of arguments
        forward_with_cast.__signature__ = signature(function)  # type: ignore[attr-defined]
    module.forward = MethodType(forward_with_cast, module)


def _find_half_dtype(model: nn.Module, compute_dtype: torch.dtype | None) -> torch.dtype | None:
    """Return `compute_dtype` or the dtype of the first 16-bit parameter; None = not 16-bit."""
    if compute_dtype is None:
        compute_dtype = next((p.dtype for p in model.parameters() if p.dtype in HALF_DTYPES), None)
    return compute_dtype if compute_dtype in HALF_DTYPES else None


def _get_named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers by name; tied tensors appear under each of their names."""
    iterators = (f(remove_duplicate=False) for f in (model.named_parameters, model.named_buffers))
    return dict(itertools.chain(*iterators))


@dataclass(frozen=True)
class _StockDtypes:
    """The tensors of a transformers model that stay fp32, and its 16-bit buffers, by name."""

    pattern: str  # regular expression of tensor names that stay fp32
    fp32: frozenset[str]  # parameters and saved buffers that the class creates in fp32
    half: frozenset[str]  # buffers that the class creates in the 16-bit dtype

    def is_fp32(self, name: str) -> bool:
        """Whether the tensor with this name in the transformers model stays fp32."""
        return name in self.fp32 or bool(self.pattern and re.search(self.pattern, name))


def _make_stock_dtypes(model: nn.Module, dtype: torch.dtype) -> dict[Any, _StockDtypes]:
    """Return {transformers model: its tensors that stay fp32 in 16-bit `dtype`}."""
    stocks = {}
    for hf in find_outermost_models(model):
        # As transformers.core_model_loading.build_glob_alternation reads them.
        pattern = "|".join(f"(?:{p.replace('*', '.*')})" for p in hf._get_dtype_plan(dtype))
        fp32, half = frozenset[str](), frozenset[str]()
        if is_transformers_module(hf):
            with torch.device("meta"):
                twin = type(hf)._from_config(copy.deepcopy(hf.config), dtype=dtype)
            fp32 = frozenset(n for n, t in twin.state_dict().items() if t.dtype == torch.float32)
            half = frozenset(n for n, b in twin.named_buffers() if b.dtype == dtype)
        stocks[hf] = _StockDtypes(pattern, fp32, half)
    return stocks
