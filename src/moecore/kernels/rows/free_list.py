"""Pages for rows, and the free list of their ids: who has which page, decided on the device.

    take_pages     gives a table the pages for some rows, from the head of the free list
    return_pages   puts a table's pages at the tail

The free list is a circular buffer: a head, and how many ids follow it. A second one beside it has
the pages in host memory, ids from the number of device pages on, which are taken when no other is
left. Where none is left at all the entry is MISSING, and the pool's report counts it.

Example, pages of 2 rows, 4 pages: free list [0, 1, 2, 3]. 3 rows in use take [0, 1] and leave
[2, 3]; 5 rows want 3 pages and get [2, 3, MISSING]. The first table is returned: [0, 1]; 2 rows
take [0], and the second table is returned: [1, 2, 3]. The most that was wanted is 5 pages.

Note "lock": the lists are changed by one program at a time, which holds a word of the state. So
streams, and replays of CUDA graphs beside eager code, need no order among them: a page is in one
table or in a list. Whoever returns a table does so after the last read of its pages.

Note "static tables": a table keeps its entries from one replay to the next. `take_pages` returns
what the table still names before it takes anything, so a replayed forward whose backward did not
run loses no page.

Letters: R rows (length), B bytes of a row, P device pages, Q host pages, N entries of a table.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from moecore.kernels.common import cdiv, on_device, tl, triton, use_kernel

BLOCK_IDS = 1024  # entries of a table that its one program takes at once
NONE, MISSING = -1, -2  # entries of a table without a page: not needed, and not to be had

# Words of a pool's state and report. FREE ids from HEAD on; WANTED pages by all tables now; the
# most that were WANTED; MISSED in all.
NUM_WORDS = 8
(
    LOCK_WORD,
    HEAD_WORD,
    FREE_WORD,
    HOST_HEAD_WORD,
    HOST_FREE_WORD,
    WANTED_WORD,
    MOST_WORD,
    MISSED_WORD,
) = range(NUM_WORDS)
LOCK, HEAD, FREE, HOST_HEAD, HOST_FREE, WANTED, MOST, MISSED = map(tl.constexpr, range(NUM_WORDS))
NO_PAGE, NO_ROOM = tl.constexpr(NONE), tl.constexpr(MISSING)


@dataclass(frozen=True, kw_only=True, slots=True)
class PagePool:
    """Pages for rows of one width, and who has them.

    Attributes:
        pages: uint8 [P, rows of a page, B], uninitialised.
        host_pages: the same in memory of the host that the device reaches; maybe none of them.
        free_ids: int32 [P + number of host pages], two circular buffers.
        state: int32 [NUM_WORDS] on the device.
        report: int32 [NUM_WORDS] that the host sees too: MOST and MISSED, once a page was missed.
    """

    pages: Tensor
    host_pages: Tensor
    free_ids: Tensor
    state: Tensor
    report: Tensor

    @classmethod
    def make(
        cls,
        num_pages: int,
        page_rows: int,
        row_bytes: int,
        device: torch.device,
        *,
        num_host_pages: int = 0,
    ) -> "PagePool":
        """Return a pool whose pages are all free. Not inside the capture of a CUDA graph.

        Args:
            num_pages: P, at least 1.
            page_rows: rows of a page.
            row_bytes: B.
            device: of the pages.
            num_host_pages: in host memory, pinned for a GPU.
        """
        pinned, num_ids = device.type == "cuda", num_pages + num_host_pages
        state = torch.zeros(NUM_WORDS, dtype=torch.int32)
        state[FREE_WORD], state[HOST_FREE_WORD] = num_pages, num_host_pages
        page = (page_rows, row_bytes)
        return cls(
            pages=torch.empty(num_pages, *page, dtype=torch.uint8, device=device),
            host_pages=torch.empty(
                num_host_pages, *page, dtype=torch.uint8, pin_memory=pinned and num_host_pages > 0
            ),
            free_ids=torch.arange(num_ids, dtype=torch.int32, device=device),
            state=state.to(device),
            report=torch.zeros(NUM_WORDS, dtype=torch.int32, pin_memory=pinned),
        )

    @property
    def page_rows(self) -> int:
        """Rows of a page."""
        return self.pages.shape[1]

    @property
    def row_bytes(self) -> int:
        """B."""
        return self.pages.shape[2]

    def clear_needed(self, *, report: bool = True) -> None:
        """Let MOST and MISSED be counted anew.

        Args:
            report: on the host, too; when the device has come to here, or it has been read.
        """
        if report:
            self.report[MOST_WORD:] = 0
        self.state[MOST_WORD:].zero_()

    def table(self, length: int) -> Tensor:
        """Return an empty table for up to so many rows. Not inside a capture: replays empty it."""
        num_entries = cdiv(length, self.page_rows)
        return torch.full((num_entries,), NONE, dtype=torch.int32, device=self.pages.device)


def return_pages_ref(table_N: Tensor, pool: PagePool) -> None:
    """Do what `return_pages` does."""
    P, state = pool.pages.shape[0], pool.state
    for page in table_N.tolist():
        if page >= 0:
            first, size = (0, P) if page < P else (P, pool.host_pages.shape[0])
            head, free = (HEAD_WORD, FREE_WORD) if page < P else (HOST_HEAD_WORD, HOST_FREE_WORD)
            pool.free_ids[first + int(state[head] + state[free]) % size] = page
            state[free] += 1
        state[WANTED_WORD] -= int(page != NONE)
    table_N.fill_(NONE)


def take_pages_ref(table_N: Tensor, num_rows: Tensor, length: int, pool: PagePool) -> None:
    """Return what a table has and give it the pages for some rows, from the head of the list."""
    return_pages_ref(table_N, pool)
    P, state = pool.pages.shape[0], pool.state
    need = cdiv(min(int(num_rows), length), pool.page_rows)
    rings = [(HEAD_WORD, FREE_WORD, 0, P)]
    rings += [(HOST_HEAD_WORD, HOST_FREE_WORD, P, pool.host_pages.shape[0])]
    taken: list[int] = []
    for head, free, first, size in rings:
        count = min(need - len(taken), int(state[free]))
        taken += [int(pool.free_ids[first + (int(state[head]) + i) % size]) for i in range(count)]
        state[head] = (state[head] + count) % max(size, 1)
        state[free] -= count
    missed = need - len(taken)
    table_N[:need] = torch.tensor(taken + [MISSING] * missed, dtype=torch.int32)
    state[WANTED_WORD] += need
    state[MOST_WORD] = state[MOST_WORD].maximum(state[WANTED_WORD])
    if missed:
        state[MISSED_WORD] += missed
        pool.report[MOST_WORD:] = state[MOST_WORD:]


@triton.jit
def _lock(state_ptr):
    while tl.atomic_cas(state_ptr + LOCK, 0, 1, sem="acquire") != 0:
        pass
    tl.debug_barrier()


@triton.jit
def _unlock(state_ptr):
    tl.debug_barrier()
    tl.atomic_xchg(state_ptr + LOCK, 0, sem="release")


@triton.jit
def _word(state_ptr, WORD: tl.constexpr):
    return tl.load(state_ptr + WORD, cache_modifier=".cg")  # other programs write it


@triton.jit
def _put_back(
    table_ptr,  # [N] int32, becomes NONE
    num_entries,  # N
    state_ptr,  # [NUM_WORDS] int32
    free_ptr,  # [P + Q] int32
    num_pages,  # P
    num_host,  # Q
    BLOCK: tl.constexpr,
):
    """Put a table's pages at the tails; return what FREE, HOST_FREE and WANTED become."""
    head, free = _word(state_ptr, HEAD), _word(state_ptr, FREE)
    host_head, host_free = _word(state_ptr, HOST_HEAD), _word(state_ptr, HOST_FREE)
    wanted = _word(state_ptr, WANTED)
    tl.debug_barrier()  # all threads have read what one of them writes in the end
    for start in range(0, num_entries, BLOCK):
        entries = start + tl.arange(0, BLOCK)
        exists = entries < num_entries
        ids = tl.load(table_ptr + entries, mask=exists, other=NO_PAGE, cache_modifier=".cg")
        here = (ids >= 0) & (ids < num_pages)
        there = ids >= num_pages
        place = head + free + tl.cumsum(here.to(tl.int32), axis=0) - 1
        tl.store(free_ptr + place % num_pages, ids, mask=here)
        place = host_head + host_free + tl.cumsum(there.to(tl.int32), axis=0) - 1
        tl.store(free_ptr + num_pages + place % tl.maximum(num_host, 1), ids, mask=there)
        tl.store(table_ptr + entries, tl.full([BLOCK], NO_PAGE, tl.int32), mask=exists)
        free += tl.sum(here.to(tl.int32), axis=0)
        host_free += tl.sum(there.to(tl.int32), axis=0)
        wanted -= tl.sum((ids != NO_PAGE).to(tl.int32), axis=0)
    return free, host_free, wanted


@partial(triton.jit, do_not_specialize=["num_entries", "num_pages", "num_host"])
def _return_pages_kernel(
    table_ptr,  # [N] int32, becomes NONE
    num_entries,  # N
    state_ptr,  # [NUM_WORDS] int32
    free_ptr,  # [P + Q] int32
    num_pages,  # P
    num_host,  # Q
    BLOCK: tl.constexpr,
):
    _lock(state_ptr)
    free, host_free, wanted = _put_back(
        table_ptr, num_entries, state_ptr, free_ptr, num_pages, num_host, BLOCK
    )
    tl.store(state_ptr + FREE, free)
    tl.store(state_ptr + HOST_FREE, host_free)
    tl.store(state_ptr + WANTED, wanted)
    _unlock(state_ptr)


@partial(triton.jit, do_not_specialize=["length", "num_entries", "num_pages", "num_host"])
def _take_pages_kernel(
    table_ptr,  # [N] int32: what it names is returned, what it gets is written
    num_rows_ptr,  # int32
    length,  # R
    num_entries,  # N
    state_ptr,  # [NUM_WORDS] int32
    report_ptr,  # [NUM_WORDS] int32
    free_ptr,  # [P + Q] int32
    num_pages,  # P
    num_host,  # Q
    PAGE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    need = (tl.minimum(tl.load(num_rows_ptr), length) + PAGE_ROWS - 1) // PAGE_ROWS
    _lock(state_ptr)
    head, host_head = _word(state_ptr, HEAD), _word(state_ptr, HOST_HEAD)
    most, missed = _word(state_ptr, MOST), _word(state_ptr, MISSED)
    free, host_free, wanted = _put_back(
        table_ptr, num_entries, state_ptr, free_ptr, num_pages, num_host, BLOCK
    )
    tl.debug_barrier()  # what came back may be taken
    num_here = tl.minimum(need, free)
    num_there = tl.minimum(need - num_here, host_free)
    for start in range(0, num_entries, BLOCK):
        entries = start + tl.arange(0, BLOCK)
        here = entries < num_here
        there = (entries >= num_here) & (entries < num_here + num_there)
        host_place = (host_head + entries - num_here) % tl.maximum(num_host, 1) + num_pages
        place = tl.where(here, (head + entries) % num_pages, host_place)
        ids = tl.load(free_ptr + place, mask=here | there, other=NO_ROOM, cache_modifier=".cg")
        ids = tl.where(entries < need, ids, NO_PAGE)
        tl.store(table_ptr + entries, ids, mask=entries < num_entries)
    wanted += need
    most = tl.maximum(most, wanted)
    lacking = need - num_here - num_there
    tl.store(state_ptr + HEAD, (head + num_here) % num_pages)
    tl.store(state_ptr + FREE, free - num_here)
    tl.store(state_ptr + HOST_HEAD, (host_head + num_there) % tl.maximum(num_host, 1))
    tl.store(state_ptr + HOST_FREE, host_free - num_there)
    tl.store(state_ptr + WANTED, wanted)
    tl.store(state_ptr + MOST, most)
    tl.store(state_ptr + MISSED, missed + lacking)
    if lacking > 0:
        tl.store(report_ptr + MOST, most)
        tl.store(report_ptr + MISSED, missed + lacking)
    _unlock(state_ptr)


def take_pages(table_N: Tensor, num_rows: Tensor, length: int, pool: PagePool) -> None:
    """Give a table the pages for some rows; what it names is returned first. No host sync.

    Args:
        table_N: of `PagePool.table(length)`.
        num_rows: 0-dim int32 on the device; more than the length count as that.
        length: R.
        pool: whose pages are taken.
    """
    if not use_kernel(table_N, num_rows):
        take_pages_ref(table_N, num_rows, length, pool)
    elif table_N.shape[0]:
        with on_device(table_N):
            _take_pages_kernel[(1,)](
                *(table_N, num_rows, length, table_N.shape[0]),
                *(pool.state, pool.report, pool.free_ids),
                *(pool.pages.shape[0], pool.host_pages.shape[0]),
                PAGE_ROWS=pool.page_rows,
                BLOCK=BLOCK_IDS,
            )


def return_pages(table_N: Tensor, pool: PagePool) -> None:
    """Put a table's pages at the tail of the free list; the table is empty then. No host sync."""
    if not use_kernel(table_N):
        return_pages_ref(table_N, pool)
    elif table_N.shape[0]:
        with on_device(table_N):
            _return_pages_kernel[(1,)](
                *(table_N, table_N.shape[0], pool.state, pool.free_ids),
                *(pool.pages.shape[0], pool.host_pages.shape[0]),
                BLOCK=BLOCK_IDS,
            )
