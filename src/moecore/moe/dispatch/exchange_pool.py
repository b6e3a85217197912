"""ExchangePool: owner of the buffers that every rank of a group can write.

All layers of a model share one `ExchangePool` and one `Exchange` per (row bytes, K). All ranks
together allocate an exchange at its first use. Its buffer exists until `close()`, or until the last
user of the pool is deleted. Only the allocation and `check` wait for the device.

Memory (`peer_memory.py`): 2 * G * C rows per rank and exchange, C the maximum tokens of any rank; 3
with `NVLinkOptions.overlap_weight_grads`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.base.options.dispatch import NVLinkOptions
from moecore.kernels.common import count_sms, device_of
from moecore.kernels.exchange.buffer import (
    ROW_ALIGNMENT,
    SUM_DTYPES,
    ExchangeLayout,
    SymmetricBuffer,
)
from moecore.moe.dispatch.collectives import all_gather_rows
from moecore.moe.dispatch.exchange import Exchange, ExchangeError, MetaExchange
from moecore.moe.dispatch.peer_memory import make_exchange_buffer
from moecore.moe.dispatch.wire import Wire
from moecore.moe.shortage import BufferOwner, ShortageCounters

# Names of the numbers that `ExchangePool._compare_options` compares over ranks.
COMPARED_FIELDS = ("D", "K", "dtype", "programs", "overlap_weight_grads", "keep_rows", "fp8")
FEW_PROGRAMS = 64  # with fewer programs, receiving takes longer than sending


class ExchangePool(BufferOwner):
    """Owns the buffers (`Exchange`) through which a model's layers store rows into peers' memory.

    `group` has the ranks that exchange rows; `ep` is the number of blocks into which experts are
    divided. With `fp8`, rows are sent as FP8. A kernel launch has `num_programs` programs;
    None = one per SM. If not `is_required`, an all-to-all sends rows that kernels cannot store.
    """

    option = "NVLinkOptions.row_factor"

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        ep: int,
        options: NVLinkOptions | None = None,
        fp8: bool = False,
        num_programs: int | None = None,
        is_required: bool = True,
    ) -> None:
        self.group, self.ep = group, ep
        self.options = options or NVLinkOptions()
        self.wire, self.is_required = Wire(fp8), is_required
        self.tokens = TokenCapacity(self)
        self._programs = num_programs
        self._entries: dict[tuple[int, int], Exchange] = {}
        self._meta_entries: dict[tuple[int, int], Exchange] = {}  # on meta

    @property
    def capacity_factor(self) -> float | None:
        """Capacity of the expert rows divided by their number with even loads; None = unlimited."""
        return None if self.options.row_factor == "exact" else self.options.row_factor

    @property
    def shortages(self) -> tuple[ShortageCounters, ...]:
        """Counters of expert rows above the capacity, one per exchange of token rows."""
        return tuple(exchange.shortage for exchange in self.all_exchanges)

    def set_capacity_factor(self, capacity_factor: float) -> None:
        """Set `NVLinkOptions.row_factor` of later dispatches; buffers are not reallocated."""
        self.options = replace(self.options, row_factor=capacity_factor)
        for exchange in self.all_exchanges:
            exchange.options = self.options

    def make_error(self, shortage: ShortageCounters) -> ExchangeError:
        """Return the error for expert rows that exceeded the capacity."""
        min_factor = shortage.reported_factor
        return ExchangeError(
            f"{self.option} ({self.capacity_factor}) must be >= {min_factor:.4g} for the "
            f"{shortage.reported_num_rows} expert rows of rank {dist.get_rank()}: raise it, or "
            "leave it None; results since then are not valid",
            row_factor=min_factor,
        )

    def get_exchange(self, x_TD: Tensor, top_k: int) -> Exchange:
        """Return the exchange for `top_k` experts per token, and rows of x_TD's width and dtype.

        The first use allocates (collective). Raises ValueError for rows that kernels cannot store
        to peers, and for more tokens than the capacity unless the step will be repeated.
        """
        problem = find_unsendable_row_problem(x_TD)
        if problem is not None:
            raise ValueError(problem)
        T, D = x_TD.shape
        key = (D * x_TD.itemsize, top_k)
        entries = self._meta_entries if x_TD.is_meta else self._entries
        if key not in entries:
            make = self._make_meta_exchange if x_TD.is_meta else self._make_exchange
            entries[key] = make(x_TD, top_k)
        exchange = entries[key]
        if x_TD.is_meta:
            return exchange
        exchange.raise_if_rank_late()
        max_tokens = exchange.layout.max_tokens
        if max_tokens < T and not self.tokens.record_token_excess(T):
            raise ValueError(
                f"number of tokens ({T}) must be <= max_tokens of the exchange ({max_tokens}): set "
                "NVLinkOptions.max_tokens to the most tokens of any rank"
            )
        return exchange

    @property
    def all_exchanges(self) -> tuple[Exchange, ...]:
        """All allocated exchanges of token rows."""
        return tuple(self._entries.values())

    @property
    def planned_bytes(self) -> int:
        """Bytes of the buffers that a GPU would need for the forwards that ran on meta."""
        return sum(exchange.layout.num_bytes for exchange in self._meta_entries.values())

    def raise_reported_errors(self, *, includes_shortages: bool = True) -> None:
        """Raise `ExchangeError` for a late rank or a too small buffer that the host knows of."""
        for resource in self.all_exchanges:
            resource.raise_if_rank_late()
        super().raise_reported_errors(includes_shortages=includes_shortages)

    def wait_for_reports(self) -> None:
        """Synchronise with the GPU, which writes the reports of all exchanges. Host sync."""
        for resource in self.all_exchanges[:1]:
            if resource.buffer.state.is_cuda:
                torch.cuda.synchronize(resource.buffer.state.device)

    def close(self) -> None:
        """Free all buffers and raise pending errors. Collective. `get_exchange` reallocates."""
        try:
            self.wait_and_raise_errors()
        finally:
            self.free_buffers()

    def free_buffers(self) -> None:
        """Free all buffers, and raise no error. Collective."""
        if self.all_exchanges:
            self.wait_for_reports()
            dist.barrier(self.group)  # no rank frees memory that other ranks still access
        self._entries.clear()

    def _make_exchange(self, x_TD: Tensor, top_k: int) -> Exchange:
        """Allocate an exchange for K = `top_k` choices and rows like x_TD. Collective."""
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
        programs = self._programs or count_sms(x_TD.device)
        max_tokens = self._compare_options(x_TD, top_k, programs)
        layout = self._make_layout(x_TD, top_k, max_tokens, programs)
        # An evaluation may be first, but a training step cannot write tensors of inference mode.
        with device_of(x_TD), torch.inference_mode(False):
            buffer = make_exchange_buffer(layout, self.group, x_TD.device, self.options.timeout_s)
        balanced = layout.source_rows * layout.top_k // self.ep
        return Exchange(buffer, self.group, self.options, balanced_rows=balanced)

    def _make_meta_exchange(self, x_TD: Tensor, top_k: int) -> Exchange:
        max_tokens = self.options.max_tokens or x_TD.shape[0]
        layout = self._make_layout(x_TD, top_k, max_tokens, self._programs or 1)
        none = torch.empty(0, dtype=torch.int32, device="meta")
        words: Any = dict(bases=none, state=none, report=none, timeout_ns=0)
        buffer = SymmetricBuffer(layout=layout, rank=dist.get_rank(self.group), **words)
        balanced = layout.source_rows * layout.top_k // self.ep
        return MetaExchange(buffer, self.group, self.options, balanced_rows=balanced)

    def _make_layout(
        self, x_TD: Tensor, top_k: int, max_tokens: int, num_programs: int
    ) -> ExchangeLayout:
        return ExchangeLayout(
            num_ranks=self.group.size(),
            max_tokens=max(1, max_tokens),
            row_bytes=x_TD.shape[1] * x_TD.itemsize,
            top_k=top_k,
            **split_programs(num_programs),
            sums_slot=self.options.overlap_weight_grads,
        )

    def _compare_options(self, x_TD: Tensor, top_k: int, num_programs: int) -> int:
        """Return the largest token count; ValueError if options differ. Collective, host sync."""
        options, (T, D) = self.options, x_TD.shape
        flags = (options.overlap_weight_grads, options.keep_rows, self.wire.fp8)
        sizes = (options.max_tokens or T, D, top_k, SUM_DTYPES.index(x_TD.dtype), num_programs)
        local_row = torch.tensor([[*sizes, *flags]], device=x_TD.device, dtype=torch.int64)
        rows = all_gather_rows(local_row, self.group).tolist()
        for g, row in enumerate(rows):
            if row[1:] != rows[0][1:]:
                other, first = (dist.get_global_rank(self.group, i) for i in (g, 0))
                raise ValueError(
                    f"({', '.join(COMPARED_FIELDS)}) of rank {other} ({row[1:]}) must equal those "
                    f"of rank {first} ({rows[0][1:]}): give all ranks of a dispatch group the same "
                    "layers and options"
                )
        return max(int(row[0]) for row in rows)


class TokenCapacity(BufferOwner):
    """The capacity of a pool's buffers, in tokens of one rank and forward.

    A forward with more tokens sends only its first tokens, and the step is repeated with larger
    buffers. If the step cannot be repeated, `get_exchange` raises ValueError instead.
    """

    option = "NVLinkOptions.max_tokens"

    def __init__(self, pool: ExchangePool) -> None:
        self._pool = pool
        self._shortage: ShortageCounters | None = None

    @property
    def capacity_factor(self) -> float | None:
        """Capacity in tokens, 1 if unknown; None = a forward with more tokens raises an error."""
        if self._pool.capacity_factor is None:
            return None
        sizes = (exchange.layout.max_tokens for exchange in self._pool.all_exchanges)
        return max(sizes, default=self._pool.options.max_tokens or 1)

    @property
    def shortages(self) -> tuple[ShortageCounters, ...]:
        """Counters of tokens above the capacity; () if no forward exceeded the capacity."""
        return () if self._shortage is None else (self._shortage,)

    def record_token_excess(self, num_tokens: int) -> bool:
        """Record a forward with too many tokens, `num_tokens`; return whether the step reruns."""
        if self.watch != "reruns":
            return False
        if self._shortage is None:
            words = torch.zeros_like(self._pool.all_exchanges[0].buffer.state[:1])
            report = torch.zeros(1, dtype=torch.int32, device="cpu")
            self._shortage = ShortageCounters(words, report, even=1.0)
        max_tokens = max(num_tokens, self._shortage.reported_num_rows)
        self._shortage.words.fill_(max_tokens)
        self._shortage.report.fill_(max_tokens)
        return True

    def set_capacity_factor(self, capacity_factor: float) -> None:
        """Free the buffers; new buffers have a capacity of `capacity_factor` tokens. Collective."""
        self._pool.options = replace(self._pool.options, max_tokens=math.ceil(capacity_factor))
        self._pool.free_buffers()

    def make_error(self, shortage: ShortageCounters) -> ExchangeError:
        """Return the error for a forward with more tokens than `NVLinkOptions.max_tokens`."""
        return ExchangeError(
            f"{self.option} ({self.capacity_factor}) must be >= {shortage.reported_num_rows}, the "
            f"tokens of rank {dist.get_rank()}: set it; results since then are not valid"
        )

    def wait_for_reports(self) -> None:
        """Do nothing, because the host knows the number of tokens."""


def find_unsendable_row_problem(x_TD: Tensor) -> str | None:
    """Return the reason why kernels cannot store rows like x_TD to peer ranks, or None."""
    D = x_TD.shape[1]
    if x_TD.dtype in SUM_DTYPES and D * x_TD.itemsize % ROW_ALIGNMENT == 0:
        return None
    return (
        f"rows ({D} x {x_TD.dtype}) must be fp32, bf16 or fp16 and multiples of {ROW_ALIGNMENT} "
        "bytes for dispatcher ('nvlink'): pad the model dim or use 'alltoall'"
    )


def split_programs(num_programs: int) -> dict[str, int]:
    """Return `ExchangeLayout` fields: how many of a launch's programs push and receive rows."""
    is_small = num_programs < FEW_PROGRAMS
    push = max(1, num_programs * 5 // 12) if is_small else num_programs // 2
    return dict(num_push=push, num_receive=num_programs - push, rounds=16 if is_small else 8)
