"""What lies around the exchanges of a block: attention, norms, residual adds, routers.

    compile_blocks      torch.compile of what is between two MoE layers
    graph_blocks        CUDA graphs of it, of routers, shared experts and what an exchange prepares

Between two MoE layers memory is the limit: norms, rotary embedding, adds. Inductor fuses it. An MoE
layer has kernels of its own and hooks of units inside, so it stays as it is.

At a small batch the host is the limit. Where a dispatcher waits on the host no CUDA graph holds a
step, but parts of it (`graphed_part.py`): a launch each for what is between two waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from moecore.base.fields import check_arguments
from moecore.moe.dispatch.alltoall import AllToAllDispatcher
from moecore.moe.layer import MoELayer, RoutedLayer
from moecore.moe.router import Router
from moecore.train.graphs.graphed_part import GraphedPart, GraphMemory


def compiled_modules(block: nn.Module) -> set[nn.Module]:
    """Return the modules of a block that `compile_blocks` compiles, inside of others."""
    routed = {m for layer in block.modules() if isinstance(layer, RoutedLayer) for m in _all(layer)}
    owners = [m for m in block.modules() if hasattr(m, "compile_regions")]
    found: set[nn.Module] = set()
    for owner in owners or [block]:
        found |= set(_inside(owner)) - {owner}
    return found - routed


def _inside(owner: nn.Module) -> list[nn.Module]:
    """Return the modules that an owner's compile regions call, the owner first."""
    eager = {m for n in getattr(owner, "eager_parts", ()) for m in _all(owner.get_submodule(n))}
    return [m for m in owner.modules() if m not in eager]


def _all(module: nn.Module) -> set[nn.Module]:
    return set(module.modules())


def compile_blocks(blocks: Iterable[nn.Module], **options: Any) -> None:
    """Compile each block but for its MoE layers. In place; parameter names stay.

    `compile_regions` of a block, or of a module in it, names its methods that hold no MoE layer.
    In any other block forward is compiled up to each MoE layer and from there on, which costs more
    host time. Blocks of one class share their code. Hooks of units stay outside of it.

    Args:
        blocks: modules that are called, such as a decoder's layers; those that are MoE layers
            themselves are left alone.
        **options: of `torch.compile`.
    """
    check_arguments(compile_blocks, locals())
    for block in blocks:
        if isinstance(block, RoutedLayer):
            continue
        owners = [m for m in block.modules() if hasattr(m, "compile_regions")]
        for owner in owners:
            for name in cast(Any, owner).compile_regions:
                setattr(owner, name, torch.compile(getattr(owner, name), **options))
        if owners:
            continue
        for layer in (m for m in block.modules() if isinstance(m, RoutedLayer)):
            cast(Any, layer).forward = torch.compiler.disable(layer.forward)
        cast(Any, block).forward = torch.compile(block.forward, **options)


def graph_blocks(blocks: Mapping[str, nn.Module]) -> None:
    """Run parts of each block as CUDA graphs, from their fourth call on. In place; names stay.

    Parts are what `compile_regions` of a block or of a module in it names, the routers and shared
    experts of MoE layers, and what `alltoall` prepares before the host waits. Where one would
    communicate (rules that compare tokens) or is recorded, it runs as it is. See
    `graphed_part.py`, also for when.

    Args:
        blocks: those that one forward runs, by name; what is around their modules' forwards stays
            outside.
    """
    memory = GraphMemory()
    for name, block in blocks.items():
        for path, module in block.named_modules():
            own = ".".join(filter(None, (name, path)))
            for method in getattr(module, "compile_regions", ()):
                inside = _inside(module)
                _graph(f"{own}.{method}", module, method, inside, memory, partial(_unseen, inside))
            if isinstance(module, RoutedLayer):
                _graph_layer(own, module, memory)


def _graph_layer(name: str, layer: RoutedLayer, memory: GraphMemory) -> None:
    router, dispatcher = layer.part("router"), layer.dispatcher
    if isinstance(router, Router):
        may_run = partial(_is_free, router)
        _graph(f"{name}.router", router, "forward", [router], memory, may_run)
    shared = layer.part("shared") if isinstance(layer, MoELayer) else None
    if shared is not None:
        beside = GraphMemory() if layer.shared_stream is not None else memory
        _graph(f"{name}.shared", shared, "forward", list(shared.modules()), beside)
    if isinstance(dispatcher, AllToAllDispatcher):
        _graph(f"{name}.dispatcher", dispatcher, "prepare", [], memory)


def _graph(name: str, owner: Any, method: str, *how: Any) -> None:
    setattr(owner, method, GraphedPart(name, getattr(owner, method), *how))


def _is_free(router: Router) -> bool:
    """Whether each token chooses by its own scores."""
    return router.chooses_alone and router.tape is None and router.forced_ids is None


def _unseen(modules: Iterable[nn.Module]) -> bool:
    """Whether nobody looks at the scores of attention."""
    return all(getattr(module, "observe_scores", None) is None for module in modules)
