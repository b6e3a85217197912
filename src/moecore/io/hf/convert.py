"""Native checkpoints <-> Hugging Face directories, file to file: no model is built, one process.

Both ways one tensor after the other goes from file to file, so the memory needed is that of the
largest Hugging Face tensor (an expert's matrix, or the embedding), whatever the model's size.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moecore.base.fields import NumBytes, check_arguments
from moecore.families.fp32_modules import keeps_fp32
from moecore.io.checkpoint.comparison import below
from moecore.io.checkpoint.directory import Step, check_unused
from moecore.io.checkpoint.manifest import Manifest, StoredTensor
from moecore.io.checkpoint.shard_file import CHUNK_BYTES, Meter, Progress, ShardReader, layout_of
from moecore.io.checkpoint.store import verify
from moecore.io.hf.collect import Collector, Item, put
from moecore.io.hf.config import config_problems, decoder_config_from_hf
from moecore.io.hf.config_fields import HFConfig, read_config
from moecore.io.hf.export import check_target, fill_shards, write_directory
from moecore.io.hf.export_plan import ExportLayout, finish_config, make_items, names_of
from moecore.io.hf.files import Box, HFFiles, common_part, listed
from moecore.io.hf.names import EMBEDDING, HEAD, HFLayout, find_layout, hf_copies, hf_plan
from moecore.io.hf.native_writer import PREFIX, Origin, check_single_rank, write_native
from moecore.io.hf.pieces import FileRecipe
from moecore.io.hf.quant import TensorSource, find_sources
from moecore.io.hf.stock import reader_of, written_plan
from moecore.io.hf.verify import content_problems, copy_problems, shape_problems


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
        dtype: of all float tensors but those that transformers keeps in fp32, as in `export_hf`;
            None keeps each one's.
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
    check_single_rank()
    path, out = Path(path), Path(out)
    check_target(out, dtype)
    with ExitStack() as stack:
        names = names_of(layout, read_config(config))
        model = open_native(path, stack, config=config, dtype=dtype, layout=names)
        shards = fill_shards(model.items, max_shard_bytes)
        write_directory(out, shards, model.values, model.collector, Meter(progress))
    return len(model.items)


@dataclass(frozen=True, slots=True)
class StoredModel:
    """The model of a native checkpoint, by its Hugging Face names."""

    values: dict[str, Any]
    items: list[Item]
    collector: Collector
    tensors: dict[str, StoredTensor]  # by their own names
    keeps: Callable[[str], bool]  # whether one of these names stays fp32
    is_decoder: bool  # whether these are the native decoder's


def open_native(
    path: Path, stack: ExitStack, *, config: HFConfig, dtype: torch.dtype | None, layout: HFLayout
) -> StoredModel:
    """Return the model of a native checkpoint, verified and compared with its config.json."""
    manifest = verify(path)
    tensors = below(PREFIX + _wrapper_of(below(PREFIX, manifest)), manifest)
    num_mtp = len({name.split(".")[1] for name in tensors if name.startswith("mtp.")})
    values = finish_config(read_config(config), num_mtp)
    plan = _plan_of(tensors, values, layout)
    keeps = keeps_fp32(plan.reader, dtype)
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    items = list(make_items(dtypes, plan.recipes, plan.copies, dtype, keeps))
    problems = config_problems(values, manifest.facts.config)
    problems += content_problems({item.name: item for item in items}, values, values)
    collector = _StoredCollector(path, manifest, tensors, stack)
    if HEAD in plan.copies and not problems:  # a stored head is dropped only if it is the same
        sources = {n: TensorSource(n, t.shape, t.dtype) for n, t in tensors.items()}
        problems += copy_problems(collector, sources, {HEAD: EMBEDDING})
    if problems:
        raise ValueError(
            f"path ({path}) must hold the model that config.json describes: "
            f"{listed(problems)}: pass the config of this model"
        )
    return StoredModel(values, items, collector, tensors, keeps, _is_decoder(tensors))


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
    check_single_rank()
    path, root, meter = Path(path), Path(root), Meter(progress)
    check_unused(root)
    config = decoder_config_from_hf(path)
    with HFFiles(path) as files:
        sources, problems = find_sources(files, read_config(path).get("quantization_config"))
        return write_native(
            root,
            Origin(path, files, sources, hf_plan(config, find_layout(sources)), config, problems),
            step=step,
            dtype=dtype,
            max_file_bytes=max_file_bytes,
            meter=meter,
        )


class _StoredCollector:
    """Reads the tensors of a native checkpoint's model by box or by Hugging Face tensor."""

    def __init__(
        self, path: Path, manifest: Manifest, tensors: Mapping[str, StoredTensor], stack: ExitStack
    ) -> None:
        self._path, self._manifest, self._tensors, self._stack = path, manifest, tensors, stack
        self._readers: dict[str, ShardReader] = {}
        self._buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8)

    def read(self, name: str, box: Box) -> Tensor:
        """Return a new CPU tensor, the box of a stored tensor."""
        entry = self._tensors[name]
        out = torch.empty([s.stop - s.start for s in box], dtype=entry.dtype)
        for chunk in entry.chunks:
            common = common_part(box, chunk.offsets, chunk.sizes)
            if common is not None:
                source, target = common
                offsets, reader = [s.start for s in source], self._reader(chunk.file)
                reader.read(chunk.key, entry.dtype, chunk.sizes, offsets, out[target])
        return out

    def collect(self, item: Item, writer: int) -> Tensor:
        """Return the whole tensor."""
        tensor = torch.empty(item.shape, dtype=item.dtype)
        for source, piece in item.parts:
            part = self.read(source, piece.box_in(self._tensors[source].shape))
            if piece.view is None:
                return part.view(item.shape).to(item.dtype)
            put(part, piece, tensor)
        return tensor

    def release(self, tensor: Tensor | None) -> None:
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


def _is_decoder(names: Collection[str]) -> bool:
    """Whether names are the native decoder's; a dense one's are those of transformers too."""
    suffixes = (".mlp.experts.w1", ".self_attn.o_bias")
    return any(name.endswith(suffixes) or name.startswith("mtp.") for name in names)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What files are made of, and the model on meta that reads them; None = a native decoder's."""

    recipes: dict[str, FileRecipe]
    copies: dict[str, str]
    reader: nn.Module | None = None


def _plan_of(
    tensors: Mapping[str, StoredTensor], values: dict[str, Any], layout: HFLayout
) -> _Plan:
    """Return the plan of a checkpoint's tensors, of a native decoder or a transformers model."""
    if not _is_decoder(tensors):
        tied, reader = values.get("tie_word_embeddings", False), reader_of(values)
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        recipes = written_plan(reader, shapes, layout)
        return _Plan(recipes, {HEAD: EMBEDDING} if tied else {}, reader)
    config = decoder_config_from_hf(values)
    plan = hf_plan(config, layout)
    problems = shape_problems(tensors, {name: recipe.shape for name, recipe in plan.items()})
    if problems:
        raise ValueError(
            f"the checkpoint must hold the decoder that config.json describes: {listed(problems)}: "
            "pass the config of this model"
        )
    return _Plan(plan, hf_copies(config))
