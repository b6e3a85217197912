"""Used rows of a matrix of the worst case, to pages and back, without a host sync.

    stash_rows   takes pages for the rows (`free_list.py`), and copies them there
    pop_rows     copies the rows back to where they were

Which rows are in use is a number, the first so many, or a list of them. Both are on the device, and
so is where they go. Rows whose table has no page for them come back as NaN.

Letters: R rows (length), B bytes of a row, P device pages, Q host pages, N entries of a table.
Bytes moved: 2 * used * B each way.
"""

from functools import partial

import torch
from torch import Tensor

from moecore.kernels.common import cdiv, next_power_of_2, on_device, tl, triton, use_kernel
from moecore.kernels.rows.free_list import PagePool, take_pages

PROGRAMS = 64  # of a copy: about half of an H200's multiprocessors, beside other work
TILE_WORDS = 8192  # of 4 bytes, that a program has in flight
MOST_WORDS = 1024  # of them in one row
NUM_WARPS = 8
BLOCK_PLACES = 4096


def list_rows_ref(places_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `list_rows` does; entries past the number are 0."""
    used_R = places_R >= 0
    order_R = torch.argsort(~used_R, stable=True).to(torch.int32)
    num_rows = used_R.sum(dtype=torch.int32)
    return order_R.where(torch.arange(len(used_R), device=used_R.device) < num_rows, 0), num_rows


def copy_pages_ref(
    rows_RB: Tensor,
    table_N: Tensor,
    pool: PagePool,
    num_rows: Tensor,
    order_R: Tensor | None,
    *,
    stash: bool,
) -> None:
    """Copy used rows to the pages of a table, or back."""
    P, step = pool.pages.shape[0], pool.page_rows
    used = min(int(num_rows), rows_RB.shape[0])
    for i, page in enumerate(table_N[: cdiv(used, step)].tolist()):
        places = torch.arange(i * step, min(used, (i + 1) * step))
        if order_R is not None:
            places = order_R[places].long()
        if page < 0:
            if not stash:
                rows_RB[places] = 255
            continue
        memory = pool.pages[page] if page < P else pool.host_pages[page - P]
        if stash:
            memory[: len(places)] = rows_RB[places]
        else:
            rows_RB[places] = memory[: len(places)]


@partial(triton.jit, do_not_specialize=["length"])
def _list_rows_kernel(
    places_ptr,  # [R] int32, negative = not in use
    order_ptr,  # [R] int32, out: the used rows in order
    num_rows_ptr,  # int32, out
    length,  # R
    BLOCK: tl.constexpr,
):
    count = 0
    for start in range(0, length, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        used = tl.load(places_ptr + rows, mask=rows < length, other=-1) >= 0
        before = count + tl.cumsum(used.to(tl.int32), axis=0) - 1
        tl.store(order_ptr + before, rows, mask=used)
        count += tl.sum(used.to(tl.int32), axis=0)
    tl.store(num_rows_ptr, count)


@partial(triton.jit, do_not_specialize=["length", "num_pages"])
def _copy_pages_kernel(
    rows_ptr,  # [R, WORDS]
    order_ptr,  # [R] int32, the used rows; None = the first ones
    num_rows_ptr,  # int32
    table_ptr,  # [N] int32
    pages_ptr,  # [P, PAGE_ROWS, WORDS]
    host_ptr,  # [Q, PAGE_ROWS, WORDS], or None
    length,  # R
    num_pages,  # P
    PAGE_ROWS: tl.constexpr,
    WORDS: tl.constexpr,  # of a row
    STASH: tl.constexpr,  # rows to pages; else pages to rows
    PROGRAMS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    BLOCKS: tl.constexpr = (WORDS + BLOCK_W - 1) // BLOCK_W
    PARTS: tl.constexpr = (PAGE_ROWS + BLOCK_R - 1) // BLOCK_R
    used = tl.minimum(tl.load(num_rows_ptr), length)
    tiles = (used + PAGE_ROWS - 1) // PAGE_ROWS * PARTS * BLOCKS
    for tile in range(tl.program_id(0), tiles, PROGRAMS):
        columns = tile % BLOCKS * BLOCK_W + tl.arange(0, BLOCK_W)
        entry = tile // BLOCKS // PARTS
        inside = tile // BLOCKS % PARTS * BLOCK_R + tl.arange(0, BLOCK_R)
        places = entry * PAGE_ROWS + inside
        exists = (inside < PAGE_ROWS) & (places < used)
        rows = places
        if order_ptr is not None:
            rows = tl.load(order_ptr + places, mask=exists, other=0)
        page = tl.load(table_ptr + entry).to(tl.int64)
        base = pages_ptr + tl.maximum(page, 0) * (PAGE_ROWS * WORDS)
        if host_ptr is not None:
            if page >= num_pages:
                base = host_ptr + (page - num_pages) * (PAGE_ROWS * WORDS)
        mask = exists[:, None] & (columns < WORDS)[None, :]
        in_page = base + inside[:, None] * WORDS + columns[None, :]
        in_rows = rows_ptr + rows.to(tl.int64)[:, None] * WORDS + columns[None, :]
        if STASH:
            words = tl.load(in_rows, mask=mask & (page >= 0))
            tl.store(in_page, words, mask=mask & (page >= 0))
        else:  # all bits set: NaN in every float dtype
            tl.store(in_rows, tl.load(in_page, mask=mask & (page >= 0), other=-1), mask=mask)


def _copy(
    rows_RB: Tensor,
    table_N: Tensor,
    pool: PagePool,
    num_rows: Tensor,
    order_R: Tensor | None,
    *,
    stash: bool,
) -> None:
    if not use_kernel(rows_RB, num_rows):
        copy_pages_ref(rows_RB, table_N, pool, num_rows, order_R, stash=stash)
        return
    (R, row_bytes), step = rows_RB.shape, pool.page_rows
    word = torch.int32 if row_bytes % 4 == 0 else torch.int8
    words = row_bytes // word.itemsize
    block = min(MOST_WORDS, next_power_of_2(words))
    block_rows = min(next_power_of_2(step), TILE_WORDS // block)
    programs = min(PROGRAMS, table_N.shape[0] * cdiv(step, block_rows) * cdiv(words, block))
    if not programs:
        return
    with on_device(rows_RB):
        _copy_pages_kernel[(programs,)](
            rows_RB.view(word),
            order_R,
            num_rows,
            table_N,
            pool.pages.view(word),
            pool.host_pages.view(word) if pool.host_pages.shape[0] else None,
            R,
            pool.pages.shape[0],
            PAGE_ROWS=step,
            WORDS=words,
            STASH=stash,
            PROGRAMS=programs,
            BLOCK_R=block_rows,
            BLOCK_W=block,
            num_warps=NUM_WARPS,
        )


def list_rows(places_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows in use, in order, and their number. No host sync.

    Args:
        places_R: int32, negative where a row is not in use.

    Returns:
        int32 [R], uninitialised past the number, and 0-dim int32.

    Example: places [-1, 0, 7, -1, 1] give [1, 2, 4, ...] and 3.
    """
    if not use_kernel(places_R):
        return list_rows_ref(places_R)
    order_R, num_rows = torch.empty_like(places_R), places_R.new_empty(())
    with on_device(places_R):
        _list_rows_kernel[(1,)](
            *(places_R, order_R, num_rows, places_R.shape[0]),
            BLOCK=BLOCK_PLACES,
            num_warps=NUM_WARPS,
        )
    return order_R, num_rows


def stash_rows(
    rows_RB: Tensor,
    table_N: Tensor,
    pool: PagePool,
    num_rows: Tensor,
    order_R: Tensor | None = None,
) -> None:
    """Copy the used rows of a matrix to pages of a pool. No host sync.

    Args:
        rows_RB: uint8, contiguous, rows of the pool's width.
        table_N: of `PagePool.table(R)`; what it names is returned first.
        num_rows: 0-dim int32 on the device: how many are in use; more than R count as R.
        order_R: int32, which they are (`list_rows`); None = the first ones.
        pool: whose pages are taken, from the head of its free list.
    """
    take_pages(table_N, num_rows, rows_RB.shape[0], pool)
    _copy(rows_RB, table_N, pool, num_rows, order_R, stash=True)


def pop_rows(
    rows_RB: Tensor,
    table_N: Tensor,
    pool: PagePool,
    num_rows: Tensor,
    order_R: Tensor | None = None,
) -> None:
    """Copy rows from their pages to where they were. The table keeps its pages. No host sync.

    Args:
        rows_RB: out; rows that are not in use stay as they are. What found no page becomes NaN.
        table_N: of `stash_rows`.
        pool: likewise.
        num_rows: likewise.
        order_R: likewise.
    """
    _copy(rows_RB, table_N, pool, num_rows, order_R, stash=False)
