"""Conversion between DCP directories and native checkpoints, in one process.

The tensor names of a directory identify its kind: Megatron-Core, transformers, or the native
decoder. Names and rows of each kind are mapped to the Hugging Face tensors of `plan_hf_tensors`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from moecore.base.fields import NumBytes, check_arguments, format_name, quote
from moecore.io.checkpoint.directory import Step, check_run_is_new
from moecore.io.checkpoint.files import join_problems, write_new_file
from moecore.io.checkpoint.object_storage import AnyPath, make_path
from moecore.io.checkpoint.shard_file import Meter, Progress
from moecore.io.hf.collect import Item, StoredCollector
from moecore.io.hf.config import decoder_config_from_hf
from moecore.io.hf.config_fields import HFConfig
from moecore.io.hf.convert import Conversion, StoredModel, check_one_rank, open_native, write_native
from moecore.io.hf.export import check_export_target, open_draft
from moecore.io.hf.export_plan import make_items
from moecore.io.hf.files import Box, BoxReader
from moecore.io.hf.names import EMBEDDING, infer_hf_layout, plan_hf_tensors
from moecore.io.hf.pieces import FileRecipe, map_file_shapes
from moecore.io.hf.quant import TensorSource
from moecore.io.interchange.dcp import DCPFiles, NewChunk, NewTensor, find_prefixes, write_dcp
from moecore.io.interchange.dcp_metadata import read_options
from moecore.io.interchange.megatron import (
    OTHER_CHOICES,
    OTHER_FUNCTIONS,
    ROOTS,
    WORDS,
    LayerPlace,
    MegatronBlock,
    TensorPart,
    build_megatron_blocks,
    build_optional_head,
    find_stored_tensors,
    get_export_place,
)
from moecore.models.config import DecoderConfig

DCPNames = Literal["megatron", "dcp", "dcp-transformers"]
# Megatron-Core's loader requires these values in addition to DCP's files.
MEGATRON_METADATA = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
MEGATRON_COMMON = {"checkpoint_version": 3.0, "iteration": 0}


def dcp_to_native(
    path: str | os.PathLike[str],
    root: str | os.PathLike[str],
    *,
    config: HFConfig,
    step: Step = 0,
    dtype: torch.dtype | None = None,
    max_file_bytes: NumBytes = 5 * 10**9,
    progress: Progress | None = None,
) -> AnyPath:
    """Convert a DCP directory to a native checkpoint; return the new path.

    Optimizer state and other objects in the DCP directory are ignored. Raises as `hf_to_native`.

    Args:
        path: the directory with `.metadata`: of Megatron-Core (torch_dist), or a plain state dict
            of a transformers model or of a native decoder, optionally with a name prefix
            ("model.").
        config: the config.json of the corresponding Hugging Face model.
        root, step, dtype, max_file_bytes, progress: as in `hf_to_native`.
    """
    check_arguments(dcp_to_native, locals())
    check_one_rank()
    path, root = Path(path), make_path(root)
    check_run_is_new(root)
    decoder = decoder_config_from_hf(config)
    files = DCPFiles(path)
    sources, plan, problems = _find_sources(files, decoder)
    options = (step, dtype, max_file_bytes, progress)
    conversion = Conversion(path, files, sources, plan, decoder, problems, *options)
    return write_native(root, conversion)


def native_to_dcp(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    config: HFConfig,
    names: DCPNames,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
) -> int:
    """Convert a native checkpoint's model to a DCP directory; return the number of tensors.

    Args:
        path, out, config, dtype, progress: as in `native_to_hf`.
        names: the tensor names to write: "megatron" (Megatron-Core's torch_dist), "dcp" (the native
            decoder), or "dcp-transformers" (transformers).

    Raises:
        ValueError, OSError: as `native_to_hf`.
        NotImplementedError: if a tensor has no name in the format.
    """
    check_arguments(native_to_dcp, locals())
    check_one_rank()
    path, out = make_path(path), Path(out)
    layout: Literal["fused", "per_expert"] = "per_expert" if names == "megatron" else "fused"
    check_export_target(out, dtype)
    with open_native(path, config=config, dtype=dtype, layout=layout) as model:
        if names == "megatron":
            tensors = _plan_megatron_tensors(model)
        elif names == "dcp":
            tensors = _plan_native_tensors(model, dtype)
        else:
            tensors = {i.name: _make_one_chunk_tensor(i, model.collector) for i in model.items}
        with open_draft(out) as draft:
            write_dcp(draft, tensors, Meter(progress))
            if names == "megatron":
                write_new_file(draft / "metadata.json", json.dumps(MEGATRON_METADATA))
                torch.save(MEGATRON_COMMON, draft / "common.pt")
    return len(tensors)


def infer_tensor_naming(files: DCPFiles) -> str:
    """Infer "megatron", "dcp" or "dcp-transformers" from the tensor names of a DCP directory."""
    if find_prefixes(files, WORDS):
        return "megatron"
    is_native = any(".mlp.experts.w1" in n or ".mlp.router.weight" in n for n in files.tensors)
    return "dcp" if is_native else "dcp-transformers"


@dataclass(frozen=True, slots=True)
class SplicedSource(TensorSource):
    """A Hugging Face tensor that is the concatenation of row ranges of stored tensors."""

    # Stored tensor, index into its first dims, first row, and last row + 1.
    spans: tuple[tuple[str, tuple[int, ...], int, int], ...] = ()

    def read(self, files: BoxReader, box: Box) -> Tensor:
        """Read a box (slices) from the stored tensors into a new CPU tensor."""
        pieces, at = [], 0
        for key, index, start, stop in self.spans:
            first, last = max(box[0].start, at), min(box[0].stop, at + stop - start)
            if first < last:
                rows = slice(start + first - at, start + last - at)
                outer = tuple(slice(i, i + 1) for i in index)
                pieces.append(files.read(key, (*outer, rows, *box[1:])).flatten(0, len(index)))
            at += stop - start
        return torch.cat(pieces)


def _find_sources(
    files: DCPFiles, config: DecoderConfig
) -> tuple[dict[str, TensorSource], dict[str, FileRecipe], list[str]]:
    """Return a DCP directory's tensors by name, a recipe per native tensor, and error texts."""
    kind = infer_tensor_naming(files)
    if kind == "megatron":
        spliced_sources, problems = _find_megatron_sources(files, config)
        return spliced_sources, plan_hf_tensors(config, "per_expert"), problems
    prefix = _find_prefix(files, EMBEDDING)
    sources: dict[str, TensorSource] = {
        name.removeprefix(prefix): TensorSource(name, tensor.shape, tensor.dtype)
        for name, tensor in files.tensors.items()
        if name.startswith(prefix)
    }
    plan = plan_hf_tensors(config, "fused" if kind == "dcp" else infer_hf_layout(sources))
    if kind == "dcp":
        plan = {n: FileRecipe.from_tensor(n, recipe.shape) for n, recipe in plan.items()}
    return sources, plan, []


def _find_prefix(files: DCPFiles, ending: str) -> str:
    """Return the prefix before the tensor name `ending`; raise ValueError for several prefixes."""
    candidates = find_prefixes(files, ending) or [""]
    if len(candidates) > 1 and "" not in candidates:
        raise ValueError(
            f"path ({files.path}) must hold one model, but has {ending} below "
            f"{join_problems(candidates)}: save the one that you mean alone"
        )
    return "" if "" in candidates else candidates[0]


def _find_megatron_sources(
    files: DCPFiles, config: DecoderConfig
) -> tuple[dict[str, TensorSource], list[str]]:
    """Return a Megatron-Core directory's Hugging Face tensors by name, or only error texts."""
    common, options = files.path / "common.pt", {*OTHER_FUNCTIONS, *OTHER_CHOICES}
    for option, value in read_options(common, options).items():
        if value == OTHER_CHOICES[option] if option in OTHER_CHOICES else value:
            raise NotImplementedError(
                f"{option} ({quote(value)}) of {common} must be off, else the "
                "native decoder computes another function of these weights: train on in "
                "Megatron-Core"
            )
    prefix = _find_prefix(files, WORDS)
    names = [name for name in files.tensors if name.startswith(prefix)]
    shapes = {name.removeprefix(prefix): files.tensors[name].shape for name in names}
    head = build_optional_head(config, shapes)
    blocks = build_megatron_blocks(config) + ([head] if head else [])
    problems, used_keys = list[str](), set[str]()
    spans: dict[str, dict[int, tuple[str, tuple[int, ...], int, int]]] = {}
    shape_of: dict[str, tuple[int, ...]] = {}
    for block in blocks:
        places, wrong = find_stored_tensors(block, shapes, config)
        problems += wrong
        used_keys |= {place.key for place in places}
        for part, (place, first) in _pair_parts_with_places(block, places):
            span = (f"{prefix}{place.key}", place.index, first, first + part.stop - part.start)
            spans.setdefault(part.name, {})[part.start] = span
            rows = max(part.stop, shape_of.get(part.name, (0,))[0])
            shape_of[part.name] = (rows, *block.shape[1:])
    problems += [
        f"{name} is no tensor of the decoder"
        for name in shapes
        if name.startswith(ROOTS) and name not in used_keys and "_extra_state" not in name
    ]
    if problems:
        return {}, problems
    sources: dict[str, TensorSource] = {}
    for name, by_row in spans.items():
        ordered = tuple(by_row[row] for row in sorted(by_row))
        dtype = files.tensors[ordered[0][0]].dtype
        sources[name] = SplicedSource(name, shape_of[name], dtype, spans=ordered)
    return sources, []


def _pair_parts_with_places(
    block: MegatronBlock, places: tuple[LayerPlace, ...]
) -> Iterator[tuple[TensorPart, tuple[LayerPlace, int]]]:
    """Yield (part, (place, row)): the rows of `part` start at row `row` of `place`."""
    at = 0
    for part in block.parts if places else ():
        row, begin = at, 0
        for place in places:
            if row < begin + place.rows:
                yield part, (place, row - begin)
                break
            begin += place.rows
        at += part.stop - part.start


def _plan_megatron_tensors(model: StoredModel) -> dict[str, NewTensor]:
    """Return the Megatron-Core tensors to write by name, with one chunk per layer and expert."""
    config = decoder_config_from_hf(model.values)
    items_by_name = {item.name: item for item in model.items}
    plans = (
        plan_hf_tensors(config, layout) for layout in ("per_expert", infer_hf_layout(items_by_name))
    )
    items = {a: items_by_name[b] for a, b in zip(*map(map_file_shapes, plans), strict=True)}
    chunks: dict[str, list[NewChunk]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for block in build_megatron_blocks(config):
        place = get_export_place(block, config)
        sizes = (*(1 for _ in place.index), *block.shape)
        offsets = (*place.index, *(0 for _ in block.shape))
        make = partial(_concat_parts, block, items, model.collector)
        chunks.setdefault(place.key, []).append(NewChunk(offsets, sizes, make))
        shapes[place.key] = (*place.dims, *block.shape)
        for part in block.parts:
            dtype = items[part.name].dtype
            if dtypes.setdefault(place.key, dtype) != dtype:
                raise ValueError(
                    f"{format_name(place.key)} has parts in {dtypes[place.key]} and {dtype}: "
                    "dtype must name one"
                )
    return {key: NewTensor(shapes[key], dtypes[key], chunks[key]) for key in chunks}


def _concat_parts(
    block: MegatronBlock, items: Mapping[str, Item], collector: StoredCollector
) -> Tensor:
    """Return the matrix of a Megatron-Core block: rows of the Hugging Face tensors `items`."""
    names = dict.fromkeys(part.name for part in block.parts)
    tensors = {name: collector.collect_tensor(items[name], 0) for name in names}
    return torch.cat([tensors[part.name][part.start : part.stop] for part in block.parts])


def _plan_native_tensors(model: StoredModel, dtype: torch.dtype | None) -> dict[str, NewTensor]:
    """Return the native decoder's tensors to write by name, with one chunk per tensor."""
    if not model.is_decoder and any(".experts." in name for name in model.tensors):
        raise ValueError(
            "names ('dcp') must be those of the checkpoint, which is a transformers model's: use "
            "'dcp-transformers'"
        )
    plan = {n: FileRecipe.from_tensor(n, tensor.shape) for n, tensor in model.tensors.items()}
    dtypes = {name: tensor.dtype for name, tensor in model.tensors.items()}
    items = make_items(dtypes, plan, {}, dtype, model.keeps)
    return {item.name: _make_one_chunk_tensor(item, model.collector) for item in items}


def _make_one_chunk_tensor(item: Item, collector: StoredCollector) -> NewTensor:
    """Return `item` as a tensor to write in one chunk, whose values `collector` reads."""
    offsets = (0,) * len(item.shape)
    chunk = NewChunk(offsets, item.shape, lambda: collector.collect_tensor(item, 0))
    return NewTensor(item.shape, item.dtype, [chunk])
