"""A plan as an HTML page: memory of ranks, parts of the step, and pipeline stages as bars.

Bars are SVG. The page embeds the plans of other choices near the planned run, and the script
choices.js, which shows them. The page loads no files. Without JavaScript it shows the given plan.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from importlib.resources import files
from itertools import product
from typing import Any

from moecore.base.options.memory import MemoryOptions
from moecore.base.text import format_bytes
from moecore.models import DecoderConfig
from moecore.parallel.pipeline.orders import list_actions
from moecore.parallel.pipeline.timeline import COLOURS, NAMES, Timeline
from moecore.planning.costs import CostTable
from moecore.planning.gpus import find_time_refusal, get_gpu
from moecore.planning.memory import MemoryPlan, plan_memory
from moecore.planning.option_sets import OPTIONS
from moecore.planning.run import TrainingRun
from moecore.planning.times import TimePlan, plan_time

WIDTH, ROW, LABEL = 1000, 22, 90  # pixels: width of bars, height of a row, width of its label
PALETTE = ("#4477aa", "#ee8866", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#999999", "#44bb99")
STYLE = "body{font:14px sans-serif;margin:2em}i{display:inline-block;width:1em;height:1em}"
Part = tuple[float, float, str, str]  # start, length, colour, title
SCALES = (0.5, 1, 2, 4)  # factors on the given run's sequence length and batch size
TOO_LARGE = "not planned: a choice with fewer tokens does not fit"


def format_page(plan: MemoryPlan, time_plan: TimePlan | str, title: str, table: CostTable) -> str:
    """Return a plan's memory, time (or the reason why it has none) and near choices as HTML."""
    gpu_bytes, choices = get_gpu(table.gpu).memory, plan_choices(plan.run, table)
    kinds = list(dict.fromkeys(kind for rank in plan.ranks for kind in rank.device))
    colours = _assign_colours(kinds)
    parts = [_make_stacked_parts(rank.device, colours, format_bytes) for rank in plan.ranks]
    rows = [(f"pp rank {r.pp_rank}", bars) for r, bars in zip(plan.ranks, parts, strict=True)]
    axis_length = max(gpu_bytes, *(rank.num_bytes for rank in plan.ranks))
    line = make_choice(plan, time_plan, table).line
    body = [
        f"<h1>{escape(title)}</h1><p>{escape(line)}</p>",
        f"<h2>Memory of a GPU, of {format_bytes(gpu_bytes)}</h2>",
        _draw_bars(rows, axis_length, line_position=gpu_bytes),
        _draw_legend(colours),
        "<section>",
    ]
    if not isinstance(time_plan, str):
        sizes: dict[str, float] = {part: s for part, s in time_plan.parts.items() if s}
        colours = _assign_colours(sizes)
        step = [("step", _make_stacked_parts(sizes, colours, lambda s: f"{s * 1e3:.1f} ms"))]
        body.append("<h2>A step of the rank that works longest</h2>")
        body += [_draw_bars(step, sum(sizes.values())), _draw_legend(colours)]
        if (timeline := time_plan.timeline) is not None:
            ranks = range(len(plan.ranks))
            rows = [(f"pp rank {i}", _list_action_parts(timeline, i)) for i in ranks]
            named = {NAMES[kind]: colour for kind, colour in COLOURS.items()}
            body += ["<h2>Stages</h2>", _draw_bars(rows, timeline.makespan), _draw_legend(named)]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    kinds += [kind for choice in choices.values() for rank in choice["ranks"] for kind in rank]
    data = {"choices": choices, "given": format_key(plan.run), "gpu": gpu_bytes}
    data |= {"colours": _assign_colours(dict.fromkeys(kinds))}
    data |= {"label": LABEL, "width": WIDTH, "row": ROW}
    text = json.dumps(data).replace("<", "\\u003c")  # no tag of a name ends the script
    script = (files("moecore.planning") / "choices.js").read_text()
    return (
        f'<!doctype html><html><head>{head}</head><body><div id="controls"></div>'
        f"<main>{''.join(body)}</section></main>"
        f'<script id="plans" type="application/json">{text}</script>'
        f"<script>{script}</script></body></html>\n"
    )


def _assign_colours(names: Iterable[str]) -> dict[str, str]:
    """Return a colour of the palette for each name."""
    return {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(names)}


def _make_stacked_parts(
    sizes: Mapping[str, Any], colours: Mapping[str, str], format_size: Callable[[Any], str]
) -> list[Part]:
    """Return the parts of a bar, (start, size, colour, title), for all `sizes` above 0."""
    parts, start = list[Part](), 0.0
    for name, size in sizes.items():
        if size > 0:
            parts.append((start, size, colours[name], f"{name}: {format_size(size)}"))
            start += size
    return parts


def _list_action_parts(timeline: Timeline, rank: int) -> list[Part]:
    """Return the parts of a pipeline rank's bar, one per action, of equal length in a pair."""
    parts = list[Part]()
    for start, end, item in timeline.spans[rank]:
        actions = list_actions(item)
        length = (end - start) / len(actions)
        for i, (kind, stage, number) in enumerate(actions):
            title = (
                f"{NAMES[kind]}, stage {stage}, micro-batch {number}: {(end - start) * 1e3:.1f} ms"
            )
            parts.append((start + i * length, length, COLOURS[kind], title))
    return parts


def _draw_bars(
    rows: Sequence[tuple[str, list[Part]]], axis_length: float, line_position: float | None = None
) -> str:
    """Return an SVG with one horizontal bar per row (label, parts).

    `axis_length` is the end of the axis, in the unit of the parts' starts and lengths. A dashed
    line is drawn at `line_position`, unless it is None.
    """
    height = ROW * len(rows)
    svg = [f'<svg width="{LABEL + WIDTH}" height="{height}" role="img">']
    for i, (label, parts) in enumerate(rows):
        y = i * ROW
        svg.append(f'<text x="0" y="{y + ROW - 7}">{escape(label)}</text>')
        for start, length, colour, title in parts:
            x, width = LABEL + start / axis_length * WIDTH, length / axis_length * WIDTH
            svg.append(
                f'<rect x="{x:.2f}" y="{y + 1}" width="{width:.2f}" height="{ROW - 2}" '
                f'fill="{colour}"><title>{escape(title)}</title></rect>'
            )
    if line_position is not None:
        x = LABEL + line_position / axis_length * WIDTH
        svg.append(f'<path d="M{x:.2f} 0V{height}" stroke="black" stroke-dasharray="4"/>')
    return "".join((*svg, "</svg>"))


def _draw_legend(colours: Mapping[str, str]) -> str:
    """Return the HTML of a legend: a coloured square before each name."""
    marks = (f'<i style="background:{c}"></i> {escape(name)}' for name, c in colours.items())
    return f"<p>{' &nbsp; '.join(marks)}</p>"


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The figures of a choice's plan; without `ranks` the choice was too large to be planned."""

    line: str  # the time and the peak memory as text
    fits: bool = False
    ranks: Sequence[dict[str, int]] = ()  # of each pipeline rank, the bytes by kind
    seconds: float | None = None  # of a step; None = not modelled
    tokens_per_second: float | None = None  # of a GPU


def make_choice(plan: MemoryPlan, time_plan: TimePlan | str, table: CostTable) -> Choice:
    """Return the figures of a memory plan and a time plan (or why the time is not modelled)."""
    gpu, peak = get_gpu(table.gpu), plan.largest.num_bytes
    fits = peak <= gpu.memory and plan.count_pinned_bytes(gpu) <= gpu.host_memory
    line = time_plan if isinstance(time_plan, str) else time_plan.line
    memory = f"peak memory {format_bytes(peak)} of {format_bytes(gpu.memory)}"
    return Choice(
        line=f"{line}; {memory}{'' if fits else ': does not fit'}",
        fits=fits,
        ranks=[dict(rank.device) for rank in plan.ranks],
        seconds=getattr(time_plan, "seconds", None),
        tokens_per_second=getattr(time_plan, "tokens_per_gpu_second", None),
    )


def format_key(run: TrainingRun) -> str:
    """Return a run's key among the choices: "sequence length,batch size,recomputed parts"."""
    return f"{run.seq_len},{run.batch_size},{' '.join(run.memory.parts) or 'nothing'}"


def plan_choices(run: TrainingRun, table: CostTable) -> dict[str, dict[str, Any]]:
    """Return the fields of each valid `Choice` near `run`, by `format_key`.

    The sets of recomputed parts are the set of `run`, none, and the first set of each overhead in
    `OPTIONS`.
    A choice is planned if it is `run`, or if the same recompute fits with the next smaller
    sequence length and the next smaller batch size. A plan takes about 0.3 s of CPU time.
    """
    plain = replace(run, memory=replace(run.memory, recompute=()))
    by_overhead = dict[str | None, MemoryOptions]()
    for option in OPTIONS:
        memory = replace(plain.memory, recompute=option.apply(plain, table.gpu).memory.recompute)
        if memory.recompute:
            by_overhead.setdefault(option.overhead, memory)
    memories = {m.parts: m for m in (plain.memory, *by_overhead.values(), run.memory)}
    choices, too_large = dict[str, Choice](), set[tuple[Any, ...]]()
    for memory, (i, length), (j, rows) in product(
        memories.values(), enumerate(SCALES), enumerate(SCALES)
    ):
        model, seq_len = run.model, int(length * run.seq_len)
        try:
            if isinstance(model, DecoderConfig):
                model = replace(model, max_seq_len=max(model.max_seq_len, seq_len))
            batch_size = int(rows * run.batch_size)
            other = replace(run, model=model, seq_len=seq_len, batch_size=batch_size, memory=memory)
            key, smaller = format_key(other), {(memory, i - 1, j), (memory, i, j - 1)}
            if other != run and smaller & too_large:
                choice = Choice(line=TOO_LARGE)
            else:
                refusal = find_time_refusal(run.precision, table.gpu)
                time_plan = refusal or plan_time(other, table)
                choice = make_choice(plan_memory(other), time_plan, table)
        except (ValueError, NotImplementedError):  # half a row, or options that exclude each other
            continue
        choices[key] = choice
        if not choice.fits:
            too_large.add((memory, i, j))
    return {key: asdict(choice) for key, choice in choices.items()}
