import json
import sys
from pathlib import Path
from typing import Any

import pytest

from moecore.recipes.examples import Examples, read_examples
from moecore.recipes.rows import ColumnNames, DatasetOptions
from moecore.recipes.tiny_model import make_tokenizer

pytest.importorskip("transformers", minversion="5")
ASK, ANSWER = "What is a token?", "A part of a word."
CHAT = [{"role": "user", "content": ASK}, {"role": "assistant", "content": ANSWER}]
SYSTEM = {"role": "system", "content": "Be kind."}
CALL = {"name": "add", "arguments": {"a": 1, "b": 2}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}
TOOLS_TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>tools\\n' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') }}
{%- for call in m.tool_calls or [] %}{{- call.function.name + (call.function.arguments | tojson) }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

AS_JSON = "(call.function.arguments | tojson)"
READS = {
    "object": AS_JSON,
    "text": "call.function.arguments + ''",  # as DeepSeek-V3
    "printed": "(call.function.arguments | string)",
}


@pytest.fixture
def tokenizer() -> Any:
    return make_tokenizer([(ASK, ANSWER)])


def read(tokenizer: Any, path: Path, *, columns: Any = None, **options: Any) -> Examples:
    names = None if columns is None else ColumnNames(**columns)
    dataset = DatasetOptions(**options)
    return read_examples([path], tokenizer, seq_len=512, options=dataset, columns=names)


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def rendered(tokenizer: Any, messages: list[Any], **options: Any) -> list[int]:
    return tokenizer.apply_chat_template(messages, return_dict=True, **options)["input_ids"]


ROWS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "messages": ({"messages": CHAT}, CHAT),
    "sharegpt": (
        {
            "conversations": [{"from": "human", "value": ASK}, {"from": "gpt", "value": ANSWER}],
            "system": "Be kind.",
        },
        [SYSTEM, *CHAT],
    ),
    "conversations with roles": ({"conversations": CHAT}, CHAT),
    "alpaca": ({"instruction": ASK, "input": "", "output": ANSWER}, CHAT),
    "alpaca with input": (
        {
            "instruction": "What is this?",
            "input": "a token",
            "output": ANSWER,
            "system": "Be kind.",
            "history": [[ASK, ANSWER]],
        },
        [SYSTEM, *CHAT, {"role": "user", "content": "What is this?\na token"}, CHAT[1]],
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_the_chat_that_the_tokenizer_renders(name, tokenizer, tmp_path) -> None:
    row, messages = ROWS[name]
    (example,) = read(tokenizer, lines(tmp_path / "a.jsonl", row)).examples
    assert example.tokens_T.tolist() == rendered(tokenizer, messages)
    answers = [m["content"] for m in messages if m["role"] == "assistant"]
    answer_ids = example.tokens_T[example.is_answer_T].tolist()
    assert tokenizer.decode(answer_ids) == "".join(f"{answer}<|im_end|>" for answer in answers)


@pytest.mark.parametrize("is_repeated", [False, True])
def test_a_prompt_of_messages_is_not_learned(is_repeated, tokenizer, tmp_path) -> None:
    prompt = [*CHAT, CHAT[0]]
    row = {"prompt": prompt, "completion": [*prompt * is_repeated, CHAT[1]]}
    (example,) = read(tokenizer, lines(tmp_path / "a.jsonl", row)).examples
    assert example.tokens_T.tolist() == rendered(tokenizer, [*CHAT, *CHAT])
    prompt = rendered(tokenizer, [*CHAT, CHAT[0]], add_generation_prompt=True)
    assert not example.is_answer_T[: len(prompt)].any()
    answer_ids = example.tokens_T[example.is_answer_T].tolist()
    assert tokenizer.decode(answer_ids) == f"{ANSWER}<|im_end|>"


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("form", ["messages", "completion", "sharegpt"])
def test_tool_calls_are_rendered_by_the_template(form, reads, tokenizer, tmp_path) -> None:
    """Arguments as JSON text, as published data sets have them, are what a template reads."""
    assert AS_JSON in TOOLS_TEMPLATE
    tokenizer.chat_template = TOOLS_TEMPLATE.replace(AS_JSON, READS[reads])
    text = CALL | {"arguments": json.dumps(CALL["arguments"])}
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": text}]}
    result = {"role": "tool", "content": "3"}
    row: dict[str, Any] = {"messages": [CHAT[0], call, result, CHAT[1]], "tools": [TOOL]}
    if form == "completion":
        row = {"prompt": CHAT[0], "completion": [call, result, CHAT[1]], "tools": [TOOL]}
    if form == "sharegpt":
        kinds = ("human", ASK), ("function_call", json.dumps(CALL)), ("observation", "3")
        turns = [{"from": kind, "value": value} for kind, value in (*kinds, ("gpt", ANSWER))]
        row = {"conversations": turns, "tools": json.dumps([TOOL])}
    (example,) = read(tokenizer, lines(tmp_path / "a.jsonl", row)).examples
    parsed = {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]}
    messages = [CHAT[0], parsed if reads == "object" else call, result, CHAT[1]]
    assert example.tokens_T.tolist() == rendered(tokenizer, messages, tools=[TOOL])
    answer_ids = example.tokens_T[example.is_answer_T].tolist()
    wanted = 'add{"a": 1, "b": 2}<|im_end|>' + f"{ANSWER}<|im_end|>"
    assert tokenizer.decode(answer_ids) == wanted


def test_a_json_file_is_a_list_of_rows(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"messages": CHAT}] * 2, indent=2))
    examples = read(tokenizer, path).examples
    assert [x.tokens_T.tolist() for x in examples] == [rendered(tokenizer, CHAT)] * 2
    path.write_text(json.dumps({"messages": CHAT}))
    with pytest.raises(ValueError, match=r"a.json\) must be a JSON list of objects: correct it"):
        read(tokenizer, path)
    path.write_text(json.dumps([CHAT]))
    with pytest.raises(ValueError, match=r"a.json\) row 0 must be a JSON object with"):
        read(tokenizer, path)


def test_columns_of_other_names(tokenizer: Any, tmp_path: Path) -> None:
    """With `text` beside the chat, which a format chooses."""
    path = lines(tmp_path / "a.jsonl", {"dialog": CHAT, "body": ANSWER})
    names = {"messages": "dialog", "text": "body"}
    (chat,) = read(tokenizer, path, columns=names).examples
    assert chat.tokens_T.tolist() == rendered(tokenizer, CHAT)
    (text,) = read(tokenizer, path, columns=names, format="text").examples
    assert tokenizer.decode(text.tokens_T.tolist()) == f"{ANSWER}<|im_end|>"
    with pytest.raises(ValueError, match=r"line 1 must have instruction and output for format 'al"):
        read(tokenizer, path, columns=names, format="alpaca")


@pytest.mark.parametrize("form", ["save_to_disk", "splits", "parquet", "hf:"])
def test_data_sets_are_read(form: str, tokenizer: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Arrow gives each message the keys of all messages, with None."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    tokenizer.chat_template = TOOLS_TEMPLATE
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    chats = [CHAT, [CHAT[0], {"role": "assistant", "tool_calls": [call]}]]
    table = datasets.Dataset.from_list([{"messages": chat} for chat in chats])
    folder = tmp_path / "set"
    path = folder
    if form == "save_to_disk":
        table.save_to_disk(folder)
    elif form == "splits":
        datasets.DatasetDict({"test": table, "train": table.select([0])}).save_to_disk(folder)
    else:
        folder.mkdir()
        path = folder / "a.parquet" if form == "parquet" else Path(f"hf:{folder}")
        table.to_parquet(folder / "a.parquet")
    found = read(tokenizer, path, split="test" if form == "splits" else "train")
    call["function"]["arguments"] = {"a": 1}
    chats[1][1] = {"role": "assistant", "tool_calls": [call]}
    assert [e.tokens_T.tolist() for e in found.examples] == [rendered(tokenizer, c) for c in chats]


def test_without_datasets_it_is_one_line(tokenizer: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"^--data \(hf:a/b\) must have datasets installed: pip"):
        read(tokenizer, Path("hf:a/b"))


def test_broken_rows_are_counted_before_the_first_step(tokenizer: Any, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"messages": CHAT}, {"messages": 3}, {"messages": CHAT[:1]})
    path.write_text(path.read_text() + "{\n\n" + json.dumps({"text": ANSWER}))
    message = r"line 2 must be .*\(broken rows: 2 of 5\): mend"
    with pytest.raises(ValueError, match=message) as error:
        read(tokenizer, path)
    assert "\n" not in str(error.value)
    found = read(tokenizer, path, skip_invalid=True)
    counts = found.report.splitlines()
    tokens = len(rendered(tokenizer, CHAT)) + len(tokenizer(ANSWER)["input_ids"]) + 1
    assert counts[0] == f"5 rows, {tokens} tokens in 2 examples"
    assert all(f"a.jsonl) line {n} " in x for n, x in zip((2, 4, 3), counts[1:], strict=True))
    assert all(line.startswith("left out: --data (") for line in counts[1:])
