"""Fields of a config.json: read with their kinds, and the errors that reading them may give."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moecore.base.fields import quote
from moecore.io.hf.files import CONFIG, read_json

HFConfig = str | os.PathLike[str] | Mapping[str, Any]
LAYER_COUNT = re.compile("(?<!per_)(layer|depth|block|group|stage)")
MAX_COUNT, MAX_LAYERS = 2**31, 10**5  # above, a config is wrong, and lists would not end


def _count(min_value: int, max_value: int = MAX_COUNT) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, int) and not isinstance(v, bool) and min_value <= v <= max_value


def _number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and -1e30 < value < 1e30 and math.isfinite(value)


def _counts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(_count(0), value))


KINDS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        f"a whole number from 1 to {MAX_LAYERS}",
        _count(1, MAX_LAYERS),
        "num_hidden_layers decoder_sparse_step full_attention_interval",
    ),
    (
        f"a whole number from 0 to {MAX_LAYERS}",
        _count(0, MAX_LAYERS),
        "num_experts n_routed_experts first_k_dense_replace n_shared_experts "
        "num_nextn_predict_layers num_mtp_layers",
    ),
    ("a whole number >= 0", _count(0), "q_lora_rank sliding_window"),
    (
        "a whole number >= 1",
        _count(1),
        "vocab_size hidden_size num_attention_heads num_key_value_heads head_dim "
        "max_position_embeddings intermediate_size moe_intermediate_size num_experts_per_tok "
        "shared_expert_intermediate_size kv_lora_rank qk_nope_head_dim qk_rope_head_dim "
        "v_head_dim n_group topk_group original_max_position_embeddings linear_num_key_heads "
        "linear_num_value_heads linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim "
        "index_n_heads index_head_dim index_topk n_groups mamba_num_heads mamba_head_dim "
        "ssm_state_size conv_kernel moe_shared_expert_intermediate_size "
        "moe_latent_size",
    ),
    (
        "a number",
        _number,
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
    ("a list of whole numbers >= 0", _counts, "mlp_only_layers"),
    (
        "a list",
        lambda value: isinstance(value, list | tuple),
        "layer_types mlp_layer_types layers_block_type",
    ),
    ("a string", lambda value: isinstance(value, str), "hybrid_override_pattern model_type"),
)
KIND_OF = {name: (words, matches) for words, matches, names in KINDS for name in names.split()}


def read_config(config: HFConfig) -> dict[str, Any]:
    """Return the fields of a config.json, from its directory, its path, or a copy of a mapping.

    Raises:
        ValueError: when it is no object, or a field that every reader uses has another kind.
    """
    if isinstance(config, Mapping):
        values = dict(config)
    else:
        path = Path(config)
        values = read_json(path / CONFIG if path.is_dir() else path)
    for name in ("model_type", "quantization_config"):
        if values.get(name) is not None:
            check_kind(name, values[name])
    return values


def check_kind(name: str, value: Any) -> None:
    """Raise ValueError when the type of a value does not fit the field of this name."""
    words, matches = KIND_OF.get(name, ("", None))
    if matches is not None and not matches(value):
        raise ValueError(f"config.json {name} ({value!r:.40}) must be {words}: correct it")


def check_layers(values: Mapping[str, Any]) -> None:
    """Raise a ValueError when a config of any family asks for too many layers."""
    # Classes of transformers make lists with an entry for each layer before they check anything.
    for name, value in values.items():
        if isinstance(value, Mapping):
            check_layers(value)
        is_count = isinstance(value, int) and LAYER_COUNT.search(str(name))
        if is_count and value > MAX_LAYERS:
            raise ValueError(
                f"config.json {quote(name)} ({quote(value)}) must be at most {MAX_LAYERS}: correct "
                "it"
            )


class Fields:
    """A config.json, and the errors that reading it may give."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = dict(values)
        self.model_type = str(values.get("model_type"))
        if self.values.get("num_experts") is None:  # transformers >= 5 writes one name for all
            self.values["num_experts"] = values.get("num_local_experts")

    def need(self, name: str) -> Any:
        """Return a field that has no default."""
        if self.values.get(name) is None:
            raise ValueError(
                f"config.json {name} (None) must be given for model_type "
                f"({quote(self.model_type)}): add it"
            )
        return self._checked(name, self.values[name])

    def get(self, name: str, default: Any) -> Any:
        """Return a field, or the default where it is missing or null."""
        value = self.values.get(name)
        return default if value is None else self._checked(name, value)

    def _checked(self, name: str, value: Any) -> Any:
        """Return a value, or raise ValueError when it is not what this field holds."""
        check_kind(name, value)
        return value

    def refuse(self, name: str, wrong: bool, value: Any = None) -> None:
        """Raise when the field asks for something that the decoder lacks."""
        if wrong:
            value = self.values.get(name) if value is None else value
            raise NotImplementedError(
                f"config.json {name} ({quote(value)}) of model_type ({self.model_type!r}) must not "
                "be asked of the native decoder, which lacks it: parallelize the transformers "
                "model itself"
            )

    def rope(self) -> dict[str, Any]:
        """Return the rotary options: rope_type, rope_theta and what belongs to the type."""
        options = {"rope_theta": self.values.get("rope_theta"), **self.get("rope_scaling", {})}
        options |= self.get("rope_parameters", {})
        options.setdefault("rope_type", options.pop("type", None))
        if options["rope_theta"] is None:
            options["rope_theta"] = self.need("rope_theta")
        for name, value in options.items():
            if value is not None:
                self._checked(name, value)
        options.setdefault("partial_rotary_factor", self.get("partial_rotary_factor", 1.0))
        return options
