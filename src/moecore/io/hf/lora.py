"""LoRA adapters of a parallelized peft model: initialize, save and load; `merge.py` merges them.

A directory has adapter_config.json and adapter_model.safetensors with peft's names and shapes, so
`PeftModel.from_pretrained` loads the directory into a transformers model.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecore.base.failures import run_and_share_errors
from moecore.base.fields import check_arguments, quote
from moecore.base.params import clean_name, compute_global_indices, init_normal_, init_uniform_
from moecore.base.peft_layers import is_dora_linear, is_tuner_layer
from moecore.base.rank_checks import gather_objects
from moecore.families.transformers.lora import find_file_names, unwrap_peft
from moecore.io.checkpoint.files import refuse_problems
from moecore.io.checkpoint.ranks import is_first_of_stage, is_first_rank, run_on_first_rank
from moecore.io.hf.collect import write_piece
from moecore.io.hf.files import HFFiles, read_file_header, read_json
from moecore.io.hf.pieces import (
    FileView,
    TensorPiece,
    get_detached_shard,
    select_shard,
    unshard_tensor,
)
from moecore.moe.low_rank import LowRank
from moecore.parallel.model.parallel_state import find_staged_module
from moecore.train.expert_moves import run_in_expert_order
from moecore.train.rerun import drop_step

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """A LoRA matrix of the model, and the part of a tensor in peft's file that stores it."""

    tensor: Tensor
    piece: TensorPiece

    def convert_to_file(self, tensor: Tensor) -> Tensor:
        """Convert the adapter's unsharded tensor to the tensor in peft's file."""
        file_tensor = tensor.new_empty(self.piece.file_shape)
        write_piece(tensor, self.piece, file_tensor)
        return file_tensor


@torch.no_grad()
def init_adapters(model: nn.Module, seed: int = 0) -> None:
    """Initialize A and B of all adapters as peft does, identically on any parallel layout.

    B is 0. A is uniform, or normal with `LoraConfig(init_lora_weights="gaussian")`. For an
    embedding A is 0 and B is normal. Copies of `modules_to_save` are filled by `load_hf`. The
    DoRA vector of a linear is set to the row norms of the linear's weight, which must be loaded and
    is all-gathered. Without DoRA there is no communication.

    Args:
        model: a PeftModel, plain or parallelized, with storage.
        seed: different seeds give independent adapters. CPU and CUDA give different values.

    Raises:
        ValueError: for a model without adapters, for adapters that are initialized from base
            weights (pissa, eva), and for parameters other than A, B and DoRA of linears.
    """
    check_arguments(init_adapters, locals())
    for adapter, config in _get_lora_configs(model).items():
        if config.init_lora_weights not in (True, "gaussian"):
            raise ValueError(
                f"LoraConfig.init_lora_weights ({config.init_lora_weights!r}) must be True or "
                "'gaussian' to fill adapters from a seed: load them"
            )
        for path, layer in model.named_modules():
            if is_tuner_layer(layer):
                is_normal = config.init_lora_weights == "gaussian"
                _init_adapter_layer(clean_name(path), layer, adapter, seed, is_normal=is_normal)


@run_in_expert_order
def save_adapters(
    model: nn.Module, path: str | os.PathLike[str], *, adapter: str = "default"
) -> None:
    """Write one adapter to a directory in peft's format. Collective; rank 0 writes.

    Rank 0 needs host memory for the unsharded adapter of all pipeline stages.

    Args:
        model: a PeftModel, plain or parallelized.
        path: a directory; an adapter in it is replaced.
        adapter: the adapter's name in peft.

    Raises:
        ValueError: for a model without this adapter, or with a trainable parameter outside of
            adapters, such as a router's.
        OSError: on every rank, if rank 0 could not write.
    """
    check_arguments(save_adapters, locals())
    path = Path(path)

    def find_entries() -> dict[str, StoredAdapter]:
        entries = collect_adapter_tensors(model, adapter)
        adapters = (collect_adapter_tensors(model, name) for name in _get_lora_configs(model))
        ids = {id(entry.tensor) for tensors in adapters for entry in tensors.values()}
        names = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in ids]
        for name in names:
            raise ValueError(
                f"{clean_name(name)} (and {len(names) - 1} more) must be frozen or belong to an "
                "adapter, whose files hold nothing else: train its module by "
                "LoraConfig.modules_to_save, or, as with a router, save the whole model (Saver, or "
                "merge_adapters and export_hf)"
            )
        file_names = find_file_names(model, entries)
        for name in (name for name, file_name in file_names.items() if file_name is None):
            raise ValueError(
                f"{name} must not be an adapter's tensor, because peft loads it from no file: "
                "leave its layer out of LoraConfig.target_modules, or save the merged model "
                "(merge_adapters and export_hf)"
            )
        return {file_names[name] or name: entry for name, entry in entries.items()}

    entries = run_and_share_errors(find_entries)
    stages = find_staged_module(model)[1]
    keeps = is_first_rank() if stages is None else is_first_of_stage(stages)
    file_tensors: dict[str, Tensor] = {}
    for name, entry in entries.items():
        tensor = unshard_tensor(entry.tensor)
        if keeps:
            file_tensors[name] = entry.convert_to_file(tensor).contiguous().cpu()
    if stages is not None:
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(file_tensors, of_ranks if is_first_rank() else None)
        file_tensors = {name: x for entry in of_ranks if entry for name, x in entry.items()}
    run_on_first_rank(lambda: _write_adapter_files(model, path, adapter, file_tensors))


@run_in_expert_order
def load_adapters(
    model: nn.Module, path: str | os.PathLike[str], *, adapter: str = "default"
) -> None:
    """Fill an adapter of a model from a directory in peft's format. Collective.

    The model must already have the adapter (`get_peft_model` with the same LoraConfig). Each rank
    reads the file. Gradients and counts of an unfinished step are dropped (`TrainStep.drop`).

    Args:
        model: a PeftModel, plain or parallelized, with storage.
        path: written by `save_adapters` or peft; every rank must see it.
        adapter: the adapter's name in peft.

    Raises:
        ValueError: on every rank, naming the first mismatch, before values are written.
        OSError: on every rank, if one rank could not read.
    """
    check_arguments(load_adapters, locals())
    path = Path(path)
    entries = run_and_share_errors(lambda: collect_adapter_tensors(model, adapter))
    file_names = run_and_share_errors(lambda: find_file_names(model, entries))
    stages = gather_objects({file_name or name: name for name, file_name in file_names.items()})
    names = {file_name: name for stage in stages for file_name, name in stage.items()}
    file_tensors = run_and_share_errors(lambda: _read_adapter(model, path, adapter, entries, names))
    drop_step(model)
    with torch.no_grad():
        for name, entry in entries.items():
            full = entry.piece.locate(file_tensors[name]).reshape(entry.tensor.shape)
            value = select_shard(full, compute_global_indices(entry.tensor))
            get_detached_shard(entry.tensor).copy_(value)


def _read_adapter(
    model: nn.Module,
    path: Path,
    adapter: str,
    entries: dict[str, StoredAdapter],
    all_names: Mapping[str, str],
) -> dict[str, Tensor]:
    """Read an adapter's file by peft's names; ValueError if names, shapes or config differ.

    `all_names` maps the names that `save_adapters` writes to peft's names, of all pipeline stages.
    """
    with HFFiles(path, read_file_header(path / WEIGHTS)) as files:
        tensors = {
            all_names.get(name, name): files.read(
                name, tuple(slice(0, size) for size in entry.shape)
            )
            for name, entry in files.tensors.items()
        }
    problems = [f"{name} is missing" for name in entries if name not in tensors]
    own_names = {*all_names.values()}
    problems += [f"{name} is no tensor of the adapter" for name in tensors if name not in own_names]
    config = _get_lora_configs(model)[adapter]
    file_config = read_json(path / CONFIG)
    for key in ("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern"):
        if key in file_config and file_config[key] != getattr(config, key):
            problems.append(f"{key} ({quote(file_config[key])}) must be {getattr(config, key)!r}")
    for name, entry in entries.items():
        shape = entry.piece.file_shape
        if name in tensors and tuple(tensors[name].shape) != shape:
            problems.append(f"{name} {tuple(tensors[name].shape)} must be {shape}")
        if entry.tensor.is_meta:
            problems.append(f"{name} has no storage in the model: call to_empty first")
    subject = f"path ({path}) must fit adapter ({adapter!r})"
    refuse_problems(subject, problems, "use the LoraConfig that is stored there")
    return tensors


def _get_lora_configs(model: nn.Module) -> dict[str, Any]:
    """Return the model's LoraConfigs by adapter name; raise ValueError for a model without LoRA."""
    configs: dict[str, Any] = getattr(model, "peft_config", None) or {}
    if unwrap_peft(model) is model or any(
        not hasattr(config, "lora_alpha") for config in configs.values()
    ):
        raise ValueError(
            f"model ({type(model).__name__}) must be a PeftModel with LoRA: call "
            "peft.get_peft_model(model, LoraConfig(...)) before parallelize_moe"
        )
    return configs


def collect_adapter_tensors(model: nn.Module, adapter: str) -> dict[str, StoredAdapter]:
    """Return {name in peft's file: `StoredAdapter`} of one adapter; ValueError if it is missing."""
    from peft import get_peft_model_state_dict

    configs = _get_lora_configs(model)
    if adapter not in configs:
        raise ValueError(f"adapter ({adapter!r}) must be one of {sorted(configs)}: choose one")
    state_dict = model.state_dict(keep_vars=True)
    named: dict[str, Tensor] = get_peft_model_state_dict(
        model, state_dict=state_dict, adapter_name=adapter, save_embedding_layers=False
    )
    layers: list[Any] = [layer for layer in model.modules() if is_tuner_layer(layer)]
    owners = [getattr(layer, kind) for layer in layers for kind in layer.adapter_layer_names]
    parts = [owner[adapter] for owner in owners if adapter in owner]
    params = {x for x in parts for x in ([x] if isinstance(x, Tensor) else x.parameters())}
    if not params <= {*named.values()}:
        raise ValueError(
            f"adapter ({adapter!r}) must have tensors that peft finds by its name, so no adapter "
            f"({', '.join(configs)}) may have the name of a module or layer: rename it"
        )
    entries = {
        name: StoredAdapter(tensor, TensorPiece(name, (), tuple(tensor.shape)))
        for name, tensor in ((clean_name(n), t) for n, t in named.items())
    }
    updates: dict[str, Any] = {n: m for n, m in model.named_modules() if isinstance(m, LowRank)}
    for path, update in updates.items():
        if adapter not in update.lora_A:
            continue
        path = clean_name(path)
        home = path.rpartition(".lora.")[0] + ".base_layer" * update.depth
        a, b = entries.pop(f"{path}.lora_A").tensor, entries.pop(f"{path}.lora_B").tensor
        (E, r, i), o = a.shape, b.shape[1]
        name = f"{home}.lora_A.weight"
        entries[name] = StoredAdapter(a, TensorPiece(name, (), (E * r, i)))
        name, shape = f"{home}.lora_B.weight", (o, r * E)  # experts are the last dim
        view = FileView(shape, (0, 0), ((1, E, 1), (0, o, 1), (1, r, E)))
        entries[name] = StoredAdapter(b, TensorPiece(name, (), (E, o, r), view))
    return entries


def _write_adapter_files(
    model: nn.Module, path: Path, adapter: str, file_tensors: dict[str, Tensor]
) -> None:
    """Write adapter_config.json and the adapter's safetensors file to a directory."""
    from safetensors.torch import save_file

    config: Any = copy(_get_lora_configs(model)[adapter])
    base: Any = model.get_base_model()  # type: ignore[operator]
    config.inference_mode = True
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(base, "name_or_path", None) or None
    path.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(path))
    save_file(file_tensors, path / WEIGHTS, metadata={"format": "pt"})


def _init_adapter_layer(name: str, layer: Any, adapter: str, seed: int, *, is_normal: bool) -> None:
    """Initialize A and B of `adapter`; the layer's name and `seed` select the random values."""
    for kind in (*layer.adapter_layer_names, *layer.other_param_names):
        owners = getattr(layer, kind)  # parameters by adapter, or plain values such as r
        if not isinstance(owners, nn.ModuleDict | nn.ParameterDict) or adapter not in owners:
            continue
        owner = owners[adapter]
        params = {"": owner} if isinstance(owner, Tensor) else dict(owner.named_parameters())
        for suffix, param in params.items():
            key = f"{name}.{kind}.{adapter}.{suffix}".rstrip(".")
            if kind in ("lora_B", "lora_embedding_A"):
                param.zero_()
            elif kind == "lora_embedding_B":
                init_normal_(param, std=1.0, key=key, seed=seed)
            elif kind == "lora_A" and is_normal:
                init_normal_(param, std=1 / layer.r[adapter], key=key, seed=seed)
            elif kind == "lora_A":
                init_uniform_(param, bound=1 / math.sqrt(param.shape[-1]), key=key, seed=seed)
            elif kind == "lora_magnitude_vector" and is_dora_linear(layer, adapter):
                norms = torch.linalg.norm(unshard_tensor(layer.get_base_layer().weight), dim=1)
                value = select_shard(norms, compute_global_indices(param))
                get_detached_shard(param).copy_(value)
            else:
                raise ValueError(
                    f"{key} must be A or B of LoRA to be filled from a seed: attach it to a model "
                    "with weights"
                )
