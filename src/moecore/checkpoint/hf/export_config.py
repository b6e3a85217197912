"""The config.json that an export writes: checked against the model, without quantisation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import nn

from moecore.checkpoint.hf.config import MTP_KEYS, HFConfig, decoder_config_from_hf, read_config
from moecore.checkpoint.hf.same_model import config_problems
from moecore.checkpoint.same_config import TRAINING
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
    """Return what config.json is to say, without dtypes.

    Args:
        model: a native decoder or a transformers model.
        config: as `export_hf` got it.

    Raises:
        ValueError: when a native decoder has none, or one that describes another decoder.
    """
    if config is None:
        own = getattr(model, "config", None)
        if isinstance(model, Decoder) or not hasattr(own, "to_dict"):
            raise ValueError(
                f"config (None) must be given for {type(model).__name__}: pass the config.json of "
                "the Hugging Face model that it is, as a path or a mapping"
            )
        values = own.to_dict()  # type: ignore[union-attr]
    else:
        values = read_config(config)
    if not isinstance(model, Decoder):
        return finish_config(values, 0, type(model))
    values = finish_config(values, model.config.num_mtp_layers)
    _check_same(model.config, values)
    return values


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
    name = ARCHITECTURES.get(str(values.get("model_type")))
    if name is None and model_class is not None:
        name = model_class.__name__.removeprefix("FSDP")  # FSDP2 renames its root
    if name is not None and not values.get("architectures"):
        values["architectures"] = [name]
    try:
        return json.loads(json.dumps(values))
    except (TypeError, ValueError) as error:
        raise ValueError(f"config must be JSON-able: {error}") from None


def _check_same(model: DecoderConfig, values: Mapping[str, Any]) -> None:
    """Raise for a field that differs, unless only training reads it."""
    capacity = model.moe.capacity if model.moe else None
    in_eval = {"moe.capacity"} if capacity and capacity.eval_factor is not None else set()
    decoder_config_from_hf(values)  # raises where it cannot be a native decoder
    for problem in config_problems(values, model, skipped=TRAINING - in_eval):
        raise ValueError(f"{problem}: pass the config of this model")
