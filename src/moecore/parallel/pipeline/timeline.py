"""`Timeline`: start and end of each item of a schedule, simulated or from profiler traces.

simulate(schedule, costs) -> Timeline       Timeline.from_traces(paths of torch.profiler)
                             draw(timeline, "step.png")
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

from moecore.base import get_install_command
from moecore.base.fields import CheckedRecord, FieldErrors, PositiveOrZero, check_arguments
from moecore.parallel.pipeline.orders import Action, Item, Kind, Overlap, list_actions
from moecore.parallel.pipeline.schedule import Schedule

COLOURS = {"F": "#4477aa", "B": "#228833", "D": "#66ccaa", "W": "#ee8866"}
NAMES = {"F": "forward", "B": "backward", "D": "gradient of inputs", "W": "gradients of weights"}
ROW = 0.9  # height of a bar, as a fraction of a rank's row
WIDTH = 0.25  # inches per item of an order
MAX_WIDTH = 120  # inches


class Span(NamedTuple):
    """The time of one item (action or `Overlap`) on a rank: start and end, in any unit."""

    start: float
    end: float
    item: Item


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Start and end of each item (action or `Overlap`) of a schedule on each rank."""

    # The spans of each rank in order of time. The earliest span of all ranks starts at 0.
    spans: tuple[tuple[Span, ...], ...]
    # Time of communication that computation does not hide, for each rank; () = unknown.
    exposed_exchange: tuple[float, ...] = ()

    @classmethod
    def from_spans(cls, spans: Iterable[tuple[int, Item, float, float]]) -> Timeline:
        """Build a timeline from (rank, item, start, end) tuples in any order, with any origin.

        Raises a ValueError without tuples, or if items of a rank overlap.
        """
        of_ranks = ((rank, Span(start, end, item)) for rank, item, start, end in spans)
        pair = sorted(of_ranks, key=lambda pair: (pair[0], *pair[1][:2]))
        if not pair:
            raise ValueError("spans (()) must have at least one: record a step")
        origin = min(span.start for _, span in pair)
        ranks: list[list[Span]] = [[] for _ in range(pair[-1][0] + 1)]
        for rank, (start, end, item) in pair:
            before = ranks[rank][-1].end if ranks[rank] else 0.0
            if not before <= start - origin <= end - origin:
                raise ValueError(
                    f"spans ({item} on rank {rank}) must not overlap, and end after they start: "
                    "record one stream"
                )
            ranks[rank].append(Span(start - origin, end - origin, item))
        return cls(spans=tuple(map(tuple, ranks)))

    @classmethod
    def from_traces(cls, paths: Sequence[str | os.PathLike[str]]) -> Timeline:
        """Read the timeline of one profiled step from traces, in microseconds.

        On a GPU an action lasts from its first to its last kernel, on a CPU as long as its code.

        Args:
            paths: Chrome traces of torch.profiler, one per pipeline rank in order, from one host.

        Raises:
            ValueError: if a trace has no pipeline action, or if actions of a rank overlap.
        """
        check_arguments(Timeline.from_traces, locals())
        spans = [(r, *span) for r, path in enumerate(paths) for span in _read_trace_items(path)]
        return cls.from_spans(spans)

    @property
    def makespan(self) -> float:
        """Time from the first start to the last end over all ranks, in the unit of the spans."""
        return max(span.end for spans in self.spans for span in spans)

    @property
    def busy(self) -> tuple[float, ...]:
        """Sum of the durations of each rank's items, in the unit of the spans."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.spans)

    @property
    def bubble(self) -> float:
        """Idle time of all ranks divided by busy time of all ranks."""
        busy = sum(self.busy)
        return (len(self.spans) * self.makespan - busy) / busy


def make_trace_name(item: Item) -> str:
    """Return an item's name in profiler traces: "moecore::", then kind, stage and micro-batch."""
    return "moecore::" + " beside ".join(
        f"{a.kind} stage {a.stage} micro-batch {a.micro_batch}" for a in list_actions(item)
    )


ACTION = re.compile(r"([FBDW]) stage (\d+) micro-batch (\d+)")


def _read_trace_items(path: str | os.PathLike[str]) -> Iterator[tuple[Item, float, float]]:
    """Yield (item, start, end), in microseconds, of the pipeline items in a Chrome trace."""
    trace = json.loads(Path(path).read_bytes())
    traced_events = [(e, list(ACTION.finditer(str(e.get("name"))))) for e in trace["traceEvents"]]
    events = [(e, matches) for e, matches in traced_events if matches]
    on_gpu = [event for event in events if event[0].get("cat") == "gpu_user_annotation"]
    on_host = [event for event in events if event[0].get("cat") == "user_annotation"]
    if not (on_gpu or on_host):
        raise ValueError(f"paths ({path}) must have a pipeline action: profile a step of stages")
    for event, matches in on_gpu or on_host:
        actions = [Action(cast(Kind, m[1]), int(m[2]), int(m[3])) for m in matches]
        item = actions[0] if len(actions) == 1 else Overlap(*actions)
        yield item, event["ts"], event["ts"] + event["dur"]


class Box(NamedTuple):
    """A rectangle in a drawn timeline; the boxes of rank r have y between r and r + ROW."""

    start: float
    end: float
    bottom: float
    height: float
    action: Action
    chunk: int


def list_boxes(timeline: Timeline) -> Iterator[Box]:
    """Yield the rectangles that `draw` paints; the actions of an `Overlap` have half the height."""
    for rank, spans in enumerate(timeline.spans):
        stages = sorted({action.stage for span in spans for action in list_actions(span.item)})
        for span in spans:
            actions = list_actions(span.item)
            height = ROW / len(actions)
            for i, action in enumerate(actions):
                chunk = stages.index(action.stage)
                yield Box(span.start, span.end, rank + i * height, height, action, chunk)


def draw(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write a PNG with a row per rank and a box per action, labelled by its micro-batch.

    The colour is the kind of the action; a rank's later stages are lighter. Needs matplotlib.
    """
    check_arguments(draw, locals())
    try:
        from matplotlib import colors
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.collections import PolyCollection
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(f"draw needs matplotlib: {get_install_command('bench')}") from error

    rectangles = list(list_boxes(timeline))
    chunks = 1 + max(box.chunk for box in rectangles)

    def shade(box: Box) -> tuple[float, ...]:
        light = 0.6 * box.chunk / chunks
        return tuple(c + (1 - c) * light for c in colors.to_rgb(COLOURS[box.action.kind]))

    ranks, end = len(timeline.spans), timeline.makespan
    width = min(MAX_WIDTH, max(8.0, WIDTH * max(map(len, timeline.spans))))
    figure = Figure(figsize=(width, 1.2 + 0.4 * ranks), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    corners = [
        [(b.start, b.bottom), (b.end, b.bottom), (b.end, top), (b.start, top)]
        for b in rectangles
        for top in (b.bottom + b.height,)
    ]
    fills = [shade(box) for box in rectangles]
    axes.add_collection(PolyCollection(corners, facecolors=fills, edgecolors="white", lw=0.5))
    for box in rectangles:
        label = str(box.action.micro_batch)
        if (box.end - box.start) / end * width > 0.06 * len(label):  # else it would not fit
            x, y = (box.start + box.end) / 2, box.bottom + box.height / 2
            axes.text(x, y, label, ha="center", va="center", fontsize=6, clip_on=True)
    axes.set(xlim=(0, end), ylim=(ranks + ROW - 1, 0), xlabel="time", ylabel="pp rank")
    axes.set_yticks([rank + ROW / 2 for rank in range(ranks)], [str(rank) for rank in range(ranks)])
    kinds = [kind for kind in COLOURS if any(box.action.kind == kind for box in rectangles)]
    patches = [Patch(color=COLOURS[kind], label=NAMES[kind]) for kind in kinds]
    figure.legend(handles=patches, loc="outside upper left", ncols=len(kinds), fontsize=7)
    figure.savefig(path, format="png")


Times = tuple[PositiveOrZero, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs(CheckedRecord):
    """Compute and communication time of one micro-batch per stage, in any unit."""

    forward: Times  # compute of a forward
    backward_inputs: Times  # compute of input gradients, with recomputation
    backward_weights: Times  # compute of weight gradients
    # Communication in a forward, such as dispatch, that the forward does not hide; () = none.
    forward_exchange: Times = ()
    backward_exchange: Times = ()  # exposed communication in the backward of inputs
    transfer: PositiveOrZero = 0.0  # message of hidden states, or their gradient, between ranks

    def _find_field_errors(self) -> FieldErrors:
        number = len(self.forward)
        if not number:
            yield "forward", "have a time per stage: pass at least one"
        for name in ("backward_inputs", "backward_weights"):
            if len(getattr(self, name)) != number:
                yield name, f"have a time per stage, as forward ({number}): pass as many"
        for name in ("forward_exchange", "backward_exchange"):
            if len(getattr(self, name)) not in (0, number):
                yield name, f"have a time per stage, as forward ({number}): pass as many, or ()"

    @classmethod
    def from_forward(
        cls, forward: Sequence[PositiveOrZero], *, inputs: float = 1.0, weights: float = 1.0
    ) -> Costs:
        """Return costs without communication, from each stage's forward time.

        Input gradients take `inputs` times the forward time, and weight gradients `weights` times.
        """
        return cls(
            forward=tuple(forward),
            backward_inputs=tuple(inputs * time for time in forward),
            backward_weights=tuple(weights * time for time in forward),
        )

    def get_action_times(self, action: Action) -> tuple[float, float]:
        """Return (compute time, exposed communication time) of an action."""
        stage, compute = action.stage, 0.0
        if action.kind == "F":
            exchange = self.forward_exchange[stage] if self.forward_exchange else 0.0
            return self.forward[stage], exchange
        if action.kind in "BD":
            compute += self.backward_inputs[stage]
        if action.kind in "BW":
            compute += self.backward_weights[stage]
        has_exchange = self.backward_exchange and action.kind != "W"
        return compute, self.backward_exchange[stage] if has_exchange else 0.0


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Simulate a schedule with these costs and return its timeline.

    An `Overlap` has one compute stream and one communication stream. Its time is the maximum of the
    summed compute, the summed communication, and each action's own time. The results of both
    actions are sent at its end.

    Raises:
        ValueError: if the costs have another number of stages than the schedule.
    """
    check_arguments(simulate, locals())
    if len(costs.forward) != schedule.num_stages:
        raise ValueError(
            f"costs.forward ({len(costs.forward)} stages) must have a time per stage of the "
            f"schedule ({schedule.num_stages}): pass as many"
        )
    exposed = [0.0] * schedule.pp
    spans = compute_spans(schedule, lambda x: _compute_item_times(x, costs)[1], costs.transfer)
    for rank, items in enumerate(spans):
        for _, _, item in items:
            compute, duration = _compute_item_times(item, costs)
            exposed[rank] += duration - compute
    return Timeline(spans=spans, exposed_exchange=tuple(exposed))


def compute_spans(
    schedule: Schedule, get_duration: Callable[[Item], float], transfer_time: float
) -> tuple[tuple[Span, ...], ...]:
    """Return each rank's `Span`s. An item starts when the rank is idle and has its inputs."""
    spans: list[list[Span]] = [[] for _ in range(schedule.pp)]
    ends: dict[Action, tuple[int, float]] = {}  # rank and end
    for rank, item in schedule.iterate_in_time_order():
        before = spans[rank][-1].end if spans[rank] else 0.0
        actions = list_actions(item)
        arrivals = (ends[i] for action in actions for i in schedule.list_dependencies(action))
        start = max(before, *(time + transfer_time * (src != rank) for src, time in arrivals), 0.0)
        end = start + get_duration(item)
        spans[rank].append(Span(start, end, item))
        for action in actions:
            ends[action] = rank, end
            if action.kind == "B":
                ends[action._replace(kind="D")] = rank, end
    return tuple(map(tuple, spans))


def _compute_item_times(item: Item, costs: Costs) -> tuple[float, float]:
    """Return an item's compute time, and its duration with exposed communication, as in `costs`."""
    parts = [costs.get_action_times(action) for action in list_actions(item)]
    compute, exchange = map(sum, zip(*parts, strict=True))
    durations = [sum(part) for part in parts]
    if isinstance(item, Overlap):
        durations += [compute, exchange]
    return compute, max(durations)
