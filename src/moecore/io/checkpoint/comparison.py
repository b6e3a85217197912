"""Comparison of a checkpoint with the objects to load, in full before any object changes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from moecore.base.failures import run_and_share_errors
from moecore.base.rank_checks import gather_objects
from moecore.io.checkpoint.config_differences import find_missing_fields, find_saved_differences
from moecore.io.checkpoint.files import refuse_problems
from moecore.io.checkpoint.hyperparameters import (
    Scheduler,
    Schedulers,
    concat_param_groups,
    decode_scheduler_state,
    find_group_mismatches,
    find_option_mismatches,
    join_schedulers,
    name_optimizer_classes,
    split_class_names,
)
from moecore.io.checkpoint.manifest import Manifest, StoredTensor
from moecore.io.checkpoint.object_storage import AnyPath
from moecore.io.checkpoint.snapshot import StagePart, join_stage_parts
from moecore.io.checkpoint.state import (
    ModelView,
    Optimizers,
    allocate_optimizer_state,
    copy_rng_states,
    get_state_template,
    map_amax_operands,
    prepare_optimizers,
)
from moecore.parallel.model.parallel_state import find_staged_module

# The end of an error of `load` that `strict=False` would only warn about.
STRICT_HINT = ", or load what fits with strict=False"


@dataclass(slots=True)
class Comparison:
    """Names and objects whose state a load will set, and their differences from the checkpoint."""

    model: set[str] = field(default_factory=set)  # the model's tensors that are loaded
    optimizers: list[Optimizer] = field(default_factory=list)
    # "<slot>.<fqn>" -> dtype of optimizer state laid out like its parameter, and of scalar state.
    matrices: dict[str, torch.dtype] = field(default_factory=dict)
    scalars: dict[str, torch.dtype] = field(default_factory=dict)
    groups: bool = False  # whether the load sets the hyperparameters of the optimizers
    scheduler: Scheduler | None = None
    left_out: list[str] = field(default_factory=list)  # differences; errors only with `strict`
    refused: list[str] = field(default_factory=list)  # differences that are always errors
    uncompared: str = ""  # why the model's config could not be compared, for a warning


def compare_checkpoint(
    manifest: Manifest,
    model: nn.Module,
    optimizer: Optimizers | None,
    scheduler: Schedulers | None,
    *,
    cast: bool,
) -> tuple[ModelView, Comparison]:
    """Return the `ModelView`, and the `Comparison` of all objects with a checkpoint. Collective."""

    def collect_part() -> tuple[ModelView, StagePart]:
        view = ModelView(model)
        listed = concat_param_groups(prepare_optimizers(optimizer, view))
        names = [[view.get_name(param) for param in group["params"]] for group in listed]
        return view, StagePart(frozenset(view.stored_views), names, [])

    view, part = run_and_share_errors(collect_part)
    stages = find_staged_module(model)[1]
    union = join_stage_parts(part, stages)
    comparison = run_and_share_errors(
        lambda: _compare_local_objects(manifest, view, union, optimizer, scheduler, cast=cast)
    )
    if stages is not None:
        differences = gather_objects((comparison.left_out, comparison.refused))
        comparison.left_out, comparison.refused = (
            list(dict.fromkeys(itertools.chain.from_iterable(lines)))
            for lines in zip(*differences, strict=True)
        )
    return view, comparison


def _compare_local_objects(
    manifest: Manifest,
    view: ModelView,
    union: StagePart,
    optimizer: Optimizers | None,
    scheduler: Schedulers | None,
    *,
    cast: bool,
) -> Comparison:
    """Compare a checkpoint with this rank's objects; `union` has the names of all stages."""
    comparison = Comparison()
    if missing := find_missing_fields(view.config, manifest.facts.config):
        comparison.uncompared = (
            f"the model's config was not compared, because the checkpoint's config has no "
            f"{', '.join(missing)}: save without config=, and keep other facts in extra"
        )
    comparison.left_out += [  # first, because it explains tensors that differ
        f"config.{d.name} ({d.value}) must be {d.reference} as in the checkpoint"
        for d in find_saved_differences(view.config, manifest.facts.config)
    ]
    _compare_model(comparison, view, union, select_tensors("model.", manifest), cast=cast)
    comparison.optimizers = prepare_optimizers(optimizer, view)
    if comparison.optimizers:
        _compare_optimizers(comparison, view, union, manifest, cast=cast)
    schedule = join_schedulers(scheduler, comparison.optimizers)
    saved_state = manifest.facts.scheduler
    if schedule is not None and saved_state is None:
        comparison.left_out.append("scheduler state is not in the checkpoint")
    elif schedule is not None and saved_state is not None:
        try:
            decode_scheduler_state(schedule, saved_state)
            comparison.scheduler = schedule
        except ValueError as error:
            comparison.left_out.append(str(error))
    return comparison


def refuse_differences(comparison: Comparison, path: AnyPath, *, strict: bool) -> None:
    """Raise ValueError for differences that prevent a load; if `strict`, for any difference."""
    problems = comparison.refused + (comparison.left_out if strict else [])
    fix = "build them as when it was saved"
    if strict and not comparison.refused:
        fix += STRICT_HINT
    subject = (
        f"path ({path}) must fit the model, optimizer and scheduler, but {len(problems)} differ"
    )
    refuse_problems(subject, problems, fix)


def select_tensors(prefix: str, manifest: Manifest) -> dict[str, StoredTensor]:
    """Return the manifest's tensors whose names start with `prefix`; remove the prefix."""
    return {n.removeprefix(prefix): t for n, t in manifest.tensors.items() if n.startswith(prefix)}


def allocate_optimizer_load_target(
    comparison: Comparison, view: ModelView
) -> tuple[list[dict[Tensor, dict[str, Tensor]]], dict[str, Tensor]]:
    """Return {parameter: {state key: tensor to fill}} per optimizer, and {stored name: view}."""
    states, target = list[dict[Tensor, dict[str, Tensor]]](), dict[str, Tensor]()
    for optimizer in comparison.optimizers:
        state, views = allocate_optimizer_state(
            optimizer, view, comparison.matrices, comparison.scalars
        )
        states.append(state)
        target |= {f"optimizer.{key}": value for key, value in views.items()}
    return states, target


def allocate_amax_load_target(model: nn.Module, manifest: Manifest) -> dict[str, Tensor]:
    """Return {name: fp32 tensor [steps] to fill} for this rank's saved amax histories."""
    operands = map_amax_operands(model)
    return {
        name: torch.empty(tensor.shape, dtype=torch.float32, device="cpu")
        for name, tensor in select_tensors("amax.", manifest).items()
        if name in operands and len(tensor.shape) == 1 and tensor.dtype == torch.float32
    }


def select_rng_load_target(manifest: Manifest) -> dict[str, Tensor]:
    """Return "rng.<device>.<rank>" -> tensor into which a load reads this rank's RNG state."""
    layouts = {name: (tensor.shape, tensor.dtype) for name, tensor in manifest.tensors.items()}
    states = copy_rng_states()
    return {n: t for n, t in states.items() if layouts.get(n) == (tuple(t.shape), t.dtype)}


def _compare_model(
    comparison: Comparison,
    view: ModelView,
    union: StagePart,
    stored_tensors: dict[str, StoredTensor],
    *,
    cast: bool,
) -> None:
    """Add the tensors to load and differences; `stored_tensors` has names without "model."."""
    for name, tensor in sorted(view.stored_views.items()):
        if name not in stored_tensors:
            comparison.left_out.append(f"{name} of the model is not in the checkpoint")
            continue
        entry, shape = stored_tensors[name], tuple(tensor.shape)
        if entry.shape != shape:
            comparison.left_out.append(f"{name} {entry.shape} must be {shape} as in the model")
        elif entry.dtype != tensor.dtype and not cast:
            comparison.refused.append(
                f"{name} {entry.dtype} must be {tensor.dtype} as in the model, or use cast=True"
            )
        else:
            comparison.model.add(name)
    for name in sorted(stored_tensors.keys() - union.names):
        comparison.left_out.append(f"{name} of the checkpoint is not in the model")


def _compare_optimizers(
    comparison: Comparison, view: ModelView, union: StagePart, manifest: Manifest, *, cast: bool
) -> None:
    """Add the optimizer state to load, and differences from the checkpoint, to `comparison`."""
    groups, saved_class = manifest.facts.optimizer, manifest.facts.optimizer_class
    if groups is None or saved_class is None:
        comparison.left_out.append("optimizer state is not in the checkpoint")
        return
    current_class = name_optimizer_classes(comparison.optimizers)
    present = concat_param_groups(comparison.optimizers)
    if len(present) != len(union.groups):
        comparison.refused.append(
            f"optimizer.param_groups ({len(present)}) must be as many on every pipeline stage "
            f"({len(union.groups)})"
        )
        return
    named = [{**group, "params": names} for group, names in zip(present, union.groups, strict=True)]
    owners = _map_params_to_groups(current_class, named)
    saved_owners = _map_params_to_groups(saved_class, groups)
    common = [n for n in owners if n in saved_owners and saved_owners[n][0] == owners[n][0]]
    options = {
        name: find_option_mismatches(owners[name][1], saved_owners[name][1]) for name in common
    }
    if current_class != saved_class:
        problems = [f"optimizer ({current_class}) is a {saved_class} in the checkpoint"]
    else:
        problems = find_group_mismatches(named, groups)
    problems += dict.fromkeys(itertools.chain(*options.values()))
    comparison.left_out += problems
    comparison.groups = not problems
    kinds = set(split_class_names(current_class, len(named)))
    weights = select_tensors("model.", manifest)
    steps = {
        view.get_name(p): o
        for o in comparison.optimizers
        for g in o.param_groups
        for p in g["params"]
    }
    slots: dict[str, dict[str, StoredTensor]] = {}
    for key, tensor in select_tensors("optimizer.", manifest).items():
        slots.setdefault(key.partition(".")[2], {})[key] = tensor
    for name, stored_slots in sorted(slots.items()):
        kind = saved_owners[name][0] if name in saved_owners else None
        is_of_other_stage = name in union.names and name not in view.stored_views
        # An optimizer cannot step with a part of a parameter's state: all of it is loaded, or none.
        problem = None
        if kind is not None and kind not in kinds:
            continue  # reported above, once for all parameters
        if name not in owners:
            problem = f"of {name} is of no parameter of the optimizer"
        elif is_of_other_stage:
            continue
        elif name not in comparison.model:
            problem = f"of {name} belongs to a tensor that differs"
        elif options.get(name) or kind not in (None, owners[name][0]):
            continue  # reported above
        elif shape_problem := _find_shape_problem(steps[name], view, name, stored_slots):
            problem = f"{shape_problem} or a scalar"
        if problem is not None:
            comparison.left_out.append(f"optimizer state {problem}")
        else:
            # State that had its parameter's dtype keeps doing so, as in torch's own loading.
            dtype = view.stored_views[name].dtype if cast else weights[name].dtype
            for key, tensor in stored_slots.items():
                if not tensor.shape:
                    comparison.scalars[key] = tensor.dtype
                else:
                    is_parameter_dtype = tensor.dtype == weights[name].dtype
                    comparison.matrices[key] = dtype if is_parameter_dtype else tensor.dtype


def _find_shape_problem(
    optimizer: Optimizer, view: ModelView, name: str, stored_slots: dict[str, StoredTensor]
) -> str | None:
    """Return an error text if saved state ("<key>.<name>" -> tensor) has a wrong shape, or None."""
    for key, tensor in stored_slots.items():
        like = get_state_template(optimizer, view.tensors[name], key.partition(".")[0])
        shape = tuple(view.make_stored_view(name, like).shape)
        if tensor.shape not in ((), shape):
            return f"{key} {tensor.shape} must be {shape}"
    return None


def _map_params_to_groups(
    class_names: str, groups: list[dict[str, Any]]
) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return parameter name -> (optimizer class name, group); "params" of a group has names."""
    return {
        name: (kind, group)
        for kind, group in zip(split_class_names(class_names, len(groups)), groups, strict=True)
        for name in group["params"]
    }
