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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

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
