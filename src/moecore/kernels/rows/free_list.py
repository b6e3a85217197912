"""Pages of memory and the free lists of their ids, which kernels allocate on the device.

A page holds rows of any width, as many as fit. The free list is a circular buffer with a head and a
length. A second free list has the pages in host memory, whose ids begin at the number of device
pages. Host pages are taken when no device page is free. If no page is free at all, the entry
becomes MISSING, and the pool's report counts it.

Example, 4 pages: free list [0, 1, 2, 3]. A table that needs 2 takes [0, 1] and leaves [2, 3]; a
table that needs 3 gets [2, 3, MISSING]. The first table is returned: [0, 1]. A table that needs 1
takes [0], and the second table is returned: [1, 2, 3]. The peak demand is 5 pages.

Letters: P device pages, Q host pages, N entries of a table, which are its first words.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moecore.kernels.common import can_use_kernel, launch
from moecore.kernels.triton_api import tl, triton

BLOCK_IDS = 512  # entries of a table that a program takes at once: few, or predicates are spilled
NUM_WARPS = 8
NONE, MISSING = -1, -2  # entries of a table without a page: not needed, and none was free

# Words of a pool's state and report: FREE ids from HEAD on; DEMAND, the pages that all tables need
# now; PEAK of the demand; pages MISSED in all.
NUM_WORDS = 8
(
    LOCK_WORD, HEAD_WORD, FREE_WORD, HOST_HEAD_WORD,
    HOST_FREE_WORD, DEMAND_WORD, PEAK_WORD, MISSED_WORD,
) = range(NUM_WORDS)  # fmt: skip
LOCK, HEAD, FREE, HOST_HEAD, HOST_FREE, DEMAND, PEAK, MISSED = map(tl.constexpr, range(NUM_WORDS))
NO_PAGE, NO_ROOM = tl.constexpr(NONE), tl.constexpr(MISSING)


@dataclass(frozen=True, kw_only=True, slots=True)
class PagePool:
    """Fixed-size pages of device and host memory, and free lists that kernels update."""

    pages: Tensor  # uint8 [P, bytes of a page], uninitialised
    host_pages: Tensor  # uint8 [Q, bytes of a page] in host memory that the device can access
    free_ids: Tensor  # int32 [P + number of host pages], two circular buffers
    state: Tensor  # int32 [NUM_WORDS] on the device
    # int32 [NUM_WORDS] in host memory: PEAK and MISSED, written when a page was missed
    report: Tensor

    @classmethod
    def allocate(
        cls, num_pages: int, page_bytes: int, device: torch.device, *, num_host_pages: int = 0
    ) -> "PagePool":
        """Return a pool whose pages are all free. A CUDA graph must not capture this call.

        `num_pages` is at least 1, `page_bytes` a multiple of 16. Host pages are pinned for a GPU.
        """
        pinned, num_ids = device.type == "cuda", num_pages + num_host_pages
        state = torch.zeros(NUM_WORDS, dtype=torch.int32, device="cpu")
        state[FREE_WORD], state[HOST_FREE_WORD] = num_pages, num_host_pages
        host: Any = dict(device="cpu", pin_memory=pinned and num_host_pages > 0)
        host_pages = torch.empty(num_host_pages, page_bytes, dtype=torch.uint8, **host)
        return cls(
            pages=torch.empty(num_pages, page_bytes, dtype=torch.uint8, device=device),
            host_pages=host_pages,
            free_ids=torch.arange(num_ids, dtype=torch.int32, device=device),
            state=state.to(device),
            report=torch.zeros(NUM_WORDS, dtype=torch.int32, pin_memory=pinned, device="cpu"),
        )

    @property
    def page_bytes(self) -> int:
        """Size of one page in bytes."""
        return self.pages.shape[1]


def return_pages_ref(page_table: Tensor, num_entries: int, pool: PagePool) -> None:
    """Compute `return_pages` on the host."""
    P, state, ids_N = pool.pages.shape[0], pool.state, page_table[:num_entries]
    for page in ids_N.tolist():
        if page >= 0:
            first, size = (0, P) if page < P else (P, pool.host_pages.shape[0])
            head, free = (HEAD_WORD, FREE_WORD) if page < P else (HOST_HEAD_WORD, HOST_FREE_WORD)
            pool.free_ids[first + int(state[head] + state[free]) % size] = page
            state[free] += 1
        state[DEMAND_WORD] -= int(page != NONE)
    ids_N.fill_(NONE)


def take_pages_ref(page_table: Tensor, num_entries: int, num_pages: int, pool: PagePool) -> None:
    """Compute `take_pages` on the host: free the pages of a table, then write new page ids."""
    return_pages_ref(page_table, num_entries, pool)
    P, state = pool.pages.shape[0], pool.state
    rings = [(HEAD_WORD, FREE_WORD, 0, P)]
    rings += [(HOST_HEAD_WORD, HOST_FREE_WORD, P, pool.host_pages.shape[0])]
    page_ids: list[int] = []
    for head, free, first, size in rings:
        count = min(num_pages - len(page_ids), int(state[free]))
        places = (first + (int(state[head]) + i) % size for i in range(count))
        page_ids += [int(pool.free_ids[place]) for place in places]
        state[head] = (state[head] + count) % max(size, 1)
        state[free] -= count
    missed = num_pages - len(page_ids)
    page_table[:num_pages] = torch.tensor(
        page_ids + [MISSING] * missed, dtype=torch.int32, device=page_table.device
    )
    state[DEMAND_WORD] += num_pages
    state[PEAK_WORD] = state[PEAK_WORD].maximum(state[DEMAND_WORD])
    if missed:
        state[MISSED_WORD] += missed
        pool.report[PEAK_WORD:] = state[PEAK_WORD:]


@triton.jit
def _lock_free_lists(state_ptr):
    """Spin until this program has the lock of the free lists."""
    # One program at a time changes the lists. So streams, and replays of CUDA graphs beside eager
    # code, need no order: a page is in one table or in a list. A table is returned after the last
    # read of its pages.
    while tl.atomic_cas(state_ptr + LOCK, 0, 1, sem="acquire") != 0:
        pass
    tl.debug_barrier()


@triton.jit
def _unlock_free_lists(state_ptr):
    """Release the lock of the free lists, which this program has."""
    tl.debug_barrier()
    tl.atomic_xchg(state_ptr + LOCK, 0, sem="release")


@triton.jit
def _load_state_word(state_ptr, WORD: tl.constexpr):
    """Load a word of the pool's state past the L1 cache, because other programs write it."""
    return tl.load(state_ptr + WORD, cache_modifier=".cg")


@triton.jit
def _free_pages_locked(table_ptr, num_entries, pool, BLOCK: tl.constexpr):
    """Free a table's pages, with the lock; return free device and host pages, and the demand."""
    state_ptr, free_ptr, num_pages, num_host = pool
    head, free = _load_state_word(state_ptr, HEAD), _load_state_word(state_ptr, FREE)
    host_head, host_free = (
        _load_state_word(state_ptr, HOST_HEAD),
        _load_state_word(state_ptr, HOST_FREE),
    )
    demand = _load_state_word(state_ptr, DEMAND)
    tl.debug_barrier()  # all threads have read what one of them writes in the end
    for start in range(0, num_entries, BLOCK):
        entries = start + tl.arange(0, BLOCK)
        exists = entries < num_entries
        ids = tl.load(table_ptr + entries, mask=exists, other=NO_PAGE, cache_modifier=".cg")
        device_mask = (ids >= 0) & (ids < num_pages)
        host_mask = ids >= num_pages
        place = head + free + tl.cumsum(device_mask.to(tl.int32), axis=0) - 1
        tl.store(free_ptr + place % num_pages, ids, mask=device_mask)
        place = host_head + host_free + tl.cumsum(host_mask.to(tl.int32), axis=0) - 1
        tl.store(free_ptr + num_pages + place % tl.maximum(num_host, 1), ids, mask=host_mask)
        tl.store(table_ptr + entries, tl.full([BLOCK], NO_PAGE, tl.int32), mask=exists)
        free += tl.sum(device_mask.to(tl.int32), axis=0)
        host_free += tl.sum(host_mask.to(tl.int32), axis=0)
        demand -= tl.sum((ids != NO_PAGE).to(tl.int32), axis=0)
    return free, host_free, demand


@triton.jit
def free_pages(table_ptr, num_entries, pool, BLOCK: tl.constexpr):
    """Free the pages of a table, under the lock; only one program may call it.

    `pool` is (state, free ids, number of device pages, number of host pages).
    """
    state_ptr = pool[0]
    _lock_free_lists(state_ptr)
    free, host_free, demand = _free_pages_locked(table_ptr, num_entries, pool, BLOCK)
    tl.store(state_ptr + FREE, free)
    tl.store(state_ptr + HOST_FREE, host_free)
    tl.store(state_ptr + DEMAND, demand)
    _unlock_free_lists(state_ptr)


@triton.jit
def take_pages(table_ptr, num_entries, num_requested, pool, report_ptr, BLOCK: tl.constexpr):
    """Free a table's pages, then write free page ids to its first `num_requested` entries."""
    # A table keeps its entries from one replay to the next. Its pages are freed before others are
    # taken, so a replayed forward whose backward did not run loses no page.
    state_ptr, free_ptr, num_pages, num_host = pool
    _lock_free_lists(state_ptr)
    head, host_head = _load_state_word(state_ptr, HEAD), _load_state_word(state_ptr, HOST_HEAD)
    peak, missed = _load_state_word(state_ptr, PEAK), _load_state_word(state_ptr, MISSED)
    free, host_free, demand = _free_pages_locked(table_ptr, num_entries, pool, BLOCK)
    tl.debug_barrier()  # the freed pages may be taken
    device_count = tl.minimum(num_requested, free)
    host_count = tl.minimum(num_requested - device_count, host_free)
    for start in range(0, num_entries, BLOCK):
        entries = start + tl.arange(0, BLOCK)
        device_mask = entries < device_count
        host_mask = (entries >= device_count) & (entries < device_count + host_count)
        host_place = (host_head + entries - device_count) % tl.maximum(num_host, 1) + num_pages
        place = tl.where(device_mask, (head + entries) % num_pages, host_place)
        ids = tl.load(
            free_ptr + place, mask=device_mask | host_mask, other=NO_ROOM, cache_modifier=".cg"
        )
        ids = tl.where(entries < num_requested, ids, NO_PAGE)
        tl.store(table_ptr + entries, ids, mask=entries < num_entries)
    demand += num_requested
    peak = tl.maximum(peak, demand)
    lacking = num_requested - device_count - host_count
    tl.store(state_ptr + HEAD, (head + device_count) % num_pages)
    tl.store(state_ptr + FREE, free - device_count)
    tl.store(state_ptr + HOST_HEAD, (host_head + host_count) % tl.maximum(num_host, 1))
    tl.store(state_ptr + HOST_FREE, host_free - host_count)
    tl.store(state_ptr + DEMAND, demand)
    tl.store(state_ptr + PEAK, peak)
    tl.store(state_ptr + MISSED, missed + lacking)
    if lacking > 0:
        tl.store(report_ptr + PEAK, peak)
        tl.store(report_ptr + MISSED, missed + lacking)
    _unlock_free_lists(state_ptr)


@triton.jit(do_not_specialize=["num_entries", "num_pages", "num_host_pages"])
def _return_pages_kernel(
    table_ptr, num_entries, state_ptr, free_ids_ptr, num_pages, num_host_pages, BLOCK: tl.constexpr
):
    """Free a table's pages, in one program."""
    free_pages(table_ptr, num_entries, (state_ptr, free_ids_ptr, num_pages, num_host_pages), BLOCK)


def return_pages(page_table: Tensor, num_entries: int, pool: PagePool) -> None:
    """Free the first num_entries pages of a table, whose entries become NONE. No host sync."""
    if not can_use_kernel(page_table):
        return_pages_ref(page_table, num_entries, pool)
    elif num_entries:
        sizes = (pool.pages.shape[0], pool.host_pages.shape[0])
        args = (page_table, num_entries, pool.state, pool.free_ids, *sizes)
        launch(_return_pages_kernel, 1, *args, BLOCK=BLOCK_IDS, num_warps=NUM_WARPS)
