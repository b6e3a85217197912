"""explain(model): a model's `ShardPlan` as about twenty lines of text."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moecore.base.fields import Count, check_arguments
from moecore.base.options.memory import OFFLOADED, MemoryOptions
from moecore.base.params import clean_name
from moecore.base.text import (
    HEADER,
    TableRow,
    format_axes,
    format_bytes,
    format_columns,
    format_count,
    format_ranges,
    merge_table_rows,
)
from moecore.kernels.experts.products import choose_products
from moecore.models import Decoder
from moecore.moe.dispatch.nvlink import NVLinkDispatcher
from moecore.moe.layer import MoELayer, RoutedLayer
from moecore.parallel.fsdp.plan import AxisPlacement, Coordinate, LayerPlan, ParamPlan, ShardPlan
from moecore.parallel.fsdp.size import compute_rank_bytes
from moecore.parallel.fsdp.units import find_blocks, make_kind_lookup
from moecore.parallel.mesh import DENSE_DIMS, EXPERT_DIMS, ParallelConfig
from moecore.parallel.model.parallel_state import ParallelState, get_parallel_state
from moecore.parallel.model.plan import get_dtype_name, make_layer_plan
from moecore.parallel.model.request import Request
from moecore.parallel.pipeline.stages import StagedModel, count_layers_and_mtp
from moecore.precision.apply import list_quantised_linears
from moecore.train.graphs.regions import find_compiled_modules
from moecore.train.memory.saved_bytes import count_saved_bytes

Batch = Annotated[tuple[Count, Count], "pass (sequences, tokens of each)"]
ComputeArgs = dict[str, Any]  # arguments of `count_saved_bytes`
UNITS = {"block": "blocks", "experts": "experts", "routers": "routers", "head": "heads"}


@torch.no_grad()
def explain(model: nn.Module | ShardPlan, *, batch: Batch | None = None) -> str:
    """Return the sizes, meshes, placements, dispatcher, matmuls and precision of a model as text.

    Each rank describes its shards. The call does not communicate or synchronise the host.

        print(explain(model, batch=(2, 4096)))
        print(explain(plan_sharding(model, meshes)))

    Args:
        model: a plain or parallelized model on any device, or a plan, whose first rank is described
            because its shards are the largest.
        batch: (sequences, tokens per sequence) of a rank's micro-batch, to list the bytes that each
            part of a block saves for backward. The bytes assume even expert loads and eager mode.
            None = only the bytes per token of MoE layers.

    Raises:
        ValueError: for other types, a number below 1 in `batch`, or a plan together with a batch.
    """
    check_arguments(explain, locals())
    if isinstance(model, ShardPlan):
        if batch is not None:
            raise ValueError(
                f"batch ({batch}) must be None for a plan, which has no forward: explain the model"
            )
        lines = [*_describe_plan(model, None, _describe_degrees(model), [])]
        size = compute_rank_bytes(model)
        lines.append(
            f"on the first rank: gradients {format_bytes(size.gradients)}, buffers of whole "
            f"parameters {format_bytes(size.weights)}, of sums {format_bytes(size.sums)}, and "
            f"{format_bytes(size.accumulated)} while micro-batches accumulate"
        )
        return "\n".join(lines)
    attachment = get_parallel_state(model)
    if attachment is not None:
        model = attachment.request.family.unwrap_peft(model)
    request = None if attachment is None else attachment.request
    compute_args = list_compute_args(model)
    plan, coordinate = make_current_plan(model)
    layers = [module for module in model.modules() if isinstance(module, RoutedLayer)]
    products = [_describe_expert_matmuls(layer, request, compute_args) for layer in layers]
    saved_lines = [] if batch is None else describe_block_saved_bytes(model, batch)
    meshes = _describe_meshes(model, request, coordinate)
    return "\n".join([*_describe_plan(plan, coordinate, meshes, products), *saved_lines])


def make_current_plan(model: nn.Module) -> tuple[ShardPlan, Coordinate]:
    """Return a model's `ShardPlan`, with current parameters, and this rank's {mesh axis: index}."""
    attachment = get_parallel_state(model)
    modules = {clean_name(n): m for n, m in model.named_modules()}
    layers = {name: m for name, m in modules.items() if isinstance(m, RoutedLayer)}
    kind_of, coordinate = make_kind_lookup(model, layers), dict[str, int]()
    experts = {p for layer in layers.values() for p in layer.get_part("experts").parameters()}
    named = ((clean_name(name), param) for name, param in model.named_parameters())
    params = tuple(
        ParamPlan(
            name=name,
            kind=kind_of(name),
            shape=tuple(param.shape),
            dtype=get_dtype_name(param.dtype),
            itemsize=param.element_size(),
            trainable=param.requires_grad,
            mesh="expert" if param in experts else "dense",
            placements=tuple(_list_placements(param, coordinate)),
        )
        for name, param in named
    )
    if attachment is not None:
        return replace(attachment.plan, params=params), coordinate
    # `make_shard_plan` rejects some of these models, and needs a process group of one rank, which a
    # rank of a larger world does not have.
    names = {module: name for name, module in modules.items()}
    linears = ((names[m], products.recipe) for m, products in list_quantised_linears(model))
    layer_plans = (
        make_layer_plan(name, layer, {"experts": layer.get_part("experts").recipe})
        for name, layer in layers.items()
    )
    dispatchers = {type(layer.dispatcher).__name__: None for layer in layers.values()}
    plan = ShardPlan(
        model=type(model).__name__,
        device_type="",
        parallel=ParallelConfig(),
        layers=tuple(layer_plans),
        linears=tuple(linears),
        params=params,
        units=(),
        blocks=(),
        dispatcher=", ".join(dispatchers).replace("Dispatcher", "").lower(),
        dispatcher_reason="its MoE layers have it",
    )
    return plan, coordinate


def _list_placements(param: nn.Parameter, coordinate: dict[str, int]) -> Iterator[AxisPlacement]:
    """Yield a parameter's placement per mesh axis; write this rank's indices to `coordinate`."""
    if isinstance(param, DTensor):
        mesh = param.device_mesh
        axes = mesh.mesh_dim_names or [f"axis {i}" for i in range(mesh.ndim)]
        for i, (axis, placement) in enumerate(zip(axes, param.placements, strict=True)):
            coordinate[axis] = mesh.get_local_rank(i)
            yield AxisPlacement(axis=axis, size=mesh.size(i), dim=getattr(placement, "dim", None))


def _describe_plan(
    plan: ShardPlan,
    coordinate: Coordinate | None,
    mesh_lines: Iterable[str],
    matmul_lines: Iterable[str],
) -> Iterator[str]:
    """Yield the lines of a plan; `coordinate` = {axis: index} of a rank, None = rank 0."""
    rows = list_parameter_rows(plan, coordinate)
    size = format_bytes(sum(row.num_bytes for row in rows))
    holder = "this rank" if coordinate is not None else f"the first rank of {plan.world_size}"
    total = sum(param.numel for param in plan.params)
    idle = 0.0  # parameters of experts to which a token is not routed, on average
    for layer in plan.layers:
        numel = sum(param.numel for param in _list_expert_params(plan, layer))
        idle += numel * (1 - layer.top_k / (layer.num_experts + layer.zero_experts))
    counts = f"{format_count(total)} parameters"
    counts += f", {format_count(total - idle)} active per token" if plan.layers else ""
    yield f"{plan.model}: {counts}, {size} on {holder}"
    yield from mesh_lines
    yield from [f"degrees chosen: {plan.parallel_reason}"] if plan.parallel_reason else ()
    yield from format_columns([HEADER, *(row.cells() for row in merge_table_rows(rows))])
    experts = (_describe_rank_experts(plan, layer, coordinate) for layer in plan.layers)
    for (experts_line, products_line), n in Counter(zip_longest(experts, matmul_lines)).items():
        yield f"{n} MoE layer{'s' * (n > 1)} {experts_line}"
        yield from [products_line] if products_line else ()
    if plan.layers:
        yield f"dispatcher {plan.dispatcher}: {plan.dispatcher_reason}"
    dtypes = f"parameters {', '.join(dict.fromkeys(param.dtype for param in plan.params))}"
    if plan.units:
        yield _describe_units(plan)
        dtypes += f", all-gathered in {_describe_gather_dtypes(plan)}, gradients reduced in "
        sums = dict.fromkeys(layout.reduces for unit in plan.units for layout in unit.layouts)
        dtypes += f"{' or '.join(sums)} and divided by {plan.units[0].divisor:g}"
    numbers = Counter[str]()  # of modules by FP8 recipe
    for layer in plan.layers:
        for role, recipe in layer.recipes:
            if recipe is not None:
                numbers[f"{role.replace('_', ' ')}, {recipe.describe()}"] += 1
    numbers.update(f"linears, {recipe.describe()}" for _, recipe in plan.linears)
    yield f"{dtypes}; {'; '.join(f'{n} {text}' for text, n in numbers.items()) or 'no FP8'}"


def _describe_degrees(plan: ShardPlan) -> Iterator[str]:
    """Yield two lines: the degrees above 1 of the dense mesh, and of the expert mesh."""
    for view, dims in (("dense ", DENSE_DIMS), ("expert", EXPERT_DIMS)):
        degrees = ((dim, getattr(plan.parallel, dim)) for dim in dims)
        yield f"  {view} {' '.join(f'{dim}={n}' for dim, n in degrees if n > 1) or 'one rank'}"


def _describe_meshes(
    model: nn.Module, request: Request | None, coordinate: Coordinate
) -> Iterator[str]:
    """Yield lines on a model's meshes and its attention over cp; `request` None = a plain model."""
    if request is None and coordinate:
        yield "sharded, but not what parallelize_moe returned: meshes are not known here"
    elif request is None:
        yield "not parallelized: every process holds it whole"
    else:
        yield repr(request.meshes)
        for cp, options in request.context_options(model).items():
            size = f" {cp} of a forward" if request.is_dynamic else ""
            among = f", heads among {options.a2a_ranks} ranks" if options.a2a_ranks else ""
            yield f"attention over cp{size}: {options.way}{among}"


def list_parameter_rows(plan: ShardPlan, coordinate: Coordinate | None) -> list[TableRow]:
    """Return a table row per group of parameters with equal kind, shapes, placement and dtype."""
    rows: dict[object, TableRow] = {}
    for param in plan.params:
        *path, leaf = clean_name(param.name).split(".")
        kind = param.kind + ("" if param.trainable else " (frozen)")
        shapes = param.shape, param.local_shape(coordinate)
        placement = format_axes((p.axis, p.dim) for p in param.placements if p.size > 1)
        key = (kind, shapes, placement, param.dtype)
        row = rows.setdefault(key, TableRow(kind, shapes, placement))
        label = path[-1] if leaf in ("weight", "bias") and path else leaf
        row.names += [label] * (label not in row.names)
        row.number += 1
        row.num_bytes += param.num_bytes(coordinate)
    return list(rows.values())


def _list_expert_params(plan: ShardPlan, layer: LayerPlan) -> Iterator[ParamPlan]:
    """Yield the parameters of a layer's experts."""
    prefix = f"{clean_name(layer.experts)}."
    for param in plan.params:
        if param.mesh == "expert" and clean_name(param.name).startswith(prefix):
            yield param


def _describe_rank_experts(plan: ShardPlan, layer: LayerPlan, coordinate: Coordinate | None) -> str:
    """Return text: the number of a layer's experts, and which experts a rank has."""
    ranks = {axis.axis: axis.size for axis in next(_list_expert_params(plan, layer)).placements}
    num_local, etp = layer.num_experts // ranks.get("ep", 1), ranks.get("etp", 1)
    share = f"all {layer.num_experts}"
    if num_local < layer.num_experts:
        first = 0 if coordinate is None else coordinate["ep"] * num_local
        share = f"{num_local}" if coordinate is None else f"{first} to {first + num_local - 1}"
    share += f", 1/{etp} of each" if etp > 1 else ""
    subject = "each" if coordinate is None else "this"
    return f"of {layer.num_experts} experts, top {layer.top_k}; {subject} rank has {share}"


def _describe_expert_matmuls(
    layer: RoutedLayer, request: Request | None, compute_args: ComputeArgs
) -> str:
    """Return text: a layer's expert backend and the bytes that it saves for backward."""
    config, experts = layer.config, layer.get_part("experts")
    backend, weight = experts.backend, next(experts.parameters())
    if backend == "auto":
        if request is not None:
            spec = request.make_expert_spec(layer, experts.recipe)
        else:
            place: Any = dict(dtypes=frozenset([weight.dtype]), device=weight.device)
            spec = experts.make_spec(
                dim=config.expert_dim, hidden_dim=config.hidden_dim, **place, recipe=experts.recipe
            )
        backend = f"auto ({choose_products('auto', spec)})"
    saved_bytes = describe_layer_saved_bytes(layer, compute_args)
    return f"expert_backend {backend}; saved for backward {saved_bytes}"


def _describe_units(plan: ShardPlan) -> str:
    """Return text: the number of FSDP units of each kind, and the kinds resharded after forward."""
    units = [unit for unit in plan.units if unit.role != "root"]
    number = Counter(UNITS[unit.role] for unit in units)
    counts = ", ".join(f"{number[kind]} of {kind}" for kind in UNITS.values() if number[kind])
    resharded = dict.fromkeys(UNITS[unit.role] for unit in units if not unit.is_resident)
    names = [kind for kind in UNITS.values() if kind in resharded]
    after = f"{' and '.join(names)} resharded after forward" if names else "all resident"
    return f"units: {len(units) + 1}: {counts or 'none'}, the root; {after}"


def _describe_gather_dtypes(plan: ShardPlan) -> str:
    """Return text: the FSDP root's all-gather dtype, and how many parameters gather in FP8."""
    wide = plan.units[0].gather_dtype or "their own dtype"
    numbers = Counter[str]()
    for layout in (layout for unit in plan.units for layout in unit.layouts):
        if layout.recipe is not None:
            numbers["FP8" if layout.values_per_byte == 1 else "NVFP4"] += len(layout.slots)
    return ", ".join([wide, *(f"{number} of them in {name}" for name, number in numbers.items())])


COLUMNS = (*OFFLOADED[:-1], "routing", "rest", "all", "recomputed", "in host memory")
TOKENS = 1024  # tokens of the forward in which a layer's bytes per token are counted


def list_compute_args(model: nn.Module) -> ComputeArgs:
    """Return arguments of `count_saved_bytes`: device type ("cuda" if on meta), compute dtypes."""
    attachment = get_parallel_state(model)
    if attachment is None:
        device_type = next((p.device.type for p in model.parameters()), "meta")
        return dict(device_type="cuda" if device_type == "meta" else device_type)
    compute_args: ComputeArgs = dict(device_type=attachment.request.meshes.device_type)
    dtype = attachment.request.fsdp.param_dtype
    if dtype is not None:
        plan_dtypes: dict[str, torch.dtype] = {}
        for layout in (layout for unit in attachment.plan.units for layout in unit.layouts):
            gather_dtype = dtype if layout.recipe else getattr(torch, layout.gathers)
            plan_dtypes |= {slot.param: gather_dtype for slot in layout.slots}
        dtypes = {p: plan_dtypes[clean_name(name)] for name, p in model.named_parameters()}
        compute_args["get_compute_dtype"] = dtypes.__getitem__
    return compute_args


def describe_layer_saved_bytes(layer: RoutedLayer, compute_args: ComputeArgs) -> str:
    """Return text with the bytes per token that each part of an MoE layer saves for backward."""
    config, experts = layer.config, layer.get_part("experts")
    options = MemoryOptions(recompute=("expert_fc1",) if experts.recompute_fc1 else ())
    weight = next(experts.parameters())
    get_dtype = compute_args.get("get_compute_dtype")
    dtype = weight.dtype if get_dtype is None else get_dtype(weight)
    x_TD = torch.empty(TOKENS, config.dim, dtype=dtype, device="meta").requires_grad_()
    inputs = [x_TD]
    if not isinstance(layer, MoELayer):  # the model has its own router
        inputs += [x_TD.new_empty(TOKENS, config.top_k, dtype=torch.int64)]
        inputs += [x_TD.new_empty(TOKENS, config.top_k, dtype=torch.float32).requires_grad_()]
    compute_args = compute_args | {"options": options}
    (block,) = count_saved_bytes(layer, [layer], lambda copy: copy(*inputs), **compute_args).blocks
    sizes = ((part.replace("_", " "), n / TOKENS) for part, n in block.device.items())
    parts = ", ".join(f"{part} {format_bytes(size)}" for part, size in sizes)
    notes = "; FC1 is recomputed" if experts.recompute_fc1 else ""
    dispatcher = layer.dispatcher
    is_sent_twice = isinstance(dispatcher, NVLinkDispatcher) and not dispatcher.saves_rows
    notes += "; rows are sent once more in backward" if is_sent_twice else ""
    return f"{format_bytes(block.num_bytes / TOKENS)} per token and layer: {parts}{notes}"


def describe_block_saved_bytes(model: nn.Module, batch: Batch) -> list[str]:
    """Return the lines of a table: bytes per token that each block saves for backward."""
    tokens_BT = torch.zeros(batch, dtype=torch.int64, device="cpu")
    blocks, compute_args = find_blocks(model), list_compute_args(model)
    options, attachment = MemoryOptions(), get_parallel_state(model)
    if attachment is not None:
        options = attachment.request.memory
        if attachment.request.dense.compile:
            modules = (m for block in blocks for m in find_compiled_modules(block))
            compute_args["compiled_modules"] = frozenset(modules)
    inputs: dict[str, Any] = {}
    if isinstance(model, Decoder):
        inputs = dict(labels_BT=tokens_BT)  # multi-token prediction is part of the loss
    elif hasattr(model, "get_input_embeddings"):  # of transformers
        inputs = dict(use_cache=False, position_ids=torch.arange(batch[1], device="cpu")[None])
    numbers = list(range(len(blocks)))
    run: Callable[[Any], Any] = partial(_run_model, tokens_BT, inputs)
    if attachment is not None and attachment.stages:
        places = _number_layers(attachment.request.family.make_staged_model(model))
        numbers = [places.get(block, i) for i, block in enumerate(blocks)]
        run = partial(_run_stages, tokens_BT, attachment)
    counts, full_counts = (
        count_saved_bytes(model, blocks, run, options=memory, **compute_args).blocks
        for memory in (options, MemoryOptions())
    )
    rows: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for i, count, full_count in zip(numbers, counts, full_counts, strict=True):
        sums = {"all": count.num_bytes, "in host memory": sum(count.host.values())}
        sums["recomputed"] = full_count.num_bytes - sum(sums.values())
        key = tuple((name, n) for name, n in {**count.device, **sums}.items() if n)
        rows.setdefault(key, []).append(i)
    names = [name for name in COLUMNS if any(name in dict(row) for row in rows)]
    table = [("layers", *(name.replace("_", " ") for name in names))]
    for row, layers in rows.items():
        cells = {name: format_bytes(n / tokens_BT.numel()) for name, n in row}
        table.append((format_ranges(layers, " to "), *(cells.get(name, "-") for name in names)))
    total = f"all layers: {format_bytes(sum(count.num_bytes for count in counts))}"
    if host := sum(sum(count.host.values()) for count in counts):
        total += f", {format_bytes(host)} in host memory"
    title = f"saved for backward per token, of {batch[0]} x {batch[1]} tokens"
    return [title, *format_columns(table), total]


def _run_model(tokens_BT: Tensor, inputs: dict[str, Any], model: nn.Module) -> Any:
    """Return the output of a model without pipeline stages."""
    return model(tokens_BT, **inputs)


def _run_stages(tokens_BT: Tensor, attachment: ParallelState, model: nn.Module) -> list[Tensor]:
    """Return the outputs of this rank's pipeline stages, on tokens or empty hidden states."""
    staged, outputs = attachment.request.family.make_staged_model(model), list[Tensor]()
    names = ("tokens_BT", "labels_BT") if isinstance(model, Decoder) else ("input_ids", "labels")
    inputs = dict.fromkeys(names, tokens_BT)
    if not isinstance(model, Decoder):
        inputs["position_ids"] = torch.arange(tokens_BT.shape[1], device="cpu")[None]
    for stage in attachment.stages:
        if not stage.letters:
            continue
        hidden = None
        if not stage.embedding:
            dtype = attachment.request.fsdp.param_dtype or attachment.dtype
            shape = staged.hidden_shape(stage, inputs)
            hidden = torch.empty(shape, dtype=dtype, device="meta").requires_grad_()
        outputs.append(staged(hidden=hidden, stage=stage, **inputs))
    return outputs


def _number_layers(model: StagedModel) -> dict[nn.Module, int]:
    """Return layer -> index in the full model; multi-token prediction modules are the last."""
    parts, (num_layers, num_mtp) = model.stage_parts(), count_layers_and_mtp(model)
    names = [f"{parts.layers}.{i}" for i in range(num_layers)]
    names += [f"{parts.mtp}.{i}" for i in range(num_mtp)]
    return {model.get_submodule(name): i for i, name in enumerate(names)}
