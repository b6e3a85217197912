import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from moecore.recipes import chat as chat_module
from moecore.recipes import examples as examples_module
from moecore.recipes import tiny_model
from moecore.recipes.data import BatchShape

pytest.importorskip("transformers", minversion="5")
PAIRS = [
    ("What does abc.foo do?", "It returns the sum of a bar and a baz."),
    ("What is a token?", "A whole word, or a part of one:\n\nthat depends."),
]
CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": PAIRS[0][0]},
    {"role": "assistant", "content": PAIRS[0][1]},
    {"role": "user", "content": PAIRS[1][0]},
    {"role": "assistant", "content": PAIRS[1][1]},
]
# Reasoning stays in the last answer alone, and the prompt for an answer begins it.
THINKING = """\
{%- for m in messages %}
{{- '<|im_start|>' + m['role'] + '\\n' }}
{%- if m['role'] == 'assistant' and loop.last %}{{- '<think>\\nhm\\n</think>\\n' }}{%- endif %}
{{- m['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"""
NO_PROMPT = """\
{%- for m in messages %}
{%- if m['role'] == 'assistant' %}{{- ' ' + m['content'] + eos_token }}
{%- else %}{{- '[INST] ' + m['content'] + ' [/INST]' }}{%- endif %}
{%- endfor %}"""
LAST_FIRST = """\
{%- for m in messages[::-1] %}{{- m['role'] + ': ' + m['content'] + '\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}"""


@pytest.fixture
def tokenizer() -> Any:
    return tiny_model.make_tokenizer(PAIRS)


def unmarked(template: str) -> str:
    return template.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")


def by_hand(tokenizer: Any, *parts: str | tuple[str]) -> tuple[list[int], list[bool]]:
    """Tokens of parts, each encoded alone; those in a tuple are learned."""
    ids: list[int] = []
    learned: list[bool] = []
    for part in parts:
        text = part if isinstance(part, str) else part[0]
        found = tokenizer.encode(text, add_special_tokens=False)
        ids += found
        learned += [not isinstance(part, str)] * len(found)
    return ids, learned


def listed(examples: list[Any]) -> list[tuple[list[int], list[bool]]]:
    return [(e.tokens_T.tolist(), e.is_answer_T.tolist()) for e in examples]


def encoded(tokenizer: Any, record: Any, seq_len: int = 999) -> Any:
    return listed(chat_module.encode_record(record, tokenizer, seq_len=seq_len, location="line 1"))


def turn(role: str, content: str) -> str:
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


WHOLE = (
    turn("system", "Be kind.") + turn("user", PAIRS[0][0]) + "<|im_start|>assistant\n",
    (PAIRS[0][1] + "<|im_end|>",),
    "\n" + turn("user", PAIRS[1][0]) + "<|im_start|>assistant\n",
    (PAIRS[1][1] + "<|im_end|>",),
    "\n",
)


@pytest.mark.parametrize("end", ["", "<|im_end|>"])
@pytest.mark.parametrize("marked", [True, False])
def test_all_answers_of_a_chat_have_one_end(marked: bool, end: str, tokenizer: Any) -> None:
    if not marked:
        tokenizer.chat_template = unmarked(tokenizer.chat_template)
    chat = [m | {"content": m["content"] + end} if i in (2, 4) else m for i, m in enumerate(CHAT)]
    assert encoded(tokenizer, {"messages": chat}) == [by_hand(tokenizer, *WHOLE)]


@pytest.mark.parametrize("marked", [True, False])
def test_an_empty_answer_is_to_end_at_once(marked: bool, tokenizer: Any) -> None:
    if not marked:
        tokenizer.chat_template = unmarked(tokenizer.chat_template)
    chat = [CHAT[1], {"role": "assistant", "content": ""}, CHAT[3]]
    first = by_hand(
        tokenizer, turn("user", PAIRS[0][0]) + "<|im_start|>assistant\n", ("<|im_end|>",), "\n"
    )
    (ids, learned), *others = encoded(tokenizer, {"messages": chat})
    count = len(first[0])
    assert (ids[:count], learned[:count]) == first and not any(learned[count:]) and not others


def test_turns_that_change_are_examples_of_their_own(tokenizer: Any) -> None:
    tokenizer.chat_template = THINKING
    start, thought = "<|im_start|>assistant\n", "<think>\n"
    before = turn("system", "Be kind.") + turn("user", PAIRS[0][0])
    later = before + turn("assistant", PAIRS[0][1]) + turn("user", PAIRS[1][0])
    assert encoded(tokenizer, {"messages": CHAT}) == [
        by_hand(tokenizer, prompt + start + thought, (f"hm\n</think>\n{answer}<|im_end|>",), "\n")
        for prompt, (_, answer) in zip((before, later), PAIRS, strict=True)
    ]


def test_a_prompt_may_end_with_what_the_rendering_lacks(tokenizer: Any) -> None:
    plain = unmarked(tiny_model.TEMPLATE)
    tokenizer.chat_template = plain.replace("assistant\\n' }}", "assistant\\n<think>' }}")
    assert encoded(tokenizer, {"messages": CHAT}) == [by_hand(tokenizer, *WHOLE)]


@pytest.mark.parametrize("answer", ["<tool_call>x", "<thinking aloud", "<", "<think>", "A", ""])
def test_an_answer_that_begins_like_the_prompts_end_is_learned_whole(answer, tokenizer) -> None:
    plain = unmarked(tiny_model.TEMPLATE)
    tokenizer.chat_template = plain.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}")
    chat = [CHAT[1], {"role": "assistant", "content": answer}]
    prompt = turn("user", PAIRS[0][0]) + "<|im_start|>assistant\n"
    found = encoded(tokenizer, {"messages": chat})
    assert found == [by_hand(tokenizer, prompt, (f"{answer}<|im_end|>",), "\n")]


def test_an_answer_without_an_end_is_learned_with_the_next_begin(tokenizer: Any) -> None:
    """As in GLM-4.5, whose answers end where <|user|> or <|observation|> begins a message."""
    tokenizer.chat_template = (
        "{%- for m in messages %}{{- '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
        "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
    )
    begin = "<|im_start|>"
    parts = [
        f"{begin}system\nBe kind.{begin}user\n{PAIRS[0][0]}{begin}assistant\n",
        (f"{PAIRS[0][1]}{begin}",),
        f"user\n{PAIRS[1][0]}{begin}assistant\n",
        (f"{PAIRS[1][1]}<|im_end|>",),
    ]
    assert encoded(tokenizer, {"messages": CHAT}) == [by_hand(tokenizer, *parts)]


def test_an_end_is_learned_where_the_template_has_none(tokenizer: Any) -> None:
    tokenizer.chat_template = (
        "{%- for m in messages %}{{- m['role'] + ': ' + m['content'] + '\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}"
    )
    ((ids, learned),) = encoded(tokenizer, {"messages": CHAT[1:3]})
    assert (ids[-1], learned[-1]) == (tokenizer.eos_token_id, True)
    taught = [i for i, is_learned in zip(ids[:-1], learned, strict=False) if is_learned]
    assert tokenizer.decode(taught) == f"{PAIRS[0][1]}\n"
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="must end with a token"):
        encoded(tokenizer, {"messages": CHAT[1:3]})


@pytest.mark.parametrize("between", ["", "\\n", "</s>\\n"])
def test_an_end_behind_the_marks_is_learned(between: str, tokenizer: Any) -> None:
    """With what stands before it, which a model has to write to get there."""
    end = f"'{between}<|im_end|>'"
    tokenizer.chat_template = tiny_model.TEMPLATE.replace(
        "+ '<|im_end|>' }}{%- endgeneration %}", "}}{% endgeneration %}{{- " + end + " }}"
    )
    between = between.replace("\\n", "\n")
    wanted = [
        (f"{part[0][:-10]}{between}<|im_end|>",) if isinstance(part, tuple) else part
        for part in WHOLE
    ]
    assert encoded(tokenizer, {"messages": CHAT}) == [by_hand(tokenizer, *wanted)]
    asked, more = [*CHAT, CHAT[1]], turn("user", PAIRS[0][0])
    assert encoded(tokenizer, {"messages": asked}) == [by_hand(tokenizer, *wanted, more)]


def test_marks_without_an_end_are_learned_with_one(tokenizer: Any) -> None:
    """As without marks: behind the last answer, and never the beginning of another turn."""
    tokenizer.chat_template = (
        "{%- for m in messages %}{{- '<|im_start|>' + m['role'] + ': ' }}"
        "{%- if m['role'] == 'assistant' %}{% generation %}{{- m['content'] }}{% endgeneration %}"
        "{%- else %}{{- m['content'] }}{%- endif %}{{- '\\n' }}{%- endfor %}"
    )
    parts: list[str | tuple[str]] = []
    for question, answer in PAIRS:
        parts += [f"<|im_start|>user: {question}\n<|im_start|>assistant: ", (answer,), "\n"]
    wanted = by_hand(tokenizer, *parts[:-2], (f"{PAIRS[1][1]}{tokenizer.eos_token}",))
    for chat in (CHAT[1:], [*CHAT[1:], CHAT[1]]):
        assert encoded(tokenizer, {"messages": chat}) == [wanted]
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="must end with a token"):
        encoded(tokenizer, {"messages": CHAT[1:]})


def test_marks_within_an_answer_stay_as_they_are(tokenizer: Any) -> None:
    """A special token between them is no end, and white space behind an end stays marked."""
    tokenizer.chat_template = (
        "{%- for m in messages %}{{- m['role'] + ': ' }}{% generation %}{{- m['content'] }}"
        "{% endgeneration %}{{- '<|im_start|>' }}{% generation %}{{- 'so<|im_end|>\\n' }}"
        "{% endgeneration %}{%- endfor %}"
    )
    answer = PAIRS[0][1]
    wanted = by_hand(tokenizer, "assistant: ", (answer,), "<|im_start|>", ("so<|im_end|>\n",))
    assert encoded(tokenizer, {"messages": CHAT[2:3]}) == [wanted]


def test_a_template_without_prompts(tokenizer: Any) -> None:
    tokenizer.chat_template = NO_PROMPT
    parts: list[str | tuple[str]] = []
    for question, answer in PAIRS:
        parts += [f"[INST] {question} [/INST]", (f" {answer}<|im_end|>",)]
    found = encoded(tokenizer, {"messages": CHAT[1:]})
    assert found == [by_hand(tokenizer, *parts)]


def test_both_ways_agree_on_the_tiny_chats(tokenizer: Any) -> None:
    pairs = list(islice(tiny_model.iterate_questions(), 60))
    for messages in tiny_model._make_chats(pairs):
        tokenizer.chat_template = tiny_model.TEMPLATE
        marked = encoded(tokenizer, {"messages": messages})
        tokenizer.chat_template = unmarked(tiny_model.TEMPLATE)
        assert encoded(tokenizer, {"messages": messages}) == marked


def test_white_space_that_a_text_ends_with_is_learned(tokenizer: Any) -> None:
    """Only behind an end of the template's own it is not: here it is what ends an answer."""
    tokenizer.chat_template = NO_PROMPT.replace("eos_token", "'\\n\\n'")
    ((ids, learned),) = encoded(tokenizer, {"messages": CHAT[1:3]})
    text = tokenizer.decode([i for i, yes in zip(ids, learned, strict=True) if yes])
    assert text == f" {PAIRS[0][1]}\n\n<|im_end|>"


def test_a_completion_is_learned_with_its_end(tokenizer: Any) -> None:
    record = {"prompt": "What is a token?", "completion": " A part of a word"}
    end = tokenizer.eos_token
    wanted = by_hand(tokenizer, record["prompt"], (record["completion"] + end,))
    assert encoded(tokenizer, record) == [wanted]
    joined = {"prompt": "a part of ", "completion": "one"}  # " one" is one token
    ((ids, learned),) = encoded(tokenizer, joined)
    assert tokenizer.decode([i for i, yes in zip(ids, learned, strict=True) if yes]) == f" one{end}"


def test_each_token_of_a_text_is_learned_once(tokenizer: Any) -> None:
    text = " ".join(answer for _, answer in PAIRS)
    whole, _ = by_hand(tokenizer, text + tokenizer.eos_token)
    pieces = encoded(tokenizer, {"text": text}, seq_len=7)
    assert len(pieces) == -(-(len(whole) - 1) // 6) and len(pieces) > 2
    assert whole[:1] + [t for ids, _ in pieces for t in ids[1:]] == whole
    assert all(all(learned) and len(ids) <= 7 for ids, learned in pieces)


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_files_are_cut_and_counted(tokenizer: Any, tmp_path: Path) -> None:
    prompt = len(by_hand(tokenizer, WHOLE[0])[0])
    late = [*CHAT[:2], {"role": "user", "content": "And?" * 9}, CHAT[2]]
    chats = write(
        tmp_path / "a.jsonl", {"messages": CHAT}, {"messages": late}, {"messages": CHAT[:2]}
    )
    chats.write_text(chats.read_text() + "\n  \n")
    plain = tmp_path / "b.txt"
    plain.write_text("Some text.")
    found = examples_module.read_examples([chats, plain], tokenizer, seq_len=prompt + 3)
    first, second = found.examples
    assert len(first.tokens_T) == prompt + 3 and first.num_answers == 3
    assert second.is_answer_T.all() and found.num_cut == 1 and len(found.problems) == 2
    with pytest.raises(ValueError, match=r"--data .*a.jsonl\) must have a token to learn: none of"):
        examples_module.read_examples([chats], tokenizer, seq_len=prompt)
    (blank := tmp_path / "blank.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match=r"blank.jsonl\) must have a row, but is empty: name an"):
        examples_module.read_examples([blank], tokenizer, seq_len=prompt)


RAISING = {
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError: maximum recursion depth",
    "{% for i in range(10**8) %}{% endfor %}": "OverflowError: Range too big",
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}": "RecursionError: maximum recursion depth",
    "{{ 1 / 0 }}": "ZeroDivisionError: division by zero",
    "{{ 10.0 ** 400 }}": "OverflowError: ",
    "{{ raise_exception('first\nsecond') }}": "first second",
    "{{ raise_exception('x' * 5000) }}": "x" * 200,
}


@pytest.mark.parametrize("generation", ["", "{% generation %}{% endgeneration %}"])
@pytest.mark.parametrize("template", RAISING, ids=lambda text: text[:30])
def test_a_template_that_raises_is_named(template: str, generation: str, tokenizer: Any) -> None:
    """Whatever it raises: a template is code."""
    tokenizer.chat_template = template + generation
    with pytest.raises(ValueError) as error:
        encoded(tokenizer, {"messages": CHAT})
    said = str(error.value)
    assert said.startswith("line 1 must fit the chat template of --model: ")
    assert RAISING[template] in said and "\n" not in said and len(said) < 300


BAD_LINES = {
    '{"messages": 3}': '"instruction" and "output", or "text": it has messages, of other types',
    '{"prompt": "a"}': "it has prompt, of other types or names",
    "[1]": "it is of type list",
    json.dumps({f"field {i}": i for i in range(5000)}): "it has field 0, field 1, field 10, ",
    '{"text": "\\ud800"}': "must be text that the tokenizer of --model encodes: ",
    '{"prompt": "a", "completion": "\\udc00"}': "must be text that the tokenizer of",
    "{": "line 1 must be a JSON object with",
    '{"messages": []}': "must fit the chat template of --model: ",
    '{"messages": [{"role": "assistant"}]}': "must fit the chat template of --model: ",
    '{"instruction": 5, "output": "a"}': "must have texts as instruction, input and output, and ",
    '{"instruction": "a", "output": "b", "history": ["cd"]}': "and pairs of texts as history: ",
    '{"conversations": [{"from": ["gpt"], "value": "a"}]}': "it has messages, tools, of other",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: line[:40])
def test_a_record_that_is_none_is_named(line: str, tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(ValueError) as error:
        examples_module.read_examples([file], tokenizer, seq_len=9)
    assert f"--data ({file}) line 1 must" in str(error.value)
    assert BAD_LINES[line] in str(error.value) and "\n" not in str(error.value)
    assert len(str(error.value)) < 600


def test_files_and_templates_that_do_not_fit(tokenizer: Any, tmp_path: Path) -> None:
    read = examples_module.read_examples
    (tmp_path / "latin.txt").write_bytes(b"\xe4")
    with pytest.raises(ValueError, match="must be UTF-8"):
        read([tmp_path / "latin.txt"], tokenizer, seq_len=9)
    chats = write(tmp_path / "chats.jsonl", {"messages": CHAT})
    tokenizer.chat_template = LAST_FIRST
    with pytest.raises(ValueError, match="must be added behind those before it: mark it"):
        read([chats], tokenizer, seq_len=99)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"chats.jsonl\) line 1 must have no messages, because"):
        read([chats], tokenizer, seq_len=99)


def example_of(length: int, value: int) -> Any:
    learned = torch.ones(length, dtype=torch.bool)
    return chat_module.Example(torch.full((length,), value, dtype=torch.int32), learned)


@pytest.mark.parametrize("packs", [True, False])
def test_a_step_reads_the_same_examples_on_any_ranks(packs: bool) -> None:
    examples = [example_of(2 + i % 4, i + 1) for i in range(25)]

    def tokens(ranks: int, accum: int, size: int) -> list[list[int]]:
        shape = BatchShape(data_ranks=ranks, grad_accum=accum, batch_size=size, seq_len=9)
        make = examples_module.make_packed_steps
        of_ranks = [
            make(examples, shape, seed=4, data_rank=rank, packs=packs) for rank in range(ranks)
        ]
        return [
            sorted(
                n for one in of_ranks for n in one.next_batch().tokens_ABT.flatten().tolist() if n
            )
            for _ in range(2 * len(of_ranks[0].sampler))
        ]

    steps = tokens(1, 2, 3)
    assert len(steps) == 2 * (2 if packs else 5) and steps == tokens(3, 1, 2) == tokens(2, 3, 1)
    epoch = sorted(n for step in steps[: len(steps) // 2] for n in step)
    assert epoch == sorted(i + 1 for i in range(25) for _ in range(2 + i % 4))


def test_documents_have_the_labels_of_their_answers() -> None:
    first = chat_module.Example(
        torch.tensor([5, 6, 7, 8], dtype=torch.int32), torch.tensor([True, False, True, True])
    )
    shape = BatchShape(data_ranks=1, grad_accum=1, batch_size=2, seq_len=8)
    second = example_of(3, 9)
    for packs, wanted, cuts in (
        (True, [-100, 7, 8, -100, 9, 9, -100, -100] + [-100] * 8, [0, 4, 7, 8, 16]),
        (False, [-100, 7, 8] + [-100] * 5 + [9, 9] + [-100] * 6, [0, 8, 16]),
    ):
        where = {"seed": None, "data_rank": 0, "packs": packs}
        batch = examples_module.make_packed_steps([first, second], shape, **where).next_batch()
        assert batch.labels_ABT.flatten().tolist() == wanted
        assert batch.cu_seqlens_An.unique().tolist() == cuts
        assert batch.count_labels_and_tokens().tolist() == [4, 7, 4**2 + 3**2, 16]


def test_held_out_examples_are_no_others() -> None:
    examples = [example_of(2 + i % 4, i) for i in range(7)]
    trained, held_out = examples_module.split_examples(examples, share=0.4, seed=1)
    assert len(held_out) == 3
    assert sorted(int(e.tokens_T[0]) for e in (*trained, *held_out)) == list(range(7))
