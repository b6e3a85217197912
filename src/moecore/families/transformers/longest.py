"""Rotary embeddings of transformers whose angles depend on the longest position of a forward.

"dynamic" and "longrope" frequencies, and the factors of Phi-3.5-MoE, follow from the largest
position that the module gets. Rows over context parallel ranks: each rank has a part of the
positions, so the module gets the largest position of the whole rows as one more token, and the
angles of that token are dropped. Packed documents would share angles, so they are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from moecore.base.torch_private import tree_map_only
from moecore.families.transformers.stock import names_in_forward

POSITIONS = "position_ids"  # argument of a rotary embedding


def longest_position_readers(model: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield name, rope type and module of each embedding that reads the longest position."""
    for name, module in model.named_modules():
        kind = getattr(module, "rope_type", None)
        types = kind.values() if isinstance(kind, dict) else [kind]
        for rope_type in types:
            if isinstance(rope_type, str) and _reads_longest(module, rope_type):
                yield name, rope_type, module
                break


def _reads_longest(module: nn.Module, rope_type: str) -> bool:
    if "dynamic" in rope_type or rope_type == "longrope":  # as transformers' dynamic_rope_update
        return True
    return rope_type != "default" and "max" in names_in_forward(module)


class LongestPosition:
    """Gives the rotary embeddings of a model the largest position of whole rows."""

    def __init__(self, model: nn.Module) -> None:
        self._num_tokens: int | None = None
        for _, _, module in longest_position_readers(model):
            module.register_forward_pre_hook(self._append, with_kwargs=True)
            module.register_forward_hook(self._drop)

    def begin(self, num_tokens: int | None) -> None:
        """Set the tokens of the rows of the forward that begins; None = this rank has all."""
        self._num_tokens = num_tokens

    def _append(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._num_tokens is None:
            return None
        positions: Tensor = kwargs[POSITIONS] if POSITIONS in kwargs else args[1]
        last = positions.new_full((*positions.shape[:-1], 1), self._num_tokens - 1)
        extended = torch.cat((positions, last), dim=-1)
        if POSITIONS in kwargs:
            return args, kwargs | {POSITIONS: extended}
        return (args[0], extended, *args[2:]), kwargs

    def _drop(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self._num_tokens is None:
            return None
        # Angles are [B, t, d]: of cos and sin, or complex.
        return tree_map_only(Tensor, lambda x: x[..., :-1, :], output)
