"""A plan as a picture: what each pipeline rank holds, a bar per rank and a colour per kind."""

from __future__ import annotations

import os

from moecore.base.fields import NumBytes, check_arguments
from moecore.planning.memory import MemoryPlan


def draw_memory(
    plan: MemoryPlan, path: str | os.PathLike[str], memory: NumBytes | None = None
) -> None:
    """Write a PNG of a plan.

    Args:
        plan: of all pipeline ranks.
        path: of the file.
        memory: of a GPU in bytes, drawn as a line; None = no line.

    Raises:
        ImportError: without matplotlib.
    """
    check_arguments(draw_memory, locals())
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("draw_memory needs matplotlib: pip install 'moecore[bench]'") from error

    kinds = list(dict.fromkeys(kind for rank in plan.ranks for kind in rank.device))
    figure = Figure(figsize=(9.0, 1.6 + 0.4 * len(plan.ranks)), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    places, ends = range(len(plan.ranks)), [0.0] * len(plan.ranks)
    for i, kind in enumerate(kinds):
        sizes = [rank.device.get(kind, 0) / 1e9 for rank in plan.ranks]
        colour = (f"C{i % 10}", 1.0 if i < 10 else 0.5)
        axes.barh(places, sizes, left=ends, label=kind, color=colour)
        ends = [end + size for end, size in zip(ends, sizes, strict=True)]
    if memory is not None:
        axes.axvline(memory / 1e9, color="black", linestyle="--", label="memory of a GPU")
    axes.set(xlabel="GB", ylabel="pp rank")
    axes.set_yticks(list(places))
    axes.invert_yaxis()
    figure.legend(loc="outside right upper", fontsize=7)
    figure.savefig(path, format="png")
