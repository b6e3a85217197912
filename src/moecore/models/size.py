"""Parameter counts, FLOPs and document costs of a decoder, computed from its config.

Legend: V vocabulary, D model dim, L layers, H query heads, d and v dims of a query head and a value
head, E experts, K experts per token, T sequence length.

Counts include multi-token prediction, because training runs it. Published sizes exclude it:
`num_params(replace(config, num_mtp_layers=0, mtp_loss_coef=0.0))`.
"""

from dataclasses import replace
from functools import lru_cache

from moecore.base.fields import CountOrZero, Positive, check_arguments
from moecore.models.config import DecoderConfig
from moecore.models.decoder import Decoder
from moecore.packing import DocumentCost

PRODUCTS_OVER_ATTENTION = 400 / 600  # FLOP/s of Hopper, see `DocumentCost`
ATTENTION_FLOPS = 600e12


def num_params(config: DecoderConfig) -> int:
    """Return the number of parameters, without buffers; a tied head is not counted again."""
    check_arguments(num_params, locals())
    return _count_params(config)[0]


def active_params(config: DecoderConfig) -> int:
    """Return the number of parameters used per token: K of E experts and all other parameters."""
    check_arguments(active_params, locals())
    total, idle = _count_params(config)
    return total - idle


def flops_per_token(config: DecoderConfig, seq_len: CountOrZero) -> float:
    """Return the FLOPs of forward and backward per token, without recomputation.

        6 * N + 3 * L * H * (d + v) * T

    N is the number of parameters that a token uses, without the embedding lookup. It includes the
    head's matrix, tied or not, once more per multi-token prediction. L is the number of layers with
    softmax attention, with H query heads, key heads of dim d and value heads of dim v. T is
    `seq_len` (0 = no attention). A causal query reads T / 2 keys on average. Backward costs twice
    forward.

    In a layer with a sliding window w < T, T is replaced by w * (2 - w / T). Sparse attention
    counts as a window of `top_k` keys; its indexer scores all keys in forward. A layer of linear
    attention adds 3 * `LinearAttentionConfig.state_flops`. A multi-token prediction counts as one
    more layer.
    """
    check_arguments(flops_per_token, locals())
    config = replace(config, num_mtp_layers=config.num_predictions, mtp_repeats=1)
    table = config.vocab_size * config.dim
    matmul = active_params(config) + table * (config.num_mtp_layers + config.tie_embeddings - 1)
    value_dim = config.head_dim if config.mla is None else config.mla.v_head_dim
    last = config.num_layers - 1
    layers = [*range(config.num_layers), *[last] * config.num_mtp_layers]
    sparse = None if config.mla is None else config.mla.sparse
    mixers = [config.get_mixer(i) for i in layers]
    linear = config.linear_attention
    states = 0 if linear is None else linear.state_flops * mixers.count("linear")
    layers = [i for i, mixer in zip(layers, mixers, strict=True) if mixer == "attention"]
    max_keys = seq_len if sparse is None else sparse.top_k
    windows = [min(config.get_window(i) or max_keys, seq_len) for i in layers]
    keys = sum(2 * w - w * w / seq_len for w in windows) if seq_len else 0
    attention = 3.0 * config.num_heads * (config.head_dim + value_dim) * keys
    index = 0 if sparse is None else sparse.num_heads * sparse.head_dim * seq_len * len(layers)
    return 6.0 * matmul + attention + 3.0 * states + index


def document_cost(config: DecoderConfig, *, link_gb_per_s: Positive = 200.0) -> DocumentCost:
    """Return the cost of a document under context parallelism, in units of attention's cost.

    A document of n tokens costs n * n for attention. One unit is the time of 3 * L * H * (d + v)
    FLOPs at 600 TFLOP/s. L layers have H query heads, key heads of dim d and value heads of dim v.

        linear = cost per token outside of attention: flops_per_token(config, 0) at 400 TFLOP/s
        exchange = cost per token of the transfer of its bf16 keys and values (or latents)
        fixed = 1000 * linear, the constant cost of a micro-batch

    Args:
        config: config of the decoder.
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
def _count_params(config: DecoderConfig) -> tuple[int, int]:
    """Return the numbers of all parameters, and of expert parameters that a token does not use."""
    total = idle = 0
    for name, param in Decoder(config, device="meta").named_parameters():
        total += param.numel()
        if config.moe is not None and ".experts." in name:
            share = config.moe.top_k / config.moe.num_candidates  # with even loads
            idle += round(config.moe.num_experts * (1 - share) * param[0].numel())
    return total, idle
