"""Command-line flags and TOML files, made of the fields of records of options.

A field `offload` of the record under [memory] is the flag --offload and the line `offload = [...]`
of the table; where two records have a field of one name, the flag has the table's in front. Help
is what the record's docstring has of the field. Values are checked by the record itself.

A TOML file stands for flags: those of the command line come behind it, and win.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
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

from moecore.base.fields import quote
from moecore.recipes.files import named, read_text, shown_path
from moecore.recipes.stages import options_of, split_stages

MAX_CONFIG_BYTES = 1 << 24
COMMAND_FLAGS = {"help", "config", "dry_run", "gpu", "gpus"}  # flags of a command, not of a run
Records = Mapping[str, type]  # by the name of the table


def add_records(
    parser: argparse.ArgumentParser,
    records: Records,
    *,
    without: Sequence[str] = (),
    prefixed: Sequence[str] = (),
) -> None:
    """Add a flag for each field; what is not given has no attribute in the namespace.

    Args:
        parser: to add to.
        records: by table.
        without: "table.field" of what has no flag.
        prefixed: tables whose flags begin with the name of the table.
    """
    names = Counter(
        name
        for table, record in records.items()
        for name in kinds_of(record)
        if f"{table}.{name}" not in without
    )
    flags = {flag for action in parser._actions for flag in action.option_strings}
    for table, record in records.items():
        summary = (inspect.getdoc(record) or "").partition("\n")[0]
        group = parser.add_argument_group(f"[{table}]", summary)
        texts = help_of(record)
        for name, kinds in kinds_of(record).items():
            if f"{table}.{name}" in without:
                continue
            flag = f"--{name.replace('_', '-')}"
            if names[name] > 1 or flag in flags or table in prefixed:
                flag = f"--{table}-{name.replace('_', '-')}"
            group.add_argument(
                flag,
                dest=f"{table}.{name}",
                default=argparse.SUPPRESS,
                help=texts.get(name, "").replace("%", "%%"),
                **_argparse_options(kinds),
            )


def kinds_of(record: type) -> dict[str, tuple[Any, ...]]:
    """Return by field what a value may be; fields that are records of their own are left out."""
    hints = {
        name: tuple(_members(hint))
        for name, hint in get_type_hints(record).items()
        if name in {field.name for field in dataclasses.fields(record)}
    }
    return {
        name: kinds for name, kinds in hints.items() if not any(_has_record(kind) for kind in kinds)
    }


def values_of(args: argparse.Namespace, table: str) -> dict[str, Any]:
    """Return the fields of a record that were given."""
    prefix = f"{table}."
    return {
        name.removeprefix(prefix): value
        for name, value in vars(args).items()
        if name.startswith(prefix)
    }


def build(args: argparse.Namespace, table: str, record: Any, **extra: Any) -> Any:
    """Return the record of a table, or None where no field of it was given."""
    values = values_of(args, table) | extra
    if not values:
        return None
    for field in dataclasses.fields(record):
        defaults = (field.default, field.default_factory)
        if field.name not in values and defaults == (dataclasses.MISSING,) * 2:
            raise ValueError(f"[{table}] ({values}) must have {field.name}: give it too")
    return record(**values)


def parse(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str],
    option: str = "--config",
    *,
    tables: Sequence[str] = (),
    takes_stages: bool = False,
) -> argparse.Namespace:
    """Return the arguments, those of a TOML file first; `flags` are the names that a run saves.

    Args:
        parser: of all options.
        arguments: words of the command line.
        option: that names the file.
        tables: options whose values may be tables with a path: {path = "a", weight = 1}.
        takes_stages: whether the file may have [[stages]]. Then `stages` has their tables, and
            `stage_args` the arguments of each; both are None without stages.

    Raises:
        ValueError: for a file that cannot be read, a key that no flag has, or a value of another
            type than its flag's.
    """
    words = list(arguments)
    if words and not words[0].startswith("-"):  # moecore pretrain config.toml
        words.insert(0, option)
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument(option, type=Path)
    file = vars(first.parse_known_args(words)[0])[option.lstrip("-")]
    flags = {action.dest for action in parser._actions} - COMMAND_FLAGS
    if file is None:
        args = parser.parse_args(words)
        args.stages, args.stage_args, args.flags = None, None, flags
        return args
    content, name = read_toml(file, option), named(option, file)
    stages: list[dict[str, Any]] = []
    if takes_stages:
        content, stages = split_stages(content)
        if stages and any(word.partition("=")[0] == "--steps" for word in words):
            raise ValueError("--steps must be left out with [[stages]], which have their own")
        flags = flags - {"steps"} | {"stages"} if stages else flags
    words = [*words_of(parser, content, name, option, tables=tables), *words]
    args = parser.parse_args(words)
    args.stages, args.flags = stages or None, flags
    args.stage_args = [
        parser.parse_args(
            [*words, *words_of(parser, options_of(table), name, option, tables=tables)]
        )
        for table in stages
    ] or None
    for stage_args in args.stage_args or []:
        stage_args.stages, stage_args.flags = stages, flags
    return args


def read_toml(file: Path, option: str) -> dict[str, Any]:
    """Return the content of a TOML file."""
    name, text = named(option, file), read_text(file, option, max_bytes=MAX_CONFIG_BYTES)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"{name} must be TOML that nests less deeply: flatten it") from None
    except ValueError as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{name} must be TOML: {reason}: correct it") from None


def words_of(
    parser: argparse.ArgumentParser,
    content: Mapping[str, Any],
    name: str,
    option: str,
    *,
    tables: Sequence[str],
) -> list[str]:
    """Return the flags that the content of a file stands for; errors begin with its name."""
    actions = _actions(parser, without=("help", option.lstrip("-")))
    words: list[str] = []
    keys: dict[str, str] = {}  # by destination
    for key, value in flatten(content):
        action = actions.get(key.replace("-", "_"))
        if action is None:
            hint = _hint(key, actions)
            raise ValueError(f"{name} must have no {shown_path(key)}, which no flag has: {hint}")
        if action.dest in keys:
            pair = f"{keys[action.dest]} and {key}"
            raise ValueError(f"{name} must have one of {pair}, which are one option: remove one")
        keys[action.dest] = key
        try:
            words += _words(parser, action, value, takes_tables=action.dest in tables)
        except (argparse.ArgumentError, argparse.ArgumentTypeError) as error:
            reason = " ".join((getattr(error, "message", "") or str(error)).split())
            reason = re.sub(r"^\(.*\) must", "must", reason)[:300]
            reason = reason if reason.startswith("must") else f"must be valid: {reason}"
            raise ValueError(f"{name}: {key} ({quote(value)}) {reason}: correct it") from None
    return words


def _actions(
    parser: argparse.ArgumentParser, *, without: Sequence[str]
) -> dict[str, argparse.Action]:
    """Return actions by key of a file: table.field, or a flag whose hyphens are underscores."""
    actions: dict[str, argparse.Action] = {}
    for action in parser._actions:
        is_pair = isinstance(action, argparse.BooleanOptionalAction)  # --name and --no-name
        flags = action.option_strings[:1] if is_pair else action.option_strings
        names = (action.dest, *(flag.lstrip("-").replace("-", "_") for flag in flags))
        actions |= dict.fromkeys(names, action) if action.dest not in without else {}
    return actions


def _hint(key: str, actions: Mapping[str, argparse.Action]) -> str:
    """Return what to do about a key that no flag has."""
    close = difflib.get_close_matches(key[:80].replace("-", "_"), list(actions), n=1, cutoff=0.7)
    return f"did you mean {close[0]}?" if close else "remove it"


def as_toml(args: argparse.Namespace, records: Mapping[str, Any]) -> str:
    """Return the lines that `parse` reads: options that have flags, and the fields of records."""
    options = {name: value for name, value in vars(args).items() if "." not in name}
    tables = {"": {name: value for name, value in options.items() if name in args.flags}}
    for table, record in records.items():
        if record is not None:
            names = [n for n in kinds_of(type(record)) if f"{table}.{n}" in args.flags]
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


def _argparse_options(kinds: tuple[Any, ...]) -> dict[str, Any]:
    """Return how argparse reads a field."""
    if bool in kinds:
        return {"action": argparse.BooleanOptionalAction}
    plain = tuple(kind for kind in kinds if get_origin(kind) is not tuple)
    tuples = [get_args(kind)[0] for kind in kinds if get_origin(kind) is tuple]
    if not tuples:
        return {"type": _WordReader(plain), "metavar": _metavar(plain)}
    items = tuple(member for kind in tuples for member in _members(kind))
    return {
        "type": _WordReader((*plain, *items)),
        "nargs": "*",
        "action": _AsTuple,
        "metavar": _metavar(items),
        "const": plain,
    }


class _AsTuple(argparse.Action):
    """Stores a tuple, or the one value where the field takes it as it is (`const`)."""

    def __call__(self, _: Any, namespace: Any, values: Any, option: Any = None) -> None:
        is_value = len(values) == 1 and _takes(self.const, values[0])
        setattr(namespace, self.dest, values[0] if is_value else tuple(values))


class _WordReader:
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


def flatten(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values of a TOML file by key; `table.field` is the key of a table's field."""
    for name, value in content.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{key}", of) for key, of in value.items())
        else:
            yield name, value


def _words(
    parser: argparse.ArgumentParser, action: argparse.Action, value: Any, *, takes_tables: bool
) -> list[str]:
    """Return the words of a command line that give a flag its value of a file.

    Raises:
        argparse.ArgumentError, argparse.ArgumentTypeError: for a value that the flag does not take.
    """
    flag = action.option_strings[0]
    is_pair = isinstance(action, argparse.BooleanOptionalAction)
    if is_pair or action.nargs == 0:  # 0: "store_true"
        if not isinstance(value, bool):
            raise argparse.ArgumentTypeError("must be true or false")
        return [flag] if value else [action.option_strings[-1]] if is_pair else []
    if not isinstance(value, list):
        return [f"{flag}={_word(parser, action, value, takes_tables=takes_tables)}"]
    if action.nargs is None:
        raise argparse.ArgumentTypeError("must be one value, not an array")
    words = [_word(parser, action, item, takes_tables=takes_tables) for item in value]
    for word in words:  # argparse would take it for a flag
        if word.startswith("-") and not parser._negative_number_matcher.match(word):
            raise argparse.ArgumentTypeError("must have no value that begins with -")
    return [flag, *words] if words or action.nargs == "*" else []


def _word(
    parser: argparse.ArgumentParser, action: argparse.Action, value: Any, *, takes_tables: bool
) -> str:
    """Return a value as a word that the flag takes; a table is PATH,key=value,..."""
    if isinstance(value, dict):
        if not takes_tables:
            raise argparse.ArgumentTypeError("must be a value, not a table")
        if not isinstance(value.get("path"), str):
            raise argparse.ArgumentTypeError("must have a path, which is a string")
        if any(isinstance(of, dict | list) for of in value.values()):
            raise argparse.ArgumentTypeError("must have no table or array inside")
        rest = {name: of for name, of in value.items() if name != "path"}
        word = ",".join([value["path"], *(f"{name}={of}" for name, of in rest.items())])
    elif isinstance(value, str | int | float):
        is_text = action.type in (None, Path) and not action.choices
        if (is_text or takes_tables) and not isinstance(value, str):
            raise argparse.ArgumentTypeError("must be a string")
        word = str(value)
    else:
        raise argparse.ArgumentTypeError("must be a string, a number, true or false")
    parser._check_value(action, parser._get_value(action, word))
    return word


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if dataclasses.is_dataclass(value) or isinstance(value, dict):
        pairs = (value if isinstance(value, dict) else vars(value)).items()
        return f"{{{', '.join(f'{name} = {_toml(of)}' for name, of in pairs)}}}"
    if isinstance(value, torch.dtype):
        value = str(value).removeprefix("torch.")
    return json.dumps(str(value), ensure_ascii=False)  # a basic string of TOML has these escapes
