from typing import Any

import pytest

from moecore.parallel.pipeline.layout import LayoutCosts, balanced_layout, even_layout, parse_layout
from moecore.parallel.pipeline.orders import Overlap
from moecore.parallel.pipeline.schedule import make_schedule
from moecore.parallel.pipeline.timeline import Costs, simulate
from tests.parallel.pipeline.costs import sum_stages


def bubble(name: Any, pp: int, chunks: int, number: int, **times: float) -> float:
    schedule = make_schedule(name, pp=pp, chunks=chunks, num_micro_batches=number)
    costs = Costs.from_forward((1.0 / chunks,) * schedule.num_stages, **times)
    return simulate(schedule, costs).bubble


@pytest.mark.parametrize(("pp", "number"), [(2, 4), (4, 8), (4, 64), (8, 24)])
def test_bubbles_are_those_of_the_papers(pp: int, number: int) -> None:
    """In passes of a whole rank: F = D = W = 1, or B = 2 F = 2."""
    passes = 3 * number
    for name in ("gpipe", "1f1b"):  # (p - 1) (F + B) wait
        assert bubble(name, pp, 1, number) == pytest.approx((pp - 1) / number, rel=0.03)
    for chunks in (2, 4):  # (p - 1) (F + B) / v
        closed = pytest.approx((pp - 1) / (chunks * number), rel=0.03)
        assert bubble("interleaved", pp, chunks, number) == closed
        assert bubble("overlapped", pp, chunks, number) == closed
    # ZB-H1: (p - 1) (F + D - W)
    assert bubble("zero-bubble", pp, 1, number) == pytest.approx((pp - 1) / passes, rel=0.03)
    # ZB-V: no rank waits between its first and last action, which are (p - 1) F / 2 apart
    assert bubble("zbv", pp, 2, number) == pytest.approx((pp - 1) / 2 / passes, rel=0.03)
    # DualPipeV: (p - 1) (F&B + B - 3 W) / 2
    assert bubble("dualpipe-v", pp, 2, number) == pytest.approx((pp - 1) / passes, rel=0.03)


@pytest.mark.parametrize(("inputs", "weights"), [(1.2, 0.8), (1.0, 0.5), (1.4, 1.0)])
def test_the_bubble_of_zb_h1_with_unequal_passes(inputs: float, weights: float) -> None:
    found = bubble("zero-bubble", 4, 1, 32, inputs=inputs, weights=weights)
    closed = 3 * (1 + inputs - weights) / (32 * (1 + inputs + weights))
    assert found == pytest.approx(closed, rel=0.03)


def test_exchange_hides_behind_the_other_pass_of_an_overlap() -> None:
    """One rank, three micro-batches: F, F&B, F&B, B of 3 + 2 and 6 + 4 units."""
    costs = Costs(
        forward=(3.0,),
        backward_inputs=(4.0,),
        backward_weights=(2.0,),
        forward_exchange=(2.0,),
        backward_exchange=(4.0,),
    )
    sizes = dict(pp=1, chunks=1, num_micro_batches=3)
    merged = simulate(make_schedule("overlapped", **sizes), costs)
    assert [span[:2] for span in merged.spans[0]] == [(0, 5), (5, 15), (15, 25), (25, 35)]
    assert isinstance(merged.spans[0][1].item, Overlap)
    assert merged.exposed_exchange == (2 + 1 + 1 + 4,)  # a pair waits for its backward alone
    apart = simulate(make_schedule("1f1b", **sizes), costs)
    assert apart.makespan == 45 and apart.exposed_exchange == (18,)


# Embedding and three dense layers cost as much as two MoE layers; 61 layers, one MTP module.
DEEPSEEK = LayoutCosts(embedding=0.2, layers=(0.6,) * 3 + (1.0,) * 58, mtp=(1.5,), loss=1.0)


@pytest.mark.parametrize(
    ("text", "pp", "number"),
    [("Et*3|(tt|)*29m|L", 8, 32), ("Et*3|(tt|)*29m|L", 8, 128), ("Et*4|(tttt|)*14tmL", 4, 64)],
)
@pytest.mark.parametrize("name", ["interleaved", "overlapped"])
def test_layouts_of_deepseek_v3(name: Any, text: str, pp: int, number: int) -> None:
    """A step is as long as that of equal stages, each as slow as the slowest one."""
    layout = parse_layout(text, num_layers=61, num_mtp_layers=1)
    chunks = layout.chunks(pp)
    assert chunks == 4
    stages = sum_stages(DEEPSEEK, layout)
    schedule = make_schedule(name, pp=pp, chunks=chunks, num_micro_batches=number)
    timeline = simulate(schedule, Costs.from_forward(stages))
    closed = 3 * max(stages) * (number * chunks + pp - 1)
    assert timeline.makespan == pytest.approx(closed, rel=0.03) and timeline.makespan <= closed
    even = even_layout(61, num_stages=4 * pp, num_mtp_layers=1)
    other = simulate(schedule, Costs.from_forward(sum_stages(DEEPSEEK, even)))
    assert other.makespan > 1.05 * timeline.makespan
    balanced = balanced_layout(DEEPSEEK, num_stages=4 * pp)
    best = simulate(schedule, Costs.from_forward(sum_stages(DEEPSEEK, balanced)))
    assert best.makespan <= closed


def test_bytes_that_a_rank_holds() -> None:
    """Interleaved 1F1B on 4 ranks of 4 chunks: (4 - 1) x 4 + 2 x (3 - rank) + 1 of them."""
    schedule = make_schedule("interleaved", pp=4, chunks=4, num_micro_batches=64)
    assert schedule.compute_peak_live([1] * 16) == (19, 17, 15, 13)
    layout = parse_layout("Et*4|(tttt|)*14tmL", num_layers=61, num_mtp_layers=1)
    held = schedule.compute_peak_live([len(stage.layers) for stage in layout.stages])
    assert held[2] == 15 * 4
    assert (
        make_schedule("zbv", pp=4, chunks=2, num_micro_batches=16).compute_peak_live([3] * 8)
        == (24,) * 4
    )
    zero_bubble = make_schedule("zero-bubble", pp=4, chunks=1, num_micro_batches=16)
    assert zero_bubble.compute_peak_live([0] * 4, deferred_sizes=[5] * 4) == (5, 10, 15, 20)


KEYS = ("forward", "backward_inputs", "backward_weights")


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (3, r"^costs.forward \(3 stages\) must have a time per stage of the schedule \(4\)"),
        (0, r"^Costs.forward \(\(\)\) must have a time per stage: pass at least one$"),
    ],
)
def test_costs_of_other_stages(number: int, message: str) -> None:
    schedule = make_schedule("1f1b", pp=4, chunks=1, num_micro_batches=4)
    with pytest.raises(ValueError, match=message):
        simulate(schedule, Costs.from_forward((1.0,) * number))
    with pytest.raises(ValueError, match=r"^Costs.backward_inputs \(\(1.0,\)\) must have a time"):
        Costs(forward=(1.0, 1.0), backward_inputs=(1.0,), backward_weights=(1.0, 1.0))
    with pytest.raises(ValueError, match=r"^Costs.forward_exchange \(\(1.0,\)\) must have a time"):
        Costs(**dict.fromkeys(KEYS, (1.0, 1.0)), forward_exchange=(1.0,))
