"""Snapshot of one save: the tensors by name, and the manifest's metadata, of all pipeline stages.

Tensor names are those of the complete model and do not depend on pipeline stages. One rank of each
stage sends its names, so that a save writes each tensor once, and a load knows which tensors belong
to other stages. Without stages there is no communication.

`collect_rank_state` returns one rank's state in memory, and `load_rank_state` restores it on a rank
that has the same model on the same meshes.
"""

from __future__ import annotations

import json
import platform
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moecore.base.fields import format_name
from moecore.base.rank_checks import Group, gather_objects
from moecore.base.torch_private import get_local_tensor
from moecore.io.checkpoint.config_differences import convert_config
from moecore.io.checkpoint.hyperparameters import (
    Schedulers,
    check_json_values,
    collect_hyperparameters,
    copy_json,
    decode_scheduler_state,
    encode_scheduler_state,
    join_schedulers,
    name_optimizer_classes,
    restore_hyperparameters,
)
from moecore.io.checkpoint.manifest import ManifestFacts, check_dtype
from moecore.io.checkpoint.ranks import get_rank_and_world, is_first_of_stage
from moecore.io.checkpoint.state import (
    STAGE_KINDS,
    ModelView,
    Optimizers,
    allocate_optimizer_state,
    collect_optimizer_tensors,
    copy_rng_states,
    map_amax_operands,
    prepare_optimizers,
    restore_amax_histories,
    restore_optimizer_state,
    restore_rng_states,
)
from moecore.moe.state import MoEState
from moecore.parallel.model.parallel_state import find_staged_module
from moecore.parallel.pipeline.stage_replicas import AllStages
from moecore.train.rerun import drop_step


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The tensors and metadata of one save. The tensors share memory with model and optimizer."""

    tensors: dict[str, Tensor]
    facts: ManifestFacts
    stages: AllStages | None  # None = this rank has all of the model


def take_snapshot(
    step: int,
    model: nn.Module,
    optimizer: Optimizers | None,
    extra: Mapping[str, Any] | None,
    *,
    scheduler: Schedulers | None,
    config: object,
) -> Snapshot:
    """Return tensors (model and optimizer state not copied) and metadata that `save` writes."""
    _check_step_finished(model)
    view = ModelView(model)
    tensors = {f"model.{name}": tensor for name, tensor in view.stored_views.items()}
    optimizers = prepare_optimizers(optimizer, view)
    tensors |= {f"optimizer.{k}": v for k, v in collect_optimizer_tensors(optimizers, view).items()}
    owners = map_amax_operands(model).items()
    tensors |= {
        f"amax.{n}": h.recorded_amax[operand]
        for n, (h, operand) in owners
        if operand in h.recorded_amax
    }
    values = {}
    for name, value in (extra or {}).items():
        if isinstance(value, Tensor):
            tensors[f"extra.{name}"] = value.detach()
        else:
            values[name] = value
    _check_extra(values)
    schedule = join_schedulers(scheduler, optimizers)
    config = view.config if config is None else config
    config_values = None if config is None else convert_config(config)
    check_json_values("config", config_values or {})
    tensors |= copy_rng_states()
    for name, tensor in tensors.items():
        check_dtype(name, tensor.dtype)
    facts = ManifestFacts(
        step=step,
        world_size=get_rank_and_world()[1],
        meshes=_list_meshes(view),
        versions=read_versions(),
        config=copy_json(config_values),
        optimizer_class=name_optimizer_classes(optimizers) if optimizers else None,
        optimizer=copy_json(collect_hyperparameters(optimizers, view)) if optimizers else None,
        scheduler=None if schedule is None else encode_scheduler_state(schedule),
        extra=copy_json(values),
    )
    return Snapshot(tensors, facts, find_staged_module(model)[1])


def _check_extra(values: Mapping[str, Any]) -> None:
    """Raise ValueError for a value of `extra` that JSON cannot store or would change (a tuple)."""
    check_json_values("extra", values)
    for name, value in values.items():
        if not _is_unchanged_by_json({name: value}):
            raise ValueError(
                f"extra {format_name(name)} ({type(value).__name__}) must be JSON-able or a "
                "tensor: JSON has lists for tuples and strings for keys, so store it so"
            )


def _is_unchanged_by_json(value: Any) -> bool:
    """Whether a nested value has no tuples and only string keys, so that JSON restores it."""
    if isinstance(value, dict):
        return all(isinstance(k, str) and _is_unchanged_by_json(v) for k, v in value.items())
    if isinstance(value, list):
        return all(map(_is_unchanged_by_json, value))
    return not isinstance(value, tuple)


def _check_step_finished(model: nn.Module) -> None:
    """Raise ValueError during a training step, because a save would lose its token counts."""
    for state in (v for m in model.modules() for v in vars(m).values()):
        if not isinstance(state, MoEState):
            continue
        for name, layer in state.layers.items():
            balance, tracker = layer.config.balance, layer.tracker
            if tracker.num_micro_batches and (balance.bias_update_rate or balance.needs_loss):
                raise ValueError(
                    f"{name}.tracker.num_micro_batches ({tracker.num_micro_batches}) must be 0 in "
                    "a save, which comes between steps: call TrainStep.finish() first"
                )


def _list_meshes(view: ModelView) -> list[dict[str, int]]:
    """Return {dim name: size} of each device mesh that the model's DTensors use."""
    meshes: dict[str, dict[str, int]] = {}
    for tensor in view.tensors.values():
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            names = mesh.mesh_dim_names or tuple(f"dim{i}" for i in range(mesh.ndim))
            sizes = dict(zip(names, mesh.shape, strict=True))
            meshes[json.dumps(sizes)] = sizes
    return [meshes[key] for key in sorted(meshes)]


def read_versions() -> dict[str, str]:
    """Return the installed versions of moecore, torch and Python."""
    try:
        release = version("moecore")
    except PackageNotFoundError:  # run from a checkout
        release = "unknown"
    return {"moecore": release, "torch": torch.__version__, "python": platform.python_version()}


@dataclass(frozen=True, slots=True)
class StagePart:
    """Tensor names, optimizer groups and device meshes of one pipeline stage, or of all stages."""

    names: frozenset[str]
    groups: list[list[str]]  # names of the parameters of each group of the optimizers
    meshes: list[dict[str, int]]  # as in `ManifestFacts`


def join_stage_parts(part: StagePart, stages: AllStages | None, group: Group = None) -> StagePart:
    """Return the union of the `StagePart`s of all stages; `part` is the local one. Collective."""
    return part if stages is None else _merge_parts(_gather_parts(part, stages, group))


def join_stages(snapshot: Snapshot, group: Group = None) -> Snapshot:
    """Return the tensors that this rank writes, with the metadata of all stages. Collective."""
    stages, facts = snapshot.stages, snapshot.facts
    if stages is None:
        return snapshot
    prefixes = tuple(f"{kind}." for kind in STAGE_KINDS)
    local_part = StagePart(
        frozenset(name for name in snapshot.tensors if name.startswith(prefixes)),
        [options["params"] for options in facts.optimizer or []],
        facts.meshes,
    )
    parts = _gather_parts(local_part, stages, group)
    earlier_names = set(chain.from_iterable(part.names for part in parts[: stages.pp_rank]))
    union = _merge_parts(parts)
    optimizer = facts.optimizer
    if optimizer is not None:
        pairs = zip(optimizer, union.groups, strict=True)
        optimizer = [{**options, "params": names} for options, names in pairs]
    return replace(
        snapshot,
        tensors={n: t for n, t in snapshot.tensors.items() if n not in earlier_names},
        facts=replace(facts, optimizer=optimizer, meshes=union.meshes),
    )


def _gather_parts(part: StagePart, stages: AllStages, group: Group) -> list[StagePart]:
    """Return the `StagePart` of each pipeline stage, in stage order. Collective."""
    rank_parts = gather_objects(part if is_first_of_stage(stages) else None, group)
    return [stage_part for stage_part in rank_parts if stage_part is not None]


def _merge_parts(parts: list[StagePart]) -> StagePart:
    """Return the union of the names, groups and meshes of several pipeline stages."""
    # `_compare_optimizers` raises an error for a stage with fewer groups.
    groups = [
        list(dict.fromkeys(chain.from_iterable(p.groups[i] for p in parts if i < len(p.groups))))
        for i in range(max(len(p.groups) for p in parts))
    ]
    meshes = {json.dumps(sizes): sizes for part in parts for sizes in part.meshes}
    return StagePart(
        frozenset(chain.from_iterable(part.names for part in parts)),
        groups,
        [meshes[key] for key in sorted(meshes)],
    )


def get_local_tensors(snapshot: Snapshot) -> dict[str, Tensor]:
    """Return this rank's local tensors of a snapshot by name, without a copy."""
    return {name: get_local_tensor(tensor) for name, tensor in snapshot.tensors.items()}


def collect_rank_state(
    model: nn.Module,
    optimizer: Optimizers,
    extra: Mapping[str, Tensor],
    *,
    scheduler: Schedulers | None = None,
) -> dict[str, Any]:
    """Return this rank's local tensors (not copied) and JSON values, for `load_rank_state`."""
    snapshot = take_snapshot(0, model, optimizer, extra, scheduler=scheduler, config=None)
    facts = {"optimizer": snapshot.facts.optimizer, "scheduler": snapshot.facts.scheduler}
    return {"tensors": get_local_tensors(snapshot), **facts}


@torch.no_grad()
def load_rank_state(
    state: Mapping[str, Any],
    model: nn.Module,
    optimizer: Optimizers,
    *,
    scheduler: Schedulers | None = None,
) -> dict[str, Tensor]:
    """Load a `collect_rank_state` result, drop gradients of an unfinished step; return `extra`."""
    drop_step(model)
    kinds = defaultdict[str, dict[str, Tensor]](dict)
    for name, tensor in state["tensors"].items():
        kind, _, rest = name.partition(".")
        kinds[kind][rest] = tensor
    view = ModelView(model)
    for name, tensor in kinds["model"].items():
        get_local_tensor(view.stored_views[name]).copy_(tensor)
    optimizers = prepare_optimizers(optimizer, view)
    scalars = {name: x.dtype for name, x in kinds["optimizer"].items() if not x.ndim}
    matrices = {name: x.dtype for name, x in kinds["optimizer"].items() if x.ndim}
    for owner in optimizers:
        owner.state.clear()
        slots, views = allocate_optimizer_state(owner, view, matrices, scalars)
        for key in list(views):  # a view is freed before the optimizer converts its tensor
            get_local_tensor(views.pop(key)).copy_(kinds["optimizer"][key])
        restore_optimizer_state(owner, slots)
    restore_hyperparameters(optimizers, state["optimizer"])
    schedule = join_schedulers(scheduler, optimizers)
    if schedule is not None:
        schedule.load_state_dict(decode_scheduler_state(schedule, state["scheduler"]))
    restore_amax_histories(model, kinds["amax"])
    restore_rng_states({f"rng.{name}": tensor for name, tensor in kinds["rng"].items()})
    return kinds["extra"]
