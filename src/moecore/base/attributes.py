"""Descriptions of module attributes that are not parameters, which ranks compare.

Models with equal parameter names and shapes can still compute different numbers, because a dropout
rate, an epsilon, a rotary base or an activation function is not a parameter.
`list_attribute_entries` returns every such value of a model by its path:

    {"__class__": my.Model, "config.rope_theta": 10000.0, "layers.0.norm.eps": 1e-06, ...}

A function is described by its qualified name and an object by its class, never by an address.
Values that can differ between equal models are left out: devices, ranks, caches, directories.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from hashlib import sha256
from types import CodeType, FunctionType, MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from moecore.base.rank_checks import Verbatim, make_comparable

MAX_DEPTH = 8  # of records in records; deeper values are described by their class
CLASS = "__class__"
# Attributes of every module: hooks, parameters. `training` is compared, because it sets dropout.
INTERNAL = frozenset(vars(nn.Module())) - {"training"}
# Attributes that do not change results; only `from_pretrained` sets `_weight_conversions`.
UNCOMPARED = frozenset((
    "ce_chunk_tokens", "_is_hf_initialized", "_commit_hash", "_auto_class", "generation_config",
    "_weight_conversions", "transformers_version", "architectures", "auto_map", "id2label",
    "label2id",
))  # fmt: skip
# Names of values that belong to one rank. "lora_rank" decides parameter shapes and is compared.
OF_ONE_RANK = re.compile(
    r"cache|name_or_path$|object_hash$|device_map$|(^|_)(dir|path)$|^is_(main|local|world)_"
    r"|(^|_)(rank|device|(rank|device|process)_?(id|index))$"
)
DEVICE = re.compile(r"(cpu|cuda|xpu|hpu|mps|npu|xla)(:\d+)?")
RECORD_MARKS = ("__dataclass_fields__", "__attrs_attrs__", "__pydantic_fields__")
RECORD_NAMES = ("config", "namespace", "args", "arguments", "options", "hparams")
ATOMS: tuple[Any, ...] = (bool, int, float, complex, str, bytes)
CONTAINERS: tuple[Any, ...] = (tuple, list, Mapping, AbstractSet)


def list_attribute_entries(named_modules: Iterable[tuple[str, nn.Module]]) -> dict[str, Any]:
    """Return path -> description of each attribute that can change a module's results.

    `named_modules` are (path, module) pairs. A config object or dataclass has one entry per field.
    Descriptions are compared by their `repr`.
    """
    entries: dict[str, Any] = {}
    records: dict[int, dict[str, Any]] = {}  # modules of one model share their config
    for path, module in named_modules:
        prefix = f"{path}." if path else ""
        entries[prefix + CLASS] = _get_class_name(type(module))
        for name, value in vars(module).items():
            if name in INTERNAL or not _can_change_results(name, value):
                continue
            if _read_fields(value) is None:
                entries |= _flatten_value(prefix + name, value, 0)
                continue
            if id(value) not in records:
                records[id(value)] = dict(_flatten_value("", value, 0))
            entries |= {f"{prefix}{name}{rest}": v for rest, v in records[id(value)].items()}
    return entries


def _can_change_results(name: str, value: Any) -> bool:
    """Whether an attribute may change a module's results, by its name and type."""
    if name in UNCOMPARED or OF_ONE_RANK.search(name):
        return False
    is_value = isinstance(value, (*ATOMS, *CONTAINERS, Tensor, Enum, torch.dtype, partial))
    is_value = is_value or _is_numpy_value(value) or callable(value)
    return not name.startswith("_") or is_value or _read_fields(value) is not None


def _is_numpy_value(value: Any) -> bool:
    return type(value).__module__ == "numpy" and hasattr(value, "tolist")


def _flatten_value(path: str, value: Any, depth: int) -> dict[str, Any]:
    """Return {path: description} of a value; a mapping or config has one path per field."""
    values = value if isinstance(value, Mapping) else _read_fields(value)
    if values is None or depth > MAX_DEPTH:
        return {path: describe_value(value, depth)}
    descriptions = {f"{path}.{CLASS}": _get_class_name(type(value))}
    for key, item in values.items():
        name = key if isinstance(key, str) else repr(describe_value(key, depth + 1))
        if _can_change_results(name, item):
            descriptions |= _flatten_value(f"{path}.{name}", item, depth + 1)
    return descriptions


def _read_fields(value: Any) -> dict[str, Any] | None:
    """Return {field: value} of a dataclass or config object; None for other values."""
    if isinstance(value, type | nn.Module | Enum):
        return None
    cls = type(value)
    is_record = any(hasattr(cls, mark) for mark in RECORD_MARKS)
    if not is_record and not cls.__name__.lower().endswith(RECORD_NAMES):
        return None
    values = dict(getattr(value, "__dict__", {}))
    names = [] if values else getattr(cls, "__slots__", ())
    if is_dataclass(value):
        names = [field.name for field in fields(value)]
    return {name: _read_field(value, name) for name in names if name not in values} | values


def _read_field(record: Any, name: str) -> Any:
    """Return a field of a record; None if it raises, as in some configs of transformers."""
    try:
        return getattr(record, name, None)
    except Exception:
        return None


def describe_value(value: Any, depth: int = 0) -> Any:
    """Return a description of a value, whose `repr` is equal on ranks with equal values."""
    if isinstance(value, str) and DEVICE.fullmatch(value):
        return Verbatim("a device")
    if value is None or type(value) in ATOMS or isinstance(value, torch.dtype):
        return value
    if isinstance(value, Enum):
        return Verbatim(f"{type(value).__qualname__}.{value.name}")
    for atom in ATOMS:  # a subclass, such as a number of numpy, has a `repr` of its own
        if isinstance(value, atom):
            return cast(type, atom)(value)
    if depth > MAX_DEPTH or isinstance(value, torch.device):
        return _get_class_name(type(value))
    if isinstance(value, Tensor):
        return make_comparable(value)
    if _is_numpy_value(value):
        return describe_value(value.tolist(), depth + 1)
    if isinstance(value, list | tuple):
        items = [describe_value(item, depth + 1) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, AbstractSet):
        items = sorted(repr(describe_value(item, depth + 1)) for item in value)
        return Verbatim(f"{{{', '.join(items)}}}")
    if isinstance(value, Mapping) or _read_fields(value) is not None:
        return dict(sorted(_flatten_value("", value, depth + 1).items()))
    if isinstance(value, partial):
        return tuple(describe_value(x, depth + 1) for x in (value.func, value.args, value.keywords))
    return describe_function(value, depth) if callable(value) else _get_class_name(type(value))


def _get_class_name(cls: type) -> Verbatim:
    return Verbatim(f"{cls.__module__}.{cls.__qualname__}")


def describe_function(
    value: Callable[..., Any], depth: int = 0, *, reads_data: bool = True
) -> Verbatim:
    """Return a callable's qualified name, with a hash of its code if it is a nested function.

    An object without a qualified name is described by its class name. If `reads_data`, the hash
    covers the tensors, lists, sets and mappings in the closure. `depth` = nesting of `value`.
    """
    name = getattr(value, "__qualname__", None)
    if not isinstance(name, str):
        return _get_class_name(type(value))
    module = getattr(value, "__module__", None)
    description = f"{module}.{name}" if isinstance(module, str) else name
    function = value.__func__ if isinstance(value, MethodType) else value
    if isinstance(function, FunctionType) and "<" in name:
        # The same name of a lambda or nested function can stand for different code or constants.
        constants = _list_constants(function, depth, reads_data=reads_data)
        text = repr([*_list_code_parts(function.__code__), *constants])
        description += f" {sha256(text.encode(errors='backslashreplace')).hexdigest()[:8]}"
    return Verbatim(description)


def _list_constants(function: FunctionType, depth: int, *, reads_data: bool) -> Iterator[Any]:
    """Yield descriptions of a function's default arguments and its closure variables."""
    yield describe_value([function.__defaults__, function.__kwdefaults__], depth + 1)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # a variable that has no value yet
            continue
        is_data = isinstance(value, (Tensor, list, AbstractSet, Mapping))
        if _can_change_results(name, value) and (reads_data or not is_data):
            yield describe_value(value, depth + 1)


def _list_code_parts(code: CodeType) -> Iterator[Any]:
    """Yield the bytecode, names and constants of a code object and of its nested functions."""
    yield code.co_code
    yield code.co_names
    for constant in code.co_consts:
        is_code = isinstance(constant, CodeType)
        yield list(_list_code_parts(constant)) if is_code else describe_value(constant)
