"""FSDP2 units on two meshes: a block on the dense mesh, its experts on the expert mesh inside it.

    gathered    root (embedding, final norm) -> blocks -> head
    reduced     head -> blocks, last to first -> root, when backward ends

Experts that no other rank holds are left out (`fsdp/local_weights.py`): there is nothing to gather.
Under mixed precision the routers of a list of blocks are a unit as well (`fsdp/resident.py`): their
weights stay in their own dtype. A unit each would cost the host as much as the blocks do. They are
gathered with the first block and reduced when backward has left it, or ended: until then their
gradients are whole, 50 MB for Qwen3-30B-A3B, 430 MB for DeepSeek-V3.

Note "head": as part of the root the head would be gathered before the first block and reduced after
the last gradient, with nothing to hide behind. As a unit it is gathered while the last block runs,
stays so until backward, as the root does, and is reduced first. FSDP2 gathers a unit for the
forward of its module alone, and reduces it behind that forward's backward. So only a head is one
whose weight nothing but its own forward reads: `moecore.models`' own. Any other model's stays with
the root, since losses often read `lm_head.weight` themselves, and so does a head that is tied.
Multi-token prediction runs the head again. Backward then frees it after each use but has its
gradient at the last one only, which is when it is reduced. A head declares itself by the attribute
`is_fsdp_head`.

Note "gradient scale": every data rank r has its own loss L_r. In the "mean" convention a gradient
is (1 / data_ranks) * sum_r dL_r/dw. Dense gradients sum over the dense FSDP ranks. Expert gradients
need fewer hops: the dispatcher's backward has already brought the contributions of all ranks of
the ep x etp group to the rank that owns the expert, so the sum over the expert FSDP ranks
completes the same sum over data ranks; only FSDP's default divisor (its own group size) would be
wrong. cp ranks, over which both meshes shard too, bring parts of one L_r. So every unit, dense or
expert, gets the divisor data_ranks. In the "sum" convention the loss is already divided by the
global token count, and every unit's divisor is 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Annotated

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from moecore._distributed import is_gloo
from moecore._fields import Count, CountOrZero, OneOf, check_fields
from moecore.fsdp.local_weights import WholeWeights
from moecore.fsdp.resident import RESIDENT, ResidentUnits
from moecore.mesh import Meshes
from moecore.moe.experts import Experts
from moecore.moe.layer import MoELayer, RoutedLayer
from moecore.moe.params import ParamReader
from moecore.moe.router import Router


@dataclass(frozen=True, kw_only=True, slots=True)
class FSDPOptions:
    """Choices of `parallelize_moe` for FSDP2.

    Attributes:
        param_dtype: dtype of compute and all-gathers, fp32, bf16, or fp16 with a loss scale
            (`TrainStep(loss_scale=...)`); None = the parameters' own.
        reduce_dtype: dtype in which gradients are reduced, fp32 or bf16.
        reshard_after_forward: free a block's gathered parameters between forward and backward;
            embedding, final norm and head stay gathered.
        reshard_experts: the same for routed experts, usually most of the memory; None = like the
            others. Experts that no other rank holds are not gathered: they free their cast weights.
        prefetch_blocks: how many blocks ahead parameters are gathered, in whole units; 0 = FSDP2's
            own order, which loses its overlap behind the dispatcher's host sync.
        blocks_per_unit: blocks that are gathered and reduced together; experts stay a unit each.
            Fewer, larger collectives and less host time, for the memory of as many gathered blocks.

    Raises:
        ValueError: for a dtype or a number that is not among these.
    """

    param_dtype: (
        Annotated[torch.dtype, OneOf((torch.float32, torch.bfloat16, torch.float16))] | None
    ) = None
    reduce_dtype: Annotated[
        torch.dtype, OneOf((torch.float32, torch.bfloat16)), "fp16 sums overflow"
    ] = torch.float32
    reshard_after_forward: bool = True
    reshard_experts: bool | None = None
    prefetch_blocks: Annotated[CountOrZero, "use 0 to leave the order to FSDP2"] = 1
    blocks_per_unit: Annotated[Count, "use 1 for a unit per block"] = 1

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def reshards_experts(self) -> bool:
        """`reshard_experts`, or what the others do."""
        if self.reshard_experts is None:
            return self.reshard_after_forward
        return self.reshard_experts


def shard_model(model: nn.Module, meshes: Meshes, options: FSDPOptions, *, loss: str) -> None:
    """Apply FSDP2: experts on the expert mesh, all else on the dense mesh. In place.

    Args:
        model: its routed experts are already DTensors on (ep, etp) where those exceed 1, or where
            they are whole.
        meshes: both views.
        options: FSDP2 choices.
        loss: "mean" or "sum"; see the note "gradient scale".
    """
    units = find_units(model, options)
    divisor = float(meshes.data_ranks) if loss == "mean" else 1.0
    policy = MixedPrecisionPolicy(options.param_dtype, options.reduce_dtype)
    # The experts' inputs hold fp32 routing weights that a cast would round; a head's are as the
    # blocks left them.
    uncast = replace(policy, cast_forward_inputs=False)
    router_policy = replace(uncast, param_dtype=None, reduce_dtype=torch.float32)
    whole: set[nn.Parameter] = set()
    shard_dense = partial(fully_shard, mesh=meshes.dense_fsdp, ignored_params=whole)
    for routers in units.routers:  # small: gathered once for forward and backward
        shard_dense(routers, mp_policy=router_policy, reshard_after_forward=False)
    for experts in units.experts:
        reshard = options.reshards_experts
        if is_whole(meshes):
            experts.reader = WholeWeights(options.param_dtype, divisor, keep=not reshard)
            whole.update(experts.parameters())
            continue
        experts.reader = ParamReader(keep=not reshard, is_gathered=True)
        fully_shard(
            experts,
            mesh=meshes.expert_fsdp,
            mp_policy=uncast,
            reshard_after_forward=reshard,
            shard_placement_fn=_expert_placement(experts, meshes),
        )
    for group in units.groups:
        if group != [model]:
            shard_dense(
                group, mp_policy=policy, reshard_after_forward=options.reshard_after_forward
            )
    for head in units.heads:
        shard_dense(head, mp_policy=uncast, reshard_after_forward=False)
    shard_dense(model, mp_policy=policy)
    setattr(model, RESIDENT, ResidentUnits(model, _find_kept(model, units, meshes, options)))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            is_experts = isinstance(module, Experts)
            _set_divisor(module, divisor, meshes.expert_fsdp if is_experts else meshes.dense_fsdp)
    if options.prefetch_blocks:
        first_routers = {unit[0] for unit in units.routers}
        blocks = [
            [group[0], *_parts(group, first_routers, whole_experts=is_whole(meshes))]
            for group in units.groups
        ]
        ahead = -(-options.prefetch_blocks // options.blocks_per_unit)
        _set_prefetch(model, blocks, units.heads, ahead)


@dataclass(frozen=True, kw_only=True, slots=True)
class Units:
    """What of a model becomes FSDP2 units; the root is one too, with all that is left.

    Attributes:
        groups: blocks that are one unit.
        routers: those that are one unit, apart from their blocks' units: all of a list of blocks
            that have one dtype.
        experts: a unit each, unless they are whole.
        heads: a unit each.
    """

    groups: list[list[nn.Module]]
    routers: list[list[nn.Module]]
    experts: list[Experts]
    heads: list[nn.Module]


def find_units(model: nn.Module, options: FSDPOptions) -> Units:
    """Return the units of a model whose MoE blocks are MoELayers."""
    blocks = find_blocks(model)
    layers = [m for m in model.modules() if isinstance(m, RoutedLayer)]
    stacks = [_layers(stack) for stack in _group(model, blocks, max(len(blocks), 1))]
    in_blocks = {layer for stack in stacks for layer in stack}
    stacks.append([m for m in layers if m not in in_blocks])
    return Units(
        groups=_group(model, blocks, options.blocks_per_unit),
        routers=[unit for stack in stacks for unit in _separate_routers(stack, options)],
        experts=[m.part("experts") for m in layers],
        heads=find_heads(model, blocks),
    )


def _find_kept(
    model: nn.Module, units: Units, meshes: Meshes, options: FSDPOptions
) -> list[nn.Module]:
    """Return one module of each unit that forward leaves unsharded."""
    kept = [*units.heads, model, *(routers[0] for routers in units.routers)]
    if not options.reshards_experts and not is_whole(meshes):
        kept += units.experts
    if not options.reshard_after_forward:
        kept += [group[0] for group in units.groups if group != [model]]
    return kept


def is_whole(meshes: Meshes) -> bool:
    """Whether a rank's experts are no other rank's: see `fsdp/local_weights.py`."""
    return meshes.expert_fsdp.size() == 1


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules that become FSDP2 units, in order.

    They are the entries of each outermost ModuleList, ModuleDict or Sequential that holds a
    MoELayer anywhere (a decoder's layers, dense ones included), or of every one in a model without
    MoE layers. MoE layers outside of any such container are units of their own. An entry that
    shares a parameter with a module outside of it (an embedding tied to the head) is left to the
    root unit: two units would train two copies.
    """
    blocks: list[nn.Module] = []
    is_dense = not _layers([model])

    def visit(module: nn.Module) -> None:
        if not is_dense and not _layers([module]):
            return
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            for child in module.children():
                if isinstance(child, nn.ModuleList | nn.ModuleDict):
                    visit(child)
                elif _has_parameters(child) and not isinstance(child, Experts):
                    blocks.append(child)
        elif isinstance(module, MoELayer):
            blocks.append(module)
        else:
            for child in module.children():
                visit(child)

    visit(model)
    # One that stands at two places is one unit.
    return [b for b in dict.fromkeys(blocks) if b is model or not is_tied(b, model)]


def find_heads(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """Return the heads that are FSDP2 units of their own, in order: see the note "head".

    They come after a block, are in none, and share no parameter with another module.

    Args:
        model: the whole model.
        blocks: of `find_blocks`.
    """
    heads: list[nn.Module] = []
    in_blocks = {module for block in blocks for module in block.modules()}
    after_a_block = False
    for module in model.modules():
        after_a_block |= module in blocks
        is_head = getattr(module, "is_fsdp_head", False)
        is_head &= module is not model and module not in in_blocks
        if is_head and after_a_block and _has_parameters(module) and not is_tied(module, model):
            heads.append(module)
    return heads


def is_tied(block: nn.Module, model: nn.Module) -> bool:
    """Whether a parameter of the block is also one of a module that is reached without it."""
    own = {id(p) for p in block.parameters()}
    reached: set[nn.Module] = set()

    def visit(module: nn.Module) -> bool:
        if module is block or module in reached:
            return False
        reached.add(module)
        if any(id(p) in own for p in module.parameters(recurse=False)):
            return True
        return any(visit(child) for child in module.children())

    return visit(model)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _expert_placement(experts: Experts, meshes: Meshes) -> Callable[[nn.Parameter], Shard]:
    """Choose the dim over which FSDP2 shards an expert parameter.

    Whole experts (dim 0) where the local count divides evenly. Otherwise the model dim: with fewer
    experts than shards, sharding dim 0 would leave ranks empty. A strided w1 takes the model dim
    too, because DTensor cannot gather two strided dims. Biases are small and shard dim 0.
    """
    size = meshes.expert_fsdp.size(meshes.expert_fsdp.ndim - 1)
    num_local = experts.config.num_experts // meshes.parallel.ep
    strided = experts.is_strided and meshes.parallel.etp > 1
    whole_experts = num_local % size == 0 and not strided
    model_dim_divides = experts.config.expert_dim % size == 0

    def placement(param: nn.Parameter) -> Shard:
        dim = experts.model_dim_of(param)
        return Shard(0 if dim is None or whole_experts or not model_dim_divides else dim)

    return placement


def _set_divisor(unit: FSDPModule, divisor: float, mesh: DeviceMesh) -> None:
    """Set what the summed gradient is divided by.

    gloo has no scaled sum, so there FSDP2 must sum and divide afterwards. That switch must stay
    off for a shard group of one rank, where FSDP2 (2.11 to 2.13) would then divide twice.
    """
    unit.set_gradient_divide_factor(divisor)
    group = mesh.get_group(mesh.ndim - 1)
    sums_first = is_gloo(group, mesh.device_type) and group.size() > 1
    unit.set_force_sum_reduction_for_comms(sums_first)


def keeps_precision(router: Router, options: FSDPOptions) -> bool:
    """Whether mixed precision would round the router's weight, and so change choices.

    Such routers are a unit of their own, gathered and reduced in the dtype of their parameters.
    """
    return options.param_dtype not in (None, router.weight.dtype)


def _group(model: nn.Module, blocks: list[nn.Module], size: int) -> list[list[nn.Module]]:
    """Return neighbours of one list of blocks together, `size` at most."""
    list_of = _outermost_lists(model)
    groups: list[list[nn.Module]] = []
    for block in blocks:
        last = groups[-1] if groups else []
        if last and len(last) < size and list_of.get(last[0]) is list_of.get(block) is not None:
            last.append(block)
        else:
            groups.append([block])
    return groups


def _outermost_lists(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return the outermost list of modules that each module stands in."""
    list_of: dict[nn.Module, nn.Module] = {}
    for module in model.modules():  # outer ones first
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            for inner in module.modules():
                list_of.setdefault(inner, module)
    return list_of


def _separate_routers(layers: list[RoutedLayer], options: FSDPOptions) -> list[list[nn.Module]]:
    """Return the routers that are no part of their blocks' units, those of one dtype together."""
    of_dtype: dict[torch.dtype, list[nn.Module]] = {}
    for router in (m.part("router") for m in layers):
        if router is not None and keeps_precision(router, options):
            of_dtype.setdefault(router.weight.dtype, []).append(router)
    return list(of_dtype.values())


def _layers(blocks: list[nn.Module]) -> list[RoutedLayer]:
    return [m for block in blocks for m in block.modules() if isinstance(m, RoutedLayer)]


def _parts(
    blocks: list[nn.Module], first_routers: set[nn.Module], *, whole_experts: bool
) -> list[nn.Module]:
    """Return one module of each unit that begins in a group of blocks, in the order of first use.

    Args:
        blocks: the group.
        first_routers: the first of each unit of routers.
        whole_experts: whether experts are no units.
    """
    layers = _layers(blocks)
    parts = [m.part("router") for m in layers if m.part("router") in first_routers]
    return parts if whole_experts else [*parts, *(m.part("experts") for m in layers)]


def _set_prefetch(
    model: nn.Module, blocks: list[list[nn.Module]], heads: list[nn.Module], ahead: int
) -> None:
    """Gather parameters `ahead` groups of blocks early, in the order in which they are used.

    Forward stays within one list of blocks and the head behind it. The next list may not run
    (multi-token prediction without labels), and FSDP2 would then keep the gathered values for a
    forward after later steps.

    Args:
        model: the whole model.
        blocks: one module of each unit of a group of blocks, in the order of first use.
        heads: of `find_heads`; each counts as one more group.
        ahead: how many groups.
    """
    place = {module: i for i, module in enumerate(model.modules())}
    forward = sorted([*blocks, *([head] for head in heads)], key=lambda units: place[units[0]])
    list_of = _outermost_lists(model)
    of_unit = {units[0]: list_of.get(units[0]) for units in forward}
    for (before, *_), (unit, *_) in pairwise(forward):
        if unit in heads:
            of_unit[unit] = of_unit[before]
    for i, units in enumerate(forward):
        same = [u for u in forward[i + 1 :] if of_unit[u[0]] is of_unit[units[0]]]
        later = [unit for group in same[:ahead] for unit in group]
        for j, unit in enumerate(units):
            unit.set_modules_to_forward_prefetch(units[j + 1 :] + later)  # type: ignore[operator]
    _set_backward_prefetch([[u[0], *reversed(u[1:])] for u in reversed(forward)], heads, ahead)


def _set_backward_prefetch(
    backward: list[list[nn.Module]], heads: list[nn.Module], ahead: int
) -> None:
    """Do the same for backward, where a head runs again before each list of blocks behind it.

    Such a head gathers what ran before it in forward, which FSDP2 knows and this order does not.
    """
    for i, units in enumerate(backward):
        if units[0] in heads and i > 0:
            continue
        rest = backward[i + 1 :]
        again = [group[0] for group in rest if group[0] in heads]
        later = dict.fromkeys([*again, *(unit for group in rest[:ahead] for unit in group)])
        for j, unit in enumerate(units):
            unit.set_modules_to_backward_prefetch([*units[j + 1 :], *later])  # type: ignore[operator]
