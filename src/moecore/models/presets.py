"""Named decoders: published models with their published dimensions, and tiny ones.

Note: the published `router_aux_loss_coef` is kept as `micro_batch_coef`. The published training
code of these models sums the shares over the K choices and takes one mean over all layers, moecore
sums over layers and its shares add up to 1: for the same gradient multiply by K / num_moe_layers.
DeepSeek-V3's losses and rates are those of its paper at the start of pretraining.

Source: the config.json files of Qwen/Qwen3-30B-A3B, Qwen/Qwen3-235B-A22B,
mistralai/Mixtral-8x7B-v0.1, allenai/OLMoE-1B-7B-0924 and deepseek-ai/DeepSeek-V3 on Hugging Face;
DeepSeek-V3 (arXiv:2412.19437), section 4.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from moecore.base.fields import check_arguments
from moecore.base.options.layer import BalanceConfig, MoEConfig
from moecore.models.config import DecoderConfig, MLAConfig, YarnConfig


def preset(name: str) -> DecoderConfig:
    """Return the config of this name; change it with `dataclasses.replace`.

    Args:
        name: a key of `PRESETS`.

    Raises:
        ValueError: for an unknown name.
    """
    check_arguments(preset, locals())
    if name not in PRESETS:
        raise ValueError(f"preset ({name!r}) must be one of {', '.join(PRESETS)}")
    return PRESETS[name]


def _qwen3(dim: int, num_layers: int, num_heads: int, hidden_dim: int) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=151_936,
        dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=4,
        head_dim=128,
        qk_norm="head",
        rope_theta=1_000_000.0,
        norm_eps=1e-6,
        max_seq_len=40_960,
        moe=MoEConfig(
            dim=dim,
            hidden_dim=hidden_dim,
            num_experts=128,
            top_k=8,
            normalize_weights=True,
            balance=BalanceConfig(micro_batch_coef=0.001),
        ),
    )


def _deepseek_moe(dim: int, hidden_dim: int, **sizes: Any) -> MoEConfig:
    return MoEConfig(
        dim=dim,
        hidden_dim=hidden_dim,
        shared_hidden_dim=hidden_dim,
        normalize_weights=True,
        score_function="sigmoid",
        routed_scaling_factor=2.5,
        expert_bias=True,
        balance=BalanceConfig(sequence_coef=1e-4, bias_update_rate=1e-3),
        **sizes,
    )


_MIXTRAL_8X7B = DecoderConfig(
    vocab_size=32_000,
    dim=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=1_000_000.0,
    norm_eps=1e-5,
    max_seq_len=32_768,
    moe=MoEConfig(
        dim=4096,
        hidden_dim=14_336,
        num_experts=8,
        top_k=2,
        normalize_weights=True,
        balance=BalanceConfig(micro_batch_coef=0.02),
    ),
)

_OLMOE_1B_7B = DecoderConfig(
    vocab_size=50_304,
    dim=2048,
    num_layers=16,
    num_heads=16,
    num_kv_heads=16,
    head_dim=128,
    qk_norm="full",
    rope_theta=10_000.0,
    norm_eps=1e-5,
    max_seq_len=4096,
    moe=MoEConfig(
        dim=2048,
        hidden_dim=1024,
        num_experts=64,
        top_k=8,
        normalize_weights=False,
        balance=BalanceConfig(micro_batch_coef=0.01),
    ),
)

_DEEPSEEK_V3 = DecoderConfig(
    vocab_size=129_280,
    dim=7168,
    num_layers=61,
    num_heads=128,
    num_kv_heads=128,
    head_dim=192,
    mla=MLAConfig(
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        yarn=YarnConfig(factor=40.0, original_max_seq_len=4096, mscale=1.0, mscale_all_dim=1.0),
    ),
    rope_theta=10_000.0,
    norm_eps=1e-6,
    max_seq_len=163_840,
    dense_layers=(0, 1, 2),
    mlp_hidden_dim=18_432,
    num_mtp_layers=1,
    mtp_loss_coef=0.3,
    moe=_deepseek_moe(7168, 2048, num_experts=256, top_k=8, num_groups=8, top_groups=4),
)

# The CPU demo: bytes as tokens, small enough for a step of 4096 tokens in 0.25 s on two cores.
_TINY = DecoderConfig(
    vocab_size=256,
    dim=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    qk_norm="head",
    max_seq_len=512,
    dense_layers=(0,),
    mlp_hidden_dim=384,
    moe=MoEConfig(
        dim=128,
        hidden_dim=128,
        num_experts=8,
        top_k=2,
        balance=BalanceConfig(micro_batch_coef=0.01),
    ),
)

_TINY_QWEN3 = DecoderConfig(
    vocab_size=128,
    dim=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    qk_norm="head",
    rope_theta=1_000_000.0,
    max_seq_len=128,
    ce_chunk_tokens=32,
    moe=MoEConfig(
        dim=64,
        hidden_dim=32,
        num_experts=8,
        top_k=2,
        normalize_weights=True,
        balance=BalanceConfig(micro_batch_coef=0.001),
    ),
)

_TINY_SHARED = DecoderConfig(
    vocab_size=128,
    dim=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    tie_embeddings=True,
    max_seq_len=128,
    ce_chunk_tokens=32,
    dense_layers=(0,),
    mlp_hidden_dim=128,
    moe=MoEConfig(
        dim=64,
        hidden_dim=32,
        num_experts=8,
        top_k=2,
        score_function="sigmoid",
        routed_scaling_factor=2.5,
        num_groups=4,
        top_groups=2,
        expert_bias=True,
        shared_hidden_dim=48,
        shared_gate=True,
        balance=BalanceConfig(sequence_coef=1e-4, bias_update_rate=1e-3),
    ),
)

_TINY_DEEPSEEK_V3 = DecoderConfig(
    vocab_size=128,
    dim=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=4,
    head_dim=24,
    mla=MLAConfig(
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        yarn=YarnConfig(factor=4.0, original_max_seq_len=32, mscale=1.0, mscale_all_dim=1.0),
    ),
    max_seq_len=128,
    ce_chunk_tokens=32,
    dense_layers=(0,),
    mlp_hidden_dim=128,
    num_mtp_layers=1,
    mtp_loss_coef=0.3,
    moe=_deepseek_moe(64, 32, num_experts=8, top_k=2, num_groups=4, top_groups=2),
)

PRESETS: Mapping[str, DecoderConfig] = MappingProxyType(
    {
        "qwen3-30b-a3b": _qwen3(2048, 48, 32, 768),
        "qwen3-235b-a22b": _qwen3(4096, 94, 64, 1536),
        "mixtral-8x7b": _MIXTRAL_8X7B,
        "olmoe-1b-7b": _OLMOE_1B_7B,
        "deepseek-v3": _DEEPSEEK_V3,
        "tiny": _TINY,
        "tiny-qwen3": _TINY_QWEN3,
        "tiny-shared": _TINY_SHARED,
        "tiny-deepseek-v3": _TINY_DEEPSEEK_V3,
    }
)
