"""The plan of a load: the file tensors of each tensor of the model, and all mismatches.

Names, shapes and dtypes are compared from headers.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any
from typing import cast as as_type

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moecore.base.params import clean_name
from moecore.families.transformers.lora import without_adapters
from moecore.io.checkpoint.config_differences import own_config
from moecore.io.checkpoint.ranks import is_first_rank
from moecore.io.checkpoint.state import fresh_buffers
from moecore.io.hf.config import config_problems
from moecore.io.hf.files import CONFIG, HFFiles, listed, one_line
from moecore.io.hf.names import (
    HEAD,
    find_layout,
    first_ignored_layer,
    hf_plan,
    model_copies,
    model_tensors,
)
from moecore.io.hf.pieces import FileRecipe
from moecore.io.hf.quant import FP8, TensorSource
from moecore.io.hf.stock import published_shapes, reader_of, stock_plan
from moecore.io.hf.upcycled import upcycled_config
from moecore.io.hf.verify import LAYER, copy_problems
from moecore.models.decoder import Decoder
from moecore.moe.routed import RoutedExperts
from moecore.parallel.model.parallel_state import find_stages

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\..*")


@dataclass(slots=True)
class LoadPlan:
    """Targets and recipes of a load, its mismatches, and (buffer, value) of recomputed buffers."""

    tensors: dict[str, Tensor]  # of the model, with those of adapters
    targets: dict[str, Tensor]  # of the model that the files describe
    recipes: dict[str, FileRecipe]
    missing: list[str]
    left_over: list[str]
    problems: list[str]
    buffers: list[tuple[Tensor, Tensor]]
    ties_head: bool  # whether `to_empty` has cut a tied head loose from its embedding


def model_config_problems(
    path: Path, model: nn.Module, config: Mapping[str, Any], *, strict: bool
) -> list[str]:
    """Return how config.json and the model's config differ; without `strict`, warn instead."""
    model_config = own_config(model) if "model_type" in config else None
    try:
        problems = config_problems(_as_model_writes(config, model), model_config)
    except ValueError as error:
        problems = [str(error)]
    if strict or not problems:
        return problems
    if is_first_rank():
        warnings.warn(f"path ({path}): {listed(problems)}: loaded all the same", stacklevel=4)
    return []


def _as_model_writes(values: Mapping[str, Any], model: nn.Module) -> Mapping[str, Any]:
    """Return a config.json as the config class of the transformers model would write it."""
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if isinstance(model, Decoder) or kind is None or kind != values.get("model_type"):
        return values
    try:
        model_values: dict[str, Any] = type(config).from_dict(dict(values)).to_dict()
    except Exception as error:  # of many kinds, some of them no ValueError
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise ValueError(f"config.json must be of model_type ({kind}), but {reason:.200}") from None
    return model_values


def check_load_plan(path: Path, model: nn.Module, plan: LoadPlan, *, strict: bool) -> None:
    """Raise one ValueError with all mismatches; otherwise add recomputed buffers to the plan."""
    if strict:
        objected = _objected(plan.left_over, first_ignored_layer(model))
        plan.problems += [f"{name} is no tensor of the model" for name in objected]
    if plan.problems:
        raise ValueError(
            f"path ({path}) must fit the model: {listed(plan.problems)}: correct the model's "
            "config or the files"
        )
    plan.buffers += fresh_buffers(model)


def make_load_plan(
    files: HFFiles,
    model: nn.Module,
    sources: Mapping[str, TensorSource],
    problems: list[str],
    *,
    strict: bool,
    cast: bool,
) -> LoadPlan:
    """Return the plan of a load with its mismatches."""
    if not (files.path / CONFIG).is_file():
        raise ValueError(
            f"path ({files.path}) must be visible to every rank: use a shared file system"
        )
    sources = _drop_zero_experts(model, sources)
    tensors = model_tensors(model)
    targets = without_adapters(model, tensors)
    copies = model_copies(model)
    recipes = _recipes(model, {name: tuple(t.shape) for name, t in targets.items()}, sources)
    if find_stages(model)[1] is not None:
        recipes = {name: recipe for name, recipe in recipes.items() if name in targets}
    ties_head = _drop_copies(targets, recipes, copies)
    piece_names = {piece.name for recipe in recipes.values() for piece in recipe.pieces}
    left_over = [name for name in sources if name not in piece_names and name not in copies]
    plan = LoadPlan(tensors, targets, {}, [], left_over, list(problems), [], ties_head)
    for name, recipe in recipes.items():
        absent = [p.name for p in recipe.pieces if p.name not in sources]
        if len(absent) == len(recipe.pieces) and not strict:
            plan.missing.append(name)
            continue
        plan.problems += [f"{hf_name} is missing" for hf_name in absent]
        plan.problems += _tensor_problems(targets[name], recipe, sources, cast)
        plan.recipes[name] = recipe
    if not plan.problems:
        plan.problems += copy_problems(files, sources, copies)
    return plan


def _drop_zero_experts(
    model: nn.Module, sources: Mapping[str, TensorSource]
) -> dict[str, TensorSource]:
    """Drop the tensors that LongCat-Flash stores for experts that return their input."""
    layers = {n: m for n, m in model.named_modules() if isinstance(m, RoutedExperts)}
    E = {clean_name(n): m.config.num_experts for n, m in layers.items() if m.config.zero_experts}
    matches = {name: EXPERT.fullmatch(name) for name in sources if E}
    unused = {n for n, m in matches.items() if m and int(m[2]) >= E.get(m[1], inf)}
    return {name: source for name, source in sources.items() if name not in unused}


def _recipes(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]], sources: Mapping[str, TensorSource]
) -> dict[str, FileRecipe]:
    """Return the recipe of each tensor of a model; it also names file tensors that are missing."""
    if isinstance(model, Decoder):
        return hf_plan(model.config, find_layout(sources), shapes)
    reader = reader_of(upcycled_config(model) or as_type(Any, model).config.to_dict(), model)
    files = {name: source.shape for name, source in sources.items()}
    return stock_plan(reader, shapes, files, {} if reader is None else published_shapes(reader))


def _drop_copies(
    targets: Mapping[str, Tensor], recipes: dict[str, FileRecipe], copies: Mapping[str, str]
) -> bool:
    """Read a tied head once; return whether head and embedding must be tied again."""
    # `to_empty` makes two of them. In a sharded model the first forward, which sets all owners of
    # a parameter, makes the two one again, so the head is read from the embedding's tensor.
    if HEAD not in copies or HEAD not in targets:
        return False
    original = copies[HEAD]
    is_tied, is_sharded = targets[HEAD] is targets.get(original), isinstance(targets[HEAD], DTensor)
    if is_sharded and not is_tied:
        recipes[HEAD] = recipes[original]
    else:
        recipes.pop(HEAD, None)
    return not is_tied and not is_sharded


def _objected(left_over: list[str], first_ignored: int | None) -> list[str]:
    """Return the names of left-over file tensors that are an error with `strict`."""
    names = [n for n in left_over if not n.endswith("rotary_emb.inv_freq")]  # follows from config
    if first_ignored is None:
        return names
    names = [n for n in names if not n.startswith("mtp.")]
    return [n for n in names if not (m := LAYER.match(n)) or int(m[1]) < first_ignored]


def _tensor_problems(
    target: Tensor, recipe: FileRecipe, sources: Mapping[str, TensorSource], cast: bool
) -> list[str]:
    problems = []
    for piece in recipe.pieces:
        source = sources.get(piece.name)
        if source is None:
            continue
        if source.shape != piece.file_shape:
            problems.append(f"{piece.name} {source.shape} must be {piece.file_shape}")
        problem = _dtype_problem(source, target.dtype, cast)
        if problem:
            problems.append(f"{piece.name} ({source.dtype}) {problem}")
    if target.is_meta:
        problems.append(f"{recipe.pieces[0].name} has no storage in the model: call to_empty first")
    return problems


def _dtype_problem(source: TensorSource, target_dtype: torch.dtype, cast: bool) -> str:
    if source.dtype == target_dtype:
        return ""
    floats = source.dtype.is_floating_point and target_dtype.is_floating_point
    if not floats or source.dtype in FP8 or source.dtype.itemsize < 2:
        return f"must be a float tensor for a parameter in {target_dtype}"
    if cast or source.quantized or torch.promote_types(source.dtype, target_dtype) == target_dtype:
        return ""
    return f"does not fit into {target_dtype} exactly (cast=True rounds)"
