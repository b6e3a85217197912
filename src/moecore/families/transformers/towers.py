"""Multimodal models of transformers: the text decoder, the towers, and arguments of the towers.

A tower is any part of the base model outside of the text decoder: vision and audio encoders,
projectors and resamplers. Towers keep transformers' attention. A forward without images, audio and
video does not run them, so packed documents, context parallelism and pipeline stages support
text-only rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from moecore.families.transformers.stock import get_base_model, get_forward_parameters


def get_text_decoder(model: Any) -> Any:
    """Return the module with a model's decoder layers: the base model if it has no towers."""
    base = get_base_model(model)
    return base.get_decoder() if hasattr(base, "get_decoder") else base


def find_tower_modules(model: Any) -> set[nn.Module]:
    """Return the modules of a model's base that are outside of its text decoder."""
    base, decoder = get_base_model(model), get_text_decoder(model)
    if decoder is base:
        return set()
    return {*base.modules()} - {base, *decoder.modules()}


def list_towers(model: Any) -> list[str]:
    """Return the qualified names of a model's towers, outermost modules with parameters only."""
    base, decoder = get_base_model(model), get_text_decoder(model)
    names = {module: name for name, module in model.named_modules()}
    towers: list[str] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if decoder in child.modules():
                if child is not decoder:
                    visit(child)
            elif next(child.parameters(), None) is not None:
                towers.append(names[child])

    if decoder is not base:
        visit(base)
    return towers


def refuse_tower_inputs(model: Any, inputs: Mapping[str, Any], user: str) -> None:
    """Raise ValueError for an argument of a forward that only a model's towers use.

    Multi-dimensional `position_ids` are refused too, because they describe images. `user` names the
    options that need text-only rows, for the error.
    """
    base, decoder = get_base_model(model), get_text_decoder(model)
    if decoder is base:
        return
    positions = inputs.get("position_ids")
    if positions is not None and positions.ndim != 2:
        raise ValueError(
            f"position_ids {tuple(positions.shape)} must be [B, T] with {user}, where rows have "
            "only text: leave them out"
        )
    of_towers = get_forward_parameters(type(base).forward).keys() - get_forward_parameters(
        type(decoder).forward
    )
    for name in sorted(of_towers & inputs.keys()):
        if isinstance(inputs[name], Tensor | Mapping):
            raise ValueError(
                f"{name} must be None for {type(base).__name__} with {user}, which do not run its "
                "towers: pass text-only rows, or leave these options out"
            )
