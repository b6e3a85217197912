"""`ShardPlan`: how `parallelize_moe` shards a model, as names and numbers.

A plan contains no module, tensor, group, mesh or rank. It is equal on every rank, and the shards of
a rank follow from the plan and the rank's coordinate.

Names of modules and parameters are the first names in `named_modules()` and `named_parameters()`
after MoE blocks were replaced. The root's name is "". `moecore.parallel.mesh` defines the names of
mesh axes. Dtypes are strings such as "float32".
"""

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Literal

import torch

from moecore.base.options.fsdp import Strategy
from moecore.base.options.precision import FrozenFormat, Recipe, Role
from moecore.kernels.rows.four_bit import FORMATS
from moecore.parallel.mesh import DENSE_DIMS, EXPERT_DIMS, ParallelConfig

# Shards begin at multiples of 128 elements: one L2 line (128 bytes) in a dtype of one byte. Kernels
# and NCCL can then move 16 bytes at a time, TMA and grouped products are aligned, and parameters
# never share a line. Offsets in the unsharded buffer are multiples of shard offsets.
ALIGNMENT = 128
E2M1_PAIRS = "float4_e2m1fn_x2"  # torch's dtype with two values in a byte
View = Literal["dense", "expert"]
UnitRole = Literal["root", "block", "routers", "experts", "head"]
Coordinate = Mapping[str, int]  # a rank's index by mesh axis; a missing axis counts as 0
# Mesh axes whose ranks have gradients of different tokens for the same weights.
DATA_AXES = ("dp_replicate", "dp_shard", "dp_shard_cp", "edp_replicate", "edp_shard")


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisPlacement:
    """The placement of a parameter over one mesh axis: sharded along a dim, or replicated."""

    axis: str
    size: int
    dim: int | None  # dim that is sharded into `size` chunks; None = replicated
    # Equal parts of the dim (gate and up of one expert); each rank has a chunk of each.
    pieces: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamPlan:
    """The plan of one parameter: its placements over mesh axes, which define its shards."""

    name: str
    kind: str  # "attention", "norms", "experts" and so on, as `explain` lists it
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    trainable: bool
    mesh: View  # the mesh over which the parameter is placed
    # One placement per axis of the DTensor's mesh. ep, etp and tp come last, and shard first and
    # evenly. The placement over data ranks shards the result as FSDP2 does: ceil(rows / ranks)
    # rows per rank, and the remaining rows on the last ranks.
    placements: tuple[AxisPlacement, ...]
    frozen: FrozenFormat | None = None  # the 4-bit format in which the parameter is stored
    summed_dim: int = -1  # that matmuls sum, along which values in 4 bits share scales
    on_host: bool = False  # whether the shard, or its 4-bit blocks, are in host memory

    @property
    def numel(self) -> int:
        """Elements of the unsharded parameter."""
        return math.prod(self.shape)

    def local_shape(self, coordinate: Coordinate | None = None) -> tuple[int, ...]:
        """Return the shape of a rank's shard; `coordinate` = {axis: index}, None = rank 0."""
        return _compute_local_shape(self.shape, self.placements, coordinate or {})

    def num_bytes(self, coordinate: Coordinate | None = None) -> int:
        """Return the bytes of a rank's shard; `coordinate` = {axis: index}, None = rank 0."""
        shape = self.local_shape(coordinate)
        if self.frozen is None:
            return math.prod(shape) * self.itemsize
        return FORMATS[self.frozen].count_bytes(shape, self.summed_dim)


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatSlot:
    """Offsets and sizes of a parameter in its unit's flat buffers, in elements."""

    param: str
    dim: int  # dim that is sharded over data ranks
    rows: int  # size of that dim in each padded shard: ceil(size / ranks), as in FSDP2
    shard_offset: int  # offset of the padded shard in the flat shard
    shard_numel: int  # elements of the padded shard
    unsharded_offset: int  # offset of the concatenated padded shards in the unsharded buffer
    numel: int  # elements without padding


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatLayout:
    """Offsets of a unit's parameters in the flat shard and in the flat unsharded buffer.

        flat shard        | a: padded shard |..| b: padded shard |..|      .. = alignment
        flat unsharded    | a: rank 0 | a: rank 1 |..| b: rank 0 | b: rank 1 |..|

    Shards are as in FSDP2: rank r has indices r * n to (r + 1) * n of dim 0, n = ceil(size /
    ranks). The padded shards of a parameter are contiguous in the unsharded buffer. The unsharded
    parameter is a view of these shards, or a copy if it is sharded along another dim.

    Example, 4 ranks, a [600, 2] and b [3]: a shard of a is [150, 2], 300 elements; a shard of b is
    [1], 1 element. Shard offsets are 0 and 384, unsharded offsets 0 and 1536. The flat shard has
    512 elements, the unsharded buffer 2048.
    """

    dtype: str  # dtype of the sharded parameters
    gathers: str  # dtype of the all-gather
    reduces: str  # dtype of the reduction of gradients
    recipe: Recipe | None  # recipe that quantises for the all-gather; None = a cast
    ranks: int  # number of ranks over which the unit is sharded
    slots: tuple[FlatSlot, ...]  # one slot per parameter, in the unit's order
    shard_numel: int  # elements of a rank's flat shard
    unsharded_numel: int  # elements of the unsharded buffer: ranks * shard_numel
    on_host: bool = False  # whether the sharded parameters are in host memory

    @property
    def has_buffer(self) -> bool:
        """Whether unsharding needs a buffer: parameters are sharded, cast, or in host memory."""
        return bool(self.slots) and (self.on_host or self.ranks > 1 or self.gathers != self.dtype)

    @property
    def values_per_byte(self) -> int:
        """Number of values in one element of the all-gathered dtype: 2 for E2M1, otherwise 1."""
        return 2 if self.gathers == E2M1_PAIRS else 1

    @property
    def buffer_numel(self) -> int:
        """Elements of the unsharded buffer, and of copies of parameters sharded along a dim > 0."""
        copies = sum(slot.numel for slot in self.slots if slot.dim > 0 and self.ranks > 1)
        return self.unsharded_numel + copies


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitPlan:
    """The plan of a unit: parameters that are all-gathered and reduced together."""

    name: str  # name of the unit's first module; "" = the root
    role: UnitRole
    mesh: View  # the mesh over whose data ranks the unit is sharded
    modules: tuple[str, ...]  # names of the modules whose forward uses the unit
    # Names in the order of the model. Each parameter is in exactly one unit.
    params: tuple[str, ...]
    # Dtype of compute, and of the all-gather without FP8; None = the dtype of each parameter.
    gather_dtype: str | None
    divisor: float  # number that divides the sum of gradients: data ranks, or 1 with loss "sum"
    casts_inputs: bool  # whether floating point inputs of the modules are cast to `gather_dtype`
    strategy: Strategy  # which of parameters, gradients and states are sharded, see `FSDPOptions`
    # Units that the unit prefetches in forward, in order; () = none, or with
    # `FSDPOptions.prefetch_blocks` 0 the engine's own order.
    forward_prefetch: tuple[str, ...]
    # Units that the unit prefetches in backward. For a head that is not the last unit, () means the
    # units that ran before it in forward.
    backward_prefetch: tuple[str, ...]
    # Layouts of the flat buffers, one for each dtype of the parameters, all-gathers and sums of
    # gradients.
    layouts: tuple[FlatLayout, ...]

    @property
    def is_resident(self) -> bool:
        """Whether the unit is resident: unsharded from forward to backward."""
        return self.strategy != "optim_grads_params"

    @property
    def accumulates(self) -> bool:
        """Whether gradients are reduced once per step, after its last micro-batch."""
        return self.strategy in ("no_shard", "optim")


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitOptions:
    """Name, dtypes, gradient divisor and strategy of an FSDP unit (a parameter group)."""

    name: str
    reduce_dtype: torch.dtype  # dtype in which gradients are summed
    divisor: float  # divisor of the sum of gradients
    cast_inputs: torch.dtype | None  # dtype for the modules' floating inputs; None = no cast
    is_resident: bool  # whether the unit stays unsharded from forward to backward
    accumulates: bool  # whether the gradients of a step's micro-batches have one reduction


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPlan:
    """Numbers of experts, hidden dim and precision of one MoE layer."""

    name: str
    experts: str  # name of its experts, and of their unit
    num_experts: int  # E
    zero_experts: int  # Z, experts that return their input
    top_k: int  # experts per token
    num_local: int  # experts of a rank, E / ep; ep rank i has experts from i * num_local on
    hidden_dim: int  # F; a rank computes F / etp
    # Precision of "experts" and, if the layer owns them, of "shared_experts"; None = the dtype of
    # their weights.
    recipes: tuple[tuple[Role, Recipe | None], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPlan:
    """The plan by which `parallelize_moe` shards a model; equal on every rank.

    Attributes:
        model: name of the model's class.
        device_type: device type of the meshes.
        parallel: the degrees of both meshes, without -1.
        layers: the MoE layers, in the order of the model.
        linears: (name, recipe) of each linear that computes in FP8.
        params: all parameters, in the order of the model.
        units: all units, in the order of their first use in forward; the root is first.
        blocks: names of the modules, such as decoder layers, that are checkpointed, offloaded and
            compiled separately.
        dispatcher: name of the dispatcher; "auto" = chosen when the plan is applied, because the
            choice depends on peer access between the GPUs.
        dispatcher_reason: why this dispatcher was chosen.
        parallel_reason: why moecore chose these degrees; None = the caller chose them.
        nccl_ub: whether the buffers of collectives are registered with NCCL.
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
    parallel_reason: str | None = None
    nccl_ub: bool = False

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(getattr(self.parallel, dim) for dim in DENSE_DIMS)

    @property
    def is_in_fp8(self) -> bool:
        """Whether any matrix product, of experts or linears, is in FP8."""
        recipes = [recipe for layer in self.layers for _, recipe in layer.recipes]
        return bool(self.linears) or any(recipe is not None for recipe in recipes)

    def param(self, name: str) -> ParamPlan:
        """Return the plan of the parameter `name`; raise a ValueError for an unknown name."""
        for param in self.params:
            if param.name == name:
                return param
        raise ValueError(
            f"name ({name!r}) must be a parameter's: take it from named_parameters() of the model"
        )

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return {axis: index} of a global rank for the axes of both meshes and "dp_shard_cp".

        Raises:
            ValueError: if the rank is not in the world.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(
                f"rank ({rank}) must be >= 0 and < the plan's world size ({self.world_size})"
            )
        p, coordinates = self.parallel, dict[str, int]()
        for dims in (DENSE_DIMS, EXPERT_DIMS):
            rest = rank
            for dim in reversed(dims):
                rest, coordinates[dim] = divmod(rest, getattr(p, dim))
        coordinates["dp_shard_cp"] = coordinates["dp_shard"] * p.cp + coordinates["cp"]
        return coordinates


def _compute_local_shape(
    unsharded_shape: Sequence[int], placements: Sequence[AxisPlacement], coordinate: Coordinate
) -> tuple[int, ...]:
    """Return the shape of a rank's shard after all placements; `coordinate` = {axis: index}."""
    local_shape = list(unsharded_shape)
    for axis in reversed(placements):
        if axis.dim is not None:
            rows = -(-local_shape[axis.dim] // axis.size)
            after = local_shape[axis.dim] - coordinate.get(axis.axis, 0) * rows
            local_shape[axis.dim] = min(rows, max(0, after))
    return tuple(local_shape)


def make_flat_layouts(
    params: Iterable[ParamPlan],
    *,
    num_ranks: int,
    gather_dtype: str | None = None,
    reduce_dtype: str = "float32",
    recipes: Mapping[str, Recipe] | None = None,
    fp32_names: Set[str] = frozenset(),
    on_host: bool = False,
) -> tuple[FlatLayout, ...]:
    """Group a unit's parameters by dtypes and recipe; return a flat buffer layout for each group.

    `gather_dtype` None = the dtype of each parameter. `recipes`: parameter name -> recipe of its
    FP8 all-gather. Parameters in `fp32_names` are all-gathered in their dtype and reduced in fp32.
    Gradients of parameters that are all-gathered in fp64 are reduced in fp64.
    """
    groups: dict[tuple[str, str, str, Recipe | None, int], list[ParamPlan]] = {}
    for param in params:
        recipe, gathers = (recipes or {}).get(param.name), param.dtype
        reduces = "float32" if param.name in fp32_names else reduce_dtype
        if recipe is not None:
            gathers = E2M1_PAIRS if recipe.scaling == "nvfp4" else "float8_e4m3fn"
        elif gather_dtype is not None and param.name not in fp32_names:
            gathers = gather_dtype if getattr(torch, param.dtype).is_floating_point else param.dtype
        ranks = num_ranks if param.frozen is None else 1  # 4-bit weights are not all-gathered
        gathers = gathers if param.frozen is None else param.dtype
        reduces = gathers if gathers == "float64" else reduces
        groups.setdefault((param.dtype, gathers, reduces, recipe, ranks), []).append(param)
    layouts = (make_flat_layout(*key[:-1], params, key[-1]) for key, params in groups.items())
    return tuple(replace(layout, on_host=on_host) for layout in layouts)


def make_flat_layout(
    dtype: str,
    gather_dtype: str,
    reduce_dtype: str,
    recipe: Recipe | None,
    params: Iterable[ParamPlan],
    num_ranks: int,
) -> FlatLayout:
    """Return the `FlatLayout` of parameters with equal dtypes and recipe, in their order."""
    slots, offset = [], 0
    for param in params:
        of_data = [p for p in param.placements if p.axis in DATA_AXES]
        dim = next((p.dim for p in of_data if p.dim is not None), 0)
        # The shape with which a rank computes, after the all-gather over data ranks.
        inner = [p for p in param.placements if p.axis not in DATA_AXES]
        shape = list(_compute_local_shape(param.shape, inner, {}))
        unsharded_numel, shape[dim] = math.prod(shape), -(-shape[dim] // num_ranks)
        numel = math.prod(shape)
        slots.append(
            FlatSlot(
                param=param.name,
                dim=dim,
                rows=shape[dim],
                shard_offset=offset,
                shard_numel=numel,
                unsharded_offset=offset * num_ranks,
                numel=unsharded_numel,
            )
        )
        offset += -(-numel // ALIGNMENT) * ALIGNMENT
    return FlatLayout(
        dtype=dtype,
        gathers=gather_dtype,
        reduces=reduce_dtype,
        recipe=recipe,
        ranks=num_ranks,
        slots=tuple(slots),
        shard_numel=offset,
        unsharded_numel=offset * num_ranks,
    )
