from functools import cache
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moecore.base.options.names import ScheduleName
from moecore.parallel import Costs, offload_fractions
from moecore.parallel.pipeline.offload import find_next_backwards, list_last_block_offloads
from moecore.parallel.pipeline.orders import Action, Overlap, list_actions
from moecore.parallel.pipeline.schedule import Schedule, make_schedule
from moecore.parallel.pipeline.timeline import simulate

Spans = list[tuple[float, float]]


def waiting(schedule: Schedule, costs: Costs, copies: list[float]) -> Spans:
    """Return start and end of every item, of which each waits for the copies that it needs.

    Args:
        copies: how long what a micro-batch leaves on each stage takes out, or back.
    """
    place = {
        (a.kind, a.stage, a.micro_batch): (rank, at)
        for rank, order in enumerate(schedule.orders)
        for at, item in enumerate(order)
        for a in list_actions(item)
    }
    alone = simulate(schedule, costs)
    lasts = [[span.end - span.start for span in spans] for spans in alone.spans]

    def of_kind(rank: int, at: int, kinds: str) -> Action | None:
        if at < 0:
            return None
        found = [a for a in list_actions(schedule.orders[rank][at]) if a.kind in kinds]
        return found[0] if found else None

    def backward(stage: int, micro_batch: int) -> tuple[int, int]:
        return place.get(("B", stage, micro_batch)) or place["D", stage, micro_batch]

    @cache
    def out(rank: int, at: int) -> float:
        """When the last copy out of forwards up to an item has ended."""
        if at < 0:
            return 0.0
        forward = of_kind(rank, at, "F")
        if forward is None:
            return out(rank, at - 1)
        return max(out(rank, at - 1), end(rank, at)) + copies[forward.stage]

    @cache
    def free(rank: int, at: int) -> float:
        """When a rank is done with all before an item, and that has its memory."""
        before = end(rank, at - 1) if at else 0.0
        leaves = of_kind(rank, at - 2, "F")
        return before if leaves is None else max(before, out(rank, at - 2))

    @cache
    def start(rank: int, at: int) -> float:
        starts = [free(rank, at)]
        for kind, stage, micro_batch in list_actions(schedule.orders[rank][at]):
            sources = []
            if kind == "F" and stage:
                sources = [place["F", stage - 1, micro_batch]]
            if kind in "BD":
                starts.append(out(rank, place["F", stage, micro_batch][1]))
                if stage + 1 < schedule.num_stages:
                    sources = [backward(stage + 1, micro_batch)]
            for source in sources:
                starts.append(end(*source) + costs.transfer * (source[0] != rank))
        return max(starts)

    @cache
    def end(rank: int, at: int) -> float:
        found = [of_kind(rank, at, kinds) for kinds in ("F", "BD")]
        own = [copies[action.stage] for action in found if action]
        return start(rank, at) + max(lasts[rank][at], *own, 0.0)

    places = [(r, at) for r, order in enumerate(schedule.orders) for at in range(len(order))]
    return [(start(*each), end(*each)) for each in places]


def late(schedule: Schedule, costs: Costs, copies: list[float]) -> float:
    """Return by how much the worst item is later than without offload."""
    found = waiting(schedule, costs, copies)
    alone = [(s.start, s.end) for spans in simulate(schedule, costs).spans for s in spans]
    return max(max(a - c, b - d) for (a, b), (c, d) in zip(found, alone, strict=True))


def check(schedule: Schedule, costs: Costs, sizes: list[int]) -> None:
    """Assert that no item waits, and that with more of any stage one does."""
    fractions = offload_fractions(schedule, costs, sizes, bytes_per_second=1000.0)
    copies = [f * size / 1000 for f, size in zip(fractions, sizes, strict=True)]
    assert len(fractions) == schedule.num_stages and all(0 <= f <= 1 for f in fractions)
    soon = {
        a.stage
        for order in schedule.orders
        for item, ahead in zip(order, find_next_backwards(order), strict=True)
        for a in list_actions(item)
        if ahead is not None and a.kind == "F" and a[1:] == ahead[1:]
    }
    assert not any(fractions[stage] for stage in soon) and late(schedule, costs, copies) < 1e-9
    for stage, fraction in enumerate(fractions):
        if fraction < 1 and stage not in soon:
            more = [c + 1e-4 * (i == stage) for i, c in enumerate(copies)]
            assert late(schedule, costs, more) > 1e-9, stage


TIMES = st.floats(0.1, 4.0)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(get_args(ScheduleName)), st.integers(1, 4), st.integers(1, 7))
def test_no_item_waits_and_with_more_one_does(data: Any, name: Any, pp: int, number: int) -> None:
    chunks = {"1f1b": 1, "zero-bubble": 1, "zbv": 2, "dualpipe-v": 2}.get(name)
    chunks = chunks or data.draw(st.integers(1, 3))
    schedule = make_schedule(name, pp=pp, chunks=chunks, num_micro_batches=number)
    stages = schedule.num_stages
    times = st.tuples(*[TIMES] * stages)
    costs = Costs(
        forward=data.draw(times),
        backward_inputs=data.draw(times),
        backward_weights=data.draw(times),
        transfer=data.draw(st.floats(0, 0.5)),
    )
    sizes = data.draw(st.lists(st.integers(1, 4000), min_size=stages, max_size=stages))
    check(schedule, costs, sizes)


# Costs with which the engine is busy still when it is asked for the next copy, or a backward has to
# wait for the way out: without these rules the fractions would be larger.
BUSY: dict[str, tuple[Schedule, Costs, list[int]]] = {
    "out": (
        make_schedule("gpipe", pp=2, chunks=3, num_micro_batches=1),
        Costs(
            forward=(4.0, 0.1, 1.0, 3.0, 0.1, 0.1),
            backward_inputs=(0.1, 5.0, 0.1, 3.0, 0.1, 0.1),
            backward_weights=(0.1,) * 6,
        ),
        [4000, 1, 1000, 1, 1, 1],
    ),
    "out and back": (
        make_schedule("interleaved", pp=2, chunks=2, num_micro_batches=2),
        Costs(
            forward=(1.0, 1.0, 1.0, 0.5),
            backward_inputs=(1.0, 4.0, 4.0, 0.1),
            backward_weights=(0.1, 0.5, 1.0, 0.5),
        ),
        [100, 4000, 1000, 1000],
    ),
}


@pytest.mark.parametrize("name", BUSY)
def test_copies_wait_for_each_other(name: str) -> None:
    check(*BUSY[name])


def test_what_they_are_of_equal_stages() -> None:
    """A turn of 1F1B copies beside a forward; the last stage's backward follows at once."""
    schedule = make_schedule("1f1b", pp=4, chunks=1, num_micro_batches=8)
    costs = Costs.from_forward((1.0,) * 4)
    found = offload_fractions(schedule, costs, [4000] * 4, bytes_per_second=1000)
    assert found == pytest.approx((0.25, 0.25, 0.25, 0.0))
    found = offload_fractions(schedule, costs, [500, 1000, 0, 10], bytes_per_second=1000)
    assert found == pytest.approx((1, 1, 1, 0))


def test_items_that_look_ahead() -> None:
    F, B, D, W = (
        [Action(kind, 0, i) for i in range(4)]  # type: ignore[arg-type]
        for kind in "FBDW"
    )
    assert find_next_backwards([F[0], D[0], W[0], D[1]]) == [D[0], D[1], D[1], None]
    assert find_next_backwards([F[0], Overlap(F[1], B[0])]) == [B[0], None]
    # F0 is out with the next item and asked for with the item before B0: one is between.
    assert list_last_block_offloads([F[0], F[1], F[2], F[3], B[0]])[0]
    assert not list_last_block_offloads([F[0], F[1], F[2], B[0]])[0]
    assert not list_last_block_offloads([F[0], D[1], W[1], D[0]])[0]


def test_sizes_of_other_stages() -> None:
    schedule = make_schedule("1f1b", pp=2, chunks=1, num_micro_batches=2)
    with pytest.raises(ValueError, match=r"^sizes \(1 stages\) must have bytes per stage .*\(2\)"):
        offload_fractions(schedule, Costs.from_forward((1.0, 1.0)), [1], bytes_per_second=1.0)
