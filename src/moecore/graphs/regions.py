"""torch.compile around the MoE layers of a model: attention, norms and residual adds of each block.

What lies between two MoE layers is bound by memory: norms, rotary embedding, adds. Inductor fuses
it. An MoE layer has kernels of its own and hooks of units inside, so it stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn

from moecore._fields import check_arguments
from moecore.moe.layer import RoutedLayer


def compiled_modules(block: nn.Module) -> set[nn.Module]:
    """Return the modules of a block that `compile_blocks` compiles, inside of others."""
    routed = {m for layer in block.modules() if isinstance(layer, RoutedLayer) for m in _all(layer)}
    owners = [m for m in block.modules() if hasattr(m, "compile_regions")]
    found: set[nn.Module] = set()
    for owner in owners or [block]:
        eager = {m for n in getattr(owner, "eager_parts", ()) for m in _all(owner.get_submodule(n))}
        found |= _all(owner) - eager - {owner}
    return found - routed


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
