"""`ParallelState`: the record that `parallelize_moe` stores on a model, and its accessors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecore.base.params import PARALLEL_STATE as PARALLEL_STATE
from moecore.base.params import clean_name
from moecore.base.torch_private import get_local_tensor
from moecore.moe.dispatch.exchange_pool import ExchangePool
from moecore.moe.dispatch.nccl_ep import EPGroups
from moecore.moe.layer import RoutedLayer
from moecore.moe.shortage import BufferCapacities, BufferOwner
from moecore.moe.state import MoEState
from moecore.parallel.arguments import SharedArguments
from moecore.parallel.fsdp.engine import UnitEngine
from moecore.parallel.fsdp.plan import ShardPlan
from moecore.parallel.fsdp.progress import Progress
from moecore.parallel.mesh import DomainGroups
from moecore.parallel.model.request import Request
from moecore.parallel.pipeline.layout import PipelineLayout, Stage
from moecore.parallel.pipeline.run import Pipeline, StageOffload
from moecore.parallel.pipeline.stage_replicas import AllStages, redistribute_grad


@dataclass(kw_only=True, slots=True)
class ParallelState:
    """The state of a parallelized model, to which each phase of `parallelize_moe` adds results."""

    request: Request
    plan: ShardPlan
    layers: Mapping[str, RoutedLayer]  # the model's MoE layers by name
    dtype: torch.dtype  # dtype of the model's first parameter before sharding
    layout: PipelineLayout | None  # None = no pipeline stages
    stages: Sequence[Stage]  # stages of this rank
    exchanges: ExchangePool | None = None  # only with dispatcher "nvlink"
    ep_groups: EPGroups | None = None  # only with dispatcher "nccl_ep"
    stores_in: dist.ProcessGroup | None = None  # ranks that write to each other's memory
    domains: DomainGroups | None = None  # only with dispatcher "hierarchical"
    # For dynamic context parallelism: the ranks that share a micro-batch, by cp.
    shared_by: dict[int, dist.ProcessGroup] = field(default_factory=dict)
    arguments: SharedArguments | None = None  # None = no ranks share rows
    engine: UnitEngine | None = None  # None = the module is a copy of a parallelized model
    compiled: set[nn.Module] = field(default_factory=set)  # modules inside compiled modules
    offload: StageOffload | None = None
    stash: BufferOwner | None = None
    state: MoEState | None = None  # the balance record; None before `create_balance_state`
    capacity: BufferCapacities | None = None  # capacity of exchanges and stash
    pipeline: Pipeline | None = None  # None = no pipeline stages
    all_stages: AllStages | None = None  # which stages have each parameter; None = no stages

    @property
    def pools(self) -> list[ExchangePool | EPGroups | UnitEngine]:
        """The owners of memory that peer ranks can access; an owner's `close` frees its memory."""
        owners = (self.exchanges, self.ep_groups, self.engine)
        return [owner for owner in owners if owner is not None]

    def list_blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return the modules of `model` that are blocks in the plan, such as decoder layers."""
        return [model.get_submodule(name) for name in self.plan.blocks]


def get_parallel_state(model: nn.Module) -> ParallelState | None:
    """Return the state of a parallelized model or of its peft wrapper; None = a plain model."""
    state: ParallelState | None = getattr(model, PARALLEL_STATE, None)
    return state


def list_parallel_states(model: nn.Module) -> list[ParallelState]:
    """Return the state of a parallelized model, or the states of its parallelized submodules."""
    root_state = get_parallel_state(model)
    if root_state is not None:  # submodules have no record then
        return [root_state]
    states = (get_parallel_state(module) for module in model.modules())
    return [record for record in states if record is not None]


def get_request(model: nn.Module) -> Request | None:
    """Return the arguments that `parallelize_moe` received; None = a plain model."""
    state = get_parallel_state(model)
    return None if state is None else state.request


def list_engines(model: nn.Module) -> list[UnitEngine]:
    """Return the `UnitEngine` of a model, or the engines of its parallelized submodules."""
    return [state.engine for state in list_parallel_states(model) if state.engine is not None]


def end_argument_comparison(model: nn.Module) -> Tensor | None:
    """End a step's comparison of arguments; return whether any differed; None = no comparison."""
    flags = (r.arguments.end_step() for r in list_parallel_states(model) if r.arguments is not None)
    differences = [flag for flag in flags if flag is not None]
    return torch.stack(differences).any() if differences else None


def get_moe_state(model: nn.Module) -> MoEState:
    """Return a parallelized model's load-balance state; raise a ValueError for any other model."""
    record = get_parallel_state(model)
    if record is None or record.state is None:
        raise ValueError(
            f"model ({type(model).__name__}) must be parallelized to have a balance record: "
            "call parallelize_moe(model, meshes) first"
        )
    return record.state


def get_capacity(model: nn.Module) -> BufferCapacities:
    """Return the capacities of a model's exchange buffers and of its buffer of saved rows."""
    state = get_parallel_state(model)
    assert state is not None and state.capacity is not None, "its balance record was found"
    return state.capacity


def reshard_units(model: nn.Module) -> None:
    """Reshard all units (FSDP parameter groups) of a model; a plain model does not change."""
    for engine in list_engines(model):
        engine.reshard()


def get_progress(model: nn.Module) -> Progress | None:
    """Return the counts of micro-batches of a model's `TrainStep`; None without a `TrainStep`."""
    records = (engine.progress() for engine in list_engines(model))
    return next((progress for progress in records if progress is not None), None)


def find_staged_module(model: nn.Module) -> tuple[nn.Module, AllStages | None]:
    """Return the submodule with pipeline stages and its `AllStages`; (model, None) without pp."""
    states = ((m, vars(m)[PARALLEL_STATE]) for m in model.modules() if PARALLEL_STATE in vars(m))
    owners = [(m, state.all_stages) for m, state in states if state.all_stages is not None]
    if len(owners) > 1:
        raise ValueError(
            f"model ({len(owners)} parallelized ones with pp > 1) must be one: parallelize it whole"
        )
    return owners[0] if owners else (model, None)


@torch.no_grad()
def all_reduce_stage_copies(model: nn.Module) -> None:
    """All-reduce (sum) the gradients of parameters that several stages have. No host sync."""
    owner, stages = find_staged_module(model)
    if stages is None:
        return
    named = {clean_name(name): param for name, param in owner.named_parameters()}
    for name, group in stages.holders.items():
        param = named[name]
        if not param.requires_grad:
            continue
        redistribute_grad(param)
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        part = get_local_tensor(param.grad)
        total = part.contiguous()
        if total.numel():
            dist.all_reduce(total, group=group)
        if total is not part:
            part.copy_(total)
