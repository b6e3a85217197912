"""Pages: rows come back, a page has one owner, and what does not fit is counted.

The tests without a device run the references, whose protocol is that of a model in plain Python.
Kernels are compared with the same model.
"""

import random
from collections import deque
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from moecore.kernels.common import cdiv
from moecore.kernels.rows import free_list as fl
from moecore.kernels.rows.pages import PageLayout, stash_or_restore_rows, take_pages_for_rows

STEP_BYTES = 16


def make(num_pages: int, page_bytes: int, device: str, host: int = 0) -> fl.PagePool:
    pool = fl.PagePool.allocate(num_pages, page_bytes, torch.device(device), num_host_pages=host)
    pool.pages.fill_(255)
    return pool


def first_rows(pool: fl.PagePool, width: int, length: int) -> PageLayout:
    """One matrix, the first so many of whose rows are in use."""
    return PageLayout.from_matrices(pool, [(width, False)], 0, length)


def int32(value: int, device: str = "cpu") -> Tensor:
    return torch.tensor(value, dtype=torch.int32, device=device)


def random_rows(length: int, width: int, device: str) -> Tensor:
    return torch.randint(0, 255, (length, width), dtype=torch.uint8).to(device)


def free_ids(pool: fl.PagePool) -> tuple[list[int], list[int]]:
    """The two free lists from head to tail."""
    P, Q = pool.pages.shape[0], pool.host_pages.shape[0]
    ids, state = pool.free_ids.tolist(), pool.state.tolist()
    here = [ids[(state[fl.HEAD_WORD] + i) % P] for i in range(state[fl.FREE_WORD])]
    there = [ids[P + (state[fl.HOST_HEAD_WORD] + i) % Q] for i in range(state[fl.HOST_FREE_WORD])]
    return here, there


def check_the_example(device: str) -> None:
    """That of `free_list`, with pages of 2 rows."""
    pool = make(4, STEP_BYTES, device)
    layout = first_rows(pool, STEP_BYTES // 2, 5)
    first, second = layout.make_table(), layout.make_table()
    take_pages_for_rows(first, layout, None, int32(3, device))
    assert first[:3].tolist() == [0, 1, fl.NONE] and free_ids(pool)[0] == [2, 3]
    assert pool.report.sum() == 0
    take_pages_for_rows(second, layout, None, int32(5, device))
    assert second[:3].tolist() == [2, 3, fl.MISSING] and free_ids(pool)[0] == []
    assert pool.report[fl.PEAK_WORD] == 5 and pool.report[fl.MISSED_WORD] == 1
    fl.return_pages(first, 3, pool)
    assert first[:3].tolist() == [fl.NONE] * 3
    take_pages_for_rows(first, layout, None, int32(2, device))
    assert first[:3].tolist() == [0, fl.NONE, fl.NONE]
    stash_or_restore_rows([None], first, layout, stash=False, released_table=(second, 3))
    fl.return_pages(second, 3, pool)  # has nothing any more
    assert free_ids(pool)[0] == [1, 2, 3]
    assert pool.state[fl.PEAK_WORD] == 5 and pool.state[fl.DEMAND_WORD] == 1


def test_the_example() -> None:
    check_the_example("cpu")


def test_the_example_by_kernels(device: str) -> None:
    check_the_example(device)


@dataclass(frozen=True)
class Held:
    """What a table of the model has: pages by matrix, and what lies in them."""

    pages: list[list[int]]
    matrices: list[Tensor]
    used: list[Tensor]  # row ids, of each matrix


def used_rows(layout: PageLayout, slots: Tensor | None, num_rows: Tensor | None) -> list[Tensor]:
    found = []
    for listed in layout.has_list:
        if listed:
            found.append((slots.amax(1) >= 0).nonzero()[:, 0])
        else:
            assert num_rows is not None
            found.append(torch.arange(min(int(num_rows), layout.expert_rows)))
    return found


def check_rounds(device: str, num_rounds: int, P: int, Q: int, layout_of: Any) -> None:
    """Stash, pop and return in any order, beside a model: FIFO lists, and who holds which page."""
    rng = random.Random(0)
    torch.manual_seed(0)
    pool = make(P, 48, device, host=Q)
    layout: PageLayout = layout_of(pool)
    lengths = [layout.source_rows if n else layout.expert_rows for n in layout.has_list]
    lists = deque(range(P)), deque(range(P, P + Q))
    tables, N = [layout.make_table() for _ in range(4)], layout.num_entries
    held: dict[int, Held] = {}
    most = missed = 0
    for _ in range(num_rounds):
        i = rng.randrange(4)
        gone = held.pop(i, None)
        for page in chain(*gone.pages) if gone is not None else ():
            if page != fl.MISSING:
                lists[page >= P].append(page)
        if rng.random() < 0.3:
            j = rng.choice(list(held)) if held and rng.random() < 0.5 else None
            if j is None:
                fl.return_pages(tables[i], N, pool)
            else:  # with a copy of another table
                check_rows(tables[j], layout, held[j], over=(tables[i], N))
            assert (tables[i][:N] == fl.NONE).all()
        else:
            slots = num_rows = None
            if any(layout.has_list):
                slots = torch.randint(-5, 2, (layout.source_rows, 3), dtype=torch.int32)
                slots = slots.to(device)
            if not all(layout.has_list):
                R = layout.expert_rows
                num_rows = int32(rng.choice([0, R, R + 3, rng.randrange(R + 1)]), device)
            used = used_rows(layout, slots, num_rows)
            pages: list[list[int]] = []
            for rows, width in zip(used, layout.widths, strict=True):
                need = cdiv(len(rows), pool.page_bytes // width)
                rings = (lists[0] or lists[1] for _ in range(need))
                pages.append([ring.popleft() if ring else fl.MISSING for ring in rings])
            matrices = [
                random_rows(n, width, device)
                for n, width in zip(lengths, layout.widths, strict=True)
            ]
            held[i] = Held(pages, matrices, used)
            missed += list(chain(*pages)).count(fl.MISSING)
            take_pages_for_rows(tables[i], layout, slots, num_rows)
            stash_or_restore_rows(matrices, tables[i], layout, stash=True)
            taken = list(chain(*pages))
            assert tables[i][:N].tolist() == taken + [fl.NONE] * (N - len(taken))
        assert free_ids(pool) == tuple(map(list, lists))
        everywhere = list(chain(*(chain(*one.pages) for one in held.values())))
        wanted = len(everywhere)
        most = max(most, wanted)
        everywhere = [page for page in everywhere if page != fl.MISSING]
        assert sorted(chain(everywhere, *lists)) == list(range(P + Q))
        state = pool.state.tolist()
        assert (state[fl.PEAK_WORD], state[fl.MISSED_WORD]) == (most, missed)
        assert not state[fl.LOCK_WORD]
        assert state[fl.DEMAND_WORD] == wanted
        if held:
            j = rng.choice(list(held))
            skipped = rng.choice([None, *range(len(layout.widths))])
            check_rows(tables[j], layout, held[j], skipped=skipped)
    assert missed or num_rounds < 100, "the pool was never too small"


def check_rows(table, layout, held, *, skipped=None, over=None) -> None:
    """What has pages came back, what has none is NaN, and no other row is written."""
    back = [torch.full_like(x, 7) for x in held.matrices]
    given = [None if m == skipped else x for m, x in enumerate(back)]
    stash_or_restore_rows(given, table, layout, stash=False, released_table=over)
    for m, (x, rows, pages) in enumerate(zip(held.matrices, held.used, held.pages, strict=True)):
        want = torch.full_like(x, 7)
        step = layout.pool.page_bytes // layout.widths[m]
        of_row = torch.tensor(pages, dtype=torch.int64, device=x.device).repeat_interleave(step)
        has_page = of_row[: len(rows), None] >= 0
        if m != skipped:
            want[rows] = torch.where(has_page, x[rows], 255)
        assert torch.equal(back[m], want), m


LAYOUTS: dict[str, Any] = {
    "first rows": lambda pool: first_rows(pool, 24, 11),
    "a row fills a page": lambda pool: first_rows(pool, 48, 5),
    "a list": lambda pool: PageLayout.from_matrices(pool, [(16, True)], 9, 0),
    "X and H": lambda pool: PageLayout.from_matrices(pool, [(20, True), (16, False)], 9, 5),
    "values and scales": lambda pool: PageLayout.from_matrices(
        pool, [(8, True), (5, True), (16, False), (4, False)], 9, 14
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_rounds_follow_the_protocol(name: str) -> None:
    check_rounds("cpu", 250, 9, 0, LAYOUTS[name])
    check_rounds("cpu", 150, 5, 4, LAYOUTS[name])


@pytest.mark.parametrize("name", LAYOUTS)
def test_rounds_by_kernels(name: str, device: str) -> None:
    check_rounds(device, 16, 5, 3, LAYOUTS[name])


@pytest.mark.parametrize(("page_rows", "width"), [(64, 64), (4, 12), (1, 16)])
def test_a_pool_may_be_full_to_the_last_page(page_rows: int, width: int) -> None:
    check_a_full_pool(page_rows, width, "cpu")


@pytest.mark.parametrize(("page_rows", "width"), [(64, 5000), (16, 5)])
def test_a_full_pool_by_kernels(page_rows: int, width: int, device: str) -> None:
    check_a_full_pool(page_rows, width, device)


def check_a_full_pool(page_rows: int, width: int, device: str) -> None:
    R = 3 * page_rows
    pool = make(3, page_rows * width, device)
    layout = first_rows(pool, width, R)
    x, table, none = random_rows(R, width, device), layout.make_table(), layout.make_table()
    take_pages_for_rows(none, layout, None, int32(0, device))
    take_pages_for_rows(table, layout, None, int32(R, device))
    stash_or_restore_rows([x], table, layout, stash=True)
    assert pool.state[fl.FREE_WORD] == 0 and pool.state[fl.MISSED_WORD] == 0
    check_rows(table, layout, Held([[0, 1, 2]], [x], [torch.arange(R)]))
    take_pages_for_rows(none, layout, None, int32(1, device))
    assert none[:3].tolist() == [fl.MISSING, fl.NONE, fl.NONE] and pool.report[fl.PEAK_WORD] == 4


def test_no_rows_at_all() -> None:
    pool = make(1, 16, "cpu")
    layout = first_rows(pool, 4, 0)
    x, table = torch.zeros(0, 4, dtype=torch.uint8), layout.make_table()
    take_pages_for_rows(table, layout, None, int32(0))
    stash_or_restore_rows([x], table, layout, stash=True)
    stash_or_restore_rows([x], table, layout, stash=False)
    fl.return_pages(table, layout.num_entries, pool)
    assert free_ids(pool)[0] == [0]


@pytest.mark.parametrize(("S", "K"), [(5, 1), (300, 6), (5000, 8)])
def test_a_list_of_rows_by_kernels(S: int, K: int, device: str) -> None:
    pool = make(1, 16, device)
    layout = PageLayout.from_matrices(pool, [(16, True)], S, 0)
    slots, table = torch.full((S, K), -1, dtype=torch.int32, device=device), layout.make_table()
    slots[torch.arange(S) % 3 == 1, K - 1] = 0
    slots[S - 1, 0] = 7
    take_pages_for_rows(table, layout, slots, None)
    want = (slots.amax(1) >= 0).nonzero()[:, 0]
    found = table[layout.num_entries :].tolist()
    assert found[:2] == [len(want), fl.NONE] and found[2:][: len(want)] == want.tolist()


def test_addresses_past_2_to_the_31(device: str) -> None:
    """Of bytes, because the width is odd; memory that nobody touches costs nothing."""
    step, width = 64, 1001
    P = 2**31 // (step * width) + 2
    memory = torch.empty(P, step * width, dtype=torch.uint8, device=device)
    small = make(P, 1, device)
    pool = replace(small, pages=memory)
    pool.state[fl.HEAD_WORD] = P - 1
    layout = first_rows(pool, width, 70)
    x, table = random_rows(70, width, device), layout.make_table()
    take_pages_for_rows(table, layout, None, int32(70, device))
    stash_or_restore_rows([x], table, layout, stash=True)
    assert table[:2].tolist() == [P - 1, 0]
    check_rows(table, layout, Held([[P - 1, 0]], [x], [torch.arange(70)]))


@pytest.mark.gpu
def test_streams_may_take_and_return_at_the_same_time() -> None:
    """No page has two owners, and none is lost."""
    pool = make(700, 16, "cuda", host=100)
    layout = first_rows(pool, 16, 100)
    streams = [torch.cuda.Stream() for _ in range(4)]
    tables = [layout.make_table() for _ in range(8)]
    rows = [torch.full((100, 16), i, dtype=torch.uint8, device="cuda") for i in range(4)]
    used = [int32(n, "cuda") for n in (0, 1, 57, 99, 100)]
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in streams]
    torch.cuda.synchronize()
    for round_ in range(500):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                table, other = tables[i + round_ % 2 * 4], tables[i + (round_ + 1) % 2 * 4]
                take_pages_for_rows(table, layout, None, used[(round_ + i) % 5])
                stash_or_restore_rows([rows[i]], table, layout, stash=True)
                back = torch.full_like(rows[i], i)
                stash_or_restore_rows(
                    [back], table, layout, stash=False, released_table=(other, layout.num_entries)
                )
                wrong[i] += (back != i).sum()
                if round_ % 3:
                    fl.return_pages(table, layout.num_entries, pool)
    torch.cuda.synchronize()
    for table in tables:
        fl.return_pages(table, layout.num_entries, pool)
    here, there = free_ids(pool)
    assert not any(wrong) and sorted(here) == list(range(700))
    assert sorted(there) == list(range(700, 800))
    assert pool.state[fl.MISSED_WORD] == 0 and pool.state[fl.DEMAND_WORD] == 0
