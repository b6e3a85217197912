"""The Hugging Face tensors that an export or a stream makes of a model, and who holds their parts.

Each pipeline stage has its own tensors; names, shapes and order are those of the whole model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from moecore.base.fields import shown_name
from moecore.families.fp32_modules import keeps_fp32
from moecore.families.transformers.lora import adapted, trained_copies, without_adapters
from moecore.io.checkpoint.ranks import on_every_rank
from moecore.io.hf.collect import Holders, Item
from moecore.io.hf.config_fields import HFConfig
from moecore.io.hf.export_check import check_tied, checked_reader
from moecore.io.hf.export_config import export_config
from moecore.io.hf.names import HEAD, HFLayout, hf_plan, model_copies, model_tensors
from moecore.io.hf.pieces import FileRecipe
from moecore.io.hf.stock import Shapes, written_plan
from moecore.io.hf.upcycled import shared_of_no_size
from moecore.models.decoder import Decoder
from moecore.parallel.model.parallel_state import parallel_states

ExportLayout = Literal["per_expert", "fused"]
IN_LIST = re.compile(r".*?\.\d+\.")  # a name up to the entry of a list, such as a layer


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """What is written, of which tensors."""

    items: list[Item]
    holders: Holders
    tensors: dict[str, Tensor]  # of this rank's stages
    values: dict[str, Any]  # of config.json
    device: torch.device  # of messages


def plan_export(
    model: nn.Module,
    config: HFConfig | None,
    dtype: torch.dtype | None,
    layout: ExportLayout,
    *,
    needs_config: bool = True,
) -> ExportPlan:
    """Return what is written of a model without its adapters. Collective.

    Without `needs_config` a native decoder may have config None: it then has the names of all
    families but Mixtral's.
    """
    base = adapted(model)

    def read_model() -> tuple[dict[str, Any], dict[str, Tensor]]:
        lacks = config is None and not needs_config and isinstance(base, Decoder)
        values = {} if lacks else export_config(base, config)
        tensors = export_tensors(base, values)
        for name, tensor in tensors.items():
            if tensor.is_meta:
                raise ValueError(
                    f"{shown_name(name)} (meta) must have storage to be written: load it first"
                )
        check_tied(tensors, model_copies(base))
        return values, tensors

    values, tensors = on_every_rank(read_model)
    holders = Holders(tensors)

    def plan_items() -> list[Item]:
        recipes = _recipes(base, values, holders.shapes, names_of(layout, values))
        keeps = keeps_fp32(base, dtype)
        return list(make_items(holders.dtypes, recipes, model_copies(base), dtype, keeps))

    records = parallel_states(base)
    device = records[0].request.meshes.device if records else next(iter(tensors.values())).device
    return ExportPlan(on_every_rank(plan_items), holders, tensors, values, device)


def export_tensors(base: nn.Module, values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return this rank's tensors of what is written, by their names in a model without adapters."""
    all_tensors = model_tensors(base)
    tensors = without_adapters(base, all_tensors) | trained_copies(base, all_tensors)
    return tensors | shared_of_no_size(base, values, tensors)


def _recipes(
    model: nn.Module, values: Mapping[str, Any], shapes: Shapes, layout: HFLayout
) -> dict[str, FileRecipe]:
    """Return what a model's files are made of; refuse what would not give the model back."""
    if isinstance(model, Decoder):
        recipes = hf_plan(model.config, layout)
        for name in recipes.keys() - shapes.keys():
            raise ValueError(
                f"model must hold {shown_name(name)} on a pipeline stage: take all of its stages"
            )
        return recipes
    reader = checked_reader(model, values, shapes)
    if reader is not None:  # stages hold layers in an order of their own
        places: dict[str, int] = {}
        for place, name in enumerate(reader.state_dict()):
            places.setdefault(_entry(name), place)
        shapes = dict(
            sorted(shapes.items(), key=lambda entry: places.get(_entry(entry[0]), len(places)))
        )
    return written_plan(reader, shapes, layout)


def _entry(name: str) -> str:
    """Return the part of a name up to the entry of a list; a name in no list itself."""
    match = IN_LIST.match(name)
    return name if match is None else match[0]


def names_of(layout: ExportLayout, config: Mapping[str, Any]) -> HFLayout:
    """Return the names of a native decoder's files; Mixtral has its own."""
    mixtral = config.get("model_type") == "mixtral"
    return "mixtral" if mixtral and layout == "per_expert" else layout


def make_items(
    dtypes: Mapping[str, torch.dtype],
    recipes: Mapping[str, FileRecipe],
    copies: Mapping[str, str],
    dtype: torch.dtype | None,
    keeps: Callable[[str], bool],
) -> Iterator[Item]:
    """Yield what to write, in model order; DeepSeek-V3's copies last, a tied head not at all."""
    items: dict[str, Item] = {}
    for name, recipe in recipes.items():
        if name == HEAD and HEAD in copies:
            continue
        cast = dtypes[name].is_floating_point and not keeps(name)
        item_dtype = dtype if cast and dtype is not None else dtypes[name]
        for piece in recipe.pieces:
            item = items.get(piece.name, Item(piece.name, piece.file_shape, item_dtype, ()))
            wide = torch.promote_types(item.dtype, item_dtype)  # so it holds all values
            items[piece.name] = replace(item, dtype=wide, parts=(*item.parts, (name, piece)))
    yield from items.values()
    for copy, original in copies.items():
        if copy != HEAD:
            yield replace(items[original], name=copy)
