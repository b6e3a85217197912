"""Native checkpoints <-> Hugging Face directories, file to file: no model is built, one process.

Both ways one tensor after the other goes from file to file, so the memory needed is that of the
largest Hugging Face tensor (an expert's matrix, or the embedding), whatever the model's size.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moecore._fields import NumBytes, check_arguments
from moecore.checkpoint.comparison import below
from moecore.checkpoint.directory import (
    Step,
    check_unused,
    directory_of,
    discard,
    new_draft,
    publish,
)
from moecore.checkpoint.lock import locked
from moecore.checkpoint.manifest import (
    Chunk,
    Facts,
    Manifest,
    StoredFile,
    StoredTensor,
    make_manifest,
)
from moecore.checkpoint.meter import Meter, Progress
from moecore.checkpoint.shard_file import CHUNK_BYTES, ShardReader, ShardWriter, layout_of
from moecore.checkpoint.snapshot import versions
from moecore.checkpoint.verify import verify
from moecore.hf.collect import Item
from moecore.hf.config import HFConfig, decoder_config_from_hf, read_config
from moecore.hf.config_problems import config_problems
from moecore.hf.export import (
    KEPT_FP32,
    ExportLayout,
    check_target,
    fill_shards,
    make_items,
    names_of,
    write_directory,
)
from moecore.hf.export_config import finish_config
from moecore.hf.files import CONFIG, HFFiles, listed, read_json
from moecore.hf.names import (
    EMBEDDING,
    HEAD,
    HFLayout,
    Piece,
    Recipe,
    find_layout,
    hf_copies,
    hf_plan,
)
from moecore.hf.quant import Source, find_sources
from moecore.hf.target import stored_plan
from moecore.hf.verify import content_problems, copy_problems, plan_problems
from moecore.models.config import DecoderConfig

PREFIX = "model."  # of the model's tensors in a native checkpoint


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
    """Write the model of a native checkpoint as a Hugging Face directory; return its tensors.

    It may be a checkpoint of a native decoder or of a transformers model. Its files are verified
    first.

    Args:
        path: a step's directory.
        out: the new directory; see `export_hf` for this and the options.
        config: the config.json of the model.
        dtype: of all float tensors but the router's selection bias; None keeps each one's.
        max_shard_bytes: of tensors in one file.
        layout: "per_expert" or "fused".
        progress: called with (bytes written, bytes expected).

    Raises:
        ValueError: for a damaged checkpoint or one that the config does not describe; in a job of
            several ranks.
        NotImplementedError: when a tensor has no Hugging Face name.
        OSError: when a file could not be read or written; nothing is left behind.
    """
    check_arguments(native_to_hf, locals())
    _check_alone()
    path, out = Path(path), Path(out)
    check_target(out, dtype)
    manifest = verify(path)
    prefix = PREFIX + _wrapper_of(below(PREFIX, manifest))
    tensors = below(prefix, manifest)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    num_mtp = len({name.split(".")[1] for name in shapes if name.startswith("mtp.")})
    values = finish_config(read_config(config), num_mtp)
    recipes, copies = _plan_of(shapes, values, names_of(layout, values))
    items = list(make_items({n: t.dtype for n, t in tensors.items()}, recipes, copies, dtype))
    problems = config_problems(values, manifest.facts.config)
    problems += content_problems({item.name: item.piece for item in items}, values, values)
    shards = fill_shards(items, max_shard_bytes)
    with ExitStack() as stack:
        collector = _StoredCollector(path, manifest, prefix, stack)
        if HEAD in tensors and HEAD in copies and not problems:
            problems += _head_problems(collector, tensors)
        if problems:
            raise ValueError(
                f"path ({path}) must hold the model that config.json describes: "
                f"{listed(problems)}: pass the config of this model"
            )
        write_directory(out, shards, values, collector, Meter(progress))
    return len(items)


def hf_to_native(
    path: str | os.PathLike[str],
    root: str | os.PathLike[str],
    *,
    step: Step = 0,
    dtype: torch.dtype | None = None,
    max_file_bytes: NumBytes = 5 * 10**9,
    progress: Progress | None = None,
) -> Path:
    """Write a Hugging Face directory as a checkpoint of the native decoder; return its directory.

    `load(path, model)` reads it. There is no optimizer state in it.

    Args:
        path: the Hugging Face directory; quantised weights are dequantised.
        root: directory of a new run, without checkpoints or drafts; this one becomes its latest.
        step: of the checkpoint.
        dtype: of all float tensors but the router's selection bias, which is fp32; None keeps what
            is stored, and makes quantised weights bf16.
        max_file_bytes: of tensors in one file.
        progress: called with (bytes written, bytes expected).

    Raises:
        ValueError: for a wrong argument, a run that has begun, a broken directory, or one whose
            tensors differ from its config; in a job of several ranks.
        NotImplementedError: when the native decoder cannot express the model.
        OSError: when a file could not be read or written; `latest` did not change then.
    """
    check_arguments(hf_to_native, locals())
    _check_alone()
    path, root, meter = Path(path), Path(root), Meter(progress)
    check_unused(root)
    config = decoder_config_from_hf(path)
    with HFFiles(path) as files:
        sources, plan = _checked_plan(path, files, config, dtype)
        facts = Facts(
            step=step,
            world_size=1,
            meshes=[],
            versions=versions(),
            config=asdict(config),
            optimizer_class=None,
            optimizer=None,
            scheduler=None,
            extra={},
        )
        with locked(root):
            check_unused(root)  # reading took time
            draft = new_draft(root, step)
            try:
                manifest = _write_native(
                    draft, facts, plan, sources, files, dtype, max_file_bytes, meter
                )
                publish(draft, manifest, keep=0)
            except BaseException:
                discard(draft)
                raise
    return directory_of(root, step)


def _check_alone() -> None:
    """Raise on a rank among others: it would wait for them, or leave them their share of the work.

    Raises:
        ValueError: when there is a process group of several ranks.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world > 1:
        raise ValueError(
            f"world size ({world}) must be 1 to convert files: call export_hf or load_hf on every "
            "rank, or run `python -m moecore checkpoint convert` beside the job"
        )


def _checked_plan(
    path: Path, files: HFFiles, config: DecoderConfig, dtype: torch.dtype | None
) -> tuple[dict[str, Source], dict[str, Recipe]]:
    """Return what a directory holds and what its decoder is made of; raise if they differ."""
    quantization = read_json(path / CONFIG).get("quantization_config")
    sources, problems = find_sources(files, quantization)
    plan = hf_plan(config, find_layout(sources))
    problems += plan_problems(sources, plan, hf_copies(config))
    if not problems:
        problems = _dtype_problems(sources, plan, dtype)
        problems += copy_problems(files, sources, hf_copies(config))
    if problems:
        raise ValueError(
            f"path ({path}) must hold what its config.json says: {listed(problems)}: correct "
            "one of them"
        )
    return sources, plan


def _dtype_problems(
    sources: Mapping[str, Source], plan: Mapping[str, Recipe], dtype: torch.dtype | None
) -> list[str]:
    """What would be cast without having been asked for."""
    problems = []
    for name, recipe in plan.items():
        parts = [sources[piece.name] for piece in recipe.pieces]
        odd = [s for s in parts if not s.dtype.is_floating_point or s.dtype.itemsize < 2]
        problems += [f"{source.name} ({source.dtype}) must be a float tensor" for source in odd]
        if name.endswith(KEPT_FP32):  # stays fp32 whatever `dtype` is: not rounded
            problems += [
                f"{source.name} ({source.dtype}) must fit into fp32, which is how the router's "
                "selection bias is kept: store it as fp32"
                for source in parts
                if source.dtype.is_floating_point and source.dtype.itemsize > 4
            ]
        kept = {str(_native_dtype(name, source, dtype)) for source in parts}
        if len(kept) > 1 and not odd:
            problems.append(
                f"{name} has parts in {' and '.join(sorted(kept))}: dtype must name one"
            )
    return problems


def _write_native(
    draft: Path,
    facts: Facts,
    plan: Mapping[str, Recipe],
    sources: Mapping[str, Source],
    files: HFFiles,
    dtype: torch.dtype | None,
    max_file_bytes: int,
    meter: Meter,
) -> Manifest:
    items = []
    for name, recipe in plan.items():
        kept = _native_dtype(name, sources[recipe.pieces[0].name], dtype)
        items.append(Item(f"{PREFIX}{name}", name, Piece(name, (), recipe.shape), kept))
    meter.expect(sum(item.nbytes for item in items))
    stored: dict[str, StoredFile] = {}
    tensors: dict[str, StoredTensor] = {}
    for number, shard in enumerate(fill_shards(items, max_file_bytes)):
        file = f"rank-{number:05d}.safetensors"
        by_key = {item.name: item for item in shard}
        layout = layout_of({key: (item.dtype, item.piece.shape) for key, item in by_key.items()})
        with ShardWriter(draft / file, layout.header, pinned=False, meter=meter) as writer:
            for item in map(by_key.__getitem__, layout.begins):
                _add(writer, plan[item.source], sources, files, item.dtype)
            stored[file] = writer.finish()
        for key, item in by_key.items():
            shape = item.piece.shape
            chunk = Chunk(file=file, key=key, offsets=(0,) * len(shape), sizes=shape)
            tensors[key] = StoredTensor(shape=shape, dtype=item.dtype, chunks=(chunk,))
    return make_manifest(facts, stored, tensors)


def _native_dtype(name: str, source: Source, dtype: torch.dtype | None) -> torch.dtype:
    if name.endswith(KEPT_FP32):
        return torch.float32
    if dtype is not None:
        return dtype
    return torch.bfloat16 if source.quantized else source.dtype


def _add(
    writer: ShardWriter,
    recipe: Recipe,
    sources: Mapping[str, Source],
    files: HFFiles,
    dtype: torch.dtype,
) -> None:
    """Append a tensor part by part; a recipe's pieces follow each other in it."""
    for piece in recipe.pieces:
        source = sources[piece.name]
        rows = piece.shape[0] if piece.shape else 1
        row_bytes = max(1, math.prod(piece.shape[1:]) * 4)
        step = max(1, CHUNK_BYTES // row_bytes)
        for first in range(0, rows, step):
            cut = (slice(first, min(first + step, rows)),) if piece.shape else ()
            box = (*cut, *(slice(0, n) for n in piece.shape[1:]))
            writer.add(source.read(files, box).to(dtype).contiguous())


class _StoredCollector:
    """Reads a Hugging Face tensor out of a native checkpoint's chunks.

    Args:
        path: the checkpoint.
        manifest: of it.
        prefix: of the model's tensors in it.
        stack: closes the files.
    """

    def __init__(self, path: Path, manifest: Manifest, prefix: str, stack: ExitStack) -> None:
        self._path, self._manifest, self._prefix, self._stack = path, manifest, prefix, stack
        self._readers: dict[str, ShardReader] = {}
        self._buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8)

    def collect(self, item: Item, writer: int) -> Tensor:
        """Return the whole tensor."""
        stored = self._manifest.tensors[f"{self._prefix}{item.source}"]
        region = (
            *item.piece.region,
            *(slice(0, n) for n in stored.shape[len(item.piece.region) :]),
        )
        box = [(r, r + 1) if isinstance(r, int) else (r.start, r.stop) for r in region]
        whole = torch.empty([stop - start for start, stop in box], dtype=stored.dtype)
        for chunk in stored.chunks:
            spans = [
                (max(start, o), min(stop, o + n))
                for (start, stop), o, n in zip(box, chunk.offsets, chunk.sizes, strict=True)
            ]
            if any(start >= stop for start, stop in spans):
                continue
            target = whole[
                tuple(slice(a - s, b - s) for (a, b), (s, _) in zip(spans, box, strict=True))
            ]
            offsets = [a - o for (a, _), o in zip(spans, chunk.offsets, strict=True)]
            reader = self._reader(chunk.file)
            reader.read(chunk.key, stored.dtype, chunk.sizes, offsets, target)
        return whole.view(item.piece.shape).to(item.dtype)

    def done(self, whole: Tensor | None) -> None:
        """Nothing to note."""

    def check(self) -> None:
        """Errors come out of `collect` itself; no other rank waits."""

    def _reader(self, file: str) -> ShardReader:
        if file not in self._readers:
            layout = layout_of(self._manifest.entries_of(file))
            reader = ShardReader(self._path / file, layout, self._buffer, Meter())
            self._readers[file] = self._stack.enter_context(reader)
        return self._readers[file]


def _wrapper_of(names: Collection[str]) -> str:
    """Return what a module around the model put before every name, such as "hf."; "" for none."""
    embedding = next((name for name in names if name.endswith(f".{EMBEDDING}")), EMBEDDING)
    prefix = embedding.removesuffix(EMBEDDING)
    return prefix if all(name.startswith(prefix) for name in names) else ""


def _head_problems(collector: _StoredCollector, tensors: Mapping[str, StoredTensor]) -> list[str]:
    """A stored head that the config ties to the embedding: dropped only if it is the same."""
    (rows, cols), dtype = tensors[HEAD].shape, tensors[HEAD].dtype
    same = tensors[EMBEDDING].shape == (rows, cols) and tensors[EMBEDDING].dtype == dtype
    step = max(1, CHUNK_BYTES // (cols * dtype.itemsize))
    for first in range(0, rows if same else 0, step):
        stop = min(first + step, rows)
        part = Piece(HEAD, (slice(first, stop),), (stop - first, cols))
        head, table = (
            collector.collect(Item(name, name, part, dtype), 0) for name in (HEAD, EMBEDDING)
        )
        same = same and torch.equal(head, table)
    if same:
        return []
    return [f"{HEAD} must equal {EMBEDDING} with tie_word_embeddings (True)"]


def _plan_of(
    shapes: Mapping[str, tuple[int, ...]], values: dict[str, Any], layout: HFLayout
) -> tuple[dict[str, Recipe], dict[str, str]]:
    """Recipes and copies of a checkpoint's tensors, of a native decoder or a transformers model."""
    if not any(".mlp.experts.w1" in name or name.startswith("mtp.") for name in shapes):
        tied = values.get("tie_word_embeddings", False)
        return stored_plan(shapes, layout), {HEAD: EMBEDDING} if tied else {}
    config = decoder_config_from_hf(values)
    plan = hf_plan(config, layout)
    problems = [f"{name} is missing" for name in plan if name not in shapes]
    problems += [f"{name} is no tensor of the decoder" for name in shapes if name not in plan]
    problems += [
        f"{name} {shapes[name]} must be {recipe.shape}"
        for name, recipe in plan.items()
        if name in shapes and shapes[name] != recipe.shape
    ]
    if problems:
        raise ValueError(
            f"the checkpoint must hold the decoder that config.json describes: {listed(problems)}: "
            "pass the config of this model"
        )
    return plan, hf_copies(config)
