"""Loggers of a run's metrics: TensorBoard, Weights & Biases and MLflow.

A run of W&B or MLflow is one run over all restarts: its id is a file in the run directory.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import uuid
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from moecore.base.fields import CheckedRecord
from moecore.recipes.metrics import Metrics
from moecore.recipes.records import values_of

WANDB_ID, MLFLOW_ID = "wandb.id", "mlflow.id"  # files of a run directory


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggerOptions(CheckedRecord):
    """Where metrics are logged, besides metrics.jsonl and TensorBoard.

    Attributes:
        wandb: the project of Weights & Biases; None = off.
        mlflow: the experiment of MLflow, whose server MLFLOW_TRACKING_URI names; None = off.
    """

    wandb: str | None = None
    mlflow: str | None = None

    def check(self) -> None:
        """Raise ValueError for a logger whose package is missing."""
        for name in ("wandb", "mlflow"):
            value = getattr(self, name)
            if value and importlib.util.find_spec(name) is None:
                raise ValueError(
                    f"--{name} ({value}) must have {name} installed: pip install {name}"
                )


class Logger(Protocol):
    """A place that metrics go to."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Log the metrics of a step."""

    def close(self) -> None:
        """End the log."""


class TensorBoardLogger:
    """Writes the directory `tensorboard` of a run; drops the steps after `start`."""

    def __init__(self, module: ModuleType, run_dir: Path, *, start: int) -> None:
        folder = str(run_dir / "tensorboard")
        self._writer = module.SummaryWriter(folder, purge_step=start + 1)

    def log(self, step: int, metrics: Metrics) -> None:
        """Log the metrics of a step."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """End the log."""
        self._writer.close()


class WandbLogger:
    """Logs to the run of W&B whose id is in the run directory."""

    def __init__(self, project: str, args: argparse.Namespace) -> None:
        file = args.run_dir / WANDB_ID
        if not file.exists():
            file.write_text(uuid.uuid4().hex)
        self._run = importlib.import_module("wandb").init(
            project=project,
            name=args.run_dir.name,
            dir=args.run_dir,
            id=file.read_text(),
            resume="allow",
            config=json_of(args),
        )

    def log(self, step: int, metrics: Metrics) -> None:
        """Log the metrics of a step."""
        self._run.log(metrics, step=step)

    def close(self) -> None:
        """End the log."""
        self._run.finish()


class MLflowLogger:
    """Logs to the run of MLflow whose id is in the run directory."""

    def __init__(self, experiment: str, args: argparse.Namespace) -> None:
        self._mlflow = importlib.import_module("mlflow")
        self._mlflow.set_experiment(experiment)
        file = args.run_dir / MLFLOW_ID
        if file.exists():
            self._mlflow.start_run(run_id=file.read_text())
            return
        run = self._mlflow.start_run(run_name=args.run_dir.name)
        file.write_text(run.info.run_id)
        self._mlflow.log_params(json_of(args))  # a parameter of MLflow cannot change later

    def log(self, step: int, metrics: Metrics) -> None:
        """Log the metrics of a step."""
        self._mlflow.log_metrics(metrics, step=step)

    def close(self) -> None:
        """End the log."""
        self._mlflow.end_run()


def loggers_of(
    args: argparse.Namespace, tensorboard: ModuleType | None, *, start: int
) -> list[Logger]:
    """Return the loggers of a run, of which `start` steps are done."""
    options = logger_options(args)
    loggers: list[Logger] = []
    if tensorboard is not None:
        loggers.append(TensorBoardLogger(tensorboard, args.run_dir, start=start))
    if options.wandb:
        loggers.append(WandbLogger(options.wandb, args))
    if options.mlflow:
        loggers.append(MLflowLogger(options.mlflow, args))
    return loggers


def logger_options(args: argparse.Namespace) -> LoggerOptions:
    """Return the options of [logging] of the arguments."""
    return LoggerOptions(**values_of(args, "logging"))


def json_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a run as JSON has them."""
    options = {name: value for name, value in vars(args).items() if name != "flags"}
    values: dict[str, Any] = json.loads(json.dumps(options, default=str))
    return values
