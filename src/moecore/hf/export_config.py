"""The config.json that an export writes: checked against the model, without quantisation."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from moecore.checkpoint.same_config import TRAINING
from moecore.hf.config import MTP_KEYS, HFConfig, decoder_config_from_hf, read_config
from moecore.hf.same_model import config_problems
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
    name = model_class.__name__.removeprefix("FSDP") if model_class else None  # FSDP2 renames it
    if model_class is not None and _is_of_transformers(model_class, name):
        values["architectures"] = [name]  # such as one without a head, whatever the config says
    elif not values.get("architectures") and (known or name):
        values["architectures"] = [known or name]
    try:
        return json.loads(json.dumps(values))
    except (TypeError, ValueError) as error:
        raise ValueError(f"config must be JSON-able: {error}") from None


def _is_of_transformers(model_class: type, name: str | None) -> bool:
    return any(
        cls.__name__ == name and cls.__module__.startswith("transformers.models.")
        for cls in model_class.__mro__
    )


def _check_same(
    values: Mapping[str, Any],
    model: DecoderConfig | Mapping[str, Any],
    *,
    skipped: Collection[str] = TRAINING,
) -> None:
    """Raise for a field that differs, unless only training reads it."""
    for problem in config_problems(values, model, skipped=skipped):
        raise ValueError(f"{problem}: pass the config of this model")
