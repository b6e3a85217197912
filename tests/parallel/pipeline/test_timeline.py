import sys
from itertools import combinations
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from moecore.base.options.names import ScheduleName
from moecore.base.torch_private import annotate_range
from moecore.parallel.pipeline.orders import Action, Overlap
from moecore.parallel.pipeline.schedule import make_schedule
from moecore.parallel.pipeline.timeline import (
    Costs,
    Timeline,
    draw,
    list_boxes,
    make_trace_name,
    simulate,
)


def timeline_of(name: Any) -> Timeline:
    chunks = 1 if name in ("1f1b", "zero-bubble") else 2
    schedule = make_schedule(name, pp=3, chunks=chunks, num_micro_batches=7)
    return simulate(schedule, Costs.from_forward((1.0,) * schedule.num_stages))


@pytest.mark.parametrize("name", get_args(ScheduleName))
def test_boxes_do_not_overlap(name: Any) -> None:
    found = list(list_boxes(timeline_of(name)))
    chunks = 1 if name in ("1f1b", "zero-bubble") else 2
    passes = sum({"F": 1, "B": 2, "D": 1, "W": 1}[box.action.kind] for box in found)
    assert passes == 3 * 3 * 7 * chunks and {box.chunk for box in found} == set(range(chunks))
    for rank in range(3):
        own = [box for box in found if rank <= box.bottom < box.bottom + box.height <= rank + 1]
        for one, other in combinations(own, 2):
            apart = one.end <= other.start or other.end <= one.start
            above = (
                one.bottom + one.height <= other.bottom or other.bottom + other.height <= one.bottom
            )
            assert apart or above
    assert len(found) == len({box.action for box in found})


def test_numbers_by_hand() -> None:
    """Rank 0 waits for 2 of 6 units, rank 1 for 1 + 1."""
    forward, backward = Action("F", 0, 0), Action("B", 0, 0)
    on_1 = Overlap(Action("F", 1, 0), Action("B", 1, 1))
    timeline = Timeline.from_spans([(0, forward, 3, 4), (0, backward, 6, 9), (1, on_1, 4, 8)])
    assert timeline.spans[0][1].start == 3 and timeline.makespan == 6
    assert timeline.busy == (4, 4) and timeline.bubble == 4 / 8
    with pytest.raises(ValueError, match=r"^spans \(Action.* on rank 0\) must not overlap"):
        Timeline.from_spans([(0, forward, 0.0, 2.0), (0, backward, 1.0, 3.0)])
    with pytest.raises(ValueError, match="must not overlap, and end after they start"):
        Timeline.from_spans([(0, forward, 2.0, 0.0)])
    with pytest.raises(ValueError, match="must have at least one"):
        Timeline.from_spans([])


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("1f1b", "dualpipe-v"):
        path = tmp_path / f"{name}.png"
        draw(timeline_of(name), path)
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG\r\n\x1a\n") and data.endswith(b"IEND\xaeB\x60\x82")
        width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
        assert width >= 800 and height >= 200


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install .\.\[bench\]."):
        draw(timeline_of("1f1b"), tmp_path / "no.png")
    assert not list(tmp_path.iterdir())


def test_a_profile_is_a_timeline(tmp_path: Path) -> None:
    beside = Overlap(Action("F", 0, 1), Action("B", 0, 0))
    order = [Action("F", 0, 0), beside, Action("D", 0, 1), Action("W", 0, 1)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for item in order:
            with annotate_range(make_trace_name(item)):
                torch.ones(300, 300) @ torch.ones(300, 300)
    profile.export_chrome_trace(str(tmp_path / "0.json"))
    (spans,) = Timeline.from_traces([tmp_path / "0.json"]).spans
    assert [span.item for span in spans] == order
    with pytest.raises(ValueError, match=r"spans \(\(\)\) must have"):
        Timeline.from_traces([])
    (tmp_path / "1.json").write_text('{"traceEvents": []}')
    with pytest.raises(ValueError, match=r"paths \(.*1.json\) must have a pipeline action"):
        Timeline.from_traces([tmp_path / "0.json", tmp_path / "1.json"])
