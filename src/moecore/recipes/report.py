"""The bar, metrics.jsonl, loggers, curves.png and alarms of a run.

tqdm, TensorBoard and matplotlib are optional: a missing package is named once. W&B and
MLflow are options.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import threading
import time
from collections import deque
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

from moecore.io.checkpoint.directory import CHECKPOINTS
from moecore.recipes.files import format_option, read_lines
from moecore.recipes.metrics import (
    MLFLOW_ID,
    WANDB_ID,
    Metrics,
    expert_loads,
    layer_names,
    open_loggers,
    without_experts,
)
from moecore.recipes.options import RunConfig

WINDOW, FEWEST = 128, 32  # losses before a step: the most that count, and the least
FACTOR = 10.0  # 6.7 standard deviations of normal noise
IDLE_STEPS = 100
MOST_NAMED = 8  # experts of a line
BLOCK_STEPS = 20  # steps whose loads are averaged: few tokens of one step are uneven by chance
COLLAPSED_SHARE = 0.5  # of the experts, as the effective number of experts has it
FIRST_STEPS = 20  # of a run
FIRST_NORM = 100.0  # decoders with matrices of N(0, 0.02^2) begin at 1 to 20
NORM_GROWTH, LOSS_GROWTH = 3.0, 0.3  # a factor, and nats above the lowest loss before


class Alarms:
    """A detector of alarms, such as loss spikes and idle experts, in the metrics of each step.

    loss      it is above the median of the `WINDOW` losses before it by `FACTOR` times their median
              absolute deviation, and the loss before it was not. Neither number moves with a few
              spikes. Only without a reward: losses of a policy measure nothing.
    experts   no token has chosen them for `IDLE_STEPS` steps; once until one does.
    collapse  over `BLOCK_STEPS` steps the loads of a layer are as uneven as if at most half of its
              experts shared all tokens: 1 / sum(share^2) <= E / 2. Once until no layer is.
    gradient  its norm is nan or inf, so the step was skipped. Not with a loss scale, which finds
              its value by such steps.
    first steps  the norm of the first gradient is above `FIRST_NORM`; or two of the first steps in
              turn have losses that have risen by `LOSS_GROWTH`, and one of them has a norm that is
              `NORM_GROWTH` times the first. Each once. Without a reward only.
    """

    def __init__(self) -> None:
        self._block: dict[str, list[float]] = {}  # layer -> sum of the loads of a block
        self._block_steps = 0
        self._has_collapsed = False
        self._first_norm, self._lowest_loss = math.inf, math.inf
        self._rising_norms: list[float] = []  # of the steps in turn whose losses have risen
        self._has_grown = False
        self._losses = deque[float](maxlen=WINDOW)
        self._is_high = False
        self._idle: dict[tuple[str, int], int] = {}  # layer and expert -> steps without a token

    def find_alarms(self, step: int, metrics: Metrics) -> list[str]:
        """Return the alarms of a step, one line each; `metrics` has the load of each expert."""
        lines = [
            *self._check_loss(metrics),
            *self._check_experts(metrics),
            *self._check_collapse(metrics),
        ]
        lines += [*self._check_gradient(metrics), *self._check_first_steps(step, metrics)]
        return [f"alarm at step {step}: {line}" for line in lines]

    def _check_loss(self, metrics: Metrics) -> list[str]:
        """Return the alarm about a loss far above the losses before, or []."""
        loss, before, was_high = metrics["loss"], [*self._losses], self._is_high
        if not math.isfinite(loss) or "reward" in metrics:
            return []
        self._losses.append(loss)
        if len(before) < FEWEST:
            return []
        middle = median(before)
        spread = median(abs(value - middle) for value in before)
        self._is_high = loss > middle + FACTOR * spread
        if not self._is_high or was_high:
            return []
        return [
            f"loss ({loss:.4g}) is more than {FACTOR:g} median absolute deviations ({spread:.2g}) "
            f"above {middle:.4g}, the median of the {len(before)} before it"
        ]

    def _check_experts(self, metrics: Metrics) -> list[str]:
        """Return a line for each layer whose experts have had no token for `IDLE_STEPS` steps."""
        lines = []
        for layer in layer_names(metrics):
            new = []
            for e, load in enumerate(expert_loads(metrics, layer)):
                idle = self._idle[layer, e] = 0 if load else self._idle.get((layer, e), 0) + 1
                new += [e] if idle == IDLE_STEPS else []
            if new:
                names = ", ".join(map(str, new[:MOST_NAMED]))
                names += f" and {len(new) - MOST_NAMED} more" if len(new) > MOST_NAMED else ""
                lines.append(
                    f"no token of {IDLE_STEPS} steps has chosen experts {names} of {layer}"
                )
        return lines

    def _check_gradient(self, metrics: Metrics) -> list[str]:
        """Return the alarm about a gradient that is not finite, or []."""
        norm = metrics.get("grad_norm", 0.0)
        if math.isfinite(norm) or "loss_scale" in metrics:
            return []
        return [f"grad_norm ({norm}) is not finite, so the step was skipped"]

    def _check_collapse(self, metrics: Metrics) -> list[str]:
        """Return the alarm about layers whose loads have become uneven over a block, or []."""
        for layer in layer_names(metrics):
            loads_E = expert_loads(metrics, layer)
            if not loads_E:
                continue
            sums_E = self._block.setdefault(layer, [0.0] * len(loads_E))
            self._block[layer] = [a + b for a, b in zip(sums_E, loads_E, strict=True)]
        self._block_steps += 1
        if self._block_steps < BLOCK_STEPS:
            return []
        uneven = {layer: _share_of_experts(sums_E) for layer, sums_E in self._block.items()}
        uneven = {layer: share for layer, share in uneven.items() if share <= COLLAPSED_SHARE}
        block, self._block, self._block_steps = self._block, {}, 0
        is_new, self._has_collapsed = bool(uneven) and not self._has_collapsed, bool(uneven)
        if not is_new:
            return []
        layer = min(uneven, key=lambda name: uneven[name])
        sums_E = block[layer]
        busiest = max(range(len(sums_E)), key=lambda e: sums_E[e])
        share = sums_E[busiest] / sum(sums_E)
        layers = layer if len(uneven) == 1 else f"{len(uneven)} layers, most of all {layer},"
        return [
            f"loads of {layers} have collapsed: expert {busiest} has {share:.1%} of the "
            f"choices of {BLOCK_STEPS} steps, {share * len(sums_E):.1f} times the mean: raise "
            "[balance] global_batch_coef, lower --lr or lengthen the warm-up"
        ]

    def _check_first_steps(self, step: int, metrics: Metrics) -> list[str]:
        """Return the alarm about large gradients or rising losses in the first steps, or []."""
        norm, loss = metrics.get("grad_norm", math.nan), metrics["loss"]
        if step > FIRST_STEPS or "reward" in metrics or not math.isfinite(norm + loss):
            return []
        rise, self._lowest_loss = loss - self._lowest_loss, min(loss, self._lowest_loss)
        norms = self._rising_norms = [*self._rising_norms, norm] if rise > LOSS_GROWTH else []
        if step == 1:
            self._first_norm = norm
            if norm <= FIRST_NORM:
                return []
            return [
                f"grad_norm ({norm:.4g}) of the first step is above {FIRST_NORM:g}: check the "
                "initialisation of the weights, or the weights that the run starts from"
            ]
        growth = max(norms, default=0.0) / max(self._first_norm, 1e-30)
        if len(norms) < 2 or growth < NORM_GROWTH or self._has_grown:
            return []
        self._has_grown = True
        return [
            f"grad_norm ({max(norms):.4g}) is {growth:.1f} times that of the first step and the "
            f"loss ({loss:.4g}) has risen by {rise:.2g}: lower --lr or lengthen the warm-up"
        ]


def _share_of_experts(loads_E: list[float]) -> float:
    """Return the effective number of experts over all: 1 for even loads, 1/E for one expert.

    `_share_of_experts([2, 2, 0, 0])` is 0.5. Without tokens it is 1.
    """
    squares = sum(load * load for load in loads_E)
    return sum(loads_E) ** 2 / squares / len(loads_E) if squares else 1.0


METRICS, CURVES = "metrics.jsonl", "curves.png"
SAMPLES = "samples.jsonl"
CONFIG, EXPORT = "config.toml", "export"
# Files of a run; metrics.tmp is a draft of METRICS.
FILES = (METRICS, CURVES, CONFIG, SAMPLES, WANDB_ID, MLFLOW_ID, "metrics.tmp")
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
    """The writer of a run's progress bar, metrics, curves and alarms, on rank 0.

    `start` is the last step of earlier starts. `unit` names the unit of text that a loss is of.
    """

    def __init__(self, args: RunConfig, *, start: int, unit: str = "byte") -> None:
        modules = {name: _import(name) for name in NAMES}
        missing = [NAMES[name] for name, module in modules.items() if module is None]
        if missing:
            print(f"going on without {', '.join(missing)} (pip install {' '.join(missing)})")
        self.path, self.steps, self.unit = args.run_dir / METRICS, args.steps, unit
        self.printed = {start + 1, self.steps}  # steps whose lines do not wait
        self._next_line = 0.0
        cut_metrics(self.path, start)
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

    def log(self, step: int, metrics: Metrics, *, expert_loads: bool = True) -> None:
        """Write a step's metrics, and print its alarms; `expert_loads` False omits expert loads."""
        for line in self.alarms.find_alarms(step, metrics):
            print(line, flush=True) if self.bar is None else self.bar.write(line)
        metrics = metrics if expert_loads else without_experts(metrics)
        self.file.write(json.dumps({"step": step, **pack_loads(metrics)}).encode() + b"\n")
        for logger in self.loggers:
            logger.log(metrics, step)
        postfix = {
            label: format(metrics[name], spec)
            for name, label, spec in BAR_METRICS
            if name in metrics
        }
        if self.bar is not None:
            self.bar.set_postfix(postfix, refresh=False)
            self.bar.update()
        elif step in self.printed or time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINES_S
            numbers = ", ".join(f"{name} {value}" for name, value in postfix.items())
            print(f"step {step} of {self.steps}: {numbers}", flush=True)

    def __enter__(self) -> RunReport:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Finish the files and draw the curves; after an error only the bar's line ends."""
        if self.bar is not None:
            self.bar.close()
        if error is not None:
            return
        self.file.close()
        for logger in self.loggers:
            logger.close()
        if self.figure:
            draw_curves(self.figure, self.path, self.unit)


def pack_loads(metrics: Metrics) -> dict[str, Any]:
    """Return metrics with each layer's expert loads as one list, rounded to three decimals."""
    loads = {
        f"expert_loads/{layer}": expert_loads(metrics, layer) for layer in layer_names(metrics)
    }
    lists = {name: [round(load, 3) for load in of_E] for name, of_E in loads.items() if of_E}
    return without_experts(metrics) | lists


def make_run_dir(path: Path) -> None:
    """Make the directory of a run. Raises ValueError unless a run can write all its files there."""
    name = format_option("--run-dir", path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        may_write = os.access(path, os.W_OK | os.X_OK)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{name} must be a directory to write: {reason}") from None
    if not may_write:
        raise ValueError(f"{name} must be a directory to write: Permission denied")
    for part in FILES:
        if os.path.lexists(path / part) and not (path / part).is_file():
            raise ValueError(f"{name} must have a plain file as {part}: move it away")
    for part in FOLDERS:
        if os.path.lexists(path / part) and not (path / part).is_dir():
            raise ValueError(f"{name} must have a directory as {part}: move it away")
    if (path / EXPORT).is_symlink():  # an export replaces the one before it
        raise ValueError(f"{name} must have a directory as {EXPORT}, not a link: move it away")


def cut_metrics(path: Path, step: int) -> None:
    """Drop the lines of metrics.jsonl after `step`, and damaged lines, before a run resumes."""
    lines, num_damaged = read_metrics(path)
    if num_damaged:
        print(f"{path}: dropped {num_damaged} damaged line(s)", flush=True)
    draft = path.with_suffix(".tmp")
    draft.unlink(missing_ok=True)
    with draft.open("x") as file:  # never through a link
        file.writelines(json.dumps(line) + "\n" for line in lines if line["step"] <= step)
    draft.replace(path)


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the lines of a metrics file as dicts, and the number of damaged lines."""
    records = [_parse_line(line) for line in read_lines(path)]
    lines = [line for line in records if line is not None]
    return lines, len(records) - len(lines)


def _parse_line(line: bytes) -> dict[str, Any] | None:
    """Return a line's metrics; None = the line is damaged."""
    try:
        metrics = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(metrics, dict) or type(metrics.get("step")) is not int:
        return None
    drawn = metrics.get("loss"), metrics.get(LOAD, math.nan)
    return metrics if all(isinstance(value, float) for value in drawn) else None


def draw_curves(figure: ModuleType, metrics: Path, unit: str = "byte") -> None:
    """Draw loss or reward, load and two heat maps over the steps into curves.png beside metrics.

    The maps show layers' busiest experts, and the least even layer. `figure` is matplotlib.figure.
    """
    lines, _ = read_metrics(metrics)
    steps = [line["step"] for line in lines]
    canvas = figure.Figure(figsize=(11, 6.5), layout="constrained")
    (loss, layers), (load, experts) = canvas.subplots(2, 2, sharex=True)
    curve = "reward" if lines and "reward" in lines[-1] else "loss"
    loss.plot(steps, [line[curve] for line in lines], linewidth=1, label="training")
    evaluated = [line for line in lines if "eval_loss" in line]
    if evaluated:
        points = [line["step"] for line in evaluated], [line["eval_loss"] for line in evaluated]
        loss.plot(*points, marker="o", markersize=4, label="held out")
        loss.legend()
    loss.set(ylabel=f"loss (nats per {unit})" if curve == "loss" else "mean reward of a response")
    load.plot(steps, [line.get(LOAD, math.nan) for line in lines], linewidth=1)
    load.axhline(1.0, color="gray", linewidth=0.8, linestyle=":")
    load.set(ylabel="busiest expert / mean\n(worst layer)", xlabel="step")
    _draw_maps(canvas, layers, experts, lines)
    experts.set(xlabel="step")
    canvas.savefig(metrics.with_name(CURVES), dpi=110)


def _draw_maps(canvas: Any, layers: Any, experts: Any, lines: list[dict[str, Any]]) -> None:
    """Draw loads of layers and of one layer's experts into two axes, from lines with all loads."""
    names = layer_names(lines[-1]) if lines else []
    full_lines = [
        line for line in lines if names and all(f"expert_load/{n}" in line for n in names)
    ]
    rows = [[line[f"expert_load/{name}"] for line in full_lines] for name in names]
    _draw_map(canvas, layers, full_lines, rows, vmin=1.0)
    short = [name.partition("layers.")[2].removesuffix(".mlp") for name in names]
    layers.set(ylabel="MoE layer", title="busiest expert / mean")
    if len(names) <= MOST_TICKS:
        layers.set_yticks(range(len(names)), short)
    least_even = max(range(len(names)), key=lambda i: sum(rows[i]), default=None)
    if least_even is None:
        return
    key = f"expert_loads/{names[least_even]}"
    expert_lines = [line for line in full_lines if key in line]
    loads = [line[key] for line in expert_lines]
    by_expert = list(map(list, zip(*loads, strict=True)))
    _draw_map(canvas, experts, expert_lines, by_expert, vmin=0.0, vmax=2.0, cmap="RdBu_r")
    experts.set(ylabel="expert", title=f"load of each expert / mean, layer {short[least_even]}")


def _draw_map(
    canvas: Any, axes: Any, lines: list[dict[str, Any]], rows: list[list[float]], **style: Any
) -> None:
    """Draw `rows`, values of a layer or expert at each line, as a map; nothing for one line."""
    if len(lines) < 2:
        return
    steps = [line["step"] for line in lines]
    colors = axes.pcolormesh(steps, range(len(rows)), rows, shading="nearest", **style)
    canvas.colorbar(colors, ax=axes, extend="max" if "vmax" in style else "neither")


def _import(name: str) -> ModuleType | None:
    """Return a module; None = it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
