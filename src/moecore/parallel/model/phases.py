"""Phases of `parallelize_moe`: dispatchers, MoE layers, context parallelism, balance, pipeline."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from moecore.attention.context_parallel.local_tokens import ContextParallel
from moecore.base.options.dispatch import DISPATCHERS, NVLinkOptions
from moecore.base.options.layer import MoEConfig
from moecore.base.torch_private import is_gloo
from moecore.moe.aux_loss import list_aux_losses
from moecore.moe.balance import BalanceGroups
from moecore.moe.clones import Cloner
from moecore.moe.dispatch import nccl_ep
from moecore.moe.dispatch.allgather import AllGatherDispatcher
from moecore.moe.dispatch.alltoall import AllToAllDispatcher
from moecore.moe.dispatch.exchange_pool import ExchangePool
from moecore.moe.dispatch.hierarchical import HierarchicalDispatcher
from moecore.moe.dispatch.local import LocalDispatcher
from moecore.moe.dispatch.nvlink import NVLinkDispatcher
from moecore.moe.dispatch.peer_memory import find_local_peer_problem, find_peer_store_problem
from moecore.moe.layer import MoELayer
from moecore.moe.placement import ExpertPlacement, make_domain_placement
from moecore.moe.records import Dispatcher
from moecore.moe.shortage import BufferCapacities
from moecore.moe.state import MoEState
from moecore.parallel.arguments import SharedArguments
from moecore.parallel.mesh import (
    check_dispatch_domains,
    make_context_groups,
    make_domain_groups,
    split_context_group,
)
from moecore.parallel.model.checks import check_stage_layout
from moecore.parallel.model.parallel_state import ParallelState
from moecore.parallel.model.parameter_guards import check_no_added_parameter
from moecore.parallel.model.request import Request
from moecore.parallel.pipeline.layout import PipelineLayout, Stage
from moecore.parallel.pipeline.orders import PAIRING
from moecore.parallel.pipeline.run import Pipeline
from moecore.parallel.pipeline.schedule import make_schedule
from moecore.parallel.pipeline.stage_replicas import make_all_stages
from moecore.parallel.pipeline.stages import count_layers_and_mtp, remove_other_stages
from moecore.parallel.pipeline.transport import create_communicators
from moecore.precision.apply import make_linear_products

logger = logging.getLogger("moecore.parallelize")


def check_registered_buffers(_model: nn.Module, state: ParallelState) -> None:
    """Raise a ValueError if `FSDPOptions.nccl_ub` is set but NCCL shards no unit."""
    device_type, relation = state.plan.device_type, None
    if device_type != "cuda" or is_gloo(dist.group.WORLD, device_type):  # type: ignore[arg-type]
        relation = f"collectives of NCCL on GPUs, and those on {device_type} are gloo's"
    elif all(layout.ranks == 1 for unit in state.plan.units for layout in unit.layouts):
        relation = "parameters that several ranks shard, and no rank has such a parameter"
    if state.plan.nccl_ub and relation is not None:
        raise ValueError(f"FSDPOptions.nccl_ub (True) must go with {relation}: drop it")


def choose_dispatcher(request: Request) -> tuple[str, str]:
    """Return a dispatcher's name and the reason; "auto" = the choice needs a test of the GPUs."""
    meshes, name = request.meshes, request.dispatch.name
    num_ranks = meshes.parallel.ep * meshes.parallel.etp
    problem = find_local_peer_problem(num_ranks, meshes.device_type)
    if name == "nvlink" and problem is not None:
        raise ValueError(f"DispatchOptions.name ('nvlink') {problem}")
    if num_ranks == 1:
        return "local", "ep * etp is 1"
    if name != "auto":
        return name, "asked for"
    if problem is not None:
        return "alltoall", f"'nvlink' {_remove_advice(problem)}"
    return "auto", "'nvlink' if all GPUs of the group reach each other's memory, else 'alltoall'"


def resolve_dispatcher(model: nn.Module, state: ParallelState) -> None:
    """Replace "auto" in the plan after a test of peer access, and create groups. Collective."""
    request, plan = state.request, state.plan
    meshes, group = request.meshes, request.meshes.dispatch_group
    if group is None:
        return
    if plan.dispatcher == "hierarchical":
        check_dispatch_domains(meshes)  # its arguments are equal on all ranks
        state.domains = make_domain_groups(meshes)
        problem = find_peer_store_problem(state.domains.inside, meshes.device_type)
        state.stores_in = state.domains.inside if problem is None else None
        inner = "'nvlink'" if problem is None else "'alltoall': 'nvlink' " + _remove_advice(problem)
        plan = replace(plan, dispatcher_reason=f"asked for; inside of a domain {inner}")
    if plan.dispatcher == "nccl_ep":
        problem = nccl_ep.find_nccl_ep_problem(group, meshes.device_type)
        if problem is not None:
            raise ValueError(f"DispatchOptions.name ('nccl_ep') {problem}")
        state.ep_groups = nccl_ep.EPGroups(group, meshes.ranks_per_domain)
    if plan.dispatcher in ("auto", "nvlink"):
        problem = find_peer_store_problem(group, meshes.device_type)
        if problem is None:
            state.stores_in = group
            reason = "peer access among all GPUs of the group"
            if not _has_nvlink_request(request):
                reason += "; alltoall outside of forward_backward() and CUDA graphs"
            if request.pipeline is not None and request.pipeline.schedule in PAIRING:
                reason += f"; pairs of schedule {request.pipeline.schedule!r} take no turns over it"
            plan = replace(plan, dispatcher="nvlink", dispatcher_reason=reason)
        elif request.dispatch.name == "nvlink":
            raise ValueError(f"DispatchOptions.name ('nvlink') {problem}")
        else:
            reason = f"'nvlink' {_remove_advice(problem)}"
            plan = replace(plan, dispatcher="alltoall", dispatcher_reason=reason)
    if request.dispatch.name == "auto" and dist.get_rank() == 0:
        logger.info("dispatcher 'auto' is %r: %s", plan.dispatcher, plan.dispatcher_reason)
    state.plan = plan


def _remove_advice(error_text: str) -> str:
    return error_text.partition(": ")[0]


def _has_nvlink_request(request: Request) -> bool:
    """Whether the caller requested dispatcher "nvlink", explicitly or by its options."""
    has_options = request.dispatch.nvlink is not None or request.memory.stash is not None
    return request.dispatch.name == "nvlink" or has_options


def configure_moe_layers(model: nn.Module, state: ParallelState) -> None:
    """Set config, expert backend, FP8 recipes, dispatcher and clones of MoE layers, in place."""
    request, meshes = state.request, state.request.meshes
    if state.stores_in is not None:
        nvlink = request.dispatch.nvlink
        if state.domains is not None:  # a domain has rows of the tokens of all domains
            nvlink, num_domains = nvlink or NVLinkOptions(), state.domains.across.size()
            max_tokens = None if nvlink.max_tokens is None else nvlink.max_tokens * num_domains
            # Copy engines would also copy empty rows for the tokens of other domains.
            nvlink = replace(nvlink, max_tokens=max_tokens, overlap_weight_grads=False)
        state.exchanges = ExchangePool(
            state.stores_in,
            ep=meshes.parallel.ep,
            options=nvlink,
            fp8=request.dispatch.fp8,
            is_required=_has_nvlink_request(request),
        )
    stream = torch.cuda.Stream() if request.dense.overlap_shared else None
    layers = zip(state.layers.items(), state.plan.layers, strict=True)
    for number, ((name, layer), layer_plan) in enumerate(layers):
        recipes = dict(layer_plan.recipes)
        layer.tracker.reset()  # forwards before `parallelize_moe` do not count
        layer.set_config(request.make_layer_config(layer))
        layer.get_part("experts").set_backend(
            request.expert_backend,
            recompute_fc1="expert_fc1" in request.memory.parts,
            recipe=recipes["experts"],
        )
        if (problem := request.find_fp8_problem(name, layer)) is not None:
            logger.info("precision leaves the experts of %r as they are: %s", name, problem)
        adapters = layer.get_part("experts").num_adapters
        placement = _make_expert_placement(layer.config, request, (number, name), adapters)
        layer.dispatcher = _make_dispatcher(layer.config.num_experts * adapters, placement, state)
        clones = request.dispatch.clones
        if placement is not None and clones is not None and placement.num_clones:
            layer.cloner = Cloner(placement, meshes.expert.get_group("ep"), clones)
        if isinstance(layer, MoELayer) and layer.get_part("shared") is not None:
            layer.shared_stream = stream
            recipe = recipes.get("shared_experts")
            if recipe is not None:
                products = make_linear_products(recipe), make_linear_products(recipe)
                layer.get_part("shared").products = products


def _make_expert_placement(
    config: MoEConfig, request: Request, layer_idx_and_name: tuple[int, str], num_adapters: int
) -> ExpertPlacement | None:
    """Return the placement of a layer's experts; None = this rank has all experts."""
    meshes, clones = request.meshes, request.dispatch.clones
    group, p = meshes.dispatch_group, meshes.parallel
    if group is None:
        return None
    num_clones = 0 if clones is None or p.ep == 1 else clones.per_rank
    return ExpertPlacement(
        group=group,
        num_experts=config.num_experts,
        ep=p.ep,
        etp=p.etp,
        num_clones=num_clones,
        num_adapters=num_adapters,
        num_groups=config.num_groups,
        top_groups=config.top_groups,
        layer=layer_idx_and_name,
    )


def _make_dispatcher(
    num_experts: int, placement: ExpertPlacement | None, state: ParallelState
) -> Dispatcher:
    """Create a layer's dispatcher; `placement` None = this rank has all experts."""
    if placement is None:
        return LocalDispatcher(num_experts)
    if state.domains is None:
        return _make_flat_dispatcher(placement, state)
    inside, across = state.domains
    domain = make_domain_placement(placement, inside, across.size())
    parts = (domain, _make_flat_dispatcher(domain, state), across)
    return HierarchicalDispatcher(placement, *parts, fp8=state.request.dispatch.fp8)


def _make_flat_dispatcher(placement: ExpertPlacement, state: ParallelState) -> Dispatcher:
    """Create the dispatcher that sends tokens directly between all ranks of a placement."""
    make = DISPATCHERS[state.plan.dispatcher]
    if make is not None:
        return cast(Dispatcher, make(placement))
    if state.exchanges is not None:
        return NVLinkDispatcher(placement, state.exchanges)
    if state.ep_groups is not None:
        return nccl_ep.NCCLEPDispatcher(placement, state.ep_groups)
    if state.plan.dispatcher == "allgather":
        return AllGatherDispatcher(placement)
    return AllToAllDispatcher(placement, fp8=state.request.dispatch.fp8)


def apply_context_parallel(model: nn.Module, state: ParallelState) -> None:
    """Pass the context parallel groups to the model. Collective if groups are created."""
    request, meshes = state.request, state.request.meshes
    if not request.is_dynamic and meshes.parallel.cp == 1:
        return
    places: dict[int, ContextParallel] = {}
    for cp, options in request.context_options(model).items():
        if request.is_dynamic:
            group, state.shared_by[cp] = make_context_groups(meshes, cp)
        else:
            group = meshes.dense.get_group("cp")
        a2a, ring = (group if options.way == way else None for way in ("a2a", "p2p"))
        if options.way == "a2a+p2p":
            assert options.a2a_ranks is not None, "resolved options have the number"
            a2a, ring = split_context_group(meshes, group.size(), options.a2a_ranks)
        places[cp] = ContextParallel(group, a2a, ring)
    owner = request.family.make_context_parallel_model(model)
    if request.is_dynamic:
        owner.apply_context_groups(places)
    else:
        owner.apply_context_parallel(places[meshes.parallel.cp])


def create_balance_state(model: nn.Module, state: ParallelState) -> None:
    """Set `state.state` (load balance) and `state.capacity` (limits of exchange buffers)."""
    meshes = state.request.meshes
    groups = BalanceGroups(
        micro_batch=meshes.micro_batch_group,
        global_batch=meshes.stage_group if meshes.stage_group.size() > 1 else None,
        data_ranks=meshes.data_ranks,
        cp=meshes.parallel.cp,
        by_cp=state.shared_by,
    )
    state.state = MoEState(
        state.layers,
        groups,
        loss=state.request.loss,
        other_losses=None if state.request.indexer is None else list_aux_losses(model),
        check_parameters=partial(check_no_added_parameter, model),
        device=meshes.device,
    )
    tokens = None if state.exchanges is None else state.exchanges.tokens
    state.capacity = BufferCapacities(state.exchanges, tokens, state.stash, device=meshes.device)


def install_argument_checks(model: nn.Module, state: ParallelState) -> None:
    """Install the hook that compares arguments of ranks with the same sequences. Collective."""
    meshes = state.request.meshes
    stages = () if meshes.pipeline_groups is None else meshes.pipeline_groups[:1]
    of_rows = {0: meshes.micro_batch_group, **state.shared_by}
    groups = {cp: stages if group is None else (*stages, group) for cp, group in of_rows.items()}
    if not any(groups.values()):
        return
    state.arguments = SharedArguments(groups, meshes.device_type)
    if not stages:  # otherwise `run_pipeline` compares them
        hook = state.arguments.compare_in_pre_hook
        model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)


def select_local_stages(
    model: nn.Module, request: Request
) -> tuple[PipelineLayout | None, Sequence[Stage]]:
    """Replace other ranks' modules; return (layout, this rank's stages), (None, ()) for pp 1."""
    pp = request.meshes.parallel.pp
    if pp == 1 or request.pipeline is None:
        return None, ()
    staged = request.family.make_staged_model(model)
    bound = staged.stage_parts().bound_layers
    layout = request.pipeline.stages(pp, *count_layers_and_mtp(staged), bound)
    rank_of = make_schedule(
        request.pipeline.schedule, pp=pp, chunks=layout.chunks(pp), num_micro_batches=1
    ).rank_of
    check_stage_layout(layout, rank_of, bound, request)
    local_stages = [s for s in layout.stages if rank_of[s.index] == request.meshes.pp_rank]
    remove_other_stages(staged, local_stages)
    return layout, local_stages


def apply_pipeline(model: nn.Module, state: ParallelState) -> None:
    """Create `state.pipeline`; ValueError if stages' copies of a parameter differ. Collective."""
    request, meshes = state.request, state.request.meshes
    if state.layout is None:
        return
    assert request.pipeline is not None and meshes.pipeline_groups is not None
    assert state.arguments is not None and state.engine is not None
    pipeline = state.pipeline = Pipeline(
        model=request.family.make_staged_model(model),
        engine=state.engine,
        config=request.pipeline,
        layout=state.layout,
        rank=meshes.pp_rank,
        groups=meshes.pipeline_groups,
        arguments=state.arguments,
        dtype=request.fsdp.param_dtype or state.dtype,
        device=meshes.device,
        offload=state.offload,
    )
    rank_of = pipeline.build_schedule(1).rank_of
    create_communicators(pipeline.groups, rank_of, pipeline.rank, pipeline.device)
    state.all_stages = make_all_stages(model, meshes)


def group_blocks_by_stage(
    model: nn.Module, blocks: Sequence[nn.Module], state: ParallelState
) -> dict[int, list[nn.Module]] | None:
    """Return {stage index: blocks of the stage} of this rank's stages; None = no stages."""
    if state.layout is None:
        return None
    staged = state.request.family.make_staged_model(model)
    parts, blocks_of = staged.stage_parts(), {}
    for stage in state.stages:
        names = [f"{parts.layers}.{index}" for index in stage.layers]
        names += [f"{parts.mtp}.{index}" for index in stage.mtp]
        inside = {module for name in names for module in staged.get_submodule(name).modules()}
        blocks_of[stage.index] = [block for block in blocks if block in inside]
    return blocks_of
