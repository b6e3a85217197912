"""Which models of transformers can pack documents into rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from moecore.families.adapters import CONVOLUTIONS
from moecore.families.transformers.linear_attention import linear_layers
from moecore.families.transformers.longest import longest_position_readers
from moecore.families.transformers.sparse_attention import sparse_layers
from moecore.families.transformers.stock import CAUSAL_LOSS, loss_of_class

# Losses of transformers that are sums over tokens; others read a whole row, such as its last token.
TOKEN_LOSSES = (CAUSAL_LOSS, "ForTokenClassification", "ForMaskedLMLoss")
UNSUPPORTED_FIELDS = ("attention_dropout", "attn_logit_softcapping")
# Layers that mix tokens by attention alone, or not at all.
KINDS = ("full_attention", "sliding_attention", "mlp", "moe")
LINEAR, SPARSE = "linear_attention", "indexed_attention"


def packing_problem(model: nn.Module, *, has_row_inputs: bool = True) -> str | None:
    """Return what of a model needs rows of one sequence each, whole on a rank; None = nothing.

    `has_row_inputs`: whether `use_causal_attention` was called, after which linear and sparse
    attention read documents.
    """
    config: Any = model.config
    text = config.get_text_config()
    linear = linear_layers(model) if has_row_inputs else []
    row_layers = {LINEAR: len(linear), SPARSE: len(sparse_layers(model)) if has_row_inputs else 0}
    if (other := other_kind(text, row_layers)) is not None:
        return other
    for owner, field in [
        (config, "is_encoder_decoder"),
        *((text, name) for name in UNSUPPORTED_FIELDS),
    ]:
        if getattr(owner, field, None):
            return f"{field} ({getattr(owner, field)})"
    linear_modules = {part for layer in linear for part in layer.modules()}
    for name, module in model.named_modules():
        is_convolution = isinstance(module, CONVOLUTIONS) and module not in linear_modules
        if is_convolution or getattr(module, "is_causal", True) is False:
            return f"{name} ({type(module).__name__})"
    return None


def why_one_document(model: nn.Module) -> str | None:
    """Return the part of a model that needs one document per row (cp may cut it), or None."""
    for name, rope_type, _ in longest_position_readers(model):
        return f"rope_type ({rope_type!r}) of {name}, which reads the longest position of all rows"
    loss = loss_of_class(model)
    if loss is not None and loss not in TOKEN_LOSSES:
        return f"a head of whole rows ({loss} of {type(model).__name__})"
    return None


def other_kind(text: Any, row_layers: Mapping[str, int] | None = None) -> str | None:
    """Return the first layer of a config that mixes tokens by other means than attention.

    A kind of which all layers of the config are `row_layers` is none.
    """
    kinds = getattr(text, "layer_types", None) or ()
    row_kinds = (kind for kind, number in (row_layers or {}).items() if number == kinds.count(kind))
    known_kinds = (*KINDS, *row_kinds)
    return next(
        (f"layer_types[{i}] ({k!r})" for i, k in enumerate(kinds) if k not in known_kinds), None
    )
