"""Fields of a config.json: type checks, and the attention arguments that model families share.

A `NativeFamily` record has the differences of one family; `config.py` lists the records.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moecore.base.fields import quote
from moecore.io.hf.files import CONFIG, read_json
from moecore.models.config import AttentionBias, DecoderConfig, MLAConfig, YarnConfig

HFConfig = str | os.PathLike[str] | Mapping[str, Any]
PLAIN = ("default", None)
LAYER_COUNT = re.compile("(?<!per_)(layer|depth|block|group|stage)")
MAX_COUNT, MAX_LAYERS = 2**31, 10**5  # larger values would make endless lists


def _make_count_check(min_value: int, max_value: int = MAX_COUNT) -> Callable[[Any], bool]:
    """Return a predicate for integers from `min_value` to `max_value`."""
    return lambda v: isinstance(v, int) and not isinstance(v, bool) and min_value <= v <= max_value


def _is_number(value: Any) -> bool:
    """Whether a value is an int or float, not a bool, with an absolute value below 1e30."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and -1e30 < value < 1e30


KIND_TABLE: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        f"a whole number from 1 to {MAX_LAYERS}",
        _make_count_check(1, MAX_LAYERS),
        "num_hidden_layers decoder_sparse_step full_attention_interval",
    ),
    (
        f"a whole number from 0 to {MAX_LAYERS}",
        _make_count_check(0, MAX_LAYERS),
        "num_experts n_routed_experts first_k_dense_replace n_shared_experts "
        "num_nextn_predict_layers num_mtp_layers",
    ),
    ("a whole number >= 0", _make_count_check(0), "q_lora_rank sliding_window"),
    (
        "a whole number >= 1",
        _make_count_check(1),
        "vocab_size hidden_size num_attention_heads num_key_value_heads head_dim "
        "max_position_embeddings intermediate_size moe_intermediate_size num_experts_per_tok "
        "shared_expert_intermediate_size kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim "
        "n_group topk_group original_max_position_embeddings linear_num_key_heads "
        "linear_num_value_heads linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim "
        "index_n_heads index_head_dim index_topk n_groups mamba_num_heads mamba_head_dim "
        "ssm_state_size conv_kernel moe_shared_expert_intermediate_size moe_latent_size",
    ),
    (
        "a number",
        _is_number,
        "rms_norm_eps rope_theta router_aux_loss_coef router_jitter_noise routed_scaling_factor "
        "factor beta_fast beta_slow mscale mscale_all_dim partial_rotary_factor aux_loss_alpha "
        "swiglu_limit swiglu_alpha layer_norm_epsilon time_step_min",
    ),
    (
        "true or false",
        lambda value: isinstance(value, bool),
        "tie_word_embeddings norm_topk_prob use_sliding_window qkv_bias attention_bias "
        "use_qk_norm seq_aux truncate",
    ),
    (
        "an object",
        lambda value: isinstance(value, Mapping),
        "rope_scaling rope_parameters quantization_config",
    ),
    (
        "a list of whole numbers >= 0",
        lambda value: isinstance(value, list | tuple) and all(map(_make_count_check(0), value)),
        "mlp_only_layers",
    ),
    (
        "a list",
        lambda value: isinstance(value, list | tuple),
        "layer_types mlp_layer_types layers_block_type",
    ),
    ("a string", lambda value: isinstance(value, str), "hybrid_override_pattern model_type"),
)
FIELD_KINDS = {
    name: (words, matches) for words, matches, names in KIND_TABLE for name in names.split()
}


def read_config(config: HFConfig) -> dict[str, Any]:
    """Return config.json's fields; only model_type and quantization_config are checked."""
    if not isinstance(config, Mapping):
        path = Path(config)
        config = read_json(path / CONFIG if path.is_dir() else path)
    values: dict[str, Any] = _decode_floats(config)
    for name in ("model_type", "quantization_config"):
        if values.get(name) is not None:
            check_field_type(name, values[name])
    return values


def _decode_floats(value: Any) -> Any:
    """Replace each {"__float__": "Infinity"}, which transformers writes, by a float."""
    if isinstance(value, Mapping):
        text = value.get("__float__")
        if isinstance(text, str) and len(value) == 1:
            return float(text)
        return {name: _decode_floats(entry) for name, entry in value.items()}
    return [_decode_floats(entry) for entry in value] if isinstance(value, list) else value


def check_field_type(name: str, value: Any) -> Any:
    """Return the value of the config.json field `name`; raise ValueError if its type is wrong."""
    words, matches = FIELD_KINDS.get(name, ("", None))
    if matches is not None and not matches(value):
        raise ValueError(f"config.json {name} ({value!r:.40}) must be {words}: correct it")
    return value


def check_layers(hf_config: Mapping[str, Any]) -> None:
    """Raise ValueError if a field of config.json sets more than `MAX_LAYERS` layers."""
    # Classes of transformers make lists with an entry per layer before they check the fields.
    for name, value in hf_config.items():
        if isinstance(value, Mapping):
            check_layers(value)
        is_count = isinstance(value, int) and LAYER_COUNT.search(str(name))
        if is_count and value > MAX_LAYERS:
            raise ValueError(
                f"config.json {quote(name)} ({quote(value)}) must be at most {MAX_LAYERS}: correct "
                "it"
            )


@dataclass(frozen=True, slots=True)
class NativeFamily:
    """How config.json is converted for a transformers family that the native decoder implements."""

    architecture: str  # name of the class in transformers
    read: Callable[[Fields], DecoderConfig]
    # Of attention: the field that enables the bias ("" = none), its default, and the projections.
    bias: tuple[str, bool, AttentionBias] = ("", False, "all")
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of missing or null fields
    known_values: Mapping[str, Any] = field(default_factory=dict)  # the only supported values
    has_mtp: bool = False  # whether files may have multi-token prediction modules


class Fields:
    """The fields of one config.json, with type checks (`check_field_type`) at each access."""

    def __init__(self, values: Mapping[str, Any], family: NativeFamily) -> None:
        self.values, self.family = dict(values), family
        self.model_type = str(values.get("model_type"))
        if self.values.get("num_experts") is None:  # transformers >= 5 writes num_local_experts
            self.values["num_experts"] = values.get("num_local_experts")

    def build_config(self) -> DecoderConfig:
        """Build the DecoderConfig; NotImplementedError for a value that it does not support."""
        for name, only in self.family.known_values.items():
            self.refuse_if(name, self.get(name, only) != only)
        self.values |= {name: self.get(name, v) for name, v in self.family.defaults.items()}
        return self.family.read(self)

    def require(self, name: str) -> Any:
        """Return the value of a required field; raise ValueError if it is missing."""
        if self.values.get(name) is None:
            raise ValueError(
                f"config.json {name} (None) must be given for model_type "
                f"({quote(self.model_type)}): add it"
            )
        return check_field_type(name, self.values[name])

    def get(self, name: str, default: Any) -> Any:
        """Return the value of a field, or the default if it is missing or null."""
        value = self.values.get(name)
        return default if value is None else check_field_type(name, value)

    def refuse_if(self, name: str, is_unsupported: bool, value: Any = None) -> None:
        """Raise NotImplementedError for the value of field `name` if `is_unsupported`."""
        if is_unsupported:
            value = self.values.get(name) if value is None else value
            raise NotImplementedError(
                f"config.json {name} ({quote(value)}) of model_type ({self.model_type!r}) must not "
                "be asked of the native decoder, which lacks it: parallelize the transformers "
                "model itself"
            )

    def read_rope(self) -> dict[str, Any]:
        """Return the options of rotary embeddings, such as rope_type, rope_theta and factor."""
        options = {"rope_theta": self.values.get("rope_theta"), **self.get("rope_scaling", {})}
        options |= self.get("rope_parameters", {})
        options.setdefault("rope_type", options.pop("type", None))
        if options["rope_theta"] is None:
            options["rope_theta"] = self.require("rope_theta")
        for name, value in options.items():
            if value is not None:
                check_field_type(name, value)
        options.setdefault("partial_rotary_factor", self.get("partial_rotary_factor", 1.0))
        return options


def read_grouped_attention(fields: Fields) -> dict[str, Any]:
    """Return the DecoderConfig arguments of `read_sizes` and of rotary grouped-query attention."""
    heads, rope = read_sizes(fields), fields.read_rope()
    head_dim, rotary_fraction = heads["head_dim"], rope["partial_rotary_factor"]
    rotates_all = "partial_rotary_factor" not in fields.family.defaults
    fields.refuse_if("partial_rotary_factor", rotary_fraction != 1 and rotates_all, rotary_fraction)
    rotary_dim = int(head_dim * rotary_fraction)
    if not 0 < rotary_dim <= head_dim:
        raise ValueError(
            f"config.json partial_rotary_factor ({rotary_fraction}) must leave 1 to head_dim "
            f"({head_dim}) dims to turn: correct it"
        )
    return heads | dict(
        rope_theta=float(rope["rope_theta"]),
        rotary_dim=0 if rotary_dim == head_dim else rotary_dim,
        yarn=_read_yarn(fields),
        norm_eps=fields.require("rms_norm_eps"),
    )


def read_sizes(fields: Fields) -> dict[str, Any]:
    """Return the DecoderConfig arguments that all families share, such as dims and heads."""
    heads = fields.require("num_attention_heads")
    return dict(
        vocab_size=fields.require("vocab_size"),
        dim=fields.require("hidden_size"),
        num_layers=fields.require("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=fields.get("num_key_value_heads", heads),
        head_dim=fields.get("head_dim", fields.require("hidden_size") // heads),
        attention_bias=_read_attention_bias(fields),
        tie_embeddings=fields.get("tie_word_embeddings", False),
        max_seq_len=fields.require("max_position_embeddings"),
    )


def read_latent_attention(fields: Fields) -> dict[str, Any]:
    """Return the DecoderConfig arguments of multi-head latent attention (MLA)."""
    mla = MLAConfig(
        q_lora_rank=fields.get("q_lora_rank", 0),
        kv_lora_rank=fields.require("kv_lora_rank"),
        qk_nope_head_dim=fields.require("qk_nope_head_dim"),
        qk_rope_head_dim=fields.require("qk_rope_head_dim"),
        v_head_dim=fields.require("v_head_dim"),
        yarn=_read_yarn(fields),
    )
    common = read_grouped_attention(fields)
    heads = dict(head_dim=mla.qk_head_dim, num_kv_heads=common["num_heads"])
    return common | heads | dict(mla=mla, yarn=None)


def find_windows(fields: Fields, has_window: Sequence[bool]) -> tuple[int, ...]:
    """Return the sliding windows of the shortest pattern of layers that repeats in the model.

    A window is a number of tokens; 0 = full attention. The result is () if no layer has a window
    below max_position_embeddings. `has_window` has a bool per layer.
    """
    window, length = fields.get("sliding_window", None), fields.require("max_position_embeddings")
    if window is None or window >= length or not any(has_window):
        return ()
    if not window:
        raise ValueError("config.json sliding_window (0) must be >= 1 or null: correct it")
    n, layers = len(has_window), range(len(has_window))
    period = next(
        p for p in range(1, n + 1) if all(has_window[i] == has_window[i % p] for i in layers)
    )
    return tuple(window if is_windowed else 0 for is_windowed in has_window[:period])


def _read_attention_bias(fields: Fields) -> AttentionBias | None:
    """Return which attention projections have a bias, or None for no bias."""
    name, is_on, kind = fields.family.bias
    if name != "attention_bias":
        fields.refuse_if("attention_bias", fields.get("attention_bias", False))
    return kind if (fields.get(name, is_on) if name else is_on) else None


def _read_yarn(fields: Fields) -> YarnConfig | None:
    """Return the YaRN config of the rotary embedding; None if rope_type is the default."""
    rope = fields.read_rope()
    kind = rope["rope_type"]
    fields.refuse_if("rope_type", kind not in (*PLAIN, "yarn"), kind)
    if kind in PLAIN:
        return None
    factor = rope.get("attention_factor")
    fields.refuse_if("attention_factor", factor is not None, factor)
    if rope.get("original_max_position_embeddings") is None:
        fields.require("rope_scaling.original_max_position_embeddings")
    original = rope["original_max_position_embeddings"]
    mscale, all_dim = rope.get("mscale") or 0.0, rope.get("mscale_all_dim") or 0.0
    # transformers then scales only the attention scores, not cos and sin.
    fields.refuse_if("mscale_all_dim", bool(all_dim and not mscale), all_dim)
    return YarnConfig(
        factor=float(rope.get("factor") or fields.require("max_position_embeddings") / original),
        original_max_seq_len=original,
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        mscale=float(mscale) if all_dim else 1.0,
        mscale_all_dim=float(all_dim),
        truncate=rope.get("truncate") is not False,
    )
