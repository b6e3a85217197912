"""parallelize_moe: collect the request, check it, agree on it between ranks, apply it.

The one place that knows every room. Order matters: expert and tensor sharding fix what a rank owns
(DTensors on ep, etp and tp), then FSDP2 shards that over the data ranks of each mesh.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, cast

import torch
import torch.distributed as dist
from torch import nn

from moecore._fields import check_arguments
from moecore.adapters.base import Adapter, swap_blocks
from moecore.agreement import check_equal_weights, check_same
from moecore.attention.context_parallel.group import ContextOptions, ContextParallel
from moecore.config import BalanceConfig
from moecore.fsdp.late_parameters import refuse_added
from moecore.fsdp.shard import FSDPOptions, find_blocks, is_whole, shard_model
from moecore.graphs.regions import compile_blocks, compiled_modules
from moecore.hf.context import context_model
from moecore.hf.device_map import refuse_accelerate
from moecore.hf.guards import refuse_save_pretrained, warn_about_cache
from moecore.hf.lora import adapt_experts, adapted, experts_unwrapped, refuse_peft_methods
from moecore.hf.outputs import refuse_lost_outputs
from moecore.hf.rows import tell_layers
from moecore.memory.apply import apply_memory
from moecore.memory.options import MemoryOptions
from moecore.mesh import Meshes, context_groups, split_context
from moecore.moe.backends import ExpertBackend
from moecore.moe.balance import BalanceGroups
from moecore.moe.dispatch.allgather import AllGatherDispatcher
from moecore.moe.dispatch.alltoall import AllToAllDispatcher
from moecore.moe.dispatch.exchange import ExchangePool
from moecore.moe.dispatch.local import LocalDispatcher
from moecore.moe.dispatch.nvlink import NVLinkDispatcher
from moecore.moe.dispatch.nvlink_options import NVLinkOptions
from moecore.moe.dispatch.peer_memory import find_problem
from moecore.moe.layer import MoELayer, RoutedLayer
from moecore.moe.placement import ExpertPlacement
from moecore.moe.records import Dispatcher
from moecore.moe.shared import SharedExpert
from moecore.moe.state import STATE_NAME, MoEState
from moecore.precision.apply import apply_precision, check_precision
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
    is_cut,
    model_entries,
)

logger = logging.getLogger("moecore.parallelize")


def parallelize_moe(
    model: nn.Module,
    meshes: Annotated[Meshes, "pass build_meshes(ParallelConfig(...))"],
    *,
    dispatcher: DispatcherName = "auto",
    nvlink: NVLinkOptions | None = None,
    expert_backend: ExpertBackend = "auto",
    memory: MemoryOptions | None = None,
    overlap_shared: bool = False,
    compile_dense: bool = False,
    balance: BalanceConfig | None = None,
    moe: Mapping[str, Any] | None = None,
    context: ContextOptions | None = None,
    precision: Precision | Recipe | PrecisionName | None = None,
    fsdp: FSDPOptions | None = None,
    loss: LossConvention = "mean",
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
        overlap_shared: on GPUs, run shared experts on a stream of their own. Experimental.
        compile_dense: run attention, norms and residual adds through torch.compile.
        balance: of every MoE layer; None keeps each one's own.
        moe: fields of `MoEConfig` for every MoE layer, such as a transformers model's: capacity,
            router_dtype, router_jitter.
        context: how attention over cp ranks communicates; None = by its heads.
        precision: which products are in FP8: "auto", a scaling or a recipe for all roles, or a
            record; None = none. Routed experts then need expert_backend "auto" or "triton".
        fsdp: FSDP2 choices; None = the defaults.
        loss: each rank's is a "mean" over its tokens, or a "sum" over the global token count.
        adapters: block class -> `(block, model) -> MoELayer`, before moecore's own.

    Raises:
        ValueError: for what does not fit, before any collective (blocks may be swapped already); on
            every rank when ranks differ in model, arguments or versions.
        NotImplementedError: for pp > 1, a model without tensor or context parallelism under tp > 1
            or cp > 1, and customised blocks of transformers.
    """
    check_arguments(parallelize_moe, locals())
    request = Request(
        meshes=meshes,
        dispatcher=dispatcher,
        nvlink=nvlink,
        expert_backend=expert_backend,
        memory=memory or MemoryOptions(),
        overlap_shared=overlap_shared,
        compile_dense=compile_dense,
        balance=balance,
        moe=dict(moe or {}),
        context=context,
        precision=Precision.of(precision),
        fsdp=fsdp or FSDPOptions(),
        loss=loss,
    )
    root = adapted(model)
    layers = _check(root, request, adapters or {})
    tell_layers(root)
    _agree(root, layers, request)
    _apply(root, layers, request)
    refuse_peft_methods(model)
    return model


def _check(
    model: nn.Module, request: Request, adapters: Mapping[type, Adapter]
) -> dict[str, RoutedLayer]:
    """Raise what one rank can know, before any collective; return the MoE layers by name."""
    check_request(model, request)
    refuse_lost_outputs(model)
    with experts_unwrapped(model) as wrapped:
        layers = swap_blocks(model, adapters)
        adapt_experts(wrapped, layers)
    check_layers(model, layers, request)
    if request.precision is not None:
        table = check_precision(model, request.precision)
        may_be_wide = request.precision.only_faster and bool(layers)  # a log line says why
        is_used = any(decided.recipe is not None for decided in table.values())
        if not is_used and not may_be_wide and not any(request.recipes(layers).values()):
            warnings.warn("precision is not used: the model has none of its roles", stacklevel=3)
    return layers


def _agree(model: nn.Module, layers: Mapping[str, RoutedLayer], request: Request) -> None:
    """Raise on every rank when ranks differ, before any other collective."""
    from moecore import __version__

    versions = {"torch.__version__": str(torch.__version__), "moecore.__version__": __version__}
    device_type = request.meshes.device_type
    recipes = {"recipes": request.recipes(layers)}  # "auto" asks what each rank's GPU can do
    entries = versions | request.entries() | model_entries(model, layers) | recipes
    check_same(entries, device_type)
    check_equal_weights(model, device_type)


def _apply(model: nn.Module, layers: Mapping[str, RoutedLayer], request: Request) -> None:
    """Shard the model as requested. Collective on GPUs where nvlink may be the dispatcher."""
    meshes = request.meshes
    exchanges = _open_exchanges(request)
    if meshes.parallel.tp > 1 and not is_cut(model):
        cast(Any, model).apply_tensor_parallel(meshes.dense["tp"])
    shared_by = _apply_context(model, request)
    stream = torch.cuda.Stream() if request.overlap_shared else None
    if request.precision is not None:
        apply_precision(model, request.precision)
    for name, layer in layers.items():
        layer.tracker.reset()  # what ran before is no part of a step
        layer.set_config(request.config_of(layer))
        _place_experts(name, layer, request, exchanges)
        if isinstance(layer, MoELayer) and layer.part("shared") is not None:
            layer.shared_stream = stream
            recipe = request.recipe_of(name, layer, "shared_experts")
            if recipe is not None and isinstance(layer.part("shared"), SharedExpert):
                layer.part("shared").multiply = (Fp8Products(recipe), Fp8Products(recipe))
    shard_model(model, meshes, request.fsdp, loss=request.loss)
    refuse_save_pretrained(model)
    refuse_accelerate(model)
    blocks, compiled = find_blocks(model), set[nn.Module]()
    if request.compile_dense:
        from moecore.memory.compiled import inductor_options  # which imports Inductor

        options = inductor_options(blocks, request.memory)
        compile_blocks(blocks, dynamic=False, options=options)
        compiled = {module for block in blocks for module in compiled_modules(block)}
    device = torch.device(meshes.device_type)
    apply_memory(blocks, request.memory, device, compiled=compiled)
    if request.compile_dense or request.memory.parts or request.memory.offload:
        warn_about_cache(model)
    groups = BalanceGroups(
        micro_batch=meshes.micro_batch_group,
        global_batch=meshes.stage_group if meshes.stage_group.size() > 1 else None,
        data_ranks=meshes.data_ranks,
        cp=meshes.parallel.cp,
        by_cp=shared_by,
    )
    check = partial(refuse_added, model)
    state = MoEState(layers, groups, loss=request.loss, exchanges=exchanges, check_parameters=check)
    setattr(model, STATE_NAME, state)
    setattr(model, REQUEST_NAME, request)


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


def _place_experts(
    name: str, layer: RoutedLayer, request: Request, exchanges: ExchangePool | None
) -> None:
    """Keep this rank's experts, multiplied as requested, behind a dispatcher."""
    meshes, experts = request.meshes, layer.part("experts")
    p, group = meshes.parallel, meshes.dispatch_group
    recipe = request.recipe_of(name, layer, "experts")
    recompute_fc1 = "expert_fc1" in request.memory.parts
    experts.set_backend(request.expert_backend, recompute_fc1=recompute_fc1, recipe=recipe)
    why_wide = request.why_wide(name, layer)
    if why_wide is not None:
        logger.info("precision leaves the experts of %r as they are: %s", name, why_wide)
    if p.ep * p.etp > 1 or is_whole(meshes):
        experts.shard(meshes.expert["ep", "etp"])
    num_experts = layer.config.num_experts
    if group is None:
        layer.dispatcher = LocalDispatcher(num_experts)
        return
    placement = ExpertPlacement(group=group, num_experts=num_experts, ep=p.ep, etp=p.etp)
    dispatcher: Dispatcher
    if exchanges is not None:
        dispatcher = NVLinkDispatcher(placement, exchanges)
    elif request.dispatcher == "allgather":
        dispatcher = AllGatherDispatcher(placement)
    else:
        dispatcher = AllToAllDispatcher(placement)
    layer.dispatcher = dispatcher


def _open_exchanges(request: Request) -> ExchangePool | None:
    """Return the exchanges of nvlink where that is the dispatcher, and None with any other.

    Raises:
        ValueError: when nvlink is asked for by name and cannot work here.
    """
    meshes, name = request.meshes, request.dispatcher
    group, options = meshes.dispatch_group, request.nvlink
    if group is None or name not in ("auto", "nvlink"):
        return None
    problem = None
    if name == "auto" and meshes.device_type == "cuda":
        problem = _memory_problem(meshes, options or NVLinkOptions())
    problem = problem or find_problem(group, meshes.device_type)
    if name == "nvlink" and problem is not None:
        raise ValueError(f"dispatcher ('nvlink') {problem}")
    if name == "auto" and dist.get_rank() == 0:
        chosen = "nvlink" if problem is None else "alltoall"
        why = "peer access among all GPUs of the group"
        if problem is not None:
            why = f"'nvlink' {problem.partition(': ')[0]}"
        logger.info("dispatcher 'auto' is %r: %s", chosen, why)
    if problem is not None:
        return None
    return ExchangePool(group, ep=meshes.parallel.ep, options=options)


def _memory_problem(meshes: Meshes, options: NVLinkOptions) -> str | None:
    """Return why nvlink must be asked for by name: its shapes are static, so its room is too."""
    if options.row_factor is not None or options.exact_rows:
        return None
    ep = meshes.parallel.ep
    return (
        "must have NVLinkOptions.row_factor (None), or every layer keeps room for any "
        f"routing, up to ep ({ep}) times the expert rows of a balanced one: set it, 2.0 say"
    )
