"""Arguments and results of a graphed part, split into tensors and a form without them.

    form_of(value, tensors)     value -> its form, with a slot for each tensor; tensors are appended
    filled(form, tensors)       form -> a value with these tensors

Forms of two values are equal if the values differ only in tensors. Tensors are found in tuples,
lists, dicts, dataclasses and rotary tables; objects of other types are compared with ==.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from torch import Tensor

from moecore.attention.rotary import RotaryTable


class _FormSlot(NamedTuple):
    """The slot of a tensor in a form."""

    number: int


class _FormRecord(NamedTuple):
    """The form of an object that its attributes define, or of a named tuple."""

    cls: type
    names: tuple[str, ...]
    values: tuple[Any, ...]


def form_of(value: Any, tensors: list[Tensor]) -> Any:
    """Return the form of a value and append its tensors in the order of their slots."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return _FormSlot(len(tensors) - 1)
    cls = type(value)
    if cls in (tuple, list):
        return cls(form_of(item, tensors) for item in value)
    if cls is dict:
        return {key: form_of(item, tensors) for key, item in value.items()}
    if is_dataclass(cls):
        names = tuple(f.name for f in fields(cls))
    elif cls is RotaryTable:
        names = tuple(vars(value))
    elif isinstance(value, tuple) and any(isinstance(item, Tensor) for item in value):
        return _FormRecord(cls, (), tuple(form_of(item, tensors) for item in value))
    else:
        return value
    return _FormRecord(cls, names, tuple(form_of(getattr(value, name), tensors) for name in names))


def filled(form: Any, tensors: list[Tensor]) -> Any:
    """Return the value of a form with these tensors in its slots."""
    cls = type(form)
    if cls is _FormSlot:
        return tensors[form.number]
    if cls in (tuple, list):
        return cls(filled(item, tensors) for item in form)
    if cls is dict:
        return {key: filled(item, tensors) for key, item in form.items()}
    if cls is not _FormRecord:
        return form
    values = [filled(item, tensors) for item in form.values]
    if issubclass(form.cls, tuple):
        return form.cls(*values)
    made = object.__new__(form.cls)
    for name, item in zip(form.names, values, strict=True):
        object.__setattr__(made, name, item)
    return made
