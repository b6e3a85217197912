"""explain(model): who owns what, in about twenty lines.

Reads names, shapes and placements alone: no communication, no host sync, on meta too. What is kept
for backward is counted by a forward on meta (`train/memory/kept.py`).

    size and meshes
    kind, names, how many, global shape, shape on this rank, placement, bytes on this rank
    MoE layers, units, precision
    with a batch: what layers keep for backward, by part
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moecore.base.fields import Count, check_arguments
from moecore.base.options.memory import OFFLOADED, MemoryOptions
from moecore.base.tables import (
    HEADER,
    Part,
    Row,
    alike_rows,
    columns,
    folded,
    shown_axes,
    shown_bytes,
    shown_count,
)
from moecore.kernels.experts.products import choose_products
from moecore.models import Decoder
from moecore.moe.dispatch.nvlink import NVLinkDispatcher
from moecore.moe.layer import MoELayer, RoutedLayer
from moecore.moe.params import clean_name
from moecore.moe.placement import ExpertPlacement
from moecore.parallel.attached import Attached, attached
from moecore.parallel.mesh import DENSE_DIMS, EXPERT_DIMS
from moecore.parallel.request import Request
from moecore.parallel.shard.kinds import kinds
from moecore.parallel.shard.plan import ParamPlan, ShardPlan
from moecore.parallel.shard.size import rank_bytes
from moecore.parallel.shard.units import find_blocks
from moecore.precision.apply import fp8_linears
from moecore.train.graphs.regions import compiled_modules
from moecore.train.memory.kept import kept_bytes

COLUMNS = (*OFFLOADED[:-1], "routing", "rest", "all", "computed again", "in host memory")
UNITS = {"block": "blocks", "experts": "experts", "routers": "routers", "head": "heads"}
TOKENS = 1024  # of which a layer's bytes per token are counted
Batch = Annotated[tuple[Count, Count], "pass (sequences, tokens of each)"]
DtypeOf = Callable[[Tensor], torch.dtype]


@torch.no_grad()
def explain(model: nn.Module | ShardPlan, *, batch: Batch | None = None) -> str:
    """Return who owns what: sizes, meshes, shapes, placements, dispatcher, products, precision.

    Each rank describes its own part and may do so alone: nothing communicates or waits.

        print(explain(model, batch=(2, 4096)))
        print(explain(plan_sharding(model, meshes)))

    Args:
        model: plain or parallelized, on any device; or a plan, of which the parts of the first rank
            are listed, which are the largest.
        batch: sequences of a rank's micro-batch, and tokens of each: the bytes that layers keep of
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
        return "\n".join(_plan_lines(model))
    found = attached(model)
    request = None if found is None else found.request
    layers = {clean_name(n): m for n, m in model.named_modules() if isinstance(m, RoutedLayer)}
    rows = list(_rows(model, layers))
    lines = [
        _size(model, layers, rows),
        *_meshes(model, request),
        *columns([HEADER, *(row.cells() for row in folded(rows))]),
    ]
    dtype_of = _dtype_of(model, found)
    alike = Counter(_of_layer(layer, request, dtype_of) for layer in layers.values())
    for (what, how), n in alike.items():
        lines += [f"{n} MoE layer{'s' * (n > 1)} {what}", how]
    lines += [] if found is None else [_units(found.plan)]
    lines.append(f"precision: {_precision(model, layers, request)}")
    lines += [] if batch is None else _kept(model, batch, request, dtype_of)
    return "\n".join(lines)


def _size(model: nn.Module, layers: dict[str, RoutedLayer], rows: list[Row]) -> str:
    total = sum(p.numel() for p in model.parameters())
    idle = sum(
        p.numel() * (1 - layer.config.top_k / layer.config.num_experts)
        for layer in layers.values()
        for p in layer.part("experts").parameters()
    )
    active = f", {shown_count(total - idle)} active per token" if layers else ""
    here = shown_bytes(sum(row.num_bytes for row in rows))
    name = type(model).__name__
    return f"{name}: {shown_count(total)} parameters{active}, {here} on this rank"


def _meshes(model: nn.Module, request: Request | None) -> list[str]:
    if request is not None:
        lines = repr(request.meshes).splitlines()
        for cp, options in request.context_options(model).items():
            size = f" {cp} of a forward" if request.is_dynamic else ""
            among = f", heads among {options.a2a_ranks} ranks" if options.a2a_ranks else ""
            lines.append(f"attention over cp{size}: {options.way}{among}")
        return lines
    if any(isinstance(p, DTensor) for p in model.parameters()):
        return ["sharded, but not what parallelize_moe returned: meshes are not known here"]
    return ["not parallelized: every process holds it whole"]


def _plan_lines(plan: ShardPlan) -> Iterator[str]:
    size = rank_bytes(plan)
    stored = shown_bytes(size.parameters)
    yield f"{plan.model}: {_numbers(plan)}, {stored} on the first rank of {plan.world_size}"
    for view, dims in (("dense ", DENSE_DIMS), ("expert", EXPERT_DIMS)):
        degrees = ((dim, getattr(plan.parallel, dim)) for dim in dims)
        shown = " ".join(f"{dim}={n}" for dim, n in degrees if n > 1) or "one rank"
        yield f"  {view} {shown}"
    rows = alike_rows(_part_of_plan(param) for param in plan.params)
    yield from columns([HEADER, *(row.cells() for row in folded(rows))])
    alike = Counter((la.num_experts, la.top_k, la.num_local) for la in plan.layers)
    for (experts, top_k, local), n in alike.items():
        what = f"{n} MoE layer{'s' * (n > 1)} of {experts} experts, top {top_k}"
        yield f"{what}; each rank has {local}"
    if plan.layers:
        yield f"dispatcher {plan.dispatcher}: {plan.dispatcher_reason}"
    yield _units(plan)
    root = plan.units[0]
    yield (
        f"parameters all-gathered in {_gathered_in(plan)}, gradients reduced "
        f"in {root.reduce_dtype} and divided by {root.divisor:g}; {_fp8(plan)}"
    )
    yield (
        f"on the first rank: gradients {shown_bytes(size.gradients)}, buffers of whole parameters "
        f"{shown_bytes(size.weights)}, of sums {shown_bytes(size.sums)}, and "
        f"{shown_bytes(size.accumulated)} while micro-batches add up"
    )


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


def _numbers(plan: ShardPlan) -> str:
    """Return how many parameters there are, and how many a token uses."""
    total = sum(param.numel for param in plan.params)
    if not plan.layers:
        return f"{shown_count(total)} parameters"
    numel = {param.name: param.numel for param in plan.params}
    of_unit = {unit.name: sum(numel[name] for name in unit.params) for unit in plan.units}
    idle = sum(of_unit[la.experts] * (1 - la.top_k / la.num_experts) for la in plan.layers)
    return f"{shown_count(total)} parameters, {shown_count(total - idle)} active per token"


def _rows(model: nn.Module, layers: dict[str, RoutedLayer]) -> Iterator[Row]:
    """Yield parameters that are alike together, in the order of the model."""
    kind_of = kinds(model, layers)
    yield from alike_rows(_part(name, param, kind_of) for name, param in model.named_parameters())


def _part(name: str, param: nn.Parameter, kind_of: Callable[[str], str]) -> Part:
    name, local = clean_name(name), param.to_local() if isinstance(param, DTensor) else param
    shapes = tuple(param.shape), tuple(local.shape)
    num_bytes = local.numel() * local.element_size()
    kind = kind_of(name) + _frozen(param.requires_grad)
    return Part(name, kind, shapes, _placement(param), param.dtype, num_bytes)


def _part_of_plan(param: ParamPlan) -> Part:
    name, shapes = clean_name(param.name), (param.shape, param.local_shape())
    placement = shown_axes((p.axis, p.dim) for p in param.placements if p.size > 1)
    kind = param.kind + _frozen(param.trainable)
    return Part(name, kind, shapes, placement, param.dtype, param.num_bytes())


def _frozen(trainable: bool) -> str:
    return "" if trainable else " (frozen)"


def _placement(param: Tensor) -> str:
    """Return which mesh dims cut the parameter, and how; dims of one rank left out."""
    if not isinstance(param, DTensor):
        return "whole"
    mesh = param.device_mesh
    names = zip(mesh.mesh_dim_names or (), param.placements, strict=True)
    dims = ((name, getattr(p, "dim", None)) for name, p in names)
    return shown_axes(pair for i, pair in enumerate(dims) if mesh.size(i) > 1)


def _of_layer(layer: RoutedLayer, request: Request | None, dtype_of: DtypeOf) -> tuple[str, str]:
    """Return what a layer is and who owns its experts; how they are multiplied."""
    config, experts = layer.config, layer.part("experts")
    dispatcher = type(layer.dispatcher).__name__.removesuffix("Dispatcher").lower()
    place = getattr(layer.dispatcher, "placement", None)
    own, etp = f"all {config.num_experts}", 1
    if isinstance(place, ExpertPlacement):
        first, etp = place.first_local, place.etp
        own = f"{first} to {first + place.num_local - 1}" + (f", 1/{etp} of each" * (etp > 1))
        dispatcher += f" among {place.group.size()} ranks"
    weight = next(experts.parameters())
    dtype = dtype_of(weight)
    device = weight.device if request is None else torch.device(request.meshes.device_type)
    backend = experts.backend
    if backend == "auto":
        spec = experts.spec(
            dim=config.expert_dim,
            hidden_dim=config.hidden_dim // etp,
            dtypes=frozenset([dtype]),
            device=device,
            recipe=experts.recipe,
        )
        backend = f"auto ({choose_products('auto', spec)})"
    what = f"of {config.num_experts} experts, top {config.top_k}; this rank has {own}"
    kept = _kept_of_layer(layer, dtype_of, _device_type(layer, request))
    return f"{what}; dispatcher {dispatcher}", f"expert_backend {backend}; backward keeps {kept}"


def _kept_of_layer(layer: RoutedLayer, dtype_of: DtypeOf, device_type: str) -> str:
    """Return what a layer keeps of a token for its backward, by part."""
    config, experts = layer.config, layer.part("experts")
    options = MemoryOptions(recompute=("expert_fc1",) if experts.recompute_fc1 else ())
    dtype = dtype_of(next(experts.parameters()))
    x_TD = torch.empty(TOKENS, config.dim, dtype=dtype, device="meta")
    x_TD.requires_grad_()
    inputs = [x_TD]
    if not isinstance(layer, MoELayer):  # the choice is the model's own
        inputs += [x_TD.new_empty(TOKENS, config.top_k, dtype=torch.int64)]
        inputs += [x_TD.new_empty(TOKENS, config.top_k, dtype=torch.float32).requires_grad_()]
    how: dict[str, Any] = dict(options=options, device_type=device_type, dtype_of=dtype_of)
    (kept,) = kept_bytes(layer, [layer], lambda copy: copy(*inputs), **how).blocks
    parts = [
        f"{part.replace('_', ' ')} {shown_bytes(n / TOKENS)}" for part, n in kept.device.items()
    ]
    again = "; FC1 runs again" if experts.recompute_fc1 else ""
    dispatcher = layer.dispatcher
    is_sent_again = isinstance(dispatcher, NVLinkDispatcher) and not dispatcher.keeps_rows
    again += "; rows are sent again" if is_sent_again else ""
    return f"{shown_bytes(kept.num_bytes / TOKENS)} per token and layer: {', '.join(parts)}{again}"


def _kept(model: nn.Module, batch: Batch, request: Request | None, dtype_of: DtypeOf) -> list[str]:
    """Return what blocks keep of a batch, those that are alike in one row, and the sums."""
    tokens_BT = torch.zeros(batch, dtype=torch.int64)
    blocks = find_blocks(model)
    options = MemoryOptions() if request is None else request.memory
    how: dict[str, Any] = dict(device_type=_device_type(model, request), dtype_of=dtype_of)
    if request is not None and request.compile_dense:
        how["compiled"] = frozenset(m for block in blocks for m in compiled_modules(block))

    more: dict[str, Any] = {}
    if isinstance(model, Decoder):
        more = dict(labels_BT=tokens_BT)  # multi-token prediction is part of the loss
    elif hasattr(model, "get_input_embeddings"):  # of transformers
        more = dict(use_cache=False, position_ids=torch.arange(batch[1])[None])
    run = partial(_call, tokens_BT, more)
    kept = kept_bytes(model, blocks, run, options=options, **how).blocks
    whole = kept_bytes(model, blocks, run, options=MemoryOptions(), **how).blocks
    rows: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for i, (one, all_of_it) in enumerate(zip(kept, whole, strict=True)):
        sums = {"all": one.num_bytes, "in host memory": sum(one.host.values())}
        sums["computed again"] = all_of_it.num_bytes - sum(sums.values())
        shown = tuple((name, n) for name, n in {**one.device, **sums}.items() if n)
        rows.setdefault(shown, []).append(i)
    names = [name for name in COLUMNS if any(name in dict(row) for row in rows)]
    table: list[tuple[str, ...]] = [("layers", *(name.replace("_", " ") for name in names))]
    for row, layers in rows.items():
        of = dict(row)
        cells = (shown_bytes(of[name] / tokens_BT.numel()) if name in of else "-" for name in names)
        table.append((_ranges(layers), *cells))
    here = sum(one.num_bytes for one in kept)
    host = sum(sum(one.host.values()) for one in kept)
    total = f"all layers: {shown_bytes(here)}" + (
        f", {shown_bytes(host)} in host memory" if host else ""
    )
    return [
        f"kept for backward per token, of {batch[0]} x {batch[1]} tokens",
        *columns(table),
        total,
    ]


def _call(tokens_BT: Tensor, more: dict[str, Any], model: nn.Module) -> None:
    model(tokens_BT, **more)


def _ranges(numbers: list[int]) -> str:
    """Return numbers in order as text: 0, 2 to 5."""
    found: list[list[int]] = []
    for n in numbers:
        if found and n == found[-1][-1] + 1:
            found[-1].append(n)
        else:
            found.append([n])
    return ", ".join(f"{r[0]} to {r[-1]}" if len(r) > 1 else str(r[0]) for r in found)


def _dtype_of(model: nn.Module, found: Attached | None) -> DtypeOf:
    """Return what tells the dtype in which a parameter is computed with."""
    dtype = None if found is None else found.request.fsdp.param_dtype
    if found is None or dtype is None:
        return lambda param: param.dtype
    plan = found.plan
    routers = [name for unit in plan.units if unit.role == "routers" for name in unit.modules]
    own = {p for name in routers for p in model.get_submodule(name).parameters()}
    return lambda p: p.dtype if p in own or not p.is_floating_point() else dtype


def _device_type(module: nn.Module, request: Request | None) -> str:
    """Return where a module runs; of one on meta that no mesh knows, a GPU."""
    if request is not None:
        return request.meshes.device_type
    found = next((p.device.type for p in module.parameters()), "meta")
    return "cuda" if found == "meta" else found


def _units(plan: ShardPlan) -> str:
    units = [unit for unit in plan.units if unit.role != "root"]
    number = Counter(UNITS[unit.role] for unit in units)
    shown = ", ".join(f"{number[what]} of {what}" for what in UNITS.values() if number[what])
    freed = dict.fromkeys(UNITS[unit.role] for unit in units if not unit.stays)
    names = [what for what in UNITS.values() if what in freed]
    after = f"{' and '.join(names)} freed after forward" if names else "all kept for backward"
    return f"units: {len(units) + 1}: {shown or 'none'}, the root; {after}"


def _precision(model: nn.Module, layers: dict[str, RoutedLayer], request: Request | None) -> str:
    recipes: Counter[str] = Counter()
    for layer in layers.values():
        if layer.part("experts").recipe is not None:
            recipes[f"experts, {layer.part('experts').recipe.describe()}"] += 1
    for _, products in fp8_linears(model):
        recipes[f"linears, {products.recipe.describe()}"] += 1
    fp8 = "; ".join(f"{n} {what}" for what, n in recipes.items()) or "no FP8"
    dtypes = dict.fromkeys(str(p.dtype).removeprefix("torch.") for p in model.parameters())
    stored = f"parameters {', '.join(dtypes)}"
    if request is None:
        return f"{stored}; {fp8}"
    names = [
        str(dtype or "their own dtype").removeprefix("torch.")
        for dtype in (request.fsdp.param_dtype, request.fsdp.reduce_dtype)
    ]
    return f"{stored}, computed in {names[0]}, gradients reduced in {names[1]}; {fp8}"
