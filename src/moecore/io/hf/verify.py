"""Whether a Hugging Face directory is whole, from headers alone.

The format has no digests, so a flipped bit in the data is not seen; a missing shard, a cut file, an
index that disagrees, a missing expert, layer or scale, and a wrong shape are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import torch

from moecore.io.checkpoint.ranks import rank_and_world
from moecore.io.checkpoint.shard_file import CHUNK_BYTES
from moecore.io.hf.config import KIND_OF, MTP_KEYS, HFConfig, decoder_config_from_hf
from moecore.io.hf.files import CONFIG, INDEX, BoxReader, HFFiles, read_json
from moecore.io.hf.names import EMBEDDING, HEAD, FileRecipe, find_layout, hf_copies, hf_plan
from moecore.io.hf.quant import TensorSource, find_sources

EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")
LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.")


class Shaped(Protocol):
    """A tensor of a directory, written already or not."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""


def verify_hf(path: str | os.PathLike[str]) -> list[str]:
    """Return what is wrong with a directory, one line each; nothing for a whole one."""
    path = Path(path)
    try:
        config = read_json(path / CONFIG)
        with HFFiles(path) as files:
            sources, problems = find_sources(files, config.get("quantization_config"))
            problems += _stray_shards(path, files)
    except ValueError as error:
        return [str(error)]
    return problems + content_problems(sources, config, path)


def content_problems(
    sources: Mapping[str, Shaped], config: Mapping[str, Any], described: HFConfig
) -> list[str]:
    """Return how tensors differ from those of the model that a config.json describes.

    Args:
        sources: what files hold, or will hold.
        described: the same, or the directory, where the files count multi-token prediction.
    """
    try:
        native = decoder_config_from_hf(described)
        plan = hf_plan(native, find_layout(sources))
    except NotImplementedError:  # an option that the native decoder lacks
        problems = _end_problems(sources, config) + _missing_experts(sources, config)
        return problems + _missing_layers(sources, config) + _unlike_layers(sources, config)
    except ValueError as error:
        return [str(error)]
    return plan_problems(sources, plan, hf_copies(native))


def plan_problems(
    sources: Mapping[str, Shaped], plan: Mapping[str, FileRecipe], copies: Mapping[str, str]
) -> list[str]:
    """Return how files differ from what a decoder is made of; `copies` may be there besides."""
    wanted = {p.name: p.shape for recipe in plan.values() for p in recipe.pieces}
    return shape_problems(sources, wanted, copies)


def shape_problems(
    found: Mapping[str, Shaped], wanted: Mapping[str, tuple[int, ...]], copies: Collection[str] = ()
) -> list[str]:
    """Return how names and shapes differ; `copies` may be there besides."""
    problems = [f"{name} is missing" for name in wanted if name not in found]
    problems += [
        f"{name} is not in the model that {CONFIG} describes"
        for name in found
        if name not in wanted and name not in copies and not name.endswith("rotary_emb.inv_freq")
    ]
    problems += [
        f"{name} {found[name].shape} must be {shape}"
        for name, shape in wanted.items()
        if name in found and found[name].shape != shape
    ]
    return problems


def copy_problems(
    files: BoxReader, sources: Mapping[str, TensorSource], copies: Mapping[str, str]
) -> list[str]:
    """Return which copies differ from their originals; each rank reads a share of the rows."""
    rank, world = rank_and_world()
    problems = []
    for copy, original in copies.items():
        if copy not in sources or original not in sources:
            continue
        a, b = sources[copy], sources[original]
        same = a.shape == b.shape
        if same:
            step = -(-a.shape[0] // world)
            rest = tuple(slice(0, n) for n in a.shape[1:])
            rows = max(1, CHUNK_BYTES // max(1, a.dtype.itemsize * a.shape[-1]))
            stop = min((rank + 1) * step, a.shape[0])
            for first in range(rank * step, stop, rows):
                box = (slice(first, min(first + rows, stop)), *rest)
                same = same and torch.equal(a.read(files, box), b.read(files, box))
        if not same:
            problems.append(
                f"{copy} must equal {original}, because the model has one tensor for both"
            )
    return problems


def _stray_shards(path: Path, files: HFFiles) -> list[str]:
    """Shards that no index names, and a total size that is not theirs."""
    problems = []
    used = {entry.file for entry in files.tensors.values()}
    there = {p.name for p in path.glob("model*.safetensors")}
    problems += [f"{name} holds no tensor of the checkpoint" for name in sorted(there - used)]
    if (path / INDEX).is_file():
        metadata = read_json(path / INDEX).get("metadata", {})
        if not isinstance(metadata, dict):
            return [*problems, f"{INDEX} metadata ({metadata!r:.40}) must be an object"]
        total = metadata.get("total_size")
        stored = sum(entry.nbytes for entry in files.tensors.values())
        if total is not None and total != stored:
            problems.append(f"{INDEX} total_size ({total}) must be {stored}, that of the tensors")
    return problems


def _end_problems(sources: Mapping[str, Shaped], config: Mapping[str, Any]) -> list[str]:
    """Embedding and head of a causal language model, where the embedding is called so."""
    if not any(name.endswith("embed_tokens.weight") for name in sources):
        return []
    ends = (EMBEDDING,) if config.get("tie_word_embeddings", False) else (EMBEDDING, HEAD)
    problems = [f"{name} is missing" for name in ends if name not in sources]
    shape = (config.get("vocab_size"), config.get("hidden_size"))
    problems += [
        f"{name} {sources[name].shape} must be {shape}"
        for name in ends
        if name in sources and None not in shape and sources[name].shape != shape
    ]
    return problems


def _missing_experts(sources: Mapping[str, Shaped], config: Mapping[str, Any]) -> list[str]:
    """Experts of a layer that others have, or that the config counts."""
    want = next((config[key] for key in EXPERT_KEYS if _is_layers(config.get(key))), 0)
    problems = []
    found: dict[tuple[str, str], set[int]] = {}
    for name, source in sources.items():
        match = EXPERT.fullmatch(name)
        if match:
            found.setdefault((match[1], match[3]), set()).add(int(match[2]))
        elif ".experts." in name and want and source.shape[:1] != (want,):
            problems.append(f"{name} {source.shape} must have {want} experts")
    for (prefix, role), experts in found.items():
        every = set(range(want or max(experts) + 1))
        problems += [f"{prefix}.{e}.{role} is missing" for e in sorted(every - experts)]
        problems += [f"{prefix}.{e}.{role} is one too many" for e in sorted(experts - every)]
    return problems


def _missing_layers(sources: Mapping[str, Shaped], config: Mapping[str, Any]) -> list[str]:
    """Layers that the config counts and no tensor belongs to, and the other way round."""
    found = {int(match[1]) for name in sources if (match := LAYER.match(name))}
    num_layers = config.get("num_hidden_layers")
    if not _is_layers(num_layers):
        return []
    behind = [config[key] for key in MTP_KEYS if _is_layers(config.get(key))]
    last = num_layers + max(behind, default=0)
    problems = [f"layer {i} is missing" for i in range(num_layers) if i not in found]
    return problems + [f"layer {i} is one too many" for i in sorted(found) if i >= last]


def _unlike_layers(sources: Mapping[str, Shaped], config: Mapping[str, Any]) -> list[str]:
    """What a layer lacks or has in another shape than those of its type, of experts or not."""
    layers: dict[int, dict[str, Shaped]] = {}
    for name, source in sources.items():
        match = LAYER.match(name)
        if match:
            layers.setdefault(int(match[1]), {})[name[match.end() :]] = source
    types = config.get("layer_types")
    kinds: dict[Any, dict[int, dict[str, Shaped]]] = {}
    for i, layer in layers.items():
        kind = types[i] if isinstance(types, list) and i < len(types) else None
        has_experts = any(".experts." in name for name in layer)
        kinds.setdefault((str(kind), has_experts), {})[i] = layer
    problems = []
    for alike in kinds.values():
        for name in {name: None for layer in alike.values() for name in layer}:
            shapes = [tuple(layer[name].shape) for layer in alike.values() if name in layer]
            usual = max(shapes, key=shapes.count)
            for i, layer in alike.items():
                if name not in layer and not EXPERT.fullmatch(f".{name}"):
                    problems.append(f"layer {i} has no {name}, as others of its kind have")
                elif name in layer and tuple(layer[name].shape) != usual:
                    shape = tuple(layer[name].shape)
                    problems.append(f"{name} {shape} of layer {i} must be {usual} as in others")
    return problems


def _is_layers(value: Any) -> TypeGuard[int]:
    """Whether it is a number of layers or experts that can be; a huge one would list for hours."""
    return KIND_OF["num_experts"][1](value)
