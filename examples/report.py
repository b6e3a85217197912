"""What a run shows and leaves behind: a bar, metrics.jsonl, TensorBoard and curves.png.

tqdm, TensorBoard and matplotlib are optional: what is missing is named once and left out.
"""

from __future__ import annotations

import importlib
import json
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

from metrics import Metrics

NAMES = {
    "tqdm": "tqdm",
    "torch.utils.tensorboard": "tensorboard",
    "matplotlib.figure": "matplotlib",
}


class Report:
    """The record of one run, kept by rank 0.

    Args:
        run_dir: where metrics.jsonl, tensorboard/ and curves.png go.
        start: steps that the checkpoint has done; later lines of an earlier run are cut off.
        steps: steps of the whole run.
    """

    def __init__(self, run_dir: Path, *, start: int, steps: int) -> None:
        modules = {name: _import(name) for name in NAMES}
        missing = [NAMES[name] for name, module in modules.items() if module is None]
        if missing:
            print(f"going on without {', '.join(missing)} (pip install {' '.join(missing)})")
        self.path, self.steps = run_dir / "metrics.jsonl", steps
        cut_metrics(self.path, start)
        self.file = self.path.open("a")
        tqdm, tensorboard = modules["tqdm"], modules["torch.utils.tensorboard"]
        self.figure = modules["matplotlib.figure"]
        if tqdm:  # its default lock is a semaphore between processes, which a rank would leave
            tqdm.tqdm.set_lock(threading.RLock())
        self.bar = tqdm.tqdm(total=steps, initial=start, unit="step") if tqdm else None
        self.writer = None
        if tensorboard:
            folder = str(run_dir / "tensorboard")
            self.writer = tensorboard.SummaryWriter(folder, purge_step=start + 1)

    def log(self, step: int, metrics: Metrics) -> None:
        """Add one step. Its line is out of this process before a checkpoint of the step begins."""
        self.file.write(json.dumps({"step": step, **metrics}) + "\n")
        self.file.flush()
        if self.writer:
            for name, value in metrics.items():
                self.writer.add_scalar(name, value, step)
        shown = {
            "loss": f"{metrics['loss']:.3f}",
            "tok/s": f"{metrics['tokens_per_second']:.0f}",
            "load": f"{metrics['expert_load_max_over_mean']:.2f}",
        }
        if self.bar is not None:
            self.bar.set_postfix(shown, refresh=False)
            self.bar.update()
        elif step % 20 == 0 or step == self.steps:
            print(f"step {step}", *(f"{k} {v}" for k, v in shown.items()), flush=True)

    def close(self) -> None:
        """Finish the files and draw the curves."""
        self.file.close()
        if self.bar is not None:
            self.bar.close()
        if self.writer:
            self.writer.close()
        if self.figure:
            draw_curves(self.figure, self.path)


def cut_metrics(path: Path, step: int) -> None:
    """Drop the lines after `step`, so that a resumed run's file equals an uninterrupted one's."""
    kept = [line for line in read_metrics(path) if line["step"] <= step]
    text = "".join(json.dumps(line) + "\n" for line in kept)
    draft = path.with_suffix(".tmp")
    draft.write_text(text)
    draft.replace(path)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a metrics file; a kill can leave the last one half written."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def draw_curves(figure: ModuleType, metrics: Path) -> None:
    """Draw loss and expert load over the steps into curves.png beside the metrics."""
    lines = read_metrics(metrics)
    steps = [line["step"] for line in lines]
    canvas = figure.Figure(figsize=(8, 6), layout="constrained")
    upper, lower = canvas.subplots(2, 1, sharex=True)
    upper.plot(steps, [line["loss"] for line in lines])
    upper.set(ylabel="loss (nats per byte)")
    lower.plot(steps, [line["expert_load_max_over_mean"] for line in lines])
    lower.axhline(1.0, color="gray", linewidth=0.8, linestyle=":")
    lower.set(ylabel="expert load, max / mean\n(worst layer)", xlabel="step")
    canvas.savefig(metrics.with_name("curves.png"), dpi=120)


def _import(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
