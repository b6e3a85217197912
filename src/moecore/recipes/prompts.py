"""Prompts of `moecore grpo`: rows of --data with a prompt, and the steps that read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moecore.packing import PackedBatchSampler
from moecore.recipes.chat import is_chat
from moecore.recipes.rows import ColumnNames, DatasetOptions, parse_tools, read_rows


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and the columns that a reward function reads.

    Attributes:
        content: a text, or a list of messages.
        ids: the tokens.
        columns: all other columns of the row.
    """

    content: Any
    ids: list[int]
    columns: Mapping[str, Any]


def read_prompts(
    files: Sequence[Path],
    tokenizer: Any,
    *,
    options: DatasetOptions | None,
    columns: ColumnNames | None,
    max_tokens: int,
) -> list[Prompt]:
    """Return the prompts of the files, in order; messages are rendered for an answer.

    Raises:
        ValueError: for a row without a prompt, one that the template refuses or is too long.
    """
    names, prompts = columns or ColumnNames(), list[Prompt]()
    for row in read_rows(files, "--data", options or DatasetOptions()):
        content = dict(row.parse())
        prompt = content.pop(names.prompt, None)
        if not isinstance(prompt, str) and not is_chat(prompt):
            raise ValueError(
                f"{row.place} must have {names.prompt}, a text or messages: correct the row or "
                "columns.prompt"
            )
        try:
            if isinstance(prompt, str):
                ids = tokenizer(prompt)["input_ids"]
            else:
                tools = parse_tools(names.rename(content))
                ids = tokenizer.apply_chat_template(
                    prompt, tools=tools, add_generation_prompt=True, return_dict=True
                )["input_ids"]
        except Exception as error:  # of any kind: a template is code
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"{row.place} must fit the tokenizer of --model: {reason}") from None
        if not 0 < len(ids) <= max_tokens:
            raise ValueError(
                f"{row.place} ({len(ids)} tokens) must have 1 to {max_tokens} tokens, --seq-len "
                "without --max-new-tokens: raise --seq-len, or leave the row out"
            )
        prompts.append(Prompt(prompt, ids, content))
    if not prompts:
        raise ValueError(f"--data ({' '.join(map(str, files))}) must have a prompt: add rows")
    return prompts


class PromptSteps:
    """Reads the next prompts of this data rank: each prompt once per epoch, over all data ranks.

    Attributes:
        sampler: its state is the position in the data, the same on every rank.
    """

    def __init__(
        self, prompts: Sequence[Prompt], *, rows: int, data_rank: int, data_ranks: int, seed: int
    ) -> None:
        self._prompts = prompts
        self.sampler = PackedBatchSampler(
            [1] * len(prompts), 1, rows=rows, data_rank=data_rank, data_ranks=data_ranks, seed=seed
        )
        self._batches = self._all_batches()

    def next(self) -> list[Prompt]:
        """Return the prompts of the step after the last one; the last step may have fewer."""
        return [self._prompts[number] for number in next(self._batches)]

    def _all_batches(self) -> Iterator[list[int]]:
        while True:
            yield from self.sampler
