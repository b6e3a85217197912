"""What one save keeps, of all pipeline stages: the tensors by name, and the facts of the manifest.

    save    names and groups of each stage -> one manifest; of copies the first stage's is written
    load    names and groups of each stage -> what other stages have is not missed on this rank

Names are those of the whole model, so neither knows how it was cut. One rank of each stage sends
names; without stages nothing is sent.

`rank_state` is the snapshot of one rank in memory, which a rank with the same parts takes over by
`load_rank_state`: both have made the same model on the same meshes, so nothing is compared.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from moecore.base.fields import shown_name
from moecore.base.torch_private import local_of
from moecore.io.checkpoint.config_differences import config_values
from moecore.io.checkpoint.hyperparameters import (
    check_json,
    is_finite,
    optimizer_class,
    optimizer_groups,
    restore_groups,
)
from moecore.io.checkpoint.manifest import ManifestFacts, check_dtype
from moecore.io.checkpoint.ranks import Group, gather, rank_and_world
from moecore.io.checkpoint.state import (
    OF_STAGES,
    ModelView,
    Optimizers,
    amax_tensors,
    listed_optimizers,
    optimizer_state_to_fill,
    optimizer_tensors,
    restore_amax,
    restore_optimizer_state,
    restore_rng,
    rng_tensors,
)
from moecore.moe.state import MoEState
from moecore.parallel.model.parallel_state import find_stages
from moecore.parallel.pipeline.stage_replicas import AllStages
from moecore.train.rerun import drop_step

T = TypeVar("T")


@runtime_checkable
class Scheduler(Protocol):
    """What is asked of a learning rate scheduler; torch's own have it."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the state."""


Schedulers = Scheduler | Sequence[Scheduler]


class _Several:
    """Several schedulers as one: its state has "0.last_epoch" for last_epoch of the first."""

    def __init__(self, parts: Sequence[Scheduler]) -> None:
        self._parts = parts
        self.kind = ", ".join(type(part).__name__ for part in parts)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all, side by side."""
        states = [part.state_dict() for part in self._parts]
        return {f"{i}.{key}": v for i, state in enumerate(states) for key, v in state.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the state of each."""
        states: list[dict[str, Any]] = [{} for _ in self._parts]
        for name, value in state_dict.items():
            i, _, key = name.partition(".")
            states[int(i)][key] = value
        for part, state in zip(self._parts, states, strict=True):
            part.load_state_dict(state)


def one_scheduler(
    scheduler: Schedulers | None, optimizers: Sequence[Optimizer]
) -> Scheduler | None:
    """Return a caller's scheduler, or its list as one; the list must follow the optimizers."""
    if not isinstance(scheduler, Sequence):
        return scheduler
    if not scheduler:
        raise ValueError("scheduler ([]) must hold a scheduler: pass None where there is none")
    order = {id(optimizer): i for i, optimizer in enumerate(optimizers)}
    owners = [order.get(id(getattr(part, "optimizer", None))) for part in scheduler]
    places = [i for i in owners if i is not None]  # another one's learning rates would fit as well
    if places != sorted(places):
        raise ValueError(
            f"scheduler (of optimizers {', '.join(map(str, places))}) must be in the order of "
            "the optimizers: sort the list"
        )
    return scheduler[0] if len(scheduler) == 1 else _Several(scheduler)


def _kind(scheduler: Scheduler) -> str:
    return scheduler.kind if isinstance(scheduler, _Several) else type(scheduler).__name__


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one save stores. The tensors share memory with the model and the optimizer."""

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
    """Return what a save stores, or raise as `save`, also for a step that is not finished."""
    _check_finished(model)
    view = ModelView(model)
    tensors = {f"model.{name}": tensor for name, tensor in view.stored_views.items()}
    optimizers = listed_optimizers(optimizer, view)
    tensors |= {f"optimizer.{k}": v for k, v in optimizer_tensors(optimizers, view).items()}
    tensors |= {f"amax.{name}": steps for name, steps in amax_tensors(model).items()}
    values = {}
    for name, value in (extra or {}).items():
        if isinstance(value, Tensor):
            tensors[f"extra.{name}"] = value.detach()
        else:
            values[name] = value
    _check_extra(values)
    schedule = one_scheduler(scheduler, optimizers)
    tensors |= rng_tensors()
    for name, tensor in tensors.items():
        check_dtype(name, tensor.dtype)
    facts = ManifestFacts(
        step=step,
        world_size=rank_and_world()[1],
        meshes=_meshes(view),
        versions=versions(),
        config=_config_values(view.config if config is None else config),
        optimizer_class=optimizer_class(optimizers) if optimizers else None,
        optimizer=_copy(optimizer_groups(optimizers, view)) if optimizers else None,
        scheduler=None if schedule is None else _scheduler_values(schedule),
        extra=_copy(values),
    )
    return Snapshot(tensors, facts, find_stages(model)[1])


def _check_extra(values: Mapping[str, Any]) -> None:
    """Raise ValueError for what JSON cannot hold, or would give back as something else."""
    check_json("extra", values)
    for name, value in values.items():
        if not _survives_json({name: value}):
            raise ValueError(
                f"extra {shown_name(name)} ({type(value).__name__}) must be JSON-able or a "
                "tensor: JSON has lists for tuples and strings for keys, so store it so"
            )


def _survives_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(k, str) and _survives_json(v) for k, v in value.items())
    if isinstance(value, list):
        return all(map(_survives_json, value))
    return not isinstance(value, tuple)


def scheduler_state(scheduler: Scheduler, values: dict[str, Any]) -> dict[str, Any]:
    """Return saved values with the types of this scheduler's own; refuse another kind's."""
    state = scheduler.state_dict()
    if state.keys() != values.keys():
        raise ValueError(
            f"scheduler ({_kind(scheduler)}) must have the state of the saved one, but "
            f"{', '.join(sorted(state.keys() ^ values.keys()))} differ"
        )
    for name, rates in _rates(values):
        if not isinstance(rates, list) or not all(map(is_finite, rates)):
            raise ValueError(
                f"scheduler {shown_name(name)} must be a list of finite numbers, but is "
                f"{rates!r:.40} in the checkpoint"
            )
    result: dict[str, Any] = _like(state, values)
    return result


def _rates(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what schedulers keep of learning rates, also of those in others."""
    for name, entry in value.items() if isinstance(value, dict) else ():
        if name.endswith(("base_lrs", "_last_lr")):
            yield name, entry
        else:
            yield from _rates(entry)
    for entry in value if isinstance(value, list) else ():
        yield from _rates(entry)


def _scheduler_values(scheduler: Scheduler) -> dict[str, Any]:
    state = scheduler.state_dict()
    name = _kind(scheduler)
    numbers = _numbers(state)
    check_json(f"scheduler {name}", numbers)
    values: dict[str, Any] = _copy(numbers)
    if _like(state, values) != state:
        raise ValueError(
            f"scheduler ({name}) must have a state that JSON can hold: keep it in extra instead"
        )
    return values


def _numbers(value: Any) -> Any:
    """Return a value with numbers for scalar tensors (of a tensor lr): one host sync for each."""
    if isinstance(value, Tensor) and value.ndim == 0:
        return value.item()
    if isinstance(value, dict):
        return {key: _numbers(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_numbers(entry) for entry in value]
    return value


def _like(template: Any, value: Any) -> Any:
    """Give what JSON made of a value its types back: tuples, new tensors, numbers as keys."""
    if isinstance(template, Tensor) and isinstance(value, int | float):
        return torch.full_like(template, value)
    if isinstance(template, tuple) and isinstance(value, list):
        return tuple(value)
    if isinstance(template, list) and isinstance(value, list) and len(template) == len(value):
        return [_like(a, b) for a, b in zip(template, value, strict=True)]
    if isinstance(template, dict) and isinstance(value, dict):
        if template and all(isinstance(key, int) for key in template):
            return type(template)({int(key): entry for key, entry in value.items()})
        return {key: _like(template.get(key), entry) for key, entry in value.items()}
    return value


def _check_finished(model: nn.Module) -> None:
    """Raise when an optimizer step is half done: what it has counted and its gradients are lost."""
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


def _meshes(view: ModelView) -> list[dict[str, int]]:
    meshes: dict[str, dict[str, int]] = {}
    for tensor in view.tensors.values():
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            names = mesh.mesh_dim_names or tuple(f"dim{i}" for i in range(mesh.ndim))
            sizes = dict(zip(names, mesh.shape, strict=True))
            meshes[json.dumps(sizes)] = sizes
    return [meshes[key] for key in sorted(meshes)]


def versions() -> dict[str, str]:
    """Return a manifest's facts about the software that wrote it."""
    try:
        release = version("moecore")
    except PackageNotFoundError:  # run from a checkout
        release = "unknown"
    return {"moecore": release, "torch": torch.__version__, "python": platform.python_version()}


def _config_values(config: object) -> dict[str, Any] | None:
    if config is None:
        return None
    values = config_values(config)
    check_json("config", values)
    return _copy(values)


def _copy(values: T) -> T:
    """Return what JSON makes of it, so that no change reaches it while it is written."""
    result: T = json.loads(json.dumps(values))
    return result


@dataclass(frozen=True, slots=True)
class StagePart:
    """What a stage has, or all of them together."""

    names: frozenset[str]
    groups: list[list[str]]  # names of the parameters of each group of the optimizers
    meshes: list[dict[str, int]]  # as in `ManifestFacts`


def is_first_of_stage(stages: AllStages) -> bool:
    """Whether this rank is the one that sends for its stage."""
    return dist.get_rank() % (dist.get_world_size() // stages.pp) == 0


def whole_of(part: StagePart, stages: AllStages | None, group: Group = None) -> StagePart:
    """Return what all stages have together; collective where there are several."""
    return part if stages is None else _merge_parts(_parts(part, stages, group))


def join_stages(snapshot: Snapshot, group: Group = None) -> Snapshot:
    """Return what this rank writes, with the facts of all stages; collective with several."""
    stages, facts = snapshot.stages, snapshot.facts
    if stages is None:
        return snapshot
    prefixes = tuple(f"{kind}." for kind in OF_STAGES)
    local_part = StagePart(
        frozenset(name for name in snapshot.tensors if name.startswith(prefixes)),
        [options["params"] for options in facts.optimizer or []],
        facts.meshes,
    )
    parts = _parts(local_part, stages, group)
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


def _parts(part: StagePart, stages: AllStages, group: Group) -> list[StagePart]:
    """Return the part of each stage."""
    rank_parts = gather(part if is_first_of_stage(stages) else None, group)
    return [stage_part for stage_part in rank_parts if stage_part is not None]


def _merge_parts(parts: list[StagePart]) -> StagePart:
    # A stage with fewer groups is refused where groups are compared.
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


def locals_of(snapshot: Snapshot) -> dict[str, Tensor]:
    """Return name -> this rank's part of each tensor, sharing its memory."""
    return {name: local_of(tensor) for name, tensor in snapshot.tensors.items()}


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
