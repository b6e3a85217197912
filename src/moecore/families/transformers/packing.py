"""Determines which transformers models support packed documents, and passes positions over cp.

Some rotary embeddings depend on the longest position of a forward: "dynamic" and "longrope"
frequencies, and the factors of Phi-3.5-MoE. Under context parallelism each rank has a part of the
positions. The module therefore receives the largest position of the full rows as one more token,
and the angles of that token are dropped. Packed documents would share angles, so they are refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moecore.base.torch_private import tree_map_only
from moecore.families.adapters import CONVOLUTIONS
from moecore.families.transformers import stock
from moecore.families.transformers.chunked_attention import CHUNKED, find_chunked_layers
from moecore.families.transformers.compressed_attention import find_compressed_attention
from moecore.families.transformers.linear_attention import SHORT_CONVOLUTIONS, find_linear_layers
from moecore.families.transformers.sparse_attention import find_sparse_attention

POSITIONS = "position_ids"  # argument of a rotary embedding


def find_longest_position_readers(model: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield (name, rope type, module) of rotary embeddings that depend on the longest position."""
    for name, module in model.named_modules():
        kind = getattr(module, "rope_type", None)
        types = kind.values() if isinstance(kind, dict) else [kind]
        for rope_type in types:
            if not isinstance(rope_type, str) or rope_type == "default":
                continue
            # As transformers' dynamic_rope_update, or a class that reads the largest position.
            is_dynamic = "dynamic" in rope_type or rope_type == "longrope"
            if is_dynamic or "max" in stock.find_names_in_forward(module):
                yield name, rope_type, module
                break


class LongestPosition:
    """Hooks that pass the largest position of the full rows to a model's rotary embeddings."""

    def __init__(self, model: nn.Module) -> None:
        self.num_tokens: int | None = None  # of full rows; None = rows are not sharded
        for _, _, module in find_longest_position_readers(model):
            module.register_forward_pre_hook(self._append_position, with_kwargs=True)
            module.register_forward_hook(self._drop_position)

    def _append_position(
        self, module: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> stock.Arguments | None:
        """Forward pre-hook: append position T - 1 of the full rows if rows are sharded."""
        if self.num_tokens is None:
            return None
        positions: Tensor = kwargs[POSITIONS] if POSITIONS in kwargs else args[1]
        last = positions.new_full((*positions.shape[:-1], 1), self.num_tokens - 1)
        extended = torch.cat((positions, last), dim=-1)
        if POSITIONS in kwargs:
            return args, kwargs | {POSITIONS: extended}
        return (args[0], extended, *args[2:]), kwargs

    def _drop_position(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self.num_tokens is None:
            return None
        # Angles are [B, t, d]: a pair of cos and sin, or one complex tensor.
        return tree_map_only(Tensor, lambda x: x[..., :-1, :], output)


# Losses that are sums over tokens; transformers' other losses read, for example, a row's last
# token.
TOKEN_LOSSES = (stock.CAUSAL_LOSS, "ForTokenClassification", "ForMaskedLMLoss")
UNSUPPORTED_FIELDS = ("attention_dropout", "attn_logit_softcapping")
# Kinds of layers in which only softmax attention mixes tokens.
KINDS = ("full_attention", "sliding_attention", "mlp", "moe")
MIXERS = ("Attention", "Mixer", "Conv")  # ends of the class names of modules that mix tokens
LINEAR, CONVOLUTION = "linear_attention", "conv"
# Without a cache all keys are reference keys, so this attention is causal.
REFERENCE, REFERENCE_CLASS = "reference_sliding_attention", "UnlimitedOcrTextAttention"
SPARSE = ("indexed_attention", "deepseek_sparse_attention")  # the second: transformers < 5.18


def find_packing_problem(model: nn.Module, *, has_row_inputs: bool = True) -> str | None:
    """Return which part of a model forbids packed documents and cp, as text; None = no part.

    `has_row_inputs` means that `use_causal_attention` was called: more kinds of layers then support
    documents, and inputs of image and audio encoders are refused.
    """
    config: Any = model.config
    text = config.get_text_config()
    row_layers: dict[str, int] = {}  # kind of layer -> number of layers that support documents
    linear, convolutions, towers = list[nn.Module](), list[nn.Module](), set[nn.Module]()
    if has_row_inputs:
        linear = find_linear_layers(model)
        convolutions = stock.find_modules(model, *SHORT_CONVOLUTIONS)
        towers = {m for tower in stock.find_towers(model).values() for m in tower.modules()}
        row_layers = {
            LINEAR: len(linear),
            CONVOLUTION: len(convolutions),
            CHUNKED: len(find_chunked_layers(model)),
            REFERENCE: len(stock.find_modules(model, REFERENCE_CLASS)),
            **dict.fromkeys(SPARSE, len(find_sparse_attention(model))),
            **Counter(layer.layer_type for layer in find_compressed_attention(model)),
        }
    if (problem := find_unsupported_layer(model, row_layers)) is not None:
        return problem
    for owner, field in [
        (config, "is_encoder_decoder"),
        *((text, name) for name in UNSUPPORTED_FIELDS),
    ]:
        if getattr(owner, field, None):
            return f"{field} ({getattr(owner, field)})"
    linear_modules = {part for layer in (*linear, *convolutions) for part in layer.modules()}
    for name, module in model.named_modules():
        if module in towers:
            continue
        is_convolution = isinstance(module, CONVOLUTIONS) and module not in linear_modules
        if is_convolution or getattr(module, "is_causal", True) is False:
            return f"{name} ({type(module).__name__})"
    return None


def find_one_document_problem(model: nn.Module) -> str | None:
    """Return which part of a model needs one document per row, as text; None = no part."""
    for name, rope_type, _ in find_longest_position_readers(model):
        return f"rope_type ({rope_type!r}) of {name}, which reads the longest position of all rows"
    loss = stock.get_loss_name(model)
    if loss is not None and loss not in TOKEN_LOSSES:
        return f"a head of whole rows ({loss} of {type(model).__name__})"
    return None


def find_unsupported_layer(
    model: nn.Module, row_layers: Mapping[str, int] | None = None
) -> str | None:
    """Return the first layer of a kind that does not support documents, as text, or None.

    `row_layers` maps further supported kinds to their number of layers. Layers of other pipeline
    stages are not counted.
    """
    kinds = stock.find_local_layer_types(model)
    counts = Counter(kinds.values())
    row_kinds = (kind for kind, number in (row_layers or {}).items() if number == counts[kind])
    known_kinds = (*KINDS, *row_kinds)
    for i, kind in kinds.items():
        if kind not in known_kinds:
            layers = getattr(stock.get_text_decoder(model), "layers", None)
            parts = layers[i].modules() if isinstance(layers, nn.ModuleList) else ()
            names = (type(part).__name__ for part in parts)
            mixer = next((f", {name}" for name in names if name.endswith(MIXERS)), "")
            return f"layer_types[{i}] ({kind!r}{mixer})"
    return None
