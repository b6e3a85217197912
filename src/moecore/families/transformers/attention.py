"""Causal attention of a transformers model without masks, which a CUDA graph can hold.

To make a mask transformers looks in every forward, on the host, at positions and padding, to see
whether a mask is needed at all. Here what attention needs to know comes with the call:

    rows of one sequence each      nothing: attention is causal by itself
    packed documents               cu_seq_lens_q, as transformers' FlashAttention takes it
    rows over cp ranks             the tokens that this one holds
    sliding windows, sinks         of the layer

`families/transformers/rows.py` reads what comes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from moecore.attention.function import attend
from moecore.attention.sequence import Sequence
from moecore.base.fields import check_arguments
from moecore.families.transformers.rows import READER, SEQUENCE, RowReader

CAUSAL = "moecore_causal"  # transformers makes masks for the names that it knows
UNKNOWN = ("position_bias", "dropout")  # what `attend` does not compute


def use_causal_attention(model: nn.Module) -> None:
    """Make a transformers model (>= 5) attend without masks, to packed documents if they are given.

    In place. From then on a forward takes documents that are packed into the rows by the arguments
    of transformers' FlashAttention: `cu_seq_lens_q`, int32 [n + 1], tokens counted row by row, and
    `max_length_q` (those of `cu_seq_lens_k` and `max_length_k` are the same and not read). A batch
    of `packing.PackedCollator` comes as it is, `model(**batch)`: its `padding_mask` is for MoE
    layers, which route no padding then. `position_ids` may come along, and restart with each
    document otherwise. Without documents every row is one sequence. Masks of attention are refused,
    so padding must be a document of its own, or follow the tokens of its row with labels of -100.
    Losses of sequences and drops by position in MoE layers are per document.

    Args:
        model: a causal language model of transformers, before or after `parallelize_moe`.

    Raises:
        ValueError: for a model with attention in chunks; later, in a forward, when it gets a mask,
            positions without documents, documents that are not those of the tokens or keys of an
            earlier forward, or a layer's attention has a soft cap, a position bias or, with
            documents, a window or sinks, dropout; documents for a model that mixes tokens beside
            its attention.
    """
    check_arguments(use_causal_attention, locals())
    from transformers import AttentionInterface

    hf: Any = model
    layer_types = getattr(hf.config.get_text_config(), "layer_types", None) or ()
    if "chunked_attention" in layer_types:
        raise ValueError(
            "layer_types ('chunked_attention') must not be in the config of a model for "
            "use_causal_attention, whose attention has no chunks: leave the model's own"
        )
    AttentionInterface.register(CAUSAL, _causal_attention)
    hf.set_attn_implementation(CAUSAL)
    if not hasattr(hf, READER):
        setattr(hf, READER, RowReader(hf))


def _causal_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if query.shape[2] != key.shape[2]:
        raise ValueError(
            f"tokens ({query.shape[2]}) must be as many as their keys ({key.shape[2]}) for "
            "use_causal_attention, which has no mask for those of earlier forwards: pass no "
            "past_key_values"
        )
    sequence: Sequence = kwargs.get(SEQUENCE) or Sequence()
    window, sinks_H, held = kwargs.get("sliding_window"), kwargs.get("s_aux"), sequence.held
    num_tokens = query.shape[2] * (1 if held is None else held.cp.size)
    if window is not None and window >= (sequence.max_seqlen or num_tokens):
        window = None
    if kwargs.get("softcap") is not None:
        raise _unknown("softcap", kwargs["softcap"])
    is_plain = sequence.cu_seqlens is None and window is None and sinks_H is None
    if is_plain and held is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if attention_mask is not None:
        raise _unknown("attention_mask", tuple(attention_mask.shape))
    for name in UNKNOWN:
        if kwargs.get(name) not in (None, 0.0):
            raise _unknown(name, kwargs[name])
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


def _unknown(name: str, value: Any) -> ValueError:
    return ValueError(
        f"{name} ({value}) must be None for use_causal_attention, which does not compute it with "
        "documents, windows or sinks: leave the model's own attention"
    )
