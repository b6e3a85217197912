"""The identity dispatcher: every expert lives on this rank. No communication, no host sync."""

from __future__ import annotations

from torch import Tensor

from moecore.kernels.rows.index import build_index
from moecore.kernels.rows.record import Rows
from moecore.moe.records import Dispatcher, ExpertInput, Routing


class LocalDispatcher(Dispatcher):
    """dispatch and combine of a rank that owns all experts."""

    waits_on_host = takes_turns = False

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def dispatch(self, x_TD: Tensor, routing: Routing) -> ExpertInput:
        """Return x_TD itself as source rows (S = T, R at most T * K), without a copy."""
        ids_TK, E = routing.expert_ids_TK, self.num_experts
        length = min(ids_TK.numel(), E * routing.most_rows_per_expert)
        index = build_index(
            ids_TK,
            routing.weights_TK,
            first=0,
            num_local=E,
            multiple=routing.rows_multiple,
            length=length,
        )
        return ExpertInput(Rows(x_TD), index, None)

    def combine(self, y_SD: Tensor, plan: None) -> Tensor:
        """Return y_SD: the experts have already added over a token's experts."""
        return y_SD
