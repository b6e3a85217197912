"""Command-line flags and TOML files, made of the fields of records of options.

A field `offload` of the record under [memory] is the flag --offload and the line `offload = [...]`
of the table; where two records have a field of one name, the flag has the table's in front. Help
is what the record's docstring has of the field. Values are checked by the record itself.

A TOML file stands for flags: those of the command line come behind it, and win.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
import tomllib
import types
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

Records = Mapping[str, type]  # by the name of the table


def add_records(
    parser: argparse.ArgumentParser, records: Records, *, without: Sequence[str] = ()
) -> None:
    """Add a flag for each field; what is not given has no attribute in the namespace.

    Args:
        parser: to add to.
        records: by table.
        without: "table.field" of what has no flag.
    """
    names = Counter(
        name
        for table, record in records.items()
        for name in kinds_of(record)
        if f"{table}.{name}" not in without
    )
    taken = {flag for action in parser._actions for flag in action.option_strings}
    for table, record in records.items():
        group = parser.add_argument_group(f"[{table}]", inspect.getdoc(record).splitlines()[0])
        texts = help_of(record)
        for name, kinds in kinds_of(record).items():
            if f"{table}.{name}" in without:
                continue
            flag = f"--{name.replace('_', '-')}"
            if names[name] > 1 or flag in taken:
                flag = f"--{table}-{name.replace('_', '-')}"
            group.add_argument(
                flag,
                dest=f"{table}.{name}",
                default=argparse.SUPPRESS,
                help=texts.get(name, "").replace("%", "%%"),
                **_how(kinds),
            )


def kinds_of(record: type) -> dict[str, tuple[Any, ...]]:
    """Return by field what a value may be; fields that are records of their own are left out."""
    found = {
        name: tuple(_members(hint))
        for name, hint in get_type_hints(record).items()
        if name in {field.name for field in dataclasses.fields(record)}
    }
    return {
        name: kinds for name, kinds in found.items() if not any(_has_record(kind) for kind in kinds)
    }


def given(args: argparse.Namespace, table: str) -> dict[str, Any]:
    """Return the fields of a record that were given."""
    prefix = f"{table}."
    return {
        name.removeprefix(prefix): value
        for name, value in vars(args).items()
        if name.startswith(prefix)
    }


def build(args: argparse.Namespace, table: str, record: Any, **more: Any) -> Any:
    """Return the record of a table, or None where no field of it was given."""
    values = given(args, table) | more
    if not values:
        return None
    for field in dataclasses.fields(record):
        defaults = (field.default, field.default_factory)
        if field.name not in values and defaults == (dataclasses.MISSING,) * 2:
            raise ValueError(f"[{table}] ({values}) must have {field.name}: give it too")
    return record(**values)


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str], option: str = "--config"
) -> argparse.Namespace:
    """Return the arguments, those of a TOML file first.

    Raises:
        ValueError: for a file that cannot be read, or a line of it that stands for no flag.
    """
    words = list(arguments)
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument(option, type=Path)
    file = vars(first.parse_known_args(words)[0])[option.lstrip("-")]
    return parser.parse_args([*([] if file is None else words_of(parser, file)), *words])


def words_of(parser: argparse.ArgumentParser, file: Path) -> list[str]:
    """Return the flags that the lines of a file stand for."""
    try:
        content = tomllib.loads(file.read_text())
    except OSError as error:
        raise ValueError(f"--config ({file}) must be a readable file: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"--config ({file}) must be TOML: {error}") from None
    flags = {f.lstrip("-").replace("-", "_"): a for a in parser._actions for f in a.option_strings}
    actions = flags | {action.dest: action for action in parser._actions}
    words: list[str] = []
    for name, value in _flat(content):
        if name not in actions:
            raise ValueError(f"--config ({file}) must have no {name}, which no flag has: remove it")
        words += _words(actions[name], value)
    return words


def as_toml(
    args: argparse.Namespace, records: Mapping[str, Any], *, without: Sequence[str] = ()
) -> str:
    """Return the lines that `parse` reads: options of the run, and of each table its record's."""
    own = {name: value for name, value in vars(args).items() if "." not in name}
    tables = {"": {name: value for name, value in own.items() if name not in without}}
    for table, record in records.items():
        names = [n for n in kinds_of(type(record)) if f"{table}.{n}" not in without]
        tables[table] = {name: getattr(record, name) for name in names}
    return "\n".join(
        "\n".join(
            [
                *([f"[{table}]"] if table else []),
                *(f"{k} = {_toml(v)}" for k, v in fields.items() if v is not None),
                "",
            ]
        )
        for table, fields in tables.items()
    )


def help_of(record: type) -> dict[str, str]:
    """Return by field what "Attributes" of a docstring has of it."""
    doc = (inspect.getdoc(record) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    ([\w, ]+): (.*(?:\n        .*)*)", doc, re.MULTILINE)
    return {
        name.strip(): " ".join(text.split()) for names, text in entries for name in names.split(",")
    }


def _how(kinds: tuple[Any, ...]) -> dict[str, Any]:
    """Return how argparse reads a field."""
    if bool in kinds:
        return {"action": argparse.BooleanOptionalAction}
    plain = tuple(kind for kind in kinds if get_origin(kind) is not tuple)
    tuples = [get_args(kind)[0] for kind in kinds if get_origin(kind) is tuple]
    if not tuples:
        return {"type": _Reader(plain), "metavar": _metavar(plain)}
    items = tuple(member for kind in tuples for member in _members(kind))
    return {
        "type": _Reader((*plain, *items)),
        "nargs": "*",
        "action": _AsTuple,
        "metavar": _metavar(items),
        "const": plain,
    }


class _AsTuple(argparse.Action):
    """Stores a tuple, or the one value where the field takes it as it is (`const`)."""

    def __call__(self, _: Any, namespace: Any, values: Any, option: Any = None) -> None:
        alone = len(values) == 1 and _takes(self.const, values[0])
        setattr(namespace, self.dest, values[0] if alone else tuple(values))


class _Reader:
    """Reads a word as the first kind that it can be."""

    def __init__(self, kinds: tuple[Any, ...]) -> None:
        self._kinds = kinds

    def __call__(self, word: str) -> Any:
        if torch.dtype in self._kinds and isinstance(getattr(torch, word, None), torch.dtype):
            return getattr(torch, word)
        for kind in (int, float):
            if kind in self._kinds or (kind is int and -1 in _choices(self._kinds)):
                try:
                    return kind(word)
                except ValueError:
                    continue
        if str in self._kinds or word in _choices(self._kinds):
            return word
        raise argparse.ArgumentTypeError(f"({word}) must be {_metavar(self._kinds)}")


def _takes(kinds: tuple[Any, ...], value: Any) -> bool:
    return type(value) in kinds or value in _choices(kinds)


def _choices(kinds: tuple[Any, ...]) -> list[Any]:
    return [kind for kind in kinds if isinstance(kind, str | int)]


def _metavar(kinds: tuple[Any, ...]) -> str:
    names = [kind if isinstance(kind, str) else getattr(kind, "__name__", "") for kind in kinds]
    return "|".join(name for name in names if name not in ("", "NoneType"))


def _members(hint: Any) -> Iterator[Any]:
    """Yield the classes, tuples and literal values that an annotation is a union of."""
    if get_origin(hint) in (Union, types.UnionType):
        for member in get_args(hint):
            yield from _members(member)
    elif get_origin(hint) is Literal:
        yield from get_args(hint)
    else:
        yield hint


def _has_record(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind) or any(_has_record(part) for part in get_args(kind))


def _flat(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{key}", of) for key, of in value.items())
        else:
            yield name, value


def _words(action: argparse.Action, value: Any) -> list[str]:
    """Return the words of a command line that give a flag its value of a file."""
    flag = action.option_strings[0]
    if isinstance(action, argparse.BooleanOptionalAction):
        return [flag if value else action.option_strings[-1]]
    if action.nargs == 0:  # "store_true"
        return [flag] if value else []
    if isinstance(value, list):
        return [flag, *map(_word, value)] if value or action.nargs == "*" else []
    return [f"{flag}={_word(value)}"]


def _word(value: Any) -> str:
    """Return a value as a word; a table is PATH,key=value,..."""
    if not isinstance(value, dict):
        return str(value)
    rest = {name: of for name, of in value.items() if name != "path"}
    return ",".join([str(value["path"]), *(f"{name}={of}" for name, of in rest.items())])


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if dataclasses.is_dataclass(value):
        pairs = vars(value).items()
        return f"{{{', '.join(f'{name} = {_toml(of)}' for name, of in pairs)}}}"
    if isinstance(value, torch.dtype):
        value = str(value).removeprefix("torch.")
    return json.dumps(str(value), ensure_ascii=False)  # a basic string of TOML has these escapes
