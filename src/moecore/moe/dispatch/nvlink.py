"""Stores straight into the peers' memory: the dispatcher for one NVLink domain. No host sync.

Legend: T local tokens, C the most tokens of any rank, D model dim, K experts per token, G ranks of
the group (ep * etp), S = G * C source rows, R expert rows.

    dispatch = spread of tokens and choices     backward: reduce of their gradients
    combine  = reduce of partial sums           backward: spread of the gradient

Each operation is one launch that sends and receives (`kernels/exchange.py`). Source row g * C + t
is token t of rank g, or a hole where this rank does not need it. Sums run over the ranks in order.
Received rows are copied out of the buffer, and backward finds the copy: so layers share one buffer.

Shapes are static and counts stay on the device, so a CUDA graph may hold any number of layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moecore._compat import disable_dynamo
from moecore.kernels.index import build_index
from moecore.moe.dispatch.base import ExpertInput, ExpertPlacement
from moecore.moe.dispatch.symmetric import Exchange, Exchanges
from moecore.moe.router import Routing


@dataclass(frozen=True, slots=True)
class NVLinkPlan:
    """What combine needs: the exchange, who needed which token, and which rows are holes.

    Attributes:
        exchange: over which the tokens came.
        peers_T: int32, bit g of each local token: rank g has it.
        used_S: int32, 1 = a row, 0 = a hole.
    """

    exchange: Exchange
    peers_T: Tensor
    used_S: Tensor


class NVLinkDispatcher:
    """Sends each token once to every rank that owns at least one of its experts, by stores.

    Args:
        placement: the dispatch group and who owns what.
        exchanges: of the same group; shared by the layers of a model.
    """

    def __init__(self, placement: ExpertPlacement, exchanges: Exchanges) -> None:
        self.placement = placement
        self.exchanges = exchanges

    @disable_dynamo
    def dispatch(self, x_TD: Tensor, routing: Routing) -> ExpertInput:
        """Bring tokens to their experts' ranks. No host sync after the first; no collective.

        Holes of `rows_SD` are uninitialised; their choices are -1.

        Raises:
            ValueError: for rows that can not travel, or more tokens than there is room for.
            RuntimeError: when an earlier operation went wrong (see `Exchange.poll`).
        """
        p = self.placement
        if routing.weights_TK.dtype != torch.float32:
            raise ValueError(
                f"weights_TK ({routing.weights_TK.dtype}) must be torch.float32 for dispatcher "
                "('nvlink'): use 'alltoall'"
            )
        exchange = self.exchanges.get(x_TD, routing.expert_ids_TK.shape[1])
        tokens = (x_TD, routing.weights_TK, routing.expert_ids_TK)
        rows_SD, weights_SK, ids_SK, *where = _Dispatch.apply(*tokens, exchange, p)
        most_rows = exchange.layout.source_rows * min(exchange.layout.top_k, p.num_local)
        num_rows = _num_rows(exchange, most_rows)
        row_ids_R, weights_R, slots_SK, offsets_e = build_index(
            ids_SK, weights_SK, first=p.first_local, num_local=p.num_local, capacity=num_rows
        )
        if num_rows < most_rows:
            offsets_e = exchange.limit_rows(offsets_e, num_rows)
        index = (row_ids_R, weights_R, slots_SK, offsets_e)
        return ExpertInput(rows_SD, *index, offsets_e[-1], NVLinkPlan(exchange, *where))

    @disable_dynamo
    def combine(self, y_SD: Tensor, plan: NVLinkPlan) -> Tensor:
        """Send partial sums home and add them in fp32. No host sync, no collective.

        Raises:
            ValueError: when y_SD has another dtype than the tokens had.
        """
        if y_SD.dtype != plan.exchange.layout.dtype:
            raise ValueError(
                f"dtype of the experts' output ({y_SD.dtype}) must be that of their input "
                f"({plan.exchange.layout.dtype}) for dispatcher ('nvlink'): use 'alltoall'"
            )
        return _Combine.apply(y_SD, plan)


def _num_rows(exchange: Exchange, most_rows: int) -> int:
    """Return R: static, the same in every forward, at most what any routing gives."""
    factor = exchange.options.capacity_factor
    if factor is None:
        return most_rows
    return min(most_rows, math.ceil(factor * exchange.balanced_rows))


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weights_TK: Tensor,
        ids_TK: Tensor,
        exchange: Exchange,
        place: ExpertPlacement,
    ) -> tuple[Tensor, ...]:
        sizes = dict(num_local=place.num_local, etp=place.etp)
        came = exchange.spread_choices(x_TD, ids_TK, weights_TK, **sizes)
        ctx.exchange = exchange
        ctx.save_for_backward(came.peers_T, came.used_S)
        ctx.mark_non_differentiable(came.ids_SK, came.peers_T, came.used_S)
        ctx.set_materialize_grads(False)  # the integer outputs would get zeros of their size
        return came.rows_SD, came.weights_SK, came.ids_SK, came.peers_T, came.used_S

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        peers_T, used_S = ctx.saved_tensors
        layout, (drows_SD, dweights_SK) = ctx.exchange.layout, grads[:2]
        # Every rank takes part, whichever gradients it has.
        if drows_SD is None:
            shape = (layout.source_rows, layout.dim)
            drows_SD = torch.zeros(shape, dtype=layout.dtype, device=used_S.device)
        if dweights_SK is None:
            dweights_SK = torch.zeros(layout.source_rows, layout.top_k, device=used_S.device)
        dx_TD, dweights_TK = ctx.exchange.reduce(drows_SD, peers_T, used_S, dweights_SK)
        return dx_TD, dweights_TK, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_SD: Tensor, plan: NVLinkPlan) -> Tensor:
        ctx.plan = plan
        return plan.exchange.reduce(y_SD, plan.peers_T, plan.used_S)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        plan = ctx.plan
        return plan.exchange.spread(grads[0], plan.peers_T, plan.used_S), None
