"""An exchange whose operations are collectives and references, for dispatcher tests without GPUs.

Holes are NaN in floats: who reads one shows it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from moecore._compat import all_gather_single
from moecore.kernels.exchange import SpreadChoices, peers_ref, reduce_ref, spread_ref
from moecore.kernels.exchange_port import NUM_WORDS, ExchangeLayout, ExchangePort
from moecore.moe.dispatch.symmetric import Exchange, Exchanges


class EmulatedExchange(Exchange):
    """The same results over any process group, and a list of what ran."""

    operations: list[str]

    def spread_choices(
        self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, *, num_local: int, etp: int
    ) -> SpreadChoices:
        self.operations.append("spread_choices")
        peers_T = peers_ref(ids_TK, num_local, self.layout.num_ranks // etp, etp)
        peers_GC, rank = self._gather(peers_T, 0), self.port.rank
        ids_SK = spread_ref(self._gather(ids_TK, -1), peers_GC, rank, -1)
        weights_SK = spread_ref(self._gather(weights_TK, 0), peers_GC, rank)
        return SpreadChoices(
            rows_SD=spread_ref(self._gather(x_TD, 0), peers_GC, rank, float("nan")),
            ids_SK=ids_SK,
            weights_SK=weights_SK.where(ids_SK >= 0, 0),
            peers_T=peers_T,
            used_S=(peers_GC >> rank & 1).flatten(),
        )

    def spread(self, x_TD: Tensor, peers_T: Tensor, used_S: Tensor) -> Tensor:
        self.operations.append("spread")
        sent = (self._gather(x_TD, 0), self._gather(peers_T, 0))
        return spread_ref(*sent, self.port.rank, float("nan"))

    def reduce(
        self, y_SD: Tensor, peers_T: Tensor, used_S: Tensor, dweights_SK: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        self.operations.append("reduce")
        home = [
            None if t is None else reduce_ref(self._gather(t), peers_T, self.port.rank)
            for t in (y_SD, dweights_SK)
        ]
        assert home[0] is not None
        return home[0], home[1]

    def _gather(self, tensor: Tensor, fill: float | None = None) -> Tensor:
        """Return [G, ...] of all ranks, padded to C tokens with `fill`."""
        if fill is not None:
            padded = tensor.new_full((self.layout.capacity, *tensor.shape[1:]), fill)
            padded[: tensor.shape[0]] = tensor
            tensor = padded
        out = tensor.new_empty(self.layout.num_ranks, *tensor.shape)
        all_gather_single(out.flatten(0, 1), tensor.contiguous(), group=self.group)
        return out


class EmulatedExchanges(Exchanges):
    """Makes emulated exchanges with room for `options.max_tokens` tokens, on the CPU."""

    def _make(self, x_TD: Tensor, top_k: int) -> Exchange:
        most = self.options.max_tokens
        assert most is not None
        layout = ExchangeLayout(
            num_ranks=self.group.size(),
            capacity=most,
            dim=x_TD.shape[1],
            top_k=top_k,
            dtype=x_TD.dtype,
            num_push=1,
            num_receive=1,
        )
        port = ExchangePort(
            layout=layout,
            rank=dist.get_rank(self.group),
            bases=torch.empty(0, dtype=torch.int64),
            state=torch.zeros(NUM_WORDS, dtype=torch.int32),
            report=torch.zeros(NUM_WORDS, dtype=torch.int32),
            timeout_ns=round(self.options.timeout_s * 1e9),
        )
        balanced = layout.source_rows * top_k // self.ep
        options = self.options
        made = EmulatedExchange(port, self.group, options, balanced_rows=balanced, memory=None)
        made.operations = []
        return made
