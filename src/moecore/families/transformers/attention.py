"""Causal attention without masks for transformers models, so that CUDA graphs can capture it.

To make a mask, transformers reads positions and padding on the host in every forward. Here the
arguments of a call replace the mask:

    rows of one sequence each      no argument: attention is causal
    packed documents               cu_seq_lens_q, as transformers' FlashAttention takes it
    rows over cp ranks             the tokens of this rank
    sliding windows, sinks         attributes of the layer
    chunks of Llama 4              documents inside of documents

`families/transformers/rows.py` reads the arguments of a forward.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from moecore.attention.function import attend
from moecore.attention.sequence import Sequence
from moecore.base.fields import check_arguments
from moecore.families.transformers.chunked_attention import (
    CHUNKED,
    find_chunked_layers,
    scale_queries,
    split_into_chunks,
    use_chunked_attention,
)
from moecore.families.transformers.compressed_attention import use_compressed_attention
from moecore.families.transformers.linear_attention import SEQUENCE, accept_sequence_argument
from moecore.families.transformers.rows import READER, RowReader
from moecore.families.transformers.sparse_attention import refuse_cached_keys, use_sparse_attention
from moecore.families.transformers.stock import (
    find_local_layer_types,
    find_modules,
    find_names_in_forward,
    get_text_decoder,
)

CAUSAL = "moecore_causal"  # transformers makes masks for the names that it knows
UNSUPPORTED_ARGUMENTS = ("position_bias", "dropout")  # what `attend` does not compute
# What no path computes: caps, keys that an indexer selects, sinks under another name than s_aux.
REFUSED_ARGUMENTS = ("softcap", "block_indices", "indices", "sinks")
# Classes whose forward computes with its mask, which `use_causal_attention` leaves out.
MASK_READERS = ("MistralLarge4TextAttention", "Qwen4ExpTextQSAIndexer")
WINDOW, WINDOW_MASK = "_moecore_window", "create_sliding_window_causal_mask"


def use_causal_attention(model: nn.Module) -> None:
    """Switch a transformers model (>= 5) in place to causal attention without masks.

    A forward then accepts packed documents by the arguments of transformers' FlashAttention:
    `cu_seq_lens_q`, int32 [n + 1], with tokens counted row by row, and `max_length_q`.
    `cu_seq_lens_k` and `max_length_k` must have equal values. Without these arguments, each row is
    one sequence.

    A batch of `packing.PackedCollator` is passed as `model(**batch)`; MoE layers do not route the
    padding of its `padding_mask`. `position_ids` are optional; by default, positions restart with
    each document. Attention masks raise an error. Padding must be a separate document, or be at the
    end of its row with labels of -100. Sequence-wise balance losses and capacity drops by position
    in MoE layers are per document.

    Args:
        model: a causal language model of transformers, before or after `parallelize_moe`.

    Raises:
        ValueError: if a model that is not Llama 4 has attention in chunks, or if its attention
            computes with masks. A later forward raises a ValueError for each of these:
            - a mask, or keys of an earlier forward
            - positions without documents, or documents that do not fit the tokens
            - documents, if the model also mixes tokens outside of its attention
            - attention with a soft cap, or of blocks of keys that an indexer selects
            - a position bias or dropout together with documents, a window or sinks
    """
    check_arguments(use_causal_attention, locals())
    from transformers import AttentionInterface

    hf: Any = model
    if CHUNKED in find_local_layer_types(hf).values() and not find_chunked_layers(hf):
        raise ValueError(
            f"layer_types ({CHUNKED!r}) must not be in the config of {type(hf).__name__} for "
            "use_causal_attention, which has chunks only for Llama 4: leave the model's own"
        )
    if readers := find_modules(hf, *MASK_READERS):
        raise ValueError(
            f"model ({type(hf).__name__}) must have no {type(readers[0]).__name__}, which computes "
            "with masks, for use_causal_attention: leave the model's own attention"
        )
    AttentionInterface.register(CAUSAL, _attend_causally)
    get_text_decoder(hf).set_attn_implementation(CAUSAL)
    _store_windows_of_masks(get_text_decoder(hf))
    accept_sequence_argument(hf)
    use_chunked_attention(hf)
    use_sparse_attention(hf)
    use_compressed_attention(hf)
    if not hasattr(hf, READER):
        setattr(hf, READER, RowReader(hf))


def _store_windows_of_masks(decoder: Any) -> None:
    """Store each layer's window, which some classes (Phi-3.5-MoE, Qwen2-MoE) have only in masks."""
    if WINDOW_MASK not in find_names_in_forward(decoder):
        return
    config, blocks = decoder.config, decoder.layers
    kinds = getattr(config, "layer_types", None)
    for place, block in enumerate(blocks):
        for layer in block.modules():
            if not hasattr(layer, "layer_idx"):
                continue
            # Plans keep some layers with their numbers, and a stage of a pipeline its own.
            number = layer.layer_idx if kinds and len(kinds) != len(blocks) else place
            if not kinds or kinds[number] == "sliding_attention":
                setattr(layer, WINDOW, config.sliding_window)


def _attend_causally(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function of transformers: q, k, v [B, heads, T, d] -> ([B, T, heads, d], None)."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    refuse_cached_keys(query.shape[2], key.shape[2])
    sequence: Sequence = kwargs.get(SEQUENCE) or Sequence()
    query = scale_queries(module, sequence, query)
    sequence = split_into_chunks(module, sequence, query)
    window: int | None = kwargs.get("sliding_window", getattr(module, WINDOW, None))
    sinks_H = kwargs.get("s_aux")
    local_tokens = sequence.local_tokens
    num_tokens = query.shape[2] * (1 if local_tokens is None else local_tokens.cp.size)
    if window is not None and window >= (sequence.max_seqlen or num_tokens):
        window = None
    for name in REFUSED_ARGUMENTS:
        if kwargs.get(name) is not None:
            raise _make_unsupported_error(name, kwargs[name])
    if local_tokens is None and sequence.cu_seqlens is None and window is None and sinks_H is None:
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **kwargs
        )
        return result
    if attention_mask is not None:
        raise _make_unsupported_error("attention_mask", attention_mask)
    for name in UNSUPPORTED_ARGUMENTS:
        if isinstance(kwargs.get(name), Tensor) or kwargs.get(name) not in (None, 0.0):
            raise _make_unsupported_error(name, kwargs[name])
    scaling = kwargs.get("scaling")
    o_BTHv = attend(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        sequence,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=window,
        sinks_H=sinks_H,
    )
    return o_BTHv, None


def _make_unsupported_error(option: str, value: Any) -> ValueError:
    value = tuple(value.shape) if isinstance(value, Tensor) else value
    return ValueError(
        f"{option} ({value}) must be None for use_causal_attention, which does not compute it: "
        "leave the model's own attention"
    )
