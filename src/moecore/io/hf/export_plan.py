"""The plan of an export or a stream: Hugging Face tensors, and the ranks that have their parts.

Names, shapes and order of tensors are those of the complete model, without pipeline stages. The
transformers class that config.json names is built on meta, to check that it would load the tensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from moecore.base.failures import run_and_share_errors
from moecore.base.fields import format_name
from moecore.base.params import clean_name
from moecore.families.fp32_modules import make_fp32_predicate
from moecore.families.transformers.blocks import find_hf_adapter
from moecore.families.transformers.lora import get_base_tensors, select_trained_copies, unwrap_peft
from moecore.io.checkpoint.config_differences import (
    TRAINING,
    find_moe_differences,
    list_training_fields,
)
from moecore.io.hf.collect import Item, PartOwners
from moecore.io.hf.config import FAMILIES, MTP_KEYS, compare_config, decoder_config_from_hf
from moecore.io.hf.config_fields import HFConfig, read_config
from moecore.io.hf.names import (
    EMBEDDING,
    HEAD,
    HFLayout,
    collect_model_tensors,
    map_model_copies,
    plan_hf_tensors,
    raise_unknown_model,
)
from moecore.io.hf.pieces import FileRecipe, get_detached_shard
from moecore.io.hf.stock import (
    Shapes,
    build_meta_model,
    find_transformers_class,
    get_shapes,
    plan_written_tensors,
    rename_expert_shapes,
)
from moecore.io.hf.upcycled import make_empty_shared_experts, make_upcycled_config
from moecore.models.config import DecoderConfig
from moecore.models.decoder import Decoder
from moecore.moe.layer import MoELayer
from moecore.parallel.model.parallel_state import list_parallel_states

ExportLayout = Literal["per_expert", "fused"]
LIST_ENTRY = re.compile(r"(\.\d+\.).*")  # an index in a name, such as a layer's, and the rest
ADAPTERS = ("lora_", "base_layer.", "modules_to_save.", "original_module.")


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """The Hugging Face tensors to write, the ranks that have their parts, and config.json."""

    items: list[Item]
    owners: PartOwners
    tensors: dict[str, Tensor]  # this rank's, by model name
    values: dict[str, Any]  # fields of config.json
    device: torch.device  # of messages


def plan_export(
    model: nn.Module,
    config: HFConfig | None,
    dtype: torch.dtype | None,
    layout: ExportLayout,
    *,
    needs_config: bool = True,
) -> ExportPlan:
    """Plan the Hugging Face tensors of a model without its LoRA adapters. Collective.

    Arguments are as in `export_hf`, but unless `needs_config`, `config` may be None for a native
    decoder. Expert tensors then have the names that all families except Mixtral use.
    """
    base = unwrap_peft(model)

    def read_model() -> tuple[dict[str, Any], dict[str, Tensor]]:
        lacks = config is None and not needs_config and isinstance(base, Decoder)
        values = {} if lacks else make_export_config(base, config)
        tensors = collect_export_tensors(base, values)
        for name, tensor in tensors.items():
            if tensor.is_meta:
                raise ValueError(
                    f"{format_name(name)} (meta) must have storage to be written: load it first"
                )
        check_tied_head(tensors, map_model_copies(base))
        return values, tensors

    values, tensors = run_and_share_errors(read_model)
    owners = PartOwners(tensors)

    def plan_items() -> list[Item]:
        recipes = _plan_recipes(base, values, owners.shapes, choose_layout(layout, values))
        keeps = make_fp32_predicate(base, dtype)
        return list(make_items(owners.dtypes, recipes, map_model_copies(base), dtype, keeps))

    records = list_parallel_states(base)
    device = records[0].request.meshes.device if records else next(iter(tensors.values())).device
    return ExportPlan(run_and_share_errors(plan_items), owners, tensors, values, device)


def collect_export_tensors(base: nn.Module, hf_config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return this rank's tensors to write: no adapters, and trained copies of `modules_to_save`."""
    all_tensors = collect_model_tensors(base)
    tensors = get_base_tensors(base, all_tensors) | select_trained_copies(base, all_tensors)
    return tensors | make_empty_shared_experts(base, hf_config, tensors)


def _plan_recipes(
    model: nn.Module, hf_config: Mapping[str, Any], shapes: Shapes, layout: HFLayout
) -> dict[str, FileRecipe]:
    """Return each model tensor's recipe, in model order; ValueError if tensors are missing."""
    if isinstance(model, Decoder):
        recipes = plan_hf_tensors(model.config, layout)
        for name in recipes.keys() - shapes.keys():
            raise ValueError(
                f"model must hold {format_name(name)} on a pipeline stage: take all of its stages"
            )
        return recipes
    reader = build_checked_meta_model(model, hf_config, shapes)
    if reader is not None:  # stages hold layers in an order of their own
        places: dict[str, int] = {}
        for place, name in enumerate(reader.state_dict()):
            places.setdefault(LIST_ENTRY.sub(r"\1", name), place)
        order = {n: places.get(LIST_ENTRY.sub(r"\1", n), len(places)) for n in shapes}
        shapes = {name: shapes[name] for name in sorted(shapes, key=order.__getitem__)}
    return plan_written_tensors(reader, shapes, layout)


def choose_layout(layout: ExportLayout, config: Mapping[str, Any]) -> HFLayout:
    """Return "mixtral" for Mixtral's config and layout "per_expert", otherwise `layout`."""
    mixtral = config.get("model_type") == "mixtral"
    return "mixtral" if mixtral and layout == "per_expert" else layout


def make_items(
    dtypes: Mapping[str, torch.dtype],
    recipes: Mapping[str, FileRecipe],
    originals: Mapping[str, str],
    dtype: torch.dtype | None,
    keeps_dtype: Callable[[str], bool],
) -> Iterator[Item]:
    """Yield the tensors to write, in model order, then copies; no cast if `keeps_dtype(name)`."""
    items: dict[str, Item] = {}
    for name, recipe in recipes.items():
        if name == HEAD and HEAD in originals:
            continue
        cast = dtypes[name].is_floating_point and not keeps_dtype(name)
        item_dtype = dtype if cast and dtype is not None else dtypes[name]
        for piece in recipe.pieces:
            item = items.get(piece.name, Item(piece.name, piece.file_shape, item_dtype, ()))
            wide = torch.promote_types(item.dtype, item_dtype)
            items[piece.name] = replace(item, dtype=wide, parts=(*item.parts, (name, piece)))
    yield from items.values()
    for copy, original in originals.items():
        if copy != HEAD:
            yield replace(items[original], name=copy)


def make_export_config(model: nn.Module, config: HFConfig | None) -> dict[str, Any]:
    """Return the fields of the config.json to write; ValueError if `config` is of another model."""
    if isinstance(model, Decoder):
        if config is None:
            raise ValueError(
                f"config (None) must be given for {type(model).__name__}: pass the config.json of "
                "the Hugging Face model that it is, as a path or a mapping"
            )
        values = complete_config(read_config(config), model.config.num_mtp_layers)
        decoder_config_from_hf(values)  # raises an error unless a native decoder can be this model
        _check_config(values, model.config, skipped_fields=list_training_fields(model.config.moe))
        return values
    model_config = getattr(model, "config", None)
    if not hasattr(model_config, "to_dict"):
        for path, module in model.named_modules():
            if isinstance(module, Decoder) or find_transformers_class(type(module)) is not None:
                raise ValueError(
                    f"model ({type(model).__name__}) must be the {type(module).__name__} in it, "
                    f"whose Hugging Face names are known: pass model.{path}"
                )
        raise_unknown_model(model)
    upcycled = make_upcycled_config(model)
    expected_values: dict[str, Any] = model_config.to_dict() if upcycled is None else upcycled  # type: ignore[union-attr]
    if config is None:
        values = expected_values
    else:
        values = read_config(config)
        _check_config(values, expected_values)
    return complete_config(values, 0, type(model) if upcycled is None else None)


def complete_config(
    hf_config: Mapping[str, Any], num_mtp: int, model_class: type | None = None
) -> dict[str, Any]:
    """Return config.json's fields, with the number of MTP modules and the class name to write."""
    hf_config = {k: v for k, v in hf_config.items() if k != "quantization_config"}
    for key in MTP_KEYS:
        if key in hf_config:
            hf_config[key] = num_mtp
    if num_mtp and not any(key in hf_config for key in MTP_KEYS):
        hf_config[MTP_KEYS[0]] = num_mtp
    family = FAMILIES.get(str(hf_config.get("model_type")))
    name = family.architecture if family else model_class.__name__ if model_class else None
    kind = find_transformers_class(model_class) if model_class else None
    if kind is not None:
        # The class may have another head than the config's class.
        hf_config["architectures"] = [kind.__name__]
    elif not hf_config.get("architectures") and name:
        hf_config["architectures"] = [name]
    try:
        result: dict[str, Any] = json.loads(json.dumps(hf_config))
    except (TypeError, ValueError) as error:
        raise ValueError(f"config must be JSON-able: {error}") from None
    return result


def _check_config(
    hf_config: Mapping[str, Any],
    model: DecoderConfig | Mapping[str, Any],
    *,
    skipped_fields: Collection[str] = TRAINING,
) -> None:
    """Raise ValueError if config.json's fields `hf_config` differ from the model's config."""
    for problem in compare_config(hf_config, model, skipped_fields=skipped_fields):
        raise ValueError(f"{problem}: pass the config of this model")


def build_checked_meta_model(
    model: nn.Module, hf_config: Mapping[str, Any], shapes: Shapes
) -> nn.Module | None:
    """Build on meta the transformers model that would load the export; ValueError if it differs."""
    is_part = getattr(model, "base_model", None) is model  # the class with a head would load it
    full_reader = build_meta_model({**hf_config, "architectures": None}) if is_part else None
    reader = full_reader or build_meta_model(hf_config, model)
    if reader is not None:
        kind = type(reader)
        _check_tensor_shapes(
            model, kind, get_shapes(reader.state_dict()), rename_expert_shapes(shapes)
        )
        layers = {clean_name(n): m for n, m in model.named_modules() if isinstance(m, MoELayer)}
        for path, layer in layers.items():
            block = reader.get_submodule(path)  # exists, because names and shapes are equal
            adapter = find_hf_adapter(block)  # None = the caller passed the rule
            if adapter is None:
                continue
            for field in find_moe_differences(layer.config, adapter(block, reader).config):
                raise ValueError(
                    f"{path}'s {field.name} ({field.value}) must be {field.reference} as in "
                    f"{kind.__name__} with this config, which reads the directory: correct one of "
                    "them"
                )
    return reader


def check_tied_head(tensors: Mapping[str, Tensor], originals: Mapping[str, str]) -> None:
    """Raise ValueError if `originals` ties head and embedding, but this rank's shards differ."""
    if HEAD not in originals or not {HEAD, EMBEDDING} <= tensors.keys():
        return
    if tensors[HEAD] is tensors[EMBEDDING]:
        return
    head, table = get_detached_shard(tensors[HEAD]), get_detached_shard(tensors[EMBEDDING])
    is_equal = head.shape == table.shape and head.dtype == table.dtype
    if not is_equal or not (head.is_meta or torch.equal(head, table)):
        raise ValueError(
            f"{HEAD} must equal {EMBEDDING} with config.tie_word_embeddings (True), because the "
            "files hold one of them: call model.tie_weights(), or set it to False"
        )


def _check_tensor_shapes(
    model: nn.Module, model_class: Any, class_shapes: Shapes, shapes: Shapes
) -> None:
    """Raise ValueError if the model's tensor `shapes` differ from the shapes of `model_class`."""
    class_name = model_class.__name__
    for name, shape in class_shapes.items():
        if name not in shapes:
            raise ValueError(
                f"model ({type(model).__name__}) must hold {format_name(name)} of {class_name}, "
                f"which reads the directory: {_suggest_fix(class_name, name, class_shapes, shapes)}"
            )
        if shapes[name] != shape:
            raise ValueError(
                f"{format_name(name)} {shapes[name]} must be {shape} in {class_name}, which "
                "reads the directory: correct the model's config"
            )
    for name in shapes:
        if name not in class_shapes:
            raise ValueError(
                f"{format_name(name)} {shapes[name]} must be a tensor of {class_name}, which "
                "reads the directory: take it off the model, or correct the model's config"
            )


def _suggest_fix(class_name: str, missing_name: str, class_shapes: Shapes, shapes: Shapes) -> str:
    """Return the fix for the error that the model lacks the tensor `missing_name`."""
    if any(part in name for name in shapes for part in ADAPTERS):
        return "merge adapters first, with peft's merge_and_unload(), and pass what it returns"
    for name in shapes:
        prefix = name.removesuffix(missing_name)
        if prefix != name and all(f"{prefix}{other}" in shapes for other in class_shapes):
            return f"pass model.{prefix[:-1]}"
    return f"pass the whole {class_name}, with its names"
