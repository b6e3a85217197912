"""Slots for clones of hot experts that every rank of a group can see, and what goes through them.

Legend: G ranks of the dispatch group, c clones of a rank, e experts of a rank, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.kernels.exchange import clones as kernels
from moecore.kernels.exchange.buffer import ERROR_WORD
from moecore.kernels.exchange.clones import CloneBuffer, Places
from moecore.moe.dispatch.exchange import ExchangeError, late_message

KINDS = ("transfer of clones' weights", "sum of clones' gradients")


class CloneExchange:
    """One rank's end of the exchange of clones, shared by all layers of a model.

    All ranks of the group run the same operations in the same order; on one rank they are ordered
    by their streams. No operation syncs.
    """

    def __init__(self, buffer: CloneBuffer, group: dist.ProcessGroup) -> None:
        self.buffer = buffer
        self.group = group
        G = group.size()
        experts_N = torch.arange(G, dtype=torch.int32, device=buffer.state.device).repeat(G)
        self._everybody = Places(experts_N=experts_N, num_clones=G, num_local=1)

    def gather(self, row_1E: Tensor) -> Tensor:
        """Return the rows of all ranks, [G, E]: every rank clones what each has."""
        (rows_GE,) = self.fetch([row_1E], self._everybody)
        return rows_GE

    def fetch(self, tensors: Sequence[Tensor], places: Places) -> list[Tensor]:
        """Return the clones' part of each tensor, [c, ...]; zeros where a place is empty."""
        return [kernels.fetch(self.buffer, tensor, places) for tensor in tensors]

    def bring_home_(self, grads: Sequence[Tensor], places: Places) -> list[Tensor]:
        """Add the clones' gradients to those of their experts; return these, [e, ...].

        In place, where they are contiguous.
        """
        return [kernels.bring_home_(self.buffer, grad.contiguous(), places) for grad in grads]

    def poll(self) -> None:
        """Raise what has gone wrong so far, as far as the host can see without waiting.

        Raises:
            ExchangeError: when a rank did not come in time; see `Exchange.poll`.
        """
        error = int(self.buffer.report[ERROR_WORD])
        if error:
            raise ExchangeError(late_message(self.buffer, self.group, error - 1, KINDS))
