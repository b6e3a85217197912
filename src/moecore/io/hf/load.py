"""load_hf fills a model from a Hugging Face directory, every rank its shards; init_hf from a seed.

    read_headers, find_sources    files.py, quant.py    tensors of the files by logical name
    hf_plan or stock_plan         names.py, stock.py    `FileRecipe`: pieces of a model's tensor
    make_load_plan                load_plan.py          `LoadPlan`: targets of tensors, problems
    shard_boxes                   pieces.py             `ShardBox`: the part of each local shard
    read_box                      quant.py, files.py    the values of one box, dequantised

Names, shapes and dtypes are compared from the headers alone, on every rank, and all that is wrong
is one error before the first value is written. Then each rank copies box after box of the files
into its shards, so it never holds more than `CHUNK_BYTES` or one expert's matrix besides the model.
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
    """What `load_hf` did.

    Attributes:
        bytes_read: of tensor data, by this rank, for its shards; quantised ones as stored.
        compared_bytes: read besides, to see that copies (a tied head, DeepSeek-V3's second
            embedding) equal their originals.
        total_bytes: bytes of all file tensors that the model has.
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
        progress: called with (bytes filled, bytes of this rank's tensors).

    Raises:
        ValueError: on every rank, listing all mismatches, before any parameter changes.
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
    """Copy this rank's part of every tensor into its shard, and fill tensors without a file."""
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
