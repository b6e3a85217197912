"""Checks of a `TrainStep`'s arguments when it is made, on this rank and between ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from moecore.base.agreement import check_same, trained_entries
from moecore.base.torch_names import is_inside
from moecore.parallel.request import Request
from moecore.train.loss_scale import DynamicLossScale


def listed(optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    """Return one, several or no optimizers as a list."""
    if optimizer is None:
        return []
    found = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    if not found:
        raise ValueError("optimizer ([]) must be one, several or None: leave it out to step alone")
    return found


def check_real(
    model: nn.Module, optimizers: Sequence[Optimizer], loss_scale: DynamicLossScale | None
) -> None:
    """Raise for an optimizer of parameters that `to_empty` will replace."""
    on_meta = next((name for name, param in model.named_parameters() if param.is_meta), None)
    if (optimizers or loss_scale is not None) and on_meta is not None and not is_inside():
        what = "optimizer" if optimizers else "loss scale"
        raise ValueError(
            f"{on_meta} (on meta) must have storage before the {what} is made: call "
            "model.to_empty(device=...) and fill it (init_weights, load_hf, load)"
        )


def agree(
    model: nn.Module,
    request: Request,
    max_norm: float,
    num_micro_batches: int,
    loss_scale: DynamicLossScale | None,
    optimizers: Sequence[Optimizer],
) -> None:
    """Raise on every rank when ranks differ: they would scale, clip, step or wait differently."""
    device_type, group = request.meshes.device_type, request.meshes.stage_group
    entries = {
        "TrainStep.max_norm": float(max_norm),
        "TrainStep.num_micro_batches": num_micro_batches,
        "TrainStep.loss_scale": loss_scale,
        "TrainStep.optimizer is None": not optimizers,
    }
    check_same(entries, device_type)
    check_same(trained_entries(model, optimizers), device_type, group=group)
