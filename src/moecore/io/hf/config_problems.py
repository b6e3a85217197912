"""Whether a config.json describes the model whose tensors go with it, as far as can be known.

Where the native decoder can be both models, their native configs are compared, so it does not
matter how a config.json spells them. Other transformers models (such as gpt-oss) are compared field
by field where both name one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from moecore.io.checkpoint.config_differences import TRAINING, differences, hf_differences
from moecore.io.hf.config import FAMILIES, decoder_config_from_hf
from moecore.models.config import DecoderConfig


def config_problems(
    values: Mapping[str, Any],
    model: DecoderConfig | Mapping[str, Any] | None,
    *,
    skipped: Collection[str] = TRAINING,
) -> list[str]:
    """Return the fields of a config.json that are not those of the model, one line each.

    Args:
        values: what config.json holds.
        model: config of a native decoder, what JSON made of one, or what a config.json holds.
            None, and anything else: nothing is known of the model.
        skipped: paths of fields of the native config that may differ.
    """
    if isinstance(model, Mapping) and "model_type" in model:
        kind, wanted = values.get("model_type"), model["model_type"]
        if kind != wanted:
            return [_line("model_type", repr(kind), repr(wanted))]
        hf_config = model
        try:
            model = decoder_config_from_hf(hf_config)
        except (NotImplementedError, ValueError):  # no native decoder
            return [_line(d.name, d.ours, d.theirs) for d in hf_differences(values, hf_config)]
    if model is None or values.get("model_type") not in FAMILIES:
        return []
    try:
        native = decoder_config_from_hf(values)
    except (NotImplementedError, ValueError) as error:
        return [str(error)]
    found = differences(native, model, skipped=skipped)
    return [_line(d.name, d.ours, d.theirs) for d in found]


def _line(name: str, written: str, wanted: str) -> str:
    return f"config.json {name} ({written}) must be that of the model ({wanted})"
