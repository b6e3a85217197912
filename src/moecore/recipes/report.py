"""The report of a run: progress bar, metrics.jsonl, loggers, curves.png and alarms.

tqdm, TensorBoard and matplotlib are optional: the names of missing packages are printed once. W&B
and MLflow are options.
"""

import importlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from moecore.io.checkpoint.directory import CHECKPOINTS
from moecore.recipes.alarms import Alarms
from moecore.recipes.files import format_option, parse_step_line, read_lines, replace_lines
from moecore.recipes.goodput import STEPS, WALL_TIME, WallTime
from moecore.recipes.metrics import (
    MLFLOW_ID,
    WANDB_ID,
    Loads,
    Metrics,
    open_loggers,
)
from moecore.recipes.options import RunConfig

METRICS, CURVES = "metrics.jsonl", "curves.png"
SAMPLES = "samples.jsonl"
CONFIG, EXPORT = "config.toml", "export"
# Files of a run, and drafts of METRICS and WALL_TIME.
FILES = (
    *(METRICS, CURVES, CONFIG, SAMPLES, WALL_TIME, WANDB_ID, MLFLOW_ID),
    *("metrics.tmp", "wall_time.tmp"),
)
FOLDERS = (CHECKPOINTS, EXPORT, f".{EXPORT}.draft", "tensorboard")
LOAD = "expert_load_max_over_mean"  # of models, and stages, with MoE layers
LINES_S = 5.0  # between lines where stderr is no terminal
MOST_TICKS = 16  # layers that are named beside the map
# Metrics of the bar and of lines: name, label, format.
BAR_METRICS = (
    ("reward", "reward", ".3f"),
    ("loss", "loss", ".3f"),
    ("tokens_per_second", "tok/s", ".0f"),
    (LOAD, "load", ".2f"),
    ("eval_loss", "eval", ".3f"),
    ("mfu", "mfu", ".1%"),
)
NAMES = {
    "tqdm": "tqdm",
    "torch.utils.tensorboard": "tensorboard",
    "matplotlib.figure": "matplotlib",
}


class RunReport:
    """Writes a run's progress bar, metrics, curves and alarms, on rank 0.

    Earlier starts of the run completed `start` steps, whose checkpoint was loaded in
    `load_seconds`. The loss is a mean per `unit`.
    """

    def __init__(
        self, args: RunConfig, *, start: int, unit: str = "byte", load_seconds: float = 0.0
    ) -> None:
        modules = {name: _import_if_installed(name) for name in NAMES}
        missing = [NAMES[name] for name, module in modules.items() if module is None]
        if missing:
            print(f"going on without {', '.join(missing)} (pip install {' '.join(missing)})")
        self.path, self.steps, self.unit = args.run_dir / METRICS, args.steps, unit
        self.printed = {start + 1, self.steps}  # steps whose lines do not wait
        self._next_line = 0.0
        lost_seconds = truncate_metrics(self.path, start)
        self.wall_time = WallTime(
            args.run_dir / WALL_TIME, lost_seconds=lost_seconds, load_seconds=load_seconds
        )
        self.file = self.path.open("ab", buffering=0)
        tqdm, tensorboard = modules["tqdm"], modules["torch.utils.tensorboard"]
        self.figure = modules["matplotlib.figure"]
        self.loggers = open_loggers(args, tensorboard, start=start)
        if tqdm:  # its default lock is a semaphore between processes, which a rank would leave
            tqdm.tqdm.set_lock(threading.RLock())
        self.bar = None
        if tqdm and sys.stderr.isatty():
            self.bar = tqdm.tqdm(total=self.steps, initial=start, unit="step")
        self.alarms = Alarms()

    def log(
        self,
        step: int,
        metrics: Metrics,
        loads: Loads,
        *,
        logs_loads: bool = True,
        alarms: Sequence[str] = (),
    ) -> None:
        """Write a step's metrics, and if `logs_loads` each expert's load; print alarms."""
        for line in [*self.alarms.find_alarms(step, metrics, loads), *alarms]:
            print(line, flush=True) if self.bar is None else self.bar.write(line)
        loads = loads if logs_loads else {}
        self.wall_time.add(STEPS, metrics.get("step_seconds", 0.0))
        metrics["goodput"] = self.wall_time.compute_goodput()
        self.wall_time.save(is_forced=step == self.steps)
        lists = {f"expert_loads/{name}": [round(x, 3) for x in y] for name, y in loads.items()}
        self.file.write(json.dumps({"step": step, **metrics, **lists}).encode() + b"\n")
        flat = {f"expert_load/{n}/{e}": x for n, y in loads.items() for e, x in enumerate(y)}
        for logger in self.loggers:
            logger.log(metrics | flat, step)
        entries = [entry for entry in BAR_METRICS if entry[0] in metrics]
        postfix = {label: format(metrics[name], spec) for name, label, spec in entries}
        if self.bar is not None:
            self.bar.set_postfix(postfix, refresh=False)
            self.bar.update()
        elif step in self.printed or time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINES_S
            numbers = ", ".join(f"{name} {value}" for name, value in postfix.items())
            print(f"step {step} of {self.steps}: {numbers}", flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Close the files and draw the curves; after an error, only close the bar."""
        if self.bar is not None:
            self.bar.close()
        with suppress(OSError) if error else nullcontext():  # the first error is reported
            self.wall_time.save()
        if error is not None:
            return
        print(self.wall_time.format(), flush=True)
        self.file.close()
        for logger in self.loggers:
            logger.close()
        if self.figure:
            draw_curves(self.figure, self.path, self.unit)


def make_run_dir(path: Path) -> None:
    """Make a run's directory; ValueError if files cannot be created in it."""
    name = format_option("--run-dir", path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        may_write = os.access(path, os.W_OK | os.X_OK)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{name} must be a directory to write: {reason}") from None
    if not may_write:
        raise ValueError(f"{name} must be a directory to write: Permission denied")
    for part in (*FILES, *FOLDERS):
        kind, is_kind = (
            ("plain file", Path.is_file) if part in FILES else ("directory", Path.is_dir)
        )
        if os.path.lexists(path / part) and not is_kind(path / part):
            raise ValueError(f"{name} must have a {kind} as {part}: move it away")
    if (path / EXPORT).is_symlink():  # an export replaces the one before it
        raise ValueError(f"{name} must have a directory as {EXPORT}, not a link: move it away")


def truncate_metrics(path: Path, step: int) -> float:
    """Remove damaged lines and steps after `step`; return the removed steps' total seconds."""
    lines, num_damaged = read_metrics(path)
    if num_damaged:
        print(f"{path}: dropped {num_damaged} damaged line(s)", flush=True)
    replace_lines(path, [json.dumps(line) for line in lines if line["step"] <= step])
    return sum(float(line.get("step_seconds", 0.0)) for line in lines if line["step"] > step)


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the lines of a metrics file as dicts, and the number of damaged lines."""
    records = [_parse_line(line) for line in read_lines(path)]
    lines = [line for line in records if line is not None]
    return lines, len(records) - len(lines)


def _parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the metrics of a line; None = the line is damaged."""
    metrics = parse_step_line(line) or {}
    drawn = metrics.get("loss"), metrics.get(LOAD, math.nan)
    return metrics if all(isinstance(value, float) for value in drawn) else None


def draw_curves(figure_module: ModuleType, metrics_path: Path, loss_unit: str = "byte") -> None:
    """Draw loss or reward, load imbalance, and heat maps of expert loads into curves.png."""
    lines, _ = read_metrics(metrics_path)
    steps = [line["step"] for line in lines]
    canvas = figure_module.Figure(figsize=(11, 6.5), layout="constrained")
    (loss, layers), (load, experts) = canvas.subplots(2, 2, sharex=True)
    curve = "reward" if lines and "reward" in lines[-1] else "loss"
    loss.plot(steps, [line[curve] for line in lines], linewidth=1, label="training")
    evaluated = [line for line in lines if "eval_loss" in line]
    if evaluated:
        points = [line["step"] for line in evaluated], [line["eval_loss"] for line in evaluated]
        loss.plot(*points, marker="o", markersize=4, label="held out")
        loss.legend()
    loss.set(
        ylabel=f"loss (nats per {loss_unit})" if curve == "loss" else "mean reward of a response"
    )
    load.plot(steps, [line.get(LOAD, math.nan) for line in lines], linewidth=1)
    load.axhline(1.0, color="gray", linewidth=0.8, linestyle=":")
    load.set(ylabel="busiest expert / mean\n(worst layer)", xlabel="step")
    keys = [key for key in lines[-1] if key.startswith("expert_load/")] if lines else []
    names = [key.removeprefix("expert_load/") for key in keys]
    full_lines = [line for line in lines if keys and line.keys() >= {*keys}]
    rows = [[line[key] for line in full_lines] for key in keys]
    _draw_map(canvas, layers, full_lines, rows, vmin=1.0)
    short = [name.partition("layers.")[2].removesuffix(".mlp") for name in names]
    layers.set(ylabel="MoE layer", title="busiest expert / mean")
    if len(names) <= MOST_TICKS:
        layers.set_yticks(range(len(names)), short)
    if names:
        least_even = max(range(len(names)), key=lambda i: sum(rows[i]))
        key = f"expert_loads/{names[least_even]}"
        expert_lines = [line for line in full_lines if key in line]
        by_expert = list(map(list, zip(*(line[key] for line in expert_lines), strict=True)))
        _draw_map(canvas, experts, expert_lines, by_expert, vmin=0.0, vmax=2.0, cmap="RdBu_r")
        title = f"load of each expert / mean, layer {short[least_even]}"
        experts.set(ylabel="expert", title=title)
    experts.set(xlabel="step")
    canvas.savefig(metrics_path.with_name(CURVES), dpi=110)


def _draw_map(
    figure: Any, axes: Any, lines: list[dict[str, Any]], rows: list[list[float]], **style: Any
) -> None:
    """Draw a map of `rows[i][j]`, the load of layer or expert i in line j, from two lines on."""
    if len(lines) < 2:
        return
    steps = [line["step"] for line in lines]
    colors = axes.pcolormesh(steps, range(len(rows)), rows, shading="nearest", **style)
    figure.colorbar(colors, ax=axes, extend="max" if "vmax" in style else "neither")


def _import_if_installed(module_name: str) -> ModuleType | None:
    try:
        return importlib.import_module(module_name)
    except ImportError:
        return None
