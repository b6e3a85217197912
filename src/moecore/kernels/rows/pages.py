"""Copies of used rows from worst-case buffers to pages and back, without a host sync.

Which rows are used, their number, and their pages are known only on the device. Rows without a page
are NaN after the copy back. The matrices of one dispatch share a table, int32 on the device: N page
ids (matrix by matrix), the number of rows with a slot, the number of first rows, and the ids of the
rows with a slot.

Letters: S source rows (with slots), K slots of a row, R expert rows (the first ones are in use), B
bytes of a row, P device pages, Q host pages, N entries. Bytes moved: 4 * S * K for the list, 2 *
used * B each way.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moecore.kernels.common import can_use_kernel, cdiv, launch, next_power_of_2
from moecore.kernels.rows.free_list import (
    BLOCK_IDS,
    NONE,
    PagePool,
    free_pages,
    return_pages_ref,
    take_pages,
    take_pages_ref,
)
from moecore.kernels.triton_api import tl, triton

MAX_MATRICES = 4  # of a table
PROGRAMS = 64  # of a copy: about half of an H200's multiprocessors, beside other work
TILE_WORDS = 8192  # of 4 bytes, that a program has in flight
MAX_WORDS = 1024  # of them in one row
NUM_WARPS = 8
TAKE_SLOTS = 32768  # that the one program of a list looks at at once
TAKE_WARPS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class PageLayout:
    """The layout of stored rows of several matrices in the pages of a `PagePool`.

    A matrix is a uint8 buffer [rows, bytes]. Stored rows are either all rows of a list (tokens with
    an expert row), or the first rows.
    """

    pool: PagePool
    widths: tuple[int, ...]  # B of at most MAX_MATRICES matrices, at most the bytes of a page
    # of each matrix, whether its used rows are the rows with a slot; otherwise the first rows
    has_list: tuple[bool, ...]
    source_rows: int  # S
    expert_rows: int  # R
    num_entries: int  # N, when all rows are in use
    listed_steps: tuple[int, ...]  # rows of a page, of each matrix with a list
    first_steps: tuple[int, ...]  # rows of a page, of each matrix without a list
    # of each matrix, the tile that a program copies at once
    block_rows: tuple[int, ...]
    block_words: tuple[int, ...]
    programs: int  # of a copy

    @classmethod
    def from_matrices(
        cls,
        pool: PagePool,
        matrices: Sequence[tuple[int, bool]],
        source_rows: int,
        expert_rows: int,
    ) -> "PageLayout":
        """Return the layout of matrices, each (bytes of a row, whether a list selects its rows)."""
        widths, has_list = zip(*matrices, strict=True)
        steps = [pool.page_bytes // width for width in widths]
        lengths = [source_rows if listed else expert_rows for listed in has_list]
        words = [width // (1 if width % 4 else 4) for width in widths]
        block_words = tuple(min(MAX_WORDS, next_power_of_2(n)) for n in words)
        block_rows = tuple(
            min(next_power_of_2(step), TILE_WORDS // block)
            for step, block in zip(steps, block_words, strict=True)
        )
        num_pages = list(map(cdiv, lengths, steps))
        tiles = (map(cdiv, steps, block_rows), map(cdiv, words, block_words), num_pages)
        return cls(
            pool=pool,
            widths=widths,
            has_list=has_list,
            source_rows=source_rows,
            expert_rows=expert_rows,
            num_entries=sum(num_pages),
            listed_steps=tuple(n for n, listed in zip(steps, has_list, strict=True) if listed),
            first_steps=tuple(n for n, listed in zip(steps, has_list, strict=True) if not listed),
            block_rows=block_rows,
            block_words=block_words,
            programs=min(PROGRAMS, max(map(math.prod, zip(*tiles, strict=True)))),
        )

    def make_table(self) -> Tensor:
        """Return a new, empty int32 page table. A CUDA graph must not capture this call."""
        num_listed = self.source_rows if any(self.has_list) else 0
        size = self.num_entries + 2 + num_listed
        return torch.full((size,), NONE, dtype=torch.int32, device=self.pool.pages.device)


def take_pages_for_rows_ref(
    page_table: Tensor, layout: PageLayout, slots_SK: Tensor | None, num_rows: Tensor | None
) -> None:
    """Compute `take_pages_for_rows` on the host."""
    N = layout.num_entries
    page_table[N : N + 2] = 0
    if slots_SK is not None:
        rows = (slots_SK.amax(1) >= 0).nonzero()[:, 0]
        page_table[N] = len(rows)
        page_table[N + 2 :][: len(rows)] = rows
    if num_rows is not None:
        page_table[N + 1] = min(int(num_rows), layout.expert_rows)
    listed, first = page_table[N : N + 2].tolist()
    need = sum(cdiv(listed, n) for n in layout.listed_steps)
    need += sum(cdiv(first, n) for n in layout.first_steps)
    take_pages_ref(page_table, N, need, layout.pool)


def stash_or_restore_rows_ref(
    matrices: Sequence[Tensor | None], page_table: Tensor, layout: PageLayout, *, stash: bool
) -> None:
    """Compute `stash_or_restore_rows` on the host."""
    pool, N, entry = layout.pool, layout.num_entries, 0
    P = pool.pages.shape[0]
    for matrix, width, listed in zip(matrices, layout.widths, layout.has_list, strict=True):
        num_rows, step = int(page_table[N + 1 - listed]), pool.page_bytes // width
        rows = torch.arange(num_rows, device=page_table.device)
        if listed:
            rows = page_table[N + 2 :][:num_rows].long()
        for places in rows.split(step):
            page, entry = int(page_table[entry]), entry + 1
            if matrix is None:
                continue
            rows_RB = matrix.view(-1, width)
            if page < 0:
                if not stash:
                    rows_RB[places] = 255
                continue
            memory = pool.pages[page] if page < P else pool.host_pages[page - P]
            in_page = memory[: len(places) * width].view(-1, width)
            if stash:
                in_page.copy_(rows_RB[places])
            else:
                rows_RB[places] = in_page


@triton.jit
def _count_pages(num_rows, ROWS_PER_PAGE: tl.constexpr):
    """Return how many pages num_rows rows of several matrices take."""
    need = 0
    for m in tl.static_range(len(ROWS_PER_PAGE)):
        need += (num_rows + ROWS_PER_PAGE[m] - 1) // ROWS_PER_PAGE[m]
    return need


@triton.jit(
    do_not_specialize=["source_rows", "expert_rows", "num_entries", "num_pages", "num_host_pages"]
)
def _take_rows_kernel(
    slots_ptr,  # [S, K] int32, negative = none; None = no matrix has a list
    num_rows_ptr,  # int32: the first so many of R; None = no matrix is without a list
    table_ptr,  # in, out: its old pages are freed, new page ids and the list are written
    source_rows,  # S
    expert_rows,  # R
    num_entries,  # N
    state_ptr,  # [NUM_WORDS] int32
    report_ptr,  # [NUM_WORDS] int32
    free_ids_ptr,  # [P + Q] int32
    num_pages,  # P
    num_host_pages,  # Q
    K: tl.constexpr,
    LISTED_STEPS: tl.constexpr,  # rows of a page of each matrix with a list
    FIRST_STEPS: tl.constexpr,  # of each without
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """List tokens with an expert row in the table; take pages for all stored rows. One program."""
    need = 0
    if slots_ptr is not None:
        count = 0
        for start in range(0, source_rows, BLOCK_S):
            rows, columns = start + tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_K)
            mask = (rows < source_rows)[:, None] & (columns < K)[None, :]
            places = rows.to(tl.int64)[:, None] * K + columns[None, :]
            slots = tl.load(slots_ptr + places, mask=mask, other=-1)
            is_used = tl.max(slots, axis=1) >= 0
            before = count + tl.cumsum(is_used.to(tl.int32), axis=0) - 1
            tl.store(table_ptr + num_entries + 2 + before, rows, mask=is_used)
            count += tl.sum(is_used.to(tl.int32), axis=0)
        tl.store(table_ptr + num_entries, count)
        need += _count_pages(count, LISTED_STEPS)
    if num_rows_ptr is not None:
        first = tl.minimum(tl.load(num_rows_ptr), expert_rows)
        tl.store(table_ptr + num_entries + 1, first)
        need += _count_pages(first, FIRST_STEPS)
    pool = (state_ptr, free_ids_ptr, num_pages, num_host_pages)
    take_pages(table_ptr, num_entries, need, pool, report_ptr, BLOCK)


@triton.jit
def _copy_matrix(
    rows_ptr,  # [S or R, B] bytes; None = skip this matrix
    table_ptr,  # page ids of this matrix, then of the next matrices
    row_ids_ptr,  # [S] int32, indices of the used rows; None = the first rows
    num_rows,  # number of used rows
    pages_ptr,  # [P, PAGE_BYTES] bytes
    host_pages_ptr,  # [Q, PAGE_BYTES] bytes, or None
    num_pages,  # P
    PAGE_BYTES: tl.constexpr,
    WIDTH: tl.constexpr,  # B
    STASH: tl.constexpr,  # True = rows to pages, False = pages to rows
    PROGRAMS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Copy tiles of a matrix to or from pages; return the table_ptr of the next matrix."""
    STEP: tl.constexpr = PAGE_BYTES // WIDTH
    WORD: tl.constexpr = tl.int32 if WIDTH % 4 == 0 else tl.int8
    WORD_BYTES: tl.constexpr = 4 if WIDTH % 4 == 0 else 1
    WORDS: tl.constexpr = WIDTH // WORD_BYTES
    PAGE_WORDS: tl.constexpr = PAGE_BYTES // WORD_BYTES
    entries = (num_rows + STEP - 1) // STEP
    if rows_ptr is not None:
        BLOCKS: tl.constexpr = (WORDS + BLOCK_W - 1) // BLOCK_W
        PARTS: tl.constexpr = (STEP + BLOCK_R - 1) // BLOCK_R
        words_ptr = rows_ptr.to(tl.pointer_type(WORD))
        here_ptr = pages_ptr.to(tl.pointer_type(WORD))
        for tile in range(tl.program_id(0), entries * PARTS * BLOCKS, PROGRAMS):
            columns = tile % BLOCKS * BLOCK_W + tl.arange(0, BLOCK_W)
            entry = tile // BLOCKS // PARTS
            inside = tile // BLOCKS % PARTS * BLOCK_R + tl.arange(0, BLOCK_R)
            places = entry * STEP + inside
            exists = (inside < STEP) & (places < num_rows)
            rows = places
            if row_ids_ptr is not None:
                rows = tl.load(row_ids_ptr + places, mask=exists, other=0)
            page = tl.load(table_ptr + entry).to(tl.int64)
            base = here_ptr + tl.maximum(page, 0) * PAGE_WORDS
            if host_pages_ptr is not None:
                if page >= num_pages:
                    there_ptr = host_pages_ptr.to(tl.pointer_type(WORD))
                    base = there_ptr + (page - num_pages) * PAGE_WORDS
            mask = exists[:, None] & (columns < WORDS)[None, :]
            has_page = mask & (page >= 0)
            in_page = base + inside[:, None] * WORDS + columns[None, :]
            in_rows = words_ptr + rows.to(tl.int64)[:, None] * WORDS + columns[None, :]
            if STASH:
                words = tl.load(in_rows, mask=has_page)
                tl.store(in_page, words, mask=has_page)
            else:  # all bits set: NaN in every float dtype
                words = tl.load(in_page, mask=has_page, other=-1)
                tl.store(in_rows, words, mask=mask)
    return table_ptr + entries


@triton.jit(do_not_specialize=["num_entries", "num_pages", "released_entries", "num_host_pages"])
def _copy_pages_kernel(
    a_ptr,  # four matrices of bytes; None = skip
    b_ptr,
    c_ptr,
    d_ptr,
    table_ptr,  # int32
    num_entries,  # N
    pages_ptr,  # [P, PAGE_BYTES] bytes
    host_pages_ptr,  # [Q, PAGE_BYTES] bytes, or None
    num_pages,  # P
    released_table_ptr,  # another table, whose pages are freed; None = no table
    released_entries,  # its N
    state_ptr,  # [NUM_WORDS] int32
    free_ids_ptr,  # [P + Q] int32
    num_host_pages,  # Q
    PAGE_BYTES: tl.constexpr,
    WIDTHS: tl.constexpr,
    HAS_LIST: tl.constexpr,
    STASH: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCKS_R: tl.constexpr,
    BLOCKS_W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy up to 4 matrices to (STASH) or from pages; the last program frees a released table."""
    if tl.program_id(0) < PROGRAMS:
        listed, first = (tl.load(table_ptr + num_entries), tl.load(table_ptr + num_entries + 1))
        order_ptr, at_ptr = table_ptr + num_entries + 2, table_ptr
        for m in tl.static_range(len(WIDTHS)):
            rows_ptr = a_ptr if m == 0 else b_ptr if m == 1 else c_ptr if m == 2 else d_ptr
            order = order_ptr if HAS_LIST[m] else None
            num_rows = listed if HAS_LIST[m] else first
            at_ptr = _copy_matrix(
                rows_ptr, at_ptr, order, num_rows, pages_ptr, host_pages_ptr, num_pages,
                PAGE_BYTES, WIDTHS[m], STASH, PROGRAMS, BLOCKS_R[m], BLOCKS_W[m],
            )  # fmt: skip
    elif released_table_ptr is not None:
        pool = (state_ptr, free_ids_ptr, num_pages, num_host_pages)
        free_pages(released_table_ptr, released_entries, pool, BLOCK)


def take_pages_for_rows(
    page_table: Tensor, layout: PageLayout, slots_SK: Tensor | None, num_rows: Tensor | None
) -> None:
    """Take pages for the rows to store; write the page ids and the list of rows to the table.

    The table's earlier pages are freed first. Matrices with a list store the tokens with an expert
    row in slots_SK (int32, -1 = none). Other matrices store the first num_rows (0-dim int32) rows.
    An argument is None if no matrix needs it. No host sync.

    Example: slots [[-1], [0], [7], [-1], [1]] give the list [1, 2, 4].
    """
    if not can_use_kernel(page_table):
        take_pages_for_rows_ref(page_table, layout, slots_SK, num_rows)
        return
    pool, K = layout.pool, 1 if slots_SK is None else slots_SK.shape[1]
    block_k = next_power_of_2(K)
    slots_SK = None if slots_SK is None else slots_SK.contiguous()
    sizes = (layout.source_rows, layout.expert_rows, layout.num_entries)
    ids = (pool.state, pool.report, pool.free_ids)
    num_pages = (pool.pages.shape[0], pool.host_pages.shape[0])
    launch(
        _take_rows_kernel,
        1,
        *(slots_SK, num_rows, page_table, *sizes, *ids, *num_pages),
        K=K,
        LISTED_STEPS=layout.listed_steps,
        FIRST_STEPS=layout.first_steps,
        BLOCK_S=max(1, TAKE_SLOTS // block_k),
        BLOCK_K=block_k,
        BLOCK=BLOCK_IDS,
        num_warps=TAKE_WARPS,
    )


def stash_or_restore_rows(
    matrices: Sequence[Tensor | None],
    page_table: Tensor,
    layout: PageLayout,
    *,
    stash: bool,
    released_table: tuple[Tensor, int] | None = None,
) -> None:
    """If `stash`, copy rows of matrices to pages, otherwise back from pages. No host sync.

    The pages of the table (of `take_pages_for_rows`) are not freed, and rows that are not stored do
    not change. Rows for which no page was free become NaN when they are copied back.

    Args:
        matrices: uint8, contiguous, in the order of the layout; None = skip this matrix.
        released_table: a table of the same pool and its num_entries, whose pages the same launch
            frees. No other kernel may still read these pages.
    """
    if not can_use_kernel(page_table):
        stash_or_restore_rows_ref(matrices, page_table, layout, stash=stash)
        if released_table is not None:
            return_pages_ref(*released_table, layout.pool)
        return
    pool = layout.pool
    released, released_entries = (None, 0) if released_table is None else released_table
    launch(
        _copy_pages_kernel,
        layout.programs + (released_table is not None),
        *(*matrices, *(None,) * (MAX_MATRICES - len(matrices))),
        *(page_table, layout.num_entries, pool.pages),
        pool.host_pages if pool.host_pages.shape[0] else None,
        pool.pages.shape[0],
        *(released, released_entries, pool.state, pool.free_ids, pool.host_pages.shape[0]),
        PAGE_BYTES=pool.page_bytes,
        WIDTHS=layout.widths,
        HAS_LIST=layout.has_list,
        BLOCKS_R=layout.block_rows,
        BLOCKS_W=layout.block_words,
        BLOCK=BLOCK_IDS,
        STASH=stash,
        PROGRAMS=layout.programs,
        num_warps=NUM_WARPS,
    )
