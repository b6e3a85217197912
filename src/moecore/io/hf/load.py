"""load_hf fills a model from a Hugging Face directory, every rank its shards; init_hf from a seed.

Names, shapes and dtypes are compared from the headers alone, on every rank, and all that is wrong
is one error before the first value is written. Then each rank copies box after box of the files
into its shards, so it never holds more than `CHUNK_BYTES` or one expert's matrix besides the model.
"""

from __future__ import annotations

import os
import re
import time
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

from moecore.base.failures import share_call_errors, share_errors
from moecore.base.fields import Seed, check_arguments
from moecore.base.params import (
    clean_name,
    global_indices,
    init_normal_,
)
from moecore.families.transformers.lora import adapted, trained_copies, without_adapters
from moecore.io.checkpoint.config_differences import own_config
from moecore.io.checkpoint.ranks import gather, is_first_rank, on_every_rank, on_first_rank
from moecore.io.checkpoint.state import fresh_buffers
from moecore.io.hf.config import config_problems
from moecore.io.hf.config_fields import read_config
from moecore.io.hf.files import CONFIG, HFFiles, listed, one_line, read_headers
from moecore.io.hf.names import (
    HEAD,
    find_layout,
    first_ignored_layer,
    hf_plan,
    model_copies,
    model_tensors,
)
from moecore.io.hf.pieces import FileRecipe, holding_of, local_part, overlaps
from moecore.io.hf.quant import FP8, TensorSource, find_sources, viewed
from moecore.io.hf.stock import published_shapes, reader_of, stock_plan
from moecore.io.hf.upcycled import upcycled_config
from moecore.io.hf.verify import LAYER, copy_problems
from moecore.models.decoder import Decoder
from moecore.moe.routed import RoutedExperts
from moecore.parallel.model.parallel_state import find_stages
from moecore.train.rerun import drop_step

CHUNK_BYTES = 64 << 20
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\..*")


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What `load_hf` did.

    Attributes:
        bytes_read: of tensor data, by this rank, for its shards; quantised ones as stored.
        compared_bytes: read besides, to see that copies (a tied head, DeepSeek-V3's second
            embedding) equal their originals.
        total_bytes: of all tensors in the files that the model takes.
        tensors: of the model that were filled.
        missing: of the model, not in the files; left as they were. Empty with `strict`.
        left_over: in the files, not in the model.
        seconds: from call to return.
    """

    bytes_read: int
    compared_bytes: int
    total_bytes: int
    tensors: int
    missing: tuple[str, ...]
    left_over: tuple[str, ...]
    seconds: float


@dataclass(slots=True)
class _LoadPlan:
    """What goes where, what speaks against it, and (buffer, value) that no file holds."""

    targets: dict[str, Tensor]
    recipes: dict[str, FileRecipe]
    missing: list[str]
    left_over: list[str]
    problems: list[str]
    buffers: list[tuple[Tensor, Tensor]]


@torch.no_grad()
@share_call_errors
def load_hf(
    path: str | os.PathLike[str], model: nn.Module, *, strict: bool = True, cast: bool = False
) -> LoadReport:
    """Fill a model from a Hugging Face directory, in place. Collective.

    Files may hold experts stacked ("fused", as transformers has them in memory) or one by one (as
    published), in fp32, bf16, fp16, DeepSeek-V3's block-wise FP8 or gpt-oss's MXFP4; the last two
    are dequantised into the dtype of the parameter. Of a PeftModel the adapted model is filled, and
    the copies that `modules_to_save` trains; its adapters stay. Buffers that are in no file, such
    as transformers' rotary frequencies, are worked out anew, because `to_empty` leaves them
    undefined. What a half-done step has left is dropped (`TrainStep.drop`). Of pipeline stages each
    takes its own tensors.

    Args:
        path: a directory that every rank sees, with config.json and model.safetensors, or shards
            and their index.
        model: a `moecore.models.Decoder`, a transformers model or a PeftModel of one, plain or
            parallelized, with real storage (after `to_empty`), any dtypes and devices.
        strict: every tensor of the model must be in the files, and the other way round; and
            config.json must describe the model as it is, but for what only training reads.
            Multi-token prediction modules are left out without a word where transformers has none.
            False loads what both have, reports the rest and warns of the config; half a parameter
            stays an error.
        cast: round values to a parameter's dtype that does not hold them all (fp32 files into a
            bf16 model). Widening, and quantised values, need no leave.

    Raises:
        ValueError: on every rank, listing what does not fit, before anything is written.
        NotImplementedError: for a model whose Hugging Face names are not known.
        OSError: on every rank, when one could not read; the model may then be part old, part new.
    """
    arguments = locals()
    with share_errors():
        check_arguments(load_hf, arguments)
        start, path = time.monotonic(), Path(path)
        outer_model, model = model, adapted(model)
    # Rank 0 reads headers and config for all: thousands of ranks would read the same.
    table, config = on_first_rank(lambda: (read_headers(path), read_config(path)))
    with HFFiles(path, table) as files:
        with share_errors():
            sources, problems = find_sources(files, config.get("quantization_config"))
            problems += _config_problems(path, model, config, strict=strict)
            plan = _make_plan(files, model, sources, problems, strict=strict, cast=cast)
        if find_stages(model)[1] is not None:  # what other stages take is not left over
            common_names = set.intersection(*map(set, gather(plan.left_over)))
            plan.left_over = [name for name in plan.left_over if name in common_names]
        on_every_rank(lambda: _check_plan(path, model, plan, strict=strict))
        compared_bytes = files.bytes_read
        drop_step(outer_model)
        on_every_rank(lambda: _fill_all(model, plan, sources, files))
        read = files.bytes_read - compared_bytes
    file_names = {p.name for recipe in plan.recipes.values() for p in recipe.pieces}
    return LoadReport(
        bytes_read=read,
        compared_bytes=compared_bytes,
        total_bytes=sum(table[part].nbytes for n in file_names for part in sources[n].parts),
        tensors=len(plan.recipes),
        missing=tuple(plan.missing),
        left_over=tuple(plan.left_over),
        seconds=time.monotonic() - start,
    )


def _config_problems(
    path: Path, model: nn.Module, config: Mapping[str, Any], *, strict: bool
) -> list[str]:
    """How config.json describes another model than this one; without `strict` only a warning."""
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
    """Return a config.json as the config of a transformers model of that type would write it."""
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


def _check_plan(path: Path, model: nn.Module, plan: _LoadPlan, *, strict: bool) -> None:
    """Raise ValueError with all that does not fit; else complete the plan."""
    if strict:
        objected = _objected(plan.left_over, first_ignored_layer(model))
        plan.problems += [f"{name} is no tensor of the model" for name in objected]
    if plan.problems:
        raise ValueError(
            f"path ({path}) must fit the model: {listed(plan.problems)}: correct the model's "
            "config or the files"
        )
    plan.buffers += fresh_buffers(model)


def _make_plan(
    files: HFFiles,
    model: nn.Module,
    sources: Mapping[str, TensorSource],
    problems: list[str],
    *,
    strict: bool,
    cast: bool,
) -> _LoadPlan:
    """Return what goes where, and what speaks against it."""
    if not (files.path / CONFIG).is_file():
        raise ValueError(
            f"path ({files.path}) must be visible to every rank: use a shared file system"
        )
    sources = _drop_zero_experts(model, sources)
    targets = without_adapters(model, model_tensors(model))
    copies = model_copies(model)
    recipes = _recipes(model, {name: tuple(t.shape) for name, t in targets.items()}, sources)
    if find_stages(model)[1] is not None:
        recipes = {name: recipe for name, recipe in recipes.items() if name in targets}
    _drop_copies(targets, recipes, copies)
    piece_names = {piece.name for recipe in recipes.values() for piece in recipe.pieces}
    left_over = [name for name in sources if name not in piece_names and name not in copies]
    plan = _LoadPlan(targets, {}, [], left_over, list(problems), [])
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
    """Leave out what stock LongCat-Flash writes for experts that return their input."""
    layers = {n: m for n, m in model.named_modules() if isinstance(m, RoutedExperts)}
    E = {clean_name(n): m.config.num_experts for n, m in layers.items() if m.config.zero_experts}
    matches = {name: EXPERT.fullmatch(name) for name in sources if E}
    unused = {n for n, m in matches.items() if m and int(m[2]) >= E.get(m[1], inf)}
    return {name: source for name, source in sources.items() if name not in unused}


def _recipes(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]], sources: Mapping[str, TensorSource]
) -> dict[str, FileRecipe]:
    """Return what each tensor of a model is made of, and names of what files lack for it."""
    if isinstance(model, Decoder):
        return hf_plan(model.config, find_layout(sources))
    reader = reader_of(upcycled_config(model) or as_type(Any, model).config.to_dict(), model)
    files = {name: source.shape for name, source in sources.items()}
    return stock_plan(reader, shapes, files, {} if reader is None else published_shapes(reader))


def _drop_copies(
    targets: dict[str, Tensor], recipes: dict[str, FileRecipe], copies: Mapping[str, str]
) -> None:
    """Read a tied head once; where `to_empty` cut it loose once sharded, from its original."""
    if HEAD in copies and HEAD in recipes:
        original = copies[HEAD]
        if targets[HEAD] is targets.get(original) or not isinstance(targets[HEAD], DTensor):
            del recipes[HEAD]  # is tied again below
        else:
            recipes[HEAD] = recipes[original]


def _tie_head(model: nn.Module, targets: Mapping[str, Tensor]) -> None:
    """Undo what `to_empty` does to a plain transformers model with a tied head: two parameters."""
    # In a sharded model the first forward, which sets all owners of one, makes the two one again.
    copies = model_copies(model)
    if HEAD not in copies or HEAD not in targets or isinstance(targets[HEAD], DTensor):
        return
    if targets[HEAD] is not targets[copies[HEAD]]:
        as_type(Any, model).tie_weights()


def _objected(left_over: list[str], first_ignored: int | None) -> list[str]:
    """Names that `strict` does not let pass."""
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


def _fill_all(
    model: nn.Module, plan: _LoadPlan, sources: Mapping[str, TensorSource], files: HFFiles
) -> None:
    for name, recipe in plan.recipes.items():
        _fill(plan.targets[name], recipe, sources, files)
    for buffer, value in plan.buffers:
        buffer.copy_(value)
    for name, copy in trained_copies(model, model_tensors(model)).items():
        local_part(copy).copy_(local_part(plan.targets[name]))
    _tie_head(model, plan.targets)


def _fill(
    target: Tensor, recipe: FileRecipe, sources: Mapping[str, TensorSource], files: HFFiles
) -> None:
    """Copy this rank's part of every piece into its shard."""
    local = local_part(target)
    if local.numel() == 0:
        return
    holding = holding_of(global_indices(target))
    for piece in recipe.pieces:
        source = viewed(sources[piece.name], piece)
        max_numel = CHUNK_BYTES // source.dtype.itemsize
        for overlap in overlaps(holding, piece, recipe.shape, max_numel=max_numel):
            part = local[overlap.target]
            part.copy_(source.read(files, overlap.source).view(part.shape))


@torch.no_grad()
def init_hf(model: nn.Module, seed: Seed = 0) -> None:
    """Fill every parameter and buffer of a transformers model: the same values on every layout.

    transformers' own initialisation knows no DTensors and no MoELayers. Norms are 1, biases 0
    (gpt-oss's router bias and DeepSeek-V3's selection bias too), everything else is N(0, s^2) with
    s the config's `initializer_range`; buffers that no file holds (rotary frequencies) are worked
    out anew. No communication.

    Args:
        model: plain or parallelized, with storage; has a `config`.
        seed: different seeds give independent models, and CPU and CUDA different values.

    Raises:
        ValueError: for a model that is not transformers'.
        NotImplementedError: when a module's buffers cannot be worked out from its config.
    """
    check_arguments(init_hf, locals())
    std = getattr(getattr(model, "config", None), "initializer_range", None)
    if std is None:
        raise ValueError(
            f"model ({type(model).__name__}) must be a transformers model, whose config has an "
            "initializer_range: use moecore.parallel.init_modules, or a Decoder's init_weights"
        )
    for name, param in model.named_parameters():
        key = clean_name(name)
        if key.endswith("bias"):
            param.zero_()
        elif param.ndim == 1 and key.endswith("weight"):  # only norms have such weights
            param.fill_(1)
        else:
            init_normal_(param, std=std, key=key, seed=seed)
    for name, buffer in model.named_buffers():
        if clean_name(name).endswith("bias"):
            buffer.zero_()
    for buffer, value in fresh_buffers(model):
        buffer.copy_(value)
