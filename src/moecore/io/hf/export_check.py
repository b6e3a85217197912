"""Whether the class that config.json names reads every tensor of an export, by name and shape.

The class is built from the config on meta, so nothing is allocated. What the files will hold is
compared with what it has in memory; experts written one by one also with what transformers itself
would write, because it joins them only in the families that it knows them from.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moecore.families.transformers.blocks import find_hf_adapter
from moecore.io.checkpoint.config_differences import moe_differences
from moecore.io.hf.export_config import transformers_class
from moecore.io.hf.names import EMBEDDING, HEAD, FileRecipe
from moecore.io.hf.target import local_part
from moecore.models.decoder import Decoder
from moecore.moe.layer import MoELayer
from moecore.moe.params import clean_name

Shapes = Mapping[str, tuple[int, ...]]
ADAPTERS = ("lora_", "base_layer.", "modules_to_save.", "original_module.")


def check_readable(
    model: nn.Module,
    values: Mapping[str, Any],
    fused: Mapping[str, FileRecipe],
    written: Mapping[str, FileRecipe],
) -> None:
    """Raise for a transformers model that its directory would not give back; native ones pass.

    ValueErrors name a tensor that is missing, that nothing reads, or of another shape;
    NotImplementedErrors a layout that the class does not read.

    Args:
        fused: what the files would hold with layout "fused": the names that transformers has.
    """
    if isinstance(model, Decoder):
        return
    kind, config = _reading_class(model, values)
    if kind is None:
        return
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of empty tensors: nothing is initialised on meta
        reader: nn.Module = kind(config)
    wanted = _shapes(reader.state_dict())
    held = {piece.name: piece.shape for recipe in fused.values() for piece in recipe.pieces}
    _check_names(model, kind, wanted, held)
    _check_layers(model, kind, reader)
    files = {piece.name: piece.shape for recipe in written.values() for piece in recipe.pieces}
    renamed = {name: shape for name, shape in files.items() if name not in wanted}
    published = published_shapes(reader) if renamed else {}
    for name, shape in renamed.items():
        if published.get(name) != shape:
            raise NotImplementedError(
                f"{name} {shape} must be a tensor that {kind.__name__} reads from files, where its "
                "experts are stacked or have other names: use layout='fused'"
            )


def check_tied(tensors: Mapping[str, Tensor], copies: Mapping[str, str]) -> None:
    """Raise for a head that the config ties to the embedding, but that has numbers of its own."""
    if HEAD not in copies or not {HEAD, EMBEDDING} <= tensors.keys():
        return
    if tensors[HEAD] is tensors[EMBEDDING]:
        return
    head, table = local_part(tensors[HEAD]), local_part(tensors[EMBEDDING])
    same = head.shape == table.shape and head.dtype == table.dtype
    if not same or not (head.is_meta or torch.equal(head, table)):
        raise ValueError(
            f"{HEAD} must equal {EMBEDDING} with config.tie_word_embeddings (True), because the "
            "files hold one of them: call model.tie_weights(), or set it to False"
        )


def published_shapes(reader: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of what transformers would write for a model, which is on meta."""
    from transformers.core_model_loading import revert_weight_conversion

    return _shapes(revert_weight_conversion(reader, reader.state_dict()))  # type: ignore[arg-type]


def _shapes(state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def _reading_class(model: nn.Module, values: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the class that reads the directory and its config, or None for an unknown one.

    It is the model's own; for a part of a model (a base without a head, an attention), a wrapper
    and an upcycled model it is the causal language model of the config.
    """
    own: Any = getattr(model, "config", None)
    if not hasattr(own, "to_dict"):
        return None, None
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    model_type, kind = values.get("model_type"), transformers_class(type(model))
    if model_type in CONFIG_MAPPING:
        config = CONFIG_MAPPING[model_type].from_dict(dict(values))
    else:
        config = type(own).from_dict(dict(values))
    is_part = kind is None or getattr(model, "base_model", None) is model
    if is_part or model_type != own.model_type:
        kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), kind)
    return kind, config


def _check_names(model: nn.Module, kind: Any, wanted: Shapes, held: Shapes) -> None:
    for name, shape in wanted.items():
        if name not in held:
            raise ValueError(
                f"model ({type(model).__name__}) must hold {name} of {kind.__name__}, which reads "
                f"the directory: {_fix(model, kind, name, wanted, held)}"
            )
        if held[name] != shape:
            raise ValueError(
                f"{name} {held[name]} must be {shape} in {kind.__name__}, which reads the "
                "directory: correct the model's config"
            )
    for name in held:
        if name not in wanted:
            raise ValueError(
                f"{name} {held[name]} must be a tensor of {kind.__name__}, which reads the "
                "directory and would drop it: take it off the model, or correct the model's config"
            )


def _check_layers(model: nn.Module, kind: Any, reader: nn.Module) -> None:
    """Raise for a MoE layer whose rule is not that of the same block in its class."""
    layers = {clean_name(n): m for n, m in model.named_modules() if isinstance(m, MoELayer)}
    for path, layer in layers.items():
        block = reader.get_submodule(path)  # is there, as names and shapes agree
        adapter = find_hf_adapter(block)  # None: only the caller knew the rule
        found = moe_differences(layer.config, adapter(block, reader).config) if adapter else []
        for field in found:
            raise ValueError(
                f"{path}'s {field.name} ({field.ours}) must be {field.theirs} as in "
                f"{kind.__name__} with this config, which reads the directory: correct one of them"
            )


def _fix(model: nn.Module, kind: Any, missing: str, wanted: Shapes, held: Shapes) -> str:
    """What to pass instead of a model that lacks a tensor of its class."""
    if any(part in name for name in held for part in ADAPTERS):
        return "merge adapters first, with peft's merge_and_unload(), and pass what it returns"
    for name in held:
        prefix = name.removesuffix(missing)
        if prefix != name and all(f"{prefix}{other}" in held for other in wanted):
            return f"pass model.{prefix[:-1]}"
    if held and all(f"{kind.base_model_prefix}.{name}" in wanted for name in held):
        return f"pass the {kind.__name__} that holds it"
    for path, module in model.named_modules():
        if isinstance(module, MoELayer) and missing.startswith(f"{path}."):
            return (
                f"its MoELayer {path} renames its parts: give its adapter a LayerLayout with the "
                "names of the class"
            )
    return "pass the whole model"
