"""Tiny random transformers models beside the native config of the same decoder."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from moecore import MoEConfig
from moecore.models import (
    DecoderConfig,
    GatedDeltaConfig,
    Mamba2Config,
    MLAConfig,
    SparseKeysConfig,
    YarnConfig,
)
from tests.moe.moe_cases import CONFIGS as LAYERS

SHAPE: dict[str, Any] = dict(
    vocab_size=97, dim=64, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16, max_seq_len=64
)
HF_SHAPE: dict[str, Any] = dict(
    vocab_size=97,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    initializer_range=0.2,
    attn_implementation="eager",
)
HF_MOE: dict[str, Any] = dict(intermediate_size=48, moe_intermediate_size=32, num_experts_per_tok=3)
MOE = MoEConfig(dim=64, hidden_dim=32, num_experts=8, top_k=3, normalize_weights=True)
SIGMOID = replace(MOE, score_function="sigmoid", routed_scaling_factor=2.5, expert_bias=True)
LATENT = dict(kv_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10)
Pair = tuple[nn.Module, DecoderConfig]


def random_model(name: str, **options: Any) -> Any:
    """Return transformers' `<name>ForCausalLM` with random weights."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**HF_SHAPE | options)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def qwen3() -> Pair:
    hf = random_model(
        "Qwen3Moe",
        **HF_MOE,
        head_dim=16,
        mlp_only_layers=[1],
        num_experts=8,
        norm_topk_prob=True,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    ours = DecoderConfig(
        **SHAPE, qk_norm="head", rope_theta=1e6, dense_layers=(1,), mlp_hidden_dim=48, moe=MOE
    )
    return hf, ours


def mixtral() -> Pair:
    """With tied embeddings, which the other models do not have."""
    hf = random_model(
        "Mixtral",
        intermediate_size=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    ours = DecoderConfig(
        **SHAPE,
        norm_eps=1e-5,
        rope_theta=1e6,
        tie_embeddings=True,
        moe=MoEConfig(dim=64, hidden_dim=32, num_experts=4, top_k=2, normalize_weights=True),
    )
    return hf, ours


def olmoe() -> Pair:
    hf = random_model(
        "Olmoe",
        num_key_value_heads=4,
        intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=False,
        rms_norm_eps=1e-5,
        pad_token_id=None,  # with one, its embedding is zero and gets no gradient
        eos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    ours = DecoderConfig(
        **SHAPE | dict(num_kv_heads=4),
        norm_eps=1e-5,
        qk_norm="full",
        moe=replace(MOE, normalize_weights=False),
    )
    return hf, ours


def dense(name: str, hf_changes: dict[str, Any], changes: dict[str, Any]) -> Pair:
    """A family of dense models: transformers' `<name>Config`."""
    shape = dict(intermediate_size=48, head_dim=16, rms_norm_eps=1e-5)
    rope = {"rope_type": "default", "rope_theta": 1e4}
    hf = random_model(name, **shape, **dict(rope_parameters=rope, pad_token_id=None) | hf_changes)
    ours = DecoderConfig(**SHAPE, mlp_hidden_dim=48, norm_eps=1e-5, **changes)
    return hf, ours


def qwen2_moe() -> Pair:
    """With biases of queries, keys and values, and a gated shared expert."""
    hf = random_model(
        "Qwen2Moe",
        **HF_MOE,
        mlp_only_layers=[1],
        shared_expert_intermediate_size=40,
        num_experts=8,
        norm_topk_prob=False,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    ours = DecoderConfig(
        **SHAPE,
        attention_bias="qkv",
        rope_theta=1e6,
        dense_layers=(1,),
        mlp_hidden_dim=48,
        moe=replace(MOE, normalize_weights=False, shared_hidden_dim=40, shared_gate=True),
    )
    return hf, ours


def glm4_moe(*, norm: bool) -> Pair:
    """Half of each head is turned; `norm` is what GLM-4.5 has and GLM-4.5-Air has not."""
    hf = random_model(
        "Glm4Moe",
        **HF_MOE,
        head_dim=16,
        attention_bias=True,
        use_qk_norm=norm,
        n_routed_experts=8,
        n_shared_experts=1,
        first_k_dense_replace=1,
        routed_scaling_factor=2.5,
        num_mtp_layers=0,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    )
    ours = DecoderConfig(
        **SHAPE,
        attention_bias="qkv",
        rotary_dim=8,
        qk_norm="head" if norm else None,
        norm_eps=1e-5,
        dense_layers=(0,),
        mlp_hidden_dim=48,
        moe=replace(SIGMOID, shared_hidden_dim=32),
    )
    return hf, ours


def qwen3_next() -> Pair:
    """Linear attention in two layers, with 2 value heads for each key.

    Its norm divides by small numbers: with the weights of the others fp32 is not exact enough.
    """
    hf = random_model(
        "Qwen3Next",
        **HF_MOE,
        initializer_range=0.1,
        head_dim=16,
        mlp_only_layers=[0],
        shared_expert_intermediate_size=24,
        num_experts=8,
        rms_norm_eps=1e-3,
        layer_types=["full_attention", "linear_attention", "linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=8,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    )
    linear = GatedDeltaConfig(num_k_heads=2, num_v_heads=4, head_k_dim=16, head_v_dim=8)
    ours = DecoderConfig(
        **SHAPE,
        attention_gate=True,
        norm_eps=1e-3,
        qk_norm="head",
        rotary_dim=4,
        zero_centered_norms=True,
        linear_attention=linear,
        linear_layers=(1, 2),
        dense_layers=(0,),
        mlp_hidden_dim=48,
        moe=replace(MOE, shared_hidden_dim=24, shared_gate=True),
    )
    return hf, ours


def nemotron_h(pattern: str = "ME*-MEE", latent_dim: int = 0) -> Pair:
    """Every kind of layer, one behind another of its half too; 3 Mamba-2 heads for each group."""
    hf = random_model(
        "NemotronH",
        **HF_MOE,
        num_hidden_layers=len(pattern),
        hybrid_override_pattern=pattern,
        head_dim=16,
        ssm_state_size=16,
        mamba_num_heads=6,
        mamba_head_dim=8,
        n_groups=2,
        time_step_min=0.3,
        n_routed_experts=8,
        moe_shared_expert_intermediate_size=40,
        moe_latent_size=latent_dim or None,
        routed_scaling_factor=2.5,
        pad_token_id=None,
    )
    moe = replace(SIGMOID, latent_dim=latent_dim, activation="relu2", shared_hidden_dim=40)
    ours = DecoderConfig(
        **SHAPE | dict(num_layers=len(pattern)),
        pattern=pattern,
        rope_theta=None,
        norm_eps=1e-5,
        mlp_hidden_dim=48 if "-" in pattern else 0,
        mlp_activation="relu2",
        linear_attention=Mamba2Config(
            num_k_heads=2,
            num_v_heads=6,
            head_k_dim=16,
            head_v_dim=8,
            min_step=0.3,
        ),
        moe=moe if "E" in pattern else None,
    )
    return hf, ours


def gpt_oss() -> Pair:
    """Small limits and windows, so that both matter."""
    yarn = replace(YARN, truncate=False)
    rope = rope_of(yarn) | dict(mscale=None, mscale_all_dim=None)
    hf = random_model(
        "GptOss",
        head_dim=16,
        intermediate_size=32,
        num_local_experts=8,
        num_experts_per_tok=3,
        sliding_window=5,
        swiglu_limit=1.0,
        rms_norm_eps=1e-5,
        rope_parameters=rope,
    )
    for layer in hf.model.layers:
        layer.mlp.experts.limit = 1.0  # transformers 5.17 has 7.0 as a constant
    ours = DecoderConfig(
        **SHAPE,
        attention_bias="all",
        windows=(5, 0),
        attention_sinks=True,
        yarn=yarn,
        norm_eps=1e-5,
        moe=replace(LAYERS["gpt-oss"], dim=64, hidden_dim=32, top_k=3),
    )
    return hf, ours


def deepseek_v2(*, grouped: bool) -> Pair:
    """`grouped` is what DeepSeek-V2 has and DeepSeek-V2-Lite has not; YaRN as in both."""
    yarn = YarnConfig(factor=4.0, original_max_seq_len=16, mscale=0.707, mscale_all_dim=0.707)
    groups = dict(n_group=4, topk_group=2, topk_method="group_limited_greedy")
    hf = random_model(
        "DeepseekV2",
        **HF_MOE,
        **groups if grouped else dict(topk_method="greedy"),
        num_key_value_heads=4,
        n_routed_experts=8,
        n_shared_experts=2,
        routed_scaling_factor=4.0,
        first_k_dense_replace=1,
        q_lora_rank=24 if grouped else None,
        **LATENT,
        rope_parameters=rope_of(yarn),
    )
    ours = DecoderConfig(
        **SHAPE | dict(head_dim=20, num_kv_heads=4),
        dense_layers=(0,),
        mlp_hidden_dim=48,
        mla=MLAConfig(q_lora_rank=24 if grouped else 0, **LATENT, yarn=yarn),
        moe=replace(
            MOE,
            normalize_weights=False,
            routed_scaling_factor=4.0,
            shared_hidden_dim=64,
            **dict(num_groups=4, top_groups=2, group_experts=1) if grouped else {},
        ),
    )
    return hf, ours


def rope_of(yarn: YarnConfig | None) -> dict[str, Any]:
    """transformers' rotary options."""
    if yarn is None:
        return {"rope_type": "default", "rope_theta": 1e4}
    return {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_max_seq_len,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "mscale": yarn.mscale,
        "mscale_all_dim": yarn.mscale_all_dim,
        "truncate": yarn.truncate,
    }


def deepseek_v32() -> Pair:
    """A query reads 6 keys; of few heads many scores are 0, and which topk takes is open."""
    hf, ours = deepseek(yarn=YARN)
    values = {k: v for k, v in hf.config.to_dict().items() if k not in ("model_type", "head_dim")}
    index = dict(index_n_heads=16, index_head_dim=32, index_topk=6)
    mine = random_model("DeepseekV32", **values | index, attn_implementation="eager")
    sparse = SparseKeysConfig(num_heads=16, head_dim=32, top_k=6)
    assert ours.mla is not None
    return mine, replace(ours, mla=replace(ours.mla, sparse=sparse))


def deepseek(*, q_lora_rank=24, yarn=None, num_mtp_layers=0) -> Pair:
    hf = random_model(
        "DeepseekV3",
        **HF_MOE,
        num_key_value_heads=4,
        n_routed_experts=8,
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        first_k_dense_replace=1,
        q_lora_rank=q_lora_rank or None,
        **LATENT,
        rms_norm_eps=1e-5,
        num_mtp_layers=num_mtp_layers,
        rope_parameters=rope_of(yarn),
    )
    ours = DecoderConfig(
        **SHAPE | dict(head_dim=20, num_kv_heads=4),
        norm_eps=1e-5,
        dense_layers=(0,),
        mlp_hidden_dim=48,
        mla=MLAConfig(q_lora_rank=q_lora_rank, **LATENT, yarn=yarn),
        num_mtp_layers=num_mtp_layers,
        mtp_loss_coef=0.3 if num_mtp_layers else 0.0,
        moe=replace(SIGMOID, num_groups=4, top_groups=2, shared_hidden_dim=64),
    )
    return hf, ours


# Of the four frequencies of latent attention two stay, one is mixed, and one is slowed down.
YARN = YarnConfig(factor=4.0, original_max_seq_len=16, beta_fast=0.2, beta_slow=0.01)
PAIRS = {
    "qwen3": qwen3,
    "mixtral": mixtral,
    "olmoe": olmoe,
    "qwen2-moe": qwen2_moe,
    "qwen3-next": qwen3_next,
    "nemotron-h": nemotron_h,
    "nemotron-h, dense": lambda: nemotron_h("M-*"),
    "nemotron-h, latent experts": lambda: nemotron_h("M*E", 24),
    "gpt-oss": gpt_oss,
    "mistral, window": lambda: dense("Mistral", dict(sliding_window=5), dict(windows=(5,))),
    "glm-4.5": lambda: glm4_moe(norm=True),
    "glm-4.5-air": lambda: glm4_moe(norm=False),
    "deepseek-v2": lambda: deepseek_v2(grouped=True),
    "deepseek-v2-lite": lambda: deepseek_v2(grouped=False),
    "qwen3, dense": lambda: dense("Qwen3", {}, dict(qk_norm="head")),
    "qwen2": lambda: dense("Qwen2", {}, dict(attention_bias="qkv")),
    "llama, biases": lambda: dense("Llama", dict(attention_bias=True), dict(attention_bias="all")),
    "mistral, yarn": lambda: dense(
        "Mistral", dict(sliding_window=None, rope_parameters=rope_of(YARN)), dict(yarn=YARN)
    ),
    "llama": lambda: dense("Llama", dict(tie_word_embeddings=True), dict(tie_embeddings=True)),
    "mistral": lambda: dense("Mistral", dict(sliding_window=None), {}),
    "deepseek": deepseek,
    "deepseek-v3.2": deepseek_v32,
    "deepseek, no query latent": lambda: deepseek(q_lora_rank=0),
    "deepseek, yarn": lambda: deepseek(yarn=YARN),
    "deepseek, yarn, one step": lambda: deepseek(
        yarn=replace(YARN, beta_fast=0.05, beta_slow=0.05)
    ),
    "deepseek, yarn, both scales": lambda: deepseek(
        yarn=YarnConfig(factor=4.0, original_max_seq_len=16, mscale=0.7, mscale_all_dim=1.2)
    ),
}


def make_pair(name: str) -> Pair:
    """A pair whose Hugging Face side has random norms and selection biases too."""
    torch.manual_seed(0)
    hf, config = PAIRS[name]()
    randomize(hf)
    return hf, config


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if "norm" in name:
            param.uniform_(0.5, 1.5)
        if name.endswith(("bias", "sinks", ".D")):
            param.normal_()
        if name.endswith("A_log"):  # states outlive a token, whose own part may be next to 0
            param.uniform_(-4.0, -1.0)
    for name, buffer in model.named_buffers():
        if "e_score_correction_bias" in name:
            buffer.uniform_(-0.1, 0.1)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter's gradient, and zeros where there is none: a state dict of gradients."""
    params = dict(model.named_parameters(remove_duplicate=False))
    grads = {name: param.grad for name, param in params.items() if param.grad is not None}
    return {n: grads.get(n, torch.zeros_like(value)) for n, value in model.state_dict().items()}
