"""Buffers that every rank of a group can write, who owns them, and what went wrong in them.

`ExchangePool` belongs to a model: all its layers share one `Exchange` per (row bytes, K, lane).
Each is made at first use, by all ranks together. Its buffer lives until `close()`, or until the
last user of the pool is gone. Only the making and `check` wait for the device.

Memory (`peer_memory.py`): 2 * G * C rows per rank and exchange, C the most tokens of any rank; 3
with `NVLinkOptions.overlap_weight_grads`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.kernels.common import num_sms, on_device
from moecore.kernels.exchange import copies
from moecore.kernels.exchange import operations as kernels
from moecore.kernels.exchange.buffer import (
    ERROR_WORD,
    NEEDED_WORD,
    ROW_ALIGNMENT,
    SUM_DTYPES,
    ExchangeLayout,
    SymmetricBuffer,
)
from moecore.kernels.exchange.copies import SlotEvent, SlotState
from moecore.kernels.exchange.limit_rows import limit_rows
from moecore.moe.dispatch.nvlink_options import NVLinkOptions
from moecore.moe.dispatch.peer_memory import make_buffer
from moecore.moe.room import larger, warn_of_skipped

# What `ExchangePool._agree` compares.
AGREED = ("D", "K", "dtype", "num_sms", "overlap_weight_grads", "keep_rows", "fp8_dispatch")
FEW_PROGRAMS = 64  # with fewer, receiving is what takes longest
KINDS = ("dispatch (or the backward of a combine)", "combine (or the backward of a dispatch)")


class ExchangeError(RuntimeError):
    """An exchange, or the pages of a stash, went wrong on this rank.

    Attributes:
        row_factor: the least that would have held this rank's expert rows; None = something else
            went wrong.
        stash_factor: the same of `StashOptions.factor` and the rows that this rank keeps. With
            neither of them a rank did not come in time.
    """

    def __init__(
        self, message: str, row_factor: float | None = None, stash_factor: float | None = None
    ) -> None:
        super().__init__(message)
        self.row_factor, self.stash_factor = row_factor, stash_factor


class Exchange:
    """One rank's end of an exchange, and the operations over it (`kernels/exchange/operations.py`).

    All ranks of the group run the same operations in the same order; on one rank they are ordered
    by their streams (one stream, or streams that wait for each other). No operation syncs.

    Args:
        buffer: memory and sizes.
        group: the ranks.
        options: of the dispatcher.
        balanced_rows: expert rows of a rank with balanced routing and C tokens on every rank.

    Attributes:
        asks_later: whether too many rows are no error, because `needed_factor` is asked.
    """

    def __init__(
        self,
        buffer: SymmetricBuffer,
        group: dist.ProcessGroup,
        options: NVLinkOptions,
        *,
        balanced_rows: int,
    ) -> None:
        self.buffer = buffer
        self.group = group
        self.options = options
        self.balanced_rows = balanced_rows
        self.asks_later = False
        self._stream: torch.cuda.Stream | None = None  # of copies
        self._slot = SlotState.FREE

    @property
    def layout(self) -> ExchangeLayout:
        """Sizes, the same on all ranks."""
        return self.buffer.layout

    def spread_choices(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        *,
        num_local: int,
        etp: int,
    ) -> kernels.SpreadChoices:
        """Send tokens with their choices to the ranks that own the experts; return what came.

        Rows of any dtype, of at most the layout's `row_bytes`.
        """
        sent = (x_TD.contiguous(), ids_TK.contiguous(), weights_TK.contiguous())
        self._enter(SlotEvent.OPERATION)
        return kernels.spread_choices(self.buffer, *sent, num_local=num_local, etp=etp)

    def spread(
        self, x_TD: Tensor, peers_T: Tensor, places_S: Tensor, slots_SN: Tensor, num_rows: int
    ) -> Tensor:
        """Send rows where their tokens went; return a copy for each slot, [R, D]."""
        where = (peers_T, places_S, slots_SN)
        self._enter(SlotEvent.OPERATION)
        return kernels.spread(self.buffer, x_TD.contiguous(), *where, num_rows)

    def reduce(
        self,
        y_RD: Tensor,
        peers_T: Tensor,
        places_S: Tensor,
        slots_SN: Tensor,
        choices: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Add the rows of the slots, send the sums home; return their sums [T, D].

        And the gradients [T, K] of `choices`, which are each expert row's and its slots.
        """
        if choices is not None:
            choices = (choices[0].contiguous(), choices[1])
        where = (peers_T, places_S, slots_SN)
        self._enter(SlotEvent.OPERATION)
        return kernels.reduce(self.buffer, y_RD.contiguous(), *where, choices)

    def can_copy(self) -> bool:
        """Whether `start_copies` may come now, the same on all ranks."""
        return self.layout.sums_slot and SlotEvent.COPY in copies.TRANSITIONS[self._slot]

    def _enter(self, event: SlotEvent) -> None:
        self._slot = copies.TRANSITIONS[self._slot][event]

    def start_copies(self, sums_SD: Tensor) -> None:
        """Begin to copy sums home on a stream of their own; they must live until `finish_copies`.

        No multiprocessor takes part.
        """
        self._enter(SlotEvent.COPY)
        with torch.cuda.stream(self._stream_after(sums_SD)):
            copies.copy_sums(self.buffer, sums_SD)

    def finish_copies(
        self,
        sums_SD: Tensor,
        peers_T: Tensor,
        places_S: Tensor,
        choices: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor | None]:
        """Return what `reduce` of the copied sums returns; the current stream waits for them."""
        self._wait_for_stream(sums_SD)
        self._enter(SlotEvent.READ)
        where = (peers_T, places_S, places_S[:, None])
        return kernels.reduce(self.buffer, sums_SD, *where, choices, copied=True)

    def _stream_after(self, x: Tensor) -> torch.cuda.Stream:
        """Return the stream of copies, which goes on when the current one has come to here."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(x.device)
        self._stream.wait_stream(torch.cuda.current_stream(x.device))
        return self._stream

    def _wait_for_stream(self, x: Tensor) -> None:
        assert self._stream is not None
        torch.cuda.current_stream(x.device).wait_stream(self._stream)

    def is_capturing(self) -> bool:
        """Whether what runs now becomes part of a CUDA graph."""
        return self.buffer.state.is_cuda and torch.cuda.is_current_stream_capturing()

    def limit_rows(self, offsets_e: Tensor, num_rows: int) -> Tensor:
        """Return the offsets cut at `num_rows`; more is an error of the next `check`."""
        return limit_rows(offsets_e, num_rows, self.buffer.state, self.buffer.report)

    def poll(self) -> None:
        """Raise what has gone wrong so far, as far as the host can see without waiting.

        Too many rows are an error once. A late rank stays one: the operations that it missed are
        not known, so nothing waits for it any more, until `ExchangePool.close` and new buffers.

        Raises:
            ExchangeError: when a rank did not come in time, or expert rows did not fit.
        """
        words = self.buffer.report.tolist()
        error, needed = words[ERROR_WORD], words[NEEDED_WORD]
        if error:
            raise ExchangeError(self._late(error - 1))
        if needed and not self.asks_later:
            self.clear_needed()
            raise ExchangeError(self._overflow(needed), needed / self.balanced_rows)

    def needed_factor(self) -> Tensor:
        """Return the least row factor that had held all rows so far; 0 = they fit. No host sync."""
        return self.buffer.state[NEEDED_WORD] / self.balanced_rows

    def clear_needed(self, *, report: bool = True) -> None:
        """Let later rows be counted anew.

        Args:
            report: on the host, too; when the device has come to here, or it has been read.
        """
        if report:
            self.buffer.report[NEEDED_WORD] = 0
        self.buffer.state[NEEDED_WORD].zero_()

    def take_needed(self) -> float:
        """Return the needed factor that the host can see, 0 = none, and clear it there."""
        needed = int(self.buffer.report[NEEDED_WORD])
        if needed:
            self.buffer.report[NEEDED_WORD] = 0
        return needed / self.balanced_rows

    def check(self) -> None:
        """Raise what has gone wrong in all operations so far. One host sync.

        Raises:
            ExchangeError: see `poll`.
        """
        if self.buffer.state.is_cuda:
            torch.cuda.synchronize(self.buffer.state.device)  # report is written by the device
        self.asks_later = False
        self.poll()

    def _late(self, code: int) -> str:
        late = dist.get_global_rank(self.group, code // 2)
        me = dist.get_global_rank(self.group, self.buffer.rank)
        return (
            f"rank {late} must come to a {KINDS[code % 2]} within NVLinkOptions.timeout_s "
            f"({self.buffer.timeout_ns / 1e9:g} s), but rank {me} waited in vain: look at rank "
            f"{late}, then call close(); results since then are not valid"
        )

    def _overflow(self, needed: int) -> str:
        me = dist.get_global_rank(self.group, self.buffer.rank)
        return (
            f"NVLinkOptions.row_factor ({self.options.row_factor}) must be >= "
            f"{needed / self.balanced_rows:.4g} for the {needed} expert rows of rank {me}: raise "
            "it, or leave it None; results since then are not valid"
        )


class _MetaExchange(Exchange):
    """The shapes of an exchange: nothing is allocated or sent."""

    def spread_choices(
        self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, *, num_local: int, etp: int
    ) -> kernels.SpreadChoices:
        """Return as many rows as can come."""
        T, S = x_TD.shape[0], self.layout.source_rows
        return kernels.SpreadChoices(
            rows_SD=x_TD.new_empty(S, x_TD.shape[1]),
            ids_SK=ids_TK.new_empty(S, ids_TK.shape[1]),
            weights_SK=weights_TK.new_empty(S, ids_TK.shape[1]),
            peers_T=ids_TK.new_empty(T),
            places_S=ids_TK.new_empty(S),
        )

    def reduce(
        self,
        y_RD: Tensor,
        peers_T: Tensor,
        places_S: Tensor,
        slots_SN: Tensor,
        choices: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the sums at home."""
        return y_RD.new_empty(peers_T.shape[0], y_RD.shape[1]), None

    def limit_rows(self, offsets_e: Tensor, num_rows: int) -> Tensor:
        """Return the offsets."""
        return offsets_e


class ExchangePool:
    """The exchanges of a model, which owns their buffers.

    Args:
        group: the ranks among which tokens travel.
        ep: number of expert blocks of the group.
        options: sizes and times.
    """

    option = "NVLinkOptions.row_factor"

    def __init__(
        self, group: dist.ProcessGroup, *, ep: int, options: NVLinkOptions | None = None
    ) -> None:
        self.group = group
        self.ep = ep
        self.options = options or NVLinkOptions()
        self._entries: dict[tuple[int, int, int], Exchange] = {}
        self._asks_later = False

    @property
    def factor(self) -> float | None:
        """Expert rows over those of even loads; None = any fit."""
        return self.options.row_factor

    @property
    def may_be_small(self) -> bool:
        """Whether a step that had too many rows runs again."""
        return self.options.row_factor is not None and self.options.overflow == "rerun"

    @contextmanager
    def asked_later(self) -> Iterator[None]:
        """Within, too many rows are no error: `Exchange.needed_factor` has them."""
        self._asks_later = True
        try:
            yield
        finally:
            self._asks_later = False
            for exchange in self.entries:
                exchange.asks_later = False

    def needed_factor(self) -> Tensor:
        """Return the least row factor that had held all rows; 0 = they fit. No host sync."""
        found = [exchange.needed_factor() for exchange in self.entries]
        return torch.stack(found).amax() if found else torch.zeros(())

    def grow(self, factor: float | None) -> None:
        """Give later dispatches more room, None = as much, and clear what was needed."""
        if factor is not None:
            self.options = replace(self.options, row_factor=factor)
        for exchange in self.entries:
            exchange.options = self.options
            exchange.clear_needed()

    def get(self, x_TD: Tensor, top_k: int, *, lane: int = 0) -> Exchange:
        """Return the exchange for these tokens; made, by all ranks together, at first use.

        Args:
            x_TD: the tokens.
            top_k: K.
            lane: whose buffers; micro-batches that run at the same time need one each.

        Raises:
            ValueError: for a dtype or a row size that can not travel, for ranks that disagree, and
                for more tokens than there is room for, before anything is sent.
            RuntimeError: when an earlier operation went wrong; when made inside a graph's capture.
        """
        T, D = x_TD.shape
        row_bytes = D * x_TD.itemsize
        if x_TD.dtype not in SUM_DTYPES or row_bytes % ROW_ALIGNMENT:
            raise ValueError(
                f"rows ({D} x {x_TD.dtype}) must be fp32, bf16 or fp16 and multiples of "
                f"{ROW_ALIGNMENT} bytes for dispatcher ('nvlink'): pad the model dim or use "
                "'alltoall'"
            )
        if x_TD.is_meta:
            return self._on_meta(x_TD, top_k)
        key = (row_bytes, top_k, lane)
        exchange = self._entries.get(key)
        if exchange is None:
            exchange = self._entries[key] = self._make(x_TD, top_k)
        exchange.asks_later = self._asks_later or self.may_be_small  # the end of the step tells
        exchange.poll()
        max_tokens = exchange.layout.max_tokens
        if max_tokens < T:
            raise ValueError(
                f"number of tokens ({T}) must be <= max_tokens of the exchange ({max_tokens}): set "
                "NVLinkOptions.max_tokens to the most tokens of any rank"
            )
        return exchange

    @property
    def entries(self) -> tuple[Exchange, ...]:
        """All exchanges that have been made."""
        return tuple(self._entries.values())

    def poll(self) -> None:
        """Raise what has gone wrong on this rank, as far as the host can see without waiting.

        Raises:
            ExchangeError: when a rank did not come in time, or expert rows did not fit.
        """
        for exchange in self._entries.values():
            exchange.asks_later = self._asks_later
            exchange.poll()

    def settle(self) -> None:
        """Give later dispatches the room that earlier ones needed, as far as the host can see.

        Raises:
            ExchangeError: when a rank did not come in time.
        """
        factor = 0.0
        for exchange in self._entries.values():
            exchange.asks_later = True
            exchange.poll()
            factor = max(factor, exchange.take_needed())
        if factor:
            now = larger(factor)
            warn_of_skipped(self.option, self.factor, now)
            self.options = replace(self.options, row_factor=now)
            for exchange in self.entries:
                exchange.options = self.options

    def clear_state(self) -> None:
        """Let the rows of the next step be counted anew on the device. No host sync."""
        for exchange in self.entries:
            exchange.clear_needed(report=False)

    def check(self) -> None:
        """Raise what has gone wrong on this rank so far; call it at the end of a step.

        One host sync per exchange; all but the first find the device idle.

        Raises:
            ExchangeError: see `poll`.
        """
        for exchange in self._entries.values():
            exchange.check()

    def close(self) -> None:
        """Free all buffers; collective. A later `get` makes new ones, of other sizes if need be.

        Raises:
            RuntimeError: when an operation went wrong; the buffers are free then, too.
        """
        try:
            self.check()
        finally:
            if self._entries:
                dist.barrier(self.group)  # no rank frees what another one still writes
            self._entries.clear()

    def _make(self, x_TD: Tensor, top_k: int) -> Exchange:
        if not x_TD.is_cuda:
            raise ValueError(
                f"device of the tokens ({x_TD.device}) must be a GPU for dispatcher ('nvlink'): "
                "use 'alltoall'"
            )
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "the buffers of dispatcher ('nvlink') must be made before a graph is captured: run "
                "one step first"
            )
        programs = self.options.num_sms or num_sms(x_TD.device)
        layout = self._layout(x_TD, top_k, self._agree(x_TD, top_k, programs), programs)
        # An evaluation may come first: a training step can not write tensors of inference mode.
        with on_device(x_TD), torch.inference_mode(False):
            buffer = make_buffer(layout, self.group, x_TD.device, self.options.timeout_s)
        return Exchange(buffer, self.group, self.options, balanced_rows=self._balanced(layout))

    def _on_meta(self, x_TD: Tensor, top_k: int) -> Exchange:
        most = self.options.max_tokens or x_TD.shape[0]
        layout = self._layout(x_TD, top_k, most, self.options.num_sms or 1)
        none = torch.empty(0, dtype=torch.int32, device="meta")
        buffer = SymmetricBuffer(
            layout=layout,
            rank=dist.get_rank(self.group),
            bases=none,
            state=none,
            report=none,
            timeout_ns=0,
        )
        return _MetaExchange(buffer, self.group, self.options, balanced_rows=self._balanced(layout))

    def _layout(self, x_TD: Tensor, top_k: int, most: int, programs: int) -> ExchangeLayout:
        return ExchangeLayout(
            num_ranks=self.group.size(),
            max_tokens=max(1, most),
            row_bytes=x_TD.shape[1] * x_TD.itemsize,
            top_k=top_k,
            **divide(programs),
            sums_slot=self.options.overlap_weight_grads,
        )

    def _balanced(self, layout: ExchangeLayout) -> int:
        """Return the expert rows of a rank with even loads."""
        return layout.source_rows * layout.top_k // self.ep

    def _agree(self, x_TD: Tensor, top_k: int, programs: int) -> int:
        """Return the most tokens of any rank. One collective and host sync.

        Raises:
            ValueError: when something else is not the same on all ranks.
        """
        options, (T, D) = self.options, x_TD.shape
        choices = (options.overlap_weight_grads, options.keep_rows, options.fp8_dispatch)
        sizes = (options.max_tokens or T, D, top_k, SUM_DTYPES.index(x_TD.dtype), programs)
        mine = (*sizes, *map(int, choices))
        ranks = [
            torch.empty(len(mine), dtype=torch.int64, device=x_TD.device)
            for _ in range(self.group.size())
        ]
        dist.all_gather(ranks, torch.tensor(mine, device=x_TD.device), group=self.group)
        rows = torch.stack(ranks).tolist()
        for g, row in enumerate(rows):
            if row[1:] != rows[0][1:]:
                other, first = (dist.get_global_rank(self.group, i) for i in (g, 0))
                raise ValueError(
                    f"({', '.join(AGREED)}) of rank {other} ({row[1:]}) must equal those of rank "
                    f"{first} ({rows[0][1:]}): give all ranks of a dispatch group the same layers "
                    "and options"
                )
        return max(row[0] for row in rows)


def divide(programs: int) -> dict[str, int]:
    """Return how an operation divides its programs into pushing and receiving ones, and its tokens.

    As `ExchangeLayout` takes it, and as `bench_dispatch --sweep` found it fastest.
    """
    is_few = programs < FEW_PROGRAMS
    push = max(1, programs * 5 // 12) if is_few else programs // 2
    return dict(num_push=push, num_receive=programs - push, rounds=16 if is_few else 8)
