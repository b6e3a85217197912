"""Whether the class that config.json names reads every tensor of an export, by name and shape.

The class is built from the config on meta, so nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moecore.base.fields import shown_name
from moecore.base.params import clean_name
from moecore.families.transformers.blocks import find_hf_adapter
from moecore.io.checkpoint.config_differences import moe_differences
from moecore.io.hf.names import EMBEDDING, HEAD
from moecore.io.hf.pieces import local_part
from moecore.io.hf.stock import Shapes, held_shapes, reader_of, shapes_of
from moecore.moe.layer import MoELayer

ADAPTERS = ("lora_", "base_layer.", "modules_to_save.", "original_module.")


def checked_reader(model: nn.Module, values: Mapping[str, Any], shapes: Shapes) -> nn.Module | None:
    """Return the model that reads an export, on meta; None for an unknown class."""
    is_part = getattr(model, "base_model", None) is model  # the whole reads it, if there is one
    full_reader = reader_of({**values, "architectures": None}) if is_part else None
    reader = full_reader or reader_of(values, model)
    if reader is not None:
        kind = type(reader)
        _check_names(model, kind, shapes_of(reader.state_dict()), held_shapes(shapes))
        _check_layers(model, kind, reader)
    return reader


def check_tied(tensors: Mapping[str, Tensor], copies: Mapping[str, str]) -> None:
    """Raise for a head that the config ties to the embedding, but that has numbers of its own."""
    if HEAD not in copies or not {HEAD, EMBEDDING} <= tensors.keys():
        return
    if tensors[HEAD] is tensors[EMBEDDING]:
        return
    head, table = local_part(tensors[HEAD]), local_part(tensors[EMBEDDING])
    is_equal = head.shape == table.shape and head.dtype == table.dtype
    if not is_equal or not (head.is_meta or torch.equal(head, table)):
        raise ValueError(
            f"{HEAD} must equal {EMBEDDING} with config.tie_word_embeddings (True), because the "
            "files hold one of them: call model.tie_weights(), or set it to False"
        )


def _check_names(model: nn.Module, kind: Any, class_shapes: Shapes, shapes: Shapes) -> None:
    for name, shape in class_shapes.items():
        if name not in shapes:
            raise ValueError(
                f"model ({type(model).__name__}) must hold {shown_name(name)} of {kind.__name__}, "
                f"which reads the directory: {_fix(model, kind, name, class_shapes, shapes)}"
            )
        if shapes[name] != shape:
            raise ValueError(
                f"{shown_name(name)} {shapes[name]} must be {shape} in {kind.__name__}, which "
                "reads the directory: correct the model's config"
            )
    for name in shapes:
        if name not in class_shapes:
            raise ValueError(
                f"{shown_name(name)} {shapes[name]} must be a tensor of {kind.__name__}, which "
                "reads the "
                "directory and would drop it: take it off the model, or correct the model's config"
            )


def _check_layers(model: nn.Module, kind: Any, reader: nn.Module) -> None:
    """Raise for a MoE layer whose rule is not that of the same block in its class."""
    layers = {clean_name(n): m for n, m in model.named_modules() if isinstance(m, MoELayer)}
    for path, layer in layers.items():
        block = reader.get_submodule(path)  # is there, as names and shapes agree
        adapter = find_hf_adapter(block)  # None: only the caller knew the rule
        fields = moe_differences(layer.config, adapter(block, reader).config) if adapter else []
        for field in fields:
            raise ValueError(
                f"{path}'s {field.name} ({field.value}) must be {field.reference} as in "
                f"{kind.__name__} with this config, which reads the directory: correct one of them"
            )


def _fix(model: nn.Module, kind: Any, missing: str, class_shapes: Shapes, shapes: Shapes) -> str:
    """What to pass instead of a model that lacks a tensor of its class."""
    if any(part in name for name in shapes for part in ADAPTERS):
        return "merge adapters first, with peft's merge_and_unload(), and pass what it returns"
    for name in shapes:
        prefix = name.removesuffix(missing)
        if prefix != name and all(f"{prefix}{other}" in shapes for other in class_shapes):
            return f"pass model.{prefix[:-1]}"
    if shapes and all(f"{kind.base_model_prefix}.{name}" in class_shapes for name in shapes):
        return f"pass the {kind.__name__} that holds it"
    for path, module in model.named_modules():
        if isinstance(module, MoELayer) and missing.startswith(f"{path}."):
            return (
                f"its MoELayer {path} renames its parts: give its adapter a LayerLayout with the "
                "names of the class"
            )
    return "pass the whole model"
