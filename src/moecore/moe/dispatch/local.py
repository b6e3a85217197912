"""`LocalDispatcher` for a rank with all experts; `ChoiceDispatcher`, which fixes the order of sums.

`LocalDispatcher` is the identity: every expert is on this rank. It never syncs with the host.

`ChoiceDispatcher` sends each token once per choice through an inner dispatcher:

    x_TD -> [T * K, D], one choice each -> the dispatcher -> [T * K, D] -> sum over K, in order

A dispatcher sums a token's experts on each of their ranks, and then over the ranks. This order
depends on which rank owns an expert. `ChoiceDispatcher` sums the K outputs of a token on the
token's own rank, as one rank with all experts would, so the bits do not depend on ep. It sends K
rows for each token, at most K times the rows of the inner dispatcher.

Legend: T local tokens, D dim of the rows, K choices per token.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moecore.kernels.rows.index import build_index
from moecore.kernels.rows.record import Rows
from moecore.moe.pairs import Pairs
from moecore.moe.records import Dispatcher, ExpertInput, Routing


class LocalDispatcher(Dispatcher):
    """The dispatcher of a rank that owns all experts: no communication."""

    waits_on_host = can_alternate = False

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def dispatch(self, x_TD: Tensor, routing: Routing) -> ExpertInput:
        """Return x_TD as source rows, without a copy, and an index of at most T * K expert rows."""
        ids_TK, E = routing.destinations_TK, self.num_experts
        index = build_index(
            ids_TK,
            routing.weights_TK,
            first_expert=0,
            num_local_experts=E,
            row_multiple=routing.rows_multiple,
            max_pairs=min(ids_TK.numel(), E * routing.max_rows_per_expert),
        )
        return ExpertInput(Rows(x_TD), index, None)

    def combine(self, y_SD: Tensor, plan: None) -> Tensor:
        """Return y_SD unchanged, because the experts have summed each token's outputs."""
        return y_SD


class ChoiceDispatcher:
    """Dispatches each (token, expert) pair as one token, so that sums do not depend on ep."""

    def __init__(self, inner: Dispatcher, num_choices: int) -> None:
        self.inner, self.num_choices = inner, num_choices

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def pairs(self) -> Pairs | None:
        """Alternates a forward with another micro-batch's backward in `inner`; None = off."""
        return self.inner.pairs

    @pairs.setter
    def pairs(self, pairs: Pairs | None) -> None:
        """Set the overlap of forward and backward in the inner dispatcher; None = no overlap."""
        self.inner.pairs = pairs

    def dispatch(self, x_TD: Tensor, routing: Routing) -> ExpertInput:
        """Dispatch T * K (token, expert) pairs as tokens with one expert; return experts' input."""
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
        """Return each token's sum over its K experts, added in order in fp32 and rounded once."""
        y_TKD = self.inner.combine(y_SD, plan).unflatten(0, (-1, self.num_choices))
        wide = torch.promote_types(y_TKD.dtype, torch.float32)
        first, *rest = y_TKD.to(wide).unbind(1)
        sums_TD: Tensor = sum(rest, start=first)
        return sums_TD.to(y_TKD.dtype)
