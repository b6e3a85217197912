"""Loggers of a run's metrics: TensorBoard, Weights & Biases and MLflow.

A run of W&B or MLflow is one run over all restarts: its id is a file in the run directory.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import uuid
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from moecore.base.fields import CheckedRecord
from moecore.recipes.metrics import Metrics

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

    def __init__(self, project: str, run_dir: Path, config: Any) -> None:
        file = run_dir / WANDB_ID
        if not file.exists():
            file.write_text(uuid.uuid4().hex)
        self._run = importlib.import_module("wandb").init(
            project=project,
            name=run_dir.name,
            dir=run_dir,
            id=file.read_text(),
            resume="allow",
            config=json_of(config),
        )

    def log(self, step: int, metrics: Metrics) -> None:
        """Log the metrics of a step."""
        self._run.log(metrics, step=step)

    def close(self) -> None:
        """End the log."""
        self._run.finish()


class MLflowLogger:
    """Logs to the run of MLflow whose id is in the run directory."""

    def __init__(self, experiment: str, run_dir: Path, config: Any) -> None:
        self._mlflow = importlib.import_module("mlflow")
        self._mlflow.set_experiment(experiment)
        file = run_dir / MLFLOW_ID
        if file.exists():
            self._mlflow.start_run(run_id=file.read_text())
            return
        run = self._mlflow.start_run(run_name=run_dir.name)
        file.write_text(run.info.run_id)
        self._mlflow.log_params(json_of(config))  # a parameter of MLflow cannot change later

    def log(self, step: int, metrics: Metrics) -> None:
        """Log the metrics of a step."""
        self._mlflow.log_metrics(metrics, step=step)

    def close(self) -> None:
        """End the log."""
        self._mlflow.end_run()


def loggers_of(config: Any, tensorboard: ModuleType | None, *, start: int) -> list[Logger]:
    """Return the loggers of a run.

    Args:
        config: the options of the run, with `run_dir` and `logging`.
        tensorboard: the module with `SummaryWriter`; None = TensorBoard is not installed.
        start: steps that the run has done.
    """
    options: LoggerOptions = config.logging
    loggers: list[Logger] = []
    if tensorboard is not None:
        loggers.append(TensorBoardLogger(tensorboard, config.run_dir, start=start))
    if options.wandb:
        loggers.append(WandbLogger(options.wandb, config.run_dir, config))
    if options.mlflow:
        loggers.append(MLflowLogger(options.mlflow, config.run_dir, config))
    return loggers


def json_of(config: Any) -> dict[str, Any]:
    """Return the options of a run as JSON values."""
    items = [field for field in fields(config) if field.metadata.get("is_option", True)]
    options = {field.name: getattr(config, field.name) for field in items}
    values: dict[str, Any] = json.loads(json.dumps(options, default=_json_value))
    return values


def _json_value(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)
