"""explain(model): who owns what, in about twenty lines.

Reads names, shapes and placements alone: no communication, no host sync, on meta too.

    size and meshes
    kind, names, how many, global shape, shape on this rank, placement, bytes on this rank
    MoE layers, FSDP2 units, precision, what is kept for backward
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from moecore._fields import check_arguments
from moecore.fsdp.shard import find_units, is_whole
from moecore.kernels.experts.products import choose_products
from moecore.moe.layer import MoELayer, RoutedLayer
from moecore.moe.params import clean_name
from moecore.moe.placement import ExpertPlacement
from moecore.precision.linear import Fp8Linear
from moecore.request import Request, request_of

MOST_ROWS = 4  # of one kind
MOST_NAMES = 3  # in one row
HEADER = ("kind", "parameters", "global shape", "on this rank", "placement", "bytes here")
Shape = tuple[int, ...]


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
def explain(model: nn.Module) -> str:
    """Return who owns what: sizes, meshes, shapes, placements, dispatcher, products, precision.

    Each rank describes its own part and may do so alone: nothing communicates or waits.

        print(explain(model))

    Args:
        model: plain or parallelized, on any device.

    Raises:
        ValueError: when `model` is no module.
    """
    check_arguments(explain, locals())
    request = request_of(model)
    layers = {clean_name(n): m for n, m in model.named_modules() if isinstance(m, RoutedLayer)}
    rows = list(_rows(model, layers))
    lines = [_size(model, layers, rows), *_meshes(model, request), *_table(_folded(rows))]
    alike = Counter(_of_layer(layer, request) for layer in layers.values())
    for (what, how), n in alike.items():
        lines += [f"{n} MoE layer{'s' * (n > 1)} {what}", how]
    lines += [] if request is None else [_units(model, request)]
    return "\n".join([*lines, f"precision: {_precision(model, layers, request)}"])


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
        return repr(request.meshes).splitlines()
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


def _table(rows: list[Row]) -> list[str]:
    lines = [HEADER, *(row.cells() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = (
        [cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines
    )
    return ["  ".join(line).rstrip() for line in padded]


def _of_layer(layer: RoutedLayer, request: Request | None) -> tuple[str, str]:
    """Return what a layer is and who owns its experts; how they are multiplied."""
    config, experts = layer.config, layer.part("experts")
    dispatcher = type(layer.dispatcher).__name__.removesuffix("Dispatcher").lower()
    place = getattr(layer.dispatcher, "placement", None)
    own, etp = f"all {config.num_experts}", 1
    if isinstance(place, ExpertPlacement):
        first, etp = place.first_local, place.etp
        own = f"{first} to {first + place.num_local - 1}" + (f", 1/{etp} of each" * (etp > 1))
        dispatcher += f" among {place.group.size()} ranks"
    dtype = next(experts.parameters()).dtype
    device = next(experts.parameters()).device
    if request is not None:
        dtype, device = request.fsdp.param_dtype or dtype, torch.device(request.meshes.device_type)
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
    nvlink = request.nvlink if request is not None and dispatcher.startswith("nvlink") else None
    rows = "rows X" if nvlink is None or nvlink.keep_rows else "no rows, which are sent again,"
    what = f"of {config.num_experts} experts, top {config.top_k}; this rank has {own}"
    how = f"expert_backend {backend}; backward keeps {_kept(layer, dtype, rows)}"
    return f"{what}; dispatcher {dispatcher}", how


def _kept(layer: RoutedLayer, dtype: torch.dtype, rows: str) -> str:
    """Return what the experts keep of a forward for their backward."""
    config, experts = layer.config, layer.part("experts")
    if experts.backend == "sequential" or experts.has_more:
        return "what autograd does"
    if experts.recompute_fc1:
        return f"{rows} and runs FC1 again"
    columns = config.top_k * config.hidden_dim * (2 if config.gated else 1)
    itemsize = 1 if experts.recipe and experts.recipe.keep_hidden == "fp8" else dtype.itemsize
    return f"{rows} and FC1's output H, {_bytes(columns * itemsize)} per token and layer"


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


def _bytes(number: int) -> str:
    units = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    found = (f"{number / size:.3g} {unit}" for unit, size in units if number >= size)
    return next(found, f"{number} B")


_SIZES = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3))
