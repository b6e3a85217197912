"""Find a model's MoE blocks and swap each for a MoELayer that keeps its parameters and names.

An adapter is a function `(block, model) -> MoELayer`. moecore brings those of Hugging Face models;
a user's own block gets one through `parallelize_moe(..., adapters={MyBlock: my_adapter})`.
`adopt` does the common part: build the layer without memory and hand it the block's parameters.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from moecore.hf.blocks import find_hf_adapter
from moecore.moe.layer import MoELayer

RECORDING = "transformers.utils.output_capturing"  # its hooks are handed on, see hf/blocks.py

Adapter = Callable[[nn.Module, nn.Module], MoELayer]


def swap_blocks(model: nn.Module, adapters: Mapping[type, Adapter]) -> dict[str, MoELayer]:
    """Replace every known MoE block in place and return all MoE layers by qualified name.

    Args:
        model: any module.
        adapters: block class -> adapter; comes before the built-in ones.

    Raises:
        ValueError: when a block looks like MoE and has no adapter, an adapter returns something
            else than a MoELayer, a block that would be swapped has hooks, or nothing is MoE at all.
            The model is then unchanged.
    """
    found: dict[str, Adapter] = {}
    unknown: list[str] = []
    inside: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(outer) for outer in inside):
            continue
        adapter = adapters.get(type(module)) or find_hf_adapter(module)
        if isinstance(module, MoELayer) or adapter:
            inside.append(f"{name}." if name else "")
            if adapter:
                found[name] = adapter
        elif _looks_like_moe(module):
            unknown.append(f"{name or 'the model'} ({type(module).__name__})")
    if unknown:
        raise ValueError(
            f"MoE block {unknown[0]}{_more(unknown)} has no adapter: pass parallelize_moe(..., "
            "adapters={BlockClass: fn(block, model) -> MoELayer}), see docs/adapters.md"
        )
    if "" in found:
        raise ValueError(
            "model (a MoE block itself) must be held by a parent module to be swapped: wrap it in "
            "nn.Sequential, or build a MoELayer"
        )
    used = {type(model.get_submodule(name)) for name in found}
    for cls in adapters:
        if cls not in used:
            warnings.warn(
                f"adapter of {cls.__name__} is not used: no block is of this very class",
                stacklevel=3,
            )
    swaps: dict[nn.Module, MoELayer] = {}
    for name, adapter in found.items():  # all adapters before any swap: one may raise
        block = model.get_submodule(name)
        layer = adapter(block, model)
        if not isinstance(layer, MoELayer):
            raise ValueError(
                f"adapter of {name} ({type(block).__name__}) must return a MoELayer, not a "
                f"{type(layer).__name__}: see docs/adapters.md"
            )
        _refuse_hooks(name, block, layer)
        swaps[block] = layer
        layer.train(block.training)
        _keep_order(layer, block)
    for parent in list(model.modules()):
        for child, module in parent._modules.items():
            if module in swaps:
                parent._modules[child] = swaps[module]
    layers = {n: m for n, m in model.named_modules() if isinstance(m, MoELayer)}
    if not layers:
        raise ValueError(
            f"model ({type(model).__name__}) must hold at least one MoELayer or known MoE block: "
            "register an adapter for blocks that moecore does not recognise, see docs/adapters.md, "
            "or use fully_shard if there are none"
        )
    return layers


def _refuse_hooks(name: str, block: nn.Module, layer: MoELayer) -> None:
    """Refuse hooks of all that the swap leaves behind: they would never run again.

    The router and the experts are left behind too: a layer takes their tensors. Modules that it
    keeps (a shared expert) keep their hooks.
    """
    kept = set(layer.modules())
    for path, module in block.named_modules(prefix=name):
        hooks = [] if module in kept else [h for hooks in _hooks(module) for h in hooks.values()]
        if any(getattr(hook, "__module__", None) != RECORDING for hook in hooks):
            raise ValueError(
                f"{path} must have no hooks, because a MoELayer takes its place: remove them, or "
                "register them after parallelize_moe"
            )


def _hooks(module: nn.Module) -> tuple[dict[int, Callable[..., Any]], ...]:
    return (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )


def _keep_order(layer: MoELayer, block: nn.Module) -> None:
    """Give the layer's children the block's order: optimizer state dicts are positional."""
    order = [name for name in block._modules if name in layer._modules]
    for name in [*order, *(n for n in layer._modules if n not in order)]:
        layer._modules[name] = layer._modules.pop(name)


def _looks_like_moe(module: nn.Module) -> bool:
    return any(
        name in ("experts", "expert") and not isinstance(child, MoELayer)
        for name, child in module.named_children()
    )


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
