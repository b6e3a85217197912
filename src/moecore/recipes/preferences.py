"""Pairs of a preferred and a rejected completion of one prompt, and the steps that read them.

A row has chosen and rejected, each a text, a message or a list of messages. The prompt is a text or
a list of messages. Without a prompt, the common first messages or characters of both are the
prompt. TRL's DPOTrainer has equal tokens: a completion is the text after the longest
common prefix of the tokens of the prompt and of the prompt with each completion.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moecore.packing import PackedBatchSampler
from moecore.packing.corpus.files import shorten_text
from moecore.recipes.chat import Example, count_common_prefix, find_borders, is_chat
from moecore.recipes.data import BatchShape, Steps
from moecore.recipes.rows import ColumnNames, DatasetOptions, Row, normalize_message, parse_tools
from moecore.rl import Rollouts


@dataclass(frozen=True, slots=True)
class Preference:
    """Two sequences with the same prompt, one preferred; the tokens of completions are learned."""

    preferred: Example
    rejected: Example

    @property
    def parts(self) -> tuple[Example, ...]:
        """The preferred and the rejected sequence."""
        return self.preferred, self.rejected

    @property
    def num_answers(self) -> int:
        """The number of tokens of the shorter completion; 0 = the pair cannot be compared."""
        return min(part.num_answers for part in self.parts)

    def cut(self, seq_len: int) -> Preference:
        """Return the pair with the first `seq_len` tokens of both sequences."""
        return Preference(self.preferred.cut(seq_len), self.rejected.cut(seq_len))


@dataclass(frozen=True, slots=True)
class PreferenceBatch:
    """A data rank's pairs of a step. Sequence 2i of `rollouts` is preferred to sequence 2i + 1."""

    rollouts: Rollouts

    def count_labels_and_tokens(self) -> Tensor:
        """Return int64 [4]: number of pairs, all tokens, tokens of completions, and 0."""
        rollouts = self.rollouts
        num_pairs, num_answers = rollouts.num_sequences // 2, int(rollouts.response_mask_N.sum())
        return torch.tensor(
            [num_pairs, len(rollouts.tokens_N), num_answers, 0], dtype=torch.int64, device="cpu"
        )


def make_preference_steps(
    pairs: Sequence[Preference], shape: BatchShape, *, seed: int | None, data_rank: int
) -> Steps[PreferenceBatch]:
    """Return this data rank's steps of pairs; `seed` None = the order of `pairs`."""
    sampler = PackedBatchSampler(
        [1] * len(pairs),
        1,
        rows=shape.grad_accum * shape.batch_size,
        data_rank=data_rank,
        data_ranks=shape.data_ranks,
        seed=seed or 0,
        shuffle=seed is not None,
    )

    def build_batch(numbers: list[int]) -> PreferenceBatch:
        parts = [part for number in numbers for part in pairs[number].parts]
        lengths = torch.tensor(
            [0, *(len(part.tokens_T) for part in parts)], dtype=torch.int64, device="cpu"
        )
        no_tokens = torch.empty(0, dtype=torch.int64, device="cpu")
        rollouts = Rollouts(
            tokens_N=torch.cat([no_tokens, *(part.tokens_T for part in parts)]).long(),
            cu_seqlens=lengths.cumsum(0),
            response_mask_N=torch.cat([no_tokens, *(p.is_answer_T for p in parts)]).bool(),
        )
        return PreferenceBatch(rollouts)

    return Steps(sampler, build_batch)


def encode_preference(
    row: Row, tokenizer: Any, seq_len: int, options: DatasetOptions, column_names: ColumnNames
) -> list[Preference]:
    """Return [preference], the preferred and the rejected completion of a row's prompt."""
    columns = row.select_columns(column_names)
    prompt, *completions = (
        _as_messages(columns.get(n)) for n in ("prompt", "preferred", "rejected")
    )
    is_text = all(isinstance(completion, str) for completion in completions)
    if not is_text and not all(is_chat(completion) for completion in completions):
        raise ValueError(
            f"{row.location} must have {column_names.preferred} and {column_names.rejected}, "
            "both texts or both messages: correct the row or [columns]"
        )
    if type(prompt) is not type(completions[0]):
        starts = [] if is_text else [messages[0]["role"] for messages in completions]
        if prompt is not None and (is_text or "assistant" in starts):
            raise ValueError(
                f"{row.location} must have {column_names.prompt} in the form of its completions, "
                "text or messages, or completions that begin with the prompt: correct the row"
            )
        preferred, rejected = completions
        count = count_common_prefix(preferred, rejected)
        count -= count > 0 and preferred[count - 1] == " "
        prompt, completions = preferred[:count], [preferred[count:], rejected[count:]]
    try:
        if is_text:
            prompt_ids, *ids = _tokenize_texts(tokenizer, prompt, completions)
        else:
            prompt_ids, *ids = _tokenize_chats(tokenizer, prompt, completions, parse_tools(columns))
    except Exception as error:  # of any kind: a template is code
        raise ValueError(
            f"{row.location} must fit the chat template of --model: {shorten_text(error)}"
        ) from None
    num_prompt = min(count_common_prefix(prompt_ids, tokens) for tokens in ids)
    if not num_prompt:
        raise ValueError(f"{row.location} must have a prompt before both completions: add one")
    examples = [
        Example(
            torch.tensor(tokens, dtype=torch.int32, device="cpu"),
            torch.arange(len(tokens), device="cpu") >= num_prompt,
        )
        for tokens in ids
    ]
    return [Preference(*examples)]


def _as_messages(value: Any) -> Any:
    """Return one message or a list of messages as a list, and other values unchanged."""
    messages = [value] if isinstance(value, dict) else value
    return list(map(normalize_message, messages)) if isinstance(messages, list) else value


def _tokenize_texts(tokenizer: Any, prompt: str, completions: Sequence[str]) -> Iterator[list[int]]:
    """Yield the token ids of the prompt, and of the prompt with each completion and its end."""
    borders = find_borders(tokenizer)
    prompt_ids, *ids = (
        tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in (prompt, *(prompt + completion for completion in completions))
    )
    yield borders.make_prompt(prompt_ids)
    yield from map(borders.make_document, ids)


def _tokenize_chats(
    tokenizer: Any, prompt: list[Any], completions: Sequence[list[Any]], tools: Any
) -> Iterator[list[int]]:
    """Yield ids of the prompt, ending with an answer's beginning, and with each completion."""

    def render(messages: list[Any], *, is_prompt: bool = False) -> list[int]:
        ids: list[int] = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=is_prompt, return_dict=True
        )["input_ids"]
        return ids

    yield render(prompt, is_prompt=True)
    for completion in completions:
        yield render([*prompt, *completion])
