"""Pages: rows come back, a page has one owner, and what does not fit is counted.

The tests without a device run the references, whose protocol is that of a model in plain Python.
Kernels are compared with the same model.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from itertools import chain

import pytest
import torch
from torch import Tensor

from moecore.kernels.common import cdiv
from moecore.kernels.rows.free_list import (
    FREE_WORD,
    HEAD_WORD,
    HOST_FREE_WORD,
    HOST_HEAD_WORD,
    LOCK_WORD,
    MISSED_WORD,
    MISSING,
    MOST_WORD,
    NONE,
    WANTED_WORD,
    PagePool,
    return_pages,
    take_pages,
)
from moecore.kernels.rows.pages import list_rows, pop_rows, stash_rows


def make(num_pages: int, page_rows: int, row_bytes: int, device: str, host: int = 0) -> PagePool:
    where = torch.device(device)
    pool = PagePool.make(num_pages, page_rows, row_bytes, where, num_host_pages=host)
    pool.pages.fill_(255)
    return pool


def int32(value: int, device: str = "cpu") -> Tensor:
    return torch.tensor(value, dtype=torch.int32, device=device)


def free_ids(pool: PagePool) -> tuple[list[int], list[int]]:
    """The two free lists from head to tail."""
    P, Q = pool.pages.shape[0], pool.host_pages.shape[0]
    ids, state = pool.free_ids.tolist(), pool.state.tolist()
    here = [ids[(state[HEAD_WORD] + i) % P] for i in range(state[FREE_WORD])]
    there = [ids[P + (state[HOST_HEAD_WORD] + i) % Q] for i in range(state[HOST_FREE_WORD])]
    return here, there


def check_the_example(device: str) -> None:
    """That of `free_list`."""
    pool = make(4, 2, 4, device)
    first, second = pool.table(5), pool.table(5)
    take_pages(first, int32(3, device), 5, pool)
    assert first.tolist() == [0, 1, NONE] and free_ids(pool)[0] == [2, 3]
    assert pool.report.sum() == 0
    take_pages(second, int32(5, device), 5, pool)
    assert second.tolist() == [2, 3, MISSING] and free_ids(pool)[0] == []
    assert pool.report[MOST_WORD] == 5 and pool.report[MISSED_WORD] == 1
    return_pages(first, pool)
    assert first.tolist() == [NONE] * 3
    take_pages(first, int32(2, device), 5, pool)
    assert first.tolist() == [0, NONE, NONE]
    return_pages(second, pool)
    return_pages(second, pool)  # has nothing any more
    assert free_ids(pool)[0] == [1, 2, 3]
    assert pool.state[MOST_WORD] == 5 and pool.state[WANTED_WORD] == 1


def test_the_example() -> None:
    check_the_example("cpu")


def test_the_example_by_kernels(device: str) -> None:
    check_the_example(device)


def check_rounds(device: str, num_rounds: int, sizes: tuple[int, int, int, int]) -> None:
    """Stash, pop and return in any order, beside a model: FIFO lists, and who holds which page."""
    rng, (P, Q, R, step) = random.Random(0), sizes
    g = torch.Generator().manual_seed(0)
    pool = make(P, step, 8, device, host=Q)
    lists = deque(range(P)), deque(range(P, P + Q))
    tables = [pool.table(R) for _ in range(4)]
    held: list[list[int]] = [[], [], [], []]
    kept: list[tuple[Tensor, Tensor, Tensor | None]] = []
    rows, wanted, most, missed = {}, [0] * 4, 0, 0
    for _ in range(num_rounds):
        i = rng.randrange(4)
        for page in held[i]:
            lists[page >= P].append(page)
        held[i], wanted[i] = [], 0
        kept = [k for k in kept if k[0] is not tables[i]]
        rows.pop(i, None)
        if rng.random() < 0.3:
            return_pages(tables[i], pool)
            assert (tables[i] == NONE).all()
        else:
            x = torch.randint(0, 255, (R, 8), generator=g, dtype=torch.uint8).to(device)
            used = rng.choice([0, R, R + 3, rng.randrange(R + 1)])
            num_rows, order = int32(used, device), None
            if rng.random() < 0.5:
                places = torch.randint(-1, 2, (R,), generator=g, dtype=torch.int32).to(device)
                order, num_rows = list_rows(places)
                used = int(num_rows)
            need = cdiv(min(used, R), step)
            for _ in range(need):
                ring = lists[0] or lists[1]
                held[i].append(ring.popleft() if ring else MISSING)
            missed += held[i].count(MISSING)
            wanted[i] = need
            most = max(most, sum(wanted))
            stash_rows(x, tables[i], pool, num_rows, order)
            assert tables[i].tolist() == held[i] + [NONE] * (tables[i].shape[0] - need)
            held[i] = [page for page in held[i] if page != MISSING]
            rows[i] = x, num_rows, order
        assert free_ids(pool) == tuple(map(list, lists))
        everywhere = chain(*held, *lists)
        assert sorted(everywhere) == list(range(P + Q))
        state = pool.state.tolist()
        assert (state[MOST_WORD], state[MISSED_WORD]) == (most, missed) and not state[LOCK_WORD]
        assert state[WANTED_WORD] == sum(wanted)
        if rows:
            j = rng.choice(list(rows))
            check_rows(tables[j], pool, *rows[j])


def check_rows(
    table: Tensor, pool: PagePool, x: Tensor, num_rows: Tensor, order: Tensor | None
) -> None:
    """What has pages came back, what has none is NaN, and no other row is written."""
    back = torch.full_like(x, 7)
    pop_rows(back, table, pool, num_rows, order)
    used = min(int(num_rows), x.shape[0])
    places = torch.arange(x.shape[0], device=x.device)[:used] if order is None else order[:used]
    pages = table.repeat_interleave(pool.page_rows)[:used]
    want = torch.full_like(x, 7)
    want[places.long()] = torch.where(pages[:, None] >= 0, x[places.long()], 255)
    assert torch.equal(back, want)


def test_2000_rounds_follow_the_protocol() -> None:
    check_rounds("cpu", 1500, (9, 0, 11, 2))
    check_rounds("cpu", 500, (5, 4, 7, 1))


def test_rounds_by_kernels(device: str) -> None:
    check_rounds(device, 40, (5, 3, 11, 3))


@pytest.mark.parametrize(("page_rows", "row_bytes"), [(64, 64), (3, 5), (1, 8)])
def test_a_pool_may_be_full_to_the_last_page(page_rows: int, row_bytes: int) -> None:
    check_a_full_pool(page_rows, row_bytes, "cpu")


@pytest.mark.parametrize(("page_rows", "row_bytes"), [(64, 5000), (3, 5)])
def test_a_full_pool_by_kernels(page_rows: int, row_bytes: int, device: str) -> None:
    check_a_full_pool(page_rows, row_bytes, device)


def check_a_full_pool(page_rows: int, row_bytes: int, device: str) -> None:
    R = 3 * page_rows
    pool = make(3, page_rows, row_bytes, device)
    x = torch.randint(0, 255, (R, row_bytes), device=device, dtype=torch.uint8)
    table, none = pool.table(R), pool.table(R)
    stash_rows(x, none, pool, int32(0, device))
    stash_rows(x, table, pool, int32(R, device))
    assert pool.state[FREE_WORD] == 0 and pool.state[MISSED_WORD] == 0
    check_rows(table, pool, x, int32(R, device), None)
    stash_rows(x, none, pool, int32(1, device))
    assert none.tolist() == [MISSING, NONE, NONE] and pool.report[MOST_WORD] == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_found_no_page_is_nan(dtype: torch.dtype) -> None:
    pool = make(1, 2, 4 * dtype.itemsize, "cpu")
    x, table = torch.randn(4, 4).to(dtype), pool.table(4)
    back = torch.zeros_like(x)
    stash_rows(x.view(torch.uint8), table, pool, int32(3))
    pop_rows(back.view(torch.uint8), table, pool, int32(3))
    assert torch.equal(back[:2], x[:2]) and back[2].isnan().all() and not back[3].any()


def test_no_rows_at_all() -> None:
    pool = make(1, 2, 4, "cpu")
    x, table = torch.zeros(0, 4, dtype=torch.uint8), pool.table(0)
    stash_rows(x, table, pool, int32(0))
    pop_rows(x, table, pool, int32(0))
    return_pages(table, pool)
    assert free_ids(pool)[0] == [0]


def test_a_list_of_rows() -> None:
    places = torch.tensor([-1, 0, 7, -1, 1], dtype=torch.int32)
    order, num_rows = list_rows(places)
    assert order[:3].tolist() == [1, 2, 4] and num_rows == 3


@pytest.mark.parametrize("length", [1, 300, 5000])
def test_a_list_of_rows_by_kernels(length: int, device: str) -> None:
    places = torch.randint(-2, 3, (length,), dtype=torch.int32, device=device)
    order, num_rows = list_rows(places)
    assert torch.equal(order[: int(num_rows)].long(), (places >= 0).nonzero()[:, 0])


def test_addresses_past_2_to_the_31(device: str) -> None:
    """Of bytes, because the width is odd; memory that nobody touches costs nothing."""
    step, width = 64, 1001
    P = 2**31 // (step * width) + 2
    memory = torch.empty(P, step, width, dtype=torch.uint8, device=device)
    small = make(P, 1, 1, device)
    pool = replace(small, pages=memory)
    pool.state[HEAD_WORD] = P - 1
    x = torch.randint(0, 255, (70, width), device=device, dtype=torch.uint8)
    table = pool.table(70)
    stash_rows(x, table, pool, int32(70, device))
    assert table.tolist() == [P - 1, 0]
    check_rows(table, pool, x, int32(70, device), None)


@pytest.mark.gpu
def test_streams_may_take_and_return_at_the_same_time() -> None:
    """No page has two owners, and none is lost."""
    pool = make(400, 1, 16, "cuda", host=40)
    streams = [torch.cuda.Stream() for _ in range(4)]
    tables = [pool.table(100) for _ in streams]
    rows = [torch.full((100, 16), i, dtype=torch.uint8, device="cuda") for i in range(4)]
    used = [int32(n, "cuda") for n in (0, 1, 57, 99, 100)]
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in streams]
    torch.cuda.synchronize()
    for round_ in range(500):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                count = used[(round_ + i) % 5]
                stash_rows(rows[i], tables[i], pool, count)
                back = torch.full_like(rows[i], i)
                pop_rows(back, tables[i], pool, count)
                wrong[i] += (back != i).sum()
                if round_ % 3:
                    return_pages(tables[i], pool)
    torch.cuda.synchronize()
    for table in tables:
        return_pages(table, pool)
    here, there = free_ids(pool)
    assert not any(wrong) and sorted(here) == list(range(400))
    assert sorted(there) == list(range(400, 440))
    assert pool.state[MISSED_WORD] == 0 and pool.state[WANTED_WORD] == 0
