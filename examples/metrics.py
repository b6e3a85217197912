"""What a step measured: loss, expert loads, learning rate and time.

Legend: L MoE layers, E experts, P expert-parallel ranks.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from moecore.fsdp import GradientNorm
from moecore.moe.state import MoEMetrics

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
        values_4: fp64 on the device: the loss, and what `of_routing` returns.
        norm: before clipping.
        reader: of the job.
    """

    step: int
    began: Moment
    ended: Moment
    lr: float
    values_4: Tensor
    norm: GradientNorm
    reader: torch.cuda.Stream | None

    def metrics(self) -> Metrics:
        """Wait for the step, and for none after it; return its metrics, the same on every rank."""
        self.ended.wait()
        with nullcontext() if self.reader is None else torch.cuda.stream(self.reader):
            loss, load, rank_load, aux_loss = self.values_4.tolist()
            norm = self.norm.total
        return {
            "loss": loss,
            "expert_load_max_over_mean": load,
            "rank_load_max_over_mean": rank_load,
            "grad_norm": norm,
            "lr": self.lr,
            "aux_loss": aux_loss,
        }


def of_routing(routed: MoEMetrics, ep: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return two loads and the sum of all auxiliary losses; fp64.

    The worst layer's busiest expert over the mean, which tells of balance, and the busiest ep rank
    over the mean as layers have it on average, which tells of time.
    """
    counts_LE = torch.stack(list(routed.tokens_per_expert.values())).double()
    ranks_LP = counts_LE.unflatten(1, (ep, -1)).sum(2)
    experts_L, ranks_L = (n.amax(1) / n.mean(1).clamp(min=1e-9) for n in (counts_LE, ranks_LP))
    aux_losses = torch.stack(list(routed.aux_losses.values()))
    return experts_L.max(), ranks_L.mean(), aux_losses.sum().double()
