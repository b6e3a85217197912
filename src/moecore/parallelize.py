"""parallelize_moe: collect the request, check it, plan, agree between ranks, apply the plan.

The one place that knows every room. Order matters: expert and tensor sharding fix what a rank owns
(DTensors on ep, etp and tp), then units shard that over the data ranks of each mesh.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Annotated, Any, ParamSpec, TypeVar, cast, get_type_hints

import torch
import torch.distributed as dist
from torch import nn

from moecore._fields import check_arguments
from moecore.adapters.base import Adapter, swap_blocks
from moecore.agreement import check_equal_weights, check_same
from moecore.attention.context_parallel.group import ContextOptions, ContextParallel
from moecore.config import BalanceConfig
from moecore.graphs.regions import compile_blocks, compiled_modules, graph_blocks
from moecore.hf.context import context_model
from moecore.hf.device_map import refuse_accelerate
from moecore.hf.guards import refuse_save_pretrained, warn_about_cache
from moecore.hf.kept_fp32 import kept_fp32
from moecore.hf.lora import adapt_experts, adapted, experts_unwrapped, refuse_peft_methods
from moecore.hf.outputs import refuse_lost_outputs
from moecore.hf.rows import tell_layers
from moecore.memory.apply import apply_memory, apply_stash
from moecore.memory.copies import copy_modules, on_meta
from moecore.memory.offload import Offload
from moecore.memory.options import MemoryOptions
from moecore.mesh import Meshes, context_groups, split_context
from moecore.moe.backends import ExpertBackend
from moecore.moe.balance import BalanceGroups
from moecore.moe.clones import CloneOptions, Cloner
from moecore.moe.dispatch.allgather import AllGatherDispatcher
from moecore.moe.dispatch.alltoall import AllToAllDispatcher
from moecore.moe.dispatch.exchange_pool import ExchangePool
from moecore.moe.dispatch.local import LocalDispatcher
from moecore.moe.dispatch.nvlink import NVLinkDispatcher
from moecore.moe.dispatch.nvlink_options import NVLinkOptions
from moecore.moe.dispatch.peer_memory import find_problem
from moecore.moe.layer import MoELayer, RoutedLayer
from moecore.moe.placement import ExpertPlacement
from moecore.moe.records import Dispatcher
from moecore.moe.state import STATE_NAME, MoEState
from moecore.pipeline.across import ALL_STAGES, make_all_stages
from moecore.pipeline.config import PipelineConfig
from moecore.pipeline.layout import PipelineLayout, Stage
from moecore.pipeline.orders import DEFERRING
from moecore.pipeline.run import PIPELINE_NAME, Pipeline
from moecore.pipeline.schedule import make_schedule
from moecore.pipeline.stages import blocks_of, num_parts, take_stages
from moecore.pipeline.transport import connect
from moecore.precision.apply import apply_precision
from moecore.precision.linear import Fp8Products
from moecore.precision.recipe import Recipe
from moecore.precision.roles import Precision, PrecisionName
from moecore.request import (
    REQUEST_NAME,
    DispatcherName,
    LossConvention,
    Request,
    check_layers,
    check_request,
    check_stages,
    model_entries,
)
from moecore.shard.apply import shard_model
from moecore.shard.deferred_linears import defer_linears
from moecore.shard.late_parameters import refuse_added
from moecore.shard.make import cut_model, make_plan
from moecore.shard.options import FSDPOptions
from moecore.shard.plan import PLAN_NAME, ShardPlan

logger = logging.getLogger("moecore.parallelize")
P = ParamSpec("P")
T = TypeVar("T")


def parallelize_moe(
    model: nn.Module,
    meshes: Annotated[Meshes, "pass build_meshes(ParallelConfig(...))"],
    *,
    dispatcher: DispatcherName = "auto",
    nvlink: NVLinkOptions | None = None,
    expert_backend: ExpertBackend = "auto",
    memory: MemoryOptions | None = None,
    clones: CloneOptions | None = None,
    overlap_shared: bool = False,
    compile_dense: bool = False,
    graph_dense: bool = False,
    balance: BalanceConfig | None = None,
    moe: Mapping[str, Any] | None = None,
    context: ContextOptions | None = None,
    precision: Precision | Recipe | PrecisionName | None = None,
    fsdp: FSDPOptions | None = None,
    loss: LossConvention = "mean",
    pipeline: PipelineConfig | None = None,
    adapters: Mapping[type, Adapter] | None = None,
) -> nn.Module:
    """Shard a model over both meshes, in place, and return it: see docs/parallelize.md.

    Parameters become DTensors of the same names and global shapes. A model may be on meta, to be
    materialised afterwards, or real, with equal weights on every rank.

    Args:
        model: any; its MoE layers' experts go to the expert mesh, all else to the dense mesh.
        meshes: from `build_meshes`.
        dispatcher: how tokens travel; "auto" chooses by the hardware, see docs/dispatchers.md.
        nvlink: sizes and times of the nvlink dispatcher, for "nvlink" and "auto".
        expert_backend: which kernels multiply the experts' matrices; see `moe/backends.py`.
        memory: what backward computes again or host memory holds; None = nothing.
        clones: of hot experts, on ranks with few tokens; None = none. See docs/balancing.md.
        overlap_shared: on GPUs, run shared experts on a stream of their own. Experimental.
        compile_dense: run attention, norms and residual adds through torch.compile.
        graph_dense: on GPUs, run attention, routers, shared experts and what an exchange prepares
            as CUDA graphs of each block, for dispatchers that wait on the host.
        balance: of every MoE layer; None keeps each one's own.
        moe: fields of `MoEConfig` for every MoE layer, such as a transformers model's: capacity,
            router_dtype, router_jitter.
        context: how attention over cp ranks communicates; None = by its heads.
        precision: which products are in FP8: "auto", a scaling or a recipe for all roles, or a
            record; None = none. Routed experts then need expert_backend "auto" or "triton".
        fsdp: how parameters are sharded; None = the defaults.
        loss: each rank's is a "mean" over its tokens, or a "sum" over the global token count.
        pipeline: the stages that pp ranks share; `TrainStep.forward_backward` runs them.
        adapters: block class -> `(block, model) -> MoELayer`, before moecore's own.

    Raises:
        ValueError: for what does not fit, before any collective (blocks may be swapped already); on
            every rank when ranks differ in model, arguments or versions.
        NotImplementedError: for a model without stages, tensor or context parallelism under pp > 1,
            tp > 1 or cp > 1, and customised blocks of transformers.
    """
    arguments = locals()
    check_arguments(parallelize_moe, arguments)
    request = _request(arguments)
    root = adapted(model)
    planned = _plan(root, request, adapters or {}, in_place=True)
    tell_layers(root)
    _agree(root, planned, request)
    _apply(root, planned, request)
    refuse_peft_methods(model)
    return model


def _with_arguments_of(
    other: Callable[P, Any],
) -> Callable[[Callable[..., T]], Callable[P, T]]:
    """Return a decorator that shows another function's arguments as a function's own."""

    def decorate(function: Callable[..., T]) -> Callable[P, T]:
        shown: Any = function
        returns = get_type_hints(function)["return"]
        shown.__signature__ = signature(other).replace(return_annotation=returns)
        return cast(Callable[P, T], shown)

    return decorate


@_with_arguments_of(parallelize_moe)
def plan_sharding(*args: Any, **kwargs: Any) -> ShardPlan:
    """Return what `parallelize_moe` does when it is called with the same arguments, as plain data.

    The model stays as it is: adapters get blocks of a copy on meta, and `apply_tensor_parallel` is
    called on that copy. Nothing communicates, so the world may be larger than this machine: see
    docs/parallelize.md. `explain(plan)` prints it.

    Raises:
        ValueError, NotImplementedError: as `parallelize_moe`, but for what must be the same on
            every rank and what only the GPUs of all ranks can tell.
    """
    bound = signature(parallelize_moe).bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    check_arguments(parallelize_moe, arguments)
    request, root = _request(arguments), adapted(arguments["model"])
    return _plan(root, request, arguments["adapters"] or {}, in_place=False).plan


def _request(arguments: Mapping[str, Any]) -> Request:
    """Return the record of a call's arguments."""
    asked = {name: arguments[name] for name in Request.__dataclass_fields__}
    asked["memory"] = asked["memory"] or MemoryOptions()
    asked["moe"] = dict(asked["moe"] or {})
    asked["precision"] = Precision.of(asked["precision"])
    asked["fsdp"] = asked["fsdp"] or FSDPOptions()
    return Request(**asked)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Planned:
    """What one rank knows before ranks compare.

    Attributes:
        plan: of this rank's stages.
        layers: their MoE layers by name.
        entries: what is compared of the whole model.
        dtype: of its first parameter.
        layout: its pipeline stages; None without.
        stages: those of this rank.
    """

    plan: ShardPlan
    layers: Mapping[str, RoutedLayer]
    entries: Mapping[str, Any]
    dtype: torch.dtype
    layout: PipelineLayout | None
    stages: Sequence[Stage]


def _plan(
    model: nn.Module, request: Request, adapters: Mapping[type, Adapter], *, in_place: bool
) -> _Planned:
    """Raise what one rank can know; return the plan, and what it is about.

    Args:
        model: its MoE blocks are swapped here, and other ranks' stages taken out.
        request: the call.
        adapters: for blocks.
        in_place: whether blocks of the model itself are swapped, or those of a copy on meta.
    """
    check_request(model, request)
    if not in_place:
        model = copy_modules(model, on_meta)[model]
    refuse_lost_outputs(model)
    with experts_unwrapped(model) as wrapped:
        layers = swap_blocks(model, adapters)
        adapt_experts(wrapped, layers)
    check_layers(model, layers, request)
    entries = model_entries(model, layers)
    dtype = next(model.parameters()).dtype
    layout, stages = _cut_stages(model, request)
    kept = set(model.modules())
    layers = {name: layer for name, layer in layers.items() if layer in kept}
    fp32 = kept_fp32(model, request.fsdp.param_dtype)
    plan = make_plan(model, layers, request, fp32=fp32)
    precision = request.precision
    may_be_wide = precision is None or (precision.only_faster and layers)  # a log line says why
    if not plan.is_in_fp8 and not may_be_wide:
        warnings.warn("precision is not used: the model has none of its roles", stacklevel=3)
    return _Planned(
        plan=plan, layers=layers, entries=entries, dtype=dtype, layout=layout, stages=stages
    )


def _cut_stages(
    model: nn.Module, request: Request
) -> tuple[PipelineLayout | None, Sequence[Stage]]:
    """Leave this rank's stages of a model; return those of all ranks, None without stages."""
    pp = request.meshes.parallel.pp
    if pp == 1 or request.pipeline is None:
        return None, ()
    layout = request.pipeline.stages(pp, *num_parts(model))
    check_stages(len(layout.stages), request)
    how = dict(pp=pp, chunks=layout.chunks(pp), num_micro_batches=1)
    rank_of = make_schedule(request.pipeline.schedule, **how).rank_of
    own = [s for s in layout.stages if rank_of[s.index] == request.meshes.pp_rank]
    take_stages(model, own)
    return layout, own


def _agree(model: nn.Module, planned: _Planned, request: Request) -> None:
    """Raise on every rank when ranks differ, before any other collective."""
    from moecore import __version__

    versions = {"torch.__version__": str(torch.__version__), "moecore.__version__": __version__}
    device_type = request.meshes.device_type
    entries = versions | request.entries() | dict(planned.entries)
    check_same(entries, device_type)
    # What else a plan has follows from these, and from what a rank's GPU can do ("auto") and how
    # the model cuts itself over tp.
    plan = planned.plan
    decided = ((layer.name, *role) for layer in plan.layers for role in layer.recipes)
    of_stages = {
        "recipes": {f"{role} of {name}": recipe for name, role, recipe in decided},
        "placement": {param.name: param.placements for param in plan.params},
    }
    group = request.meshes.stage_group
    check_same(of_stages, device_type, group=group)
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    check_equal_weights(tensors, device_type, group=group)


def _apply(model: nn.Module, planned: _Planned, request: Request) -> None:
    """Shard the model as planned. Collective on GPUs where nvlink may be the dispatcher."""
    meshes, plan, layers = request.meshes, planned.plan, planned.layers
    plan = _resolve_dispatcher(plan, request)
    exchanges = None
    if plan.dispatcher == "nvlink" and meshes.dispatch_group is not None:
        exchanges = ExchangePool(
            meshes.dispatch_group, ep=meshes.parallel.ep, options=request.nvlink
        )
    cut_model(model, layers, meshes)
    shared_by = _apply_context(model, request)
    stream = torch.cuda.Stream() if request.overlap_shared else None
    if request.precision is not None:
        apply_precision(model, request.precision)
    for (name, layer), of_layer in zip(layers.items(), plan.layers, strict=True):
        recipes = dict(of_layer.recipes)
        layer.tracker.reset()  # what ran before is no part of a step
        layer.set_config(request.config_of(layer))
        _set_experts(name, layer, request, recipes["experts"])
        placement = _placement(layer.config.num_experts, request)
        layer.dispatcher = _dispatcher(layer.config.num_experts, placement, plan, exchanges)
        if placement is not None and request.clones is not None and placement.num_clones:
            group = meshes.expert.get_group("ep")
            layer.cloner = Cloner(placement, group, request.clones, exchanges)
        if isinstance(layer, MoELayer) and layer.part("shared") is not None:
            layer.shared_stream = stream
            recipe = recipes.get("shared_experts")
            if recipe is not None:
                layer.part("shared").multiply = (Fp8Products(recipe), Fp8Products(recipe))
    if planned.layout is not None:
        assert request.pipeline is not None
        if request.pipeline.schedule in DEFERRING:
            defer_linears(model)
    blocks = [model.get_submodule(name) for name in plan.blocks]
    shard_model(model, plan, meshes)
    refuse_save_pretrained(model)
    refuse_accelerate(model)
    compiled = set[nn.Module]()
    if request.compile_dense:
        from moecore.memory.compiled import inductor_options  # which imports Inductor

        options = inductor_options(blocks, request.memory)
        compile_blocks(blocks, dynamic=False, options=options)
        compiled = {module for block in blocks for module in compiled_modules(block)}
    device = meshes.device
    chunks = None if planned.layout is None else blocks_of(model, blocks, planned.stages)
    offload = apply_memory(blocks, request.memory, device, compiled=compiled, stages=chunks)
    stash = apply_stash(blocks, request.memory, device, compiled=compiled)
    if request.compile_dense or request.memory.parts or request.memory.offload:
        warn_about_cache(model)
    if request.graph_dense:
        names = dict(zip(blocks, plan.blocks, strict=True))
        for chunk in [blocks] if chunks is None else chunks.values():
            graph_blocks({names[block]: block for block in chunk})
    groups = BalanceGroups(
        micro_batch=meshes.micro_batch_group,
        global_batch=meshes.stage_group if meshes.stage_group.size() > 1 else None,
        data_ranks=meshes.data_ranks,
        cp=meshes.parallel.cp,
        by_cp=shared_by,
    )
    check = partial(refuse_added, model)
    state = MoEState(
        layers,
        groups,
        loss=request.loss,
        exchanges=exchanges,
        stash=stash,
        check_parameters=check,
    )
    setattr(model, STATE_NAME, state)
    setattr(model, REQUEST_NAME, request)
    setattr(model, PLAN_NAME, plan)
    if planned.layout is not None:
        _apply_pipeline(model, planned, planned.layout, request, offload)


def _apply_pipeline(
    model: nn.Module,
    planned: _Planned,
    layout: PipelineLayout,
    request: Request,
    offload: Offload | None,
) -> None:
    """Give a model its place among the stages, and what it shares with them. Collective."""
    meshes = request.meshes
    assert request.pipeline is not None and meshes.pipeline_groups is not None
    pipeline = Pipeline(
        config=request.pipeline,
        layout=layout,
        rank=meshes.pp_rank,
        groups=meshes.pipeline_groups,
        dtype=request.fsdp.param_dtype or planned.dtype,
        device=meshes.device,
        offload=offload,
    )
    connect(pipeline.groups, pipeline.schedule(1).rank_of, pipeline.rank, pipeline.device)
    setattr(model, PIPELINE_NAME, pipeline)
    setattr(model, ALL_STAGES, make_all_stages(model, meshes))


def _apply_context(model: Any, request: Request) -> dict[int, dist.ProcessGroup]:
    """Give a model its cp ranks; return who shares a micro-batch, for each cp of dynamic ones.

    Collective where it makes groups.
    """
    meshes, shared_by = request.meshes, dict[int, dist.ProcessGroup]()
    if not request.is_dynamic and meshes.parallel.cp == 1:
        return shared_by
    found: dict[int, ContextParallel] = {}
    for cp, options in request.context_options(model).items():
        if request.is_dynamic:
            group, shared_by[cp] = context_groups(meshes, cp)
        else:
            group = meshes.dense.get_group("cp")
        found[cp] = _context_parallel(meshes, options, group)
    if request.is_dynamic:
        model.apply_context_groups(found)
    else:
        context_model(model).apply_context_parallel(found[meshes.parallel.cp])
    return shared_by


def _context_parallel(
    meshes: Meshes, options: ContextOptions, group: dist.ProcessGroup
) -> ContextParallel:
    """Return this rank's place among the cp ranks. Collective where it makes groups."""
    if options.way == "a2a+p2p":
        assert options.a2a_ranks is not None, "resolved options have the number"
        return ContextParallel(group, *split_context(meshes, group.size(), options.a2a_ranks))
    a2a, ring = (group if options.way == way else None for way in ("a2a", "p2p"))
    return ContextParallel(group, a2a, ring)


def _set_experts(name: str, layer: RoutedLayer, request: Request, recipe: Recipe | None) -> None:
    """Let a layer's experts be multiplied as requested, by the recipe of the plan."""
    recompute_fc1 = "expert_fc1" in request.memory.parts
    layer.part("experts").set_backend(
        request.expert_backend, recompute_fc1=recompute_fc1, recipe=recipe
    )
    why_wide = request.why_wide(name, layer)
    if why_wide is not None:
        logger.info("precision leaves the experts of %r as they are: %s", name, why_wide)


def _placement(num_experts: int, request: Request) -> ExpertPlacement | None:
    """Return which ranks own the experts of a layer; None = this rank owns all."""
    group, p, clones = request.meshes.dispatch_group, request.meshes.parallel, request.clones
    if group is None:
        return None
    num_clones = 0 if clones is None or p.ep == 1 else clones.per_rank
    return ExpertPlacement(
        group=group, num_experts=num_experts, ep=p.ep, etp=p.etp, num_clones=num_clones
    )


def _dispatcher(
    num_experts: int,
    placement: ExpertPlacement | None,
    plan: ShardPlan,
    exchanges: ExchangePool | None,
) -> Dispatcher:
    """Return what brings the tokens of a layer to its experts."""
    if placement is None:
        return LocalDispatcher(num_experts)
    if exchanges is not None:
        return NVLinkDispatcher(placement, exchanges)
    if plan.dispatcher == "allgather":
        return AllGatherDispatcher(placement)
    return AllToAllDispatcher(placement)


def _resolve_dispatcher(plan: ShardPlan, request: Request) -> ShardPlan:
    """Return the plan with the dispatcher that this machine allows. Collective where it is asked.

    Raises:
        ValueError: when nvlink is asked for by name and cannot work here.
    """
    group = request.meshes.dispatch_group
    if group is None:
        return plan
    if plan.dispatcher in ("auto", "nvlink"):
        problem = find_problem(group, request.meshes.device_type)
        if problem is None:
            why = "peer access among all GPUs of the group"
            plan = replace(plan, dispatcher="nvlink", dispatcher_reason=why)
        elif request.dispatcher == "nvlink":
            raise ValueError(f"dispatcher ('nvlink') {problem}")
        else:
            why = f"'nvlink' {problem.partition(': ')[0]}"
            plan = replace(plan, dispatcher="alltoall", dispatcher_reason=why)
    if request.dispatcher == "auto" and dist.get_rank() == 0:
        logger.info("dispatcher 'auto' is %r: %s", plan.dispatcher, plan.dispatcher_reason)
    return plan
