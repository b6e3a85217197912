"""transformers configs with the sizes of presets: Qwen3-MoE, gpt-oss and DeepSeek-V3 models."""

from __future__ import annotations

import dataclasses
from typing import Any

from moecore.models import DecoderConfig, preset


def make_hf_config(name: str, layers: int | None = None) -> Any:
    """Return the transformers config of preset `name`, with its first layers (None = all).

    Raises:
        ValueError: if the preset is no Qwen3-MoE, no gpt-oss, and no DeepSeek-V3 without YaRN.
    """
    from transformers import AutoConfig

    config = preset(name)
    config = dataclasses.replace(config, num_layers=layers or config.num_layers)
    moe, mla, yarn = config.moe, config.mla, config.yarn
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if moe is not None and config.attention_sinks and yarn is not None:
        kind, prefix, fields = "gpt_oss", "GptOss", _make_gpt_oss_fields(config)
        rope |= {"rope_type": "yarn", "factor": yarn.factor, "truncate": yarn.truncate}
        rope |= {"beta_fast": yarn.beta_fast, "beta_slow": yarn.beta_slow}
        rope |= {"original_max_position_embeddings": yarn.original_max_seq_len}
    elif moe is not None and mla is not None and mla.yarn is None:
        kind, prefix, fields = "deepseek_v3", "DeepseekV3", _make_deepseek_v3_fields(config)
    elif moe is not None and config.qk_norm == "head" and not moe.shared_hidden_dim:
        kind, prefix, fields = "qwen3_moe", "Qwen3Moe", {"head_dim": config.head_dim}
        fields |= {"num_experts": moe.num_experts, "moe_intermediate_size": moe.hidden_dim}
        fields["norm_topk_prob"] = moe.normalize_weights
    else:
        raise ValueError(
            f"--preset ({name}) must be one of Qwen3-MoE, gpt-oss or Moonlight: use qwen3-30b-a3b"
        )
    return AutoConfig.for_model(
        kind,
        architectures=[f"{prefix}ForCausalLM"],
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        max_position_embeddings=config.max_seq_len,
        rms_norm_eps=config.norm_eps,
        num_experts_per_tok=moe.top_k,
        rope_parameters=rope,
        experts_implementation="grouped_mm",
        **fields,
    )


def _make_gpt_oss_fields(config: DecoderConfig) -> dict[str, Any]:
    moe = config.moe
    assert moe is not None
    kinds = ["sliding_attention" if window else "full_attention" for window in config.windows]
    return {
        "head_dim": config.head_dim,
        "intermediate_size": moe.hidden_dim,
        "num_local_experts": moe.num_experts,
        "sliding_window": max(config.windows),
        "layer_types": [kinds[i % len(kinds)] for i in range(config.num_layers)],
        "swiglu_limit": moe.activation_limit,
        "swiglu_alpha": moe.activation_alpha,
    }


def _make_deepseek_v3_fields(config: DecoderConfig) -> dict[str, Any]:
    moe, mla = config.moe, config.mla
    assert moe is not None and mla is not None
    return {
        "intermediate_size": config.mlp_hidden_dim,
        "moe_intermediate_size": moe.hidden_dim,
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.shared_hidden_dim // moe.hidden_dim,
        "first_k_dense_replace": len(config.dense_layers),
        "n_group": moe.num_groups,
        "topk_group": moe.top_groups,
        "norm_topk_prob": moe.normalize_weights,
        "routed_scaling_factor": moe.routed_scaling_factor,
        "q_lora_rank": mla.q_lora_rank or None,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "num_nextn_predict_layers": 0,
    }
