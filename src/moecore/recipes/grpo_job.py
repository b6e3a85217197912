"""Reward functions by import path, as TRL's GRPOTrainer calls them.

    def reward(prompts, completions, **columns) -> list[float]

`prompts` has the prompt of each completion, a text or a list of messages. `completions` has texts,
or for prompts of messages lists of one assistant's message. `columns` has a list for each other
column of --data, and completion_ids, the tokens. The result is one number per completion.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moecore.packing import PackedBatchSampler
from moecore.recipes.chat import is_chat
from moecore.recipes.rows import ColumnNames, DatasetOptions, parse_tools, read_rows

Reward = Callable[..., Sequence[float]]


class RewardError(RuntimeError):
    """A reward function failed, or did not return a finite number for each completion."""


def load_reward(path: str) -> Reward:
    """Return the function of MODULE:FUNCTION; modules of the working directory are found too.

    Raises:
        ValueError: when there is none.
    """
    module_name, _, name = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        function: Reward = getattr(importlib.import_module(module_name), name)
    except Exception as error:  # of any kind: a module is code
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"--reward ({path}) must be MODULE:FUNCTION that imports: {reason}"
        ) from None
    if not callable(function):
        raise ValueError(f"--reward ({path}) must name a function: correct it")
    return function


def rewards_of(
    reward: Reward,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    columns: Mapping[str, Sequence[Any]],
) -> Tensor:
    """Return the reward of each completion, fp32 [n].

    Raises:
        RewardError: when the function raises, or returns other values.
    """
    if not completions:
        return torch.zeros(0)
    try:
        values = [float(v) for v in reward(prompts=prompts, completions=completions, **columns)]
    except Exception as error:  # of any kind: it is code of the user's own
        line = f"{type(error).__name__}: {error}"
        raise RewardError(
            f"--reward must return numbers: {' '.join(line.split())[:300]}"
        ) from error
    if len(values) != len(completions) or not all(map(math.isfinite, values)):
        raise RewardError(
            f"--reward returned {len(values)} values, which must be one finite number for each of "
            f"{len(completions)} completions: correct it"
        )
    return torch.tensor(values)


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
