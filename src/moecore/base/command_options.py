"""Options of a command: the fields of its dataclass and of nested dataclasses (tables in TOML).

`list_options` returns one `CommandOption` for each flag. `moecore.recipes.parser` parses flags and
TOML files by this list.
"""

import dataclasses
import json
import re
import types
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cache
from os import PathLike
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

Fields = Mapping[str, Any]  # the fields of a record that are set


class UsageError(Exception):
    """Raised for wrong arguments of a command; the command then ends with `exit_code`."""

    exit_code = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Annotation metadata of a field that is a dataclass: how its fields become options."""

    record: type | None = None  # the dataclass; None = the annotated type
    without: tuple[str, ...] = ()  # names of fields that are not options
    prefix: bool = False  # whether flags begin with the name of the annotated field


@dataclass(frozen=True, kw_only=True, slots=True)
class Spelling:
    """Annotation metadata of a field: how the command line spells the option of this field."""

    is_positional: bool = False  # whether the option is a word without a flag
    alias: str | None = None  # a second name of the field, as a flag and as a key


POSITIONAL = Spelling(is_positional=True)


class CommandOption(NamedTuple):
    """One option of a command: a command-line flag, which is also a key of a TOML file."""

    table: str  # the command's field whose dataclass has this option; "" = the command itself
    name: str  # of the field
    flag: str  # without hyphens in front
    hint: Any  # the annotation of the field
    default: Any  # `MISSING` if the value depends on other options or must be set
    text: str  # help text
    is_saved: bool  # whether RUN_DIR/config.toml has the option

    @property
    def spelling(self) -> Spelling:
        """The `Spelling` in the annotation, or the default spelling."""
        notes = getattr(self.hint, "__metadata__", ())
        return next((note for note in notes if isinstance(note, Spelling)), Spelling())

    @property
    def word_name(self) -> str | None:
        """The name of a positional option in help and errors; None = an option with a flag."""
        return self.name.upper() if self.spelling.is_positional else None

    @property
    def flags(self) -> tuple[str, ...]:
        """The flag, and its alias if there is one, without leading hyphens."""
        alias = self.spelling.alias
        return (self.flag,) if alias is None else (self.flag, make_flag_name(alias))

    @property
    def key(self) -> str:
        """The dotted key of a TOML file, such as "table.name"."""
        return f"{self.table}.{self.name}" if self.table else self.name

    def get_value(self, command: Any) -> Any:
        """Return the option's value in a command's record; None if the option is not set."""
        record = getattr(command, self.table) if self.table else command
        is_mapping = isinstance(record, Mapping)
        return record.get(self.name) if is_mapping else getattr(record, self.name, None)


def make_internal_field(default: Any) -> Any:
    """Return a dataclass field with this default, which is not an option of the command."""
    return field(default=default, metadata={"is_option": False})


def make_unsaved_field(default: Any) -> Any:
    """Return a dataclass field with this default, an option that RUN_DIR/config.toml omits."""
    return field(default=default, metadata={"is_saved": False})


@cache
def list_options(command: Any) -> tuple[CommandOption, ...]:
    """Return the options of a command's dataclass, then the options of its nested dataclasses."""
    texts, hints = read_field_texts(command), get_type_hints(command, include_extras=True)
    options: list[CommandOption] = []
    nested_options: list[CommandOption] = []
    for item in fields(command):
        if not item.metadata.get("is_option", True):
            continue
        hint, is_saved = hints[item.name], item.metadata.get("is_saved", True)
        table = find_table(hint)
        if table is not None:
            nested_options += _list_table_options(item, table, is_saved)
            continue
        flag, text = make_flag_name(item.name), texts.get(item.name, "")
        default = get_field_default(item)
        options.append(CommandOption("", item.name, flag, hint, default, text, is_saved))
    counts = Counter(option.flag for option in options + nested_options)
    return *options, *(
        option._replace(flag=make_flag_name(f"{option.table}_{option.name}"))
        if counts[option.flag] > 1
        else option
        for option in nested_options
    )


def _list_table_options(
    field: dataclasses.Field[Any], table: Table, is_saved: bool
) -> Iterator[CommandOption]:
    """Yield an option for each field of the dataclass that is the type of a command's `field`."""
    record: Any = table.record
    default, texts = get_field_default(field), read_field_texts(record)
    hints = get_type_hints(record, include_extras=True)
    for part in fields(record):
        if part.name in table.without or _has_record(hints[part.name]):
            continue
        value = getattr(default, part.name) if is_dataclass(default) else get_field_default(part)
        value = MISSING if isinstance(default, dict) else value  # depends on other options
        flag = make_flag_name(f"{field.name}_{part.name}" if table.prefix else part.name)
        hint, text = hints[part.name], texts.get(part.name, "")
        yield CommandOption(field.name, part.name, flag, hint, value, text, is_saved)


def read_field_texts(record: type) -> dict[str, str]:
    """Return {field: help text} from the "Attributes:" sections of a class and its bases."""
    texts: dict[str, str] = {}
    for base in reversed(record.__mro__):
        doc = (base.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
        for names, text in re.findall(r"^ {8}([\w, ]+): (.*(?:\n {9,}.*)*)", doc, re.MULTILINE):
            texts |= {name.strip(): " ".join(text.split()) for name in names.split(",")}
    return texts


def find_table(hint: Any) -> Table | None:
    """Return the `Table` in a field's annotation, with its dataclass; None for a plain option."""
    notes = getattr(hint, "__metadata__", ())
    table = next((note for note in notes if isinstance(note, Table)), Table())
    if table.record is not None:
        return table
    records: list[Any] = [kind for kind in list_hint_members(hint) if is_dataclass(kind)]
    is_record = records and not hasattr(records[0], "from_word")
    return replace(table, record=records[0]) if is_record else None


def list_hint_members(hint: Any) -> list[Any]:
    """Return the members of a union or Literal annotation, otherwise the annotation in a list."""
    if get_origin(hint) is Annotated:
        return list_hint_members(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return [kind for member in get_args(hint) for kind in list_hint_members(member)]
    return list(get_args(hint)) if get_origin(hint) is Literal else [hint]


def _has_record(hint: Any) -> bool:
    return is_dataclass(hint) or any(_has_record(part) for part in get_args(hint))


def get_field_default(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a field, calling its factory; `MISSING` if there is no default."""
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default


def make_flag_name(name: str) -> str:
    """Return the flag of a field: its name with hyphens for underscores, without leading "--"."""
    return name.replace("_", "-")


def format_toml_tables(tables: Mapping[str, Fields]) -> str:
    """Return {table: {key: value}} as TOML, table "" first; values that are None are left out."""
    texts = list[str]()
    for table, values in tables.items():
        lines = [f"{k} = {format_toml_value(v)}" for k, v in values.items() if v is not None]
        if lines:
            texts.append("\n".join([*([f"[{table}]"] if table else []), *lines, ""]))
    return "\n".join(texts)


def format_toml_value(value: Any) -> str:
    """Return a value as TOML; a record becomes an inline table."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_toml_value, value))}]"
    if is_dataclass(value) or isinstance(value, dict):
        record: Any = value
        pairs = (record if isinstance(record, dict) else dataclasses.asdict(record)).items()
        return f"{{{', '.join(f'{name} = {format_toml_value(of)}' for name, of in pairs)}}}"
    if not isinstance(value, str | PathLike):
        value = str(value).removeprefix("torch.")  # a dtype
    return json.dumps(str(value), ensure_ascii=False)  # a basic string of TOML has these escapes
