"""Causal attention of a transformers model without masks, which a CUDA graph can hold.

To make a mask transformers looks in every forward, on the host, at positions and padding, to see
whether a mask is needed at all. Here what attention needs to know comes with the call:

    rows of one sequence each      nothing: attention is causal by itself
    packed documents               cu_seq_lens_q, as transformers' FlashAttention takes it
    sliding windows, sinks         of the layer
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from moecore._fields import check_arguments
from moecore.attention.function import attend
from moecore.attention.sequence import Sequence, packed_sequence

CAUSAL = "moecore_causal"  # transformers makes masks for the names that it knows
UNKNOWN = ("position_bias", "dropout")  # what `attend` does not compute


def use_causal_attention(model: nn.Module) -> None:
    """Make a transformers model (>= 5) attend without masks, to packed documents if they are given.

    In place. From then on a forward takes documents that are packed into the rows by the arguments
    of transformers' FlashAttention: `cu_seq_lens_q`, int32 [n + 1], tokens counted row by row, and
    `max_length_q` (those of `cu_seq_lens_k` and `max_length_k` are the same and not read).
    `position_ids` may come with them, and restart with each document otherwise. Without them every
    row is one sequence. Masks are refused, so padding must be a document of its own, or follow the
    tokens of its row with labels of -100.

    Args:
        model: a causal language model of transformers, before or after `parallelize_moe`.

    Raises:
        ValueError: for a model with attention in chunks; later, in a forward, when it gets a mask,
            positions without documents, documents that are not those of the tokens or keys of an
            earlier forward, or a layer's attention has a soft cap, a position bias or, with
            documents, a window or sinks, dropout.
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
    hf.base_model.register_forward_pre_hook(_read_documents, with_kwargs=True)


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
    sequence, window, sinks_H = Sequence(), kwargs.get("sliding_window"), kwargs.get("s_aux")
    if kwargs.get("cu_seq_lens_q") is not None:
        sequence = Sequence(cu_seqlens=kwargs["cu_seq_lens_q"], max_seqlen=kwargs["max_length_q"])
    if window is not None and window >= (sequence.max_seqlen or query.shape[2]):
        window = None
    if kwargs.get("softcap") is not None:
        raise _unknown("softcap", kwargs["softcap"])
    if sequence.cu_seqlens is None and window is None and sinks_H is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
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


def _read_documents(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Refuse what would be ignored; check documents and put them on the device of the tokens."""
    if kwargs.get("attention_mask") is not None:
        raise ValueError(
            "attention_mask must be None after use_causal_attention, which would ignore it: give "
            "rows without padding, or leave the model's own attention"
        )
    if len(args) > 1:
        raise ValueError(
            "arguments after input_ids must be given by name after use_causal_attention: a mask "
            "among them would be ignored"
        )
    cu_seqlens = kwargs.get("cu_seq_lens_q")
    if cu_seqlens is None:
        if kwargs.get("position_ids") is None:
            return None
        raise ValueError(
            "position_ids must be None after use_causal_attention without cu_seq_lens_q, because "
            "documents are not looked for in them: pass both, or rows of one sequence each"
        )
    given = [*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds")]
    tokens = next(x for x in given if x is not None)
    shape = (tokens.shape[0], tokens.shape[1])
    sequence = packed_sequence(cu_seqlens, kwargs.get("max_length_q"), shape, tokens.device)
    kwargs = kwargs | {
        "cu_seq_lens_q": sequence.cu_seqlens,
        "cu_seq_lens_k": sequence.cu_seqlens,
        "max_length_q": sequence.max_seqlen,
        "max_length_k": sequence.max_seqlen,
    }
    if kwargs.get("position_ids") is None:
        kwargs["position_ids"] = sequence.positions_BT
    return args, kwargs
