"""Checks of the arguments of `parallelize_moe`. They do not change the model or communicate."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any, get_type_hints

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from moecore.base import transformer_engine as te
from moecore.base.fields import check_value, quote
from moecore.base.options.dispatch import DispatchOptions
from moecore.base.options.fsdp import FSDPOptions
from moecore.base.options.layer import MoEOverrides
from moecore.base.options.precision import FrozenFormat
from moecore.base.torch_private import HAS_SEPARATE_PIECES, has_gradient_hooks
from moecore.moe.backends import check_backend
from moecore.moe.dispatch.wire import Wire
from moecore.moe.expert_layout import compute_expert_shapes
from moecore.moe.experts import Experts
from moecore.moe.layer import RoutedLayer
from moecore.moe.shared_experts import SharedExpert
from moecore.parallel.fsdp.units import is_in_router_unit, make_tied_predicate
from moecore.parallel.mesh import Meshes, ParallelConfig
from moecore.parallel.model.family import (
    ContextParallelModel,
    DynamicContextModel,
    TensorParallelModel,
)
from moecore.parallel.model.parallel_state import get_parallel_state
from moecore.parallel.model.request import Request, is_tp_sharded
from moecore.parallel.pipeline.layout import PipelineLayout
from moecore.precision.apply import check_precision
from moecore.precision.head import find_fp8_head_problem
from moecore.precision.linear import find_weight_problem
from moecore.precision.stored import find_linear_storage_problem, find_storage_problem

WRAPPERS = (DistributedDataParallel, FullyShardedDataParallel, DataParallel)


def check_request(model: nn.Module, request: Request) -> None:
    """Raise a ValueError or NotImplementedError if options, meshes and model are incompatible."""
    _check_arguments(request)
    _check_model_is_plain(model)
    checks = _check_pp_and_tp, _check_context, _check_indexers, _check_fp8_head
    for check in (*checks, _check_frozen_offload, _check_param_offload):
        check(model, request)
    if request.precision is not None and request.precision.frozen_dense:
        tp = request.meshes.parallel.tp
        problem = find_linear_storage_problem(model, request.precision, request.dense, tp)
        if problem is not None:
            raise ValueError(problem)


def check_stage_layout(
    layout: PipelineLayout,
    stage_ranks: Sequence[int],
    bound_layers: Collection[int],
    request: Request,
) -> None:
    """Raise ValueError if a stage begins with a layer in `bound_layers`, or a rank is empty."""
    wrong = [s.layers[0] for s in layout.stages if s.layers and s.layers[0] in bound_layers]
    if wrong:
        raise ValueError(
            f"layout ({quote(layout.text)}) must begin no stage with layer {wrong[0]}, which reads "
            f"what the layer before has chosen, nor with any of {sorted(bound_layers)}: move the "
            "border"
        )
    busy = {stage_ranks[stage.index] for stage in layout.stages if stage.letters}
    idle = sorted(set(stage_ranks) - busy)
    if idle:
        raise ValueError(
            f"layout ({quote(layout.text)}) must give each pp rank a part of the model, but rank "
            f"{idle[0]} has only empty stages, and no optimizer takes no parameters: move a layer "
            "there, or lower pp"
        )
    num_stages, fraction = len(layout.stages), request.memory.offload_fraction
    if isinstance(fraction, tuple) and len(fraction) != num_stages:
        raise ValueError(
            f"MemoryOptions.offload_fraction ({quote(fraction)}) must have a number per stage of "
            f"the layout ({num_stages}): pass as many, or one for all"
        )


def check_layers(model: nn.Module, layers: Mapping[str, RoutedLayer], request: Request) -> None:
    """Raise a ValueError or NotImplementedError if the model's MoE layers cannot be sharded."""
    if request.meshes.parallel.tp > 1 and not is_tp_sharded(model):
        request.family.check_tensor_parallel(model, request.meshes.parallel.tp)
    p = request.meshes.parallel
    if request.precision is not None and p.pp > 1:  # a stage may lack the modules of an override
        check_precision(model, request.precision)
    if not layers and p.ep * p.etp > 1:
        raise ValueError(
            f"ParallelConfig.ep ({p.ep}) and etp ({p.etp}) must be 1 for a model without MoE "
            "layers: drop them, or register an adapter for its MoE blocks, see docs/extending.md"
        )
    if not layers and (request.moe or request.dispatch.nvlink is not None):
        unused = "moe" if request.dispatch.nvlink is None else "DispatchOptions.nvlink"
        warnings.warn(f"{unused} is not used: the model has no MoE layers", stacklevel=5)
    owners: dict[nn.Module, str] = {}
    for name, layer in layers.items():
        first = owners.setdefault(layer.get_part("experts"), name)
        if first != name:
            raise ValueError(
                f"{name} and {first} must not share one experts module, which is sharded and "
                "counted with its layer: share the whole MoELayer, or untie them"
            )
    is_tied = make_tied_predicate(model)
    for name, layer in layers.items():
        _check_experts(name, layer, request.meshes)
        if p.ep * p.etp > 1:
            Wire(request.dispatch.fp8).check_dim(layer.config.expert_dim)
        if is_tied(layer.get_part("experts")):  # experts modules are sharded separately
            raise ValueError(
                f"{name}: parameters of experts must not be shared with another module, because "
                "experts live on a mesh of their own: untie them"
            )
        _check_layer_compute(name, layer, request)
    _check_routers(layers, is_tied, request.fsdp)


def _check_arguments(request: Request) -> None:
    """Raise a ValueError for arguments that conflict with each other or with the meshes."""
    p, dispatch = request.meshes.parallel, request.dispatch
    annotations = get_type_hints(MoEOverrides, include_extras=True)
    for name, value in request.moe.items():
        if name not in annotations:
            raise ValueError(
                f"moe ({name!r}) must name one of {', '.join(map(repr, annotations))}: the model "
                "decides what else its layers compute"
            )
        check_value(f"MoEConfig.{name}", value, annotations[name])
    recipes = [] if request.precision is None else request.precision.recipes
    for recipe in (recipe for recipe in recipes if recipe.backend == "te"):
        problem = te.find_recipe_problem(recipe, request.meshes.device)
        if problem is not None:
            raise ValueError(problem)
        if request.dense.compile and recipe.amax_history:
            raise ValueError(
                "DenseOptions.compile (True) must go with Recipe.amax_history "
                f"({recipe.amax_history}) = 0 by backend 'te': use backend='moecore', or drop one "
                "of them"
            )
    if dispatch.name == "nccl_ep" and p.etp > 1:
        raise ValueError(
            f"DispatchOptions.name ('nccl_ep') must go with etp ({p.etp}) = 1: NCCL EP knows one "
            "owner of an expert, so raise ep, or use 'alltoall'"
        )
    if dispatch.name == "local" and p.ep * p.etp > 1:
        raise ValueError(
            f"DispatchOptions.name ('local') must go with ep * etp ({p.ep * p.etp}) = 1: use "
            "'alltoall'"
        )
    _warn_about_dispatch(dispatch, p)
    device_type = request.meshes.device_type
    if request.dense.overlap_shared and device_type != "cuda":
        raise ValueError(
            f"DenseOptions.overlap_shared (True) must go with device_type ({device_type!r}) = "
            "'cuda', the only one with streams: drop it"
        )


def _warn_about_dispatch(dispatch: DispatchOptions, parallel: ParallelConfig) -> None:
    """Warn about dispatch options that have no effect, because no token leaves its rank."""
    rules = (
        ("fp8", dispatch.fp8, "ep * etp", parallel.ep * parallel.etp),
        ("name", dispatch.name not in ("auto", "local"), "ep * etp", parallel.ep * parallel.etp),
        ("clones", dispatch.clones is not None, "ep", parallel.ep),
    )
    for field, is_set, degree, size in rules:
        if is_set and size == 1:
            value = getattr(dispatch, field)
            text = f"DispatchOptions.{field} ({value!r}) is not used: {degree} is 1"
            warnings.warn(text, stacklevel=6)


def _check_model_is_plain(model: nn.Module) -> None:
    """Raise a ValueError if the model is already sharded or wrapped, or has gradient hooks."""
    for name, module in model.named_modules():
        relation = None
        if isinstance(module, WRAPPERS):
            relation = "be wrapped for data parallelism, which parallelize_moe brings: pass the "
            relation += "module in it"
        elif get_parallel_state(module) is not None:
            relation = "be parallelized already: call parallelize_moe once, on the whole"
        elif isinstance(module, FSDPModule):
            relation = "be sharded already: leave out fully_shard, FSDPOptions has its choices, and"
            relation += " call parallelize_moe once, on the whole"
        elif isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            relation = "have sparse gradients, which units cannot reduce: make it with sparse=False"
        if relation is not None:
            raise ValueError(f"{name or 'model'} ({type(module).__name__}) must not {relation}")
    for name, param in model.named_parameters():
        if isinstance(param, DTensor) and "tp" not in (param.device_mesh.mesh_dim_names or ()):
            raise ValueError(
                f"{name} (a DTensor over {param.device_mesh.mesh_dim_names}) must be whole, or cut "
                'over meshes.dense["tp"]: leave the sharding over data ranks to parallelize_moe'
            )
        if has_gradient_hooks(param):
            raise ValueError(
                f"{name} must have no hooks, which its sharded parameter would not have: after "
                "parallelize_moe use register_post_accumulate_grad_hook"
            )


def _check_pp_and_tp(model: nn.Module, request: Request) -> None:
    """Raise an error if options of the pipeline, offload or dense parts do not fit pp or tp."""
    p = request.meshes.parallel
    if p.pp > 1 and request.pipeline is None:
        raise ValueError(
            f"ParallelConfig.pp ({p.pp}) must go with stages: pass pipeline=PipelineConfig(...)"
        )
    if p.pp == 1 and isinstance(request.memory.offload_fraction, tuple):
        raise ValueError(
            f"MemoryOptions.offload_fraction ({quote(request.memory.offload_fraction)}) must be "
            "one number where ParallelConfig.pp is 1, which has no stages: pass a float"
        )
    pipeline, problem = request.pipeline, None
    if p.pp == 1 and pipeline is not None and pipeline.schedule != "overlapped":
        problem = "pp is 1"
    elif p.pp == 1 and pipeline is not None and request.dispatch.name == "nvlink":
        problem = "'nvlink' has no exchange to compute beside"
    if problem is not None:
        warnings.warn(f"pipeline is not used: {problem}", stacklevel=5)
    for name in ("compile", "graph"):
        if p.pp > 1 and pipeline is not None and pipeline.defers and getattr(request.dense, name):
            raise ValueError(
                f"PipelineConfig.schedule ({pipeline.schedule!r}) must go with DenseOptions.{name} "
                "(True) = False, which computes weight gradients at once: use '1f1b' or "
                "'interleaved'"
            )
    if request.dense.graph:
        _check_graphs(model, request)
    owner = request.family.make_tensor_parallel_model(model)
    if p.tp > 1 and not is_tp_sharded(model) and not isinstance(owner, TensorParallelModel):
        raise NotImplementedError(
            f"ParallelConfig.tp ({p.tp}) must be 1 for {type(model).__name__}: tensor parallelism "
            "needs a model with apply_tensor_parallel(tp_mesh), such as moecore.models.Decoder"
        )


# The graph that contains an offloaded part. The norm before attention and the MLP of a dense block
# are inside of attention's graphs.
GRAPHED_IN: dict[str, str] = {
    **dict.fromkeys(("norm", "attention", "mlp", "rest"), "attention"),
    "shared_experts": "shared_experts",
}


def _check_graphs(model: nn.Module, request: Request) -> None:
    precision, conflict, scopes = request.precision, None, request.graph_scopes
    repeated = [name for name, m in model.named_modules() if getattr(m, "runs", 1) != 1]
    problem = request.find_capture_problem()
    parts = [part for part in request.memory.offload if GRAPHED_IN.get(part) in scopes]
    if repeated:  # the memory of graphs is that of one run of each block
        conflict = f"modules that run once in a forward, and {repeated[0]} runs several times "
        conflict += "(DecoderConfig.mtp_repeats): leave it out"
    elif problem is not None and "attention" in scopes:
        conflict = f"{problem}, or leave 'attention' out of graph_scopes"
    elif request.is_dynamic:
        conflict = "ContextOptions.dynamic (True) = False, because a graph has one cp: leave one "
        conflict += "of them out"
    elif parts:
        conflict = f"MemoryOptions.offload ({parts[0]!r}) of other parts, because what graphs "
        conflict += "keep has an address: leave one of them out"
    elif precision is not None and any(recipe.amax_history for recipe in precision.recipes):
        conflict = "Recipe.amax_history 0, because the first step has no history: use another "
        conflict += "scaling, or leave it out"
    if conflict is not None:
        raise ValueError(f"DenseOptions.graph (True) must go with {conflict}")


def _check_context(model: nn.Module, request: Request) -> None:
    """Raise an error if the model or the options do not support cp > 1 or dynamic cp."""
    cp, dynamic = request.meshes.parallel.cp, "ContextOptions.dynamic (True)"
    if cp == 1 and not request.is_dynamic:
        if request.context is not None:
            warnings.warn("context is not used: cp is 1", stacklevel=5)
        return
    protocol: type = ContextParallelModel
    field, needs = f"ParallelConfig.cp ({cp}) must be 1", "parallel(cp)"
    if request.is_dynamic:
        protocol = DynamicContextModel
        field, needs = f"{dynamic} must be False", "groups(groups)"
        if cp > 1:
            raise ValueError(
                f"{dynamic} must go with ParallelConfig.cp ({cp}) = 1: each forward gives its cp"
            )
        if request.loss != "sum":
            raise ValueError(
                f"{dynamic} must go with loss ({request.loss!r}) = 'sum', because micro-batches "
                "belong to different numbers of ranks: divide by the labels of the global batch"
            )
    if not isinstance(request.family.make_context_parallel_model(model), protocol):
        raise NotImplementedError(
            f"{field} for {type(model).__name__}: context parallelism needs a model with "
            f"apply_context_{needs}, such as moecore.models.Decoder"
        )
    request.context_options(model)


def _check_indexers(model: nn.Module, request: Request) -> None:
    if request.indexer is None:
        return
    layers: Any = request.family.find_indexers(model)
    if not layers:
        raise ValueError(
            f"indexer ({request.indexer}) must be None for {type(model).__name__}, which has no "
            "indexer of sparse attention that is known: leave it out"
        )
    dim = layers[0].indexer.head_dim
    if request.indexer.fp8_scores and dim & (dim - 1):
        raise ValueError(
            f"IndexerConfig.fp8_scores (True) must be False for an indexer of head_dim ({dim}), "
            "which is no power of two and has no Hadamard matrix: drop it"
        )
    if request.meshes.parallel.tp > 1 and request.indexer.stage != "frozen":
        raise NotImplementedError(
            f"indexer ({request.indexer}) must be None with ParallelConfig.tp "
            f"({request.meshes.parallel.tp}) > 1, whose ranks have some heads each: use cp"
        )


def _check_fp8_head(model: nn.Module, request: Request) -> None:
    precision, p = request.precision, request.meshes.parallel
    if precision is None or not precision.fp8_head:
        return
    shapes, name = request.family.get_head_shapes(model), type(model).__name__
    if not shapes or not request.memory.fused_loss:
        raise ValueError(
            f"Precision.fp8_head (True) must be False for {name}, whose loss is not made in chunks "
            "of tokens (MemoryOptions.fused_loss, or a Decoder): drop it"
        )
    dtype = request.fsdp.param_dtype or next(model.parameters()).dtype
    for V, D in shapes:
        local_shape = (V, D) if V % p.tp else (V // p.tp, D)
        assert precision.recipe is not None, "a rule of Precision"
        reason = find_fp8_head_problem(local_shape, precision.recipe, dtype, request.meshes.device)
        if reason is not None:
            raise ValueError(
                f"Precision.fp8_head (True) must be False for {name}, because {reason}: drop it"
            )


def _check_param_offload(_model: nn.Module, request: Request) -> None:
    p, precision = request.meshes.parallel, request.precision
    conflicts = {
        f"ParallelConfig.pp ({p.pp}), whose stages share copies of weights": p.pp > 1,
        "DenseOptions.graph, which captures no copies": bool(request.graph_scopes),
        "FSDPOptions.fp8_param_gather, which quantises on the GPU": request.fsdp.fp8_param_gather,
        "FSDPOptions.nccl_ub, whose buffers are registered": request.fsdp.nccl_ub,
        "Precision.frozen, whose weights are stored in 4 bits": (
            precision is not None and precision.frozen is not None
        ),
    }
    conflict = next((text for text, is_set in conflicts.items() if is_set), None)
    if request.memory.offload_params and conflict is not None:
        raise ValueError(
            f"MemoryOptions.offload_params (True) must be False with {conflict}: drop one of them"
        )


def _check_frozen_offload(model: nn.Module, request: Request) -> None:
    precision = request.precision
    if request.memory.offload_frozen and (precision is None or precision.frozen is None):
        raise ValueError(
            "MemoryOptions.offload_frozen (True) must be False without Precision.frozen, the 4-bit "
            "format of frozen experts: pass precision='nf4'"
        )


def _check_experts(layer_name: str, layer: RoutedLayer, meshes: Meshes) -> None:
    """Raise an error if a layer's experts are wrapped or do not divide by a degree."""
    p, config, experts = meshes.parallel, layer.config, layer.get_part("experts")
    is_native = isinstance(experts, Experts)
    layout_names = set(compute_expert_shapes(config, experts.layout)) if is_native else set()
    module_names = {n for n, _ in experts.named_parameters() if not n.startswith("lora.")}
    if not is_native or module_names != layout_names:
        raise ValueError(
            f"{layer_name}: experts ({type(experts).__name__} with {sorted(module_names)}) must be "
            f"Experts with {sorted(layout_names)}: leave out wrappers and parametrizations"
        )
    rules = [
        ("num_experts", config.num_experts, "ep", p.ep),
        ("hidden_dim", config.hidden_dim, "etp", p.etp),
    ]
    if config.fc2_bias:
        rules += [("dim", config.expert_dim, "etp", p.etp)]
    if experts.is_strided and p.etp > 1:
        rules += [("dim", config.expert_dim, "edp_shard", p.edp_shard)]
        if not HAS_SEPARATE_PIECES:
            raise NotImplementedError(
                f"{layer_name}: ParallelConfig.etp ({p.etp}) must be 1 for concatenated gate and "
                f"up weights with torch {torch.__version__}: use torch >= 2.13, or ep instead of "
                "etp"
            )
    for field, value, degree, size in rules:
        if value % size:
            raise ValueError(
                f"{layer_name}: MoEConfig.{field} ({value}) must be divisible by "
                f"ParallelConfig.{degree} ({size}): choose another {degree}"
            )


def _check_layer_compute(layer_name: str, layer: RoutedLayer, request: Request) -> None:
    experts, backend = layer.get_part("experts"), request.expert_backend
    recipe = request.find_recipe(layer_name, layer, "experts")
    recompute_fc1 = "expert_fc1" in request.memory.parts
    experts.check_backend(backend, recompute_fc1=recompute_fc1, recipe=recipe)
    check_backend(backend, request.make_expert_spec(layer, recipe))
    shared, shared_recipe = layer.get_part("shared"), None
    if isinstance(shared, SharedExpert):
        shared_recipe = request.find_recipe(layer_name, layer, "shared_experts")
    if shared_recipe is not None:
        problem = find_weight_problem(shared.w1, shared_recipe)
        problem = problem or find_weight_problem(shared.w2, shared_recipe)
        if shared_recipe.amax_history:
            problem = "the layer keeps no history of amax"
        if problem is not None:
            raise ValueError(
                f"{layer_name}: shared experts cannot be in FP8 ({shared_recipe.scaling}), because "
                f"{problem}: leave them out of Precision.roles"
            )
    if request.precision is not None and request.precision.frozen is not None:
        _check_frozen_experts(layer_name, layer, request.precision.frozen, request)
    layer.check_config(layer_name, request.make_layer_config(layer))


def _check_frozen_experts(
    name: str, layer: RoutedLayer, kind: FrozenFormat, request: Request
) -> None:
    experts, degrees = layer.get_part("experts"), asdict(request.meshes.parallel)
    problem = find_storage_problem(
        f"{name}.{layer.get_part_name('experts')}".strip("."), experts, kind, degrees
    )
    if request.dispatch.clones is not None:
        problem = f"DispatchOptions.clones must be None with Precision.frozen ({kind!r}): drop one"
    if request.find_recipe(name, layer, "experts") is not None:
        problem = (
            f"Precision.overrides must give the experts of {name} no recipe with Precision.frozen "
            f"({kind!r}): drop one"
        )
    if problem is not None:
        raise ValueError(problem)


def _check_routers(
    layers: Mapping[str, RoutedLayer], is_tied: Callable[[nn.Module], bool], options: FSDPOptions
) -> None:
    """Raise a ValueError if a router with a separate unit is also used by another module."""
    owned = {name: layer.get_part("router") for name, layer in layers.items()}
    for name, router in owned.items():
        is_shared = router is not None and (
            list(owned.values()).count(router) > 1 or is_tied(router)
        )
        if is_shared and is_in_router_unit(router, options):
            raise ValueError(
                f"router of {name} must not be shared with param_dtype ({options.param_dtype}), "
                "which would round it with the root's parameters: untie it"
            )
