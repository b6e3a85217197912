"""`AllStages`: the parameters of all pipeline stages, and which stages share a parameter.

    parallelize_moe -> make_all_stages(model, meshes) -> AllStages, stored on the model
    last micro-batch -> all_reduce_stage_copies(model) -> clip, over all stages

Parameter names are the names in the full model. If several stages have one name, the stages have
copies of one parameter: an embedding table that the first stage, multi-token prediction and a tied
head read. Copies have equal values. Their gradients are summed over the stages; each rank sums with
the ranks of the same index in the other stages.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moecore.base.params import clean_name
from moecore.base.rank_checks import (
    find_differing_tensors,
    gather_objects,
    raise_problem_on_all_ranks,
)
from moecore.base.streams import copy_to_device
from moecore.base.torch_private import get_default_timeout, get_local_tensor
from moecore.parallel.mesh import Meshes


@dataclass(frozen=True, kw_only=True, slots=True)
class AllStages:
    """The parameter names of all pipeline stages, and process groups for shared parameters."""

    pp: int
    pp_rank: int
    # Parameter name -> number of stages that have it. The order is equal on every rank: by stage,
    # then in the order of the stage's model.
    num_holders: Mapping[str, int]
    # Name of a parameter that this stage shares -> the ranks that have the same shard of it.
    holders: Mapping[str, dist.ProcessGroup]
    device: torch.device  # of the parameters, once they are real

    def count_copies(self, param_name: str) -> int:
        """Return the number of ranks whose stage has the parameter `param_name`."""
        return self.num_holders[clean_name(param_name)] * (dist.get_world_size() // self.pp)

    def scatter_values(self, param_names: list[str], values: Tensor) -> Tensor:
        """Return a tensor over `num_holders` with `values[i]` for `param_names[i]`, otherwise 0."""
        order = {name: i for i, name in enumerate(self.num_holders)}
        indices = [order[clean_name(name)] for name in param_names]
        index = torch.tensor(indices, dtype=torch.int64, device="cpu")
        placed = values.new_zeros(len(order))
        return placed.index_copy_(0, copy_to_device(index, values.device), values)


def make_all_stages(model: nn.Module, meshes: Meshes) -> AllStages:
    """All-gather all stages' parameter names; ValueError if shared values differ. Host sync."""
    peers, device_type = meshes.dense.get_group("pp"), meshes.device_type
    named = {clean_name(name): param for name, param in model.named_parameters()}
    forms = gather_objects({name: _describe_parameter(p) for name, p in named.items()}, peers)
    raise_problem_on_all_ranks(_find_unequal_copies(forms), device_type, group=peers)
    stages_of: dict[str, list[int]] = {}
    for pp_rank, forms_of_rank in enumerate(forms):
        for name in forms_of_rank:
            stages_of.setdefault(name, []).append(pp_rank)
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}  # of this rank, by the stages
    size = meshes.stage_group.size()
    for stages in sorted({tuple(s) for s in stages_of.values() if len(s) > 1}):
        for i in range(size):  # the i-th ranks of the stages
            ranks = [stage * size + i for stage in stages]
            new_group: Any = dist.new_group(ranks, timeout=get_default_timeout())
            if dist.get_rank() in ranks:
                groups[stages] = new_group
    shared = {n: groups[tuple(s)] for n, s in stages_of.items() if tuple(s) in groups}
    different, problem = list[str](), None
    for group in groups.values():
        names = [name for name, of in shared.items() if of is group]
        tensors = {name: get_local_tensor(named[name].detach()) for name in names}
        different += find_differing_tensors(tensors, device_type, group=group)
    if different:
        problem = (
            f"weights of {different[0]} must be equal on the stages that hold it: seed every rank "
            "alike or load one checkpoint"
        )
    raise_problem_on_all_ranks(problem, device_type, group=peers)
    return AllStages(
        pp=meshes.parallel.pp,
        pp_rank=meshes.pp_rank,
        num_holders={name: len(stages) for name, stages in stages_of.items()},
        holders=shared,
        device=meshes.device,
    )


def redistribute_grad(param: nn.Parameter) -> None:
    """Redistribute `.grad` of a DTensor parameter to its placements, if they differ. Collective."""
    grad = param.grad
    if not isinstance(param, DTensor) or not isinstance(grad, DTensor):
        return
    if grad.placements != param.placements:
        param.grad = grad.redistribute(placements=param.placements)


def _describe_parameter(param: nn.Parameter) -> str:
    kind = "trained" if param.requires_grad else "frozen"
    memory = "on meta" if param.is_meta else "real"
    sharding = f"sharded as {param.placements}" if isinstance(param, DTensor) else "not sharded"
    return f"{param.dtype} {tuple(param.shape)} {kind} {memory} {sharding}"


def _find_unequal_copies(descriptions: list[dict[str, str]]) -> str | None:
    """Return an error text if a parameter's descriptions by pp rank differ, otherwise None."""
    first: dict[str, tuple[int, str]] = {}
    for pp_rank, forms_of_rank in enumerate(descriptions):
        for name, form in forms_of_rank.items():
            before, expected_form = first.setdefault(name, (pp_rank, form))
            if form != expected_form:
                return (
                    f"{name} of pp rank {pp_rank} ({form}) must be as that of pp rank {before} "
                    f"({expected_form}): build the model alike everywhere"
                )
    return None
