"""Which modules of a model are sharded together, in which order, and what each parameter is.

Functions of the structure alone: nothing is changed, and devices, ranks and values do not matter.

    gathered    root (embedding, final norm) -> blocks -> head
    reduced     head -> blocks, last to first -> root, when backward ends

Note "routers": under mixed precision the routers of a list of blocks are a unit as well: their
weights stay in their own dtype. A unit each would cost the host as much as the blocks do. They are
gathered with the first block and reduced when backward has left it, or ended: until then their
gradients are whole, 50 MB for Qwen3-30B-A3B, 430 MB for DeepSeek-V3.

Note "head": as part of the root the head would be gathered before the first block and reduced after
the last gradient, with nothing to hide behind. As a unit it is gathered while the last block runs,
stays so until backward, as the root does, and is reduced first. A unit is gathered for the forward
of its modules alone, and reduced behind the backward of the last one. So only a head is one
whose weight nothing but its own forward reads: `moecore.models`' own. Any other model's stays with
the root, since losses often read `lm_head.weight` themselves, and so does a head that is tied.
Multi-token prediction runs the head again, which keeps it until the last of its backwards. A head
declares itself by the attribute `is_fsdp_head`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from moecore.base.options.fsdp import FSDPOptions
from moecore.moe.experts import Experts
from moecore.moe.layer import MoELayer, RoutedLayer
from moecore.moe.params import clean_name
from moecore.moe.router import Router

WORDS = {"norm": "norms", "embedding": "embeddings", "attention": "attention", "mlp": "MLP"}
Prefetch = Mapping[nn.Module, list[nn.Module]]  # a unit's first module -> those of others


@dataclass(frozen=True, kw_only=True, slots=True)
class Units:
    """What of a model becomes units; the root is one too, with all that is left.

    Attributes:
        blocks: what `find_blocks` returns.
        groups: blocks that are one unit; [model] is the root.
        routers: those that are one unit, apart from their blocks' units: all of a list of blocks
            that have one dtype.
        first_use: all units but the root, groups of them that are gathered together: a group of
            blocks, or a head, and what of it begins there. In the order of forward.
    """

    blocks: list[nn.Module]
    groups: list[list[nn.Module]]
    routers: list[list[nn.Module]]
    experts: list[Experts]
    heads: list[nn.Module]
    first_use: list[list[nn.Module]]


def find_units(model: nn.Module, options: FSDPOptions) -> Units:
    """Return the units of a model whose MoE blocks are MoELayers."""
    blocks = find_blocks(model)
    layers = [m for m in model.modules() if isinstance(m, RoutedLayer)]
    stacks = [_layers(stack) for stack in _group(model, blocks, max(len(blocks), 1))]
    in_blocks = {layer for stack in stacks for layer in stack}
    stacks.append([m for m in layers if m not in in_blocks])
    groups = _group(model, blocks, options.blocks_per_unit)
    routers = [unit for stack in stacks for unit in _separate_routers(stack, options)]
    heads = find_heads(model, blocks)
    first_routers = {unit[0] for unit in routers}
    parts = [[group[0], *_parts(group, first_routers)] for group in groups]
    place = {module: i for i, module in enumerate(model.modules())}
    return Units(
        blocks=blocks,
        groups=groups,
        routers=routers,
        experts=[m.part("experts") for m in layers],
        heads=heads,
        first_use=sorted([*parts, *([h] for h in heads)], key=lambda units: place[units[0]]),
    )


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules that become units, in order.

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
    is_tied = find_ties(model)
    # One that stands at two places is one unit.
    return [b for b in dict.fromkeys(blocks) if b is model or not is_tied(b)]


def find_heads(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """Return the heads that are units of their own, in order: see the note "head".

    They come after a block, are in none, and share no parameter with another module.
    """
    heads: list[nn.Module] = []
    in_blocks = {module for block in blocks for module in block.modules()}
    after_a_block, is_tied = False, find_ties(model)
    for module in model.modules():
        after_a_block |= module in blocks
        is_head = getattr(module, "is_fsdp_head", False)
        is_head &= module is not model and module not in in_blocks
        if is_head and after_a_block and _has_parameters(module) and not is_tied(module):
            heads.append(module)
    return heads


def find_ties(model: nn.Module) -> Callable[[nn.Module], bool]:
    """Return what tells whether a module's parameter is also one of a module reached without it."""
    holders, parents = Counter[int](), Counter[nn.Module]()
    for module in model.modules():
        holders.update(id(p) for p in module.parameters(recurse=False))
        parents.update(module.children())

    def is_tied(block: nn.Module) -> bool:
        inner = (module for module in block.modules() if module is not block)
        has_others = any(holders[id(p)] > 1 for p in block.parameters())
        has_others |= any(parents[module] > 1 for module in inner)
        return has_others and _is_reached_without(block, model)

    return is_tied


def _is_reached_without(block: nn.Module, model: nn.Module) -> bool:
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


def keeps_precision(router: Router, options: FSDPOptions) -> bool:
    """Whether mixed precision would round the router's weight, and so change choices.

    Such routers are a unit of their own, gathered and reduced in the dtype of their parameters.
    """
    return options.param_dtype not in (None, router.weight.dtype)


def forward_prefetch(model: nn.Module, units: Units, ahead: int) -> Prefetch:
    """Return what each unit gathers early in forward: `ahead` groups, in the order of use.

    Forward stays within one list of blocks and the head behind it. The next list may not run
    (multi-token prediction without labels), and what is gathered for it would be in vain.

    Args:
        units: of `find_units`, `first_use` without what is not gathered.
        ahead: how many groups; each head counts as one more.
    """
    found: dict[nn.Module, list[nn.Module]] = {}
    list_of = _outermost_lists(model)
    of_unit = {group[0]: list_of.get(group[0]) for group in units.first_use}
    for (before, *_), (unit, *_) in pairwise(units.first_use):
        if unit in units.heads:
            of_unit[unit] = of_unit[before]
    for i, group in enumerate(units.first_use):
        same = [u for u in units.first_use[i + 1 :] if of_unit[u[0]] is of_unit[group[0]]]
        later = [unit for other in same[:ahead] for unit in other]
        found |= {unit: group[j + 1 :] + later for j, unit in enumerate(group)}
    return found


def backward_prefetch(units: Units, ahead: int) -> Prefetch:
    """Do the same for backward, where a head runs again before each list of blocks behind it.

    Such a head gathers what ran before it in forward, which the engine knows and this order does
    not: it is left out.
    """
    found: dict[nn.Module, list[nn.Module]] = {}
    backward = [[group[0], *reversed(group[1:])] for group in reversed(units.first_use)]
    for i, group in enumerate(backward):
        if group[0] in units.heads and i > 0:
            continue
        rest = backward[i + 1 :]
        again = [other[0] for other in rest if other[0] in units.heads]
        later = dict.fromkeys([*again, *(unit for other in rest[:ahead] for unit in other)])
        found |= {unit: [*group[j + 1 :], *later] for j, unit in enumerate(group)}
    return found


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


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


def _parts(blocks: list[nn.Module], first_routers: set[nn.Module]) -> list[nn.Module]:
    """Return one module of each unit that begins in a group of blocks, in the order of first use.

    Args:
        first_routers: the first of each unit of routers.
    """
    layers = _layers(blocks)
    parts = [m.part("router") for m in layers if m.part("router") in first_routers]
    return [*parts, *(m.part("experts") for m in layers)]


def kinds(model: nn.Module, layers: Mapping[str, RoutedLayer]) -> Callable[[str], str]:
    """Return what tells the kind of a parameter by its name, which `clean_name` has cleaned."""
    roles: dict[str, str] = {}
    for name, layer in layers.items():
        of_role = {"router": "router", "experts": "experts", "shared": "shared experts"}
        parts = {layer.name_of(r): kind for r, kind in of_role.items() if layer.part(r) is not None}
        if isinstance(layer, MoELayer):
            parts["latent"] = "latent"
            if layer.layout.shared_gate:
                parts[layer.layout.shared_gate] = "shared experts"
        roles |= {f"{name}.{part}".strip("."): kind for part, kind in parts.items()}
    modules = {clean_name(name): module for name, module in model.named_modules()}

    def kind_of(param: str) -> str:
        *path, leaf = param.split(".")
        if any("lora_" in part for part in [*path, leaf]):
            return "LoRA"
        prefixes = [".".join(path[:n]) for n in range(len(path), -1, -1)]  # innermost first
        for prefix in prefixes:
            kind = roles.get(prefix) or _kind_of_module(modules.get(prefix), prefix)
            if kind is not None:
                return kind
        return "other"

    return kind_of


def _kind_of_module(module: nn.Module | None, name: str) -> str | None:
    """Return the kind of a module's parameters by its class, or None; a head may be a linear."""
    what = type(module).__name__.lower()
    if getattr(module, "is_fsdp_head", False) or name.endswith("lm_head"):
        return "head"
    return next((kind for word, kind in WORDS.items() if word in what), None)
