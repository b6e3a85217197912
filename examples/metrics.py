"""What a step measured: loss, expert loads, learning rate, time, and the share of peak FLOPs.

Legend: L MoE layers, E experts, P expert-parallel ranks.
"""

from __future__ import annotations

import re
import time
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from moecore.fsdp import GradientNorm
from moecore.moe.state import MoEMetrics

Metrics = dict[str, float]
# Dense bf16 products, from NVIDIA's data sheets; the first name that fits counts.
PEAK_TFLOPS = {
    r"MIG": None,  # a part of a GPU
    r"H[12]00 NVL": 835.0,
    r"H100 PCIe": 756.0,
    r"H[12]00": 989.0,
    r"A100": 312.0,
}


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

    def seconds_until(self, later: Moment) -> float:
        """Return the time between two moments that have come."""
        if self.event is None or later.event is None:
            return later.time - self.time
        return self.event.elapsed_time(later.event) / 1e3


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """An optimizer step that a GPU may still be at.

    Attributes:
        step: its number.
        layers: names of the MoE layers.
        values: fp64 on the device: the loss, then what `of_routing` returns.
        norm: before clipping.
        reader: the stream that the host reads on, see `Job`.
    """

    step: int
    began: Moment
    ended: Moment
    lr: float
    layers: list[str]
    values: Tensor
    norm: GradientNorm
    reader: torch.cuda.Stream | None

    def metrics(self) -> Metrics:
        """Wait for the step, and for none after it; return its metrics, the same on every rank."""
        self.ended.wait()
        with nullcontext() if self.reader is None else torch.cuda.stream(self.reader):
            loss, rank_load, aux_loss, *loads = self.values.tolist()
            norm = self.norm.total
        return {
            "loss": loss,
            "expert_load_max_over_mean": max(loads),
            "rank_load_max_over_mean": rank_load,
            "grad_norm": norm,
            "lr": self.lr,
            "aux_loss": aux_loss,
            **{f"expert_load/{name}": n for name, n in zip(self.layers, loads, strict=True)},
        }


def of_routing(routed: MoEMetrics, ep: int) -> Tensor:
    """Return the load of ranks, the sum of all auxiliary losses, and each layer's load; fp64 [2+L].

    A layer's load is that of its busiest expert over the mean: it measures balance. The load of
    ranks is that of the busiest ep rank over the mean, averaged over layers: it measures time.
    """
    counts_LE = torch.stack(list(routed.tokens_per_expert.values())).double()
    ranks_LP = counts_LE.unflatten(1, (ep, -1)).sum(2)
    experts_L, ranks_L = (n.amax(1) / n.mean(1).clamp(min=1e-9) for n in (counts_LE, ranks_LP))
    aux_losses = torch.stack(list(routed.aux_losses.values())).sum().double()
    return torch.cat([torch.stack([ranks_L.mean(), aux_losses]), experts_L])


def peak_tflops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the dense TFLOP/s of a device by its name; None = not known."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    name = torch.cuda.get_device_name(device)
    found = (peak for model, peak in PEAK_TFLOPS.items() if re.search(rf"\b{model}\b", name))
    return next(found, None)
