"""How large a decoder is and how much it computes, from its config alone.

Legend: V vocabulary, D model dim, L layers, H query heads, d and v dims of a query head and a value
head, E experts, K experts per token, T sequence length.

Multi-token prediction counts, because training runs it; published sizes leave it out:
`num_params(replace(config, num_mtp_layers=0, mtp_loss_coef=0.0))`.
"""

from __future__ import annotations

from moecore.base.fields import CountOrZero, check_arguments
from moecore.base.options.layer import MoEConfig
from moecore.models.config import DecoderConfig, MLAConfig


def num_params(config: DecoderConfig) -> int:
    """Return the number of parameters; a tied head counts once, buffers do not count."""
    check_arguments(num_params, locals())
    experts = config.moe.num_experts if config.moe else 0
    return _embedding(config) + _non_embedding(config, experts)


def active_params(config: DecoderConfig) -> int:
    """Return the number of parameters that one token reads: K of the E experts, all of the rest.

    The embedding table counts whole, as in the published "active" figures.
    """
    check_arguments(active_params, locals())
    experts = config.moe.top_k if config.moe else 0
    return _embedding(config) + _non_embedding(config, experts)


def flops_per_token(config: DecoderConfig, seq_len: CountOrZero) -> float:
    """Return the FLOPs of forward and backward per token, recompute not counted.

        6 * N + 3 * L * H * (d + v) * T

    N is `active_params` without the embedding lookup (the head's matrix is in, tied or not, once
    for every module of multi-token prediction more): 2 FLOPs per parameter in forward, 4 in
    backward. Attention's two products are 2 * H * d and 2 * H * v FLOPs per query and key in
    forward; three times that with backward, and half of it because causal attention sees T / 2
    keys on average. A module of multi-token prediction has one layer.

    Args:
        config: the decoder.
        seq_len: tokens per sequence T.
    """
    check_arguments(flops_per_token, locals())
    experts = config.moe.top_k if config.moe else 0
    matmul = _non_embedding(config, experts)
    matmul += _embedding(config) * (config.num_mtp_layers + config.tie_embeddings)
    value_dim = config.head_dim if config.mla is None else config.mla.v_head_dim
    layers = config.num_layers + config.num_mtp_layers
    attention = layers * config.num_heads * (config.head_dim + value_dim) * seq_len
    return 6.0 * matmul + 3.0 * attention


def _embedding(config: DecoderConfig) -> int:
    return config.vocab_size * config.dim


def _non_embedding(config: DecoderConfig, experts: int) -> int:
    """Parameters of all layers, the norms and an untied head, with so many experts."""
    D = config.dim
    layers = [*range(config.num_layers), *[config.num_layers - 1] * config.num_mtp_layers]
    total = D + len(layers) * (_attention(config) + 2 * D)
    total += config.num_mtp_layers * (2 * D * D + 3 * D)  # eh_proj and three norms
    for layer_idx in layers:
        if config.moe is None or config.is_dense(layer_idx):
            total += 3 * D * config.mlp_hidden_dim
        else:
            total += _moe(config.moe, experts)
    return total if config.tie_embeddings else total + _embedding(config)


def _attention(config: DecoderConfig) -> int:
    if config.mla is not None:
        return _latent_attention(config, config.mla)
    q_dim = config.num_heads * config.head_dim
    kv_dim = config.num_kv_heads * config.head_dim
    norms = {"head": 2 * config.head_dim, "full": q_dim + kv_dim, None: 0}[config.qk_norm]
    return config.dim * (2 * q_dim + 2 * kv_dim) + norms


def _latent_attention(config: DecoderConfig, mla: MLAConfig) -> int:
    q_dim, Q, C = config.num_heads * mla.qk_head_dim, mla.q_lora_rank, mla.kv_lora_rank
    queries = config.dim * Q + Q + Q * q_dim if Q else config.dim * q_dim
    latent = config.dim * (C + mla.qk_rope_head_dim) + C
    keys_and_values = C * config.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return queries + latent + keys_and_values + config.num_heads * mla.v_head_dim * config.dim


def _moe(moe: MoEConfig, experts: int) -> int:
    router = moe.num_experts * (moe.dim + moe.router_bias)
    width = moe.expert_dim
    expert = moe.fc1_dim * width + width * moe.hidden_dim
    expert += moe.fc1_bias * moe.fc1_dim + moe.fc2_bias * width
    shared = moe.shared_hidden_dim * moe.dim * (3 if moe.gated else 2) + moe.shared_gate * moe.dim
    latent = 2 * moe.latent_dim * moe.dim
    return router + experts * expert + moe.num_shared_experts * shared + latent
