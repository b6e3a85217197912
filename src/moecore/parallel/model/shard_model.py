"""`shard_model`: applies a `ShardPlan` to a model and creates the `UnitEngine`.

The plan decides modules, placements, divisors and prefetches. This file only applies the plan.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from moecore.moe.dispatch.local import LocalDispatcher
from moecore.moe.layer import RoutedLayer
from moecore.moe.param_reader import ParamReader
from moecore.parallel.fsdp.buffers import Buffer, RegisteredMemory, plan_buffers
from moecore.parallel.fsdp.engine import UnitEngine
from moecore.parallel.fsdp.formats import FORMATS, CastFormat, Format
from moecore.parallel.fsdp.params import Owners, UnitParam
from moecore.parallel.fsdp.plan import (
    FlatLayout,
    ShardPlan,
    UnitOptions,
    UnitPlan,
    make_flat_layout,
)
from moecore.parallel.fsdp.transport import UnitStreams
from moecore.parallel.fsdp.unit import Unit
from moecore.parallel.mesh import Meshes, concatenate_meshes
from moecore.parallel.model.plan import has_unsharded_experts

# Layout of a root without parameters: its unit only casts inputs.
NOTHING = make_flat_layout("float32", "float32", "float32", None, (), 1)


def shard_model(model: nn.Module, plan: ShardPlan, meshes: Meshes) -> UnitEngine:
    """Shard parameters over data ranks, in place, after tp, ep and etp; return the engine."""
    streams, owners = UnitStreams(meshes.device_type), _find_owners(model)
    join = cache(concatenate_meshes)  # a mesh takes milliseconds; parameters share a few meshes
    units_of: dict[str, list[Unit]] = {}
    for unit_plan in plan.units:
        modules: list[Any] = [model.get_submodule(name) for name in unit_plan.modules]
        units_of[unit_plan.name] = [
            _make_unit(unit_plan, layout, modules, owners, meshes, streams, join)
            for layout in unit_plan.layouts or (NOTHING,)
        ]
        if unit_plan.role == "experts":
            modules[0].reader = ParamReader(caches_copies=unit_plan.is_resident)
    for unit_plan in plan.units:
        for unit in units_of[unit_plan.name]:
            unit.prefetch_forward = [u for n in unit_plan.forward_prefetch for u in units_of[n]]
            unit.prefetch_backward = [u for n in unit_plan.backward_prefetch for u in units_of[n]]
    memory_of: dict[dist.ProcessGroup, RegisteredMemory] = {}
    for buffer_plan in plan_buffers(plan):
        users = [units_of[name][i] for name, i in buffer_plan.places]
        is_weights, mark = buffer_plan.contents == "weights", streams.make_event()
        dtype = users[0].dtype if is_weights else getattr(torch, buffer_plan.dtype)
        group, registered = users[0].shard_group, None
        if plan.nccl_ub and group is not None:
            registered = memory_of.setdefault(group, RegisteredMemory(group))
        shared_buffer = Buffer[Any](buffer_plan.numel, dtype, mark, registered)
        for unit in users:
            (unit if is_weights else unit.gradients).buffer = shared_buffer
    root, *inner_units = [unit for unit_plan in plan.units for unit in units_of[unit_plan.name]]
    exchanges: dict[nn.Module, nn.Module] | None = None
    if meshes.parallel.pp == 1:  # otherwise a stage's forward runs a part of the modules
        layers = [layer for layer in model.modules() if isinstance(layer, RoutedLayer)]
        sending = [m for m in layers if not isinstance(m.dispatcher, LocalDispatcher)]
        exchanges = {layer: layer.get_part("experts") for layer in sending}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(meshes.device_type)
    return UnitEngine(model, [*inner_units, root], streams, experts_by_layer=exchanges)


def _find_owners(model: nn.Module) -> dict[str, Owners]:
    """Map each parameter's first name to all (module, attribute) pairs that refer to it."""
    owners: dict[nn.Parameter, Owners] = defaultdict(list)
    names: dict[nn.Parameter, str] = {}
    for prefix, module in model.named_modules():
        for attribute, param in module._parameters.items():
            if param is not None:
                owners[param].append((module, attribute))
                names.setdefault(param, f"{prefix}.{attribute}".removeprefix("."))
    return {name: owners[param] for param, name in names.items()}


def _make_unit(
    unit_plan: UnitPlan,
    layout: FlatLayout,
    modules: Sequence[nn.Module],
    owners: dict[str, Owners],
    meshes: Meshes,
    streams: UnitStreams,
    join_meshes: Callable[..., DeviceMesh],
) -> Unit:
    """Shard the parameters of one flat layout over the data ranks, and return their `Unit`."""
    mesh: DeviceMesh | None = meshes.dense_fsdp
    if unit_plan.mesh != "dense":
        mesh = None if has_unsharded_experts(meshes) else meshes.expert_fsdp
    cast = unit_plan.gather_dtype if unit_plan.casts_inputs else None
    num_shards = 1 if mesh is None else mesh.size(mesh.ndim - 1)
    is_sharded = unit_plan.strategy != "no_shard" and layout.ranks == num_shards
    groups = [] if mesh is None else [mesh.get_group(dim) for dim in range(mesh.ndim)]
    group = groups.pop() if groups and is_sharded else None
    group = group if group is not None and group.size() > 1 else None
    options: Any = dict(
        device_type=meshes.device_type, is_sharded=is_sharded, join_meshes=join_meshes
    )
    return Unit(
        modules,
        [UnitParam(slot, owners[slot.param], mesh, **options) for slot in layout.slots],
        layout=layout,
        format=_make_format(layout, unit_plan, group, meshes),
        shard_group=group,
        replicas=[group for group in groups if group.size() > 1],
        options=UnitOptions(
            name=unit_plan.name or "the model",
            reduce_dtype=getattr(torch, layout.reduces),
            divisor=unit_plan.divisor,
            cast_inputs=None if cast is None else getattr(torch, cast),
            is_resident=unit_plan.is_resident,
            accumulates=unit_plan.accumulates,
        ),
        streams=streams,
    )


def _make_format(
    layout: FlatLayout, unit_plan: UnitPlan, shard_group: dist.ProcessGroup | None, meshes: Meshes
) -> Format:
    """Create the format of an all-gather over `shard_group`: a cast, or FP8 by the recipe."""
    if layout.recipe is None:
        return CastFormat(getattr(torch, layout.gathers))
    dtype: torch.dtype = getattr(torch, unit_plan.gather_dtype or layout.dtype)
    recipe, tp_group = layout.recipe, None
    # tp ranks share the scale of a linear. For "nvfp4" a power of two changes only exponents.
    shares = recipe.scaling == "tensorwise" or not recipe.power_of_two
    if shares and unit_plan.mesh == "dense" and meshes.parallel.tp > 1:
        tp_group = meshes.dense["tp"].get_group()
    return FORMATS[recipe.scaling](dtype, recipe, shard_group, tp_group)
