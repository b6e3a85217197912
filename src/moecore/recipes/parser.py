"""The parser of all commands: flags and a TOML file become a frozen dataclass.

A command has one dataclass. A plain field is a flag and a top-level key of the file. A field whose
type is a record of options is a table: the record's fields are flags and keys of the table. tyro
reads the flags and prints the help. Flags take precedence over the file.

    batch_size: Count = 8                       --batch-size 4      batch_size = 4
    optimizer: OptimizerConfig                  --lr 1e-3           [optimizer] lr = 1e-3
    lora: Annotated[LoRAOptions, Table(prefix)] --lora-rank 8       [lora] rank = 8

A flag begins with the name of its table if `Table` says so, or if two fields have the same name.
"""

import contextlib
import difflib
import inspect
import io
import sys
import tomllib
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, TypedDict, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

from moecore.base.command_options import (
    CommandOption,
    find_table,
    format_toml_tables,
    get_field_default,
    list_hint_members,
    list_options,
    make_flag_name,
)
from moecore.base.fields import check_value, quote
from moecore.recipes.files import format_option, format_path, read_text
from moecore.recipes.schedule import get_stage_options, split_stages

MAX_CONFIG_BYTES = 1 << 24
FILE = "config"  # the field with the path of the TOML file; `make_unsaved_field` in such a command
ConfigT = TypeVar("ConfigT")
Flags: Any = TypedDict  # whose fields are made at run time
Values = dict[CommandOption, Any]


def parse(command: type[ConfigT], words: Sequence[str] | None = None, *, prog: str) -> ConfigT:
    """Return the options of a command from its command line and TOML file.

    Args:
        command: the dataclass of the command. If it has a field `stages`, the field gets one
            instance of `command` per [[stages]] table, with the run's values for other fields.
        words: the command line; None = sys.argv. A first word that is no flag is the TOML file.
        prog: the name of the command, for help.
    """
    command_class: Any = command
    options = list_options(command_class)
    words = sys.argv[1:] if words is None else list(words)
    has_file = any(option.key == FILE and not option.is_saved for option in options)
    if has_file and words and not words[0].startswith("-"):  # moecore pretrain config.toml
        words.insert(0, f"--{FILE}")
    flags = _read_words(command, options, words, prog)
    file = next((value for option, value in flags.items() if option.key == FILE), None)
    if not has_file or file is None:
        return _build_command(command, options, flags)
    content, name = read_toml(file, f"--{FILE}"), format_option(f"--{FILE}", file)
    tables: list[dict[str, Any]] = []
    if "stages" in {field.name for field in fields(command)}:  # type: ignore[arg-type]
        content, tables = split_stages(content)
        if tables and any(option.key == "steps" for option in flags):
            raise ValueError("--steps must be left out with [[stages]], which have their own")
    values = parse_toml_content(options, content, name) | flags
    stages = [
        _build_command(command, options, values | parse_toml_content(options, stage_options, name))
        for stage_options in map(get_stage_options, tables)
    ]
    config = _build_command(command, options, values)
    if not stages:
        return config
    records: Any = (config, *stages)
    run, *stages = (replace(record, stage_tables=tuple(tables)) for record in records)
    result: ConfigT = replace(run, stages=tuple(stages))
    return result


def parse_toml_content(
    options: Sequence[CommandOption], content: Mapping[str, Any], prefix: str
) -> Values:
    """Return the values of a TOML file's `content` by option; errors begin with `prefix`."""
    by_key = {flag.replace("-", "_"): option for option in options for flag in option.flags}
    by_key |= {option.key: option for option in options}
    by_key = {key: option for key, option in by_key.items() if key != FILE}
    values: Values = {}
    keys: dict[CommandOption, str] = {}
    for key, value in flatten_tables(content):
        option = by_key.get(key.replace("-", "_"))
        if option is None:
            hint = _suggest_name(key.replace("-", "_"), by_key)
            raise ValueError(f"{prefix} must have no {format_path(key)}, which no flag has: {hint}")
        if option in keys:
            pair = f"{keys[option]} and {key}"
            raise ValueError(f"{prefix} must have one of {pair}, which are one option: remove one")
        keys[option] = key
        try:
            values[option] = _check_and_convert(f"{prefix}: {key}", value, option.hint)
        except ValueError as error:
            raise ValueError(str(error).replace("a tuple", "an array")) from None
    return values


def read_toml(file: Path, option: str) -> dict[str, Any]:
    """Return the content of a TOML file; ValueErrors name the flag `option` and the file."""
    name, text = format_option(option, file), read_text(file, option, max_bytes=MAX_CONFIG_BYTES)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"{name} must be TOML that nests less deeply: flatten it") from None
    except ValueError as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{name} must be TOML: {reason}: correct it") from None


def flatten_tables(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield keys and values of a TOML file; a field of a table has the key `table.field`."""
    for name, value in content.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{key}", item) for key, item in value.items())
        else:
            yield name, value


def format_toml(config: Any) -> str:
    """Return a command's options as TOML that `parse` reads; options that are None are omitted."""
    tables: dict[str, dict[str, Any]] = {"": {}}
    config_class: Any = type(config)
    for option in list_options(config_class):
        if option.is_saved:
            tables.setdefault(option.table, {})[option.name] = option.get_value(config)
    if stages := getattr(config, "stage_tables", ()):
        tables[""] |= {"steps": None, "stages": stages}
    return format_toml_tables(tables)


def _read_words(
    command: type, options: Sequence[CommandOption], words: Sequence[str], prog: str
) -> Values:
    """Return the values of the flags in `words`; ValueError for a flag that is not in `options`."""
    import tyro

    conf: Any = tyro.conf
    names = {make_flag_name(w.partition("=")[0].lstrip("-")) for w in words if w[:2] == "--"}
    flags = {name for option in options for flag in option.flags for name in (flag, f"no-{flag}")}
    for name in sorted(names - flags - {"help"}):
        hint = _suggest_name(name, flags, "--")
        raise ValueError(f"--{format_path(name)} must be a flag of {prog}: {hint}")
    if not {"-h", "--help"} & set(words):  # tyro takes 10 ms per option
        options = [
            o for o in options if {*o.flags, f"no-{o.flag}"} & names or o.spelling.is_positional
        ]
    tables: dict[str, dict[str, Any]] = {}
    for option in options:
        has_default = option.default is not MISSING
        hint = f"(default: {_format_default(option.default)})" if has_default else ""
        aliases = [f"--{flag}" for flag in option.flags[1:]]
        arg = conf.arg(
            name=option.flag,
            metavar=option.word_name,
            aliases=aliases,
            help=option.text,
            help_behavior_hint=hint,
        )
        word: Any = Annotated[_make_flag_annotation(option.hint, option.default), arg]
        word = conf.Positional[word] if option.spelling.is_positional else word
        tables.setdefault(option.table, {})[option.name] = word
    top = tables.pop("", {})
    records = get_type_hints(command, include_extras=True)
    for name, hints in tables.items():
        table = find_table(records[name])
        assert table is not None
        top[name] = conf.OmitArgPrefixes[_make_flags_class(name, hints, table.record)]
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            results: dict[str, Any] = tyro.cli(
                _make_flags_class(command.__name__, top, command), prog=prog, args=words
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise ValueError(_unbox_message(output.getvalue())) from None
    values: Values = {}
    for option in options:
        group = results.get(option.table, {}) if option.table else results
        if option.name in group:
            values[option] = _check_and_convert(f"--{option.flag}", group[option.name], option.hint)
    return values


def _make_flags_class(name: str, hints: dict[str, Any], record: Any) -> Any:
    """Return TypedDict `name` of {flag: type} for tyro, with the docstring of class `record`."""
    flags = Flags(name, hints, total=False)
    flags.__doc__ = inspect.cleandoc(record.__doc__ or "").partition("\n\nAttributes:")[0]
    return flags


def _suggest_name(name: str, known_names: Iterable[str], prefix: str = "") -> str:
    """Return a hint for an unknown name: use the most similar known name, or remove it."""
    close = difflib.get_close_matches(name[:80], sorted(known_names), n=1, cutoff=0.7)
    return f"did you mean {prefix}{close[0]}?" if close else "remove it"


def _unbox_message(box_text: str) -> str:
    lines = [line.strip("│ ") for line in box_text.splitlines()[1:]]
    end = next((i for i, line in enumerate(lines) if line.startswith(("─", "╰"))), len(lines))
    return f"{' '.join(' '.join(lines[:end]).split()).rstrip('.')[:400]}: see --help"


def _build_command(
    command: type[ConfigT], options: Sequence[CommandOption], values: Values
) -> ConfigT:
    """Return an instance of a command's dataclass; ValueError if a value is missing."""
    tables: dict[str, dict[str, Any]] = {}
    for option, value in values.items():
        tables.setdefault(option.table, {})[option.name] = value
    arguments = tables.pop("", {})
    hints = get_type_hints(command, include_extras=True)
    for item in fields(command):  # type: ignore[arg-type]
        default, record_values = get_field_default(item), tables.get(item.name)
        if record_values is not None and isinstance(default, dict):
            arguments[item.name] = record_values
        elif record_values is not None and is_dataclass(default):
            record: Any = default
            arguments[item.name] = replace(record, **record_values)
        elif record_values is not None:
            table = find_table(hints[item.name])
            assert table is not None and table.record is not None
            for part in fields(table.record):
                if part.name not in record_values and get_field_default(part) is MISSING:
                    raise ValueError(
                        f"[{item.name}] ({record_values}) must have {part.name}: give it too"
                    )
            arguments[item.name] = table.record(**record_values)
        elif item.name not in arguments and default is MISSING:
            option = next(
                option
                for option in options
                if item.name in (option.key, option.table) and option.default is MISSING
            )
            raise ValueError(f"{option.word_name or f'--{option.flag}'} must be set: give it")
    return command(**arguments)


def _check_and_convert(field_name: str, value: Any, hint: Any) -> Any:
    """Convert a value to the type `hint` of its field; ValueErrors begin with `field_name`."""
    try:
        converted = _convert_value(value, hint)
    except ValueError as error:
        raise ValueError(f"{field_name} ({quote(value)}) must be valid: {error}") from None
    check_value(field_name, converted, hint)
    is_float = type(converted) is int and int not in list_hint_members(hint)
    return float(converted) if is_float else converted


def _convert_value(value: Any, hint: Any) -> Any:
    """Convert strings, lists and dicts to paths, dtypes, tuples and records by a type `hint`."""
    kinds = list_hint_members(hint)
    items = [get_args(kind)[0] for kind in kinds if get_origin(kind) is tuple]
    if isinstance(value, list | tuple) and items:
        item_hint = reduce(or_, items)
        converted = tuple(_convert_value(item, item_hint) for item in value)
        is_value = len(converted) == 1 and converted[0] in kinds  # ("gemm_last",)
        return converted[0] if is_value else converted
    for kind in kinds:
        if hasattr(kind, "from_word"):
            return kind.from_word(value) if isinstance(value, str) else kind.from_table(value)
        if isinstance(value, str) and kind is Path:
            return Path(value)
        if isinstance(value, str) and kind is torch.dtype:
            return getattr(torch, value, value)
    return value


def _make_flag_annotation(hint: Any, default: Any = None) -> Any:
    """Return the type from which tyro parses a flag; no None if `default` is None or missing."""
    if get_origin(hint) is Annotated:
        return _make_flag_annotation(get_args(hint)[0], default)
    if get_origin(hint) in (Union, types.UnionType):
        members = [_make_flag_annotation(member) for member in get_args(hint)]
        if default in (None, MISSING):  # an option that is not set stays None
            members = [member for member in members if member is not type(None)]
        return bool if bool in members else Union[tuple(members)]  # noqa: UP007
    if get_origin(hint) is tuple:
        return tuple[_make_flag_annotation(get_args(hint)[0]), ...]  # type: ignore[misc]
    return str if hint is torch.dtype or hasattr(hint, "from_word") else hint


def _format_default(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(_format_default, value)) or "none"
    return str(value).removeprefix("torch.")
