"""Chunked attention and attention temperatures of Llama 4.

A layer with chunked attention does not attend across multiples of `attention_chunk_size` tokens
of a document. `attention.py` computes each chunk as a document inside of the document.

A layer without rotary positions multiplies its queries by a factor that depends on the position.
The stock layer counts positions from the start of the row. Here positions restart with each
document, and cp ranks use the positions of their tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moecore.attention.sequence import Sequence, split_documents
from moecore.families.transformers.stock import find_modules

CHUNKED = "chunked_attention"  # in a config's `layer_types`
CLASS = "Llama4TextAttention"
# Attributes of layers whose chunks and temperatures moecore computes.
CHUNK_SIZE, HAS_TEMPERATURE = "_moecore_chunk_size", "_moecore_has_temperature"


def find_chunked_layers(model: nn.Module) -> list[Any]:
    """Return a model's Llama 4 attention modules whose attention is chunked."""
    return [layer for layer in find_modules(model, CLASS) if _is_chunked(layer)]


def use_chunked_attention(model: nn.Module) -> None:
    """Disable Llama 4's own chunk masks and query scales, which this file's functions replace."""
    for layer in find_modules(model, CLASS):
        if _is_chunked(layer):
            setattr(layer, CHUNK_SIZE, layer.config.attention_chunk_size)
        if layer.attn_temperature_tuning and not layer.use_rope:
            setattr(layer, HAS_TEMPERATURE, True)
            layer.attn_temperature_tuning = False


def split_into_chunks(layer: nn.Module, sequence: Sequence, q_BHTd: Tensor) -> Sequence:
    """Return `sequence` with the layer's attention chunks, if it has chunks, as documents."""
    size: int | None = getattr(layer, CHUNK_SIZE, None)
    if size is None:
        return sequence
    cp = 1 if sequence.local_tokens is None else sequence.local_tokens.cp.size
    return split_documents(sequence, (len(q_BHTd), q_BHTd.shape[2] * cp), size, q_BHTd.device)


def scale_queries(layer: Any, sequence: Sequence, q_BHTd: Tensor) -> Tensor:
    """Return queries times Llama 4's attention temperatures; unchanged for other layers."""
    if not hasattr(layer, HAS_TEMPERATURE):
        return q_BHTd
    positions_BT = sequence.positions_BT
    if positions_BT is None:
        cp = 1 if sequence.local_tokens is None else sequence.local_tokens.cp.size
        T = q_BHTd.shape[2] * cp
        positions_BT = torch.arange(T, device=q_BHTd.device).expand(len(q_BHTd), T)
    steps_BT = torch.floor((sequence.slice_local(positions_BT).float() + 1.0) / layer.floor_scale)
    factors_BT: Tensor = torch.log1p(steps_BT) * layer.attn_scale + 1.0
    return (q_BHTd * factors_BT[:, None, :, None]).to(q_BHTd.dtype)


def _is_chunked(layer: Any) -> bool:
    return bool(layer.config.layer_types[layer.layer_idx] == CHUNKED)
