"""How large a decoder is and how much it computes, from its config alone.

Legend: V vocabulary, D model dim, L layers, H query heads, d head dim, E experts, K experts per
token, T sequence length.
"""

from __future__ import annotations

from moecore.config import MoEConfig
from moecore.models.config import DecoderConfig


def num_params(config: DecoderConfig) -> int:
    """Return the number of parameters; a tied head counts once, buffers do not count."""
    experts = config.moe.num_experts if config.moe else 0
    return _embedding(config) + _non_embedding(config, experts)


def active_params(config: DecoderConfig) -> int:
    """Return the number of parameters that one token reads: K of the E experts, all of the rest.

    The embedding table counts whole, as in the published "active" figures.
    """
    experts = config.moe.top_k if config.moe else 0
    return _embedding(config) + _non_embedding(config, experts)


def flops_per_token(config: DecoderConfig, seq_len: int) -> float:
    """Return the FLOPs of forward and backward per token, recompute not counted.

        6 * N + 6 * L * H * d * T

    N is `active_params` without the embedding lookup (the head's matrix is in, tied or not): 2
    FLOPs per parameter in forward, 4 in backward. Attention's two products are 4 * H * d FLOPs per
    query and key in forward; three times that with backward, and half of it because causal
    attention sees T / 2 keys on average.

    Args:
        config: the decoder.
        seq_len: tokens per sequence T.
    """
    experts = config.moe.top_k if config.moe else 0
    matmul = _non_embedding(config, experts)
    if config.tie_embeddings:
        matmul += _embedding(config)
    attention = config.num_layers * config.num_heads * config.head_dim * seq_len
    return 6.0 * (matmul + attention)


def _embedding(config: DecoderConfig) -> int:
    return config.vocab_size * config.dim


def _non_embedding(config: DecoderConfig, experts: int) -> int:
    """Parameters of all layers, the final norm and an untied head, with so many experts."""
    per_layer = _attention(config) + 2 * config.dim
    total = config.num_layers * per_layer + config.dim
    total += config.num_dense_layers * 3 * config.dim * config.mlp_hidden_dim
    if config.moe is not None:
        total += config.num_moe_layers * _moe(config.moe, experts)
    return total if config.tie_embeddings else total + _embedding(config)


def _attention(config: DecoderConfig) -> int:
    q_dim = config.num_heads * config.head_dim
    kv_dim = config.num_kv_heads * config.head_dim
    norms = {"head": 2 * config.head_dim, "full": q_dim + kv_dim, None: 0}[config.qk_norm]
    return config.dim * (2 * q_dim + 2 * kv_dim) + norms


def _moe(moe: MoEConfig, experts: int) -> int:
    router = moe.num_experts * (moe.dim + moe.router_bias)
    expert = moe.fc1_dim * moe.dim + moe.dim * moe.hidden_dim
    expert += moe.fc1_bias * moe.fc1_dim + moe.fc2_bias * moe.dim
    shared = moe.shared_hidden_dim * moe.dim * (3 if moe.gated else 2)
    return router + experts * expert + shared + moe.shared_gate * moe.dim
