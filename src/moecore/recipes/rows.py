"""Rows of files and data sets, converted to one of the forms that chat.py encodes.

A .jsonl file has a JSON object per line, and a .json file a list of objects. A data set of
`datasets` has rows. Any other file is one text. A column may have another name, see `ColumnNames`.
These forms become messages:

    conversations: [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]
    instruction: "...", input: "...", output: "..."        instruction and input are one message

Legend of roles: human = user, gpt = assistant, observation = tool. A function_call is an
assistant's message whose text is the JSON of a tool call.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from moecore.base.fields import CheckedRecord
from moecore.packing.corpus.files import BLANKS
from moecore.recipes.files import format_option, is_dataset, open_dataset, read_text

RowFormat = Literal["auto", "messages", "sharegpt", "alpaca", "completion", "text"]
# What a row of each format must have; the first one that a row has is its format.
FORMATS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "observation": "tool"}
*_NAMES, _LAST = (" and ".join(f'"{name}"' for name in names) for names in FORMATS.values())
FORMS = f"{', '.join(_NAMES)}, or {_LAST}"


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetOptions(CheckedRecord):
    """The format of the rows of --data, and the part of a data set that is read.

    Attributes:
        format: the format of rows; "auto" selects each row's format by its columns.
        split: the split of a data set with splits.
        config: the configuration of a hub's data set that has several; "" = its only one.
        skip_invalid: skip rows that cannot be encoded; the run prints the first of them.
    """

    format: RowFormat = "auto"
    split: str = "train"
    config: str = ""
    skip_invalid: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnNames(CheckedRecord):
    """The names of the columns of --data.

    Attributes:
        messages: a chat as a list of objects with role and content.
        tools: JSON schemas of the tools of a chat, as a list or its JSON text.
        conversations: a chat as a list of objects with from and value.
        system: a system message before a chat of format sharegpt or alpaca.
        instruction: the request of format alpaca.
        input: more of the request of format alpaca; may be empty.
        output: the answer of format alpaca.
        history: earlier pairs of request and answer of format alpaca.
        prompt: a text, or a chat.
        completion: a text that follows the prompt, or messages that follow it.
        text: a text of which all tokens are learned.
        preferred: the better completion of objective dpo.
        rejected: the worse completion of objective dpo.
        label: whether the completion of objective kto is desirable, true or false.
    """

    messages: str = "messages"
    tools: str = "tools"
    conversations: str = "conversations"
    system: str = "system"
    instruction: str = "instruction"
    input: str = "input"
    output: str = "output"
    history: str = "history"
    prompt: str = "prompt"
    completion: str = "completion"
    text: str = "text"
    preferred: str = "chosen"
    rejected: str = "rejected"
    label: str = "label"

    def rename_columns(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return {field: value} of the columns in `row` that these fields name."""
        names = ((field, getattr(self, field)) for field in self.__dataclass_fields__)
        return {field: row[name] for field, name in names if name in row}


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a file or data set: a location for errors, and the columns or a line of JSON."""

    location: str
    content: Mapping[str, Any] | str

    def parse(self) -> Mapping[str, Any]:
        """Return the columns; ValueError for a line that is no JSON object."""
        content: Any = self.content
        if isinstance(content, str):
            try:
                content = json.loads(content)
            except (ValueError, RecursionError):
                raise ValueError(f"{self.location} must be a JSON object with {FORMS}") from None
        if not isinstance(content, dict):
            kind = type(content).__name__
            raise ValueError(
                f"{self.location} must be a JSON object with {FORMS}: it is of type {kind}"
            )
        return content

    def select_columns(self, names: ColumnNames) -> dict[str, Any]:
        """Return {field: value} of the columns that `names` name; if no name fits, all columns."""
        content = self.parse()
        return names.rename_columns(content) or dict(content)


def read_rows(files: Sequence[Path], option: str, options: DatasetOptions) -> Iterator[Row]:
    """Yield the non-empty rows of files and data sets, in order; ValueErrors name `option`."""
    for path in files:
        name = format_option(option, path)
        if is_dataset(str(path)):
            table = open_dataset(str(path), option, split=options.split, config=options.config)
            for number, row in enumerate(table):
                yield Row(f"{name} row {number}", _remove_none(row))
        elif path.suffix == ".jsonl":
            for number, line in enumerate(read_text(path, option).split("\n"), start=1):
                if text := line.strip(BLANKS):
                    yield Row(f"{name} line {number}", text)
        elif path.suffix == ".json":
            if not isinstance(rows := _parse_json(read_text(path, option)), list):
                raise ValueError(f"{name} must be a JSON list of objects: correct it")
            for number, row in enumerate(rows):
                yield Row(f"{name} row {number}", row)
        else:
            yield Row(name, {"text": read_text(path, option)})


def convert_to_form(
    columns: dict[str, Any], row_format: RowFormat, location: str
) -> dict[str, Any]:
    """Convert a row to `encode_record`'s fields; "auto" returns an unknown format unchanged."""
    formats = FORMATS if row_format == "auto" else {row_format: FORMATS[row_format]}
    kind = next((kind for kind, names in formats.items() if {*names} <= columns.keys()), None)
    if kind is None and row_format != "auto":
        names = " and ".join(FORMATS[row_format])
        raise ValueError(
            f"{location} must have {names} for format {row_format!r}: correct format or [columns]"
        )
    if kind == "sharegpt":
        messages = [*_make_system_message(columns), *_as_list(columns["conversations"], location)]
        return {"messages": [normalize_message(m) for m in messages], "tools": parse_tools(columns)}
    if kind == "alpaca":
        return {"messages": _make_alpaca_messages(columns, location)}
    if kind == "messages" and isinstance(columns["messages"], list):
        messages = [normalize_message(m) for m in columns["messages"]]
        return {"messages": messages, "tools": parse_tools(columns)}
    if kind == "completion":
        prompt, completion = (as_messages(columns[name]) for name in ("prompt", "completion"))
        completion = remove_prompt(prompt, completion)
        return {"prompt": prompt, "completion": completion, "tools": parse_tools(columns)}
    return {name: columns[name] for name in FORMATS["text"]} if kind == "text" else columns


def _as_list(value: Any, location: str) -> list[Any]:
    """Return `value` if it is a list; otherwise raise a ValueError that begins with `location`."""
    if not isinstance(value, list):
        raise ValueError(f"{location} must have a list of messages: correct it")
    return value


def _make_alpaca_messages(columns: dict[str, Any], location: str) -> list[dict[str, Any]]:
    """Return the messages of a row of format alpaca; ValueError if a column has another type."""
    history, context = columns.get("history") or [], columns.get("input") or ""
    request, output = columns["instruction"], columns["output"]
    are_pairs = isinstance(history, list) and all(
        isinstance(pair, list) and len(pair) == 2 for pair in history
    )
    texts = [*chain(*history), request, context, output] if are_pairs else [None]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f"{location} must have texts as instruction, input and output, and pairs of texts as "
            "history: correct it"
        )
    messages = _make_system_message(columns)
    for question, answer in (*history, ("\n".join(filter(None, (request, context))), output)):
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return messages


def _make_system_message(columns: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a list with the system message of a row, or an empty list."""
    system = columns.get("system")
    return [{"role": "system", "content": system}] if system else []


def as_messages(value: Any) -> Any:
    """Return one message or a list of messages as a list, and other values unchanged."""
    messages = [value] if isinstance(value, dict) else value
    return list(map(normalize_message, messages)) if isinstance(messages, list) else value


def remove_prompt(prompt: Any, completion: Any) -> Any:
    """Return a completion without the messages of its prompt, with which it may begin."""
    if isinstance(prompt, list) and isinstance(completion, list):
        return completion[len(prompt) if completion[: len(prompt)] == prompt else 0 :]
    return completion


def normalize_message(message: Any) -> Any:
    """Convert a sharegpt or chat message to a dict of role, content and parsed tool calls."""
    if not isinstance(message, dict):
        return message
    if "from" in message:
        role, value = message["from"], message.get("value")
        if role == "function_call":
            call = {"type": "function", "function": _parse_json(value)}
            message = {"role": "assistant", "content": "", "tool_calls": [call]}
        else:
            role = ROLES.get(role, role) if isinstance(role, str) else role
            message = {"role": role, "content": value}
    if not isinstance(message.get("tool_calls"), list):
        return message
    return message | {"tool_calls": [_parse_tool_call(call) for call in message["tool_calls"]]}


class ToolArguments(dict[str, Any]):
    """The arguments of a tool call, and their JSON text."""

    text: str


def format_arguments(tokenizer: Any, messages: list[Any], tools: Any) -> list[Any]:
    """Return messages with the arguments of tool calls as the template of `tokenizer` reads them.

    Most templates read an object. Some read JSON text: DeepSeek-V3's template raises a TypeError
    for an object, and other templates print Python's text of the object.
    """
    objects: list[ToolArguments] = []
    with_texts = _replace_arguments(messages, objects)
    if not objects:
        return messages
    try:
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        reads_text = any(repr(dict(x)) in text for x in objects if x)
    except TypeError:
        reads_text = True
    return with_texts if reads_text else messages


def _replace_arguments(value: Any, objects: list[ToolArguments]) -> Any:
    """Return a nested value with the text of each `ToolArguments`, and append it to `objects`."""
    if isinstance(value, ToolArguments):
        objects.append(value)
        return value.text
    if isinstance(value, dict):
        return {name: _replace_arguments(of, objects) for name, of in value.items()}
    return [_replace_arguments(of, objects) for of in value] if isinstance(value, list) else value


def _parse_tool_call(call: Any) -> Any:
    """Return a tool call with its arguments parsed from JSON."""
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return call | {"function": _parse_tool_call(call["function"])}
    value = call.get("arguments")
    if not isinstance(content := _parse_json(value), dict):
        return call
    arguments = ToolArguments(content)
    arguments.text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return call | {"arguments": arguments}


def parse_tools(columns: dict[str, Any]) -> Any:
    """Return the JSON schemas in column "tools" of a row, or None without tools."""
    return _parse_json(columns.get("tools")) or None


def _parse_json(value: Any) -> Any:
    """Return the object or list of a JSON text, and any other value unchanged."""
    try:
        content = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value
    return content if isinstance(content, dict | list) else value


def _remove_none(value: Any) -> Any:
    """Return a nested value without keys whose value is None, which Arrow adds to objects."""
    if isinstance(value, dict):
        return {name: _remove_none(of) for name, of in value.items() if of is not None}
    return [_remove_none(of) for of in value] if isinstance(value, list) else value
