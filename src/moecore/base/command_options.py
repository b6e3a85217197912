"""A command's options: the fields of its dataclass and of the option records in this dataclass.

`list_options` returns one `CommandOption` for each flag. `moecore.recipes.parser` reads flags and
TOML files with this list.
"""

from __future__ import annotations

import dataclasses
import re
import types
from collections import Counter
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

Fields = Mapping[str, Any]  # the fields of a record that are set


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A marker in `Annotated` that says how the fields of an option record become flags.

    Attributes:
        record: the dataclass of options; None = the annotated type.
        without: names of fields that have no flag.
        prefix: whether the flags begin with the name of the annotated field.
    """

    record: type | None = None
    without: tuple[str, ...] = ()
    prefix: bool = False


POSITIONAL = "positional"  # note of the annotation of a word without a flag


class CommandOption(NamedTuple):
    """A command-line flag, which is also a key of a TOML file.

    Attributes:
        table: name of the command's field that has the option record; "" = a field of the command.
        name: name of the option's field.
        flag: the flag without leading hyphens.
        hint: type annotation of the field.
        default: default value; `MISSING` if it depends on other options or must be set.
        text: help text of the flag.
        is_saved: whether the option is written to RUN_DIR/config.toml.
    """

    table: str
    name: str
    flag: str
    hint: Any
    default: Any
    text: str
    is_saved: bool

    @property
    def key(self) -> str:
        """The option's key in a TOML file."""
        return f"{self.table}.{self.name}" if self.table else self.name


def internal(default: Any) -> Any:
    """Return a dataclass field with this default that is not offered as an option."""
    return field(default=default, metadata={"is_option": False})


def unsaved(default: Any) -> Any:
    """Return a dataclass field whose option is not written to RUN_DIR/config.toml."""
    return field(default=default, metadata={"is_saved": False})


@cache
def list_options(command: Any) -> tuple[CommandOption, ...]:
    """Return the options of a command's dataclass, followed by the options of its records.

    If two options have one flag, the flag of a record's option is prefixed with the record's name.
    """
    options: list[CommandOption] = []
    texts, hints = field_texts(command), get_type_hints(command, include_extras=True)
    items = [field for field in fields(command) if field.metadata.get("is_option", True)]
    tables = {field.name: table_of(hints[field.name]) for field in items}
    for item in items:
        if tables[item.name] is None:
            flag, is_saved = flag_of(item.name), item.metadata.get("is_saved", True)
            text = texts.get(item.name, "")
            options.append(
                CommandOption(
                    "", item.name, flag, hints[item.name], default_of(item), text, is_saved
                )
            )
    for item in items:
        table = tables[item.name]
        if table is None or table.record is None:
            continue
        default = None if table.record is None else default_of(item)
        texts, hints_of = field_texts(table.record), get_type_hints(table.record, None, None, True)
        for part in fields(table.record):
            if part.name in table.without or _has_record(hints_of[part.name]):
                continue
            value = getattr(default, part.name) if is_dataclass(default) else default_of(part)
            value = MISSING if isinstance(default, dict) else value  # depends on other options
            flag = flag_of(f"{item.name}_{part.name}" if table.prefix else part.name)
            is_saved = item.metadata.get("is_saved", True)
            hint, text = hints_of[part.name], texts.get(part.name, "")
            options.append(CommandOption(item.name, part.name, flag, hint, value, text, is_saved))
    number = Counter(option.flag for option in options)
    return tuple(
        option._replace(flag=flag_of(f"{option.table}_{option.name}"))
        if option.table and number[option.flag] > 1
        else option
        for option in options
    )


def field_texts(record: type) -> dict[str, str]:
    """Return the help text of each field, read from "Attributes:" in the class docstrings."""
    texts: dict[str, str] = {}
    for base in reversed(record.__mro__):
        doc = (base.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
        for names, text in re.findall(r"^ {8}([\w, ]+): (.*(?:\n {9,}.*)*)", doc, re.MULTILINE):
            texts |= {name.strip(): " ".join(text.split()) for name in names.split(",")}
    return texts


def table_of(hint: Any) -> Table | None:
    """Return the `Table` of an annotation whose type is an option record; None = a plain value."""
    notes: tuple[Any, ...] = ()
    if get_origin(hint) is Annotated:
        hint, *notes = get_args(hint)  # type: ignore[assignment]
    table = next((note for note in notes if isinstance(note, Table)), Table())
    if table.record is not None:
        return table
    records: list[Any] = [kind for kind in list_kinds(hint) if is_dataclass(kind)]
    is_record = records and not hasattr(records[0], "from_word")
    return replace(table, record=records[0]) if is_record else None


def list_kinds(hint: Any) -> list[Any]:
    """Return the members of an annotation's union: classes, generic types and literal values."""
    if get_origin(hint) is Annotated:
        return list_kinds(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return [kind for member in get_args(hint) for kind in list_kinds(member)]
    return list(get_args(hint)) if get_origin(hint) is Literal else [hint]


def _has_record(hint: Any) -> bool:
    """Whether an annotation is or contains a dataclass."""
    return is_dataclass(hint) or any(_has_record(part) for part in get_args(hint))


def is_positional(option: CommandOption) -> bool:
    """Return whether the command line takes the option as a positional argument."""
    return POSITIONAL in getattr(option.hint, "__metadata__", ())


def default_of(item: dataclasses.Field[Any]) -> Any:
    """Return the default value of a dataclass field, or `MISSING` if it has no default."""
    if item.default_factory is not MISSING:
        return item.default_factory()
    return item.default


def flag_of(name: str) -> str:
    """Return the flag for a field name: underscores become hyphens, without leading hyphens."""
    return name.replace("_", "-")
