"""Causal attention of a transformers model without masks, which a CUDA graph can hold.

To make a mask transformers looks in every forward, on the host, at positions and padding, to see
whether a mask is needed at all. Where each row of a batch is one sequence without padding it is
not: the attention that is causal by itself computes the same.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from moecore._fields import check_arguments

CAUSAL = "moecore_causal"  # transformers makes masks for the names that it knows
NEEDS_MASK = ("sliding_window", "s_aux", "softcap")


def use_causal_attention(model: nn.Module) -> None:
    """Make a transformers model (>= 5) attend by `scaled_dot_product_attention` without a mask.

    In place. From then on batches have neither padding nor several sequences in a row, and masks
    or positions are refused.

    Args:
        model: a causal language model of transformers, before or after `parallelize_moe`.

    Raises:
        ValueError: later, in a forward: when it gets a mask, positions or keys of an earlier
            forward, or a layer's attention is more than causal (a sliding window, sinks).
    """
    check_arguments(use_causal_attention, locals())
    from transformers import AttentionInterface

    AttentionInterface.register(CAUSAL, _causal_attention)
    hf: Any = model
    hf.set_attn_implementation(CAUSAL)
    hf.base_model.register_forward_pre_hook(_refuse_masks, with_kwargs=True)


def _causal_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    for name in NEEDS_MASK:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{name} ({kwargs[name]}) must be None for use_causal_attention, whose attention "
                "is causal and nothing else: leave the model's own"
            )
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            f"tokens ({query.shape[2]}) must be as many as their keys ({key.shape[2]}) for "
            "use_causal_attention, which has no mask for those of earlier forwards: pass no "
            "past_key_values"
        )
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def _refuse_masks(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for name in ("attention_mask", "position_ids"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{name} must be None after use_causal_attention, which would ignore it: give rows "
                "of one sequence each without padding, or leave the model's own attention"
            )
    if len(args) > 1:
        raise ValueError(
            "arguments after input_ids must be given by name after use_causal_attention: a mask "
            "among them would be ignored"
        )
