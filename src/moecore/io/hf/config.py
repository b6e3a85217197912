"""Conversion of a Hugging Face config.json to the config of the native decoder.

`FAMILIES` lists the supported model types. A config.json may have the published field names
(rope_theta, rope_scaling) or the names of transformers >= 5 (rope_parameters). An option that
changes the computation and that the decoder does not support is an error.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from moecore.base.fields import check_arguments, quote
from moecore.base.options.layer import BalanceConfig, MoEConfig
from moecore.io.checkpoint.config_differences import (
    TRAINING,
    Difference,
    find_decoder_differences,
    find_hf_differences,
)
from moecore.io.hf.config_fields import (
    Fields,
    HFConfig,
    NativeFamily,
    find_windows,
    read_config,
    read_grouped_attention,
    read_latent_attention,
    read_sizes,
)
from moecore.io.hf.files import INDEX, SINGLE, format_error, read_headers, read_index
from moecore.models.config import (
    AttentionBias,
    DecoderConfig,
    GatedDeltaConfig,
    Mamba2Config,
    SparseKeysConfig,
)

MTP_KEYS = ("num_nextn_predict_layers", "num_mtp_layers")  # published; transformers'
MTP_LOSS_COEF = 0.3  # DeepSeek-V3 (arXiv:2412.19437), section 4.2; GLM-4.5 (arXiv:2508.06471), 2.4


def decoder_config_from_hf(config: HFConfig) -> DecoderConfig:
    """Convert a Hugging Face config.json to the config of the native decoder.

    Args:
        config: a directory, a config.json, or its content as a mapping. In a directory with
            weights, the files determine the number of multi-token prediction modules.

    Raises:
        ValueError: if a field is missing or invalid.
        NotImplementedError: if the native decoder does not support a field, which the error names.
            `parallelize_moe` accepts the transformers model instead.
    """
    check_arguments(decoder_config_from_hf, locals())
    values = read_config(config)
    model_type = str(values.get("model_type"))
    family = FAMILIES.get(model_type)
    if family is None:
        raise NotImplementedError(
            f"config.json model_type ({quote(model_type)}) must be one of "
            f"{', '.join(FAMILIES)}: parallelize the transformers model itself"
        )
    fields = Fields(values, family)
    if not isinstance(config, Mapping):
        fields.values = {**fields.values, **_count_stored_mtp(Path(config), fields)}
    for name in ("attention_dropout", "clip_qkv", "mlp_bias"):
        fields.refuse_if(name, bool(fields.get(name, None)))
    fields.refuse_if("hidden_act", fields.get("hidden_act", "silu") != "silu")
    try:
        return fields.build_config()
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        # Of a field without an entry in KIND_TABLE, or of a value in a list.
        reason = f"{type(error).__name__}: {format_error(error)}"
        raise ValueError(
            f"config.json must hold fields of model_type ({fields.model_type}), but {reason:.200}: "
            "correct it"
        ) from None


def _read_softmax_moe(
    fields: Fields, hidden_dim: str, normalizes: bool, coef: float, *, shared_hidden_dim: int = 0
) -> MoEConfig:
    """Build the MoEConfig of a softmax router; `hidden_dim` is a field's name, `coef` a default."""
    return MoEConfig(
        dim=fields.require("hidden_size"),
        hidden_dim=fields.require(hidden_dim),
        num_experts=fields.require("num_experts"),
        top_k=fields.require("num_experts_per_tok"),
        normalize_weights=normalizes,
        shared_hidden_dim=shared_hidden_dim,
        shared_gate=shared_hidden_dim > 0,
        # See models/presets.py.
        balance=BalanceConfig(micro_batch_coef=float(fields.get("router_aux_loss_coef", coef))),
    )


def _read_qwen3_next(fields: Fields) -> DecoderConfig:
    """Build Qwen3-Next's DecoderConfig, with linear and full attention layers."""
    layers = range(fields.require("num_hidden_layers"))
    step = fields.get("full_attention_interval", 4)
    kinds = [("linear_attention", "full_attention")[(i + 1) % step == 0] for i in layers]
    kinds = fields.get("layer_types", kinds)
    is_known = all(kind in ("linear_attention", "full_attention") for kind in kinds)
    fields.refuse_if("layer_types", not is_known or len(kinds) != len(layers))
    linear_layers = tuple(i for i in layers if kinds[i] == "linear_attention")
    fields.refuse_if("layer_types", len(linear_layers) == len(layers))
    for name in ("linear_key_head_dim", "linear_value_head_dim"):
        fields.refuse_if(name, fields.get(name, 128) % 8 > 0)
    linear = GatedDeltaConfig(
        num_k_heads=fields.get("linear_num_key_heads", 16),
        num_v_heads=fields.get("linear_num_value_heads", 32),
        head_k_dim=fields.get("linear_key_head_dim", 128),
        head_v_dim=fields.get("linear_value_head_dim", 128),
        conv_size=fields.get("linear_conv_kernel_dim", 4),
    )
    return _read_qwen(
        fields,
        **_read_mtp(fields),
        has_shared_expert=True,
        qk_norm="head",
        attention_gate=True,
        zero_centered_norms=True,
        linear_attention=linear if linear_layers else None,
        linear_layers=linear_layers,
    )


def _read_qwen(
    fields: Fields, *, has_shared_expert: bool = False, **overrides: Any
) -> DecoderConfig:
    """Build the DecoderConfig of a Qwen MoE model; `overrides` are further DecoderConfig fields."""
    if "linear_layers" not in overrides:
        _refuse_windows(fields)
    shared_hidden_dim = (
        fields.require("shared_expert_intermediate_size") if has_shared_expert else 0
    )
    num_layers, step = fields.require("num_hidden_layers"), fields.get("decoder_sparse_step", 1)
    dense = set(fields.get("mlp_only_layers", []))
    dense |= {i for i in range(num_layers) if (i + 1) % step}
    if not fields.require("num_experts"):
        dense = set(range(num_layers))
    common = read_grouped_attention(fields) | overrides
    if len(dense) >= num_layers:
        return DecoderConfig(**common, mlp_hidden_dim=fields.require("intermediate_size"))
    dense_dim = fields.require("intermediate_size") if dense else 0
    normalizes = fields.get("norm_topk_prob", False)
    moe = _read_softmax_moe(
        fields, "moe_intermediate_size", normalizes, 0.001, shared_hidden_dim=shared_hidden_dim
    )
    dense_layers = tuple(sorted(dense))
    return DecoderConfig(**common, dense_layers=dense_layers, mlp_hidden_dim=dense_dim, moe=moe)


def _refuse_windows(fields: Fields) -> None:
    """Raise NotImplementedError if the config.json uses sliding-window attention."""
    fields.refuse_if("use_sliding_window", fields.get("use_sliding_window", False))
    kinds = fields.get("layer_types", [])
    fields.refuse_if("layer_types", any(kind != "full_attention" for kind in kinds))


def _read_dense(fields: Fields, *, qk_norm: Any = None) -> DecoderConfig:
    """Build the DecoderConfig of a dense Qwen or Llama model."""
    _refuse_windows(fields)
    common = read_grouped_attention(fields) | dict(qk_norm=qk_norm)
    return DecoderConfig(**common, mlp_hidden_dim=fields.require("intermediate_size"))


def _read_mistral(fields: Fields) -> DecoderConfig:
    """Build Mistral's DecoderConfig; every layer has a sliding window."""
    fields.values.setdefault("sliding_window", 4096)
    common = read_grouped_attention(fields) | dict(windows=find_windows(fields, [True]))
    return DecoderConfig(**common, mlp_hidden_dim=fields.require("intermediate_size"))


def _read_mixtral(fields: Fields) -> DecoderConfig:
    """Build Mixtral's DecoderConfig."""
    fields.refuse_if("router_jitter_noise", fields.get("router_jitter_noise", 0) > 0)
    common = read_grouped_attention(fields) | dict(windows=find_windows(fields, [True]))
    return DecoderConfig(**common, moe=_read_softmax_moe(fields, "intermediate_size", True, 0.001))


def _read_olmoe(fields: Fields) -> DecoderConfig:
    """Build OLMoE's DecoderConfig."""
    common, normalizes = read_grouped_attention(fields), fields.get("norm_topk_prob", False)
    moe = _read_softmax_moe(fields, "intermediate_size", normalizes, 0.01)
    return DecoderConfig(**common, qk_norm="full", moe=moe)


def _read_gpt_oss(fields: Fields) -> DecoderConfig:
    """Build gpt-oss's DecoderConfig, without the published balance loss coefficient of 0.9."""
    fields.values.setdefault("sliding_window", 128)
    num_layers, kinds = fields.require("num_hidden_layers"), fields.get("layer_types", ())
    kinds = kinds or [("sliding_attention", "full_attention")[i % 2] for i in range(num_layers)]
    is_known = all(kind in ("sliding_attention", "full_attention") for kind in kinds)
    fields.refuse_if("layer_types", not is_known or len(kinds) != num_layers)
    windows = find_windows(fields, [kind == "sliding_attention" for kind in kinds])
    moe = MoEConfig(
        dim=fields.require("hidden_size"),
        hidden_dim=fields.require("intermediate_size"),
        num_experts=fields.require("num_experts"),
        top_k=fields.require("num_experts_per_tok"),
        score_order="post",
        router_bias=True,
        activation="clamped_swiglu",
        activation_limit=float(fields.get("swiglu_limit", 7.0)),
        activation_alpha=float(fields.get("swiglu_alpha", 1.702)),
        fc1_bias=True,
        fc2_bias=True,
    )
    return DecoderConfig(
        **read_grouped_attention(fields), windows=windows, attention_sinks=True, moe=moe
    )


def _read_deepseek_v3(fields: Fields) -> DecoderConfig:
    """Build DeepSeek-V3's or Kimi-K2's DecoderConfig."""
    return _build_dense_first(fields, read_latent_attention(fields), _read_sigmoid_router(fields))


def _read_deepseek_v32(fields: Fields) -> DecoderConfig:
    """Build DeepSeek-V3.2's DecoderConfig, whose attention selects keys by an indexer."""
    names = {"indexed_attention", "deepseek_sparse_attention"}  # transformers < 5.18: the second
    fields.refuse_if("layer_types", not set(fields.get("layer_types", [])) <= names)
    config, first = _read_deepseek_v3(fields), fields.require("first_k_dense_replace")
    kinds = ["sparse" if i >= first else "dense" for i in range(config.num_layers)]
    fields.refuse_if("mlp_layer_types", list(fields.get("mlp_layer_types", kinds)) != kinds)
    sparse = SparseKeysConfig(
        num_heads=fields.get("index_n_heads", 64),
        head_dim=fields.get("index_head_dim", 128),
        top_k=fields.get("index_topk", 2048),
    )
    assert config.mla is not None
    return replace(config, mla=replace(config.mla, sparse=sparse))


def _read_deepseek_v2(fields: Fields) -> DecoderConfig:
    """Build DeepSeek-V2's DecoderConfig."""
    method = fields.get("topk_method", "greedy")
    fields.refuse_if("topk_method", method not in ("greedy", "group_limited_greedy"))
    groups: dict[str, Any] = {}
    if method == "group_limited_greedy":
        groups = dict(num_groups=fields.require("n_group"), top_groups=fields.require("topk_group"))
        if groups["top_groups"] < groups["num_groups"]:
            groups["group_experts"] = 1
    scope = "sequence_coef" if fields.get("seq_aux", True) else "micro_batch_coef"
    balance: Any = {scope: float(fields.get("aux_loss_alpha", 0.001))}
    router_arguments = dict(normalize_weights=False, balance=BalanceConfig(**balance), **groups)
    return _build_dense_first(fields, read_latent_attention(fields), router_arguments)


def _read_glm4_moe(fields: Fields) -> DecoderConfig:
    """Build GLM-4.5's DecoderConfig."""
    attention = read_grouped_attention(fields) | dict(
        qk_norm="head" if fields.get("use_qk_norm", False) else None
    )
    return _build_dense_first(fields, attention, _read_sigmoid_router(fields))


LAYER_LETTERS = {  # transformers' names, and those of older files
    **dict.fromkeys(("linear_attention", "mamba"), "M"),
    **dict.fromkeys(("full_attention", "attention"), "*"),
    "moe": "E",
    "mlp": "-",
}


def _read_nemotron_h(fields: Fields) -> DecoderConfig:
    """Build Nemotron-H's DecoderConfig; its attention has no rotary embedding."""
    kinds = fields.get("layers_block_type", fields.get("layer_types", []))
    fields.refuse_if("layers_block_type", any(kind not in LAYER_LETTERS for kind in kinds))
    pattern = "".join(LAYER_LETTERS[kind] for kind in kinds)
    pattern = pattern or fields.require("hybrid_override_pattern")
    fields.values["num_hidden_layers"] = len(pattern)
    fields.refuse_if("sliding_window", fields.get("sliding_window", None) is not None)
    fields.refuse_if("hybrid_override_pattern", bool(set(pattern) - set(LAYER_LETTERS.values())))
    fields.refuse_if("hybrid_override_pattern", "*" not in pattern)
    mamba = Mamba2Config(
        num_k_heads=fields.get("n_groups", 8),
        num_v_heads=fields.get("mamba_num_heads", 128),
        head_k_dim=fields.get("ssm_state_size", 128),
        head_v_dim=fields.get("mamba_head_dim", 64),
        conv_size=fields.get("conv_kernel", 4),
        min_step=float(fields.get("time_step_min", 0.001)),
    )
    moe = MoEConfig(
        dim=fields.require("hidden_size"),
        hidden_dim=fields.get("moe_intermediate_size", 7688),
        num_experts=fields.get("n_routed_experts", 8),
        top_k=fields.get("num_experts_per_tok", 2),
        latent_dim=fields.get("moe_latent_size", 0),
        activation="relu2",
        routed_scaling_factor=float(fields.get("routed_scaling_factor", 1.0)),
        shared_hidden_dim=fields.get("moe_shared_expert_intermediate_size", 7688),
        **_read_sigmoid_router(fields),
    )
    return DecoderConfig(
        **read_sizes(fields),
        pattern=pattern,
        rope_theta=None,
        norm_eps=fields.get("layer_norm_epsilon", 1e-5),
        linear_attention=mamba if "M" in pattern else None,
        moe=moe if "E" in pattern else None,
        mlp_hidden_dim=fields.get("intermediate_size", 21504) if "-" in pattern else 0,
        mlp_activation="relu2",
    )


def _read_sigmoid_router(fields: Fields) -> dict[str, Any]:
    """Return the MoEConfig arguments of DeepSeek-V3's sigmoid router."""
    return dict(
        score_function="sigmoid",
        normalize_weights=fields.get("norm_topk_prob", True),
        num_groups=fields.get("n_group", 1),
        top_groups=fields.get("topk_group", 1),
        expert_bias=True,
        # Not in the config: the papers' values for the start of pretraining, as in the presets.
        balance=BalanceConfig(sequence_coef=1e-4, bias_update_rate=1e-3),
    )


def _build_dense_first(
    fields: Fields, attention: dict[str, Any], router_arguments: dict[str, Any]
) -> DecoderConfig:
    """Build a DecoderConfig with dense first layers, from attention and router arguments."""
    num_layers, first = fields.require("num_hidden_layers"), fields.require("first_k_dense_replace")
    attention |= _read_mtp(fields)
    F_, shared = fields.require("moe_intermediate_size"), fields.get("n_shared_experts", 0)
    if first >= num_layers:
        return DecoderConfig(**attention, mlp_hidden_dim=fields.require("intermediate_size"))
    return DecoderConfig(
        **attention,
        dense_layers=tuple(range(first)),
        mlp_hidden_dim=fields.require("intermediate_size") if first else 0,
        moe=MoEConfig(
            dim=attention["dim"],
            hidden_dim=F_,
            num_experts=fields.require("n_routed_experts"),
            top_k=fields.require("num_experts_per_tok"),
            routed_scaling_factor=float(fields.get("routed_scaling_factor", 1.0)),
            shared_hidden_dim=F_ * shared,
            **router_arguments,
        ),
    )


def _read_mtp(fields: Fields) -> dict[str, Any]:
    """Return the DecoderConfig arguments of the multi-token prediction (MTP) modules."""
    number = next((fields.require(k) for k in MTP_KEYS if fields.values.get(k) is not None), 0)
    return dict(num_mtp_layers=number, mtp_loss_coef=MTP_LOSS_COEF if number else 0.0)


def _count_stored_mtp(path: Path, fields: Fields) -> dict[str, int]:
    """Return {MTP field: number of MTP modules in the weight files}, or {} without weights."""
    path = path if path.is_dir() else path.parent
    if not fields.family.has_mtp or not ((path / INDEX).is_file() or (path / SINGLE).is_file()):
        return {}
    names = read_index(path) or read_headers(path)
    layers = {name.split(".")[2] for name in names if name.startswith("model.layers.")}
    num_mtp = sum(n.isdecimal() and int(n) >= fields.require("num_hidden_layers") for n in layers)
    num_mtp += any(name.startswith("mtp.") for name in names)
    return {MTP_KEYS[0]: num_mtp}


ATTENTION_BIAS: tuple[str, bool, AttentionBias] = ("attention_bias", False, "all")
_V3_VALUES = dict(
    moe_layer_freq=1, scoring_func="sigmoid", topk_method="noaux_tc", rope_interleave=True
)
_V3 = NativeFamily(
    "DeepseekV3ForCausalLM", _read_deepseek_v3, known_values=_V3_VALUES, has_mtp=True
)
FAMILIES = {
    "qwen3_moe": NativeFamily(
        "Qwen3MoeForCausalLM", partial(_read_qwen, qk_norm="head"), ATTENTION_BIAS
    ),
    "qwen3_next": NativeFamily(
        "Qwen3NextForCausalLM",
        _read_qwen3_next,
        ATTENTION_BIAS,
        dict(head_dim=256, partial_rotary_factor=0.25, norm_topk_prob=True),
        has_mtp=True,
    ),
    "qwen2_moe": NativeFamily(
        "Qwen2MoeForCausalLM",
        partial(_read_qwen, has_shared_expert=True),
        ("qkv_bias", True, "qkv"),
    ),
    "mixtral": NativeFamily("MixtralForCausalLM", _read_mixtral),
    "olmoe": NativeFamily("OlmoeForCausalLM", _read_olmoe, ATTENTION_BIAS),
    "deepseek_v3": _V3,
    "kimi_k2": _V3,
    "deepseek_v32": replace(
        _V3,
        architecture="DeepseekV32ForCausalLM",
        read=_read_deepseek_v32,
        defaults=dict(q_lora_rank=1536),
    ),
    "deepseek_v2": NativeFamily(
        "DeepseekV2ForCausalLM",
        _read_deepseek_v2,
        known_values=dict(moe_layer_freq=1, scoring_func="softmax", norm_topk_prob=False),
    ),
    "glm4_moe": NativeFamily(
        "Glm4MoeForCausalLM",
        _read_glm4_moe,
        ("attention_bias", False, "qkv"),
        dict(partial_rotary_factor=0.5),
        has_mtp=True,
    ),
    "gpt_oss": NativeFamily("GptOssForCausalLM", _read_gpt_oss, ("attention_bias", True, "all")),
    "nemotron_h": NativeFamily(
        "NemotronHForCausalLM",
        _read_nemotron_h,
        defaults=dict(head_dim=128),
        known_values=dict(
            moe_layer_freq=1,
            mlp_hidden_act="relu2",
            mamba_hidden_act="silu",
            use_conv_bias=True,
            use_bias=False,
            residual_in_fp32=False,
            n_shared_experts=1,
            tie_word_embeddings=False,
            num_nextn_predict_layers=0,
        ),
    ),
    "qwen3": NativeFamily(
        "Qwen3ForCausalLM", partial(_read_dense, qk_norm="head"), ATTENTION_BIAS, dict(head_dim=128)
    ),
    "qwen2": NativeFamily("Qwen2ForCausalLM", _read_dense, ("", True, "qkv")),
    "llama": NativeFamily("LlamaForCausalLM", _read_dense, ATTENTION_BIAS),
    "mistral": NativeFamily("MistralForCausalLM", _read_mistral),
}


def compare_config(
    hf_config: Mapping[str, Any],
    model: DecoderConfig | Mapping[str, Any] | None,
    *,
    skipped_fields: Collection[str] = TRAINING,
) -> list[str]:
    """Return error texts for config.json's fields that differ from the model's; [] for None."""
    # Native configs are compared if the native decoder supports both models, because config.json
    # has several spellings. For other models, the fields of config.json are compared.
    differences: list[Difference] = []
    if isinstance(model, Mapping) and "model_type" in model:
        model_config, model = model, None
        if hf_config.get("model_type") == model_config["model_type"]:
            with suppress(NotImplementedError, ValueError):  # no native decoder
                model = decoder_config_from_hf(model_config)
        if model is None:
            differences = find_hf_differences(hf_config, model_config)
    if model is not None and str(hf_config.get("model_type")) in FAMILIES:
        try:
            native = decoder_config_from_hf(hf_config)
        except (NotImplementedError, ValueError) as error:
            return [str(error)]
        differences = find_decoder_differences(native, model, skipped_fields=skipped_fields)
    return [
        f"config.json {d.name} ({d.value}) must be that of the model ({d.reference})"
        for d in differences
    ]
