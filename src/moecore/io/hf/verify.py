"""Checks of Hugging Face directories: tensors, shapes and equal copies.

`verify_hf` reads only headers. The format has no digests, so changed data is not detected.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from moecore.base.text import format_error_line
from moecore.io.checkpoint.files import MAX_CHARS, MAX_TABLE
from moecore.io.checkpoint.ranks import get_rank_and_world
from moecore.io.checkpoint.shard_file import CHUNK_BYTES
from moecore.io.hf.config import MTP_KEYS, decoder_config_from_hf
from moecore.io.hf.config_fields import FIELD_KINDS, HFConfig, check_field_type, read_config
from moecore.io.hf.files import CONFIG, INDEX, BoxReader, HFFiles, read_json, split_rows
from moecore.io.hf.names import infer_hf_layout, map_hf_copies, map_model_copies, plan_hf_tensors
from moecore.io.hf.pieces import map_file_shapes
from moecore.io.hf.quant import TensorSource, find_sources
from moecore.io.hf.stock import (
    build_meta_model,
    compute_published_shapes,
    get_shapes,
    plan_stock_tensors,
)

EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")
LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.")


class Shaped(Protocol):
    """Protocol of a stored or planned tensor that has a shape."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""


def verify_hf(path: str | os.PathLike[str]) -> list[str]:
    """Check a Hugging Face directory; return one line per problem, [] if it is complete."""
    path = Path(path)
    try:
        config = read_config(path)
        with HFFiles(path) as files:
            sources, problems = find_sources(files, config.get("quantization_config"))
            problems += _find_stray_shards(path, files)
    except ValueError as error:
        problems = [str(error)]
    else:
        problems += find_content_problems(sources, path)
    return [format_error_line(problem, MAX_CHARS) for problem in problems]


def find_content_problems(sources: Mapping[str, Shaped], config: HFConfig) -> list[str]:
    """Return error texts for tensors that differ from the model that `config` describes."""
    try:
        native = decoder_config_from_hf(config)
        plan = plan_hf_tensors(native, infer_hf_layout(sources))
    except NotImplementedError:  # the native decoder does not support the model
        return _compare_with_transformers(sources, read_config(config))
    except ValueError as error:
        return [str(error)]
    return find_shape_problems(sources, map_file_shapes(plan), map_hf_copies(native))


def find_shape_problems(
    file_tensors: Mapping[str, Shaped],
    expected_shapes: Mapping[str, tuple[int, ...]],
    optional_names: Collection[str] = (),
) -> list[str]:
    """Return error texts for missing, unexpected (unless optional) or wrongly shaped tensors."""
    problems = [f"{name} is missing" for name in expected_shapes if name not in file_tensors]
    problems += [
        f"{name} is not in the model that {CONFIG} describes"
        for name in file_tensors
        if name not in expected_shapes
        and name not in optional_names
        and not name.endswith("rotary_emb.inv_freq")
    ]
    problems += [
        f"{name} {file_tensors[name].shape} must be {shape}"
        for name, shape in expected_shapes.items()
        if name in file_tensors and file_tensors[name].shape != shape
    ]
    return problems


def find_copy_problems(
    files: BoxReader, sources: Mapping[str, TensorSource], originals: Mapping[str, str]
) -> list[str]:
    """Return an error text per copy that differs from its original; ranks read different rows."""
    rank, world = get_rank_and_world()
    problems = []
    for copy, original in originals.items():
        if copy not in sources or original not in sources:
            continue
        a, b = sources[copy], sources[original]
        is_equal = a.shape == b.shape
        if is_equal:
            step = -(-a.shape[0] // world)
            max_numel = CHUNK_BYTES // a.dtype.itemsize
            for box in split_rows(a.shape, max_numel, rank * step, (rank + 1) * step):
                is_equal = is_equal and torch.equal(a.read(files, box), b.read(files, box))
        if not is_equal:
            problems.append(
                f"{copy} must equal {original}, because the model has one tensor for both"
            )
    return problems


def _find_stray_shards(path: Path, files: HFFiles) -> list[str]:
    """Return error texts for shard files without tensors and a wrong total_size in the index."""
    shards = {entry.file for entry in files.tensors.values()}
    names = {p.name for p in path.glob("model*.safetensors")}
    problems = [f"{name} holds no tensor of the checkpoint" for name in sorted(names - shards)]
    if (path / INDEX).is_file():
        metadata = read_json(path / INDEX, max_bytes=MAX_TABLE).get("metadata", {})
        if not isinstance(metadata, dict):
            return [*problems, f"{INDEX} metadata ({metadata!r:.40}) must be an object"]
        total = metadata.get("total_size")
        size = files.count_bytes(files.tensors)
        if total is not None and total != size:
            problems.append(f"{INDEX} total_size ({total}) must be {size}, that of the tensors")
    return problems


def _compare_with_transformers(
    sources: Mapping[str, Shaped], config: Mapping[str, Any]
) -> list[str]:
    """Compare tensors with the transformers model, or only experts if its class is unknown."""
    try:
        for key in ("num_hidden_layers", *MTP_KEYS):  # `_is_mtp_layer` reads these fields
            check_field_type(key, config.get(key) or 1)
        reader = build_meta_model(config)
    except ValueError as error:
        return [str(error)]
    if reader is None:
        return _find_missing_experts(sources, config)
    copies, shapes = map_model_copies(reader), {n: source.shape for n, source in sources.items()}
    plan = plan_stock_tensors(
        reader, get_shapes(reader.state_dict()), shapes, compute_published_shapes(reader)
    )
    plan = {name: recipe for name, recipe in plan.items() if name not in copies}
    mtp_names = {n for n in sources if (m := LAYER.match(n)) and _is_mtp_layer(int(m[1]), config)}
    return find_shape_problems(sources, map_file_shapes(plan), mtp_names | copies.keys())


def _find_missing_experts(sources: Mapping[str, Shaped], config: Mapping[str, Any]) -> list[str]:
    """Return error texts if expert indices in `sources`' names differ from config.json's count."""
    counts = (config[key] for key in EXPERT_KEYS if FIELD_KINDS["num_experts"][1](config.get(key)))
    num_experts, problems = next(counts, 0), list[str]()
    experts_by_role: dict[tuple[str, str], set[int]] = {}
    for name, source in sources.items():
        match = EXPERT.fullmatch(name)
        if match:
            experts_by_role.setdefault((match[1], match[3]), set()).add(int(match[2]))
        elif ".experts." in name and num_experts and source.shape[:1] != (num_experts,):
            problems.append(f"{name} {source.shape} must have {num_experts} experts")
    for (prefix, role), experts in experts_by_role.items():
        expected_experts = set(range(num_experts or max(experts) + 1))
        missing, surplus = sorted(expected_experts - experts), sorted(experts - expected_experts)
        problems += [f"{prefix}.{e}.{role} is missing" for e in missing]
        problems += [f"{prefix}.{e}.{role} is one too many" for e in surplus]
    return problems


def _is_mtp_layer(layer: int, config: Mapping[str, Any]) -> bool:
    """Whether a layer index, after the last layer, belongs to a multi-token prediction layer."""
    first = config.get("num_hidden_layers") or layer + 1
    return first <= layer < first + max((config.get(key) or 0 for key in MTP_KEYS), default=0)
