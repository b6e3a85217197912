"""Finds a model's units: modules that are sharded together, their prefetch order, parameter kinds.

The functions read only the module structure of a model and `FSDPOptions`, and change nothing.

    all-gathered    root (embedding, final norm) -> blocks -> head
    reduced         head -> blocks, last to first -> root, at the end of backward
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from moecore.base.options.fsdp import FSDPOptions
from moecore.base.params import clean_name
from moecore.moe.experts import Experts
from moecore.moe.layer import MoELayer, RoutedLayer
from moecore.moe.router import Router

WORDS = {"norm": "norms", "embedding": "embeddings", "attention": "attention", "mlp": "MLP"}
Prefetch = Mapping[nn.Module, list[nn.Module]]  # units, as their first modules


@dataclass(frozen=True, kw_only=True, slots=True)
class Units:
    """The modules that become FSDP units; the root unit has all other parameters."""

    blocks: list[nn.Module]  # result of `find_blocks`
    groups: list[list[nn.Module]]  # each list of blocks is one unit, and [model] is the root
    routers: list[list[nn.Module]]  # each list (routers of one dtype in a ModuleList) is one unit
    experts: list[Experts]
    heads: list[nn.Module]
    # First modules of all units but the root, in the order of forward. Each list is all-gathered
    # together: a group of blocks and the units that begin in it, or a head.
    first_use: list[list[nn.Module]]


def find_units(model: nn.Module, options: FSDPOptions) -> Units:
    """Return the modules of each FSDP unit, after MoE blocks were replaced by MoE layers."""
    blocks = find_blocks(model)
    layers = [m for m in model.modules() if isinstance(m, RoutedLayer)]
    lists = _group_blocks(model, blocks, max(len(blocks), 1))
    stacks = [_list_moe_layers(list_blocks) for list_blocks in lists]
    in_blocks = {layer for stack in stacks for layer in stack}
    stacks.append([m for m in layers if m not in in_blocks])
    groups = _group_blocks(model, blocks, options.blocks_per_unit)
    # Routers that mixed precision must not cast. A unit per router would double the host time. The
    # gradients of one unit for all routers are unsharded until the first block's backward: 430 MB
    # for DeepSeek-V3.
    routers: list[list[nn.Module]] = []
    for stack in stacks:
        routers_by_dtype: dict[torch.dtype, list[nn.Module]] = {}
        for router in (m.get_part("router") for m in stack):
            if router is not None and is_in_router_unit(router, options):
                routers_by_dtype.setdefault(router.weight.dtype, []).append(router)
        routers += routers_by_dtype.values()
    heads = find_heads(model, blocks)
    first_routers = {unit[0] for unit in routers}
    parts = []
    for group in groups:
        inner = _list_moe_layers(group)
        routers_of_group = [m.get_part("router") for m in inner]
        first = [router for router in routers_of_group if router in first_routers]
        parts.append([group[0], *first, *(m.get_part("experts") for m in inner)])
    place = {module: i for i, module in enumerate(model.modules())}
    return Units(
        blocks=blocks,
        groups=groups,
        routers=routers,
        experts=[m.get_part("experts") for m in layers],
        heads=heads,
        first_use=sorted([*parts, *([h] for h in heads)], key=lambda units: place[units[0]]),
    )


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model, such as decoder layers, in module order.

    Blocks are the entries of outermost ModuleLists, ModuleDicts and Sequentials; in a model with
    MoE layers, only of lists that contain an MoE layer. Entries that share a parameter are
    excluded.
    """
    # A MoE layer outside of the lists is a block too. An entry that shares a parameter with another
    # module (an embedding tied to the head) belongs to the root, or two units would train copies.
    blocks: list[nn.Module] = []
    is_dense = not _list_moe_layers([model])

    def visit(module: nn.Module) -> None:
        if not is_dense and not _list_moe_layers([module]):
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
    is_tied = make_tied_predicate(model)
    # A block at two places of the model is one block.
    return [b for b in dict.fromkeys(blocks) if b is model or not is_tied(b)]


def find_heads(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """Return the untied output heads (`is_fsdp_head`) after a block; each becomes a unit."""
    # In the root unit no compute would hide a head's all-gather and reduction. A separate unit is
    # all-gathered while the last block runs, is resident, and is reduced first. Only the forward of
    # the head may read its weight, as in `moecore.models`. Heads of other models belong to the
    # root, because losses often read `lm_head.weight`.
    heads: list[nn.Module] = []
    in_blocks = {module for block in blocks for module in block.modules()}
    after_a_block, is_tied = False, make_tied_predicate(model)
    for module in model.modules():
        after_a_block |= module in blocks
        is_head = getattr(module, "is_fsdp_head", False)
        is_head &= module is not model and module not in in_blocks
        if is_head and after_a_block and _has_parameters(module) and not is_tied(module):
            heads.append(module)
    return heads


def make_tied_predicate(model: nn.Module) -> Callable[[nn.Module], bool]:
    """Return a predicate: whether a module shares a parameter with other modules of `model`."""
    holders, parents = Counter[int](), Counter[nn.Module]()
    for module in model.modules():
        holders.update(id(p) for p in module.parameters(recurse=False))
        parents.update(module.children())

    def is_tied(block: nn.Module) -> bool:
        inner = (module for module in block.modules() if module is not block)
        has_ties = any(holders[id(p)] > 1 for p in block.parameters())
        has_ties |= any(parents[module] > 1 for module in inner)
        return has_ties and _is_shared_outside(block, model)

    return is_tied


def _is_shared_outside(block: nn.Module, model: nn.Module) -> bool:
    """Whether a module of the model outside of `block` has one of the block's parameters."""
    block_params = {id(p) for p in block.parameters()}
    reached: set[nn.Module] = set()

    def visit(module: nn.Module) -> bool:
        if module is block or module in reached:
            return False
        reached.add(module)
        if any(id(p) in block_params for p in module.parameters(recurse=False)):
            return True
        return any(visit(child) for child in module.children())

    return visit(model)


def is_in_router_unit(router: Router, options: FSDPOptions) -> bool:
    """Whether a router's weight is in a separate unit, so that mixed precision does not cast it."""
    return options.param_dtype not in (None, router.weight.dtype)


def plan_forward_prefetch(model: nn.Module, units: Units, num_blocks: int) -> Prefetch:
    """Map each unit's first module to the first modules of units that it prefetches in forward.

    Each entry of `units.first_use` lists the units of a group of blocks, or a head. A unit
    prefetches the later units of its entry, and the units of the next `num_blocks` entries in the
    same outermost ModuleList.
    """
    prefetch_of: dict[nn.Module, list[nn.Module]] = {}
    list_of = _find_outermost_lists(model)
    of_unit = {group[0]: list_of.get(group[0]) for group in units.first_use}
    for (before, *_), (unit, *_) in pairwise(units.first_use):
        if unit in units.heads:
            of_unit[unit] = of_unit[before]
    for i, group in enumerate(units.first_use):
        neighbours = [u for u in units.first_use[i + 1 :] if of_unit[u[0]] is of_unit[group[0]]]
        prefetch = [unit for other in neighbours[:num_blocks] for unit in other]
        prefetch_of |= {unit: group[j + 1 :] + prefetch for j, unit in enumerate(group)}
    return prefetch_of


def plan_backward_prefetch(units: Units, num_blocks: int) -> Prefetch:
    """Map each unit's first module to the first modules of units that it prefetches in backward.

    A unit prefetches the remaining units of its entry in `units.first_use`, and the units of the
    previous `num_blocks` entries. It also prefetches earlier heads, which may run several times.
    """
    prefetch_of: dict[nn.Module, list[nn.Module]] = {}
    backward = [[group[0], *reversed(group[1:])] for group in reversed(units.first_use)]
    for i, group in enumerate(backward):
        if group[0] in units.heads and i > 0:
            continue
        rest = backward[i + 1 :]
        reused_heads = [other[0] for other in rest if other[0] in units.heads]
        previous = [unit for other in rest[:num_blocks] for unit in other]
        prefetch = dict.fromkeys([*reused_heads, *previous])
        prefetch_of |= {unit: [*group[j + 1 :], *prefetch] for j, unit in enumerate(group)}
    return prefetch_of


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _group_blocks(model: nn.Module, blocks: list[nn.Module], limit: int) -> list[list[nn.Module]]:
    """Split the blocks into groups of at most `limit` consecutive blocks of one ModuleList."""
    list_of = _find_outermost_lists(model)
    groups: list[list[nn.Module]] = []
    for block in blocks:
        last = groups[-1] if groups else []
        if last and len(last) < limit and list_of.get(last[0]) is list_of.get(block) is not None:
            last.append(block)
        else:
            groups.append([block])
    return groups


def _find_outermost_lists(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Map each module to the outermost ModuleList, ModuleDict or Sequential that contains it."""
    list_of: dict[nn.Module, nn.Module] = {}
    for module in model.modules():  # outer ones first
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            for inner in module.modules():
                list_of.setdefault(inner, module)
    return list_of


def _list_moe_layers(blocks: list[nn.Module]) -> list[RoutedLayer]:
    return [m for block in blocks for m in block.modules() if isinstance(m, RoutedLayer)]


def make_kind_lookup(model: nn.Module, layers: Mapping[str, RoutedLayer]) -> Callable[[str], str]:
    """Return a function that maps a parameter's name to its kind, such as "attention"."""
    roles: dict[str, str] = {}
    kinds = {"router": "router", "experts": "experts", "shared": "shared experts"}
    for name, layer in layers.items():
        present = [role for role in kinds if layer.get_part(role) is not None]
        parts = {layer.get_part_name(role): kinds[role] for role in present}
        if isinstance(layer, MoELayer):
            names = layer.layout
            parts |= dict.fromkeys(("latent", names.latent_down, names.latent_up), "latent")
            parts[names.shared_gate] = "shared experts"
            parts.pop("", None)  # of parts that the layout does not have
        roles |= {f"{name}.{part}".strip("."): kind for part, kind in parts.items()}
    modules = {clean_name(name): module for name, module in model.named_modules()}

    def kind_of(param: str) -> str:
        *path, leaf = param.split(".")
        if any("lora_" in part for part in [*path, leaf]):
            return "LoRA"
        prefixes = [".".join(path[:n]) for n in range(len(path), -1, -1)]  # innermost first
        for prefix in prefixes:
            module = modules.get(prefix)
            if prefix in roles:
                return roles[prefix]
            if getattr(module, "is_fsdp_head", False) or prefix.endswith("lm_head"):
                return "head"
            for word, kind in WORDS.items():
                if word in type(module).__name__.lower():
                    return kind
        return "other"

    return kind_of
