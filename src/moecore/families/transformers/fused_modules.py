"""Replaces the forward of transformers modules by fused kernels: RMS norms and hyper-connections.

RMS norms: the transformers classes run seven operations per norm. Any module whose class name
contains "RMSNorm" and that computes this function is replaced on GPUs by torch's fused kernel:

    y = weight * x / sqrt(mean of x^2 over the last dim + eps)

The kernel sums in fp32 and rounds once; most classes round x / sqrt(..) and the product. The
class's code still runs on CPUs, under autocast, under torch.compile, and if the dtypes of weight
and x differ.

Hyper-connections of DeepSeek-V4: the class mixes residual streams in 146 small operations per
sublayer, most in fp32. The replacement of a decoder layer's forward calls the layer's modules in
the same order, with one kernel before and one after each sublayer. On CPUs the functions are
PyTorch operations. Under autocast, under torch.compile and for customised layers the class's
forward runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from inspect import signature
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from moecore.base.torch_private import get_autocast_dtype
from moecore.families.transformers.stock import CACHES, is_stock_forward
from moecore.kernels.hyper_connections import (
    CollapsedStreams,
    SinkhornOptions,
    collapse_streams,
    expand_streams,
)
from moecore.kernels.meta import meta_is_gpu

LAYER, CONNECTION = "DeepseekV4DecoderLayer", "DeepseekV4HyperConnection"
EPS = ("variance_epsilon", "eps")  # attribute names of eps in transformers' classes
FP32_DISTANCE = 1e-5  # bound on the difference between a class that computes in fp32 and torch
SIZES = (1.0, 1e-3)  # magnitudes of the test elements; eps matters only at the second


def fuse_norms(model: nn.Module) -> None:
    """Replace the forward of RMS norms, in place, by a forward with the fused GPU kernel."""
    for module in model.modules():
        if "RMSNorm" in type(module).__name__ and is_rms_norm(module):
            module.forward = MethodType(_apply_rms_norm, module)


def is_rms_norm(module: nn.Module) -> bool:
    """Whether a module computes `F.rms_norm` on random CPU input; the module may be on meta."""
    eps, weight = _get_eps(module), getattr(module, "weight", None)
    has_other_tensors = len(list(module.parameters())) + len(list(module.buffers())) != 1
    has_other_inputs = len(signature(type(module).forward).parameters) != 2  # self and x
    if eps is None or weight is None or weight.ndim != 1 or has_other_tensors or has_other_inputs:
        return False
    with torch.no_grad(), torch.device("cpu"):
        g = torch.Generator().manual_seed(0)
        weight_D = torch.randn(weight.shape, generator=g, dtype=torch.float32, device="cpu")
        x_TD = torch.randn(2, len(weight_D), generator=g, dtype=torch.float32, device="cpu")
        for size in SIZES:
            stock_TD = F.rms_norm(size * x_TD, weight_D.shape, weight_D, eps)
            y_TD = functional_call(module, {"weight": weight_D}, (size * x_TD,))
            if not torch.allclose(y_TD, stock_TD, rtol=FP32_DISTANCE, atol=FP32_DISTANCE * size):
                return False
    return True


def _get_eps(module: nn.Module) -> float | None:
    return next((eps for n in EPS if isinstance(eps := getattr(module, n, None), float)), None)


def _apply_rms_norm(module: Any, x: Tensor) -> Tensor:
    """Replacement forward of an RMS norm: the fused kernel on GPUs, otherwise the class's code."""
    weight_D = module.weight
    is_gpu = x.is_cuda or (x.is_meta and meta_is_gpu())
    is_plain = is_gpu and weight_D.dtype == x.dtype and not torch.is_autocast_enabled("cuda")
    if torch.compiler.is_compiling() or not is_plain:
        y: Tensor = type(module).forward(module, x)
        return y
    return F.rms_norm(x, weight_D.shape, weight_D, _get_eps(module))


def fuse_hyper_connections(layers: Iterable[Any]) -> None:
    """Replace the forward of DeepSeek-V4 decoder layers by the fused version, in place."""
    for layer in layers:
        connections = (layer.attn_hc, layer.ffn_hc)
        if all(is_stock_forward(connection, CONNECTION) for connection in connections):
            layer.forward = MethodType(_run_hyper_connected_layer, layer)
            for connection in connections:
                connection.forward = MethodType(_collapse_streams, connection)


def _run_hyper_connected_layer(
    layer: Any, hidden_states: Tensor, input_ids: Tensor | None = None, **kwargs: Any
) -> Tensor:
    """Replacement forward of a DeepSeek-V4 layer; N streams [B, T, N, D] -> [B, T, N, D]."""
    if torch.compiler.is_compiling() or get_autocast_dtype(hidden_states) is not None:
        out: Tensor = type(layer).forward(layer, hidden_states, input_ids=input_ids, **kwargs)
        return out
    mixed = partial(_run_fused_hyper_connected_layer, layer, input_ids=input_ids)
    # Since transformers 5.23 the class checkpoints in its forward, before that in `__call__`.
    is_plain_call = type(layer).__call__ is nn.Module.__call__
    is_checkpointed = layer.gradient_checkpointing and layer.training and torch.is_grad_enabled()
    if not (is_plain_call and is_checkpointed):
        return mixed(hidden_states, **kwargs)
    for name in CACHES:  # as the class does: a recompute would fill a cache twice
        kwargs.pop(name, None)
    out = layer._gradient_checkpointing_func(partial(mixed, **kwargs), hidden_states)
    return out


def _run_fused_hyper_connected_layer(
    layer: Any, hidden_states: Tensor, *, input_ids: Tensor | None, **kwargs: Any
) -> Tensor:
    """Compute a DeepSeek-V4 layer's forward by fused kernels; [B, T, N, D] -> [B, T, N, D]."""
    x_BTD, collapsed = layer.attn_hc(hidden_states, fused=True)
    y_BTD, _ = layer.self_attn(layer.input_layernorm(x_BTD), **kwargs)
    hidden_states = _expand_streams(y_BTD, collapsed)
    x_BTD, collapsed = layer.ffn_hc(hidden_states, fused=True)
    y_BTD = layer.mlp(layer.post_attention_layernorm(x_BTD), input_ids=input_ids)
    return _expand_streams(y_BTD, collapsed)


def _collapse_streams(
    connection: Any, hidden_streams: Tensor, *, fused: bool = False
) -> tuple[Tensor, CollapsedStreams] | tuple[Tensor, Tensor, Tensor]:
    """Replacement forward that mixes N streams; `fused`: return [B, T, D] and streams to expand."""
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


def _expand_streams(y_BTD: Tensor, collapsed: CollapsedStreams) -> Tensor:
    """Mix a sublayer's output into the N residual streams of `collapsed`; return [B, T, N, D]."""
    result: Tensor = expand_streams(y_BTD.flatten(0, 1), collapsed).unflatten(0, y_BTD.shape[:2])
    return result
