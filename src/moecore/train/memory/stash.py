"""Stash: used rows of routed experts in pages on the device, between forward and backward.

    stash = Stash(device, StashOptions(), num_layers)
    stash.attach(model.layers, get_part_name)

A stash is an `Offload` whose store is a `PageStore`. If matrices of experts have worst-case
capacity, pages store only their used rows. A part is an MoE layer, so the memory of its matrices is
freed before the next layer dispatches:

    forward     MoE layer n ends       -> copies of its used rows to pages start
                MoE layer n + 1 begins -> the memory of layer n's matrices is freed
    backward    layer n has run        -> copies of layer n - 1's rows from pages start
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moecore.base.options.memory import StashOptions
from moecore.base.rank_checks import get_rank_or_zero
from moecore.base.saved_tensors import UsedRows
from moecore.kernels.common import cdiv
from moecore.kernels.rows.free_list import PEAK_WORD, PagePool, return_pages
from moecore.kernels.rows.pages import (
    MAX_MATRICES,
    PageLayout,
    stash_or_restore_rows,
    take_pages_for_rows,
)
from moecore.moe.dispatch.exchange import ExchangeError
from moecore.moe.shortage import BufferOwner, ShortageCounters
from moecore.train.memory.groups import StorageCopy, StorageGroup
from moecore.train.memory.offload import Offload
from moecore.train.memory.streams import CopyEvent, CopyJob, CopyStreams

PAGE_ALIGNMENT = 16  # bytes that a thread copies at once


@dataclass(eq=False, slots=True)
class DispatchPages:
    """Device pages with the rows that one MoE dispatch saves; one page table for all matrices."""

    table: Tensor
    layout: PageLayout
    free: list[tuple[Tensor, CopyEvent]]  # list that receives the table after its last read
    of_graph: bool  # whether a CUDA graph fills the table in every replay
    slots: Tensor | None  # the rows in use, as in `UsedRows`
    num_rows: Tensor | None
    remaining: int  # matrices whose pages are still needed
    out: CopyEvent | None = None  # the end of the copy to pages
    back: CopyEvent | None = None  # the end of the last copy back

    def copy_rows_in(self, matrices: Sequence[Tensor]) -> None:
        """Allocate pages for the used rows of matrices, and copy the rows into the pages."""
        take_pages_for_rows(self.table, self.layout, self.slots, self.num_rows)
        stash_or_restore_rows(matrices, self.table, self.layout, stash=True)

    def copy_rows_out(
        self, matrices: Sequence[Tensor | None], expired: DispatchPages | None
    ) -> None:
        """Copy used rows from pages to `matrices` (None = skip); free the pages of `expired`."""
        table = None if expired is None else (expired.table, expired.layout.num_entries)
        stash_or_restore_rows(matrices, self.table, self.layout, stash=False, released_table=table)


class PagePlace(NamedTuple):
    """The key of a matrix in a `PageStore`: its dispatch, and its index in the dispatch."""

    dispatch: DispatchPages
    number: int


@dataclass(eq=False, slots=True)
class _PageKind:
    """Free page tables of one layout, with the end of their last use."""

    layout: PageLayout
    of_eager: list[tuple[Tensor, CopyEvent]] = field(default_factory=list)
    of_graphs: list[tuple[Tensor, CopyEvent]] = field(default_factory=list)


class PageStore:
    """Pages on the device (blocks of rows) that store the used rows of MoE layers until backward.

    `num_layers` is the number of MoE layer calls whose rows the pages store at the same time.
    """

    def __init__(self, streams: CopyStreams, options: StashOptions, num_layers: int) -> None:
        self._streams, self.options, self._num_layers = streams, options, num_layers
        self.pool: PagePool | None = None
        self._balanced_pages = 0.0  # of all layers, with even loads
        self._kinds: dict[Any, _PageKind] = {}  # by the sizes of their matrices
        # Of eager code; returned when the running capture has ended.
        self._pending_returns: list[DispatchPages] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of the pages on the device."""
        return 0 if self.pool is None else self.pool.pages.nbytes

    def copy_to_store(self, copies: Sequence[StorageCopy]) -> list[StorageCopy]:
        """Start to copy used rows to pages; return `copies`, because pages accept all of them."""
        in_capture = self._return_pending_pages()
        if not copies:
            return []
        pool = self.pool or self._make_pool(copies, in_capture=in_capture)
        jobs, emptied = [], []
        for group in _group_by_dispatch(copies):
            dispatch, event = self._make_dispatch_pages(pool, group, in_capture=in_capture)
            for index, copy in enumerate(group):
                copy.piece = PagePlace(dispatch, index)
            data = tuple(copy.data for copy in group)
            jobs.append(CopyJob(dispatch, data, DispatchPages.copy_rows_in))
            emptied += [] if event is None else [event]
        out = self._streams.out.start_copies(jobs, *emptied)
        for copy in copies:
            copy.out = copy.busy = copy.piece.dispatch.out = out
        return list(copies)

    def copy_to_device(
        self, copies: Sequence[StorageCopy], freed_pieces: Sequence[PagePlace] = ()
    ) -> None:
        """Start to copy used rows from pages to `data` of `copies`; also free `freed_pieces`."""
        in_capture = self._return_pending_pages()
        matrices: dict[DispatchPages, list[Tensor | None]] = {}
        for copy in copies:
            of, index = copy.piece
            matrices.setdefault(of, [None] * len(of.layout.widths))[index] = copy.data
        expired_pages, jobs = _count_finished_matrices(freed_pieces), list[CopyJob]()
        emptied = list[DispatchPages]()
        for of, tensors in matrices.items():
            # Only copies back read these pages, and they come earlier in the same stream.
            goes_along = bool(expired_pages) and expired_pages[-1].back is not None
            goes_along = goes_along and expired_pages[-1].of_graph == in_capture
            emptied += [expired_pages.pop()] if goes_along else []
            read = partial(_read_and_free, emptied[-1] if goes_along else None)
            jobs.append(CopyJob(tuple(tensors), of, read))
        ends = (of.out for of in matrices if of.out is not None)
        back = self._streams.back.start_copies(jobs, *ends)
        for of in matrices:
            of.back = back
        for of in emptied:
            of.free.append((of.table, back))
        for copy in copies:
            copy.busy = back
        self._return_pages(expired_pages, in_capture=in_capture)

    def free_pieces(self, pieces: Sequence[PagePlace]) -> None:
        """Return the pages of these matrices to the pool, after their last read."""
        in_capture = self._return_pending_pages()
        self._return_pages(_count_finished_matrices(pieces), in_capture=in_capture)

    def clear(self) -> None:
        """Free all pages."""
        self._pending_returns.clear()
        self._kinds.clear()
        self.pool = None

    @property
    def shortage(self) -> ShortageCounters | None:
        """Counters of needed pages, set if pages are insufficient; None = no pool is allocated."""
        if self.pool is None:
            return None
        words = (self.pool.state[PEAK_WORD:], self.pool.report[PEAK_WORD:])
        return ShortageCounters(*words, self._balanced_pages)

    def _return_pending_pages(self) -> bool:
        """Free postponed pages, except in a CUDA graph capture; return whether a capture runs."""
        in_capture = self._streams.is_capturing()
        if self._pending_returns and not in_capture:
            pending, self._pending_returns = self._pending_returns, []
            self._return_pages(pending, in_capture=False)
        return in_capture

    def _return_pages(self, expired_pages: Sequence[DispatchPages], *, in_capture: bool) -> None:
        """Return `expired_pages` to the pool; in a capture, postpone the pages of eager code."""
        for of in expired_pages:
            # Captured, the return of eager code's pages would be repeated by each replay.
            if in_capture and not of.of_graph:
                self._pending_returns.append(of)
                continue
            current = self._streams.get_current_stream()
            # Pages that a graph has not returned itself are returned by its next replay.
            if of.of_graph == in_capture:
                for event in (of.out, of.back):
                    if event is not None:
                        event.make_stream_wait(current)
                return_pages(of.table, of.layout.num_entries, of.layout.pool)
            of.free.append((of.table, CopyEvent(current)))

    def _make_dispatch_pages(
        self, pool: PagePool, dispatch_copies: Sequence[StorageCopy], *, in_capture: bool
    ) -> tuple[DispatchPages, CopyEvent | None]:
        """Return `DispatchPages` for these copies, and the end of the table's last use or None."""
        used_rows = (copy.used_rows for copy in dispatch_copies)
        rows = {r.slots is not None: r for r in used_rows if r is not None}
        listed, first = rows.get(True), rows.get(False)
        key = tuple(_get_row_format(copy) for copy in dispatch_copies)
        lengths = tuple(0 if r is None else r.length for r in (listed, first))
        kind = self._kinds.get((key, lengths))
        if kind is None:
            widest, page_rows = max(row_bytes for row_bytes, _ in key), self.options.page_rows
            if widest > pool.page_bytes:
                raise ValueError(
                    f"StashOptions.page_rows ({page_rows}) must be >= "
                    f"{cdiv(widest * page_rows, pool.page_bytes)} for rows of {widest} bytes in "
                    "pages that are made for the first layer's: raise it"
                )
            layout = PageLayout.from_matrices(pool, key, *lengths)
            kind = self._kinds[key, lengths] = _PageKind(layout)
        # A CUDA graph needs tables of its own, which it fills at each replay. An eager table may
        # become a graph's, but not the other way round.
        tables = kind.of_graphs if in_capture else kind.of_eager
        free = tables or (kind.of_eager if in_capture else tables)
        table, emptied = free.pop() if free else (kind.layout.make_table(), None)
        dispatch = DispatchPages(
            table=table,
            layout=kind.layout,
            free=tables,
            of_graph=in_capture,
            slots=None if listed is None else listed.slots,
            num_rows=None if first is None else first.num_rows,
            remaining=len(dispatch_copies),
        )
        return dispatch, emptied

    def _make_pool(self, copies: Sequence[StorageCopy], *, in_capture: bool) -> PagePool:
        """Allocate the pool of all MoE layers, sized by the first layer's `copies`."""
        if in_capture:
            raise RuntimeError(
                "pages of MemoryOptions.stash must be made before a CUDA graph is captured: run "
                "one forward and backward first"
            )
        options, num_layers = self.options, self._num_layers
        widest = max(_get_row_format(copy)[0] for copy in copies)
        page_bytes = cdiv(options.page_rows * widest, PAGE_ALIGNMENT) * PAGE_ALIGNMENT
        # A page has `page_rows` rows of the widest matrix, and more rows of a narrower one. Each
        # layer has pages for the first one's rows with even loads, times the factor.
        num_pages, self._balanced_pages = 0, 0.0
        for copy in copies:
            assert copy.used_rows is not None and copy.used_rows.balanced is not None
            rows, step = max(1, copy.used_rows.balanced), page_bytes // _get_row_format(copy)[0]
            num_pages += num_layers * cdiv(math.ceil(options.factor * rows), step)
            self._balanced_pages += num_layers * rows / step
        num_host_pages = options.host_bytes // page_bytes
        if num_pages + num_host_pages >= 2**31:  # ids are int32
            raise ValueError(
                f"StashOptions.factor ({options.factor:g}) and host_bytes ({options.host_bytes}) "
                f"must give fewer than 2^31 pages of {page_bytes} bytes: lower them"
            )
        device = self._streams.device
        self.pool = PagePool.allocate(num_pages, page_bytes, device, num_host_pages=num_host_pages)
        return self.pool


def _read_and_free(
    expired_pages: DispatchPages | None,
    matrices: Sequence[Tensor | None],
    source_pages: DispatchPages,
) -> None:
    source_pages.copy_rows_out(matrices, expired_pages)


def _get_row_format(copy: StorageCopy) -> tuple[int, bool]:
    """Return the size of a row in bytes, and whether `UsedRows.slots` lists the used rows."""
    assert copy.used_rows is not None
    return copy.size // copy.used_rows.length, copy.used_rows.slots is not None


def _group_by_dispatch(copies: Sequence[StorageCopy]) -> list[list[StorageCopy]]:
    """Return groups of consecutive copies; the copies of a group can share a page table.

    Copies of a group with a list of used rows have one `UsedRows`, and so do those without.
    """
    groups: list[list[StorageCopy]] = []
    rows: dict[bool, UsedRows] = {}
    for copy in copies:
        used_rows = copy.used_rows
        assert used_rows is not None
        is_full = not groups or len(groups[-1]) == MAX_MATRICES
        if is_full or rows.setdefault(used_rows.slots is not None, used_rows) is not used_rows:
            groups.append([])
            rows = {used_rows.slots is not None: used_rows}
        groups[-1].append(copy)
    return groups


def _count_finished_matrices(pieces: Sequence[PagePlace]) -> list[DispatchPages]:
    """Count matrices that backward no longer needs; return the dispatches that need no pages."""
    dispatches = []
    for of, _ in pieces:
        of.remaining -= 1
        if not of.remaining:
            dispatches.append(of)
    return dispatches


class Stash(Offload, BufferOwner):
    """Stores only the used rows of experts' worst-case buffers in device pages until backward."""

    option = "StashOptions.factor"
    is_known_late = True  # a backward is the first to wait for the last copies
    _rows_only = True

    def __init__(self, device: torch.device, options: StashOptions, num_layers: int) -> None:
        super().__init__(device, min_bytes=0)
        self._num_layers = num_layers
        self._store = self.pages = PageStore(self._streams, options, num_layers)
        # Groups of last layers, and whether they are of a captured CUDA graph. They stay on the
        # device unless the next forward begins before their backward, as with pipeline stages.
        self._resting: list[tuple[StorageGroup, bool]] = []

    def __reduce__(self) -> Any:
        return partial(Stash, self._streams.device, self.pages.options, self._num_layers), ()

    def _find_storage_keys(self, module: nn.Module) -> frozenset[int]:
        return frozenset()  # only tensors with counted rows are stored, and weights have none

    def _copy_group_unless_last(self, group: StorageGroup) -> None:
        if group.is_last:
            self._resting.append((group, self._streams.is_capturing()))
        super()._copy_group_unless_last(group)

    def _start_forward(self, max_share: float) -> None:
        """Begin a forward; copy groups of last layers to pages if their backward has not begun."""
        super()._start_forward(max_share)
        with self._hold_lock():
            in_capture, resting, self._resting = self._streams.is_capturing(), self._resting, []
            for group, of_graph in resting:
                if of_graph != in_capture:  # copies of eager groups are not captured
                    self._resting.append((group, of_graph))
                elif group.handles.alive and not group.has_unpacked:
                    self._copy_group_to_store(group)
            self._resting = [entry for entry in self._resting if entry[0].handles.alive]

    @property
    def capacity_factor(self) -> float:
        """`StashOptions.factor`: number of device pages / number of pages with balanced routing."""
        return self.pages.options.factor

    @property
    def shortages(self) -> tuple[ShortageCounters, ...]:
        """Counters of the needed pages; () if no pool of pages is allocated."""
        shortage = self.pages.shortage
        return () if shortage is None else (shortage,)

    def set_capacity_factor(self, capacity_factor: float) -> None:
        """Free all pages, which must be unused, and set the factor of the next pool. Host sync."""
        self.free_pages()
        self.pages.options = replace(self.pages.options, factor=capacity_factor)

    def free_pages(self) -> None:
        """Free all pages, which must be unused; later forwards allocate a pool. Host sync."""
        self.wait_for_reports()  # copies may read what is freed now
        self.pages.clear()

    def make_error(self, shortage: ShortageCounters) -> ExchangeError:
        """Return the error for insufficient pages, which names the smallest sufficient factor."""
        min_factor = math.ceil(shortage.reported_factor * 1000) / 1000
        return ExchangeError(
            f"{self.option} ({self.capacity_factor}) must be >= {min_factor:g} for the "
            f"{shortage.reported_num_rows} pages of rows that rank {get_rank_or_zero()} keeps: "
            "raise it, or set host_bytes; results since then are not valid",
            stash_factor=min_factor,
        )

    def wait_for_reports(self) -> None:
        """Synchronise with the GPU, which reports to the host if pages were insufficient."""
        if self._streams.device.type == "cuda":
            torch.cuda.synchronize(self._streams.device)
