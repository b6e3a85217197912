"""StepResult: what a finished step was."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from torch import Tensor

from moecore.moe.metrics import MoEMetrics
from moecore.parallel.shard.clip import GradientNorm


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What a finished step was. Tensors stay on the device until read.

    Attributes:
        norm: the gradient before clipping, without the loss scale; None for a step without an
            optimizer and `clip()`.
        skipped: whether the gradient was not finite, or rows had no room, so that nothing has
            changed.
        metrics: what the MoE layers routed.
        lr: with which the first group of the first optimizer stepped; None without one.
        loss_scale: of this step; None without one.
    """

    norm: GradientNorm | None
    skipped: bool | Tensor
    metrics: MoEMetrics
    lr: float | Tensor | None = None
    loss_scale: Tensor | None = None

    def to_dict(self, *, per_expert: bool = True) -> dict[str, float]:
        """Return name -> number, for any logger: those of MoE and the fields of this record.

        These are "grad_norm", "skipped", "lr" and "loss_scale", where they are not None.

        One host sync; the copies after the first one wait for nothing.

        Args:
            per_expert: as in `MoEMetrics.to_dict`, whose names these are.
        """
        numbers = self.metrics.to_dict(per_expert=per_expert)
        if self.norm is not None:
            numbers |= {
                "grad_norm": self.norm.total,
                "skipped": float(not math.isfinite(self.norm.total)),
            }
        scalars = {"lr": self.lr, "loss_scale": self.loss_scale}
        return numbers | {name: float(x) for name, x in scalars.items() if x is not None}


def joined(metrics: Sequence[MoEMetrics]) -> MoEMetrics:
    """Return the metrics of several models as one; names begin with the model's number."""
    if len(metrics) == 1:
        return metrics[0]
    of_fields = {
        f.name: {
            f"{i}.{name}": tensor
            for i, one in enumerate(metrics)
            for name, tensor in getattr(one, f.name).items()
        }
        for f in fields(MoEMetrics)
    }
    return MoEMetrics(**of_fields)
