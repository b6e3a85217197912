"""explain(model): who owns what, in about twenty lines.

Reads names, shapes and placements alone: no communication, no host sync, on meta too. What is kept
for backward is counted by a forward on meta (`memory/kept.py`).

    size and meshes
    kind, names, how many, global shape, shape on this rank, placement, bytes on this rank
    MoE layers, FSDP2 units, precision
    with a batch: what layers keep for backward, by part
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from moecore._fields import Count, check_arguments
from moecore.fsdp.shard import find_blocks, find_units, is_whole
from moecore.graphs.regions import compiled_modules
from moecore.kernels.experts.products import choose_products
from moecore.memory.kept import kept_bytes
from moecore.memory.options import OFFLOADED, MemoryOptions
from moecore.models import Decoder
from moecore.moe.dispatch.nvlink import NVLinkDispatcher
from moecore.moe.layer import MoELayer, RoutedLayer
from moecore.moe.params import clean_name
from moecore.moe.placement import ExpertPlacement
from moecore.precision.linear import Fp8Linear
from moecore.request import Request, request_of

MOST_ROWS = 4  # of one kind
MOST_NAMES = 3  # in one row
HEADER = ("kind", "parameters", "global shape", "on this rank", "placement", "bytes here")
COLUMNS = (*OFFLOADED[:-1], "routing", "rest", "all", "computed again", "in host memory")
TOKENS = 1024  # of which a layer's bytes per token are counted
Shape = tuple[int, ...]
Batch = Annotated[tuple[Count, Count], "pass (sequences, tokens of each)"]
DtypeOf = Callable[[Tensor], torch.dtype]


@dataclass(slots=True, eq=False)
class Row:
    """Parameters that are alike, of all layers.

    Attributes:
        kind: attention, router, experts and so on.
        shapes: global, and of this rank's part.
        placement: which mesh dims cut which dims.
        names: without their layers.
        number: of parameters.
        num_bytes: of this rank's parts.
    """

    kind: str
    shapes: tuple[Shape, Shape]
    placement: str
    names: list[str] = field(default_factory=list)
    number: int = 0
    num_bytes: int = 0

    def cells(self) -> tuple[str, ...]:
        """Return what stands under `HEADER`."""
        names = ", ".join(self.names[:MOST_NAMES]) + ", .." * (len(self.names) > MOST_NAMES)
        whole, local = ("x".join(map(str, shape)) or "1" for shape in self.shapes)
        count = f"{self.number} x " if self.number > 1 else ""
        return self.kind, names, count + whole, local, self.placement, _bytes(self.num_bytes)


@torch.no_grad()
def explain(model: nn.Module, *, batch: Batch | None = None) -> str:
    """Return who owns what: sizes, meshes, shapes, placements, dispatcher, products, precision.

    Each rank describes its own part and may do so alone: nothing communicates or waits.

        print(explain(model, batch=(2, 4096)))

    Args:
        model: plain or parallelized, on any device.
        batch: sequences of a rank's micro-batch, and tokens of each: the bytes that layers keep of
            it for backward are listed by part, before anything is allocated. Loads of experts are
            even, and a compiled region counts as if it were not. None = those of MoE layers alone,
            per token.

    Raises:
        ValueError: when `model` is no module, and for a batch that is not two numbers above 0.
    """
    check_arguments(explain, locals())
    request = request_of(model)
    layers = {clean_name(n): m for n, m in model.named_modules() if isinstance(m, RoutedLayer)}
    rows = list(_rows(model, layers))
    lines = [
        _size(model, layers, rows),
        *_meshes(model, request),
        *_table([HEADER, *(row.cells() for row in _folded(rows))]),
    ]
    dtype_of = _dtype_of(model, request)
    alike = Counter(_of_layer(layer, request, dtype_of) for layer in layers.values())
    for (what, how), n in alike.items():
        lines += [f"{n} MoE layer{'s' * (n > 1)} {what}", how]
    lines += [] if request is None else [_units(model, request)]
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
    active = f", {_count(total - idle)} active per token" if layers else ""
    here = _bytes(sum(row.num_bytes for row in rows))
    name = next(c.__name__ for c in type(model).__mro__ if not issubclass(c, FSDPModule))
    return f"{name}: {_count(total)} parameters{active}, {here} on this rank"


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


def _rows(model: nn.Module, layers: dict[str, RoutedLayer]) -> Iterator[Row]:
    """Yield parameters that are alike together, in the order of the model."""
    kind_of = _kinds(model, layers)
    found: dict[object, Row] = {}
    for name, param in model.named_parameters():
        *path, leaf = clean_name(name).split(".")
        kind = kind_of(path, leaf) + (" (frozen)" if not param.requires_grad else "")
        local = param.to_local() if isinstance(param, DTensor) else param
        shapes = tuple(param.shape), tuple(local.shape)
        placement = _placement(param)
        row = found.setdefault((kind, shapes, placement, param.dtype), Row(kind, shapes, placement))
        shown = path[-1] if leaf in ("weight", "bias") and path else leaf
        row.names += [shown] * (shown not in row.names)
        row.number += 1
        row.num_bytes += local.numel() * local.element_size()
    yield from found.values()


def _kinds(model: nn.Module, layers: dict[str, RoutedLayer]) -> Callable[[list[str], str], str]:
    """Return what tells the kind of a parameter: by its place in a MoE layer, or its module."""
    roles: dict[str, str] = {}
    for name, layer in layers.items():
        kinds = {"router": "router", "experts": "experts", "shared": "shared experts"}
        parts = {layer.name_of(r): kind for r, kind in kinds.items() if layer.part(r) is not None}
        if isinstance(layer, MoELayer):
            parts["latent"] = "latent"
            if layer.layout.shared_gate:
                parts[layer.layout.shared_gate] = "shared experts"
        roles |= {f"{name}.{part}".strip("."): kind for part, kind in parts.items()}
    modules = {clean_name(name): module for name, module in model.named_modules()}

    def kind_of(path: list[str], leaf: str) -> str:
        if any("lora_" in part for part in [*path, leaf]):
            return "LoRA"
        prefixes = [".".join(path[:n]) for n in range(len(path), -1, -1)]  # innermost first
        for prefix in prefixes:
            kind = roles.get(prefix) or _kind_of_module(modules.get(prefix), prefix)
            if kind is not None:
                return kind
        return "other"

    return kind_of


def _kind_of_module(module: nn.Module | None, name: str) -> str | None:
    """Return the kind of a module's parameters by its class, or None; a head may be a linear."""
    what = type(module).__name__.lower()
    if getattr(module, "is_fsdp_head", False) or name.endswith("lm_head"):
        return "head"
    words = {"norm": "norms", "embedding": "embeddings", "attention": "attention", "mlp": "MLP"}
    return next((kind for word, kind in words.items() if word in what), None)


def _placement(param: Tensor) -> str:
    """Return which mesh dims cut the parameter, and how; dims of one rank left out."""
    if not isinstance(param, DTensor):
        return "whole"
    found = []
    names = param.device_mesh.mesh_dim_names or ()
    for i, (name, placement) in enumerate(zip(names, param.placements, strict=True)):
        if param.device_mesh.size(i) > 1:
            dim = getattr(placement, "dim", None)
            found.append(f"{name}: dim {dim}" if dim is not None else f"{name}: replicated")
    return ", ".join(found) or "whole"


def _folded(rows: Iterable[Row]) -> list[Row]:
    """Return the rows, those of one kind together, and the smallest of many shapes as one."""
    of_kind: dict[str, list[Row]] = {}
    for row in rows:
        of_kind.setdefault(row.kind, []).append(row)
    found: list[Row] = []
    for kind, some in of_kind.items():
        most = MOST_ROWS if len(some) <= MOST_ROWS else MOST_ROWS - 1
        largest = sorted(some, key=lambda row: -row.num_bytes)[:most]
        found += [row for row in some if row in largest]
        if rest := [row for row in some if row not in largest]:
            whole, local = (sum(prod(r.shapes[i]) * r.number for r in rest) for i in range(2))
            num_bytes = sum(row.num_bytes for row in rest)
            names = [f"{len(rest)} more shapes"]
            found.append(Row(kind, ((whole,), (local,)), "", names, 1, num_bytes))
    return found


def _table(lines: list[tuple[str, ...]]) -> list[str]:
    """Return the cells in columns; the first line is their header."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = (
        [cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines
    )
    return ["  ".join(line).rstrip() for line in padded]


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
    parts = [f"{part.replace('_', ' ')} {_bytes(n / TOKENS)}" for part, n in kept.device.items()]
    again = "; FC1 runs again" if experts.recompute_fc1 else ""
    dispatcher = layer.dispatcher
    is_sent_again = isinstance(dispatcher, NVLinkDispatcher) and not dispatcher.keeps_rows
    again += "; rows are sent again" if is_sent_again else ""
    return f"{_bytes(kept.num_bytes / TOKENS)} per token and layer: {', '.join(parts)}{again}"


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
        cells = (_bytes(of[name] / tokens_BT.numel()) if name in of else "-" for name in names)
        table.append((_ranges(layers), *cells))
    here = sum(one.num_bytes for one in kept)
    host = sum(sum(one.host.values()) for one in kept)
    total = f"all layers: {_bytes(here)}" + (f", {_bytes(host)} in host memory" if host else "")
    return [
        f"kept for backward per token, of {batch[0]} x {batch[1]} tokens",
        *_table(table),
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


def _dtype_of(model: nn.Module, request: Request | None) -> DtypeOf:
    """Return what tells the dtype in which a parameter is computed with."""
    if request is None or request.fsdp.param_dtype is None:
        return lambda param: param.dtype
    dtype, units = request.fsdp.param_dtype, find_units(model, request.fsdp)
    own = {p for unit in units.routers for module in unit for p in module.parameters()}
    return lambda p: p.dtype if p in own or not p.is_floating_point() else dtype


def _device_type(module: nn.Module, request: Request | None) -> str:
    """Return where a module runs; of one on meta that no mesh knows, a GPU."""
    if request is not None:
        return request.meshes.device_type
    found = next((p.device.type for p in module.parameters()), "meta")
    return "cuda" if found == "meta" else found


def _units(model: nn.Module, request: Request) -> str:
    options, units = request.fsdp, find_units(model, request.fsdp)
    numbers = {
        "blocks": sum(group != [model] for group in units.groups),
        "experts": 0 if is_whole(request.meshes) else len(units.experts),
        "routers": len(units.routers),
        "heads": len(units.heads),
    }
    shown = ", ".join(f"{n} of {what}" for what, n in numbers.items() if n)
    freed = [
        name
        for name, is_freed in (
            ("blocks", options.reshard_after_forward),
            ("experts", options.reshards_experts and numbers["experts"]),
        )
        if is_freed
    ]
    after = f"{' and '.join(freed)} freed after forward" if freed else "all kept for backward"
    return f"FSDP2 units: {sum(numbers.values()) + 1}: {shown or 'none'}, the root; {after}"


def _precision(model: nn.Module, layers: dict[str, RoutedLayer], request: Request | None) -> str:
    recipes: Counter[str] = Counter()
    for layer in layers.values():
        if layer.part("experts").recipe is not None:
            recipes[f"experts, {layer.part('experts').recipe.describe()}"] += 1
    for module in model.modules():
        if isinstance(module, Fp8Linear):
            recipes[f"linears, {module.products.recipe.describe()}"] += 1
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


def _count(number: float) -> str:
    return next(
        (f"{number / size:.3g} {unit}" for unit, size in _SIZES if number >= size), f"{number:.0f}"
    )


def _bytes(number: float) -> str:
    units = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    found = (f"{number / size:.3g} {unit}" for unit, size in units if number >= size)
    return next(found, f"{number:.0f} B")


_SIZES = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3))
