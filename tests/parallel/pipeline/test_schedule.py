from collections import defaultdict
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from moecore.base.options.names import ScheduleName
from moecore.parallel.pipeline.orders import (
    DEFERRING,
    PAIRING,
    RULES,
    Action,
    Item,
    Overlap,
    list_actions,
)
from moecore.parallel.pipeline.schedule import Schedule, make_schedule
from moecore.parallel.pipeline.timeline import Costs, simulate

ONLY = {"1f1b": 1, "zero-bubble": 1, "zbv": 2, "dualpipe-v": 2}  # chunks
KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "D", "BACKWARD_WEIGHT": "W"}


def text_of(schedule: Schedule) -> list[str]:
    """Return the orders as text: F0.2 is the forward of stage 0 and micro-batch 2."""

    def name(item: Item) -> str:
        return "&".join(f"{a.kind}{a.stage}.{a.micro_batch}" for a in list_actions(item))

    return [" ".join(map(name, order)) for order in schedule.orders]


@pytest.mark.parametrize(
    ("name", "chunks", "orders"),
    [
        ("gpipe", 1, ["F0.0 F0.1 F0.2 B0.0 B0.1 B0.2", "F1.0 F1.1 F1.2 B1.0 B1.1 B1.2"]),
        ("1f1b", 1, ["F0.0 F0.1 B0.0 F0.2 B0.1 B0.2", "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2"]),
        (
            "zero-bubble",
            1,
            [
                "F0.0 F0.1 D0.0 W0.0 F0.2 D0.1 W0.1 D0.2 W0.2",
                "F1.0 D1.0 F1.1 D1.1 W1.0 F1.2 D1.2 W1.1 W1.2",
            ],
        ),
        ("overlapped", 1, ["F0.0 F0.1 F0.2 B0.0 B0.1 B0.2", "F1.0 F1.1&B1.0 F1.2&B1.1 B1.2"]),
    ],
)
def test_orders_by_hand(name: Any, chunks: int, orders: list[str]) -> None:
    assert text_of(make_schedule(name, pp=2, chunks=chunks, num_micro_batches=3)) == orders


def messages(schedule: Schedule) -> list[dict[Any, list[Any]]]:
    """Return the passes whose results travel, by (from, to, "F" or "B"), as sent and as needed.

    Equal lists: a channel per direction and kind hands over messages in the order of their use.
    """
    found: list[dict[Any, list[Any]]] = [defaultdict(list), defaultdict(list)]
    for action in (a for order in schedule.orders for item in order for a in list_actions(item)):
        kind, step = ("F", 1) if action.kind == "F" else ("B", -1)
        for way, (source, target) in enumerate(
            [(action.stage, action.stage + step), (action.stage - step, action.stage)]
        ):
            if action.kind != "W" and {source, target} <= set(range(schedule.num_stages)):
                ranks = schedule.rank_of[source], schedule.rank_of[target]
                if ranks[0] != ranks[1]:
                    found[way][(*ranks, kind)].append((source, action.micro_batch))
    return found


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(get_args(ScheduleName)),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 20),
)
def test_any_sizes(name: Any, pp: int, chunks: int, num_micro_batches: int) -> None:
    sizes = dict(pp=pp, chunks=chunks, num_micro_batches=num_micro_batches)
    if ONLY.get(name, chunks) != chunks:
        message = (
            rf"^chunks \({chunks}\) must be {ONLY[name]} for schedule '{name}': pass {ONLY[name]}"
        )
        with pytest.raises(ValueError, match=message):
            make_schedule(name, **sizes)
        return
    schedule = make_schedule(name, **sizes)
    schedule.check()
    sent, needed = messages(schedule)
    assert sent == needed
    ones = [1] * schedule.num_stages
    assert max(schedule.compute_peak_live(ones)) <= chunks * num_micro_batches
    if name in ("1f1b", "zero-bubble"):
        assert max(schedule.compute_peak_live(ones)) == min(pp, num_micro_batches)
    if name in ("zbv", "dualpipe-v"):
        assert max(schedule.compute_peak_live(ones)) <= 2 * pp + (name == "dualpipe-v")
    if name == "interleaved" and num_micro_batches % pp == 0:
        most = (chunks - 1) * pp + (2 * pp - 1 if chunks > 1 else pp)
        assert max(schedule.compute_peak_live(ones)) == min(most, chunks * num_micro_batches)


@pytest.mark.parametrize("name", ["overlapped", "dualpipe-v"])
def test_the_two_of_an_overlap_do_not_need_each_other(name: Any) -> None:
    """`check` refuses such a pair: both must be ready when it starts. Most turns are pairs."""
    schedule = make_schedule(name, pp=4, chunks=2, num_micro_batches=16)
    schedule.check()
    for order in schedule.orders:
        pairs = [item for item in order if isinstance(item, Overlap)]
        assert all(pair.forward.kind == "F" and pair.backward.kind == "B" for pair in pairs)
        assert len(pairs) >= 2 * 16 - (2 * 4 + 4)  # all turns but warm-up's and those before
    dependent = Overlap(Action("F", 0, 0), Action("B", 0, 0))
    alone = Schedule(
        name="x", pp=1, num_stages=1, num_micro_batches=1, rank_of=(0,), orders=((dependent,),)
    )
    with pytest.raises(ValueError, match="rank 0 never runs Overlap"):
        alone.check()


def changed(change: str) -> Schedule:
    """Return a schedule of two ranks with one error."""
    schedule = make_schedule("zero-bubble", pp=2, chunks=1, num_micro_batches=2)
    first, second = map(list, schedule.orders)
    if change == "twice":
        first.append(first[0])
    if change == "missing":
        second.pop()
    if change == "elsewhere":
        first.append(second.pop())
    if change == "swapped":
        first[0], first[2] = first[2], first[0]
    if change == "waits":
        first = [*first[2:], *first[:2]]
    if change == "unknown":
        first.append(Action("F", 0, 2))
    if change == "weights first":
        at, other = (i for i, a in enumerate(second) if a[0] in "DW" and a[2] == 1)
        second[at], second[other] = second[other], second[at]
    return replace(schedule, orders=(tuple(first), tuple(second)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("twice", r"passes \('FDWF'\) of stage 0 and micro-batch 0 must be F and B, or F, D and W"),
        ("missing", r"passes \('FD'\) of stage 1 and micro-batch 1 must be F and B, or F, D and W"),
        ("elsewhere", r"stage \(1\) must not run on rank 0"),
        ("swapped", r"must not wait for each other: rank 0 never runs Action\(kind='D', stage=0"),
        ("waits", r"must not wait for each other: rank 0 never runs Action\(kind='D', stage=0"),
        ("unknown", r"passes \(\(0, 2\)\) must be of micro-batches of the step"),
        (
            "weights first",
            r"must not wait for each other: rank 0 never runs Action\(kind='D', stage=0",
        ),
    ],
)
def test_check_finds_what_is_wrong(change: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        changed(change).check()
    assert "\n" not in str(caught.value)


def converted(action: Any) -> Item:
    if action.sub_actions:
        forward, backward = map(converted, action.sub_actions)
        return Overlap(forward, backward)
    kind = KINDS[action.computation_type.name]
    return Action(kind, action.stage_index, action.microbatch_index)


def of_torch(name: str, schedule: Schedule) -> Schedule:
    """Return the orders of torch's schedule of a name, for the sizes of ours."""
    pp, number = schedule.pp, schedule.num_micro_batches
    made = object.__new__(getattr(torch_schedules, name))  # without stages, which need processes
    rounds = max(1, number // pp)
    made.__dict__ |= dict(pp_group_size=pp, n_local_stages=schedule.num_stages // pp)
    made.__dict__ |= dict(num_stages=schedule.num_stages, _num_stages=schedule.num_stages)
    made.__dict__ |= dict(_n_microbatches=number, microbatches_per_round=number // rounds)
    found = (made._calculate_single_rank_operations(rank) for rank in range(pp))
    orders = tuple(tuple(converted(a) for a in rank if a is not None) for rank in found)
    return replace(schedule, orders=orders)


@pytest.mark.parametrize(
    ("name", "theirs", "chunks"),
    [
        ("interleaved", "ScheduleInterleaved1F1B", 2),
        ("interleaved", "ScheduleInterleaved1F1B", 3),
        ("zero-bubble", "ScheduleInterleavedZeroBubble", 1),
    ],
)
@pytest.mark.parametrize(("pp", "number"), [(2, 4), (4, 16), (4, 10), (4, 3), (3, 9), (1, 4)])
def test_orders_are_those_of_torch(name, theirs, chunks, pp, number) -> None:
    schedule = make_schedule(name, pp=pp, chunks=chunks, num_micro_batches=number)
    assert schedule.orders == of_torch(theirs, schedule).orders


@pytest.mark.parametrize("number", [4, 9])
def test_1f1b_is_that_of_torch(number: int) -> None:
    made = object.__new__(torch_schedules.Schedule1F1B)
    made.__dict__ |= dict(_num_stages=4, _n_microbatches=number)
    theirs = made._get_pipeline_order()
    ours = make_schedule("1f1b", pp=4, chunks=1, num_micro_batches=number).orders
    for rank in range(3):  # torch numbers the forwards of the last rank from 1
        passes = [a for a in theirs[rank] if a is not None and a.computation_type.name in KINDS]
        assert ours[rank] == tuple(map(converted, passes))


def without_weights(schedule: Schedule) -> list[list[tuple[bool, int, int]]]:
    """Return forwards and backwards in order, however a backward is split or overlapped."""
    return [
        [
            (kind == "F", *where)
            for item in order
            for kind, *where in list_actions(item)
            if kind != "W"
        ]
        for order in schedule.orders
    ]


@pytest.mark.parametrize(
    ("name", "theirs"), [("zbv", "ScheduleZBVZeroBubble"), ("dualpipe-v", "ScheduleDualPipeV")]
)
@pytest.mark.parametrize(("pp", "number"), [(2, 4), (4, 8), (4, 17), (3, 9), (6, 12), (1, 4)])
def test_a_v_is_that_of_torch_but_for_its_weight_gradients(name, theirs, pp, number) -> None:
    """The first weight gradient to wait is the first to run here, whichever stage it is of."""
    schedule = make_schedule(name, pp=pp, chunks=2, num_micro_batches=number)
    other = of_torch(theirs, schedule)
    other.check()
    assert without_weights(schedule) == without_weights(other)
    assert schedule.compute_peak_live([1] * 2 * pp) == other.compute_peak_live([1] * 2 * pp)
    costs = Costs.from_forward((1.0,) * schedule.num_stages)
    assert simulate(schedule, costs).makespan <= simulate(other, costs).makespan


@pytest.mark.parametrize("name", get_args(ScheduleName))
def test_which_schedules_have_weight_gradients_apart_and_pairs(name: ScheduleName) -> None:
    chunks = RULES[name].chunks or 2
    schedule = make_schedule(name, pp=2, chunks=chunks, num_micro_batches=4)
    actions = [a for order in schedule.orders for item in order for a in list_actions(item)]
    assert any(action.kind == "W" for action in actions) == (name in DEFERRING)
    pairs = [item for order in schedule.orders for item in order if isinstance(item, Overlap)]
    assert bool(pairs) == (name in PAIRING)
