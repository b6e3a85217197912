"""A ShardPlan applied: the model's parameters become shards, its modules run units.

Nothing is decided here: modules, placements, divisors and prefetch are the plan's. Experts that no
other rank holds are left out (`shard/local_weights.py`): there is nothing to gather.

Note "gradient scale": every data rank r has its own loss L_r. In the "mean" convention a gradient
is (1 / data_ranks) * sum_r dL_r/dw. Dense gradients sum over the dense FSDP ranks. Expert gradients
need fewer hops: the dispatcher's backward has already brought the contributions of all ranks of
the ep x etp group to the rank that owns the expert, so the sum over the expert FSDP ranks
completes the same sum over data ranks; only the group's own size would be the wrong divisor. cp
ranks, over which both meshes shard too, bring parts of one L_r. So every unit, dense or expert,
gets the divisor data_ranks. In the "sum" convention the loss is already divided by the global token
count, and every unit's divisor is 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from moecore.mesh import Meshes
from moecore.moe.params import ParamReader
from moecore.shard.buffers import Buffer
from moecore.shard.engine import ENGINE, Engine
from moecore.shard.local_weights import WholeWeights
from moecore.shard.params import Owners, UnitParam
from moecore.shard.plan import FlatLayout, ShardPlan, UnitPlan
from moecore.shard.unit import Streams, Unit, UnitOptions

# Of a root without parameters, which casts inputs all the same.
NOTHING = FlatLayout(dtype="float32", ranks=1, slots=(), shard_numel=0, whole_numel=0)
SUMS = 2  # buffers of gradients: one is filled while the other is reduced


def shard_model(model: nn.Module, plan: ShardPlan, meshes: Meshes) -> None:
    """Shard a model in place. No communication.

    Args:
        model: cut over tp, ep and etp.
        plan: of the model.
        meshes: both views.
    """
    streams, owners = Streams(meshes.device_type), _owners(model)
    made: dict[str, list[Unit]] = {}
    for planned in plan.units:
        modules: list[Any] = [model.get_submodule(name) for name in planned.modules]
        if planned.role == "experts":
            modules[0].reader = reader_of(planned)
        made[planned.name] = [
            _unit(planned, layout, modules, owners, meshes, streams)
            for layout in (() if planned.whole else planned.layouts or (NOTHING,))
        ]
    for planned in plan.units:
        for unit in made[planned.name]:
            unit.ahead_in_forward = [u for n in planned.forward_prefetch for u in made[n]]
            unit.ahead_in_backward = [u for n in planned.backward_prefetch for u in made[n]]
    for role in ("block", "experts"):
        turns = [made[u.name] for u in plan.units if u.role == role and not u.stays_unsharded]
        _share_buffers([unit for units in turns for unit in units], made.values())
    root, *units = [unit for planned in plan.units for unit in made[planned.name]]
    setattr(model, ENGINE, Engine(model, [*units, root], streams))
    _move_buffers(model, meshes.device_type)


def reader_of(unit: UnitPlan) -> ParamReader:
    """Return what reads the weights of a unit of experts."""
    if unit.whole:
        return WholeWeights(_dtype(unit.gather_dtype), unit.divisor, keep=unit.stays_unsharded)
    return ParamReader(keep=unit.stays_unsharded, is_gathered=True)


def _owners(model: nn.Module) -> dict[str, Owners]:
    """Return where each parameter stands, by the first of its names."""
    found: dict[nn.Parameter, Owners] = defaultdict(list)
    names: dict[nn.Parameter, str] = {}
    for prefix, module in model.named_modules():
        for attribute, param in module._parameters.items():
            if param is not None:
                found[param].append((module, attribute))
                names.setdefault(param, f"{prefix}.{attribute}".removeprefix("."))
    return {name: found[param] for param, name in names.items()}


def _unit(
    planned: UnitPlan,
    layout: FlatLayout,
    modules: Sequence[nn.Module],
    owners: dict[str, Owners],
    meshes: Meshes,
    streams: Streams,
) -> Unit:
    mesh = meshes.expert_fsdp if planned.mesh == "expert" else meshes.dense_fsdp
    shards = mesh.ndim - 1
    gathered, reduced = _dtype(planned.gather_dtype), _dtype(planned.reduce_dtype)
    return Unit(
        modules,
        [UnitParam(slot, owners[slot.param], mesh) for slot in layout.slots],
        layout=layout,
        shard_group=mesh.get_group(shards) if mesh.size(shards) > 1 else None,
        replica_group=mesh.get_group(0) if shards else None,
        options=UnitOptions(
            name=planned.name or "the model",
            compute_dtype=gathered,
            reduce_dtype=reduced or torch.float32,
            divisor=planned.divisor,
            cast_inputs=gathered if planned.casts_inputs else None,
            stays=planned.stays_unsharded,
        ),
        streams=streams,
        device_type=meshes.device_type,
    )


def _share_buffers(units: Sequence[Unit], everything: Iterable[Sequence[Unit]]) -> None:
    """Let units take turns: as many buffers as units that any unit and those ahead of it need."""
    own = set(units)
    needed = [
        len(own.intersection([unit, *ahead]))
        for group in everything
        for unit in group
        for ahead in (unit.ahead_in_forward, unit.ahead_in_backward)
    ]
    for dtype in {unit.dtype for unit in units if unit.has_buffer}:
        alike = [unit for unit in units if unit.has_buffer and unit.dtype == dtype]
        size = max(unit.numel for unit in alike)
        buffers = [Buffer(size, dtype) for _ in range(max(needed))]
        for i, unit in enumerate(alike):
            unit.buffer = buffers[i % len(buffers)]
    sharded = [unit for unit in units if unit.is_sharded]
    for dtype in {unit.options.reduce_dtype for unit in sharded}:
        alike = [unit for unit in sharded if unit.options.reduce_dtype == dtype]
        size = max(unit.numel for unit in alike)
        sums = [Buffer(size, dtype) for _ in range(SUMS)]
        for i, unit in enumerate(alike):
            unit.sums = sums[i % SUMS]


def _move_buffers(model: nn.Module, device_type: str) -> None:
    """Move buffers of modules to the meshes' device, where parameters are."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device_type)


def _dtype(name: str | None) -> torch.dtype | None:
    """Return the dtype of a plan's name."""
    found: torch.dtype | None = None if name is None else getattr(torch, name)
    return found
