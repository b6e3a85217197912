"""Pairs of completions of one prompt, completions with a label, and the steps that read them.

A row of a pair has chosen and rejected, each a text, a message or a list of messages. The prompt
is a text or a list of messages. Without a prompt, the common first messages or characters of both
are the prompt. An unpaired row has prompt, completion and label. TRL's trainers have equal tokens:
a completion is the text after the longest common prefix of the tokens of the prompt and of the
prompt with each completion.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from moecore.base.fields import quote
from moecore.packing.corpus.files import shorten_text
from moecore.recipes.chat import (
    Example,
    count_common_prefix,
    find_borders,
    is_chat,
    tokenize_prompt,
)
from moecore.recipes.rows import (
    ColumnNames,
    DatasetOptions,
    Row,
    as_messages,
    format_arguments,
    parse_tools,
    remove_prompt,
)
from moecore.rl import Rollouts


@dataclass(frozen=True, slots=True)
class Preference:
    """A preferred and a rejected sequence with the same prompt; completion tokens are learned."""

    preferred: Example
    rejected: Example

    @property
    def parts(self) -> tuple[Example, ...]:
        """The preferred and the rejected sequence."""
        return self.preferred, self.rejected

    @property
    def num_answers(self) -> int:
        """The number of tokens of the shorter completion; 0 = the pair cannot be used."""
        return min(part.num_answers for part in self.parts)

    def cut(self, seq_len: int) -> Self:
        """Return the pair with the first `seq_len` tokens of both sequences."""
        return type(self)(self.preferred.cut(seq_len), self.rejected.cut(seq_len))


@dataclass(frozen=True, slots=True)
class UnpairedPreference:
    """A completion of a prompt, and whether it is desirable."""

    sequence: Example  # the prompt and the completion
    completion_T: Tensor  # all tokens of the completion, which `cut` does not shorten
    is_desirable: bool

    @property
    def parts(self) -> tuple[Example, ...]:
        """The sequence in a tuple of length 1."""
        return (self.sequence,)

    @property
    def num_answers(self) -> int:
        """The number of tokens of the completion in the sequence."""
        return self.sequence.num_answers

    def cut(self, seq_len: int) -> Self:
        """Return the example with the first `seq_len` tokens of the sequence."""
        return replace(self, sequence=self.sequence.cut(seq_len))

    def continue_with(self, completion_T: Tensor) -> Example:
        """Return the prompt with another completion."""
        prompt_T = self.sequence.tokens_T[~self.sequence.is_answer_T]
        tokens_T = torch.cat([prompt_T, completion_T])
        return Example(tokens_T, torch.arange(len(tokens_T), device="cpu") >= len(prompt_T))


@dataclass(frozen=True, slots=True)
class PreferenceBatch:
    """A data rank's pairs of a step: sequence 2i of `rollouts` is preferred to sequence 2i + 1."""

    rollouts: Rollouts
    num_sequences: ClassVar[int] = 2  # of an example

    def count_labels_and_tokens(self) -> Tensor:
        """Return int64 [4]: numbers of examples, tokens and completion tokens, and 0."""
        rollouts, num_answers = self.rollouts, int(self.rollouts.response_mask_N.sum())
        num_examples = rollouts.num_sequences // self.num_sequences
        return torch.tensor(
            [num_examples, len(rollouts.tokens_N), num_answers, 0], dtype=torch.int64, device="cpu"
        )


@dataclass(frozen=True, slots=True)
class UnpairedBatch(PreferenceBatch):
    """A data rank's completions of a step; `advantages_N` is 1 (desirable) or -1 (undesirable)."""

    # Each prompt with the completion of the example before; the first has the last completion. A
    # single example has no other completion.
    mismatched: Rollouts
    num_sequences: ClassVar[int] = 1


def make_pair_batch(pairs: Sequence[Preference], _seq_len: int) -> PreferenceBatch:
    """Return the batch of a data rank's pairs."""
    return PreferenceBatch(_make_rollouts([part for pair in pairs for part in pair.parts]))


def make_unpaired_batch(examples: Sequence[UnpairedPreference], seq_len: int) -> UnpairedBatch:
    """Return the batch of a data rank's labelled completions."""
    rollouts = _make_rollouts([example.sequence for example in examples])
    signs = [1.0 if example.is_desirable else -1.0 for example in examples]
    signs_n = torch.tensor(signs, dtype=torch.float32, device="cpu")
    completions = [example.completion_T for example in (*examples[-1:], *examples[:-1])]
    pairs = zip(examples, completions, strict=True) if len(examples) > 1 else ()
    mismatched = [example.continue_with(other_T).cut(seq_len) for example, other_T in pairs]
    return UnpairedBatch(
        rollouts.replace(advantages_N=rollouts.expand_to_tokens(signs_n)),
        _make_rollouts(mismatched),
    )


def _make_rollouts(parts: Sequence[Example]) -> Rollouts:
    """Return the rollouts of sequences, whose responses are the completions."""
    lengths = torch.tensor(
        [0, *(len(part.tokens_T) for part in parts)], dtype=torch.int64, device="cpu"
    )
    no_tokens = torch.empty(0, dtype=torch.int64, device="cpu")
    return Rollouts(
        tokens_N=torch.cat([no_tokens, *(part.tokens_T for part in parts)]).long(),
        cu_seqlens=lengths.cumsum(0),
        response_mask_N=torch.cat([no_tokens, *(p.is_answer_T for p in parts)]).bool(),
    )


def encode_preference(
    row: Row, tokenizer: Any, seq_len: int, options: DatasetOptions, column_names: ColumnNames
) -> list[Preference]:
    """Return a list with the pair of preferred and rejected completion of a row's prompt."""
    columns = row.select_columns(column_names)
    prompt, *completions = (
        as_messages(columns.get(n)) for n in ("prompt", "preferred", "rejected")
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
    completions = [remove_prompt(prompt, completion) for completion in completions]
    tools = parse_tools(columns)
    return [Preference(*_encode_completions(row, tokenizer, prompt, completions, tools))]


def encode_unpaired_preference(
    row: Row, tokenizer: Any, seq_len: int, options: DatasetOptions, column_names: ColumnNames
) -> list[UnpairedPreference]:
    """Return a list with the labelled completion of a row's prompt."""
    columns = row.select_columns(column_names)
    prompt, completion = (as_messages(columns.get(n)) for n in ("prompt", "completion"))
    completion = remove_prompt(prompt, completion)
    are_texts = isinstance(prompt, str) and isinstance(completion, str)
    if not are_texts and not (is_chat(prompt) and is_chat(completion)):
        raise ValueError(
            f"{row.location} must have {column_names.prompt} and {column_names.completion}, both "
            "texts or both messages: correct the row or [columns]"
        )
    if not isinstance(label := columns.get("label"), bool):
        raise ValueError(
            f"{row.location} must have {column_names.label}, true or false, not "
            f"{quote(label)}: correct the row or [columns]"
        )
    tools = parse_tools(columns)
    (sequence,) = _encode_completions(row, tokenizer, prompt, [completion], tools)
    return [UnpairedPreference(sequence, sequence.tokens_T[sequence.is_answer_T], label)]


def _encode_completions(
    row: Row, tokenizer: Any, prompt: Any, completions: Sequence[Any], tools: Any
) -> list[Example]:
    """Return the prompt with each completion, of which the tokens of completions are learned."""
    try:
        prompt_ids = tokenize_prompt(tokenizer, prompt, tools)
        full = [prompt + completion for completion in completions]
        if isinstance(prompt, str):
            texts = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in full)
            ids = list(map(find_borders(tokenizer).make_document, texts))
        else:
            chats = (format_arguments(tokenizer, chat, tools) for chat in full)
            ids = [
                tokenizer.apply_chat_template(chat, tools=tools, return_dict=True)["input_ids"]
                for chat in chats
            ]
    except Exception as error:  # of any kind: a template is code
        raise ValueError(
            f"{row.location} must fit the chat template of --model: {shorten_text(error)}"
        ) from None
    num_prompt = min(count_common_prefix(prompt_ids, tokens) for tokens in ids)
    if not num_prompt:
        raise ValueError(f"{row.location} must have a prompt before each completion: add one")
    return [
        Example(
            torch.tensor(tokens, dtype=torch.int32, device="cpu"),
            torch.arange(len(tokens), device="cpu") >= num_prompt,
        )
        for tokens in ids
    ]
