"""Compilation and CUDA graphs of the code between a block's exchanges: attention, norms, routers.

compile_blocks      compiles the code between two MoE layers
graph_blocks        captures this code, routers, shared experts and the work of `alltoall` before
                    its host sync in CUDA graphs
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from moecore.base.fields import check_arguments
from moecore.base.options.dense import GRAPH_SCOPES, GraphScope
from moecore.moe.dispatch.alltoall import AllToAllDispatcher
from moecore.moe.dispatch.hierarchical import HierarchicalDispatcher
from moecore.moe.layer import MoELayer, RoutedLayer
from moecore.moe.router import Router
from moecore.train.graphs.graphed_part import GraphedPart, GraphMemory


def find_compiled_modules(block: nn.Module) -> set[nn.Module]:
    """Return the modules in a block that `compile_blocks` compiles: all except MoE layers."""
    layers = (module for module in block.modules() if isinstance(module, RoutedLayer))
    owners = [m for m in block.modules() if hasattr(m, "compile_regions")]
    modules: set[nn.Module] = set()
    for owner in owners or [block]:
        modules |= set(_list_inner_modules(owner)) - {owner}
    return modules.difference(*(layer.modules() for layer in layers))


def _list_inner_modules(module: nn.Module) -> list[nn.Module]:
    """Return a module and its submodules, without its `eager_parts` and their submodules."""
    parts = (module.get_submodule(name) for name in getattr(module, "eager_parts", ()))
    eager = {m for part in parts for m in part.modules()}
    return [m for m in module.modules() if m not in eager]


def compile_blocks(blocks: Iterable[nn.Module], **options: Any) -> None:
    """Compile each block except its MoE layers, in place. Parameter names do not change.

    A block, or a module in a block, may have an attribute `compile_regions`: the names of methods
    that call no MoE layer and that are compiled. Without `compile_regions`, forward is compiled
    with a graph break at each MoE layer, which costs more host time. Blocks of one class share
    compiled code. FSDP hooks run outside of compiled code.

    Args:
        blocks: modules such as a decoder's layers. A block that is an MoE layer is not compiled.
        **options: options of `torch.compile`.
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


def graph_blocks(
    blocks: Mapping[str, nn.Module],
    scopes: Sequence[GraphScope] = GRAPH_SCOPES,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Replace parts of blocks by CUDA graphs, in place; graphs run from the 4th call on.

    `blocks` maps a name, for errors, to a block; the blocks run sequentially. `scopes` selects
    "attention", "router", "shared_experts" and "dispatch" (the preparation of the exchange).
    `group` has the tp and cp ranks with which attention communicates; None = it does not.
    """
    memory = GraphMemory()
    for name, block in blocks.items():
        for path, module in block.named_modules():
            full_name = ".".join(filter(None, (name, path)))
            regions = getattr(module, "compile_regions", ()) if "attention" in scopes else ()
            for method in regions:
                inside = _list_inner_modules(module)
                may_run = partial(_can_replay, inside)
                part_name = f"{full_name}.{method}"
                _replace_by_graph(part_name, module, method, inside, memory, may_run, group)
            if isinstance(module, RoutedLayer):
                _graph_layer(full_name, module, memory, scopes)


def drop_graphs(model: nn.Module) -> None:
    """Free the graphs of `graph_blocks`; later calls warm up and capture again."""
    layers = (m for m in model.modules() if isinstance(m, RoutedLayer))
    for owner in (*model.modules(), *(layer.dispatcher for layer in layers)):
        for part in vars(owner).values():
            if isinstance(part, GraphedPart):
                part.drop_graphs()


def _graph_layer(
    layer_name: str, layer: RoutedLayer, memory: GraphMemory, scopes: Sequence[GraphScope]
) -> None:
    """Replace the parts of an MoE layer that `scopes` selects by CUDA graphs, in place."""
    router, dispatcher = layer.get_part("router"), layer.dispatcher
    if "router" in scopes and isinstance(router, Router):
        modules = list(dict.fromkeys((router, router.bias_owner)))
        may_run = partial(_can_graph_router, router)
        _replace_by_graph(f"{layer_name}.router", router, "forward", modules, memory, may_run)
    shared = layer.get_part("shared") if isinstance(layer, MoELayer) else None
    if "shared_experts" in scopes and shared is not None:
        shared_memory = GraphMemory() if layer.shared_stream is not None else memory
        modules = list(shared.modules())
        _replace_by_graph(f"{layer_name}.shared", shared, "forward", modules, shared_memory)
    sends_orders = isinstance(dispatcher, (AllToAllDispatcher, HierarchicalDispatcher))
    if "dispatch" in scopes and sends_orders:
        _replace_by_graph(f"{layer_name}.dispatcher", dispatcher, "prepare_send_order", [], memory)


def _replace_by_graph(
    part_name: str,
    owner: object,
    method_name: str,
    modules: Sequence[nn.Module],
    memory: GraphMemory,
    may_use_graph: Callable[[], bool] | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Replace a method of `owner` by a `GraphedPart`, in place; `part_name` is for errors."""
    method = getattr(owner, method_name)
    part = GraphedPart(part_name, method, modules, memory, may_use_graph, group)
    setattr(owner, method_name, part)


def _can_graph_router(router: Router) -> bool:
    return router.is_collective_free and router.tape is None and router.forced_ids is None


def _can_replay(modules: Iterable[nn.Module]) -> bool:
    """Return whether no module must run eagerly or records attention logits (`QKClip`)."""
    names = ("observe_scores", "is_eager")
    return not any(getattr(module, name, None) for module in modules for name in names)
