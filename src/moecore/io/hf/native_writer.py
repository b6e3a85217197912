"""write_native: a new native checkpoint of a decoder, from tensors of any files, file to file.

One part of a tensor after the other goes from file to file, so the memory needed is that of the
largest part that the reader holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from moecore.base.fields import shown_name
from moecore.families.fp32_modules import is_selection_bias
from moecore.io.checkpoint.directory import check_unused, directory_of, discard, new_draft, publish
from moecore.io.checkpoint.lock import locked
from moecore.io.checkpoint.manifest import (
    Manifest,
    ManifestChunk,
    ManifestFacts,
    StoredFile,
    StoredTensor,
    make_manifest,
)
from moecore.io.checkpoint.ranks import rank_and_world
from moecore.io.checkpoint.shard_file import CHUNK_BYTES, Meter, ShardWriter
from moecore.io.checkpoint.snapshot import versions
from moecore.io.hf.collect import Item
from moecore.io.hf.export import fill_shards, in_file_order
from moecore.io.hf.files import BoxReader, listed
from moecore.io.hf.names import hf_copies
from moecore.io.hf.pieces import FileRecipe, file_shapes
from moecore.io.hf.quant import TensorSource, read_box
from moecore.io.hf.verify import copy_problems, shape_problems
from moecore.models.config import DecoderConfig

PREFIX = "model."  # of the model's tensors in a native checkpoint


@dataclass(frozen=True, slots=True)
class Origin:
    """What a native checkpoint is made of."""

    path: Path
    files: BoxReader
    sources: Mapping[str, TensorSource]  # by the names of the plan's pieces
    plan: Mapping[str, FileRecipe]  # by native name
    config: DecoderConfig
    problems: list[str]  # what is known to be wrong


def check_single_rank() -> None:
    """Raise on a rank among others: it would wait for them, or leave them their work."""
    _, world = rank_and_world()
    if world > 1:
        raise ValueError(
            f"world size ({world}) must be 1 to convert files: call export_hf or load_hf on every "
            "rank, or run `python -m moecore checkpoint convert` beside the job"
        )


def write_native(
    root: Path,
    origin: Origin,
    *,
    step: int,
    dtype: torch.dtype | None,
    max_file_bytes: int,
    meter: Meter,
) -> Path:
    """Write a checkpoint of the native decoder as the first of a run; return its directory."""
    # After any error `latest` is as before: files and config differ, or the run has begun.
    _check(origin, dtype)
    facts = ManifestFacts(
        step=step,
        world_size=1,
        meshes=[],
        versions=versions(),
        config=asdict(origin.config),
        optimizer_class=None,
        optimizer=None,
        scheduler=None,
        extra={},
    )
    with locked(root):
        check_unused(root)  # reading took time
        draft = new_draft(root, step)
        try:
            publish(draft, _write_files(draft, facts, origin, dtype, max_file_bytes, meter), keep=0)
        except BaseException:
            discard(draft)
            raise
    return directory_of(root, step)


def _check(origin: Origin, dtype: torch.dtype | None) -> None:
    """Raise when what the files hold is not what the decoder is made of."""
    sources, plan, copies = origin.sources, origin.plan, hf_copies(origin.config)
    problems = origin.problems + shape_problems(sources, file_shapes(plan), copies)
    if not problems:
        problems = _dtype_problems(sources, plan, dtype)
        problems += copy_problems(origin.files, sources, copies)
    if problems:
        raise ValueError(
            f"path ({origin.path}) must hold what its config.json says: {listed(problems)}: "
            "correct one of them"
        )


def _dtype_problems(
    sources: Mapping[str, TensorSource], plan: Mapping[str, FileRecipe], dtype: torch.dtype | None
) -> list[str]:
    """What would be cast without having been asked for."""
    problems = []
    for name, recipe in plan.items():
        parts = [sources[piece.name] for piece in recipe.pieces]
        odd = [s for s in parts if not s.dtype.is_floating_point or s.dtype.itemsize < 2]
        problems += [f"{source.name} ({source.dtype}) must be a float tensor" for source in odd]
        if is_selection_bias(name):  # stays fp32 whatever `dtype` is: not rounded
            problems += [
                f"{source.name} ({source.dtype}) must fit into fp32, which is how the router's "
                "selection bias is kept: store it as fp32"
                for source in parts
                if source.dtype.is_floating_point and source.dtype.itemsize > 4
            ]
        dtypes = {str(_native_dtype(name, source, dtype)) for source in parts}
        if len(dtypes) > 1 and not odd:
            problems.append(
                f"{shown_name(name)} has parts in {' and '.join(sorted(dtypes))}: dtype must name "
                "one"
            )
    return problems


def _write_files(
    draft: Path,
    facts: ManifestFacts,
    origin: Origin,
    dtype: torch.dtype | None,
    max_file_bytes: int,
    meter: Meter,
) -> Manifest:
    items, plan, sources = list[Item](), origin.plan, origin.sources
    for name, recipe in plan.items():
        native_dtype = _native_dtype(name, sources[recipe.pieces[0].name], dtype)
        items.append(Item(f"{PREFIX}{name}", recipe.shape, native_dtype, ()))
    meter.expect(sum(item.nbytes for item in items))
    stored_files: dict[str, StoredFile] = {}
    tensors: dict[str, StoredTensor] = {}
    for number, shard in enumerate(fill_shards(items, max_file_bytes)):
        file = f"rank-{number:05d}.safetensors"
        layout, ordered = in_file_order(shard)
        with ShardWriter(draft / file, layout.header, pinned=False, meter=meter) as writer:
            for item in ordered:
                recipe = plan[item.name.removeprefix(PREFIX)]
                _add(writer, recipe, sources, origin.files, item.dtype)
            stored_files[file] = writer.finish()
        for item in shard:
            key, shape = item.name, item.shape
            chunk = ManifestChunk(file=file, key=key, offsets=(0,) * len(shape), sizes=shape)
            tensors[key] = StoredTensor(shape=shape, dtype=item.dtype, chunks=(chunk,))
    return make_manifest(facts, stored_files, tensors)


def _native_dtype(name: str, source: TensorSource, dtype: torch.dtype | None) -> torch.dtype:
    if is_selection_bias(name):
        return torch.float32
    if dtype is not None:
        return dtype
    return torch.bfloat16 if source.quantized else source.dtype


def _add(
    writer: ShardWriter,
    recipe: FileRecipe,
    sources: Mapping[str, TensorSource],
    files: BoxReader,
    dtype: torch.dtype,
) -> None:
    """Append a tensor part by part; a recipe's pieces follow each other in it."""
    for piece in recipe.pieces:
        rows = piece.shape[0] if piece.shape else 1
        step = max(1, CHUNK_BYTES // max(1, math.prod(piece.shape[1:]) * 4))
        for first in range(0, rows, step):
            row_box = (slice(first, min(first + step, rows)),) if piece.shape else ()
            box = (*row_box, *(slice(0, n) for n in piece.shape[1:]))
            writer.add(read_box(files, sources, piece, box).to(dtype).contiguous())
