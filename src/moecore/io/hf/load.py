"""load_hf fills a model from a Hugging Face directory, every rank its shards; init_hf from a seed.

    read_headers, find_sources    files.py, quant.py    tensors of the files by logical name
    hf_plan or stock_plan         names.py, stock.py    `FileRecipe`: pieces of a model's tensor
    make_load_plan                load_plan.py          `LoadPlan`: targets of tensors, problems
    shard_boxes                   pieces.py             `ShardBox`: the part of each local shard
    read_box                      quant.py, files.py    the values of one box, dequantised

Every rank compares names, shapes and dtypes from the headers. One error lists all mismatches before
the first value is written. Each rank then copies boxes of the files into its shards, so its memory
beyond the model is at most `CHUNK_BYTES` or one expert's matrix.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from typing import cast as as_type

import torch
from torch import nn

from moecore.base.failures import share_call_errors, share_errors
from moecore.base.fields import Seed, check_arguments
from moecore.base.params import clean_name, init_normal_
from moecore.families.transformers.lora import adapted, trained_copies
from moecore.io.checkpoint.ranks import gather, on_every_rank, on_first_rank
from moecore.io.checkpoint.shard_file import Meter, Progress
from moecore.io.checkpoint.state import fresh_buffers
from moecore.io.hf.config_fields import read_config
from moecore.io.hf.files import HFFiles, read_headers
from moecore.io.hf.load_plan import LoadPlan, check_load_plan, make_load_plan, model_config_problems
from moecore.io.hf.pieces import local_part, shard_boxes
from moecore.io.hf.quant import TensorSource, find_sources, read_box, stored_names
from moecore.parallel.model.parallel_state import find_stages
from moecore.train.rerun import drop_step

CHUNK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Sizes and mismatches of a `load_hf`.

    Attributes:
        bytes_read: of tensor data, by this rank, for its shards; quantised tensors as stored.
        compared_bytes: read in addition, to compare copies (a tied head, DeepSeek-V3's second
            embedding) with their originals.
        total_bytes: bytes of all file tensors that the model has.
        tensors: number of the model's tensors that were filled.
        missing: names of the model's tensors without a file tensor, which keep their values. Empty
            with `strict`.
        left_over: names of the file tensors that the model does not have.
        seconds: from call to return.
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
def load_hf(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    strict: bool = True,
    cast: bool = False,
    progress: Progress | None = None,
) -> LoadReport:
    """Fill a model from a Hugging Face directory, in place. Collective.

    Experts in files may be stacked ("fused", as in transformers' memory) or separate (as
    published). Files may be in fp32, bf16, fp16, DeepSeek-V3's block-wise FP8 or gpt-oss's MXFP4;
    the last two are dequantised into the parameter's dtype. For a PeftModel, the base model and the
    trained copies of `modules_to_save` are filled, and adapters are unchanged. Buffers that no file
    has, such as transformers' rotary frequencies, are recomputed, because `to_empty` leaves them
    undefined. Gradients and counts of an unfinished step are dropped (`TrainStep.drop`). Each
    pipeline stage loads its own tensors.

    Args:
        path: a directory that every rank sees, with config.json and model.safetensors, or shards
            and their index.
        model: a `moecore.models.Decoder`, a transformers model or a PeftModel of one, plain or
            parallelized, with real storage (after `to_empty`), any dtypes and devices.
        strict: model and files must have the same tensors, and config.json must describe the model,
            except for fields that only training reads. Multi-token prediction modules are ignored
            if the transformers class has none. False loads the common tensors, reports the others
            and warns of config differences. A partly stored parameter is always an error.
        cast: allow rounding to a parameter's narrower dtype (fp32 files into a bf16 model).
            Widening and dequantisation are always allowed.
        progress: called with (bytes filled, bytes of this rank's tensors).

    Raises:
        ValueError: on every rank, listing all mismatches, before any parameter changes.
        NotImplementedError: for a model whose Hugging Face names are not known.
        OSError: on every rank, if one rank could not read; the model may then be partly loaded.
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
            problems += model_config_problems(path, model, config, strict=strict)
            plan = make_load_plan(files, model, sources, problems, strict=strict, cast=cast)
        if find_stages(model)[1] is not None:  # what other stages take is not left over
            common_names = set.intersection(*map(set, gather(plan.left_over)))
            plan.left_over = [name for name in plan.left_over if name in common_names]
        on_every_rank(lambda: check_load_plan(path, model, plan, strict=strict))
        compared_bytes = files.bytes_read
        drop_step(outer_model)
        meter = Meter(progress)
        on_every_rank(lambda: _fill(model, plan, sources, files, meter))
    piece_names = {p.name for recipe in plan.recipes.values() for p in recipe.pieces}
    return LoadReport(
        bytes_read=files.bytes_read - compared_bytes,
        compared_bytes=compared_bytes,
        total_bytes=files.num_bytes(stored_names(sources[name] for name in piece_names)),
        tensors=len(plan.recipes),
        missing=tuple(plan.missing),
        left_over=tuple(plan.left_over),
        seconds=time.monotonic() - start,
    )


def _fill(
    model: nn.Module,
    plan: LoadPlan,
    sources: Mapping[str, TensorSource],
    files: HFFiles,
    meter: Meter,
) -> None:
    """Copy this rank's part of every tensor into its shard, and fill tensors that no file has."""
    dtypes = {name: source.dtype for name, source in sources.items()}
    meter.expect(sum(local_part(target).nbytes for target in plan.targets.values()))
    for piece, box, part in shard_boxes(plan.targets, plan.recipes, dtypes, CHUNK_BYTES):
        part.copy_(read_box(files, sources, piece, box).view(part.shape))
        meter.add(part.nbytes)
    for buffer, value in plan.buffers:
        buffer.copy_(value)
    for name, copy in trained_copies(model, plan.tensors).items():
        local_part(copy).copy_(local_part(plan.targets[name]))
    if plan.ties_head:
        as_type(Any, model).tie_weights()


@torch.no_grad()
def init_hf(model: nn.Module, seed: Seed = 0) -> None:
    """Initialize all parameters and buffers of a transformers model, independent of the layout.

    transformers' own initialisation does not support DTensors and MoELayers. Norms are 1 and biases
    0 (also gpt-oss's router bias and DeepSeek-V3's selection bias). Other parameters are N(0, s^2)
    with s the config's `initializer_range`. Buffers that no file has (rotary frequencies) are
    recomputed. No communication.

    Args:
        model: plain or parallelized, with storage; has a `config`.
        seed: different seeds give independent models, and CPU and CUDA different values.

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
    for buffer, value in fresh_buffers(model):
        buffer.copy_(value)
