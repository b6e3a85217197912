"""PageStore: used rows of matrices in pages of device memory, between forward and backward.

    forward     matrix of worst-case capacity -> its used rows are copied to pages; the store's
                                                 caller frees the matrix
    backward    pages -> the used rows of a new matrix

The host never learns the number of used rows: kernels take pages and return them
(`kernels/rows/free_list.py`). Matrices of one dispatch share a table of pages. So a layer has two
launches in forward (take pages, copy) and one in backward: a copy that also returns the pages of
the layer whose backward has just run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from moecore.base.options.memory import StashOptions
from moecore.base.saved import UsedRows
from moecore.kernels.common import cdiv
from moecore.kernels.rows.free_list import MOST_WORD, PagePool, return_pages
from moecore.kernels.rows.pages import MOST_MATRICES, PageLayout, copy_rows, take_rows
from moecore.moe.shortage import Shortage
from moecore.train.memory.groups import HostCopy
from moecore.train.memory.streams import CopyMark, CopyStream, CopyStreams

PAGE_ALIGNMENT = 16  # bytes that a thread copies at once


@dataclass(eq=False, slots=True)
class Dispatched:
    """The matrices of one dispatch that are copied together, and their table.

    Attributes:
        free: the list of free tables to which the table returns.
        of_graph: whether a CUDA graph fills the table in every replay.
        slots, num_rows: which rows are in use, as in `UsedRows`.
        left: the number of matrices whose pages are still needed.
        out: the end of the copy to pages.
        back: the end of the last copy back.
    """

    table: Tensor
    layout: PageLayout
    free: list[tuple[Tensor, CopyMark]]
    of_graph: bool
    slots: Tensor | None
    num_rows: Tensor | None
    left: int
    out: CopyMark | None = None
    back: CopyMark | None = None

    def fill(self, matrices: Sequence[Tensor]) -> None:
        """Take pages for the used rows of matrices and copy them there."""
        take_rows(self.table, self.layout, self.slots, self.num_rows)
        copy_rows(matrices, self.table, self.layout, stash=True)

    def read(self, matrices: Sequence[Tensor | None], over: Dispatched | None) -> None:
        """Copy the used rows back, leave other rows as they are, and return the pages of `over`."""
        gone = None if over is None else (over.table, over.layout.num_entries)
        copy_rows(matrices, self.table, self.layout, stash=False, over=gone)


class PagePlace(NamedTuple):
    """The place of a matrix: a dispatch, and the matrix's number in it. A `HostCopy.piece`."""

    of: Dispatched
    number: int


class ToPages(NamedTuple):
    """A copy to pages: a `Job`."""

    target: Dispatched
    source: tuple[Tensor, ...]

    def start(self, stream: CopyStream) -> None:
        """Start the copy; on a CPU it is done at return."""
        with stream.running():
            self.target.fill(self.source)


class FromPages(NamedTuple):
    """A copy back: a `Job`."""

    target: tuple[Tensor | None, ...]
    source: Dispatched
    over: Dispatched | None

    def start(self, stream: CopyStream) -> None:
        """Start the copy; on a CPU it is done at return."""
        with stream.running():
            self.source.read(self.target, self.over)


@dataclass(eq=False, slots=True)
class _PageKind:
    """The free tables for dispatches whose matrices have the same sizes.

    Each table has a mark of the work that emptied it, for which the next fill waits.
    """

    layout: PageLayout
    of_eager: list[tuple[Tensor, CopyMark]] = field(default_factory=list)
    of_graphs: list[tuple[Tensor, CopyMark]] = field(default_factory=list)


class PageStore:
    """Copies in pages: a `Store` of matrices whose used rows are counted on the device.

    Args:
        num_layers: the number of MoE layers in a forward.

    Attributes:
        pool: the pool of pages; None before the first `put`.
    """

    def __init__(self, streams: CopyStreams, options: StashOptions, num_layers: int) -> None:
        self._streams, self._options, self._num_layers = streams, options, num_layers
        self.pool: PagePool | None = None
        self._balanced_pages = 0.0  # of all layers, with even loads
        self._kinds: dict[Any, _PageKind] = {}  # by the sizes of their matrices
        self._waiting: list[Dispatched] = []  # of eager code: returned when a capture has ended

    @property
    def num_bytes(self) -> int:
        """Bytes of the pages on the device."""
        return 0 if self.pool is None else self.pool.pages.nbytes

    def takes(self, used: UsedRows | None) -> bool:
        """Return whether the rows in use are counted, and their number with even loads is given."""
        return used is not None and used.balanced is not None

    def put(self, copies: Sequence[HostCopy]) -> list[HostCopy]:
        """Start to copy used rows to pages."""
        in_capture = self._start()
        if not copies:
            return []
        pool = self.pool or self._make_pool(copies, in_capture=in_capture)
        jobs, emptied = [], []
        for group in _by_dispatch(copies):
            found, mark = self._dispatched(pool, group, in_capture=in_capture)
            for index, copy in enumerate(group):
                copy.piece = PagePlace(found, index)
            jobs.append(ToPages(found, tuple(copy.data for copy in group if copy.data is not None)))
            emptied += [] if mark is None else [mark]
        out = self._streams.copy_out(jobs, *emptied)
        for copy in copies:
            copy.out = copy.busy = copy.piece.of.out = out
        return list(copies)

    def bring(self, copies: Sequence[HostCopy], gone: Sequence[PagePlace] = ()) -> None:
        """Start to copy used rows back; the same launch returns the pages of `gone`."""
        in_capture = self._start()
        matrices: dict[Dispatched, list[Tensor | None]] = {}
        for copy in copies:
            of, index = copy.piece
            matrices.setdefault(of, [None] * len(of.layout.widths))[index] = copy.data
        over, jobs = _over(gone), list[FromPages]()
        for of, given in matrices.items():
            # Only copies back read these pages, and they come earlier in the same stream.
            goes_along = over and over[-1].back is not None and over[-1].of_graph == in_capture
            jobs.append(FromPages(tuple(given), of, over.pop() if goes_along else None))
        back = self._streams.copy_back(jobs, *(of.out for of in matrices if of.out is not None))
        for job in jobs:
            job.source.back = back
            if job.over is not None:
                job.over.free.append((job.over.table, back))
        for copy in copies:
            copy.busy = back
        self._return(over, in_capture=in_capture)

    def give(self, pieces: Sequence[PagePlace]) -> None:
        """Return pages to the pool, after their last read."""
        self._return(_over(pieces), in_capture=self._start())

    def clear(self) -> None:
        """Free all pages."""
        self._waiting.clear()
        self._kinds.clear()
        self.pool = None

    def resize(self, options: StashOptions) -> None:
        """Free all pages, which hold no rows; the next pool has the size of new options."""
        self._options = options
        self.clear()

    @property
    def shortage(self) -> Shortage | None:
        """The most pages that were needed at a time, if one was missing; None before the pool."""
        if self.pool is None:
            return None
        words = (self.pool.state[MOST_WORD:], self.pool.report[MOST_WORD:])
        return Shortage(*words, self._balanced_pages)

    def _start(self) -> bool:
        """Return whether a capture runs; if none does, return the pages that waited for its end."""
        in_capture = self._streams.is_capturing()
        if self._waiting and not in_capture:
            waiting, self._waiting = self._waiting, []
            self._return(waiting, in_capture=False)
        return in_capture

    def _return(self, over: Sequence[Dispatched], *, in_capture: bool) -> None:
        """Return pages to the pool, once no launched work of another stream reads them."""
        for of in over:
            # Captured, the return of eager code's pages would be repeated by each replay.
            if in_capture and not of.of_graph:
                self._waiting.append(of)
                continue
            current = self._streams.current()
            # Pages that a graph has not returned itself are returned by its next replay.
            if of.of_graph == in_capture:
                for mark in (of.out, of.back):
                    if mark is not None:
                        mark.hold(current)
                return_pages(of.table, of.layout.num_entries, of.layout.pool)
            of.free.append((of.table, CopyMark(current)))

    def _dispatched(
        self, pool: PagePool, group: Sequence[HostCopy], *, in_capture: bool
    ) -> tuple[Dispatched, CopyMark | None]:
        """Return a dispatch with a table, and the mark at which the table was emptied or None."""
        rows = {used.slots is not None: used for copy in group if (used := copy.used) is not None}
        listed, first = rows.get(True), rows.get(False)
        key = tuple(_row(copy) for copy in group)
        lengths = tuple(0 if used is None else used.length for used in (listed, first))
        kind = self._kinds.get((key, lengths))
        if kind is None:
            self._check_widths(pool, key)
            kind = self._kinds[key, lengths] = _PageKind(PageLayout.of(pool, key, *lengths))
        # A CUDA graph needs tables of its own, which it fills at each replay. An eager table may
        # become a graph's, but not the other way round.
        own = kind.of_graphs if in_capture else kind.of_eager
        free = own or (kind.of_eager if in_capture else own)
        table, emptied = free.pop() if free else (kind.layout.table(), None)
        found = Dispatched(
            table=table,
            layout=kind.layout,
            free=own,
            of_graph=in_capture,
            slots=None if listed is None else listed.slots,
            num_rows=None if first is None else first.num_rows,
            left=len(group),
        )
        return found, emptied

    def _check_widths(self, pool: PagePool, rows: Sequence[tuple[int, bool]]) -> None:
        widest = max(width for width, _ in rows)
        if widest > pool.page_bytes:
            page_rows = self._options.page_rows
            raise ValueError(
                f"StashOptions.page_rows ({page_rows}) must be >= "
                f"{cdiv(widest * page_rows, pool.page_bytes)} for rows of {widest} bytes in pages "
                "that are made for the first layer's: raise it"
            )

    def _make_pool(self, copies: Sequence[HostCopy], *, in_capture: bool) -> PagePool:
        """Make the pool that all rows share: pages for every layer, as the first layer needs them.

        A page has `page_rows` rows of the widest matrix, and more rows of a narrower one. Each
        layer has pages for the first layer's rows with even loads, times the factor.
        """
        if in_capture:
            raise RuntimeError(
                "pages of MemoryOptions.stash must be made before a CUDA graph is captured: run "
                "one forward and backward first"
            )
        options, num_layers = self._options, self._num_layers
        widest = max(_row(copy)[0] for copy in copies)
        page_bytes = cdiv(options.page_rows * widest, PAGE_ALIGNMENT) * PAGE_ALIGNMENT
        num_pages, self._balanced_pages = 0, 0.0
        for copy in copies:
            assert copy.used is not None and copy.used.balanced is not None
            rows, step = max(1, copy.used.balanced), page_bytes // _row(copy)[0]
            num_pages += num_layers * cdiv(math.ceil(options.factor * rows), step)
            self._balanced_pages += num_layers * rows / step
        self.pool = PagePool.make(
            num_pages,
            page_bytes,
            self._streams.device,
            num_host_pages=options.host_bytes // page_bytes,
        )
        return self.pool


def _row(copy: HostCopy) -> tuple[int, bool]:
    """Return the bytes of a row, and whether a list (`UsedRows.slots`) has the rows in use."""
    assert copy.used is not None
    return copy.size // copy.used.length, copy.used.slots is not None


def _by_dispatch(copies: Sequence[HostCopy]) -> list[list[HostCopy]]:
    """Return copies in groups that share a table: one list and one number of used rows at most."""
    found: list[list[HostCopy]] = []
    rows: dict[bool, UsedRows] = {}
    for copy in copies:
        used = copy.used
        assert used is not None
        is_full = not found or len(found[-1]) == MOST_MATRICES
        if is_full or rows.setdefault(used.slots is not None, used) is not used:
            found.append([])
            rows = {used.slots is not None: used}
        found[-1].append(copy)
    return found


def _over(pieces: Sequence[PagePlace]) -> list[Dispatched]:
    """Count places as no longer needed; return the dispatches that have none left."""
    found = []
    for of, _ in pieces:
        of.left -= 1
        if not of.left:
            found.append(of)
    return found
