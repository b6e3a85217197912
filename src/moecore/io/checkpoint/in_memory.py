"""A rank's state in memory: what a rank with the same parts takes from a running one.

rank_state       model, optimizer, scheduler, generators -> the tensors that a save would write
load_rank_state  the same, set in place

The names are those of a checkpoint (`state.py`). Nothing is compared: both ranks have made the same
model on the same meshes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moecore.base.torch_private import local_of
from moecore.io.checkpoint.hyperparameters import restore_groups
from moecore.io.checkpoint.snapshot import Schedulers, one_scheduler, scheduler_state, take_snapshot
from moecore.io.checkpoint.state import (
    ModelView,
    Optimizers,
    listed_optimizers,
    optimizer_state_to_fill,
    restore_amax,
    restore_optimizer_state,
    restore_rng,
)
from moecore.io.checkpoint.store import locals_of
from moecore.train.rerun import drop_step


def rank_state(
    model: nn.Module,
    optimizer: Optimizers,
    extra: Mapping[str, Tensor],
    *,
    scheduler: Schedulers | None = None,
) -> dict[str, Any]:
    """Return what `load_rank_state` takes; tensors share memory with the model and optimizer."""
    snapshot = take_snapshot(0, model, optimizer, extra, scheduler=scheduler, config=None)
    facts = {"optimizer": snapshot.facts.optimizer, "scheduler": snapshot.facts.scheduler}
    return {"tensors": locals_of(snapshot), **facts}


@torch.no_grad()
def load_rank_state(
    state: Mapping[str, Any],
    model: nn.Module,
    optimizer: Optimizers,
    *,
    scheduler: Schedulers | None = None,
) -> dict[str, Tensor]:
    """Set model, optimizer, scheduler and generators in place; return `extra`. Drops a step."""
    drop_step(model)
    kinds: dict[str, dict[str, Tensor]] = {
        kind: {} for kind in ("model", "optimizer", "amax", "extra", "rng")
    }
    for name, tensor in state["tensors"].items():
        kind, _, rest = name.partition(".")
        kinds[kind][rest] = tensor
    view = ModelView(model)
    for name, tensor in kinds["model"].items():
        local_of(view.stored_views[name]).copy_(tensor)
    optimizers = listed_optimizers(optimizer, view)
    scalars = {name: x.dtype for name, x in kinds["optimizer"].items() if not x.ndim}
    matrices = {name: x.dtype for name, x in kinds["optimizer"].items() if x.ndim}
    for owner in optimizers:
        owner.state.clear()
        slots = optimizer_state_to_fill(owner, view, matrices, scalars)
        for param, values in slots.items():
            name = view.name_of(param)
            for slot, value in values.items():
                target = value if f"{slot}.{name}" in scalars else view.view(name, value)
                local_of(target).copy_(kinds["optimizer"][f"{slot}.{name}"])
        restore_optimizer_state(owner, slots)
    restore_groups(optimizers, state["optimizer"])
    schedule = one_scheduler(scheduler, optimizers)
    if schedule is not None:
        schedule.load_state_dict(scheduler_state(schedule, state["scheduler"]))
    restore_amax(model, kinds["amax"])
    restore_rng({f"rng.{name}": tensor for name, tensor in kinds["rng"].items()})
    return kinds["extra"]
