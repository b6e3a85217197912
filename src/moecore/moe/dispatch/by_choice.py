"""ByChoice: a dispatcher that each token passes once per choice, so that sums have one order.

    x_TD -> [T * K, D], one choice each -> the dispatcher -> [T * K, D] -> sum over K, in order

A dispatcher adds a token's experts on each of their ranks and then over ranks, an order that
follows from who owns them. Here the K outputs of a token come home and are added as by one rank
that owns all experts: bits do not depend on ep. Rows that travel are K times as many tokens, which
is at most K times what a dispatcher sends.

Legend: T local tokens, D dim of the rows, K choices per token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moecore.moe.pairs import Pairs
from moecore.moe.records import Dispatcher, ExpertInput, Routing


class ByChoice:
    """A `Dispatcher` around another, whose other attributes it has."""

    def __init__(self, inner: Dispatcher, num_choices: int) -> None:
        self.inner, self.num_choices = inner, num_choices

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def pairs(self) -> Pairs | None:
        """See `Dispatcher`."""
        return self.inner.pairs

    @pairs.setter
    def pairs(self, pairs: Pairs | None) -> None:
        self.inner.pairs = pairs

    def dispatch(self, x_TD: Tensor, routing: Routing) -> ExpertInput:
        """Dispatch each choice as a token of its own."""
        K = self.num_choices
        mask_T, physical_TK = routing.padding_mask_T, routing.physical_TK
        by_choice = replace(
            routing,
            expert_ids_TK=routing.expert_ids_TK.view(-1, 1),
            weights_TK=routing.weights_TK.view(-1, 1),
            chosen_ids_TK=routing.chosen_ids_TK.view(-1, 1),
            physical_TK=None if physical_TK is None else physical_TK.view(-1, 1),
            logits_TE=None,
            padding_mask_T=None if mask_T is None else mask_T.repeat_interleave(K),
        )
        return self.inner.dispatch(x_TD[:, None].expand(-1, K, -1).flatten(0, 1), by_choice)

    def combine(self, y_SD: Any, plan: Any) -> Tensor:
        """Return the sum over each token's choices, in fp32 and rounded once."""
        y_TKD = self.inner.combine(y_SD, plan).unflatten(0, (-1, self.num_choices))
        wide = torch.promote_types(y_TKD.dtype, torch.float32)
        first, *rest = y_TKD.to(wide).unbind(1)
        for y_TD in rest:
            first = first + y_TD
        result: Tensor = first.to(y_TKD.dtype)
        return result
