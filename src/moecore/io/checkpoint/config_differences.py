"""Comparison of model configs: models with equal weights and equal configs have equal outputs.

Equal names and shapes of tensors do not suffice, because models with another top_k or rope_theta
have the same tensors. Fields that only training reads may differ.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from typing import Any

from torch import nn

from moecore.base.options.layer import LIMITED_ACTIVATIONS, MoEConfig
from moecore.families.transformers.stock import is_pretrained
from moecore.models.config import DecoderConfig
from moecore.models.decoder import Decoder

# num_mtp_layers is here because names differ with it.
TRAINING = frozenset(
    {
        *("num_mtp_layers", "mtp_repeats", "mtp_loss_coef", "mtp_detached", "ce_chunk_tokens"),
        "max_seq_len",
        *("moe.balance", "moe.router_jitter", "moe.router_dtype", "moe.capacity"),
    }
)
# Field -> the field that decides whether it is read, and the values with which it is read.
READ_WITH: dict[str, tuple[str, tuple[str, ...]]] = {
    "moe.activation_limit": ("activation", LIMITED_ACTIVATIONS),
    "moe.activation_alpha": ("activation", ("clamped_swiglu",)),
    "mlp_activation_limit": ("mlp_activation", ("situ_glu",)),
    "mlp_activation_up_limit": ("mlp_activation", ("situ_glu",)),
}
# Fields of a transformers config that change no output of a model from the same weights.
BOOKKEEPING = frozenset(
    {
        *("transformers_version", "_name_or_path", "architectures", "auto_map"),
        *("dtype", "torch_dtype", "quantization_config", "pretraining_tp", "ep_size"),
        *("attn_implementation", "_attn_implementation", "experts_implementation"),
        *("_experts_implementation", "gradient_checkpointing", "chunk_size_feed_forward"),
        *("use_cache", "return_dict", "output_hidden_states", "output_attentions"),
        *("output_router_logits", "id2label", "label2id", "problem_type"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings"),
        *("initializer_range", "router_aux_loss_coef", "router_jitter_noise", "aux_loss_alpha"),
        *("seq_aux", "num_nextn_predict_layers", "num_mtp_layers"),
    }
)
THETA, LENGTH = "rope_theta", "max_position_embeddings"
ROPE = (THETA, "partial_rotary_factor", "rope_scaling", "rope_parameters")
ROPE_DEFAULTS = {"partial_rotary_factor": 1.0, "beta_fast": 32, "beta_slow": 1, "truncate": True}
# None is computed from others, and shapes differ with it.
DERIVED = ("head_dim", "num_key_value_heads")
_NO_DEFAULT = frozenset(field.name for field in fields(DecoderConfig) if field.default is MISSING)
Config = DecoderConfig | dict[str, Any]


@dataclass(frozen=True, slots=True)
class Difference:
    """A config field with two values: its path, such as moe.top_k, and both values as text."""

    name: str
    value: str
    reference: str


def find_decoder_differences(
    config: DecoderConfig,
    reference: DecoderConfig | Mapping[str, Any] | None,
    *,
    skipped_fields: Collection[str] = TRAINING,
) -> list[Difference]:
    """Return the fields that differ and are not skipped; [] if `reference` is of another kind."""
    values = asdict(reference) if isinstance(reference, DecoderConfig) else reference
    if values is None or not values.keys() >= _NO_DEFAULT:
        return []
    return list(_find_dataclass_differences(config, values, "", skipped_fields))


def list_training_fields(moe: MoEConfig | None) -> frozenset[str]:
    """Return the config fields that only training reads: no moe.capacity if eval drops tokens."""
    capacity = None if moe is None else moe.capacity
    drops_in_eval = capacity is not None and capacity.eval_factor is not None
    return TRAINING - {"moe.capacity"} if drops_in_eval else TRAINING


def find_moe_differences(config: MoEConfig, reference: MoEConfig) -> list[Difference]:
    """Compare two MoE configs; return the fields that differ and change a layer's eval output."""
    return list(
        _find_dataclass_differences(config, asdict(reference), "moe.", list_training_fields(config))
    )


def find_hf_differences(
    config: Mapping[str, Any], reference: Mapping[str, Any]
) -> list[Difference]:
    """Compare two transformers configs as dicts; return fields that differ and change outputs."""
    kinds = [values.get("model_type") for values in (config, reference)]
    if kinds[0] != kinds[1]:  # then other fields mean other things
        return [Difference("model_type", *map(_format_value, kinds))]
    return list(_find_hf_differences(config, reference, ""))


def find_saved_differences(
    config: Config | None, saved_config: Mapping[str, Any] | None
) -> list[Difference]:
    """Return fields that differ; [] if a config is None or `saved_config` lacks required fields."""
    if config is None or saved_config is None or find_missing_fields(config, saved_config):
        return []
    if isinstance(config, DecoderConfig):
        return find_decoder_differences(config, saved_config)
    return find_hf_differences(config, saved_config)


def find_missing_fields(config: Config | None, saved_config: Mapping[str, Any] | None) -> list[str]:
    """Return the required fields that `saved_config` lacks; [] without a config."""
    if config is None or saved_config is None:
        return []
    names = _NO_DEFAULT if isinstance(config, DecoderConfig) else {"model_type"}
    return sorted(names - saved_config.keys())


def convert_config(config: object) -> dict[str, Any]:
    """Convert a mapping, dataclass or transformers config to nested dicts, or raise ValueError."""
    try:
        values = _convert_to_dicts(config)
    except RecursionError:
        raise ValueError(f"config ({type(config).__name__}) must not contain itself") from None
    if not isinstance(values, dict):
        raise ValueError(
            f"config ({type(config).__name__}) must be a mapping or a dataclass instance, or "
            "have to_dict(): pass one of them"
        )
    return values


def _convert_to_dicts(value: object) -> Any:
    """Convert mappings, dataclasses and transformers configs to dicts, recursively."""
    # Before `is_dataclass`: configs of transformers 5 are dataclasses whose fields lack model_type.
    if callable(getattr(value, "to_dict", None)) and not isinstance(value, type):
        values = value.to_dict()  # type: ignore[attr-defined]
        if isinstance(values, Mapping) and "model_type" in values:
            return _select_json_fields(values)
        return _convert_to_dicts({**values}) if isinstance(values, Mapping) else value
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return {name: _convert_to_dicts(entry) for name, entry in value.items()}
    if type(value) in (list, tuple):
        return [_convert_to_dicts(entry) for entry in value]  # type: ignore[attr-defined]
    return value


def _select_json_fields(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a transformers config whose values JSON supports."""
    result: dict[str, Any] = {}
    for name, value in hf_config.items():
        with suppress(TypeError, ValueError, RecursionError):
            result[str(name)] = json.loads(json.dumps(value))
    return result


def find_model_config(model: nn.Module) -> Config | None:
    """Return the config of the only native or transformers model in a module, otherwise None."""
    modules = {id(part): part for part in _find_models(model)}
    if len(modules) != 1:
        return None
    config: Any = next(iter(modules.values())).config
    return config if isinstance(config, DecoderConfig) else _select_json_fields(config.to_dict())


def _find_models(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost native decoders and transformers models in a module."""
    if isinstance(module, Decoder) or (is_pretrained(module) and hasattr(module, "config")):
        yield module
        return
    for child in module.children():
        yield from _find_models(child)


def _find_hf_differences(
    config: Mapping[str, Any], reference: Mapping[str, Any], prefix: str
) -> Iterator[Difference]:
    """Yield a `Difference`, under `prefix`, per field that both have with different values."""
    # Unknown fields are compared too: an unnecessary error is better than silently other results.
    values, other = _select_compared_fields(config), _select_compared_fields(reference)
    for name in sorted(values.keys() & other.keys()):
        a, b = values[name], other[name]
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from _find_hf_differences(a, b, f"{prefix}{name}.")
        elif _convert_tuple_to_list(a) != _convert_tuple_to_list(b):
            yield Difference(prefix + name, _format_value(a), _format_value(b))
    # Rotary options have two spellings, and not every release writes the defaults out.
    options, other_options = _read_rope_options(config), _read_rope_options(reference)
    for location in sorted(options.keys() & other_options.keys()):
        a, b = options[location], other_options[location]
        names = a.keys() | b.keys()
        if a["rope_type"] != b["rope_type"]:  # then the others mean other things
            names = {"rope_type", THETA}
        for name in sorted(names):
            # None is off; but a theta or a length that is not named has a default.
            is_named = name not in (THETA, LENGTH) or None not in (a.get(name), b.get(name))
            first, second = a.get(name), b.get(name)
            if is_named and _convert_tuple_to_list(first) != _convert_tuple_to_list(second):
                path = prefix + (name if name == LENGTH else location + name)
                yield Difference(path, _format_value(first), _format_value(second))


def _select_compared_fields(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that may change a model's eval output, without rotary fields."""
    result = {
        name: value
        for name, value in hf_config.items()
        if name not in BOOKKEEPING
        and name not in ROPE
        and "dropout" not in name
        and not name.endswith("drop")
        and not (value is None and name in DERIVED)
    }
    local = result.pop("num_local_experts", None)  # transformers >= 5 writes one name for all
    if result.get("num_experts") is None and local is not None:
        result["num_experts"] = local
    if hf_config.get("use_sliding_window") is False:  # then its length is not read
        for name in ("sliding_window", "max_window_layers"):
            result.pop(name, None)
    return result


def _read_rope_options(hf_config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the rotary options of each kind of layer, by path such as "rope_parameters."."""
    if all(hf_config.get(name) is None for name in ROPE):
        return {}
    rope: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        rope |= hf_config[name] if isinstance(hf_config.get(name), Mapping) else {}
    kinds = {kind: options for kind, options in rope.items() if isinstance(options, Mapping)}
    if not kinds:
        return {"rope_parameters.": _normalize_rope_options(rope, hf_config)}
    return {
        f"rope_parameters.{k}.": _normalize_rope_options(o, hf_config) for k, o in kinds.items()
    }


def _normalize_rope_options(
    options: Mapping[str, Any], hf_config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the rotary options that transformers reads; defaults are from `hf_config`."""
    result = {name: hf_config.get(name) for name in (THETA, "partial_rotary_factor")}
    result |= {name: value for name, value in options.items() if value is not None}
    old = result.pop("type", None)
    kind = result["rope_type"] = result.get("rope_type") or old or "default"
    if kind == "default":  # reads nothing else
        result = {name: result[name] for name in (THETA, "partial_rotary_factor", "rope_type")}
    else:
        result.setdefault(f"original_{LENGTH}", hf_config.get(LENGTH))
        if kind == "dynamic" or result.get("factor") is None:
            result[LENGTH] = hf_config.get(LENGTH)
    result |= {n: value for n, value in ROPE_DEFAULTS.items() if result.get(n) is None}
    return {name: value for name, value in result.items() if value is not None}


def _find_dataclass_differences(
    config: Any, reference: Mapping[str, Any], prefix: str, skipped_fields: Collection[str]
) -> Iterator[Difference]:
    """Yield a `Difference`, under `prefix`, per field that differs from the dict `reference`."""
    for field in fields(config):
        name = prefix + field.name
        value, other = getattr(config, field.name), reference.get(field.name, field.default)
        if name in skipped_fields or other is MISSING:
            continue
        if name in READ_WITH and getattr(config, READ_WITH[name][0]) not in READ_WITH[name][1]:
            continue
        if name == "moe.normalize_weights":  # None follows K, which is compared itself
            value = config.normalizes
            other = config.choices_per_token > 1 if other is None else other
        if is_dataclass(value) and isinstance(other, Mapping):
            yield from _find_dataclass_differences(value, other, f"{name}.", skipped_fields)
        elif _convert_tuple_to_list(value) != _convert_tuple_to_list(other):
            yield Difference(name, _format_value(value), _format_value(other))


def _convert_tuple_to_list(value: Any) -> Any:
    """Convert a tuple to a list, as JSON does, and return other values unchanged."""
    return list(value) if isinstance(value, tuple) else value


def _format_value(value: Any) -> str:
    """Return a config value as text of at most 80 characters, or "given" for a nested config."""
    return "given" if is_dataclass(value) or isinstance(value, Mapping) else f"{value!r:.80}"
