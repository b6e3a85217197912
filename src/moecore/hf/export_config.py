"""The config.json that an export writes: checked against the model, without quantisation."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from moecore.checkpoint.config_differences import TRAINING
from moecore.hf.config import MTP_KEYS, HFConfig, decoder_config_from_hf, read_config
from moecore.hf.config_problems import config_problems
from moecore.models.config import DecoderConfig
from moecore.models.decoder import Decoder

ARCHITECTURES = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}


def export_config(model: nn.Module, config: HFConfig | None) -> dict[str, Any]:
    """Return the content of config.json, without dtypes.

    Args:
        model: a native decoder or a transformers model.
        config: as `export_hf` got it.

    Raises:
        ValueError: when a native decoder has none, or it describes another model.
    """
    own = getattr(model, "config", None)
    if config is None:
        if isinstance(model, Decoder) or not hasattr(own, "to_dict"):
            raise ValueError(
                f"config (None) must be given for {type(model).__name__}: pass the config.json of "
                "the Hugging Face model that it is, as a path or a mapping"
            )
        values = own.to_dict()  # type: ignore[union-attr]
    else:
        values = read_config(config)
    if not isinstance(model, Decoder):
        if config is not None and hasattr(own, "to_dict"):
            _check_same(values, own.to_dict())  # type: ignore[union-attr]
        return finish_config(values, 0, type(model))
    values = finish_config(values, model.config.num_mtp_layers)
    decoder_config_from_hf(values)  # raises where it cannot be a native decoder
    capacity = model.config.moe.capacity if model.config.moe else None
    in_eval = {"moe.capacity"} if capacity and capacity.eval_factor is not None else set()
    _check_same(values, model.config, skipped=TRAINING - in_eval)
    return values


def check_complete(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise for a transformers model whose directory would lack what its class reads from it.

    The class is the model's own; for a part of a model (a base without a head, an attention) and
    for a wrapper it is the causal language model of its config.

    Args:
        model: any.
        shapes: of its tensors, by name.

    Raises:
        ValueError: naming a parameter that is not there, or has another shape.
    """
    own = getattr(model, "config", None)
    if isinstance(model, Decoder) or not hasattr(own, "to_dict"):
        return
    kind = _transformers_class(type(model))
    if kind is None or getattr(model, "base_model", None) is model:
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

        kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(own), kind)
    if kind is None:
        return
    with torch.device("meta"):
        wanted = kind(deepcopy(own)).state_dict()
    fix = "export the whole model, and merge adapters into it first"
    for name, tensor in wanted.items():
        if name not in shapes:
            raise ValueError(
                f"model ({_name_of(type(model))}) must hold {name} of {kind.__name__}, which reads "
                f"the directory: {fix}"
            )
        if shapes[name] != tuple(tensor.shape):
            raise ValueError(
                f"{name} {shapes[name]} must be {tuple(tensor.shape)} in {kind.__name__}, which "
                "reads the directory: correct the model's config"
            )


def finish_config(
    values: Mapping[str, Any], num_mtp: int, model_class: type | None = None
) -> dict[str, Any]:
    """Return a copy without quantisation, with the modules that are there and a class to load it.

    Args:
        values: of a config.json.
        num_mtp: multi-token prediction modules in the files.
        model_class: of a transformers model.

    Raises:
        ValueError: when it is not JSON-able.
    """
    values = {k: v for k, v in values.items() if k != "quantization_config"}
    for key in MTP_KEYS:
        if key in values:
            values[key] = num_mtp
    if num_mtp and not any(key in values for key in MTP_KEYS):
        values[MTP_KEYS[0]] = num_mtp
    known = ARCHITECTURES.get(str(values.get("model_type")))
    name = _name_of(model_class) if model_class else None
    kind = _transformers_class(model_class) if model_class else None
    if kind is not None:
        values["architectures"] = [kind.__name__]  # such as one with another head than config's
    elif not values.get("architectures") and (known or name):
        values["architectures"] = [known or name]
    try:
        return json.loads(json.dumps(values))
    except (TypeError, ValueError) as error:
        raise ValueError(f"config must be JSON-able: {error}") from None


def _name_of(model_class: type) -> str:
    return model_class.__name__.removeprefix("FSDP")  # FSDP2 renames it


def _transformers_class(model_class: type) -> Any:
    """Return the class of transformers' models that a class is or extends, or None."""
    for cls in model_class.__mro__:
        if cls.__module__.startswith("transformers.models.") and hasattr(cls, "base_model_prefix"):
            return cls
    return None


def _check_same(
    values: Mapping[str, Any],
    model: DecoderConfig | Mapping[str, Any],
    *,
    skipped: Collection[str] = TRAINING,
) -> None:
    """Raise for a field that differs, unless only training reads it."""
    for problem in config_problems(values, model, skipped=skipped):
        raise ValueError(f"{problem}: pass the config of this model")
