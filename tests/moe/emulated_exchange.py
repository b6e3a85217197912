"""An exchange whose operations are collectives and references, for dispatcher tests without GPUs.

Holes are NaN in floats: who reads one shows it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.kernels.exchange.buffer import NUM_WORDS, ExchangeLayout, SymmetricBuffer
from moecore.kernels.exchange.copies import SlotEvent
from moecore.kernels.exchange.operations import DispatchedRows
from moecore.kernels.rows.move import sum_rows_ref
from moecore.moe.dispatch.exchange import Exchange, ExchangeMap
from moecore.moe.dispatch.exchange_pool import ExchangePool
from tests.kernels.exchange.oracles import peers_ref, reduce_ref, spread_ref


def hole_of(x: Tensor) -> float:
    """Return NaN; in bytes, which are FP8 values, the one that means it."""
    return float("nan") if x.is_floating_point() else 0xFF


class EmulatedExchange(Exchange):
    """The same results over any process group, and a list of what ran."""

    operations: list[str]

    def dispatch_tokens(self, x_TD, ids_TK, weights_TK, placement) -> DispatchedRows:
        num_local_experts, etp = placement.num_physical, placement.etp
        self.operations.append("spread_choices")
        self._change_slot_state(SlotEvent.OPERATION)
        peers_T = peers_ref(ids_TK, num_local_experts, self.layout.num_ranks // etp, etp)
        rank, hole = self.buffer.rank, hole_of(x_TD)
        peers_GC, ids_GCK, weights_GCK, x_GCD = self._gather(
            (peers_T, 0), (ids_TK, -1), (weights_TK, 0), (x_TD, 0)
        )
        ids_SK = spread_ref(ids_GCK, peers_GC, rank, -1)
        weights_SK = spread_ref(weights_GCK, peers_GC, rank)
        rows_S = torch.arange(self.layout.source_rows, dtype=torch.int32, device=x_TD.device)
        return DispatchedRows(
            rows_SD=spread_ref(x_GCD, peers_GC, rank, hole),
            ids_SK=ids_SK,
            weights_SK=weights_SK.where(ids_SK >= 0, 0),
            peers_T=peers_T,
            places_S=rows_S.where((peers_GC >> rank & 1).flatten().bool(), -1),
        )

    def dispatch_rows(self, x_TD: Tensor, row_map: ExchangeMap, num_rows: int) -> Tensor:
        self.operations.append("spread")
        self._change_slot_state(SlotEvent.OPERATION)
        peers_GC, x_GCD = self._gather((row_map.peers_T, 0), (x_TD, 0))
        rows_SD = spread_ref(x_GCD, peers_GC, self.buffer.rank, hole_of(x_TD))
        out_RD = x_TD.new_full((num_rows, x_TD.shape[1]), hole_of(x_TD))
        s, n = (row_map.slots_SN >= 0).nonzero().T
        out_RD[row_map.slots_SN[s, n].long()] = rows_SD[s]
        return out_RD

    def combine_rows(self, y_RD, row_map, choices=None) -> tuple[Tensor, Tensor | None]:
        self._change_slot_state(SlotEvent.OPERATION)
        return self._reduce(y_RD, row_map, choices)

    def _reduce(self, y_RD, row_map, choices) -> tuple[Tensor, Tensor | None]:
        self.operations.append("reduce")
        rank, (peers_T, places_S, slots_SN) = self.buffer.rank, row_map
        y_SD = sum_rows_ref(y_RD, places_S, slots_SN, None)
        if choices is None:
            (y_GSD,) = self._gather((y_SD, None))
            return reduce_ref(y_GSD, peers_T, rank), None
        dweights_R, slots_SK = choices
        dweights_SK = torch.where(slots_SK >= 0, dweights_R[slots_SK.clamp(min=0).long()], 0)
        y_GSD, dweights_GSK = self._gather((y_SD, None), (dweights_SK, None))
        return reduce_ref(y_GSD, peers_T, rank), reduce_ref(dweights_GSK, peers_T, rank)

    def start_copies(self, sums_SD: Tensor) -> None:
        self.operations.append("copies")
        self._change_slot_state(SlotEvent.COPY)

    def finish_copies(self, sums_SD, row_map, choices) -> tuple[Tensor, Tensor | None]:
        self._change_slot_state(SlotEvent.READ)
        places = row_map._replace(slots_SN=row_map.places_S[:, None])
        return self._reduce(sums_SD, places, choices)

    def _gather(self, *parts: tuple[Tensor, float | None]) -> list[Tensor]:
        """Return [G, ...] of all ranks for each tensor, padded to C tokens with what is given.

        One collective in one round: on CPUs a message takes longer than its bytes.
        """
        sent = []
        for tensor, fill in parts:
            if fill is not None:
                padded = tensor.new_full((self.layout.max_tokens, *tensor.shape[1:]), fill)
                padded[: tensor.shape[0]] = tensor
                tensor = padded
            sent.append(tensor.contiguous())
        flat = torch.cat([tensor.flatten().view(torch.uint8) for tensor in sent])
        out = flat.new_empty(self.layout.num_ranks, flat.numel())
        dist.all_to_all_single(out, flat.expand_as(out).contiguous(), group=self.group)
        pieces = out.split([tensor.nbytes for tensor in sent], dim=1)
        return [
            piece.contiguous().view(-1).view(tensor.dtype).view(-1, *tensor.shape)
            for piece, tensor in zip(pieces, sent, strict=True)
        ]


@contextmanager
def emulated() -> Iterator[None]:
    """Within, `parallelize_moe` takes dispatcher "nvlink" on CPUs."""
    with (
        patch("moecore.parallel.model.phases.ExchangePool", EmulatedExchangePool),
        patch(
            "moecore.parallel.model.phases.find_peer_store_problem", lambda group, device_type: None
        ),
        patch(
            "moecore.parallel.model.phases.find_local_peer_problem", lambda ranks, device_type: None
        ),
    ):
        yield


class EmulatedExchangePool(ExchangePool):
    """Makes emulated exchanges on the CPU."""

    def _make_exchange(self, x_TD: Tensor, top_k: int) -> Exchange:
        most = self.options.max_tokens or self._compare_options(x_TD, top_k, 1)
        layout = ExchangeLayout(
            num_ranks=self.group.size(),
            max_tokens=most,
            row_bytes=x_TD.shape[1] * x_TD.itemsize,
            top_k=top_k,
            num_push=1,
            num_receive=1,
            sums_slot=self.options.overlap_weight_grads,
        )
        buffer = SymmetricBuffer(
            layout=layout,
            rank=dist.get_rank(self.group),
            bases=torch.empty(0, dtype=torch.int64),
            state=torch.zeros(NUM_WORDS, dtype=torch.int32),
            report=torch.zeros(NUM_WORDS, dtype=torch.int32),
            timeout_ns=round(self.options.timeout_s * 1e9),
        )
        balanced = layout.source_rows * top_k // self.ep
        made = EmulatedExchange(buffer, self.group, self.options, balanced_rows=balanced)
        made.operations = []
        return made
