"""Steps of pipelines, simulated: exact against cases that are computed by hand."""

from __future__ import annotations

import pytest

from moecore.parallel import Action, Overlap, Timeline, make_schedule
from moecore.parallel.pipeline.orders import Item, list_actions
from moecore.parallel.pipeline.timeline import compute_spans

SECONDS = {"F": 1.0, "B": 2.0, "D": 1.0, "W": 1.0}


def seconds_of(item: Item) -> float:
    return sum(SECONDS[action.kind] for action in list_actions(item))


def bubble_shares(timeline: Timeline) -> list[float]:
    """Return the share of the step in which each rank runs nothing."""
    return [1 - busy / timeline.makespan for busy in timeline.busy]


def step(
    name: str, *, pp: int, chunks: int = 1, micro_batches: int, send_seconds: float = 0.0
) -> Timeline:
    schedule = make_schedule(name, pp=pp, chunks=chunks, num_micro_batches=micro_batches)  # type: ignore[arg-type]
    return Timeline(spans=compute_spans(schedule, seconds_of, send_seconds))


@pytest.mark.parametrize(("pp", "micro_batches"), [(1, 3), (2, 2), (4, 8), (8, 32), (3, 7)])
def test_bubble_of_1f1b(pp: int, micro_batches: int) -> None:
    for name in ("1f1b", "gpipe"):
        timeline = step(name, pp=pp, micro_batches=micro_batches)
        assert timeline.makespan == 3 * (micro_batches + pp - 1)
        share = (pp - 1) / (micro_batches + pp - 1)
        assert bubble_shares(timeline) == pytest.approx([share] * pp, abs=1e-12)


@pytest.mark.parametrize(("pp", "chunks", "micro_batches"), [(4, 2, 8), (8, 2, 32), (2, 4, 6)])
def test_bubble_of_interleaved(pp: int, chunks: int, micro_batches: int) -> None:
    timeline = step("interleaved", pp=pp, chunks=chunks, micro_batches=micro_batches)
    busy = 3 * micro_batches * chunks
    assert timeline.busy == (busy,) * pp
    assert timeline.makespan / busy - 1 == pytest.approx((pp - 1) / (chunks * micro_batches))


@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 4), (4, 8), (8, 32)])
def test_bubble_of_zero_bubble(pp: int, micro_batches: int) -> None:
    # ZB-H1: each rank waits for (pp - 1) (F + D - W) in place of (pp - 1) (F + D + W).
    timeline = step("zero-bubble", pp=pp, micro_batches=micro_batches)
    assert timeline.makespan == 3 * micro_batches + (pp - 1)


def test_two_ranks_by_hand() -> None:
    # rank 0:  F0 F1 ........ B0      B1          a message takes 0.5
    # rank 1:     F0 B0    F1 B1
    timeline = step("1f1b", pp=2, micro_batches=2, send_seconds=0.5)
    found = [[(str(s.item.kind), s.item.micro_batch, s.start, s.end) for s in spans]  # type: ignore[union-attr]
             for spans in timeline.spans]  # fmt: skip
    assert found == [
        [("F", 0, 0.0, 1.0), ("F", 1, 1.0, 2.0), ("B", 0, 5.0, 7.0), ("B", 1, 8.0, 10.0)],
        [("F", 0, 1.5, 2.5), ("B", 0, 2.5, 4.5), ("F", 1, 4.5, 5.5), ("B", 1, 5.5, 7.5)],
    ]
    assert bubble_shares(timeline) == pytest.approx([0.4, 0.4])


def test_each_action_has_its_own_time() -> None:
    schedule = make_schedule("1f1b", pp=1, chunks=1, num_micro_batches=3)
    seconds = lambda item: 1.0 + list_actions(item)[0].micro_batch  # noqa: E731
    timeline = Timeline(spans=compute_spans(schedule, seconds, 0.0))
    assert timeline.makespan == 2 * (1 + 2 + 3)


def test_a_pair_takes_what_it_is_said_to_take() -> None:
    schedule = make_schedule("overlapped", pp=1, chunks=1, num_micro_batches=3)
    seen = []

    def seconds(item: Item) -> float:
        seen.append(item)
        return 2.5 if isinstance(item, Overlap) else seconds_of(item)

    # F0, (F1, B0), (F2, B1), B2
    assert Timeline(spans=compute_spans(schedule, seconds, 0.0)).makespan == 1 + 2.5 + 2.5 + 2
    assert seen[1] == Overlap(Action("F", 0, 1), Action("B", 0, 0))
