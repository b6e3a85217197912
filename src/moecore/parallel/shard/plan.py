"""ShardPlan: what `parallelize_moe` does to a model, as names and numbers.

    plan = plan_sharding(model, meshes, fsdp=FSDPOptions(...))
    plan.unit_of("model.layers.3.mlp.experts.w1").divisor
    json.dumps(dataclasses.asdict(plan))

A plan has no module, tensor, group or mesh, and no rank: it is equal on every rank, so ranks can
compare it. What a rank holds is a function of the plan and the rank's coordinate.

Note "names": modules and parameters have the names of `named_modules()` and `named_parameters()`
of the model with its MoE blocks swapped, the first of several. The root's is "". Mesh dims have
theirs of `moecore.parallel.mesh`. Dtypes are "float32", "bfloat16" and so on.

Note "flat buffers": where each parameter of a unit lies in the shard of a rank, and in the whole.

    flat shard      | a: padded shard |..| b: padded shard |..|        .. alignment
    flat whole      | a: rank 0 | a: rank 1 |..| b: rank 0 | b: rank 1 |..|

Parameters are cut as FSDP2 cuts them, so that checkpoints and DTensors do not see which engine
gathers: rank r has rows r * n to (r + 1) * n of dim 0, n = ceil(rows / ranks), and the last ranks
what is left. An all-gather that has one entry per parameter puts each whole one in place: it is a
view of the flat whole, with its padding behind it. One that is cut along another dim (few experts
among many ranks) is not: its ranks' parts must be moved side by side.

Shards begin at multiples of 128 elements, a line of a GPU's L2 (128 bytes) in a dtype of one byte,
and so of whole lines in any dtype in which a unit is stored, gathered or reduced: offsets depend on
no dtype. Kernels and NCCL then move 16 bytes at a time, TMA and grouped products find the alignment
that they ask for, and no two parameters share a line that two kernels write. Offsets in the whole
are a multiple of those, and as well aligned. It costs at most 127 elements of a parameter's shard.

Example, 4 ranks, a [600, 2] and b [3]: a has 150 rows and 300 elements per shard, b 1 and 1. Shard
offsets 0 and 384, whole offsets 0 and 1536, 512 elements of a shard, 2048 of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch

from moecore.base.options.fsdp import Strategy
from moecore.base.options.precision import Recipe, Role
from moecore.parallel.mesh import DENSE_DIMS, EXPERT_DIMS, ParallelConfig

ALIGNMENT = 128  # elements: note "flat buffers"
T = TypeVar("T")
View = Literal["dense", "expert"]
UnitRole = Literal["root", "block", "routers", "experts", "head"]
Coordinate = Mapping[str, int]  # of a rank, by mesh dim; a dim that is left out counts as 0
# Mesh dims whose ranks bring gradients of different tokens to the same weights.
DATA_AXES = ("dp_replicate", "dp_shard", "dp_shard_cp", "edp_replicate", "edp_shard")


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisPlacement:
    """What one mesh dim does to a parameter.

    Attributes:
        axis: the mesh dim.
        size: its ranks.
        dim: of the parameter, which is cut into `size` chunks; None = replicated.
        pieces: equal parts of the dim (gate and up of one expert) of which each rank keeps a chunk.
    """

    axis: str
    size: int
    dim: int | None
    pieces: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamPlan:
    """One parameter and who holds which part of it.

    Attributes:
        name: global.
        kind: "attention", "norms", "experts" and so on, as `explain` lists it.
        shape: global.
        dtype: in which it is stored.
        itemsize: bytes of one element of that dtype.
        trainable: whether it has a gradient.
        mesh: on which view it lives.
        placements: one per axis of its DTensor's mesh. The last ones cut first: ep, etp and tp,
            evenly; the one over data ranks cuts what they leave, as FSDP2 does: ceil(rows / ranks)
            for each rank, and for the last ones what is left.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    trainable: bool
    mesh: View
    placements: tuple[AxisPlacement, ...]

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def data_placement(self) -> AxisPlacement | None:
        """The placement that data ranks cut; None where each has all of it."""
        found = (p for p in self.placements if p.axis in DATA_AXES and p.dim is not None)
        return next(found, None)

    @property
    def is_reduced(self) -> bool:
        """Whether its gradient is summed over ranks; not of experts that one rank alone has."""
        return any(p.axis in DATA_AXES and p.size > 1 for p in self.placements)

    def local_shape(self, coordinate: Coordinate | None = None) -> tuple[int, ...]:
        """Return the shape of a rank's part; by default of the first rank's, which is the largest.

        Args:
            coordinate: of the rank, see `ShardPlan.coordinate`.
        """
        return _local_shape(self.shape, self.placements, coordinate or {})

    def computed_shape(self) -> tuple[int, ...]:
        """Return the shape with which a rank computes: all-gathered over data ranks."""
        inner = [p for p in self.placements if p.axis not in DATA_AXES]
        return _local_shape(self.shape, inner, {})

    def num_bytes(self, coordinate: Coordinate | None = None) -> int:
        """Return the bytes of a rank's part, as `local_shape`."""
        return math.prod(self.local_shape(coordinate)) * self.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatSlot:
    """The place of a parameter in a unit's flat buffers. Offsets and sizes are in elements.

    Attributes:
        param: its name.
        dim: over which data ranks cut it.
        rows: of that dim in each shard, padded: ceil(rows / ranks), as FSDP2 cuts.
        shard_offset: of its padded shard in the flat shard.
        shard_numel: of its padded shard.
        whole_offset: of all its padded shards, one after the other, in the flat unsharded buffer.
        numel: of the whole parameter.
    """

    param: str
    dim: int
    rows: int
    shard_offset: int
    shard_numel: int
    whole_offset: int
    numel: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatLayout:
    """How a unit's parameters of one kind lie in flat buffers; see the note "flat buffers".

    Attributes:
        dtype: in which they are stored.
        gathers: in which they are gathered.
        recipe: by which they are quantised for that; None = they are cast.
        ranks: over which the unit is sharded.
        slots: one per parameter, in the unit's order.
        shard_numel: elements of the flat shard of a rank.
        whole_numel: elements of the flat unsharded buffer, ranks * shard_numel.
    """

    dtype: str
    gathers: str
    recipe: Recipe | None
    ranks: int
    slots: tuple[FlatSlot, ...]
    shard_numel: int
    whole_numel: int

    @property
    def has_buffer(self) -> bool:
        """Whether whole parameters are not a rank's shards themselves."""
        return bool(self.slots) and (self.ranks > 1 or self.gathers != self.dtype)

    @property
    def buffer_numel(self) -> int:
        """Elements of its buffer: whole parameters that are cut along a dim > 0 lie behind all."""
        beside = sum(slot.numel for slot in self.slots if slot.dim > 0 and self.ranks > 1)
        return self.whole_numel + beside


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitPlan:
    """Parameters that are all-gathered and reduced together.

    Attributes:
        name: of its first module; "" = the root.
        role: what it is.
        mesh: the view over whose data ranks it is sharded.
        modules: the modules whose forward gathers it.
        params: names, in the order of the model. Each parameter is in exactly one unit.
        gather_dtype: in which it is computed with, and gathered but for layouts in FP8; None = each
            parameter's own.
        reduce_dtype: in which gradients are summed over ranks.
        divisor: of the sum: see the note "gradient scale" in `parallel/shard/apply.py`.
        casts_inputs: whether floating point inputs of its forward are cast to `gather_dtype`.
        strategy: what is sharded, see `FSDPOptions`.
        forward_prefetch: units that are gathered when it is used in forward, in order; () = none,
            or with `FSDPOptions.prefetch_blocks` 0 the engine's own order.
        backward_prefetch: the same for backward. Of a head that is not the last unit () stands for
            what ran before it in forward.
        layouts: of its flat buffers, one for each dtype of its parameters: several only where some
            are frozen, whole experts, gathered in FP8, or stay fp32.
    """

    name: str
    role: UnitRole
    mesh: View
    modules: tuple[str, ...]
    params: tuple[str, ...]
    gather_dtype: str | None
    reduce_dtype: str
    divisor: float
    casts_inputs: bool
    strategy: Strategy
    forward_prefetch: tuple[str, ...]
    backward_prefetch: tuple[str, ...]
    layouts: tuple[FlatLayout, ...]

    @property
    def stays(self) -> bool:
        """Whether its parameters stay whole from forward to backward."""
        return self.strategy != "optim_grads_params"

    @property
    def accumulates(self) -> bool:
        """Whether its gradients are reduced by the last micro-batch of a step."""
        return self.strategy in ("no_shard", "optim")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPlan:
    """One MoE layer.

    Attributes:
        name: of the module.
        experts: name of its experts, which is their unit's.
        num_experts: E.
        top_k: experts of a token.
        num_local: experts of a rank, E / ep: those of ep rank i begin at i * num_local.
        hidden_dim: F, of which a rank computes F / etp.
        recipes: precision of "experts" and, where the layer owns them, "shared_experts"; None =
            that of their weights.
    """

    name: str
    experts: str
    num_experts: int
    top_k: int
    num_local: int
    hidden_dim: int
    recipes: tuple[tuple[Role, Recipe | None], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPlan:
    """What `parallelize_moe` does, as plain data; see the module's docstring.

    Attributes:
        model: name of the class.
        device_type: of the meshes.
        parallel: the degrees of both views, resolved.
        layers: the MoE layers, in the order of the model.
        linears: those in FP8 by name, without what wrappers add to it, and their recipes.
        params: all parameters, in the order of the model.
        units: in the order of their first use in forward; the root is the first.
        blocks: modules that `MemoryOptions` and torch.compile take one by one.
        dispatcher: how tokens travel; "auto" where only the GPUs can tell whether nvlink works,
            which applying the plan finds out.
        dispatcher_reason: why that one.
    """

    model: str
    device_type: str
    parallel: ParallelConfig
    layers: tuple[LayerPlan, ...]
    linears: tuple[tuple[str, Recipe], ...]
    params: tuple[ParamPlan, ...]
    units: tuple[UnitPlan, ...]
    blocks: tuple[str, ...]
    dispatcher: str
    dispatcher_reason: str

    @property
    def world_size(self) -> int:
        """Ranks of the world."""
        return math.prod(getattr(self.parallel, dim) for dim in DENSE_DIMS)

    @property
    def is_in_fp8(self) -> bool:
        """Whether any products are."""
        recipes = [recipe for layer in self.layers for _, recipe in layer.recipes]
        return bool(self.linears) or any(recipe is not None for recipe in recipes)

    def param(self, name: str) -> ParamPlan:
        """Return a parameter's plan; raises ValueError for a name that no parameter has."""
        return _only((param for param in self.params if param.name == name), name)

    def unit_of(self, param: str) -> UnitPlan:
        """Return the unit of a parameter, by name; raises ValueError as `param`."""
        return _only((unit for unit in self.units if param in unit.params), param)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return where a rank stands on each dim of both views and of their data meshes.

        Raises:
            ValueError: for a rank that the world does not have.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(
                f"rank ({rank}) must be >= 0 and < the plan's world size ({self.world_size})"
            )
        p, found = self.parallel, dict[str, int]()
        for dims in (DENSE_DIMS, EXPERT_DIMS):
            rest = rank
            for dim in reversed(dims):
                rest, found[dim] = divmod(rest, getattr(p, dim))
        found["dp_shard_cp"] = found["dp_shard"] * p.cp + found["cp"]
        return found


def _only(found: Iterator[T], param: str) -> T:
    """Return the first of what was found for a parameter."""
    first = next(found, None)
    if first is None:
        raise ValueError(
            f"name ({param!r}) must be a parameter's: take it from named_parameters() of the model"
        )
    return first


def _local_shape(
    shape: Sequence[int], placements: Sequence[AxisPlacement], coordinate: Coordinate
) -> tuple[int, ...]:
    left = list(shape)
    for axis in reversed(placements):
        if axis.dim is not None:
            rows = -(-left[axis.dim] // axis.size)
            after = left[axis.dim] - coordinate.get(axis.axis, 0) * rows
            left[axis.dim] = min(rows, max(0, after))
    return tuple(left)


def flat_layouts(
    params: Iterable[ParamPlan],
    *,
    ranks: int,
    gather_dtype: str | None = None,
    recipes: Mapping[str, Recipe] | None = None,
    fp32: Set[str] = frozenset(),
) -> tuple[FlatLayout, ...]:
    """Return where the parameters of a unit lie: a layout for those that are gathered alike.

    Args:
        gather_dtype: of floating ones; None = that in which they are stored.
        recipes: of those that are gathered in FP8, by name.
        fp32: names of those that are gathered as they are stored, whatever `gather_dtype`.
    """
    alike: dict[tuple[str, str, Recipe | None], list[ParamPlan]] = {}
    for param in params:
        recipe, gathers = (recipes or {}).get(param.name), param.dtype
        if recipe is not None:
            gathers = "float8_e4m3fn"
        elif gather_dtype is not None and param.name not in fp32:
            is_float = getattr(torch, param.dtype).is_floating_point
            gathers = gather_dtype if is_float else param.dtype
        alike.setdefault((param.dtype, gathers, recipe), []).append(param)
    return tuple(_flat_layout(*how, params, ranks) for how, params in alike.items())


def _flat_layout(
    dtype: str, gathers: str, recipe: Recipe | None, params: Iterable[ParamPlan], ranks: int
) -> FlatLayout:
    slots, offset = [], 0
    for param in params:
        dim, shape = 0, list(param.computed_shape())
        if param.data_placement is not None and param.data_placement.dim is not None:
            dim = param.data_placement.dim
        whole, shape[dim] = math.prod(shape), -(-shape[dim] // ranks)
        numel = math.prod(shape)
        slots.append(
            FlatSlot(
                param=param.name,
                dim=dim,
                rows=shape[dim],
                shard_offset=offset,
                shard_numel=numel,
                whole_offset=offset * ranks,
                numel=whole,
            )
        )
        offset += -(-numel // ALIGNMENT) * ALIGNMENT
    return FlatLayout(
        dtype=dtype,
        gathers=gathers,
        recipe=recipe,
        ranks=ranks,
        slots=tuple(slots),
        shard_numel=offset,
        whole_numel=offset * ranks,
    )
