"""StepResult: norm, skip, metrics, learning rate and loss scale of a finished step."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from torch import Tensor

from moecore.moe.metrics import MoEMetrics
from moecore.parallel.model.clip import GradientNorm


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """Numbers of a finished step. Tensors stay on the device until they are read.

    Attributes:
        norm: the gradient norm before clipping, divided by the loss scale; None if the step had no
            optimizer and no `clip()`.
        is_skipped: whether the step was skipped, because the gradient was not finite, its norm was
            above the limit of `SpikeOptions`, or rows exceeded a capacity. No weight, optimizer
            state or expert bias has changed then. A device bool, or False if `norm` is None.
        metrics: loads and auxiliary losses of the MoE layers.
        lr: the step's learning rate of the first optimizer's first group; None = no optimizer.
        loss_scale: the step's loss scale; None = no loss scale.
    """

    norm: GradientNorm | None
    is_skipped: bool | Tensor
    metrics: MoEMetrics
    lr: float | Tensor | None = None
    loss_scale: Tensor | None = None

    def to_dict(self, *, per_expert: bool = True) -> dict[str, float]:
        """Return name -> number for a logger, from `metrics` and this record. Host sync.

        The names of this record are "grad_norm", "skipped" (0.0 or 1.0), "lr" and "loss_scale". A
        field that is None has no entry. `per_expert` is passed to `MoEMetrics.to_dict`.
        """
        numbers = self.metrics.to_dict(per_expert=per_expert)
        if self.norm is not None:
            numbers |= {"grad_norm": self.norm.total, "skipped": float(self.norm.is_skipped)}
        scalars = {"lr": self.lr, "loss_scale": self.loss_scale}
        return numbers | {name: float(x) for name, x in scalars.items() if x is not None}


def merge_model_metrics(metrics: Sequence[MoEMetrics]) -> MoEMetrics:
    """Merge metrics of several models; layer "a" of model 1 becomes "1.a". One model: unchanged."""
    if len(metrics) == 1:
        return metrics[0]
    by_field = {}
    for field in fields(MoEMetrics):
        values = [getattr(model_metrics, field.name) for model_metrics in metrics]
        by_field[field.name] = {f"{i}.{n}": x for i, of in enumerate(values) for n, x in of.items()}
    return MoEMetrics(**by_field)
