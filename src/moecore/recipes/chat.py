"""Tokenizes chats, prompts and texts, and marks the tokens that the loss counts.

rows.py reads files and data sets, and converts each row to one of three forms:

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"prompt": "...", "completion": "..."}       text without a chat template, or messages
    {"text": "..."}                              all tokens are learned, in pieces of --seq-len

The loss counts the assistant's messages of a chat. A template may mark these tokens with {%
generation %}. Without marks, an answer begins at the end of the prompt that the model will see, and
ends with the template's last special token, or with the special token that begins the next message.
The last answer ends with the end-of-sequence token. If a mark ends earlier, it is extended to that
token, because the model must learn to end an answer. If a prompt contains the beginning of an
answer, such as reasoning, and the answer repeats it in full, the beginning belongs to the prompt.

Note "turns that change": some templates render a message differently when other messages follow,
for example without the reasoning of earlier turns. Such a chat becomes one example per answer: the
chat up to that answer, and the loss counts only that answer.

Legend: T tokens of an example.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, takewhile
from typing import Any, Self

import torch
from torch import Tensor

from moecore.recipes.files import format_path
from moecore.recipes.rows import FORMS, format_arguments

PROBES = ("a", "0", ".")  # a vocabulary of text has an id for one of them


@dataclass(frozen=True, slots=True)
class BorderTokens:
    """The special tokens that begin and end the text of a document."""

    begin: tuple[int, ...]  # such as `<s>` of Llama and Gemma
    end: tuple[int, ...]  # with the end-of-sequence token

    def find_content(self, ids: Sequence[int]) -> slice:
        """Return the slice of `ids` between the leading begin tokens and trailing end tokens."""
        start, stop = 0, len(ids)
        n = len(self.begin)
        while n and tuple(ids[start : start + n]) == self.begin:
            start += n
        for end in (self.end, self.end[-1:]):
            n = len(end)
            while n and stop - n >= start and tuple(ids[stop - n : stop]) == end:
                stop -= n
        return slice(start, stop)

    def make_document(self, ids: Sequence[int]) -> list[int]:
        """Return `ids` with exactly one copy of the begin tokens before and end tokens after."""
        return [*self.begin, *ids[self.find_content(ids)], *self.end]

    def make_prompt(self, ids: Sequence[int]) -> list[int]:
        """Return `ids` with exactly one copy of the begin tokens before and no end tokens."""
        return [*self.begin, *ids[self.find_content(ids)]]


@lru_cache(maxsize=1)
def find_borders(tokenizer: Any) -> BorderTokens:
    """Return the special tokens that a tokenizer adds; ValueError if they change other tokens."""
    last = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    for probe in PROBES:
        plain, full = (
            tokenizer(probe, add_special_tokens=special)["input_ids"] for special in (False, True)
        )
        for i in range(len(full) - len(plain) + 1):
            if plain and full[i : i + len(plain)] == plain:
                end = tuple(full[i + len(plain) :])
                return BorderTokens(tuple(full[:i]), end if end[-1:] == last else (*end, *last))
    raise ValueError("must add special tokens before and after a text, not change its own tokens")


def tokenize_prompt(tokenizer: Any, prompt: Any, tools: Any = None) -> list[int]:
    """Return the token ids of a text, or of messages up to the beginning of an answer."""
    if isinstance(prompt, str):
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        return find_borders(tokenizer).make_prompt(ids)
    prompt = format_arguments(tokenizer, prompt, tools)
    chat_ids: list[int] = tokenizer.apply_chat_template(
        prompt, tools=tools, add_generation_prompt=True, return_dict=True
    )["input_ids"]
    return chat_ids


GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Example:
    """A training sequence: int32 token ids [T], and a bool mask [T] of the tokens in the loss."""

    tokens_T: Tensor
    is_answer_T: Tensor

    @property
    def parts(self) -> tuple[Self, ...]:
        """The example in a tuple of length 1. `Preference.parts` has length 2."""
        return (self,)

    @property
    def num_answers(self) -> int:
        """The number of tokens in the loss, which excludes the first token of the sequence."""
        return int(self.is_answer_T[1:].sum())

    def cut(self, stop: int, *, start: int = 0) -> Self:
        """Return the example with the tokens [start, stop)."""
        return type(self)(self.tokens_T[start:stop], self.is_answer_T[start:stop])


def encode_record(record: Any, tokenizer: Any, *, seq_len: int, location: str) -> list[Example]:
    """Return a data row's examples, several for a text above `seq_len`; errors name `location`."""
    fields: Any = record if isinstance(record, dict) else {}
    messages, num_prompt = fields.get("messages"), 0
    prompt, completion, text = (fields.get(name) for name in ("prompt", "completion", "text"))
    if not is_chat(messages) and is_chat(prompt) and is_chat(completion):
        messages, num_prompt = [*prompt, *completion], len(prompt)
    if is_chat(messages):
        return _encode_chat(tokenizer, messages, fields.get("tools"), location, num_prompt)
    try:
        if isinstance(prompt, str) and isinstance(completion, str):
            return [_encode_completion(tokenizer, prompt, completion)]
        if isinstance(text, str):
            example = _encode_completion(tokenizer, "", text)
            # Adjacent pieces share one token.
            starts = range(0, max(1, len(example.tokens_T) - 1), max(1, seq_len - 1))
            return [example.cut(start + seq_len, start=start) for start in starts]
    except Exception as error:  # of any kind, such as for half of a surrogate pair
        raise ValueError(
            f"{location} must be text that the tokenizer of --model encodes: "
            f"{_describe_error(error)}"
        ) from None
    description = f"it is of type {type(record).__name__}"
    if isinstance(record, dict):
        names = format_path(", ".join(sorted(map(str, record))) or "nothing")
        description = f"it has {names}, of other types or names"
    raise ValueError(f"{location} must be a JSON object with {FORMS}: {description}")


def is_chat(messages: Any) -> bool:
    """Return whether a value is a list of messages with roles."""
    return isinstance(messages, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages
    )


def _encode_completion(tokenizer: Any, prompt: str, completion: str) -> Example:
    """Return an example of a prompt and a completion; the completion and its end are learned."""
    text, borders = prompt + completion, find_borders(tokenizer)
    ids, is_answer = _tokenize_spans(tokenizer, text, [(len(prompt), len(text))])
    content = borders.find_content(ids)
    return _make_example(
        [*borders.begin, *ids[content], *borders.end],
        [False] * len(borders.begin) + is_answer[content] + [True] * len(borders.end),
    )


def _encode_chat(
    tokenizer: Any, messages: list[dict[str, Any]], tools: Any, location: str, num_prompt: int
) -> list[Example]:
    """Return one example of a chat, or one per answer if the template rewrites earlier turns."""
    if tokenizer.chat_template is None:
        raise ValueError(
            f"{location} must have no messages, because the tokenizer of --model has no chat "
            'template: add chat_template.jinja there, or use "prompt" and "completion"'
        )
    messages = [_remove_end_text(tokenizer, message) for message in messages]
    try:
        messages = format_arguments(tokenizer, messages, tools)
        if not num_prompt and GENERATION.search(tokenizer.get_chat_template(tools=tools)):
            return [_encode_marked_chat(tokenizer, messages, tools)]
        return _encode_by_prefixes(tokenizer, messages, tools, num_prompt)
    except Exception as error:  # of any kind: a template is code
        raise ValueError(
            f"{location} must fit the chat template of --model: {_describe_error(error)}"
        ) from None


def _remove_end_text(tokenizer: Any, message: dict[str, Any]) -> dict[str, Any]:
    """Return a message; remove end-of-sequence texts at the end of an assistant's message."""
    end, content = tokenizer.eos_token, message.get("content")
    if message["role"] != "assistant" or not end or not isinstance(content, str):
        return message
    while content.endswith(end):
        content = content.removesuffix(end)
    return {**message, "content": content}


def _describe_error(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no reason given"
    is_known = isinstance(error, ValueError | TypeError) or "jinja2" in type(error).__module__
    return (text if is_known else f"{type(error).__name__}: {text}")[:200]


def _encode_marked_chat(tokenizer: Any, messages: list[dict[str, Any]], tools: Any) -> Example:
    """Return a chat's example; template-marked tokens and the last answer's end are learned."""
    ids, is_answer = _tokenize_marked_chat(tokenizer, messages, tools)
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    prefix_ids, is_prefix_answer = ids, is_answer
    if answers and answers[-1] + 1 < len(messages):
        prefix_ids, is_prefix_answer = _tokenize_marked_chat(
            tokenizer, messages[: answers[-1] + 1], tools
        )
    if not (any(is_answer) and any(is_prefix_answer)):
        return _make_example(ids, is_answer)
    last, at = _find_answer_ends(tokenizer, prefix_ids, is_prefix_answer)[-1]
    if at is None:
        return _make_example(
            [*prefix_ids[: last + 1], _get_eos_id(tokenizer)], [*is_prefix_answer[: last + 1], True]
        )
    end = prefix_ids[at]
    for last, at in _find_answer_ends(tokenizer, ids, is_answer):
        if at is not None and ids[at] == end:
            is_answer[last + 1 : at + 1] = [True] * max(0, at - last)
    return _make_example(ids, is_answer)


def _tokenize_marked_chat(
    tokenizer: Any, messages: list[dict[str, Any]], tools: Any
) -> tuple[list[int], list[bool]]:
    """Return a chat's token ids, and for each token whether the chat template marks it."""
    encoding = tokenizer.apply_chat_template(
        messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True
    )
    return encoding["input_ids"], [bool(marked) for marked in encoding["assistant_masks"]]


def _find_answer_ends(
    tokenizer: Any, ids: list[int], is_answer: list[bool]
) -> list[tuple[int, int | None]]:
    """Return the last position of each run of learned tokens, and the position of its end token.

    The end token is a special token at the end of the run, or the first one before the next run.
    """
    special_ids, ends = get_special_ids(tokenizer), list[tuple[int, int | None]]()
    groups = groupby(range(len(ids)), key=lambda t: is_answer[t])
    runs = [list(run) for learned, run in groups if learned]
    for run, after in zip(runs, [*runs[1:], [len(ids)]], strict=True):
        last = _trim_after_special_token(tokenizer, ids, run)[-1]
        places = [last, *range(run[-1] + 1, after[0])]
        ends.append((run[-1], next((t for t in places if ids[t] in special_ids), None)))
    return ends


def _encode_by_prefixes(
    tokenizer: Any, messages: list[dict[str, Any]], tools: Any, num_prompt: int
) -> list[Example]:
    """Return the examples of a chat, for a template that does not mark learned tokens.

    An answer is the text that the template adds to the rendering of the earlier messages.
    """

    def render(turns: list[dict[str, Any]], *, prompt: bool = False) -> str:
        """Return turns as text; `prompt` adds the beginning of an answer."""
        text: str = tokenizer.apply_chat_template(
            turns, tools=tools, tokenize=False, add_generation_prompt=prompt
        )
        return text

    turns = []
    for i, message in enumerate(messages):
        if i >= num_prompt and message["role"] == "assistant":
            history = messages[:i]
            text, prompt = render([*history, message]), render(history, prompt=True)
            start = len(prompt)
            if not text.startswith(prompt):
                variants = [render([*history, {**message, "content": letter}]) for letter in "AB"]
                start = min(count_common_prefix(text, other) for other in (prompt, *variants))
                if not text.startswith(render(history)):
                    raise ValueError(
                        "an assistant's message must be added behind those before it: mark it in "
                        "the template with {% generation %}"
                    )
            turns.append((text, (start, len(text))))
    if not turns:
        return [_encode_spans(tokenizer, render(messages), [])]
    full_text = turns[-1][0]
    if all(full_text.startswith(text) for text, _ in turns):
        return [_encode_spans(tokenizer, full_text, [span for _, span in turns])]
    return [_encode_spans(tokenizer, text, [span]) for text, span in turns]


def count_common_prefix(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the length of the longest common prefix of two sequences."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _encode_spans(tokenizer: Any, text: str, spans: list[Span]) -> Example:
    """Return an example of a text whose `spans`, (start, end) in characters, are learned."""
    ids, is_answer = _tokenize_spans(tokenizer, text, spans)
    if ids and is_answer[-1] and ids[-1] not in get_special_ids(tokenizer):
        ids, is_answer = [*ids, _get_eos_id(tokenizer)], [*is_answer, True]
    return _make_example(ids, is_answer)


def _get_eos_id(tokenizer: Any) -> int:
    """Return the id of the tokenizer's eos_token, which ends an answer."""
    end: int | None = tokenizer.eos_token_id
    if end is None:
        raise ValueError("an answer must end with a token, and the tokenizer has no eos_token")
    return end


def _tokenize_spans(tokenizer: Any, text: str, spans: list[Span]) -> tuple[list[int], list[bool]]:
    """Return the token ids of a text, and for each whether it overlaps a span of characters."""
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = encoding["input_ids"], encoding["offset_mapping"]
    is_answer, special_ids = [False] * len(ids), get_special_ids(tokenizer)
    for start, end in spans:
        inside = [t for t, (a, b) in enumerate(offsets) if a < end and b > start and b > a]
        inside = _trim_after_special_token(tokenizer, ids, inside)
        # In GLM-4.5, the first token of the next message ends an answer.
        if inside and [i in special_ids for i in ids[inside[-1] :][:2]] == [False, True]:
            inside.append(inside[-1] + 1)
        for t in inside:
            is_answer[t] = True
    return ids, is_answer


def _trim_after_special_token(tokenizer: Any, ids: list[int], positions: list[int]) -> list[int]:
    """Drop white space after the last special token from `positions`, indices of `ids`."""
    for count in range(len(positions), 0, -1):
        token = ids[positions[count - 1]]
        if token in get_special_ids(tokenizer):
            return positions[:count]
        if tokenizer.decode([token]).strip():
            break
    return positions


@lru_cache(maxsize=1)
def get_special_ids(tokenizer: Any) -> set[int]:
    """Return the ids of a tokenizer's special tokens (cached)."""
    added = tokenizer.added_tokens_decoder.items()
    return {*tokenizer.all_special_ids, *(i for i, token in added if token.special)}


def _make_example(ids: Sequence[int], is_answer: Sequence[int | bool]) -> Example:
    """Return the example of token ids and of a mask that is 1 for each token of an answer."""
    return Example(
        torch.tensor(ids, dtype=torch.int32, device="cpu"),
        torch.tensor(is_answer, dtype=torch.bool, device="cpu"),
    )
