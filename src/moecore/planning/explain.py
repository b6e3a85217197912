"""explain(model): who owns what, in about twenty lines: a `ShardPlan` as text.

A plain model gets a plan of its own names and shapes. No communication, no host sync, on meta too.
`train/memory/listed.py` lists what is saved for backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import zip_longest

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from moecore.base.fields import check_arguments
from moecore.base.tables import (
    HEADER,
    TableRow,
    columns,
    folded,
    shown_axes,
    shown_bytes,
    shown_count,
)
from moecore.kernels.experts.products import choose_products
from moecore.moe.layer import RoutedLayer
from moecore.moe.params import clean_name
from moecore.parallel.attached import attached
from moecore.parallel.mesh import DENSE_DIMS, EXPERT_DIMS, ParallelConfig
from moecore.parallel.request import Request
from moecore.parallel.shard.make import dtype_name
from moecore.parallel.shard.plan import AxisPlacement, Coordinate, LayerPlan, ParamPlan, ShardPlan
from moecore.parallel.shard.size import rank_bytes
from moecore.parallel.shard.units import kinds
from moecore.precision.apply import fp8_linears
from moecore.train.memory.listed import Batch, How, batch_lines, how_computed, layer_line

UNITS = {"block": "blocks", "experts": "experts", "routers": "routers", "head": "heads"}


@torch.no_grad()
def explain(model: nn.Module | ShardPlan, *, batch: Batch | None = None) -> str:
    """Return who owns what: sizes, meshes, shapes, placements, dispatcher, products, precision.

    Each rank describes its own part and may do so alone: nothing communicates or waits.

        print(explain(model, batch=(2, 4096)))
        print(explain(plan_sharding(model, meshes)))

    Args:
        model: plain or parallelized, on any device; or a plan, of which the parts of the first rank
            are listed, which are the largest.
        batch: sequences of a rank's micro-batch, and tokens of each: the bytes that layers save of
            it for backward are listed by part, before anything is allocated. Loads of experts are
            even, and a compiled region counts as if it were not. None = those of MoE layers alone,
            per token.

    Raises:
        ValueError: when `model` is no module and no plan, for a batch that is not two numbers
            above 0, and for a plan with a batch.
    """
    check_arguments(explain, locals())
    if isinstance(model, ShardPlan):
        if batch is not None:
            raise ValueError(
                f"batch ({batch}) must be None for a plan, which has no forward: explain the model"
            )
        return "\n".join([*_lines(model, None, _degrees(model), []), _buffers(model)])
    found = attached(model)
    if found is not None:
        model = found.request.family.unwrapped(model)
    how, request = how_computed(model), None if found is None else found.request
    plan, here = plan_now(model)
    layers = [module for module in model.modules() if isinstance(module, RoutedLayer)]
    products = [_products(layer, request, how) for layer in layers]
    saved = [] if batch is None else batch_lines(model, batch)
    return "\n".join([*_lines(plan, here, _meshes(model, request, here), products), *saved])


def plan_now(model: nn.Module) -> tuple[ShardPlan, Coordinate]:
    """Return a model's plan with its parameters as they are now, and this rank's coordinate.

    A model without a plan gets one without units. `make_plan` refuses models that can be listed,
    and needs a process group of one rank, which a rank of a larger world cannot have.
    """
    found, modules = attached(model), {clean_name(n): m for n, m in model.named_modules()}
    layers = {name: m for name, m in modules.items() if isinstance(m, RoutedLayer)}
    kind_of, here = kinds(model, layers), dict[str, int]()
    experts = {p for layer in layers.values() for p in layer.part("experts").parameters()}
    named = ((clean_name(name), param) for name, param in model.named_parameters())
    params = tuple(
        ParamPlan(
            name=name,
            kind=kind_of(name),
            shape=tuple(param.shape),
            dtype=dtype_name(param.dtype),
            itemsize=param.element_size(),
            trainable=param.requires_grad,
            mesh="expert" if param in experts else "dense",
            placements=tuple(_placements(param, here)),
        )
        for name, param in named
    )
    if found is not None:
        return replace(found.plan, params=params), here
    names = {module: name for name, module in modules.items()}
    linears = ((names[linear], products.recipe) for linear, products in fp8_linears(model))
    dispatchers = {type(layer.dispatcher).__name__: None for layer in layers.values()}
    plan = ShardPlan(
        model=type(model).__name__,
        device_type="",
        parallel=ParallelConfig(),
        layers=tuple(_layer(name, layer) for name, layer in layers.items()),
        linears=tuple(linears),
        params=params,
        units=(),
        blocks=(),
        dispatcher=", ".join(dispatchers).replace("Dispatcher", "").lower(),
        dispatcher_reason="its MoE layers have it",
    )
    return plan, here


def _placements(param: nn.Parameter, here: dict[str, int]) -> Iterator[AxisPlacement]:
    """Yield the axes of a parameter's mesh; add this rank's place on them to `here`."""
    if isinstance(param, DTensor):
        mesh = param.device_mesh
        axes = mesh.mesh_dim_names or [f"axis {i}" for i in range(mesh.ndim)]
        for i, (axis, cut) in enumerate(zip(axes, param.placements, strict=True)):
            here[axis] = mesh.get_local_rank(i)
            yield AxisPlacement(axis=axis, size=mesh.size(i), dim=getattr(cut, "dim", None))


def _layer(name: str, layer: RoutedLayer) -> LayerPlan:
    config = layer.config
    return LayerPlan(
        name=name,
        experts=f"{name}.{layer.name_of('experts')}".strip("."),
        num_experts=config.num_experts,
        top_k=config.top_k,
        num_local=config.num_experts,
        hidden_dim=config.hidden_dim,
        recipes=(("experts", layer.part("experts").recipe),),
    )


def _lines(
    plan: ShardPlan, here: Coordinate | None, meshes: Iterable[str], products: Iterable[str]
) -> Iterator[str]:
    """Yield the lines of a plan, of a rank or of the first one."""
    rows = rows_of(plan, here)
    stored = shown_bytes(sum(row.num_bytes for row in rows))
    where = "this rank" if here is not None else f"the first rank of {plan.world_size}"
    yield f"{plan.model}: {_numbers(plan)}, {stored} on {where}"
    yield from meshes
    yield from columns([HEADER, *(row.cells() for row in folded(rows))])
    each = zip_longest((_experts_here(plan, layer, here) for layer in plan.layers), products)
    for (what, how), n in Counter(each).items():
        yield f"{n} MoE layer{'s' * (n > 1)} {what}"
        yield from [how] if how else ()
    if plan.layers:
        yield f"dispatcher {plan.dispatcher}: {plan.dispatcher_reason}"
    dtypes = f"parameters {', '.join(dict.fromkeys(param.dtype for param in plan.params))}"
    if plan.units:
        yield _units(plan)
        dtypes += f", all-gathered in {_gathered_in(plan)}, gradients reduced in "
        dtypes += f"{plan.units[0].reduce_dtype} and divided by {plan.units[0].divisor:g}"
    yield f"{dtypes}; {_fp8(plan)}"


def _degrees(plan: ShardPlan) -> Iterator[str]:
    for view, dims in (("dense ", DENSE_DIMS), ("expert", EXPERT_DIMS)):
        degrees = ((dim, getattr(plan.parallel, dim)) for dim in dims)
        yield f"  {view} {' '.join(f'{dim}={n}' for dim, n in degrees if n > 1) or 'one rank'}"


def _meshes(model: nn.Module, request: Request | None, here: Coordinate) -> Iterator[str]:
    """Yield the meshes of a model, and how attention communicates over cp."""
    if request is None and here:
        yield "sharded, but not what parallelize_moe returned: meshes are not known here"
    elif request is None:
        yield "not parallelized: every process holds it whole"
    else:
        yield repr(request.meshes)
        for cp, options in request.context_options(model).items():
            size = f" {cp} of a forward" if request.is_dynamic else ""
            among = f", heads among {options.a2a_ranks} ranks" if options.a2a_ranks else ""
            yield f"attention over cp{size}: {options.way}{among}"


def rows_of(plan: ShardPlan, here: Coordinate | None) -> list[TableRow]:
    """Return parameters that are alike together, in the order of the model."""
    found: dict[object, TableRow] = {}
    for param in plan.params:
        *path, leaf = clean_name(param.name).split(".")
        kind = param.kind + ("" if param.trainable else " (frozen)")
        shapes = param.shape, param.local_shape(here)
        placement = shown_axes((p.axis, p.dim) for p in param.placements if p.size > 1)
        row = found.setdefault(
            (kind, shapes, placement, param.dtype), TableRow(kind, shapes, placement)
        )
        shown = path[-1] if leaf in ("weight", "bias") and path else leaf
        row.names += [shown] * (shown not in row.names)
        row.number += 1
        row.num_bytes += param.num_bytes(here)
    return list(found.values())


def _numbers(plan: ShardPlan) -> str:
    """Return how many parameters there are, and how many a token uses."""
    total = sum(param.numel for param in plan.params)
    if not plan.layers:
        return f"{shown_count(total)} parameters"
    idle = sum(
        param.numel * (1 - layer.top_k / layer.num_experts)
        for layer in plan.layers
        for param in _experts(plan, layer)
    )
    return f"{shown_count(total)} parameters, {shown_count(total - idle)} active per token"


def _experts(plan: ShardPlan, layer: LayerPlan) -> Iterator[ParamPlan]:
    """Yield the parameters of a layer's experts."""
    of_experts = f"{clean_name(layer.experts)}."
    for param in plan.params:
        if param.mesh == "expert" and clean_name(param.name).startswith(of_experts):
            yield param


def _experts_here(plan: ShardPlan, layer: LayerPlan, here: Coordinate | None) -> str:
    """Return how many experts a layer has, and which of them a rank."""
    ranks = {axis.axis: axis.size for axis in next(_experts(plan, layer)).placements}
    num_local, etp = layer.num_experts // ranks.get("ep", 1), ranks.get("etp", 1)
    own = f"all {layer.num_experts}"
    if num_local < layer.num_experts:
        first = 0 if here is None else here["ep"] * num_local
        own = f"{num_local}" if here is None else f"{first} to {first + num_local - 1}"
    own += f", 1/{etp} of each" if etp > 1 else ""
    who = "each" if here is None else "this"
    return f"of {layer.num_experts} experts, top {layer.top_k}; {who} rank has {own}"


def _products(layer: RoutedLayer, request: Request | None, how: How) -> str:
    """Return how a layer's experts are multiplied, and what it saves for backward."""
    config, experts = layer.config, layer.part("experts")
    backend, weight = experts.backend, next(experts.parameters())
    if backend == "auto" and request is not None:
        backend = f"auto ({choose_products('auto', request.spec_of(layer, experts.recipe))})"
    elif backend == "auto":
        spec = experts.spec(
            dim=config.expert_dim,
            hidden_dim=config.hidden_dim,
            dtypes=frozenset([weight.dtype]),
            device=weight.device,
            recipe=experts.recipe,
        )
        backend = f"auto ({choose_products('auto', spec)})"
    return f"expert_backend {backend}; saved for backward {layer_line(layer, how)}"


def _units(plan: ShardPlan) -> str:
    units = [unit for unit in plan.units if unit.role != "root"]
    number = Counter(UNITS[unit.role] for unit in units)
    shown = ", ".join(f"{number[what]} of {what}" for what in UNITS.values() if number[what])
    resharded = dict.fromkeys(UNITS[unit.role] for unit in units if not unit.stays)
    names = [what for what in UNITS.values() if what in resharded]
    after = f"{' and '.join(names)} resharded after forward" if names else "all resident"
    return f"units: {len(units) + 1}: {shown or 'none'}, the root; {after}"


def _gathered_in(plan: ShardPlan) -> str:
    """Return the dtype of the root, and how many parameters have FP8 instead."""
    wide = plan.units[0].gather_dtype or "their own dtype"
    layouts = [layout for unit in plan.units for layout in unit.layouts]
    in_fp8 = sum(len(layout.slots) for layout in layouts if layout.recipe is not None)
    return f"{wide}, {in_fp8} of them in FP8" if in_fp8 else wide


def _fp8(plan: ShardPlan) -> str:
    """Return what is computed in FP8."""
    found = Counter[str]()
    for layer in plan.layers:
        for role, recipe in layer.recipes:
            if recipe is not None:
                found[f"{role.replace('_', ' ')}, {recipe.describe()}"] += 1
    found.update(f"linears, {recipe.describe()}" for _, recipe in plan.linears)
    return "; ".join(f"{n} {what}" for what, n in found.items()) or "no FP8"


def _buffers(plan: ShardPlan) -> str:
    size = rank_bytes(plan)
    return (
        f"on the first rank: gradients {shown_bytes(size.gradients)}, buffers of whole parameters "
        f"{shown_bytes(size.weights)}, of sums {shown_bytes(size.sums)}, and "
        f"{shown_bytes(size.accumulated)} while micro-batches accumulate"
    )
