"""Exchange: the operations of dispatcher "nvlink" on a buffer that all ranks of a group write.

`Exchange` launches the operations and raises the errors that they report. `MetaExchange` has the
same shapes on meta, for the planner, and records launches and bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from moecore.base.options.dispatch import NVLinkOptions
from moecore.base.streams import Stream, create_stream, get_current_stream, use_stream
from moecore.kernels.exchange import copies
from moecore.kernels.exchange import operations as kernels
from moecore.kernels.exchange.buffer import (
    ERROR_WORD,
    NEEDED_WORD,
    ExchangeLayout,
    SymmetricBuffer,
)
from moecore.kernels.exchange.copies import SlotEvent, SlotState
from moecore.kernels.meta import record_launch
from moecore.moe.placement import ExpertPlacement
from moecore.moe.shortage import ShortageCounters

# Operations of a `MetaExchange`, by the names of their kernels.
SPREAD, REDUCE, COPY = "_spread_kernel", "_reduce_kernel", "copy to peers"
KINDS = ("dispatch (or the backward of a combine)", "combine (or the backward of a dispatch)")


class ExchangeError(RuntimeError):
    """Raised if a buffer of rows was too small, or a rank missed the timeout of an exchange.

    Attributes:
        row_factor: smallest `NVLinkOptions.row_factor` with space for this rank's expert rows;
            None = expert rows were not the cause.
        stash_factor: smallest `StashOptions.factor` with space for the rows that this rank saves
            for backward; None = these were not the cause. Both None = a rank was late.
    """

    def __init__(
        self, message: str, row_factor: float | None = None, stash_factor: float | None = None
    ) -> None:
        super().__init__(message)
        self.row_factor, self.stash_factor = row_factor, stash_factor


class ExchangeMap(NamedTuple):
    """Record of a dispatch: the ranks that received each token, and the rows of each source row."""

    peers_T: Tensor  # int64, bit g of each local token: rank g received the token
    places_S: Tensor  # int32, the index of the source row itself; -1 = a hole
    slots_SN: Tensor  # int32, the N rows of each source row in a tensor of rows; -1 = no row


class Exchange:
    """Sends rows by kernels that store into the memory of peer ranks. No host sync.

    All ranks of the group must call the same methods in the same order, on one stream or on streams
    that wait for each other. `balanced_rows` is the number of expert rows per rank with even loads
    and the maximum number of tokens.
    """

    def __init__(
        self,
        buffer: SymmetricBuffer,
        group: dist.ProcessGroup,
        options: NVLinkOptions,
        *,
        balanced_rows: int,
    ) -> None:
        self.buffer, self.group = buffer, group
        self.options, self.balanced_rows = options, balanced_rows
        self._stream: Stream | None = None  # stream of `start_copies`
        self._slot = SlotState.FREE

    @property
    def layout(self) -> ExchangeLayout:
        """The layout of the buffer, identical on all ranks."""
        return self.buffer.layout

    def dispatch_tokens(
        self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, placement: ExpertPlacement
    ) -> kernels.DispatchedRows:
        """Send tokens, ids and weights to the experts' ranks; return the received source rows."""
        sizes: Any = dict(num_local_experts=placement.num_physical, etp=placement.etp)
        tensors = (x_TD.contiguous(), ids_TK.contiguous(), weights_TK.contiguous())
        self._change_slot_state(SlotEvent.OPERATION)
        return kernels.dispatch_rows_and_choices(self.buffer, *tensors, **sizes)

    def dispatch_rows(self, x_TD: Tensor, row_map: ExchangeMap, num_rows: int) -> Tensor:
        """Send row t of x_TD to the ranks that received token t in the dispatch of `row_map`.

        Returns a tensor of `num_rows` rows: received row s is copied to all rows `slots_SN[s]`.
        """
        self._change_slot_state(SlotEvent.OPERATION)
        return kernels.dispatch_rows(self.buffer, x_TD.contiguous(), *row_map, num_rows)

    def combine_rows(
        self,
        y_RD: Tensor,
        row_map: ExchangeMap,
        grads_and_slots: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the sum [T, D] of each token's rows on all ranks that received the token.

        `row_map.slots_SN[s]` has the rows of y_RD for received row s. `grads_and_slots` has the
        gradient of each expert row's weight [R], and the expert row of each choice [S, K]. With it,
        the gradients of routing weights [T, K] are also returned, otherwise None.
        """
        if grads_and_slots is not None:
            grads_and_slots = (grads_and_slots[0].contiguous(), grads_and_slots[1])
        self._change_slot_state(SlotEvent.OPERATION)
        return kernels.combine_rows(self.buffer, y_RD.contiguous(), *row_map, grads_and_slots)

    def can_copy(self) -> bool:
        """Whether `start_copies` may be called: all ranks have read the last sums."""
        return self.layout.sums_slot and SlotEvent.COPY in copies.TRANSITIONS[self._slot]

    def _change_slot_state(self, event: SlotEvent) -> None:
        """Record an event of the buffer's slot for sums; KeyError if it is not allowed now."""
        self._slot = copies.TRANSITIONS[self._slot][event]

    def start_copies(self, sums_SD: Tensor) -> None:
        """Start to copy sums [S, D] to tokens' ranks; do not free them before `finish_copies`."""
        self._change_slot_state(SlotEvent.COPY)
        with use_stream(self._get_ordered_copy_stream(sums_SD)):
            self._copy_sums(sums_SD)

    def finish_copies(
        self, sums_SD: Tensor, row_map: ExchangeMap, grads_and_slots: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Wait on the current stream for all copies; return `combine_rows` of the copied sums."""
        self._wait_for_stream(sums_SD)
        self._change_slot_state(SlotEvent.READ)
        return self._reduce_copies(sums_SD, row_map, grads_and_slots)

    def _get_ordered_copy_stream(self, x: Tensor) -> Stream:
        """Return the copy stream, after it was made to wait for the work of the current stream."""
        self._stream = self._stream or create_stream(x.device)
        assert self._stream is not None, "copies are on a GPU, or in a dry run"
        self._stream.wait_stream(get_current_stream(x.device))
        return self._stream

    def _wait_for_stream(self, x: Tensor) -> None:
        current = get_current_stream(x.device)
        assert current is not None
        current.wait_stream(self._stream)

    def _copy_sums(self, sums_SD: Tensor) -> None:
        """Copy sums to the tokens' ranks by copy engines, on the current stream."""
        copies.copy_sums_to_peers(self.buffer, sums_SD)

    def _reduce_copies(
        self, sums_SD: Tensor, row_map: ExchangeMap, grads_and_slots: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Return each token's sum of all copies [T, D], and routing weights' gradients [T, K]."""
        peers_T, places_S, _ = row_map
        places = (peers_T, places_S, places_S[:, None])
        return kernels.combine_rows(self.buffer, sums_SD, *places, grads_and_slots, has_sums=True)

    def limit_rows(self, offsets_e: Tensor, max_rows: int) -> Tensor:
        """Return experts' row end offsets, clamped to `max_rows`; record how many were needed."""
        return kernels.limit_rows(offsets_e, max_rows, self.buffer.state, self.buffer.report)

    @property
    def shortage(self) -> ShortageCounters:
        """The counters of expert rows above the limit of `limit_rows`."""
        words = (self.buffer.state, self.buffer.report)
        state, report = (w[NEEDED_WORD : NEEDED_WORD + 1] for w in words)
        return ShortageCounters(state, report, self.balanced_rows)

    def raise_if_rank_late(self) -> None:
        """Raise `ExchangeError` if the host knows that a rank missed the timeout. No host sync."""
        # The error stays until `ExchangePool.close` and new buffers, because the operations that
        # the late rank missed are unknown. Until then no operation waits for any rank.
        buffer = self.buffer
        error = int(buffer.report[ERROR_WORD])
        if not error:
            return
        late, kind = divmod(error - 1, 2)
        late, me = (dist.get_global_rank(self.group, rank) for rank in (late, buffer.rank))
        raise ExchangeError(
            f"rank {late} must come to a {KINDS[kind]} within NVLinkOptions.timeout_s "
            f"({buffer.timeout_ns / 1e9:g} s), but rank {me} waited in vain: look at rank "
            f"{late}, then call close(); results since then are not valid"
        )


class MetaExchange(Exchange):
    """An `Exchange` on the meta device, for dry runs: only records launches and bytes."""

    _tokens_per_peer = 0  # tokens sent to each other rank with even loads

    def dispatch_tokens(
        self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, placement: ExpertPlacement
    ) -> kernels.DispatchedRows:
        """Return the received rows as meta tensors, and record the launch for the dry run."""
        T, K = ids_TK.shape
        reach = placement.compute_reach_probability(K, placement.num_local)
        self._tokens_per_peer = round(T * reach)
        self._record_operation(SPREAD, x_TD)
        return kernels.DispatchedRows.empty(x_TD, ids_TK, weights_TK, self.layout.source_rows)

    def combine_rows(
        self,
        y_RD: Tensor,
        row_map: ExchangeMap,
        grads_and_slots: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the results of `Exchange.combine_rows` on meta; record the launch."""
        self._record_operation(REDUCE, y_RD)
        T = row_map.peers_T.shape[0]
        sums_TD = y_RD.new_empty(T, y_RD.shape[1])
        if grads_and_slots is None:
            return sums_TD, None
        return sums_TD, grads_and_slots[0].new_empty(T, grads_and_slots[1].shape[1])

    def dispatch_rows(self, x_TD: Tensor, row_map: ExchangeMap, num_rows: int) -> Tensor:
        """Return `num_rows` meta rows, and record the launch for the dry run."""
        self._record_operation(SPREAD, x_TD)
        return x_TD.new_empty(num_rows, x_TD.shape[1])

    def _copy_sums(self, sums_SD: Tensor) -> None:
        """Record a copy of the maximum number of rows to each other rank."""
        self._record_launch(COPY, sums_SD, self.layout.max_tokens)

    def _reduce_copies(
        self, sums_SD: Tensor, row_map: ExchangeMap, grads_and_slots: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Return the tokens' sums and routing weights' gradients on meta; record the launch."""
        T, (dweights_R, slots_SK) = row_map.peers_T.shape[0], grads_and_slots
        sums_TD = sums_SD.new_empty(T, sums_SD.shape[1])
        record_launch("sum of copied rows", sums_SD, sums_TD)
        return sums_TD, dweights_R.new_empty(T, slots_SK.shape[1])

    def _record_operation(self, operation_name: str, rows: Tensor) -> None:
        self._change_slot_state(SlotEvent.OPERATION)
        self._record_launch(operation_name, rows)

    def _record_launch(self, launch_name: str, rows: Tensor, num_tokens: int | None = None) -> None:
        """Record an exchange of `num_tokens` rows (None = even loads) with each other rank."""
        ranks = self.layout.num_ranks
        T = self._tokens_per_peer if num_tokens is None else num_tokens
        record_launch(launch_name, ranks, 2 * (ranks - 1) * T * rows.shape[1] * rows.itemsize)

    def limit_rows(self, offsets_e: Tensor, max_rows: int) -> Tensor:
        """Return the offsets unchanged, because meta tensors have no values."""
        return offsets_e
