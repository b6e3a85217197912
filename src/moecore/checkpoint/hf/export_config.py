"""The config.json that an export writes: checked against the model, without quantisation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch import nn

from moecore.checkpoint.hf.config import MTP_KEYS, HFConfig, decoder_config_from_hf, read_config
from moecore.models.config import DecoderConfig
from moecore.models.decoder import Decoder

ARCHITECTURES = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
TRAINING = {"num_mtp_layers", "mtp_loss_coef", "ce_chunk_tokens", "max_seq_len"}
MOE_TRAINING = {"balance", "router_jitter", "router_dtype"}


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
    _check_same(model.config, decoder_config_from_hf(values))
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


def _check_same(ours: DecoderConfig, theirs: DecoderConfig) -> None:
    """Raise for a field that differs, unless only training reads it."""
    records: list[tuple[str, Any, Any, set[str]]] = [("", ours, theirs, TRAINING | {"moe"})]
    if ours.moe is not None and theirs.moe is not None:
        capacity = ours.moe.capacity
        only_training = {"capacity"} if capacity and capacity.eval_factor is None else set()
        records.append(("moe.", ours.moe, theirs.moe, MOE_TRAINING | only_training))
    for record, mine, other, skipped in records:
        for field in fields(mine):
            a, b = getattr(mine, field.name), getattr(other, field.name)
            if a != b and field.name not in skipped:
                raise ValueError(
                    f"config.json {record}{field.name} ({b!r}) must be that of the decoder "
                    f"({a!r}): pass the config of this model"
                )
    if (ours.moe is None) != (theirs.moe is None):
        raise ValueError(
            f"config.json must {'not ' if ours.moe is None else ''}have experts, as the decoder: "
            "pass the config of this model"
        )
