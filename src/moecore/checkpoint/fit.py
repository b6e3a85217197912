"""Whether a checkpoint fits what is to be loaded: found out in full before anything is changed."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from moecore.checkpoint.manifest import Manifest, StoredTensor
from moecore.checkpoint.same_config import saved_differences
from moecore.checkpoint.snapshot import Scheduler, scheduler_state
from moecore.checkpoint.state import (
    ModelView,
    check_optimizer,
    group_problems,
    optimizer_state_to_fill,
    option_problems,
    rng_tensors,
)

SHOWN = 10  # differences in one error


@dataclass(slots=True)
class Fit:
    """What will be loaded, and what differs.

    Attributes:
        model: names of the model's tensors that are loaded.
        matrices: "<slot>.<fqn>" -> dtype of the optimizer state laid out like its parameter.
        scalars: "<slot>.<fqn>" -> dtype of the scalar optimizer state.
        groups: whether hyperparameters are set.
        scheduler: whether the scheduler is set.
        left_out: differences that `strict=False` passes over.
        refused: differences that it does not.
    """

    model: set[str] = field(default_factory=set)
    matrices: dict[str, torch.dtype] = field(default_factory=dict)
    scalars: dict[str, torch.dtype] = field(default_factory=dict)
    groups: bool = False
    scheduler: bool = False
    left_out: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


def compare(
    manifest: Manifest,
    view: ModelView,
    optimizer: Optimizer | None,
    scheduler: Scheduler | None,
    *,
    cast: bool,
) -> Fit:
    """Return how a checkpoint fits.

    Args:
        manifest: of the checkpoint.
        view: of the model.
        optimizer: None = its state is not asked for.
        scheduler: None = its state is not asked for.
        cast: let the model's dtypes differ.
    """
    fit = Fit()
    fit.left_out += [  # first, because it explains tensors that differ
        f"config.{d.name} ({d.ours}) must be {d.theirs} as in the checkpoint"
        for d in saved_differences(view.config, manifest.facts.config)
    ]
    _compare_model(fit, view, below("model.", manifest), cast=cast)
    if optimizer is not None:
        _compare_optimizer(fit, view, optimizer, manifest, cast=cast)
    if scheduler is not None:
        _compare_scheduler(fit, scheduler, manifest)
    return fit


def check_fit(fit: Fit, path: Path, *, strict: bool) -> None:
    """Raise one ValueError with all differences that matter."""
    found = fit.refused + (fit.left_out if strict else [])
    if found:
        advice = "build them as when it was saved"
        if strict and not fit.refused:
            advice += ", or load what fits with strict=False"
        raise ValueError(
            f"path ({path}) must fit the model, optimizer and scheduler, but {summary(found)}: "
            f"{advice}"
        )


def summary(differences: list[str]) -> str:
    """Return how many there are, and the first of them."""
    more = len(differences) - SHOWN
    tail = f"; and {more} more" if more > 0 else ""
    return f"{len(differences)} differ: {'; '.join(differences[:SHOWN])}{tail}"


def below(prefix: str, manifest: Manifest) -> dict[str, StoredTensor]:
    """Return the tensors of one kind, without the prefix in their names."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in manifest.tensors.items()
        if name.startswith(prefix)
    }


def optimizer_target(
    fit: Fit, view: ModelView, optimizer: Optimizer
) -> tuple[dict[Tensor, dict[str, Tensor]], dict[str, Tensor]]:
    """Return optimizer state to load into, and the same by its stored names."""
    state = optimizer_state_to_fill(optimizer, view, fit.matrices, fit.scalars)
    target = {}
    for param, slots in state.items():
        name = view.name_of(param)
        for slot, value in slots.items():
            key = f"{slot}.{name}"
            stored = value if key in fit.scalars else view.view(name, value)
            target[f"optimizer.{key}"] = stored
    return state, target


def rng_target(manifest: Manifest) -> dict[str, Tensor]:
    """Return this rank's generator states to load into, as far as they were saved and fit."""
    mine = rng_tensors()
    return {
        name: tensor
        for name, tensor in mine.items()
        if name in manifest.tensors
        and manifest.tensors[name].shape == tuple(tensor.shape)
        and manifest.tensors[name].dtype == tensor.dtype
    }


def _compare_model(
    fit: Fit, view: ModelView, stored: dict[str, StoredTensor], *, cast: bool
) -> None:
    for name, tensor in sorted(view.stored.items()):
        if name not in stored:
            fit.left_out.append(f"{name} of the model is not in the checkpoint")
            continue
        found, wanted = stored[name], tuple(tensor.shape)
        if found.shape != wanted:
            fit.left_out.append(f"{name} {found.shape} must be {wanted} as in the model")
        elif found.dtype != tensor.dtype and not cast:
            fit.refused.append(
                f"{name} {found.dtype} must be {tensor.dtype} as in the model, or use cast=True"
            )
        else:
            fit.model.add(name)
    for name in sorted(stored.keys() - view.stored.keys()):
        fit.left_out.append(f"{name} of the checkpoint is not in the model")


def _compare_optimizer(
    fit: Fit, view: ModelView, optimizer: Optimizer, manifest: Manifest, *, cast: bool
) -> None:
    check_optimizer(optimizer)
    groups = manifest.facts.optimizer
    if groups is None:
        fit.left_out.append("optimizer state is not in the checkpoint")
        return
    now, before = type(optimizer).__name__, manifest.facts.optimizer_class
    if now != before:  # its state means something else
        fit.left_out.append(f"optimizer ({now}) is a {before} in the checkpoint")
        return
    options = _option_problems(optimizer, view, groups)
    problems = group_problems(optimizer, view, groups)
    problems += dict.fromkeys(itertools.chain(*options.values()))
    fit.left_out += problems
    fit.groups = not problems
    mine = {view.name_of(p) for group in optimizer.param_groups for p in group["params"]}
    weights = below("model.", manifest)
    slots: dict[str, dict[str, StoredTensor]] = {}
    for key, tensor in below("optimizer.", manifest).items():
        slots.setdefault(key.partition(".")[2], {})[key] = tensor
    for name, stored in sorted(slots.items()):
        # All slots of a parameter or none: an optimizer cannot step with some of them.
        if name not in mine:
            fit.left_out.append(f"optimizer state of {name} is of no parameter of the optimizer")
        elif name not in fit.model:
            fit.left_out.append(f"optimizer state of {name} belongs to a tensor that differs")
        elif options.get(name):
            pass  # said above, once for all parameters
        elif wrong := [k for k, t in stored.items() if t.shape not in ((), weights[name].shape)]:
            found, shape = stored[wrong[0]].shape, weights[name].shape
            fit.left_out.append(f"optimizer state {wrong[0]} {found} must be {shape} or a scalar")
        else:
            _take_slots(fit, stored, weights[name], view.stored[name].dtype, cast=cast)


def _option_problems(
    optimizer: Optimizer, view: ModelView, groups: list[dict[str, Any]]
) -> dict[str, list[str]]:
    """Return name of each parameter on both sides -> what differs in its options."""
    saved = {name: group for group in groups for name in group["params"]}
    named = [(view.name_of(p), group) for group in optimizer.param_groups for p in group["params"]]
    return {n: option_problems(group, saved[n]) for n, group in named if n in saved}


def _take_slots(
    fit: Fit,
    stored: dict[str, StoredTensor],
    weight: StoredTensor,
    dtype: torch.dtype,
    *,
    cast: bool,
) -> None:
    for key, found in stored.items():
        if not found.shape:
            fit.scalars[key] = found.dtype
        else:
            # State that had its parameter's dtype keeps doing so, as in torch's own loading.
            fit.matrices[key] = dtype if cast and weight.dtype == found.dtype else found.dtype


def _compare_scheduler(fit: Fit, scheduler: Scheduler, manifest: Manifest) -> None:
    values = manifest.facts.scheduler
    if values is None:
        fit.left_out.append("scheduler state is not in the checkpoint")
        return
    try:
        scheduler_state(scheduler, values)
        fit.scheduler = True
    except ValueError as error:
        fit.left_out.append(str(error))
