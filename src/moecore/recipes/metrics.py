"""What a step measured: losses, what the layers routed, learning rate, time, memory, peak FLOPs."""

from __future__ import annotations

import itertools
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.models import DecoderConfig, flops_per_token
from moecore.planning.gpus import TERA, find_bf16_flops
from moecore.train.step_result import StepResult

Metrics = dict[str, float]


class Moment:
    """A point of this rank's work: on a GPU in its stream, else in time.

    Args:
        device: of the rank.
    """

    def __init__(self, device: torch.device) -> None:
        self.time = time.perf_counter()
        self.event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()

    def wait(self) -> None:
        """Return when it has come."""
        if self.event is not None:
            self.event.synchronize()

    def seconds_until(self, end: Moment) -> float:
        """Return the time between two moments that have come."""
        if self.event is None or end.event is None:
            return end.time - self.time
        milliseconds: float = self.event.elapsed_time(end.event)
        return milliseconds / 1e3


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """An optimizer step that a GPU may still be at.

    Attributes:
        step: its number.
        began, fetched, ended: when the host asks for its data, when all ranks have theirs, and when
            it is done.
        loss: mean over ranks, on the device.
        result: what the step was, on the device.
        counts: of the step's batch over all data ranks, on the device.
        ep: ranks that share a layer's experts.
        expert_loads: whether the load of each expert is among those that are logged.
        reader: the stream that the host reads on, see `TrainingJob`.
        extra: metrics that are known already: of the data, and of an evaluation after the step.
    """

    step: int
    began: Moment
    fetched: Moment
    ended: Moment
    loss: Tensor
    result: StepResult
    counts: Tensor
    ep: int
    expert_loads: bool
    reader: torch.cuda.Stream | None
    extra: Metrics = field(default_factory=dict)

    def read_counts(self) -> list[int]:
        """Wait for the step, and for none after it; return `counts`."""
        with self._read():
            counts: list[int] = self.counts.tolist()
        return counts

    def metrics(self) -> Metrics:
        """Wait for the step, and for none after it; return its metrics, the same on every rank."""
        with self._read():
            values = {"loss": self.loss.item(), **self.result.to_dict()}
        loads = {
            layer: expert_loads(values, layer) for layer in self.result.metrics.tokens_per_expert
        }
        if loads:  # else a dense model, or a pipeline stage without MoE layers
            of_ranks = [rank_load(of_E, self.ep) for of_E in loads.values()]
            values["rank_load_max_over_mean"] = sum(of_ranks) / len(of_ranks)
        return values | self.extra

    @contextmanager
    def _read(self) -> Iterator[None]:
        self.ended.wait()
        with nullcontext() if self.reader is None else torch.cuda.stream(self.reader):
            yield


def expert_loads(metrics: Metrics, layer: str) -> list[float]:
    """Return the load of each expert of a layer over the mean; [] = not among the metrics."""
    names = (f"expert_load/{layer}/{e}" for e in itertools.count())
    return [metrics[name] for name in itertools.takewhile(metrics.__contains__, names)]


def layer_names(metrics: Mapping[str, object]) -> list[str]:
    """Return the MoE layers that metrics have the load of."""
    names = (name.split("/") for name in metrics)
    return [parts[1] for parts in names if parts[0] == "expert_load" and len(parts) == 2]


def without_experts(metrics: Metrics) -> Metrics:
    """Return metrics without the load of each expert: thousands of numbers in large models."""
    layers = {f"expert_load/{layer}" for layer in layer_names(metrics)}
    return {name: value for name, value in metrics.items() if name.rpartition("/")[0] not in layers}


def rank_load(loads_E: list[float], ep: int) -> float:
    """Return the load of the busiest of ep ranks over the mean.

    A layer's load, that of its busiest expert, measures balance; that of its ranks measures time.
    """
    num_local = len(loads_E) // ep
    ranks = [sum(loads_E[first : first + num_local]) for first in range(0, len(loads_E), num_local)]
    return max(ranks) / max(sum(ranks) / ep, 1e-9)


def memory_gib(device: torch.device) -> Metrics:
    """Return the most memory that this rank has used so far; the host waits for nothing."""
    if device.type == "cuda":
        return {
            "memory_allocated_gib": torch.cuda.max_memory_allocated(device) / 2**30,
            "memory_reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30,
        }
    unit = 1 if sys.platform == "darwin" else 1024  # of what the system counts
    return {"memory_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30}


def usage(
    counts: list[int], seconds: float, config: DecoderConfig | None, peak: float | None
) -> Metrics:
    """Return the share of padding, and `mfu` where the FLOPs of a model and the peak are known.

    FLOPs are those of forward and backward of documents, over what all devices could do.

    Args:
        counts: of a step over all data ranks, see `StepBatch.counts`.
        seconds: of the step.
        config: of the model; None = its FLOPs are not known.
        peak: dense TFLOP/s of one device; None = not known.
    """
    _, tokens, pairs, size = counts
    metrics = {"padding_share": 1 - tokens / size}
    if config is not None and peak:
        of_all = dist.get_world_size() * peak * 1e12
        metrics["mfu"] = flops_of(config, tokens, pairs) / seconds / of_all
    return metrics


def flops_of(config: DecoderConfig, tokens: int, pairs: int) -> float:
    """Return the FLOPs of forward and backward of documents: see `StepBatch.counts`."""
    linear = flops_per_token(config, 0)
    return tokens * linear + pairs * (flops_per_token(config, 1) - linear)


def peak_tflops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the dense TFLOP/s of a device by its name; None = not known."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    flops = find_bf16_flops(torch.cuda.get_device_name(device))
    return None if flops is None else flops / TERA
