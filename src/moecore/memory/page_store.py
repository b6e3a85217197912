"""Copies of used rows in pages of the device, between forward and backward.

A matrix with room for the worst case lies in pages of the rows that are in use, and its own memory
is free. The host never learns how many these are: kernels take pages and return them
(`kernels/rows/free_list.py`).

Note "one pool": rows of a width share one, those that are the first so many and those with a list
apart. It is made by the first of them: balanced loads times the factor, for every layer.

Note "graphs": a CUDA graph has tables of its own, and takes and returns pages at each replay. What
eager code returns while one is captured waits until the capture has ended: each replay would
return it again. What a graph has not returned itself its next replay does.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from moecore.kernels.common import cdiv
from moecore.kernels.rows.free_list import MISSED_WORD, MOST_WORD, PagePool, return_pages
from moecore.kernels.rows.pages import list_rows, pop_rows, stash_rows
from moecore.memory.groups import Copy
from moecore.memory.options import StashOptions
from moecore.memory.saved import UsedRows, used_rows
from moecore.memory.streams import CopyStream, Mark, Streams

Width = tuple[int, bool]  # bytes of a row, and whether a list has the rows


@dataclass(eq=False, slots=True)
class Pages:
    """Where the used rows of one matrix lie.

    Attributes:
        width: of the pool.
        of_graph: a CUDA graph fills the table in every replay.
        used: which rows.
        num_rows, order: the same, as the kernels take them; known once the rows are there.
        out: when the rows were there.
        back: when they were last copied back.
    """

    width: Width
    pool: PagePool
    table: Tensor
    of_graph: bool
    used: UsedRows
    num_rows: Tensor | None = None
    order: Tensor | None = None
    out: Mark | None = None
    back: Mark | None = None

    def fill(self, data: Tensor) -> None:
        """Take pages for the used rows of a storage and copy them there."""
        self.num_rows = self.used.num_rows
        if self.used.slots is not None:
            self.order, self.num_rows = list_rows(self.used.slots.amax(1))
        assert self.num_rows is not None
        rows = data.view(self.used.length, -1)
        stash_rows(rows, self.table, self.pool, self.num_rows, self.order)

    def read(self, data: Tensor) -> None:
        """Copy the used rows back; the others of `data` stay as they are."""
        assert self.num_rows is not None
        rows = data.view(self.used.length, -1)
        pop_rows(rows, self.table, self.pool, self.num_rows, self.order)


class ToPages(NamedTuple):
    """A copy to pages: a `Transfer`."""

    target: Pages
    source: Tensor

    def start(self, stream: CopyStream) -> None:
        """Start the copy; a CPU ends it."""
        with stream.running():
            self.target.fill(self.source)


class FromPages(NamedTuple):
    """A copy back: a `Transfer`."""

    target: Tensor
    source: Pages

    def start(self, stream: CopyStream) -> None:
        """Start the copy; a CPU ends it."""
        with stream.running():
            self.source.read(self.target)


class Shortage(NamedTuple):
    """A pool that had too few pages.

    Attributes:
        factor: the least that would have held all rows.
        num_pages: that were wanted at the same time.
    """

    factor: float
    num_pages: int


class PageStore:
    """Copies in pages: a `Store` of matrices whose used rows are counted on the device.

    Args:
        streams: of the device.
        options: sizes.
        num_layers: how many matrices of each width a forward keeps.

    Attributes:
        pools: by width.
    """

    def __init__(self, streams: Streams, options: StashOptions, num_layers: int) -> None:
        self._streams, self._options, self._num_layers = streams, options, num_layers
        self.pools: dict[Width, PagePool] = {}
        self._balanced: dict[Width, int] = {}  # rows of all layers with even loads
        self._host_bytes = options.host_bytes  # that are left
        # Free tables, and when they were emptied, by whichever stream: only then are they filled.
        self._tables: defaultdict[tuple[Width, int, bool], list[tuple[Tensor, Mark]]]
        self._tables = defaultdict(list)
        self._waiting: list[Pages] = []  # eager code's, until a capture has ended

    def takes(self, tensor: Tensor) -> bool:
        """Whether it has rows that are not in use, and somebody knows how many may be."""
        used = used_rows(tensor)
        return used is not None and used.balanced is not None

    def put(self, copies: Sequence[Copy]) -> list[Copy]:
        """Start to copy used rows to pages."""
        self._return_waiting()
        self._make_pools(copies)
        for copy in copies:
            copy.piece = self._pages(copy)
        if copies:
            mark = self._streams.copy_out(
                ToPages(copy.piece, copy.data) for copy in copies if copy.data is not None
            )
            for copy in copies:
                copy.out = copy.busy = copy.piece.out = mark
        return list(copies)

    def bring(self, copy: Copy) -> None:
        """Start to copy used rows back."""
        assert copy.data is not None and copy.out is not None
        self._return_waiting()
        copy.busy = self._streams.copy_back([FromPages(copy.data, copy.piece)], copy.out)
        copy.piece.back = copy.busy

    def give(self, copy: Copy) -> None:
        """Return the pages of a copy, behind its last reader."""
        self._return(copy.piece)

    def _return(self, pages: Pages) -> None:
        in_capture = self._streams.is_capturing()
        if in_capture and not pages.of_graph:
            self._waiting.append(pages)
            return
        current = self._streams.current()
        if pages.of_graph == in_capture:
            for mark in (pages.out, pages.back):
                if mark is not None:
                    mark.hold(current)
            return_pages(pages.table, pages.pool)
        key = (pages.width, pages.table.shape[0], pages.of_graph)
        self._tables[key].append((pages.table, Mark(current)))

    def clear(self) -> None:
        """Free all pages."""
        self._waiting.clear()
        self._tables.clear()
        self.pools.clear()
        self._balanced.clear()
        self._host_bytes = self._options.host_bytes

    def resize(self, options: StashOptions) -> None:
        """Free all pages; the next pools have other sizes. When no rows lie in them."""
        self._options = options
        self.clear()

    def needed_factors(self) -> list[Tensor]:
        """Return of each pool the least factor that had held all rows, 0 = it did."""
        return [
            pool.state[MOST_WORD]
            * (pool.state[MISSED_WORD] > 0)
            * pool.page_rows
            / self._balanced[width]
            for width, pool in self.pools.items()
        ]

    def clear_needed(self) -> None:
        """Let later rows be counted anew; the device has come to here."""
        for pool in self.pools.values():
            pool.clear_needed()

    def shortage(self) -> Shortage | None:
        """Return the largest so far, as far as the host can see without waiting, and start anew."""
        found = []
        for width, pool in self.pools.items():
            words = pool.report.tolist()
            if words[MISSED_WORD]:
                rows = words[MOST_WORD] * pool.page_rows
                found.append(Shortage(rows / self._balanced[width], words[MOST_WORD]))
                pool.clear_needed()
        return max(found, default=None)

    def _return_waiting(self) -> None:
        if self._waiting and not self._streams.is_capturing():
            waiting, self._waiting = self._waiting, []
            for pages in waiting:
                self._return(pages)

    def _pages(self, copy: Copy) -> Pages:
        assert copy.used is not None
        width, length = _width(copy), copy.used.length
        pool, in_capture = self.pools[width], self._streams.is_capturing()
        num_entries = cdiv(length, pool.page_rows)
        for of_graph in (True, False) if in_capture else (False,):
            free = self._tables[width, num_entries, of_graph]
            if free:
                table, emptied = free.pop()
                emptied.hold(self._streams.current())
                return Pages(width, pool, table, in_capture, copy.used)
        return Pages(width, pool, pool.table(length), in_capture, copy.used)

    def _make_pools(self, copies: Sequence[Copy]) -> None:
        """Make the pools that these need first. They share what is left of the host's memory."""
        new = {_width(copy): copy for copy in copies if _width(copy) not in self.pools}
        if not new:
            return
        if self._streams.is_capturing():
            raise RuntimeError(
                "pages of MemoryOptions.stash must be made before a CUDA graph is captured: run "
                "one forward and backward first"
            )
        step, sizes = self._options.page_rows, {width: self._rows(c) for width, c in new.items()}
        num_pages = {width: self._num_layers * cdiv(rows, step) for width, rows in sizes.items()}
        all_bytes = sum(n * step * width[0] for width, n in num_pages.items())
        host_bytes = self._host_bytes
        for width, n in num_pages.items():
            page_bytes = step * width[0]
            num_host_pages = int(host_bytes * (n / all_bytes))
            self.pools[width] = PagePool.make(
                n, step, width[0], self._streams.device, num_host_pages=num_host_pages
            )
            self._host_bytes -= num_host_pages * page_bytes
            used = new[width].used
            assert used is not None and used.balanced is not None
            self._balanced[width] = self._num_layers * max(1, used.balanced)

    def _rows(self, copy: Copy) -> int:
        """Return how many rows of a layer there is room for."""
        assert copy.used is not None and copy.used.balanced is not None
        return max(1, math.ceil(self._options.factor * copy.used.balanced))


def _width(copy: Copy) -> Width:
    assert copy.used is not None
    return copy.size // copy.used.length, copy.used.slots is not None
