"""How large a decoder is and how much it computes, from its config: a copy on meta is counted.

Legend: V vocabulary, D model dim, L layers, H query heads, d and v dims of a query head and a value
head, E experts, K experts per token, T sequence length.

Multi-token prediction counts, because training runs it; published sizes leave it out:
`num_params(replace(config, num_mtp_layers=0, mtp_loss_coef=0.0))`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from moecore.base.fields import CountOrZero, Positive, check_arguments
from moecore.models.config import DecoderConfig
from moecore.models.decoder import Decoder
from moecore.packing import DocumentCost

PRODUCTS_OVER_ATTENTION = 400 / 600  # FLOP/s of Hopper, see `DocumentCost`
ATTENTION_FLOPS = 600e12


def num_params(config: DecoderConfig) -> int:
    """Return the number of parameters; a tied head counts once, buffers do not count."""
    check_arguments(num_params, locals())
    total, _ = _params(config)
    return total


def active_params(config: DecoderConfig) -> int:
    """Return how many parameters a token reads: K of E experts, all of embedding and others."""
    check_arguments(active_params, locals())
    total, idle = _params(config)
    return total - idle


def flops_per_token(config: DecoderConfig, seq_len: CountOrZero) -> float:
    """Return the FLOPs of forward and backward per token, recompute not counted.

        6 * N + 3 * L * H * (d + v) * T, with w * (2 - w / T) for T in a layer of window w < T,
        and 3 * `LinearAttentionConfig.state_flops` for a layer of linear attention

    N is `active_params` without the embedding lookup (the head's matrix is in, tied or not, once
    for every module of multi-token prediction more): 2 FLOPs per parameter in forward, 4 in
    backward. Attention's two products are 2 * H * d and 2 * H * v FLOPs per query and key in
    forward; three times that with backward, and half of it because causal attention sees T / 2
    keys of `seq_len` T on average. A module of multi-token prediction has one layer, and counts as
    often as it is applied. Linear attention reads and writes its state of k * v numbers a value
    head once or twice per token.
    Sparse attention is that of windows of `top_k` keys, and its indexer scores all keys in forward.
    """
    check_arguments(flops_per_token, locals())
    config = replace(config, num_mtp_layers=config.num_predictions, mtp_repeats=1)
    table = config.vocab_size * config.dim
    matmul = active_params(config) + table * (config.num_mtp_layers + config.tie_embeddings - 1)
    value_dim = config.head_dim if config.mla is None else config.mla.v_head_dim
    last = config.num_layers - 1
    layers = [*range(config.num_layers), *[last] * config.num_mtp_layers]
    sparse = None if config.mla is None else config.mla.sparse
    mixers = [config.mixer_of(i) for i in layers]
    linear = config.linear_attention
    states = 0 if linear is None else linear.state_flops * mixers.count("linear")
    layers = [i for i, mixer in zip(layers, mixers, strict=True) if mixer == "attention"]
    max_keys = seq_len if sparse is None else sparse.top_k
    windows = [min(config.window_of(i) or max_keys, seq_len) for i in layers]
    keys = sum(2 * w - w * w / seq_len for w in windows) if seq_len else 0
    attention = 3.0 * config.num_heads * (config.head_dim + value_dim) * keys
    index = 0 if sparse is None else sparse.num_heads * sparse.head_dim * seq_len * len(layers)
    return 6.0 * matmul + attention + 3.0 * states + index


def document_cost(config: DecoderConfig, *, link_gb_per_s: Positive = 200.0) -> DocumentCost:
    """Return what a document costs the ranks that share it, as multiples of attention.

        linear = flops_per_token(config, 0) over those of a pair, at 400 TFLOP/s for 600
        exchange = bytes of a token's keys and values over the link, in the time of a pair

    A pair is a squared token: 3 * L * H * (d + v) FLOPs. Keys and values are in bf16; latent
    attention sends latents.

    Args:
        config: of the model.
        link_gb_per_s: GB/s between ranks of a group, one way.
    """
    check_arguments(document_cost, locals())
    flops = flops_per_token(config, 0)
    linear = flops / (flops_per_token(config, 1) - flops) / PRODUCTS_OVER_ATTENTION
    if config.mla is None:
        numbers, dims = 2 * config.num_kv_heads * config.head_dim, 2 * config.head_dim
    else:
        numbers = config.mla.kv_lora_rank + config.mla.qk_rope_head_dim
        dims = config.head_dim + config.mla.v_head_dim
    pair = config.num_heads * dims / ATTENTION_FLOPS  # seconds of a layer's forward
    exchange = 2 * numbers / (link_gb_per_s * 1e9) / pair
    return DocumentCost(linear=linear, exchange=exchange, fixed=1000 * linear)


@lru_cache
def _params(config: DecoderConfig) -> tuple[int, int]:
    """Return the number of all parameters, and of those that a token does not read."""
    total = idle = 0
    for name, param in Decoder(config, device="meta").named_parameters():
        total += param.numel()
        if config.moe is not None and ".experts." in name:
            share = config.moe.top_k / config.moe.num_candidates  # with even loads
            idle += round(config.moe.num_experts * (1 - share) * param[0].numel())
    return total, idle
