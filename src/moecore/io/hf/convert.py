"""Conversion between native checkpoints and Hugging Face directories, in one process.

Tensors are converted one at a time, so the peak memory is the largest Hugging Face tensor.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moecore.base.fields import NumBytes, check_arguments, format_name
from moecore.families.fp32_modules import is_selection_bias, make_fp32_predicate
from moecore.io.checkpoint.comparison import select_tensors
from moecore.io.checkpoint.directory import Step, check_run_is_new, make_step_path
from moecore.io.checkpoint.drafts import Draft, create_draft, publish, remove_draft
from moecore.io.checkpoint.files import refuse_problems
from moecore.io.checkpoint.lock import hold_lock
from moecore.io.checkpoint.manifest import (
    Manifest,
    ManifestChunk,
    ManifestFacts,
    StoredFile,
    StoredTensor,
    make_manifest,
)
from moecore.io.checkpoint.object_storage import AnyPath, make_path
from moecore.io.checkpoint.ranks import get_rank_and_world
from moecore.io.checkpoint.shard_file import CHUNK_BYTES, Meter, Progress, ShardWriter
from moecore.io.checkpoint.snapshot import read_versions
from moecore.io.checkpoint.store import verify
from moecore.io.hf.collect import Item, StoredCollector
from moecore.io.hf.config import compare_config, decoder_config_from_hf
from moecore.io.hf.config_fields import HFConfig, read_config
from moecore.io.hf.export import check_export_target, order_items, plan_shard_files, write_directory
from moecore.io.hf.export_plan import ExportLayout, choose_layout, complete_config, make_items
from moecore.io.hf.files import BoxReader, HFFiles, split_rows
from moecore.io.hf.names import (
    EMBEDDING,
    HEAD,
    HFLayout,
    infer_hf_layout,
    map_hf_copies,
    plan_hf_tensors,
)
from moecore.io.hf.pieces import FileRecipe, map_file_shapes
from moecore.io.hf.quant import TensorSource, find_sources, read_box
from moecore.io.hf.stock import build_meta_model, plan_written_tensors
from moecore.io.hf.verify import find_content_problems, find_copy_problems, find_shape_problems
from moecore.models.config import DecoderConfig

PREFIX = "model."  # of names of the model's tensors in a native checkpoint


def native_to_hf(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    config: HFConfig,
    dtype: torch.dtype | None = None,
    max_shard_bytes: NumBytes = 5 * 10**9,
    layout: ExportLayout = "per_expert",
    progress: Progress | None = None,
) -> int:
    """Convert a native checkpoint to a Hugging Face directory; return the number of tensors.

    Args:
        path: the directory or URL of a checkpoint of a native decoder or a transformers model. Its
            files are verified first.
        out: the new directory.
        config: the config.json of the model.
        dtype, max_shard_bytes, layout, progress: as in `export_hf`.

    Raises:
        ValueError: for a damaged checkpoint, a config of another model, or a job with several
            ranks.
        NotImplementedError: if a tensor has no Hugging Face name.
        OSError: if a file could not be read or written; no files remain.
    """
    check_arguments(native_to_hf, locals())
    check_one_rank()
    path, out = make_path(path), Path(out)
    check_export_target(out, dtype)
    with open_native(path, config=config, dtype=dtype, layout=layout) as model:
        shards = plan_shard_files(model.items, max_shard_bytes)
        write_directory(out, shards, model.values, model.collector, Meter(progress))
    return len(model.items)


@dataclass(frozen=True, slots=True)
class StoredModel:
    """The model of a native checkpoint, and the Hugging Face tensors to convert it to."""

    values: dict[str, Any]  # fields of config.json
    items: list[Item]  # Hugging Face tensors
    collector: StoredCollector  # reads the items
    tensors: dict[str, StoredTensor]  # by name in the checkpoint
    keeps: Callable[[str], bool]  # whether the tensor of this name stays fp32
    is_decoder: bool  # whether the model is the native decoder


@contextmanager
def open_native(
    path: AnyPath, *, config: HFConfig, dtype: torch.dtype | None, layout: ExportLayout
) -> Iterator[StoredModel]:
    """Verify a native checkpoint; yield its `StoredModel`; ValueError if `config` does not fit."""
    manifest = verify(path)
    tensors = select_tensors(PREFIX, manifest)
    embedding = next((name for name in tensors if name.endswith(f".{EMBEDDING}")), EMBEDDING)
    wrapper = embedding.removesuffix(EMBEDDING)  # such as "hf.", if the names of all have it
    if all(name.startswith(wrapper) for name in tensors):
        tensors = select_tensors(PREFIX + wrapper, manifest)
    num_mtp = len({name.split(".")[1] for name in tensors if name.startswith("mtp.")})
    values = complete_config(read_config(config), num_mtp)
    recipes, copies, reader = _plan_files(tensors, values, choose_layout(layout, values))
    keeps = make_fp32_predicate(reader, dtype)
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    items = list(make_items(dtypes, recipes, copies, dtype, keeps))
    problems = compare_config(values, manifest.facts.config)
    problems += find_content_problems({item.name: item for item in items}, values)
    with ExitStack() as stack:
        collector = StoredCollector(path, manifest, tensors, stack)
        if HEAD in copies and not problems:  # a tied head is not written, so it must be equal
            sources = {n: TensorSource(n, t.shape, t.dtype) for n, t in tensors.items()}
            problems += find_copy_problems(collector, sources, {HEAD: EMBEDDING})
        subject = f"path ({path}) must hold the model that config.json describes"
        refuse_problems(subject, problems, "pass the config of this model")
        yield StoredModel(values, items, collector, tensors, keeps, _has_decoder_names(tensors))


def hf_to_native(
    path: str | os.PathLike[str],
    root: str | os.PathLike[str],
    *,
    step: Step = 0,
    dtype: torch.dtype | None = None,
    max_file_bytes: NumBytes = 5 * 10**9,
    progress: Progress | None = None,
) -> AnyPath:
    """Convert a Hugging Face directory to a checkpoint without optimizer state; return its path.

    Args:
        path: the Hugging Face directory; quantised weights are dequantised.
        root: the directory or URL of a new run, without checkpoints or drafts.
        step: the step of the new checkpoint, which becomes the run's `latest`.
        dtype: dtype of all float tensors except the router's selection bias, which is fp32. None
            keeps the stored dtypes, with bf16 for quantised weights.
        max_file_bytes: maximum bytes of tensors in one file.
        progress: called with (bytes written, bytes expected).

    Raises:
        ValueError: for a wrong argument, a run that already has checkpoints, a broken directory,
            tensors that differ from the config, or a job with several ranks.
        NotImplementedError: if the native decoder does not support the model.
        OSError: if a file could not be read or written; `latest` is then unchanged.
    """
    check_arguments(hf_to_native, locals())
    check_one_rank()
    path, root = Path(path), make_path(root)
    check_run_is_new(root)
    config = decoder_config_from_hf(path)
    with HFFiles(path) as files:
        sources, problems = find_sources(files, read_config(path).get("quantization_config"))
        plan = plan_hf_tensors(config, infer_hf_layout(sources))
        options = (step, dtype, max_file_bytes, progress)
        conversion = Conversion(path, files, sources, plan, config, problems, *options)
        return write_native(root, conversion)


def _has_decoder_names(names: Collection[str]) -> bool:
    """Whether tensor names contain a name that only the native decoder has."""
    suffixes = (".mlp.experts.w1", ".self_attn.o_bias")
    return any(name.endswith(suffixes) or name.startswith("mtp.") for name in names)


def _plan_files(
    tensors: Mapping[str, StoredTensor], hf_config: dict[str, Any], layout: HFLayout
) -> tuple[dict[str, FileRecipe], dict[str, str], nn.Module | None]:
    """Return recipes, copies (name -> original) and the meta model (None = native or unknown)."""
    if not _has_decoder_names(tensors):
        tied, reader = hf_config.get("tie_word_embeddings", False), build_meta_model(hf_config)
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        recipes = plan_written_tensors(reader, shapes, layout)
        return recipes, {HEAD: EMBEDDING} if tied else {}, reader
    config = decoder_config_from_hf(hf_config)
    plan = plan_hf_tensors(config, layout)
    problems = find_shape_problems(tensors, {name: recipe.shape for name, recipe in plan.items()})
    subject = "the checkpoint must hold the decoder that config.json describes"
    refuse_problems(subject, problems, "pass the config of this model")
    return plan, map_hf_copies(config), None


@dataclass(frozen=True, slots=True)
class Conversion:
    """A Hugging Face directory to convert to a native checkpoint, and the checkpoint's options."""

    path: Path  # of the Hugging Face directory
    files: BoxReader
    sources: Mapping[str, TensorSource]  # by Hugging Face name
    plan: Mapping[str, FileRecipe]  # native name -> the Hugging Face tensors that store the tensor
    config: DecoderConfig
    problems: list[str]  # differences between config and files
    step: int  # of the native checkpoint
    dtype: torch.dtype | None  # None = the files' dtype, or bf16 for quantised tensors
    max_file_bytes: int  # of a native file
    progress: Progress | None


def check_one_rank() -> None:
    """Raise ValueError if the job has several ranks, because a conversion runs in one process."""
    _, world = get_rank_and_world()
    if world > 1:
        raise ValueError(
            f"world size ({world}) must be 1 to convert files: call export_hf or load_hf on every "
            "rank, or run `python -m moecore checkpoint convert` beside the job"
        )


def write_native(root: AnyPath, conversion: Conversion) -> AnyPath:
    """Write the converted tensors as the first checkpoint of a run; return its path."""
    sources, plan, copies = conversion.sources, conversion.plan, map_hf_copies(conversion.config)
    problems = conversion.problems + find_shape_problems(sources, map_file_shapes(plan), copies)
    if not problems:
        problems = _find_dtype_problems(sources, plan, conversion.dtype)
        problems += find_copy_problems(conversion.files, sources, copies)
    subject = f"path ({conversion.path}) must hold what its config.json says"
    refuse_problems(subject, problems, "correct one of them")
    with hold_lock(root):
        check_run_is_new(root)  # again, because the comparison of copies took time
        draft = create_draft(root, conversion.step)
        try:
            publish(draft, _write_files(draft, conversion), keep=0)
        except BaseException:
            remove_draft(draft)
            raise
    return make_step_path(root, conversion.step)


def _find_dtype_problems(
    sources: Mapping[str, TensorSource],
    recipes: Mapping[str, FileRecipe],
    dtype: torch.dtype | None,
) -> list[str]:
    """Return an error text per tensor whose stored dtypes cannot be converted to `dtype`."""
    problems = []
    for name, recipe in recipes.items():
        parts = [sources[piece.name] for piece in recipe.pieces]
        odd = [s for s in parts if not s.dtype.is_floating_point or s.dtype.itemsize < 2]
        problems += [f"{source.name} ({source.dtype}) must be a float tensor" for source in odd]
        if is_selection_bias(name):  # always fp32, without rounding
            problems += [
                f"{source.name} ({source.dtype}) must fit into fp32, which is how the router's "
                "selection bias is kept: store it as fp32"
                for source in parts
                if source.dtype.is_floating_point and source.dtype.itemsize > 4
            ]
        dtypes = {str(_choose_dtype(name, source, dtype)) for source in parts}
        if len(dtypes) > 1 and not odd:
            problems.append(
                f"{format_name(name)} has parts in {' and '.join(sorted(dtypes))}: dtype must name "
                "one"
            )
    return problems


def _write_files(draft: Draft, conversion: Conversion) -> Manifest:
    """Write all tensors into safetensors files of a draft; return the manifest."""
    items, plan, sources = list[Item](), conversion.plan, conversion.sources
    for name, recipe in plan.items():
        dtype = _choose_dtype(name, sources[recipe.pieces[0].name], conversion.dtype)
        items.append(Item(f"{PREFIX}{name}", recipe.shape, dtype, ()))
    meter = Meter(conversion.progress)
    meter.expect(sum(item.nbytes for item in items))
    stored_files: dict[str, StoredFile] = {}
    tensors: dict[str, StoredTensor] = {}
    for number, shard in enumerate(plan_shard_files(items, conversion.max_file_bytes)):
        path = draft.make_file_path(number)
        layout, ordered = order_items(shard)
        with ShardWriter(path, layout.header, pinned=False, meter=meter) as writer:
            for item in ordered:
                for piece in plan[item.name.removeprefix(PREFIX)].pieces:
                    for box in split_rows(piece.shape, CHUNK_BYTES // 4):
                        values = read_box(conversion.files, sources, piece, box)
                        writer.add(values.to(item.dtype).contiguous())
            stored_files[path.name] = writer.finish()
        for item in shard:
            key, shape = item.name, item.shape
            chunk = ManifestChunk(file=path.name, key=key, offsets=(0,) * len(shape), sizes=shape)
            tensors[key] = StoredTensor(shape=shape, dtype=item.dtype, chunks=(chunk,))
    step, config = conversion.step, asdict(conversion.config)
    facts = ManifestFacts(step=step, world_size=1, versions=read_versions(), config=config)
    return make_manifest(facts, stored_files, tensors)


def _choose_dtype(name: str, source: TensorSource, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a native checkpoint stores the tensor `name`."""
    if is_selection_bias(name):
        return torch.float32
    if dtype is not None:
        return dtype
    return torch.bfloat16 if source.quantized else source.dtype
