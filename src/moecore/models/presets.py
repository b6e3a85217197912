"""Decoder configs by name: published models with their published dimensions, and tiny models.

`micro_batch_coef` is the published `router_aux_loss_coef`. The published training code sums expert
shares over the K choices and averages over layers. moecore's shares sum to 1, and losses are summed
over layers. To obtain the published gradient, multiply the coefficient by K / num_moe_layers.

The losses and bias rates have these sources:

    DeepSeek-V3               its paper, start of pretraining
    GLM-4.5, Nemotron 3 Nano  their papers, with the values of DeepSeek-V3. Nemotron's loss per
                              sequence is from its published training code.
    Kimi-K2, Moonlight        DeepSeek-V3, because their papers name no values
    gpt-oss                   no loss: no published training code reads its coefficient 0.9

Source: the config.json files of Qwen/Qwen3-30B-A3B, Qwen/Qwen3-235B-A22B, Qwen/Qwen2-57B-A14B,
Qwen/Qwen3-Next-80B-A3B-Instruct, nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16,
mistralai/Mixtral-8x7B-v0.1, allenai/OLMoE-1B-7B-0924, deepseek-ai/DeepSeek-V3, DeepSeek-V3.2,
DeepSeek-V2 and DeepSeek-V2-Lite, moonshotai/Moonlight-16B-A3B and Kimi-K2-Base, zai-org/GLM-4.5 and
GLM-4.5-Air, openai/gpt-oss-20b and gpt-oss-120b on Hugging Face; DeepSeek-V3 (arXiv:2412.19437),
section 4.2; GLM-4.5 (arXiv:2508.06471); Nemotron 3 Nano (arXiv:2512.20848).
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, Literal

from moecore.base.fields import Count, check_arguments
from moecore.base.options.layer import BalanceConfig, MoEConfig
from moecore.models.config import (
    DecoderConfig,
    GatedDeltaConfig,
    Mamba2Config,
    MLAConfig,
    SparseKeysConfig,
    YarnConfig,
)

LatentScaling = Literal["accuracy", "efficiency"]


def preset(name: str) -> DecoderConfig:
    """Return the config `PRESETS[name]`. Raise ValueError for an unknown name."""
    check_arguments(preset, locals())
    if name not in PRESETS:
        raise ValueError(f"preset ({name!r}) must be one of {', '.join(PRESETS)}")
    return PRESETS[name]


def with_latent_experts(
    moe: Annotated[MoEConfig, "pass the layer of a decoder"],
    latent_dim: Count,
    *,
    scaling: LatentScaling = "accuracy",
) -> MoEConfig:
    """Return the MoE config with latent experts, and dim / latent_dim times as many experts.

    The number of routed expert parameters is unchanged. Two projections are added: from the model
    dim to the latent dim and back.

    Args:
        moe: a layer without latent experts.
        latent_dim: l, a divisor of dim.
        scaling: "accuracy" multiplies top_k by dim / latent_dim, so the cost of a token is
            unchanged (the paper's l-MoE_acc). "efficiency" keeps top_k, so a token's expert FLOPs
            and dispatched bytes shrink to latent_dim / dim (l-MoE_eff).

    Raises:
        ValueError: if latent_dim does not divide dim, or the config has latent experts already.

    Source: LatentMoE (arXiv:2601.18089).
    """
    check_arguments(with_latent_experts, locals())
    if moe.dim % latent_dim or moe.latent_dim:
        raise ValueError(
            f"latent_dim ({latent_dim}) must divide moe.dim ({moe.dim}) and go with moe.latent_dim "
            f"({moe.latent_dim}) = 0: choose a divisor, and pass the layer without latent experts"
        )
    ratio = moe.dim // latent_dim
    top_k = moe.top_k * (ratio if scaling == "accuracy" else 1)
    return replace(moe, latent_dim=latent_dim, num_experts=moe.num_experts * ratio, top_k=top_k)


def at_width(
    config: Annotated[DecoderConfig, "pass the decoder of a preset"], dim: Count
) -> DecoderConfig:
    """Return the config with a new model dim; numbers of heads and hidden dims scale with it.

    Head dims, latent ranks, and the numbers of layers and experts are unchanged.

    Raises:
        ValueError: if a scaled number is not an integer.
    """
    check_arguments(at_width, locals())

    def scale_fields(record: Any, *names: str) -> Any:
        """Return fields `names` of `record`, times dim / config.dim."""
        for name in names:
            if getattr(record, name) * dim % config.dim:
                raise ValueError(
                    f"dim ({dim}) must leave {type(record).__name__}.{name} whole, which is "
                    f"{getattr(record, name)} with dim {config.dim}: choose another"
                )
        return {name: getattr(record, name) * dim // config.dim for name in names}

    moe, linear = config.moe, config.linear_attention
    if moe is not None:
        sizes = scale_fields(moe, "dim", "hidden_dim", "shared_hidden_dim", "latent_dim")
        moe = replace(moe, **sizes)
    if linear is not None:
        linear = replace(linear, **scale_fields(linear, "num_k_heads", "num_v_heads"))
    sizes = scale_fields(config, "dim", "num_heads", "num_kv_heads", "mlp_hidden_dim")
    return replace(config, moe=moe, linear_attention=linear, **sizes)


Triple = tuple[int, int, int]


def _build_decoder(sizes: Triple, heads: Triple, moe: MoEConfig, **fields: Any) -> DecoderConfig:
    """Return the config of (vocabulary, dim, layers) and heads (query, key/value, head dim)."""
    names = ("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    numbers: Any = dict(zip(names, (*sizes, *heads), strict=True))
    return DecoderConfig(**numbers, moe=moe, **fields)


def _build_moe(dim: int, hidden_dim: int, num_experts: int, top_k: int, **fields: Any) -> MoEConfig:
    return MoEConfig(dim=dim, hidden_dim=hidden_dim, num_experts=num_experts, top_k=top_k, **fields)


def _make_balance(micro_batch_coef: float) -> dict[str, Any]:
    """Return {balance: config}, with the coefficient of the micro-batch loss, for `MoEConfig`."""
    return dict(balance=BalanceConfig(micro_batch_coef=micro_batch_coef))


# DeepSeek-V3's router, without its factor.
_SIGMOID: Mapping[str, Any] = dict(
    score_function="sigmoid",
    expert_bias=True,
    balance=BalanceConfig(sequence_coef=1e-4, bias_update_rate=1e-3),
)
_V3_FACTOR: Any = dict(routed_scaling_factor=2.5)
_CONFIGS: dict[str, DecoderConfig] = {}  # by preset name


def _build_qwen3(dim: int, num_layers: int, num_heads: int, hidden_dim: int) -> DecoderConfig:
    """Return the config of a Qwen3-MoE; `hidden_dim` is the hidden dim of an expert."""
    moe = _build_moe(dim, hidden_dim, 128, 8, normalize_weights=True, **_make_balance(0.001))
    return _build_decoder(
        (151_936, dim, num_layers),
        (num_heads, 4, 128),
        moe,
        qk_norm="head",
        rope_theta=1_000_000.0,
        norm_eps=1e-6,
        max_seq_len=40_960,
    )


_CONFIGS["qwen3-30b-a3b"] = _build_qwen3(2048, 48, 32, 768)
_CONFIGS["qwen3-235b-a22b"] = _build_qwen3(4096, 94, 64, 1536)


def _build_qwen3_next(sizes: Triple, heads: Triple, moe: MoEConfig, **fields: Any) -> DecoderConfig:
    """Return a config with attention in every fourth layer and linear attention in the others."""
    return _build_decoder(
        sizes,
        heads,
        moe,
        attention_gate=True,
        qk_norm="head",
        rotary_dim=heads[2] // 4,
        zero_centered_norms=True,
        linear_layers=tuple(i for i in range(sizes[2]) if (i + 1) % 4),
        **fields,
    )


_NEXT_SHARED: Any = dict(normalize_weights=True, shared_gate=True, **_make_balance(0.001))
_CONFIGS["qwen3-next-80b-a3b"] = _build_qwen3_next(
    (151_936, 2048, 48),
    (16, 2, 256),
    _build_moe(2048, 512, 512, 10, shared_hidden_dim=512, **_NEXT_SHARED),
    linear_attention=GatedDeltaConfig(
        num_k_heads=16, num_v_heads=32, head_k_dim=128, head_v_dim=128
    ),
    rope_theta=10_000_000.0,
    max_seq_len=262_144,
)


def _build_nemotron_h(
    pattern: str, sizes: tuple[int, int], heads: Triple, moe: MoEConfig, **fields: Any
) -> DecoderConfig:
    """Return the config of a Nemotron-H of `sizes` (vocabulary, dim), one layer per letter."""
    return _build_decoder(
        (*sizes, len(pattern)),
        heads,
        moe,
        pattern=pattern,
        mlp_activation="relu2",
        rope_theta=None,
        norm_eps=1e-5,
        **fields,
    )


_NEMOTRON_CHOICE: Any = dict(activation="relu2", normalize_weights=True, **_V3_FACTOR, **_SIGMOID)
_CONFIGS["nemotron-3-nano-30b-a3b"] = _build_nemotron_h(
    "MEMEM*E" * 5 + "MEMEMEM*E" + "MEMEMEME",
    (131_072, 2688),
    (32, 2, 128),
    _build_moe(2688, 1856, 128, 6, shared_hidden_dim=3712, **_NEMOTRON_CHOICE),
    linear_attention=Mamba2Config(
        num_k_heads=8, num_v_heads=64, head_k_dim=128, head_v_dim=64, min_step=1e-3
    ),
    max_seq_len=262_144,
)

_CONFIGS["mixtral-8x7b"] = _build_decoder(
    (32_000, 4096, 32),
    (32, 8, 128),
    _build_moe(4096, 14_336, 8, 2, normalize_weights=True, **_make_balance(0.02)),
    rope_theta=1_000_000.0,
    norm_eps=1e-5,
    max_seq_len=32_768,
)

_CONFIGS["olmoe-1b-7b"] = _build_decoder(
    (50_304, 2048, 16),
    (16, 16, 128),
    _build_moe(2048, 1024, 64, 8, normalize_weights=False, **_make_balance(0.01)),
    qk_norm="full",
    norm_eps=1e-5,
    max_seq_len=4096,
)

_V3_CHOICE: Any = dict(normalize_weights=True, num_groups=8, top_groups=4, **_V3_FACTOR)
_MLA_DIMS: Any = dict(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
_V3_YARN = YarnConfig(factor=40.0, original_max_seq_len=4096, mscale=1.0, mscale_all_dim=1.0)
_V3_MLA = MLAConfig(q_lora_rank=1536, **_MLA_DIMS, yarn=_V3_YARN)
_CONFIGS["deepseek-v3"] = _build_decoder(
    (129_280, 7168, 61),
    (128, 128, 192),
    _build_moe(7168, 2048, 256, 8, shared_hidden_dim=2048, **_V3_CHOICE, **_SIGMOID),
    mla=_V3_MLA,
    max_seq_len=163_840,
    dense_layers=(0, 1, 2),
    mlp_hidden_dim=18_432,
    num_mtp_layers=1,
    mtp_loss_coef=0.3,
)

_V32_KEYS = SparseKeysConfig(num_heads=64, head_dim=128, top_k=2048)
_CONFIGS["deepseek-v3.2"] = replace(_CONFIGS["deepseek-v3"], mla=replace(_V3_MLA, sparse=_V32_KEYS))

_MOONLIGHT_CHOICE: Any = dict(normalize_weights=True, routed_scaling_factor=2.446)
_CONFIGS["moonlight-16b-a3b"] = _build_decoder(
    (163_840, 2048, 27),
    (16, 16, 192),
    _build_moe(2048, 1408, 64, 6, shared_hidden_dim=2 * 1408, **_MOONLIGHT_CHOICE, **_SIGMOID),
    mla=MLAConfig(**_MLA_DIMS),
    rope_theta=50_000.0,
    norm_eps=1e-5,
    max_seq_len=8192,
    dense_layers=(0,),
    mlp_hidden_dim=11_264,
)

_KIMI_CHOICE: Any = dict(normalize_weights=True, routed_scaling_factor=2.827)
_CONFIGS["kimi-k2"] = _build_decoder(
    (163_840, 7168, 61),
    (64, 64, 192),
    _build_moe(7168, 2048, 384, 8, shared_hidden_dim=2048, **_KIMI_CHOICE, **_SIGMOID),
    mla=replace(_V3_MLA, yarn=replace(_V3_YARN, factor=32.0, beta_fast=1.0)),
    rope_theta=50_000.0,
    max_seq_len=131_072,
    dense_layers=(0,),
    mlp_hidden_dim=18_432,
)


def _build_deepseek_v2(
    sizes: Triple, num_heads: int, q_lora_rank: int, moe: MoEConfig, mlp_hidden_dim: int
) -> DecoderConfig:
    yarn = replace(_V3_YARN, mscale=0.707, mscale_all_dim=0.707)
    return _build_decoder(
        sizes,
        (num_heads, num_heads, 192),
        moe,
        mla=MLAConfig(q_lora_rank=q_lora_rank, **_MLA_DIMS, yarn=yarn),
        max_seq_len=163_840,
        dense_layers=(0,),
        mlp_hidden_dim=mlp_hidden_dim,
    )


_V2_CHOICE: Any = dict(normalize_weights=False, balance=BalanceConfig(sequence_coef=0.001))
_V2_GROUPS: Any = dict(num_groups=8, top_groups=3, group_experts=1, routed_scaling_factor=16.0)
_V2_MOE = _build_moe(5120, 1536, 160, 6, shared_hidden_dim=2 * 1536, **_V2_CHOICE, **_V2_GROUPS)
_CONFIGS["deepseek-v2"] = _build_deepseek_v2((102_400, 5120, 60), 128, 1536, _V2_MOE, 12_288)
_LITE_MOE = _build_moe(2048, 1408, 64, 6, shared_hidden_dim=2 * 1408, **_V2_CHOICE)
_CONFIGS["deepseek-v2-lite"] = _build_deepseek_v2((102_400, 2048, 27), 16, 0, _LITE_MOE, 10_944)


def _build_glm_45(
    dim: int, num_layers: int, num_dense_layers: int, moe: MoEConfig, **fields: Any
) -> DecoderConfig:
    return _build_decoder(
        (151_552, dim, num_layers),
        (96, 8, 128),
        moe,
        attention_bias="qkv",
        rope_theta=1_000_000.0,
        rotary_dim=64,
        norm_eps=1e-5,
        max_seq_len=131_072,
        dense_layers=tuple(range(num_dense_layers)),
        num_mtp_layers=1,
        mtp_loss_coef=0.3,
        **fields,
    )


_GLM_CHOICE: Any = dict(normalize_weights=True, **_SIGMOID)
_GLM_MOE = _build_moe(5120, 1536, 160, 8, shared_hidden_dim=1536, **_V3_FACTOR, **_GLM_CHOICE)
_CONFIGS["glm-4.5"] = _build_glm_45(5120, 92, 3, _GLM_MOE, qk_norm="head", mlp_hidden_dim=12_288)
_AIR_MOE = _build_moe(4096, 1408, 128, 8, shared_hidden_dim=1408, **_GLM_CHOICE)
_CONFIGS["glm-4.5-air"] = _build_glm_45(4096, 46, 1, _AIR_MOE, mlp_hidden_dim=10_944)

_QWEN2_SHARED: Any = dict(shared_hidden_dim=20_480, shared_gate=True)
_CONFIGS["qwen2-57b-a14b"] = _build_decoder(
    (151_936, 3584, 28),
    (28, 4, 128),
    _build_moe(3584, 2560, 64, 8, normalize_weights=False, **_QWEN2_SHARED, **_make_balance(0.001)),
    attention_bias="qkv",
    rope_theta=1_000_000.0,
    max_seq_len=131_072,
)


def _build_gpt_oss(num_layers: int, num_experts: int) -> DecoderConfig:
    experts: Any = dict(activation="clamped_swiglu", fc1_bias=True, fc2_bias=True)
    return _build_decoder(
        (201_088, 2880, num_layers),
        (64, 8, 64),
        _build_moe(2880, 2880, num_experts, 4, score_order="post", router_bias=True, **experts),
        attention_bias="all",
        windows=(128, 0),
        attention_sinks=True,
        rope_theta=150_000.0,
        yarn=YarnConfig(factor=32.0, original_max_seq_len=4096, truncate=False),
        norm_eps=1e-5,
        max_seq_len=131_072,
    )


_CONFIGS["gpt-oss-20b"] = _build_gpt_oss(24, 32)
_CONFIGS["gpt-oss-120b"] = _build_gpt_oss(36, 128)

# The CPU demo: bytes as tokens, small enough for a step of 4096 tokens in 0.25 s on two cores.
_CONFIGS["tiny"] = _build_decoder(
    (256, 128, 4),
    (4, 2, 32),
    _build_moe(128, 128, 8, 2, **_make_balance(0.01)),
    qk_norm="head",
    max_seq_len=512,
    dense_layers=(0,),
    mlp_hidden_dim=384,
)

_SHORT: Any = dict(max_seq_len=128, ce_chunk_tokens=32)
_CONFIGS["tiny-qwen3"] = _build_decoder(
    (128, 64, 2),
    (4, 2, 16),
    _build_moe(64, 32, 8, 2, normalize_weights=True, **_make_balance(0.001)),
    qk_norm="head",
    rope_theta=1_000_000.0,
    **_SHORT,
)

_CONFIGS["tiny-qwen3-next"] = _build_qwen3_next(
    (128, 64, 4),
    (4, 2, 16),
    _build_moe(64, 32, 8, 2, shared_hidden_dim=32, **_NEXT_SHARED),
    linear_attention=GatedDeltaConfig(num_k_heads=2, num_v_heads=4, head_k_dim=8, head_v_dim=16),
    **_SHORT,
)

_CONFIGS["tiny-nemotron-h"] = _build_nemotron_h(
    "ME*-ME",
    (128, 64),
    (4, 2, 16),
    _build_moe(64, 32, 8, 2, shared_hidden_dim=48, **_NEMOTRON_CHOICE),
    mlp_hidden_dim=96,
    linear_attention=Mamba2Config(
        num_k_heads=2, num_v_heads=8, head_k_dim=16, head_v_dim=8, min_step=1e-3
    ),
    **_SHORT,
)

_TINY_CHOICE: Any = dict(num_groups=4, top_groups=2, **_V3_FACTOR)
_CONFIGS["tiny-shared"] = _build_decoder(
    (128, 64, 3),
    (4, 4, 16),
    _build_moe(64, 32, 8, 2, shared_hidden_dim=48, shared_gate=True, **_TINY_CHOICE, **_SIGMOID),
    tie_embeddings=True,
    dense_layers=(0,),
    mlp_hidden_dim=128,
    **_SHORT,
)

_CONFIGS["tiny-deepseek-v3"] = _build_decoder(
    (128, 64, 3),
    (4, 4, 24),
    _build_moe(
        64, 32, 8, 2, shared_hidden_dim=32, normalize_weights=True, **_TINY_CHOICE, **_SIGMOID
    ),
    mla=MLAConfig(
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        yarn=replace(_V3_YARN, factor=4.0, original_max_seq_len=32),
    ),
    dense_layers=(0,),
    mlp_hidden_dim=128,
    num_mtp_layers=1,
    mtp_loss_coef=0.3,
    **_SHORT,
)

PRESETS: Mapping[str, DecoderConfig] = MappingProxyType(_CONFIGS)
