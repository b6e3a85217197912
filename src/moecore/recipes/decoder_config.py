"""The native decoder of `moecore train` and `moecore pretrain`, and options that change it."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from moecore.base.fields import Bound, CheckedRecord, Count, FieldErrors, Positive
from moecore.base.options.layer import MoEConfig
from moecore.io import decoder_config_from_hf
from moecore.io.hf.config_fields import read_config
from moecore.models import DecoderConfig, YarnConfig
from moecore.recipes.files import find_config, name_option_in_errors

Factor = Annotated[float, Bound(">=", 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class RotaryOptions(CheckedRecord):
    """Rotary embedding for longer sequences; None = the value of the model's config.

    Attributes:
        theta: the base of the rotary frequencies.
        yarn_factor: YaRN's factor: the new maximum sequence length divided by `yarn_length`.
        yarn_length: YaRN's original maximum sequence length, in tokens.
        max_length: the maximum sequence length of the model, in tokens.
    """

    theta: Positive | None = None
    yarn_factor: Factor | None = None
    yarn_length: Count | None = None
    max_length: Count | None = None

    def _find_field_errors(self) -> FieldErrors:
        if (self.yarn_factor is None) != (self.yarn_length is None):
            yield "yarn_factor", f"be given with yarn_length ({self.yarn_length}): give both"

    def apply(self, config: DecoderConfig) -> DecoderConfig:
        """Return a copy of a decoder config with these options."""
        values: dict[str, Any] = {}
        if self.theta is not None:
            values["rope_theta"] = self.theta
        if self.max_length is not None:
            values["max_seq_len"] = self.max_length
        if self.yarn_factor is not None and self.yarn_length is not None:
            yarn = YarnConfig(factor=self.yarn_factor, original_max_seq_len=self.yarn_length)
            mla = config.mla
            values |= {"yarn": yarn} if mla is None else {"mla": replace(mla, yarn=yarn)}
        return replace(config, **values) if values else config


def replace_rotary(config: DecoderConfig, fields: Mapping[str, Any]) -> DecoderConfig:
    """Return `config` with rotary fields from `fields`, a dict of another decoder's fields."""
    changes: dict[str, Any] = {
        name: fields[name] for name in ("rope_theta", "max_seq_len") if name in fields
    }
    if config.mla is None:
        yarn = fields.get("yarn")
        changes["yarn"] = yarn and YarnConfig(**yarn)
    else:
        yarn = (fields.get("mla") or {}).get("yarn")
        changes["mla"] = replace(config.mla, yarn=yarn and YarnConfig(**yarn))
    return replace(config, **changes)


def add_rotary_fields(hf_fields: Mapping[str, Any], config: DecoderConfig) -> dict[str, Any]:
    """Return the config.json fields `hf_fields`, with the rotary embedding of `config`."""
    result = {**hf_fields, "max_position_embeddings": config.max_seq_len}
    rope = dict(result.pop("rope_parameters", None) or result.pop("rope_scaling", None) or {})
    result["rope_theta"] = rope["rope_theta"] = config.rope_theta
    yarn = config.yarn if config.mla is None else config.mla.yarn
    rope = {k: v for k, v in rope.items() if k in ("rope_theta", "partial_rotary_factor")}
    if yarn is None:
        return {**result, "rope_parameters": {"rope_type": "default", **rope}}
    rope |= {"rope_type": "yarn", "factor": yarn.factor, "truncate": yarn.truncate}
    rope |= {"beta_fast": yarn.beta_fast, "beta_slow": yarn.beta_slow}
    rope["original_max_position_embeddings"] = yarn.original_max_seq_len
    if yarn.mscale_all_dim:
        rope |= {"mscale": yarn.mscale, "mscale_all_dim": yarn.mscale_all_dim}
    return {**result, "rope_parameters": rope}


def get_fields(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass instance by name, without converting nested instances."""
    return {item.name: getattr(record, item.name) for item in fields(record)}


def read_decoder_config(path: Path) -> DecoderConfig:
    """Return the decoder config of --hf-config; ValueError if there is no config.json."""
    path = find_config(path)
    if not path.exists():
        raise ValueError(
            f"--hf-config ({path}) must be a config.json, its directory or a name of the hub"
        )
    with name_option_in_errors("--hf-config"):
        return decoder_config_from_hf(path)


def export_config(hf_config: Path, rotary: RotaryOptions, config: DecoderConfig) -> dict[str, Any]:
    """Return the config.json of an export: --hf-config's, with `rotary` if a field is set."""
    values = read_config(find_config(hf_config))
    return dict(values) if rotary == RotaryOptions() else add_rotary_fields(values, config)


def choose_balance(moe: MoEConfig) -> dict[str, Any]:
    """Return defaults of [balance]: a balance loss, or with `expert_bias` a bias update or {}."""
    if not moe.expert_bias:
        return {"micro_batch_coef": 0.0, "global_batch_coef": 0.05}
    if moe.score_function == "sigmoid" and moe.top_groups == moe.num_groups:
        return {"bias_update": "quantile", "bias_update_rate": 1.0}
    return {}
