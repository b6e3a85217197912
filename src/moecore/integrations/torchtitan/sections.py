"""Sections of a torchtitan job: dataclasses made from the keyword arguments of a function.

    Memory = make_section(MemoryOptions, without=("fused_loss",))
    call_section(Memory(recompute=["norm"]), "moecore.memory")  # MemoryOptions(recompute=("norm",))

A job has a list for a tuple or a single value, "PATTERN=SCALING" for a pair, a name for a dtype,
and a section for a record. torchtitan's help shows the docstring of the function.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import field, fields, is_dataclass, make_dataclass
from inspect import Parameter, isclass, signature
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import torch

from moecore.base.options.precision import SCALINGS, Recipe

SOURCE = "moecore_source"  # attribute of a section: the function and the types of its arguments


def make_section(
    source: Callable[..., Any], *, without: tuple[str, ...] = (), **replacements: tuple[Any, Any]
) -> Any:
    """Return a config section: a dataclass with a field per keyword-only argument of `source`.

    Args:
        source: a dataclass or a function. Types are converted, such as a dtype to a str.
        without: arguments that do not become fields.
        replacements: name -> (type, default) of replaced or additional fields. The type may be a
            section, for which the default None stands for the section's defaults.
    """
    owner: Any = source if not isclass(source) or is_dataclass(source) else source.__init__
    hints, fields = get_type_hints(owner), {}
    for name, parameter in signature(source).parameters.items():
        if parameter.kind is Parameter.KEYWORD_ONLY and name not in without:
            fields[name] = (_get_field_type(hints[name]), parameter.default)
    entries = [
        (name, kind, _make_field(kind, value))
        for name, (kind, value) in (fields | replacements).items()
    ]
    names = {"__doc__": source.__doc__, SOURCE: (source, hints), "__module__": __name__}
    return make_dataclass(f"{source.__name__}Section", entries, kw_only=True, namespace=names)


def call_section(section: Any, path: str) -> Any:
    """Call the `source` of a section with its fields; `path` names the section in errors."""
    source = getattr(section, SOURCE)[0]
    keywords = read_arguments(section, path)
    return replace_name_in_errors(lambda: source(**keywords), source, path)


def replace_name_in_errors(build_record: Callable[[], Any], source: Any, path: str) -> Any:
    """Return build_record(); a ValueError names `path` instead of the name of `source`."""
    try:
        return build_record()
    except ValueError as error:
        raise ValueError(str(error).replace(f"{source.__name__}.", f"{path}.")) from error


def read_arguments(section: Any, path: str, *, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the arguments {name: value} for a section's `source`, except `without`.

    A nested section becomes the result of its source, or None if its `enable` is False.
    """
    hints = getattr(section, SOURCE)[1]
    values = {}
    for name in (f.name for f in fields(section) if f.name in hints and f.name not in without):
        value, field_path = getattr(section, name), f"{path}.{name}"
        if is_dataclass(value):
            disabled = is_disabled(value, field_path)
            values[name] = None if disabled else call_section(value, field_path)
        else:
            values[name] = _read_argument(value, hints[name], field_path)
    return values


def read_changed_arguments(section: Any, path: str) -> dict[str, Any]:
    """Return {argument: value} of the fields of a section that differ from their defaults."""
    names = {name.partition(".")[0] for name in list_changed_fields(section)}
    return {name: value for name, value in read_arguments(section, path).items() if name in names}


def list_changed_fields(section: Any) -> list[str]:
    """Return the dotted names of a section's fields that differ from their defaults."""
    names, plain = [], type(section)()
    for name in (f.name for f in fields(section)):
        value = getattr(section, name)
        if is_dataclass(value):
            names += [f"{name}.{inner}" for inner in list_changed_fields(value)]
        elif value != getattr(plain, name):
            names.append(name)
    return names


def is_disabled(section: Any, path: str) -> bool:
    """Whether a section is disabled; ValueError if a disabled section has changed fields."""
    if getattr(section, "enable", True):
        return False
    if names := list_changed_fields(section):
        raise ValueError(
            f"{path}.{names[0]} must go with {path}.enable (False) = True: set it, or drop it"
        )
    return True


def _get_field_type(hint: Any) -> Any:
    """Convert an argument's type hint to the type of its field in a job config."""
    if hint is torch.dtype:
        return str
    if get_origin(hint) is tuple:
        first = get_args(hint)[0]
        kinds = [get_origin(member) for member in _get_union_members(first)]
        item = str if set(kinds) <= {Literal, tuple} else _get_field_type(first)
        return list[item]  # type: ignore[valid-type]
    if len(members := _get_union_members(hint)) > 1:
        members = [_get_field_type(member) for member in members]
        lists = [member for member in members if get_origin(member) is list]
        return lists[0] if lists else Union[tuple(members)]  # noqa: UP007
    return hint


def _get_union_members(hint: Any) -> list[Any]:
    """Return the members of a union type, or a list of the type itself."""
    is_union = get_origin(hint) in (Union, types.UnionType)
    return list(get_args(hint)) if is_union else [hint]


def _make_field(field_type: Any, default: Any) -> Any:
    """Return a dataclass field with this type, and with `default` in a job config's types."""
    if is_dataclass(field_type):
        return field(default_factory=cast(Any, field_type))
    if isinstance(default, torch.dtype):
        return field(default=str(default).removeprefix("torch."))
    if get_origin(field_type) is list:
        items = list(default) if isinstance(default, tuple) else [default]
        return field(default_factory=lambda: list(items))
    return field(default=default)


def _read_argument(value: Any, hint: Any, path: str) -> Any:
    """Convert a job's `value` to an argument with the type hint `hint`; `path` is for errors."""
    if hint is torch.dtype:
        dtype = getattr(torch, value, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{path} ({value!r}) must be a dtype of torch: use 'float32'")
        return dtype
    if not isinstance(value, list):
        return value
    members = _get_union_members(hint)
    if len(value) == 1 and any(_is_accepted(member, value[0]) for member in members):
        return value[0]
    if get_origin(hint) is tuple and get_origin(get_args(hint)[0]) is tuple:
        return tuple(_parse_override(pair, path) for pair in value)
    return tuple(value)


def _is_accepted(hint: Any, value: Any) -> bool:
    """Whether `hint` is a Literal that contains `value`, or is int or float for a number."""
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    return hint in (int, float) and isinstance(value, int | float)


def _parse_override(pair: str, path: str) -> tuple[str, Recipe | None]:
    """Split "PATTERN=SCALING", of the field `path`, into pattern and Recipe (None for "none")."""
    pattern, _, name = pair.rpartition("=")
    recipes: dict[str, Recipe | None] = {"none": None}
    recipes |= {scaling: Recipe(scaling=scaling) for scaling in SCALINGS}
    if name not in recipes:
        names = ", ".join(map(repr, recipes))
        raise ValueError(f"{path} ({pair!r}) must be PATTERN=SCALING, of {names}: correct it")
    return pattern, recipes[name]
