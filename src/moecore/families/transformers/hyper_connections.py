"""Fused hyper-connections for DeepSeek-V4: one GPU kernel before and one after each sublayer.

The transformers class mixes residual streams in 146 small operations per sublayer, most in fp32.
The replacement of a decoder layer's forward calls the layer's modules in the same order. Parameters
and names are unchanged. On CPUs the functions are PyTorch operations. Under autocast, under
torch.compile and for customised layers the stock forward runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from moecore.base.torch_private import autocast_dtype
from moecore.families.transformers.stock import runs_class_forward
from moecore.kernels.hyper_connections import (
    CollapsedStreams,
    SinkhornOptions,
    collapse_streams,
    expand_streams,
)

LAYER, CONNECTION = "DeepseekV4DecoderLayer", "DeepseekV4HyperConnection"


def fuse_hyper_connections(layers: Iterable[Any]) -> None:
    """Replace the forward of DeepSeek-V4 decoder layers by the fused version, in place."""
    for layer in layers:
        connections = (layer.attn_hc, layer.ffn_hc)
        if all(runs_class_forward(connection, CONNECTION) for connection in connections):
            layer.forward = MethodType(_layer, layer)
            for connection in connections:
                connection.forward = MethodType(_collapse, connection)


def _layer(
    layer: Any, hidden_states: Tensor, input_ids: Tensor | None = None, **kwargs: Any
) -> Tensor:
    """Replacement forward of a decoder layer; hidden_states are [B, T, N, D]."""
    if torch.compiler.is_compiling() or autocast_dtype(hidden_states) is not None:
        out: Tensor = type(layer).forward(layer, hidden_states, input_ids=input_ids, **kwargs)
        return out
    mixed = partial(_mixed, layer, input_ids=input_ids)
    # Since transformers 5.23 the class checkpoints in its forward, before that in `__call__`.
    is_plain_call = type(layer).__call__ is nn.Module.__call__
    if not (is_plain_call and layer.gradient_checkpointing and layer.training):
        return mixed(hidden_states, **kwargs)
    kwargs["past_key_values"] = None  # as the class does: to recompute would fill a cache twice
    out = layer._gradient_checkpointing_func(partial(mixed, **kwargs), hidden_states)
    return out


def _mixed(layer: Any, hidden_states: Tensor, *, input_ids: Tensor | None, **kwargs: Any) -> Tensor:
    """Compute the class's forward with fused kernels."""
    x_BTD, collapsed = layer.attn_hc(hidden_states, fused=True)
    y_BTD, _ = layer.self_attn(layer.input_layernorm(x_BTD), **kwargs)
    hidden_states = _expand(y_BTD, collapsed)
    x_BTD, collapsed = layer.ffn_hc(hidden_states, fused=True)
    y_BTD = layer.mlp(layer.post_attention_layernorm(x_BTD), input_ids=input_ids)
    return _expand(y_BTD, collapsed)


def _collapse(
    connection: Any, hidden_streams: Tensor, *, fused: bool = False
) -> tuple[Tensor, CollapsedStreams] | tuple[Tensor, Tensor, Tensor]:
    """Return a sublayer's input and the collapsed streams; without `fused`, the stock outputs."""
    if not fused:
        parts: tuple[Tensor, Tensor, Tensor] = type(connection).forward(connection, hidden_streams)
        return parts
    options = SinkhornOptions(
        iterations=max(1, connection.hc_sinkhorn_iters),
        eps=connection.hc_eps,
        norm_eps=connection.input_norm.eps,
    )
    weights = (connection.fn, connection.base, connection.scale)
    x_TD, collapsed = collapse_streams(hidden_streams.flatten(0, 1), *weights, options)
    return x_TD.unflatten(0, hidden_streams.shape[:2]), collapsed


def _expand(y_BTD: Tensor, collapsed: CollapsedStreams) -> Tensor:
    """Return the streams after a sublayer, [B, T, N, D]."""
    result: Tensor = expand_streams(y_BTD.flatten(0, 1), collapsed).unflatten(0, y_BTD.shape[:2])
    return result
