"""The config.json that an export writes: checked against the model, without quantisation."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from torch import nn

from moecore.io.checkpoint.config_differences import TRAINING, training_only
from moecore.io.hf.config import FAMILIES, MTP_KEYS, config_problems, decoder_config_from_hf
from moecore.io.hf.config_fields import HFConfig, read_config
from moecore.io.hf.stock import transformers_class
from moecore.io.hf.upcycled import upcycled_config
from moecore.models.config import DecoderConfig
from moecore.models.decoder import Decoder


def export_config(model: nn.Module, config: HFConfig | None) -> dict[str, Any]:
    """Return the content of config.json without dtypes, or refuse a config of another model."""
    if isinstance(model, Decoder):
        return _decoder_config(model, config)
    model_config = getattr(model, "config", None)
    if not hasattr(model_config, "to_dict"):
        _refuse_wrapper(model)
    upcycled = upcycled_config(model)
    expected_values: dict[str, Any] = model_config.to_dict() if upcycled is None else upcycled  # type: ignore[union-attr]
    if config is None:
        values = expected_values
    else:
        values = read_config(config)
        _check_values(values, expected_values)
    return finish_config(values, 0, type(model) if upcycled is None else None)


def _decoder_config(model: Decoder, config: HFConfig | None) -> dict[str, Any]:
    """The config given for a native decoder, checked against it."""
    if config is None:
        raise ValueError(
            f"config (None) must be given for {type(model).__name__}: pass the config.json of "
            "the Hugging Face model that it is, as a path or a mapping"
        )
    values = read_config(config)
    values = finish_config(values, model.config.num_mtp_layers)
    decoder_config_from_hf(values)  # raises where it cannot be a native decoder
    _check_values(values, model.config, skipped_fields=training_only(model.config.moe))
    return values


def _refuse_wrapper(model: nn.Module) -> NoReturn:
    """Raise for a module that is no model, naming the one that it holds."""
    for path, module in model.named_modules():
        if isinstance(module, Decoder) or transformers_class(type(module)) is not None:
            raise ValueError(
                f"model ({type(model).__name__}) must be the {type(module).__name__} in it, whose "
                f"Hugging Face names are known: pass model.{path}"
            )
    raise NotImplementedError(
        f"model ({type(model).__name__}) must be a moecore Decoder or a transformers model, "
        "whose Hugging Face names are known: translate other names yourself"
    )


def finish_config(
    values: Mapping[str, Any], num_mtp: int, model_class: type | None = None
) -> dict[str, Any]:
    """Return a copy without quantisation, with `num_mtp` modules and a class that loads it."""
    values = {k: v for k, v in values.items() if k != "quantization_config"}
    for key in MTP_KEYS:
        if key in values:
            values[key] = num_mtp
    if num_mtp and not any(key in values for key in MTP_KEYS):
        values[MTP_KEYS[0]] = num_mtp
    family = FAMILIES.get(str(values.get("model_type")))
    name = family.architecture if family else model_class.__name__ if model_class else None
    kind = transformers_class(model_class) if model_class else None
    if kind is not None:
        values["architectures"] = [kind.__name__]  # such as one with another head than config's
    elif not values.get("architectures") and name:
        values["architectures"] = [name]
    try:
        result: dict[str, Any] = json.loads(json.dumps(values))
    except (TypeError, ValueError) as error:
        raise ValueError(f"config must be JSON-able: {error}") from None
    return result


def _check_values(
    values: Mapping[str, Any],
    model: DecoderConfig | Mapping[str, Any],
    *,
    skipped_fields: Collection[str] = TRAINING,
) -> None:
    """Raise for a field that differs, unless only training reads it."""
    for problem in config_problems(values, model, skipped_fields=skipped_fields):
        raise ValueError(f"{problem}: pass the config of this model")
