"""Metrics of a step, and loggers of metrics: TensorBoard, Weights & Biases and MLflow."""

import importlib
import importlib.util
import json
import resource
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecore.base.fields import CheckedRecord
from moecore.base.rank_checks import gather_objects
from moecore.models import DecoderConfig, flops_per_token
from moecore.moe.metrics import MoEMetrics
from moecore.parallel.mesh import Meshes
from moecore.parallel.model.parallel_state import get_moe_state
from moecore.planning.gpus import TERA, find_bf16_flops
from moecore.recipes.files import read_lines
from moecore.train.step_result import StepResult

Metrics = dict[str, float]
Loads = dict[str, list[float]]  # MoE layer -> each expert's load / the layer's mean load


class Moment:
    """A timestamp: an event in the current CUDA stream or, without a GPU, the host's time."""

    def __init__(self, device: torch.device) -> None:
        self.time = time.perf_counter()
        self.event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()

    def wait_for_gpu(self) -> None:
        """Wait until the GPU has reached the event."""
        if self.event is not None:
            self.event.synchronize()

    def seconds_until(self, end: Self) -> float:
        """Return the seconds from this moment to `end`; the GPU must have completed both."""
        if self.event is None or end.event is None:
            return end.time - self.time
        milliseconds: float = self.event.elapsed_time(end.event)
        return milliseconds / 1e3


class StageMetrics:
    """Gathers metrics of the MoE layers of all pipeline stages. Collective over pp.

    Attributes:
        num_experts: by MoE layer of all stages; loads after these are of zero experts.
    """

    def __init__(self, meshes: Meshes, model: nn.Module) -> None:
        layers = get_moe_state(model).layers
        self.num_experts = {name: layer.config.num_experts for name, layer in layers.items()}
        self._device, self._group = meshes.device, None
        if meshes.parallel.pp > 1:
            self._group = meshes.dense.get_group("pp")
            for of_stage in gather_objects(self.num_experts, self._group):
                self.num_experts |= of_stage
        # Of each tensor of all stages: field, layer, shape, dtype, number of its stage.
        self._entries: list[tuple[str, str, torch.Size, torch.dtype, int]] | None = None

    def gather(self, metrics: MoEMetrics) -> MoEMetrics:
        """Return metrics with the layers of all stages. The first call synchronizes the device."""
        if self._group is None:
            return metrics
        of_fields = {f.name: getattr(metrics, f.name) for f in fields(MoEMetrics)}
        if self._entries is None:
            local = [(f, n, x.shape, x.dtype) for f, of in of_fields.items() for n, x in of.items()]
            of_stages = gather_objects(local, self._group)
            self._entries = [(*e, i) for i, of_stage in enumerate(of_stages) for e in of_stage]
        sizes, stage = [entry[2].numel() for entry in self._entries], self._group.rank()
        flat = torch.zeros(sum(sizes), dtype=torch.float64, device=self._device)  # exact to 2^53
        parts = flat.split(sizes)
        for (name, layer, *_, owner), part in zip(self._entries, parts, strict=True):
            if owner == stage:
                part.copy_(of_fields[name][layer].flatten())
        dist.all_reduce(flat, group=self._group)
        all_values: dict[str, dict[str, Tensor]] = {name: {} for name in of_fields}
        for (name, layer, shape, dtype, _), part in zip(self._entries, parts, strict=True):
            all_values[name][layer] = part.view(shape).to(dtype)
        return MoEMetrics(**all_values)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchedStep:
    """A launched optimizer step, which may still run on the GPU; its tensors are on the device."""

    step: int
    began: Moment  # the host requests the data
    fetched: Moment  # all ranks have their data
    ended: Moment
    loss: Tensor  # mean over ranks
    result: StepResult
    counts: Tensor  # int64 [5], sums of `count_labels_and_tokens` and of ranks that stop
    ep: int
    num_experts: Mapping[str, int]  # by MoE layer; loads after these are of zero experts
    logs_loads: bool  # whether the load of each expert is logged
    reader: torch.cuda.Stream | None  # on which the host reads, see `TrainingJob`
    timer: Any = None  # of the step's phases on this rank; None = the step is not measured
    times_RP: Tensor | None = None  # times of an earlier step on all ranks, see `Stragglers`
    orders: Mapping[str, Tensor] = field(default_factory=dict)  # of the step, see `ExpertMoves`
    lines: Sequence[str] = ()  # that report a move of experts after the step
    # Numbers or 0-dim tensors, such as those of an evaluation after the step.
    extra: dict[str, Any] = field(default_factory=dict)

    def read_metrics(self) -> tuple[Metrics, Loads]:
        """Wait until the GPU completes this step; return metrics and loads, equal on all ranks."""
        self.ended.wait_for_gpu()
        with nullcontext() if self.reader is None else torch.cuda.stream(self.reader):
            values = {"loss": self.loss.item(), **self.result.to_dict()}
            extra = {name: float(value) for name, value in self.extra.items()}
        loads = take_expert_loads(values, self.result.metrics.tokens_per_expert)
        if loads:  # else a dense model
            values["rank_load_max_over_mean"] = fmean(
                compute_rank_imbalance(
                    loads_E[: self.num_experts[name]], self.ep, self.orders.get(name)
                )
                for name, loads_E in loads.items()
            )
        return values | extra, loads

    def read_counts_and_times(self) -> tuple[list[int], list[list[float]]]:
        """Wait for this step; return counts, and seconds[rank][phase] ([] if not measured)."""
        self.ended.wait_for_gpu()
        with nullcontext() if self.reader is None else torch.cuda.stream(self.reader):
            return self.counts.tolist(), [] if self.times_RP is None else self.times_RP.tolist()


def take_expert_loads(metrics: Metrics, tokens_per_expert: Mapping[str, Tensor]) -> Loads:
    """Remove each expert's load from `metrics`, and return the loads by layer."""
    return {
        layer: [metrics.pop(f"expert_load/{layer}/{e}") for e in range(len(tokens_E))]
        for layer, tokens_E in tokens_per_expert.items()
        if f"expert_load/{layer}" in metrics
    }


def compute_rank_imbalance(loads_E: list[float], ep: int, order_E: Tensor | None = None) -> float:
    """Return the max over the mean of the `ep` ranks' loads; a rank has E / ep experts.

    `order_E` is the expert in each slot; None = the model's order.
    """
    if order_E is not None:
        loads_E = [loads_E[expert] for expert in order_E.tolist()]
    num_local = len(loads_E) // ep
    ranks = [sum(loads_E[first : first + num_local]) for first in range(0, len(loads_E), num_local)]
    return max(ranks) / max(sum(ranks) / ep, 1e-9)


def measure_peak_memory(device: torch.device) -> Metrics:
    """Return metrics with this rank's peak memory so far, in GiB, without a device sync."""
    if device.type == "cuda":
        return {
            "memory_allocated_gib": torch.cuda.max_memory_allocated(device) / 2**30,
            "memory_reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30,
        }
    unit = 1 if sys.platform == "darwin" else 1024  # of what the system counts
    return {"memory_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30}


def compute_padding_and_mfu(
    counts: list[int], seconds: float, config: DecoderConfig | None, peak_tflops: float | None
) -> Metrics:
    """Return "padding_share" and, unless `config` or `peak_tflops` is None, "mfu"."""
    _, tokens, pairs, size = counts
    metrics = {"padding_share": 1 - tokens / size}
    if config is not None and peak_tflops:
        total_peak = dist.get_world_size() * peak_tflops * 1e12
        metrics["mfu"] = compute_flops(config, tokens, pairs) / seconds / total_peak
    return metrics


def compute_flops(config: DecoderConfig, num_tokens: int, num_pairs: int) -> float:
    """Return forward and backward FLOPs; `num_pairs` is the sum of squared document lengths."""
    linear = flops_per_token(config, 0)
    return num_tokens * linear + num_pairs * (flops_per_token(config, 1) - linear)


def find_peak_tflops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return a GPU's peak dense bf16 TFLOP/s; None if `dtype` is not bf16 or the GPU unknown."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    flops = find_bf16_flops(torch.cuda.get_device_name(device))
    return None if flops is None else flops / TERA


WANDB_ID, MLFLOW_ID = "wandb.id", "mlflow.id"  # files of a run directory


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggerOptions(CheckedRecord):
    """Loggers of metrics besides metrics.jsonl and TensorBoard.

    Attributes:
        wandb: the project of Weights & Biases; None = off.
        mlflow: the experiment of MLflow, whose server MLFLOW_TRACKING_URI names; None = off.
    """

    wandb: str | None = None
    mlflow: str | None = None

    def check_packages(self) -> None:
        """Raise ValueError for a logger whose package is not installed."""
        for name in ("wandb", "mlflow"):
            value = getattr(self, name)
            if value and importlib.util.find_spec(name) is None:
                raise ValueError(
                    f"--{name} ({value}) must have {name} installed: pip install {name}"
                )


class Logger(NamedTuple):
    """A logger of metrics: call `log(metrics, step)` for each step, then `close()`."""

    log: Callable[[Metrics, int], object]
    close: Callable[[], object]


def open_loggers(config: Any, tensorboard: ModuleType | None, *, start: int) -> list[Logger]:
    """Return a run's loggers; the first step is `start` + 1. `tensorboard` None = disabled."""
    options: LoggerOptions = config.logging
    loggers: list[Logger] = []
    if tensorboard is not None:
        # Existing events after step `start` are hidden.
        folder = str(config.run_dir / "tensorboard")
        writer = tensorboard.SummaryWriter(folder, purge_step=start + 1)

        def log(metrics: Metrics, step: int) -> None:
            for name, value in metrics.items():
                writer.add_scalar(name, value, step)

        loggers.append(Logger(log, writer.close))
    # The id of a run of W&B or MLflow is in the run directory, so that a later start continues it.
    if options.wandb:
        file = config.run_dir / WANDB_ID
        if not file.exists():
            file.write_text(uuid.uuid4().hex)
        run = importlib.import_module("wandb").init(
            project=options.wandb,
            name=config.run_dir.name,
            dir=config.run_dir,
            id=_read_run_id(file),
            resume="allow",
            config=convert_to_json(config),
        )
        loggers.append(Logger(run.log, run.finish))
    if options.mlflow:
        mlflow: Any = importlib.import_module("mlflow")
        mlflow.set_experiment(options.mlflow)
        file = config.run_dir / MLFLOW_ID
        if file.exists():
            mlflow.start_run(run_id=_read_run_id(file))
        else:
            run = mlflow.start_run(run_name=config.run_dir.name)
            file.write_text(run.info.run_id)
            mlflow.log_params(convert_to_json(config))  # parameters of MLflow cannot change later
        loggers.append(Logger(mlflow.log_metrics, mlflow.end_run))
    return loggers


def _read_run_id(file: Path) -> str:
    """Return the first line of a text file, which is the id of its run; "" without lines."""
    return next(read_lines(file), b"").decode()


def convert_to_json(config: Any) -> dict[str, Any]:
    """Return the options of a run, a config dataclass, by field name as JSON values."""
    items = [field for field in fields(config) if field.metadata.get("is_option", True)]
    options = {field.name: getattr(config, field.name) for field in items}
    values: dict[str, Any] = json.loads(json.dumps(options, default=_convert_json_value))
    return values


def _convert_json_value(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)
