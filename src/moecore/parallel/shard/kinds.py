"""What a parameter is, by its place in a MoE layer or its module: attention, router, experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from moecore.moe.layer import MoELayer, RoutedLayer
from moecore.moe.params import clean_name

WORDS = {"norm": "norms", "embedding": "embeddings", "attention": "attention", "mlp": "MLP"}


def kinds(model: nn.Module, layers: Mapping[str, RoutedLayer]) -> Callable[[str], str]:
    """Return what tells the kind of a parameter by its name without wrappers' parts.

    Args:
        model: plain or parallelized.
        layers: its MoE layers, by such a name.
    """
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
