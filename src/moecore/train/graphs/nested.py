"""Nested values without their tensors: arguments and results of a part, compared between calls."""

from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from torch import Tensor

from moecore.attention.context_parallel.local_tokens import LocalTokens
from moecore.attention.sequence import RotaryTable


class _TensorSlot(NamedTuple):
    """A placeholder for a tensor in nested values: the tensor's index in a list."""

    number: int


class _FlatRecord(NamedTuple):
    """An object with tensor placeholders; without `names`, `values` are arguments of `cls`."""

    cls: type
    names: tuple[str, ...]
    values: tuple[Any, ...]


def flatten_tensors(nested: Any, tensors: list[Tensor]) -> Any:
    """Replace tensors in nested values by placeholders, and append the tensors to `tensors`."""
    if isinstance(nested, Tensor):
        tensors.append(nested)
        return _TensorSlot(len(tensors) - 1)
    cls = type(nested)
    if cls in (tuple, list):
        return cls(flatten_tensors(item, tensors) for item in nested)
    if cls is dict:
        return {key: flatten_tensors(item, tensors) for key, item in nested.items()}
    if is_dataclass(cls):
        names = tuple(f.name for f in fields(cls))
    elif cls is RotaryTable:
        names = tuple(vars(nested))
    elif cls is LocalTokens:  # the part computes and caches its own index of the tokens
        return _FlatRecord(cls, (), flatten_tensors(nested.arguments, tensors))
    elif isinstance(nested, tuple) and any(isinstance(item, Tensor) for item in nested):
        return _FlatRecord(cls, (), tuple(flatten_tensors(item, tensors) for item in nested))
    else:
        return nested
    return _FlatRecord(
        cls, names, tuple(flatten_tensors(getattr(nested, name), tensors) for name in names)
    )


def unflatten_tensors(spec: Any, tensors: list[Tensor]) -> Any:
    """Return a result of `flatten_tensors` with `tensors` in place of its placeholders."""
    cls = type(spec)
    if cls is _TensorSlot:
        return tensors[spec.number]
    if cls in (tuple, list):
        return cls(unflatten_tensors(item, tensors) for item in spec)
    if cls is dict:
        return {key: unflatten_tensors(item, tensors) for key, item in spec.items()}
    if cls is not _FlatRecord:
        return spec
    values = [unflatten_tensors(item, tensors) for item in spec.values]
    if not spec.names:
        return spec.cls(*values)
    instance = object.__new__(spec.cls)
    for name, item in zip(spec.names, values, strict=True):
        object.__setattr__(instance, name, item)
    return instance
