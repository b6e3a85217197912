"""load_hf fills a model from a Hugging Face directory, every rank its shards; init_hf from a seed.

    read_headers, find_sources    files.py, quant.py    tensors of the files by logical name
    plan_hf_tensors               names.py              `FileRecipe`: pieces of a decoder's tensor
    plan_stock_tensors            stock.py              the same for a transformers model
    make_load_plan                load.py               `LoadPlan`: targets of tensors, problems
    iterate_shard_boxes           pieces.py             the part of each local shard
    read_box                      quant.py, files.py    the values of one box, dequantised

Every rank compares names, shapes and dtypes from the headers, and one error lists all mismatches.
Each rank then copies boxes of the files into its shards, so its memory beyond the model is at most
`CHUNK_BYTES` or one expert's matrix.
"""

from __future__ import annotations

import os
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

from moecore.base.failures import run_and_share_errors, share_call_errors, share_errors
from moecore.base.fields import Seed, check_arguments
from moecore.base.params import clean_name, init_normal_, write_values
from moecore.base.rank_checks import gather_objects
from moecore.families.transformers.lora import get_base_tensors, select_trained_copies, unwrap_peft
from moecore.io.checkpoint.config_differences import find_model_config
from moecore.io.checkpoint.files import join_problems, refuse_problems
from moecore.io.checkpoint.ranks import is_first_rank, run_on_first_rank
from moecore.io.checkpoint.shard_file import Meter, Progress
from moecore.io.checkpoint.transformers_buffers import compute_missing_buffers
from moecore.io.hf.config import compare_config
from moecore.io.hf.config_fields import read_config
from moecore.io.hf.files import CONFIG, HFFiles, format_error, read_headers
from moecore.io.hf.names import (
    HEAD,
    collect_model_tensors,
    find_first_ignored_layer,
    infer_hf_layout,
    map_model_copies,
    plan_hf_tensors,
)
from moecore.io.hf.pieces import FileRecipe, get_detached_shard, iterate_shard_boxes
from moecore.io.hf.quant import FP8, TensorSource, find_sources, read_box
from moecore.io.hf.stock import build_meta_model, compute_published_shapes, plan_stock_tensors
from moecore.io.hf.upcycled import make_upcycled_config
from moecore.io.hf.verify import EXPERT, LAYER, find_copy_problems
from moecore.models.decoder import Decoder
from moecore.moe.experts import Experts
from moecore.parallel.model.parallel_state import find_staged_module
from moecore.train.expert_moves import run_in_expert_order
from moecore.train.rerun import drop_step

CHUNK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Sizes, mismatches and duration of a `load_hf` call.

    Attributes:
        bytes_read: bytes of tensor data that this rank read for its shards, before dequantisation.
        compared_bytes: bytes that this rank read in addition to compare copies (a tied head,
            DeepSeek-V3's second embedding) with their originals.
        total_bytes: bytes of all file tensors that the model also has.
        tensors: number of the model's tensors that were filled.
        missing: names of the model's tensors without a file tensor, which keep their values. Empty
            with `strict`.
        left_over: names of the file tensors that the model does not have.
        seconds: duration of the call.
    """

    bytes_read: int
    compared_bytes: int
    total_bytes: int
    tensors: int
    missing: tuple[str, ...]
    left_over: tuple[str, ...]
    seconds: float


@torch.no_grad()
@share_call_errors
@run_in_expert_order
def load_hf(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    strict: bool = True,
    cast: bool = False,
    progress: Progress | None = None,
) -> LoadReport:
    """Load a Hugging Face directory into a model, in place. Collective.

    Experts in files may be stacked ("fused", as in transformers' memory) or separate (as
    published). Files may be in fp32, bf16, fp16, or in DeepSeek-V3's block-wise FP8, gpt-oss's
    MXFP4 and bitsandbytes' 4 bits, which are dequantised. Frozen weights of the model that are
    stored in 4 bits are quantised. For a PeftModel, the base model and the trained copies of
    `modules_to_save` are filled, and adapters are unchanged. Buffers without a file, such as rotary
    frequencies, are recomputed. Gradients and token counts of an unfinished step are dropped
    (`TrainStep.drop`). Each pipeline stage loads its tensors.

    Args:
        path: a directory that every rank sees, with config.json and model.safetensors, or shards
            and their index.
        model: a `moecore.models.Decoder`, a transformers model or a PeftModel of one, plain or
            parallelized, with real storage (after `to_empty`), any dtypes and devices.
        strict: model and files must have the same tensors, and config.json must describe the model,
            except fields that only training reads. Multi-token prediction modules are ignored
            if the transformers class has none. False loads the common tensors, reports all other
            tensors and warns of config differences. A partly stored parameter is always an error.
        cast: allow rounding to a parameter's narrower dtype (fp32 files into a bf16 model).
        progress: called with (bytes filled, bytes of this rank's tensors).

    Raises:
        ValueError: on every rank, listing all mismatches, before any parameter changes.
        NotImplementedError: for a model whose Hugging Face names are not known.
        OSError: on every rank, if one rank could not read; the model may then be partly loaded.
    """
    with share_errors():
        check_arguments(load_hf, locals())
        start, path = time.monotonic(), Path(path)
        outer_model, model = model, unwrap_peft(model)
    # Rank 0 reads headers and config for all ranks.
    table, config = run_on_first_rank(lambda: (read_headers(path), read_config(path)))
    with HFFiles(path, table) as files:
        with share_errors():
            sources, problems = find_sources(files, config.get("quantization_config"))
            problems += find_config_problems(path, model, config, strict=strict)
            plan = make_load_plan(files, model, sources, problems, strict=strict, cast=cast)
        if find_staged_module(model)[1] is not None:  # other stages load the other tensors
            common_names = set.intersection(*map(set, gather_objects(plan.left_over)))
            plan.left_over = [name for name in plan.left_over if name in common_names]
        run_and_share_errors(lambda: check_load_plan(path, model, plan, strict=strict))
        compared_bytes = files.bytes_read
        drop_step(outer_model)
        meter = Meter(progress)
        run_and_share_errors(lambda: _fill_model(model, plan, sources, files, meter))
    piece_names = {p.name for recipe in plan.recipes.values() for p in recipe.pieces}
    return LoadReport(
        bytes_read=files.bytes_read - compared_bytes,
        compared_bytes=compared_bytes,
        total_bytes=files.count_bytes(part for name in piece_names for part in sources[name].parts),
        tensors=len(plan.recipes),
        missing=tuple(plan.missing),
        left_over=tuple(plan.left_over),
        seconds=time.monotonic() - start,
    )


def _fill_model(
    model: nn.Module,
    plan: LoadPlan,
    sources: Mapping[str, TensorSource],
    files: HFFiles,
    meter: Meter,
) -> None:
    """Read this rank's shards from the file tensors `sources`; fill buffers and peft's copies."""
    dtypes = {name: source.dtype for name, source in sources.items()}
    meter.expect(sum(get_detached_shard(target).nbytes for target in plan.targets.values()))
    boxes = iterate_shard_boxes(plan.targets, plan.recipes, dtypes, CHUNK_BYTES)
    for piece, param, overlap in boxes:
        write_values(param, overlap.target, read_box(files, sources, piece, overlap.source))
        meter.add(get_detached_shard(param)[overlap.target].nbytes)
    for buffer, value in plan.buffers:
        buffer.copy_(value)
    for name, copy in select_trained_copies(model, plan.tensors).items():
        get_detached_shard(copy).copy_(get_detached_shard(plan.targets[name]))
    if plan.ties_head:
        as_type(Any, model).tie_weights()


@dataclass(slots=True)
class LoadPlan:
    """The tensors that `load_hf` fills on this rank, how files store them, and all mismatches."""

    tensors: dict[str, Tensor]  # of the model, including adapters
    targets: dict[str, Tensor]  # of the model without adapters
    recipes: dict[str, FileRecipe]
    missing: list[str]
    left_over: list[str]
    problems: list[str]
    buffers: list[tuple[Tensor, Tensor]]
    ties_head: bool  # whether to tie head and embedding again after `to_empty`


def find_config_problems(
    path: Path, model: nn.Module, config: Mapping[str, Any], *, strict: bool
) -> list[str]:
    """Return error texts if config.json does not fit the model; only warn unless `strict`."""
    model_config = find_model_config(model) if "model_type" in config else None
    try:
        problems = compare_config(_normalize_config(config, model), model_config)
    except ValueError as error:
        problems = [str(error)]
    if strict or not problems:
        return problems
    if is_first_rank():
        warnings.warn(
            f"path ({path}): {join_problems(problems)}: loaded all the same", stacklevel=4
        )
    return []


def _normalize_config(hf_config: Mapping[str, Any], model: nn.Module) -> Mapping[str, Any]:
    """Return config.json's fields as the model's transformers config class writes them."""
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if isinstance(model, Decoder) or kind is None or kind != hf_config.get("model_type"):
        return hf_config
    try:
        model_values: dict[str, Any] = type(config).from_dict(dict(hf_config)).to_dict()
    except Exception as error:  # of many kinds, some of them no ValueError
        reason = f"{type(error).__name__}: {format_error(error)}"
        raise ValueError(f"config.json must be of model_type ({kind}), but {reason:.200}") from None
    return model_values


def check_load_plan(path: Path, model: nn.Module, plan: LoadPlan, *, strict: bool) -> None:
    """Raise one ValueError with all mismatches; otherwise add recomputed buffers to the plan."""
    if strict:
        unexpected_names = _select_unexpected_names(plan.left_over, find_first_ignored_layer(model))
        plan.problems += [f"{name} is no tensor of the model" for name in unexpected_names]
    fix = "correct the model's config or the files"
    refuse_problems(f"path ({path}) must fit the model", plan.problems, fix)
    plan.buffers += compute_missing_buffers(model)


def make_load_plan(
    files: HFFiles,
    model: nn.Module,
    sources: Mapping[str, TensorSource],
    problems: list[str],
    *,
    strict: bool,
    cast: bool,
) -> LoadPlan:
    """Plan a load of the file tensors `sources`; the result includes the error texts `problems`."""
    if not (files.path / CONFIG).is_file():
        raise ValueError(
            f"path ({files.path}) must be visible to every rank: use a shared file system"
        )
    sources = _drop_zero_experts(model, sources)
    tensors = collect_model_tensors(model)
    targets = get_base_tensors(model, tensors)
    copies = map_model_copies(model)
    recipes = _plan_recipes(model, {name: tuple(t.shape) for name, t in targets.items()}, sources)
    if find_staged_module(model)[1] is not None:
        recipes = {name: recipe for name, recipe in recipes.items() if name in targets}
    ties_head = _drop_tied_head(targets, recipes, copies)
    piece_names = {piece.name for recipe in recipes.values() for piece in recipe.pieces}
    left_over = [name for name in sources if name not in piece_names and name not in copies]
    plan = LoadPlan(tensors, targets, {}, [], left_over, list(problems), [], ties_head)
    for name, recipe in recipes.items():
        absent = [p.name for p in recipe.pieces if p.name not in sources]
        if len(absent) == len(recipe.pieces) and not strict:
            plan.missing.append(name)
            continue
        plan.problems += [f"{hf_name} is missing" for hf_name in absent]
        plan.problems += _find_tensor_problems(targets[name], recipe, sources, cast)
        plan.recipes[name] = recipe
    if not plan.problems:
        plan.problems += find_copy_problems(files, sources, copies)
    return plan


def _drop_zero_experts(
    model: nn.Module, sources: Mapping[str, TensorSource]
) -> dict[str, TensorSource]:
    """Return the sources without tensors of LongCat-Flash's zero-computation experts."""
    layers = {n: m for n, m in model.named_modules() if isinstance(m, Experts)}
    E = {clean_name(n): m.config.num_experts for n, m in layers.items() if m.config.zero_experts}
    matches = {name: EXPERT.fullmatch(name) for name in sources if E}
    unused = {n for n, m in matches.items() if m and int(m[2]) >= E.get(m[1], inf)}
    return {name: source for name, source in sources.items() if name not in unused}


def _plan_recipes(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]], sources: Mapping[str, TensorSource]
) -> dict[str, FileRecipe]:
    """Return, by name, the file tensors that store each model tensor; `sources` may lack them."""
    if isinstance(model, Decoder):
        return plan_hf_tensors(model.config, infer_hf_layout(sources), shapes)
    reader = build_meta_model(
        make_upcycled_config(model) or as_type(Any, model).config.to_dict(), model
    )
    files = {name: source.shape for name, source in sources.items()}
    return plan_stock_tensors(
        reader, shapes, files, {} if reader is None else compute_published_shapes(reader)
    )


def _drop_tied_head(
    targets: Mapping[str, Tensor], recipes: dict[str, FileRecipe], originals: Mapping[str, str]
) -> bool:
    """Plan to read a tied head as the embedding, or skip it; return whether to tie both again."""
    # `to_empty` unties them. The first forward of a sharded model ties them again, so the head is
    # read from the embedding's tensor.
    if HEAD not in originals or HEAD not in targets:
        return False
    original = originals[HEAD]
    is_tied, is_sharded = targets[HEAD] is targets.get(original), isinstance(targets[HEAD], DTensor)
    if is_sharded and not is_tied:
        recipes[HEAD] = recipes[original]
    else:
        recipes.pop(HEAD, None)
    return not is_tied and not is_sharded


def _select_unexpected_names(unused_names: list[str], first_ignored_layer: int | None) -> list[str]:
    """Return the unused names that are errors; layers >= `first_ignored_layer` are ignored."""
    names = [n for n in unused_names if not n.endswith("rotary_emb.inv_freq")]
    if first_ignored_layer is None:
        return names
    names = [n for n in names if not n.startswith("mtp.")]
    return [n for n in names if not (m := LAYER.match(n)) or int(m[1]) < first_ignored_layer]


def _find_tensor_problems(
    target: Tensor, recipe: FileRecipe, sources: Mapping[str, TensorSource], cast: bool
) -> list[str]:
    """Return an error text per wrong shape or dtype in a recipe; `cast` as in `load_hf`."""
    problems = []
    for piece in recipe.pieces:
        source = sources.get(piece.name)
        if source is None:
            continue
        if source.shape != piece.file_shape:
            problems.append(f"{piece.name} {source.shape} must be {piece.file_shape}")
        problem = _find_dtype_problem(source, target.dtype, cast)
        if problem:
            problems.append(f"{piece.name} ({source.dtype}) {problem}")
    if target.is_meta:
        problems.append(f"{recipe.pieces[0].name} has no storage in the model: call to_empty first")
    return problems


def _find_dtype_problem(source: TensorSource, target_dtype: torch.dtype, cast: bool) -> str:
    """Return the reason why a file tensor cannot be loaded into `target_dtype`, or ""."""
    if source.dtype == target_dtype:
        return ""
    floats = source.dtype.is_floating_point and target_dtype.is_floating_point
    if not floats or source.dtype in FP8 or source.dtype.itemsize < 2:
        return f"must be a float tensor for a parameter in {target_dtype}"
    if cast or source.quantized or torch.promote_types(source.dtype, target_dtype) == target_dtype:
        return ""
    return f"does not fit into {target_dtype} exactly (cast=True rounds)"


@torch.no_grad()
def init_hf(model: nn.Module, seed: Seed = 0) -> None:
    """Initialize a transformers model from a seed; values do not depend on the parallel layout.

    Norms are 1, biases 0, and other parameters N(0, s^2) with s the config's `initializer_range`.
    Buffers without a file, such as rotary frequencies, are recomputed. No communication.

    Args:
        model: plain or parallelized, with storage; has a `config`.
        seed: different seeds give independent models. CPU and CUDA give different values.

    Raises:
        ValueError: for a model that is not from transformers.
        NotImplementedError: if a module's buffers cannot be recomputed from its config.
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
    for buffer, value in compute_missing_buffers(model):
        buffer.copy_(value)
