"""Packed documents and context parallelism for linear attention and short convolution layers.

A linear attention layer is recognised by the functions that its forward calls: a short convolution
and a delta rule, which are globals of the model's file. A short convolution layer (LFM2) is
recognised by its class. moecore replaces these globals, once for all models of the file. Lightning
attention (MiniMax) has no such functions, so moecore replaces the forward of each layer. A call
without a `Sequence`, or with one sequence per row and one cp rank, runs the original function.

The layer's projections, gates, norms and their order are unchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from moecore.attention.linear import attend_linear, causal_conv1d, scan_states
from moecore.attention.sequence import Sequence
from moecore.families.transformers import stock

SEQUENCE = "moecore_sequence"  # argument of decoder layers and of attention
CONVOLUTION = "causal_conv1d_fn"
# Classes that mix tokens only by a gated short convolution.
SHORT_CONVOLUTIONS = ("Lfm2ShortConv", "Lfm2MoeShortConv")
LIGHTNING = "MiniMaxLightningAttention"
SHORTCUT = "mamba2_split_conv1d_scan_combined"
SILU = ("silu", "swish")
Function = Callable[..., Any]


def find_linear_layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules with linear attention: a recurrence of `RULES`, or lightning attention."""
    rules = [module for module in model.modules() if find_linear_rule(module)]
    return rules + stock.find_modules(model, LIGHTNING)


def find_linear_rule(module: nn.Module) -> str | None:
    """Return the name of the recurrence that a module's forward calls; None = no recurrence."""
    call = stock.find_names_in_forward(module)
    return next((rule for rule in RULES if rule in call), None) if CONVOLUTION in call else None


def accept_sequence_argument(model: nn.Module) -> None:
    """Make linear attention and short convolutions accept a `Sequence`; patches modeling files."""
    convolutions = stock.find_modules(model, *SHORT_CONVOLUTIONS)
    for layer in convolutions:
        layer.register_forward_pre_hook(_check_no_layer_cache, with_kwargs=True)
    for layer in model.modules():
        if any(child in convolutions for child in layer.children()):
            layer.register_forward_pre_hook(_pass_sequence_as_seq_idx, with_kwargs=True)
    for layer in stock.find_modules(model, LIGHTNING):
        layer.forward = MethodType(_run_lightning_attention, layer)
    for module in (*find_linear_layers(model), *convolutions):
        of_file = inspect.unwrap(type(module).forward).__globals__
        for name in stock.find_names_in_forward(module) & FUNCTIONS.keys():
            if not hasattr(of_file[name], "stands_before"):
                of_file[name] = _make_sequence_wrapper(of_file[name], FUNCTIONS[name])


def disable_fused_layer(module: nn.Module) -> None:
    """Disable the kernel that fuses a full layer and would skip hooks of the output projection."""
    of_file = inspect.unwrap(type(module).forward).__globals__
    if SHORTCUT in of_file:
        of_file[SHORTCUT] = _skip_fused_layer


def _make_sequence_wrapper(stock_function: Function, sequence_function: Function) -> Function:
    """Return a wrapper that calls `sequence_function` for documents or cp ranks."""

    @wraps(stock_function)
    def call(*args: Any, **kwargs: Any) -> Any:
        sequence: Sequence | None = kwargs.pop(SEQUENCE, None)
        if isinstance(kwargs.get("seq_idx"), Sequence):
            sequence = kwargs.pop("seq_idx")
        if not _is_packed_or_sharded(sequence):
            return stock_function(*args, **kwargs)
        return sequence_function(sequence, *args, **kwargs)

    call.stands_before = stock_function  # type: ignore[attr-defined]
    return call


def _convolve_sequence(
    sequence: Sequence,
    hidden_states: Tensor,  # [B, D, T]
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """Replacement of the short convolution for documents and cp ranks: [B, D, T] -> [B, D, T]."""
    is_silu = activation in SILU
    x_BTD = hidden_states.transpose(1, 2)
    y_BTD = causal_conv1d(x_BTD, weight, bias, sequence, apply_silu=is_silu)
    if activation is not None and not is_silu:
        from transformers.activations import ACT2FN

        y_BTD = ACT2FN[activation](y_BTD)
    result: Tensor = y_BTD.transpose(1, 2)
    return result


def _attend_delta_rule(
    sequence: Sequence,
    query: Tensor,  # [B, T, heads, dims], as all
    key: Tensor,
    value: Tensor,
    g: Tensor,  # or [B, T, heads]
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """Replacement of a chunked delta rule (log decays `g`, learning rates `beta`)."""
    _check_no_cache(initial_state is not None or output_final_state)
    scale, norm_qk = key.shape[-1] ** -0.5, use_qk_l2norm_in_kernel
    out = attend_linear(query, key, value, g, beta, sequence, scale=scale, norm_qk=norm_qk)
    return out, None


def _run_lightning_attention(
    layer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Any]:
    """Replacement forward of lightning attention, whose state decays by exp(-slope) per token."""
    sequence: Sequence | None = kwargs.get(SEQUENCE)
    if sequence is None or not _is_packed_or_sharded(sequence):
        result: tuple[Tensor, Any] = type(layer).forward(layer, hidden_states, *args, **kwargs)
        return result
    _check_no_cache(stock.has_cache(kwargs))
    of_heads = layer.act_fn(layer.qkv_proj(hidden_states)).unflatten(-1, (-1, 3 * layer.head_dim))
    q, k, v = of_heads.split(layer.head_dim, dim=-1)
    g_BTH = -layer.slope_rate.flatten().float().expand(q.shape[:3])
    o_BTHv = attend_linear(q, k, v, g_BTH, None, sequence, scale=1.0, norm_qk=False)
    gate_BTD = layer.output_gate(hidden_states).sigmoid()
    return layer.out_proj(gate_BTD * layer.norm(o_BTHv.flatten(2))), None


def _scan_state_space(
    sequence: Sequence,
    hidden_states: Tensor,  # [B, T, heads, dims]
    dt: Tensor,
    A: Tensor,
    B: Tensor,  # [B, T, groups, dims], as C
    C: Tensor,
    *,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    **_: Any,
) -> Tensor:
    """Replacement of `mamba2_chunk_scan` for documents and cp ranks; [B, T, heads, dims]."""
    _check_no_cache(initial_states is not None or return_final_states)
    step_BTH = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    step_BTH = (F.softplus(step_BTH) if dt_softplus else step_BTH).clamp(*dt_limit)
    return scan_states(hidden_states, step_BTH, A.float(), B, C, D, sequence)


def _skip_fused_layer(*_args: Any, **_: Any) -> None:
    """Replacement of a full-layer kernel: return None, so that the caller runs each operation."""


def _is_packed_or_sharded(sequence: Sequence | None) -> bool:
    """Whether rows have several documents, or context-parallel ranks share them."""
    return isinstance(sequence, Sequence) and (
        sequence.cu_seqlens is not None or sequence.local_tokens is not None
    )


def _pass_sequence_as_seq_idx(layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of a decoder layer, which passes only `seq_idx` on in transformers 5.17."""
    return args, kwargs | {"seq_idx": kwargs.get(SEQUENCE, kwargs.get("seq_idx"))}


def _check_no_layer_cache(layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of a short convolution layer: ValueError for documents with a cache."""
    _check_no_cache(stock.has_cache(kwargs) and _is_packed_or_sharded(kwargs.get("seq_idx")))


def _check_no_cache(has_state: bool) -> None:
    if has_state:
        raise ValueError(
            "use_cache (True) must be False for linear attention with documents or over cp ranks, "
            "which has no last state of a row: pass use_cache=False"
        )


RULES: dict[str, Function] = {
    "torch_chunk_gated_delta_rule": _attend_delta_rule,
    "chunk_kimi_delta_attention": _attend_delta_rule,
    "mamba2_chunk_scan": _scan_state_space,
}
FUNCTIONS = RULES | {CONVOLUTION: _convolve_sequence, SHORTCUT: _skip_fused_layer}
