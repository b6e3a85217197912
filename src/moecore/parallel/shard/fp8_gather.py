"""Which parameters `FSDPOptions.fp8_param_gather` lets units gather in FP8, and why not others.

Those that blockwise products alone read: the matrices of routed experts that several ranks share,
of shared experts, and of linears in FP8.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import cast

import torch
from torch import nn

from moecore.base.options.precision import Recipe
from moecore.moe.layer import RoutedLayer
from moecore.moe.params import clean_name
from moecore.moe.shared import SharedExpert
from moecore.parallel.request import Request

OPTION = "FSDPOptions.fp8_param_gather (True)"
KEPT = (torch.float32, torch.bfloat16)


def gathered_recipes(
    model: nn.Module,
    layers: Mapping[str, RoutedLayer],
    linears: Mapping[str, Recipe],
    request: Request,
) -> dict[str, Recipe]:
    """Return the recipes of the parameters that are gathered in FP8, by name; {} without it.

    Args:
        model: cut over tp, ep and etp.
        layers: its MoE layers, by name.
        linears: recipes of its linears in FP8, by name without what wrappers add.

    Raises:
        ValueError: when there are none, or what else reads or keeps one of them cannot.
    """
    if not request.fsdp.fp8_param_gather:
        return {}
    read = dict(_read_in_blocks(model, layers, linears, request))
    if not read:
        raise ValueError(
            f"{OPTION} must go with blockwise products of weights that several ranks share, and "
            "there are none: set precision='blockwise', or drop it"
        )
    if request.compile_dense and any(map(_blockwise, linears.values())):
        raise ValueError(
            f"{OPTION} must go with compile_dense (True) = False where linears are in FP8, which "
            "torch.compile would read: use roles=('experts', 'shared_experts'), or drop one of them"
        )
    names = {param: name for name, param in model.named_parameters()}
    places = Counter(p for m in model.modules() for p in m._parameters.values() if p is not None)
    for param in read:
        _check(names[param], param, places[param])
    return {names[param]: recipe for param, recipe in read.items()}


def _read_in_blocks(
    model: nn.Module,
    layers: Mapping[str, RoutedLayer],
    linears: Mapping[str, Recipe],
    request: Request,
) -> Iterator[tuple[nn.Parameter, Recipe]]:
    """Yield parameters of blockwise products that are gathered."""
    p = request.meshes.parallel
    for name, layer in layers.items():
        recipe = _blockwise(request.recipe_of(name, layer, "experts"))
        if recipe is not None and p.edp_replicate * p.edp_shard > 1:
            experts = layer.part("experts")
            if experts.is_separate:
                raise ValueError(
                    f"{name}: {OPTION} must go with ExpertLayout.gate_up ('separate') = 'split' or "
                    "'concatenated', because gate and up are one matrix: drop it"
                )
            yield from ((param, recipe) for param in experts.parameters())
        shared = layer.part("shared")
        recipe = _blockwise(request.recipe_of(name, layer, "shared_experts"))
        if isinstance(shared, SharedExpert) and recipe is not None:
            yield from ((param, recipe) for param in (shared.w1, shared.w2))
    for name, module in model.named_modules():
        recipe = _blockwise(linears.get(clean_name(name)))
        if isinstance(module, nn.Linear) and recipe is not None:
            yield cast(nn.Parameter, module.weight), recipe


def _blockwise(recipe: Recipe | None) -> Recipe | None:
    return recipe if recipe is not None and recipe.scaling == "blockwise" else None


def _check(name: str, param: nn.Parameter, num_places: int) -> None:
    if param.dtype not in KEPT:
        raise ValueError(
            f"{name} ({param.dtype}) must be kept in fp32 or bf16 with {OPTION}: call model.float()"
        )
    if num_places > 1:
        raise ValueError(
            f"{name} must not be tied to another parameter with {OPTION}, which leaves its values "
            "to FP8 products alone: untie it, or leave it out by Precision.overrides"
        )
