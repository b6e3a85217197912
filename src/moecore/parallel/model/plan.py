"""`make_shard_plan`: derives a `ShardPlan` from a model and a `Request`. No communication.

The plan is read from a copy of the model on the meta device. The code that shards the model over
tp, ep and etp also shards the copy, so no placement rule exists twice. The model does not change.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from moecore.base.copies import copy_modules, make_meta_parameter
from moecore.base.options.fsdp import Strategy
from moecore.base.options.precision import Recipe, Role
from moecore.base.params import clean_name
from moecore.moe.experts import Experts
from moecore.moe.layer import RoutedLayer
from moecore.moe.shared_experts import SharedExpert
from moecore.parallel.fsdp.plan import (
    AxisPlacement,
    LayerPlan,
    ParamPlan,
    ShardPlan,
    UnitPlan,
    UnitRole,
    View,
    make_flat_layouts,
)
from moecore.parallel.fsdp.units import (
    Prefetch,
    find_units,
    make_kind_lookup,
    plan_backward_prefetch,
    plan_forward_prefetch,
)
from moecore.parallel.mesh import Meshes
from moecore.parallel.model.phases import choose_dispatcher
from moecore.parallel.model.request import Request, is_tp_sharded
from moecore.precision.apply import LinearPrecision, check_precision, list_storable_linears

Layers = Mapping[str, RoutedLayer]


def make_shard_plan(
    model: nn.Module, layers: Layers, request: Request, fp32_names: Set[str]
) -> ShardPlan:
    """Return the plan to shard a model with these MoE layers by name; `model` is not changed."""
    copies = copy_modules(model, make_meta_parameter)
    twin = copies[model]
    twins = {n: cast(RoutedLayer, copies[m]) for n, m in layers.items()}
    shard_over_ep_and_tp(twin, twins, request)
    recipes: Mapping[str, LinearPrecision] = {}
    if request.precision is not None:
        is_stage = request.meshes.parallel.pp > 1
        recipes = check_precision(twin, request.precision, is_stage=is_stage)
    linears = {name: linear.recipe for name, linear in recipes.items() if linear.recipe}
    gather_recipes = find_gather_recipes(twin, twins, linears, request)
    builder = _PlanBuilder(twin, twins, request, gather_recipes, fp32_names)
    dispatcher, reason = choose_dispatcher(request)
    ep, find_recipes = request.meshes.parallel.ep, request.find_recipes
    return ShardPlan(
        model=type(model).__name__,
        device_type=request.meshes.device_type,
        parallel=request.meshes.parallel,
        layers=tuple(make_layer_plan(n, m, find_recipes(n, m), ep) for n, m in layers.items()),
        linears=tuple(linears.items()),
        params=tuple(builder.params.values()),
        units=tuple(builder.plan_units()),
        blocks=tuple(builder.names[block] for block in builder.model_units.blocks),
        dispatcher=dispatcher,
        dispatcher_reason=reason,
        parallel_reason=request.meshes.reason,
        nccl_ub=request.fsdp.nccl_ub,
    )


def shard_over_ep_and_tp(model: nn.Module, layers: Layers, request: Request) -> None:
    """Shard a model over tp, ep and etp, in place. No communication."""
    meshes, p = request.meshes, request.meshes.parallel
    if p.tp > 1 and not is_tp_sharded(model):
        request.family.make_tensor_parallel_model(model).apply_tensor_parallel(meshes.dense["tp"])
    if p.ep * p.etp > 1 or has_unsharded_experts(meshes):
        mesh = meshes.expert["ep", "etp"]
        for layer in layers.values():
            layer.get_part("experts").shard_parameters(mesh)


def has_unsharded_experts(meshes: Meshes) -> bool:
    """Whether each expert (or its etp shard) has one owner: edp_replicate * edp_shard is 1."""
    return meshes.parallel.edp_replicate * meshes.parallel.edp_shard == 1


def make_layer_plan(
    name: str, layer: RoutedLayer, recipes: Mapping[Role, Recipe | None], ep: int = 1
) -> LayerPlan:
    """Return the plan of the MoE layer `name`; `recipes` are by role of its experts."""
    config = layer.config
    return LayerPlan(
        name=name,
        experts=f"{name}.{layer.get_part_name('experts')}".strip("."),
        num_experts=config.num_experts,
        zero_experts=config.zero_experts,
        top_k=config.top_k,
        num_local=config.num_experts // ep,
        hidden_dim=config.hidden_dim,
        recipes=tuple(recipes.items()),
    )


class _PlanBuilder:
    """Builds plans of a model that is sharded over tp, ep and etp; `recipes` are by parameter."""

    def __init__(
        self,
        model: nn.Module,
        layers: Layers,
        request: Request,
        recipes: Mapping[str, Recipe],
        fp32_names: Set[str],
    ) -> None:
        self.model, self.options, self.meshes = model, request.fsdp, request.meshes
        self.recipes, self.fp32 = recipes, fp32_names
        # In the "mean" convention a gradient is (1 / data_ranks) * sum_r dL_r/dw, with the loss L_r
        # of data rank r. The sum over the expert FSDP ranks, a smaller group, is the same sum over
        # data ranks, because the dispatcher's backward has summed over ep x etp. cp ranks add parts
        # of one L_r. So data_ranks divides dense and expert gradients. In the "sum" convention the
        # loss is already divided by the global token count.
        self.divisor = float(self.meshes.data_ranks) if request.loss == "mean" else 1.0
        self.names = {module: name for name, module in model.named_modules()}
        self.places = {module: i for i, module in enumerate(self.names)}
        self.name_of = {param: name for name, param in model.named_parameters()}
        self.model_units = find_units(model, self.options)
        self.frozen = None if request.precision is None else request.precision.frozen
        self.offloads_frozen = request.memory.offload_frozen
        self.offloads_params = request.memory.offload_params
        linears = list_storable_linears(model, request.precision)
        self.frozen_dense = {linear.weight for linear in linears.values()}  # on every data rank
        self.in_fp8 = {  # experts whose products read the stored weights
            layer.get_part("experts")
            for name, layer in layers.items()
            if self.frozen or request.find_recipe(name, layer, "experts") is not None
        }
        self.owned = self._assign_parameters()
        self.role_of = {p: role for role, _, params in self.owned.values() for p in params}
        check_parameter_shapes(self.name_of)
        self.params = self._plan_parameters()

    def _assign_parameters(
        self,
    ) -> dict[nn.Module, tuple[UnitRole, Sequence[nn.Module], list[nn.Parameter]]]:
        """Assign each parameter to one unit; return {first module: (role, modules, parameters)}."""
        units, model = self.model_units, self.model
        inner_first: list[tuple[UnitRole, Sequence[nn.Module]]] = [
            *(("routers", unit) for unit in units.routers),
            *(("experts", [experts]) for experts in units.experts),
            *(("block", group) for group in units.groups if group != [model]),
            *(("head", [head]) for head in units.heads),
            ("root", [model]),
        ]
        owned, seen = {}, set[nn.Parameter]()
        for role, modules in inner_first:
            params = dict.fromkeys(p for module in modules for p in module.parameters())
            owned[modules[0]] = role, modules, [p for p in params if p not in seen]
            seen.update(params)
        return owned

    def _plan_parameters(self) -> dict[str, ParamPlan]:
        named = self.model.named_modules()
        layers = {clean_name(n): m for n, m in named if isinstance(m, RoutedLayer)}
        kind_of = make_kind_lookup(self.model, layers)
        experts = {param: m for m in self.model_units.experts for param in m.parameters()}
        matrices = {
            getattr(m, n): k for m in self.model_units.experts for n, k in m.summed_dims.items()
        }
        matrices |= dict.fromkeys(self.frozen_dense, 1)
        return {
            name: ParamPlan(
                name=name,
                kind=kind_of(clean_name(name)),
                shape=tuple(param.shape),
                dtype=get_dtype_name(param.dtype),
                itemsize=param.element_size(),
                trainable=param.requires_grad,
                mesh="expert" if param in experts else "dense",
                placements=self._plan_placements(param, experts.get(param)),
                frozen=self.frozen if param in matrices else None,
                summed_dim=matrices.get(param, -1),
                on_host=self.offloads_params
                or (self.offloads_frozen and param in matrices and param in experts),
            )
            for param, name in self.name_of.items()
        }

    def _plan_placements(
        self, param: nn.Parameter, experts: Experts | None
    ) -> tuple[AxisPlacement, ...]:
        """Return placements over data axes, ep, etp and tp; `experts` has the parameter, if any."""
        inner: list[AxisPlacement] = []
        if isinstance(param, DTensor):
            axes = zip(_list_axes(param.device_mesh), param.placements, strict=True)
            for (axis, size), placement in axes:
                dim, pieces = getattr(placement, "dim", None), getattr(placement, "split_factor", 1)
                inner.append(AxisPlacement(axis=axis, size=size, dim=dim, pieces=pieces))
        if experts is not None and has_unsharded_experts(self.meshes):
            return tuple(inner)
        mesh: Any = self.meshes.dense_fsdp
        # DTensor cannot all-gather a dim with interleaved pieces that is sharded twice.
        has_pieces = any(p.dim == 0 and p.pieces > 1 for p in inner)
        dim = int(has_pieces)
        if experts is not None:
            mesh, dim = self.meshes.expert_fsdp, choose_expert_dim(experts, param, self.meshes)
        *replicates, (axis, size) = _list_axes(mesh)
        if has_pieces and experts is None:
            name = self.name_of[param]
            recipe = self.recipes.get(name)
            values_per_byte = 2 if recipe is not None and recipe.scaling == "nvfp4" else 1
            if param.shape[1] % (size * values_per_byte):
                raise ValueError(
                    f"{name} {tuple(param.shape)} has gate above up, so its dim 1 must be a "
                    f"multiple of {values_per_byte} times the ranks that shard it ({size}): choose "
                    "another dp_shard, cp"
                )
        if self.get_strategy(self.role_of[param]) == "no_shard" or param in self.frozen_dense:
            dim = None
        outer = [AxisPlacement(axis=name, size=n, dim=None) for name, n in replicates]
        return (*outer, AxisPlacement(axis=axis, size=size, dim=dim), *inner)

    def plan_units(self) -> list[UnitPlan]:
        """Return the plans of all units, in the order of their first use in forward."""
        options, units = self.options, self.model_units
        forward: Prefetch = {}
        backward: Prefetch = {}
        if options.prefetch_blocks:
            has_copies = not has_unsharded_experts(self.meshes) or self.offloads_params
            unsharded = set(() if has_copies else units.experts)
            groups = [[u for u in group if u not in unsharded] for group in units.first_use]
            units = replace(units, first_use=groups)
            num_units = -(-options.prefetch_blocks // options.blocks_per_unit)
            forward = plan_forward_prefetch(self.model, units, num_units)
            backward = plan_backward_prefetch(units, num_units)
        return [
            self._plan_unit(first, forward.get(first, ()), backward.get(first, ()))
            for first in sorted(self.owned, key=self._get_first_use)
        ]

    def _get_first_use(self, first_module: nn.Module) -> tuple[int, int]:
        """Return a sort key for units by first use in forward, from a unit's first module."""
        for group in self.model_units.first_use:
            if first_module in group and first_module is not self.model:
                return self.places[group[0]], group.index(first_module)
        return self.places[first_module], 0

    def _plan_unit(
        self,
        first_module: nn.Module,
        forward_prefetch: Iterable[nn.Module],
        backward_prefetch: Iterable[nn.Module],
    ) -> UnitPlan:
        """Return the plan of a unit by its first module, and the units that it prefetches."""
        options = self.options
        role, modules, owned = self.owned[first_module]
        mesh: View = "expert" if role == "experts" else "dense"
        is_fp8 = has_unsharded_experts(self.meshes) and first_module in self.in_fp8
        keeps = role == "routers" or is_fp8
        param_dtype = None if keeps else options.param_dtype
        reduce_dtype = torch.float32 if role == "routers" else options.reduce_dtype
        strategy = self.get_strategy(role)
        params = [self.params[self.name_of[param]] for param in owned]
        gather_dtype = None if param_dtype is None else get_dtype_name(param_dtype)
        fsdp_mesh = self.meshes.expert_fsdp if mesh == "expert" else self.meshes.dense_fsdp
        return UnitPlan(
            name=self.names[first_module],
            role=role,
            mesh=mesh,
            modules=tuple(self.names[module] for module in modules),
            params=tuple(param.name for param in params),
            gather_dtype=gather_dtype,
            divisor=self.divisor,
            # The inputs of experts contain fp32 routing weights, and the input of a head has the
            # dtype of the blocks.
            casts_inputs=role in ("block", "root"),
            strategy=strategy,
            forward_prefetch=tuple(self.names[unit] for unit in forward_prefetch),
            backward_prefetch=tuple(self.names[unit] for unit in backward_prefetch),
            layouts=make_flat_layouts(
                params,
                on_host=self.offloads_params,
                num_ranks=1 if strategy == "no_shard" else fsdp_mesh.size(fsdp_mesh.ndim - 1),
                gather_dtype=gather_dtype,
                reduce_dtype=get_dtype_name(reduce_dtype),
                recipes=self.recipes,
                fp32_names=self.fp32,
            ),
        )

    def get_strategy(self, role: UnitRole) -> Strategy:
        """Return the sharding strategy for units with this role."""
        options = self.options
        if role == "experts":
            return options.experts_strategy or options.dense_strategy
        return options.dense_strategy if role == "block" else options.embedding_strategy


def check_parameter_shapes(param_names: Mapping[nn.Parameter, str]) -> None:
    """Raise a ValueError for 0-dim parameters and for empty trainable parameters."""
    for param, name in param_names.items():
        if not param.ndim:
            raise ValueError(
                f"{name} () must have a dim over which it is sharded: give it the shape [1]"
            )
        if param.requires_grad and not param.numel():
            raise ValueError(
                f"{name} {tuple(param.shape)} must hold values to be trained: freeze it, or take "
                "out what is empty (a block's shared expert: set it to None)"
            )


def choose_expert_dim(experts: Experts, param: nn.Parameter, meshes: Meshes) -> int:
    """Return the dim of an expert parameter that data ranks shard: dim 0 or the model dim."""
    # Dim 0 (experts) if the local count divides evenly, otherwise the model dim, because sharding
    # dim 0 would leave ranks empty. A strided w1 shards the model dim too, because DTensor cannot
    # all-gather two strided dims. Biases are small and shard dim 0.
    p, dim = meshes.parallel, experts.get_model_dim_idx(param)
    strided = experts.is_strided and p.etp > 1
    is_count_even = (experts.config.num_experts // p.ep) % p.edp_shard == 0 and not strided
    is_dim_even = experts.config.expert_dim % p.edp_shard == 0
    return 0 if dim is None or is_count_even or not is_dim_even else dim


def get_dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def _list_axes(mesh: Any) -> list[tuple[str, int]]:
    return [(name, mesh.size(i)) for i, name in enumerate(mesh.mesh_dim_names)]


GATHER = "FSDPOptions.fp8_param_gather (True)"
STORED_DTYPES = (torch.float32, torch.bfloat16)


def find_gather_recipes(
    model: nn.Module,
    layers: Mapping[str, RoutedLayer],
    linears: Mapping[str, Recipe],
    request: Request,
) -> dict[str, Recipe]:
    """Return {parameter name: recipe} of the parameters that are all-gathered in FP8."""
    if not request.fsdp.fp8_param_gather:
        return {}
    read = dict(_find_fp8_parameters(model, layers, linears, request))
    if not read and request.meshes.parallel.pp == 1:  # a pipeline stage may have none
        raise ValueError(
            f"{GATHER} must go with weights that several ranks share and that are quantised once, "
            "as by 'blockwise', 'tensorwise' and 'nvfp4' (others quantise rows and columns apart, "
            "as many bytes as bf16), and there are none: set precision='blockwise', or drop it"
        )
    if request.dense.compile and any(map(_select_gatherable_recipe, linears.values())):
        raise ValueError(
            f"{GATHER} must go with DenseOptions.compile (True) = False where linears are in FP8, "
            "which torch.compile would read: use roles=('experts', 'shared_experts'), or drop one "
            "of them"
        )
    names = {param: name for name, param in model.named_parameters()}
    places = Counter(p for m in model.modules() for p in m._parameters.values() if p is not None)
    for param in read:
        if param.dtype not in STORED_DTYPES:
            raise ValueError(
                f"{names[param]} ({param.dtype}) must be kept in fp32 or bf16 with {GATHER}: call "
                "model.float()"
            )
        if places[param] > 1:
            raise ValueError(
                f"{names[param]} must not be tied to another parameter with {GATHER}, which leaves "
                "its values to FP8 products alone: untie it, or leave it out by "
                "Precision.overrides"
            )
    for name, layer in model.named_modules():
        has_dora = bool(getattr(layer, "lora_magnitude_vector", None))
        if has_dora and layer.get_base_layer().weight in read:
            raise ValueError(
                f"{name} must have no DoRA, which reads its weight, with {GATHER}: drop one of them"
            )
    return {names[param]: recipe for param, recipe in read.items()}


def _find_fp8_parameters(
    model: nn.Module,
    layers: Mapping[str, RoutedLayer],
    linears: Mapping[str, Recipe],
    request: Request,
) -> Iterator[tuple[nn.Parameter, Recipe]]:
    """Yield (parameter, recipe) of each weight that is read only by FP8 matmuls with the recipe."""
    for name, layer in layers.items():
        recipe = _select_gatherable_recipe(request.find_recipe(name, layer, "experts"))
        if recipe is not None and not has_unsharded_experts(request.meshes):
            experts = layer.get_part("experts")
            if experts.is_separate:
                raise ValueError(
                    f"{name}: {GATHER} must go with ExpertLayout.gate_up ('separate') = 'split' or "
                    "'concatenated', because gate and up are one matrix: drop it"
                )
            for attribute in (experts.layout.w1, experts.layout.w2):  # no adapters
                param = getattr(experts, attribute)
                _check_byte_pairs(name, experts, param, recipe, request.meshes)
                yield param, recipe
        shared = layer.get_part("shared")
        recipe = _select_gatherable_recipe(request.find_recipe(name, layer, "shared_experts"))
        if isinstance(shared, SharedExpert) and recipe is not None:
            yield from ((param, recipe) for param in (shared.w1, shared.w2))
    for name, module in model.named_modules():
        recipe = _select_gatherable_recipe(linears.get(clean_name(name)))
        if isinstance(module, nn.Linear) and recipe is not None:
            yield cast(nn.Parameter, module.weight), recipe


def _check_byte_pairs(
    layer_name: str, experts: Experts, param: nn.Parameter, recipe: Recipe, meshes: Meshes
) -> None:
    """Raise a ValueError if a shard of `param` ends inside a byte of two "nvfp4" values."""
    size, ranks = experts.config.expert_dim, meshes.parallel.edp_shard
    shards_last_dim = choose_expert_dim(experts, param, meshes) == param.ndim - 1
    if recipe.scaling == "nvfp4" and shards_last_dim and size // ranks % 2:
        raise ValueError(
            f"{layer_name}: MoEConfig.dim ({size}) / ParallelConfig.edp_shard ({ranks}) must be "
            f"even with {GATHER} of 'nvfp4', two values of which are a byte: use more ep, or drop "
            "it"
        )


def _select_gatherable_recipe(recipe: Recipe | None) -> Recipe | None:
    return recipe if recipe is not None and recipe.can_gather_weights else None
