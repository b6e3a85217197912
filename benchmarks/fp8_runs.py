"""Curves of `benchmarks/train_fp8.py`: a JSON file, comparisons of its runs, and their plot.

python -m benchmarks.fp8_runs benchmarks/results/fp8/training.json precision.png
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.records import Environment, find_destination

BASE = "bf16"
GATHERED = "-gathered"  # ends variants that differ from another one in what is gathered
POINT = 10  # steps that a point of a curve is the mean of
LAST = 5  # points that the final training loss is the mean of


@dataclass(kw_only=True, slots=True)
class Run:
    """Results of one run, as stored in the file.

    Attributes:
        losses: of training, by point: means of `POINT` steps.
        loads: busiest expert over the mean, of the worst layer, by point.
        mean_loads: the same, mean over layers.
        held_out: pairs of a step and the loss on held-out text, the last one after the last
            step.
        held_out_in_bf16: the last one, computed in bf16 with the same weights; None without
            probes.
        probe_steps: steps before which gradients were compared; 0 is the first.
        cosines: "layers.3.experts" -> cosine of its gradient to bf16's, by probe.
        moved: share of the expert choices that differ in bf16, by probe.
        skipped: steps whose gradient was not finite.
        bytes_per_parameter: of "weights", "gradients" and the optimizer's "state".
    """

    seed: int
    variant: str
    losses: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    mean_loads: list[float] = field(default_factory=list)
    held_out: list[list[float]] = field(default_factory=list)
    held_out_in_bf16: float | None = None
    probe_steps: list[int] = field(default_factory=list)
    cosines: dict[str, list[float]] = field(default_factory=dict)
    moved: list[float] = field(default_factory=list)
    skipped: int = 0
    bytes_per_parameter: dict[str, float] = field(default_factory=dict)

    @property
    def last_loss(self) -> float:
        """Mean training loss of the last points."""
        return compute_mean(self.losses[-LAST:])

    @property
    def last_load(self) -> float:
        """Mean load of the worst layer over the last points."""
        return compute_mean(self.loads[-LAST:])


def compute_mean(values: list[float]) -> float:
    return sum(values) / len(values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratios:
    """Results of a run over those of its base with the same seed, bf16 or gathered bf16.

    Attributes:
        curve: mean training loss of all points.
        loss: training loss of the last points.
        held_out: last held-out loss.
        load: load of the last points.
    """

    curve: float
    loss: float
    held_out: float
    load: float

    @classmethod
    def of(cls, run: Run, runs: list[Run]) -> Ratios | None:
        """Return the ratios; None if there is no base run, or the run is it."""
        wanted = run.seed, find_base(run.variant)
        base = next((other for other in runs if (other.seed, other.variant) == wanted), None)
        if base is None or base is run or len(base.losses) != len(run.losses):
            return None
        return cls(
            curve=compute_mean([a / b for a, b in zip(run.losses, base.losses, strict=True)]),
            loss=run.last_loss / base.last_loss,
            held_out=run.held_out[-1][1] / base.held_out[-1][1],
            load=run.last_load / base.last_load,
        )


def find_base(variant: str) -> str:
    """Return the variant with which a variant is compared."""
    return variant.removesuffix(GATHERED) if variant.endswith(GATHERED) else BASE


def summarize(runs: list[Run]) -> list[str]:
    """Return one line per run, and one per variant over its seeds."""
    lines = []
    found: dict[str, list[Ratios]] = {}
    for run in sorted(runs, key=lambda run: (run.seed, run.variant)):
        ratios = Ratios.of(run, runs)
        lines.append(format_row(run, ratios))
        if ratios is not None:
            found.setdefault(run.variant, []).append(ratios)
    for variant, of_seeds in found.items():
        line = f"{variant} over {len(of_seeds)} seeds, / {find_base(variant)}:"
        for name in ("curve", "loss", "held_out", "load"):
            values = [getattr(ratios, name) for ratios in of_seeds]
            line += f" {name} x{compute_mean(values):.4f} ({min(values):.4f} to {max(values):.4f})"
        lines.append(line)
    return lines


def format_row(run: Run, ratios: Ratios | None) -> str:
    """Return the run as a line."""
    line = f"seed {run.seed} {run.variant:<20} loss {run.last_loss:.4f}"
    line += f" load {run.last_load:.2f} held out {run.held_out[-1][1]:.4f}"
    if run.held_out_in_bf16 is not None:
        line += f" (in bf16 {run.held_out_in_bf16:.4f})"
    if ratios is not None:
        line += f" | / {find_base(run.variant)}: curve x{ratios.curve:.4f}"
        line += f" loss x{ratios.loss:.4f} held out x{ratios.held_out:.4f}"
        line += f" load x{ratios.load:.3f}"
    if run.cosines:
        least, name = min((min(values), name) for name, values in run.cosines.items())
        line += f" | cosine >= {least:.4f} ({name}), {max(run.moved):.2%} of choices moved"
    if run.bytes_per_parameter:
        parts = " + ".join(f"{v:.2f} {k}" for k, v in run.bytes_per_parameter.items())
        line += f" | {sum(run.bytes_per_parameter.values()):.2f} bytes = {parts}"
    return f"{line} | {run.skipped} skipped"


def load_runs(path: Path, common: dict[str, Any]) -> list[Run]:
    """Return the runs of a file; an absent file has none.

    Raises:
        ValueError: if its runs cannot be compared with runs of these settings.
    """
    if not path.exists():
        return []
    found = json.loads(path.read_text())
    wanted = json.loads(json.dumps(common))
    differs = [name for name in wanted if found["settings"].get(name) != wanted[name]]
    if differs:
        raise ValueError(
            f"--json ({path}) must have runs of the same {', '.join(differs)}: name another file"
        )
    return [Run(**run) for run in found["runs"]]


def write(path: Path, common: dict[str, Any], runs: list[Run]) -> None:
    """Write all runs, with the environment of this session."""
    command = shlex.join(["-m", "benchmarks.train_fp8", *sys.argv[1:]])
    environment = dataclasses.replace(Environment.here(), command=command)
    listed = [rounded(dataclasses.asdict(run)) for run in runs]
    content = {"environment": dataclasses.asdict(environment), "settings": common, "runs": listed}
    path = find_destination(path, environment.commit)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content) + "\n")


def rounded(value: Any) -> Any:
    """Return a value with floats rounded to six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return {k: rounded(v) for k, v in value.items()} if isinstance(value, dict) else value


def draw(runs: list[Run], path: Path) -> None:
    """Draw losses, their ratios to bf16's, expert loads and cosines of all runs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    (losses, loads), (ratios, cosines) = figure.subplots(2, 2)
    bases = {run.seed: run for run in runs if run.variant == BASE}
    for run in runs:
        steps, label = point_steps(run), f"{run.variant}, seed {run.seed}"
        style = dict(color=f"C{run.seed}", linestyle="-" if run.variant == BASE else "--")
        losses.plot(steps, run.losses, label=label, linewidth=1, **style)
        loads.plot(steps, run.mean_loads, linewidth=1, **style)
        if run.seed in bases and run.variant != BASE:
            pairs = zip(run.losses, bases[run.seed].losses, strict=True)
            of_points = [a / b for a, b in pairs]
            ratios.plot(steps, of_points, label=label, linewidth=1, color=style["color"])
        for name, values in run.cosines.items():
            if name.endswith(".experts"):
                cosines.plot(run.probe_steps, values, linewidth=0.8, color=style["color"])
    ratios.axhspan(0.995, 1.005, color="gray", alpha=0.2)
    losses.set(title="training loss (nats per byte)", yscale="log")
    loads.set(title="busiest expert / mean, mean over layers")
    ratios.set(title="loss / loss in bf16, same seed (band: 0.5%)", xlabel="step")
    cosines.set(title="cosine of experts' gradients to bf16's, each layer", xlabel="step")
    losses.legend(fontsize=7)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def average_points(values: list[float]) -> list[float]:
    """Return means of `POINT` neighbours."""
    return [compute_mean(values[i : i + POINT]) for i in range(0, len(values), POINT)]


def point_steps(run: Run) -> list[int]:
    return [POINT * i for i in range(len(run.losses))]


def main() -> int:
    """Draw the runs of a file."""
    if len(sys.argv) != 3:
        print("fp8_runs: error: give the file of the runs and that of the plot", file=sys.stderr)
        return 2
    runs = [Run(**run) for run in json.loads(Path(sys.argv[1]).read_text())["runs"]]
    draw(runs, Path(sys.argv[2]))
    print("\n".join(summarize(runs)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
