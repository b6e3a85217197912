"""Softmax attention: `attend` maps query, key and value heads to output heads.

Legend: B rows, T tokens of a row, H query heads, h key/value heads, d and v dims of a head.

    plain causal rows   F.scaled_dot_product_attention, which compilers know
    other rows          `kernels/attention` in one custom operator; saves q, k, v, o and lse
    cp > 1              `context_parallel/`: collectives around the two functions above

Double backward is not supported.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moecore.attention.context_parallel.allgather import GatherAttention
from moecore.attention.context_parallel.heads import gather_heads, scatter_heads
from moecore.attention.context_parallel.local_tokens import LocalTokens
from moecore.attention.context_parallel.ring import RingAttention
from moecore.attention.sequence import Sequence
from moecore.base.regions import run_product
from moecore.base.torch_private import get_autocast_dtype
from moecore.kernels.attention import (
    add_sinks,
    attention_backward,
    attention_forward,
    compute_sinks_grad,
)
from moecore.kernels.ops import Op


def attend(
    q_BTHd: Tensor,
    k_BThd: Tensor,
    v_BThv: Tensor,
    sequence: Sequence,
    *,
    scale: float,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Return o_BTHv, the causal attention of each query to the keys of its document.

    If `sequence.cache` is not None, queries also read the cached keys. `scale` multiplies the
    scores. `window` limits the keys per query; None = all. `sinks_H` adds a score per head to the
    softmax, without a key or value; None = off. With cp > 1 the tensors have only this rank's
    tokens, and the call is collective.
    """
    if sequence.cache is not None:
        return sequence.cache.attend(
            q_BTHd, k_BThd, v_BThv, scale=scale, window=window, sinks_H=sinks_H
        )
    cp = 1 if sequence.local_tokens is None else sequence.local_tokens.cp.size
    if window is not None and window >= (sequence.max_seqlen or q_BTHd.shape[1] * cp):
        window = None
    is_plain = sequence.cu_seqlens is None and window is None and sinks_H is None
    if is_plain and sequence.local_tokens is None:
        o_BHTv = F.scaled_dot_product_attention(
            q_BTHd.transpose(1, 2),
            k_BThd.transpose(1, 2),
            v_BThv.transpose(1, 2),
            is_causal=True,
            scale=scale,
            enable_gqa=q_BTHd.shape[2] != k_BThd.shape[2],
        )
        return o_BHTv.transpose(1, 2)
    dtype = get_autocast_dtype(q_BTHd)
    if dtype is not None:  # as products do
        q_BTHd, k_BThd, v_BThv = (x.to(dtype) for x in (q_BTHd, k_BThd, v_BThv))
    if sequence.local_tokens is not None:
        arguments = sequence.local_tokens, sequence, scale, window, sinks_H
        return _attend_over_ranks(q_BTHd, k_BThd, v_BThv, *arguments)  # type: ignore[no-any-return]
    mask = sequence.cu_seqlens, sequence.max_seqlen, window
    o_BTHv, _ = run_product(_attention, q_BTHd, k_BThd, v_BThv, sinks_H, *mask, scale)
    return o_BTHv  # type: ignore[no-any-return]


@torch.compiler.disable  # a graph break; code before and after it is compiled
def _attend_over_ranks(
    q: Tensor,  # local tokens, like k and v; with "allgather" k and v may be of full rows
    k: Tensor,
    v: Tensor,
    local_tokens: LocalTokens,
    sequence: Sequence,
    scale: float,
    window: int | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Return o_BtHv of `attend`, by the communication of `local_tokens.cp`. Collective."""
    cp, heads = local_tokens.cp, k.shape[2]
    if cp.a2a is not None and heads % cp.a2a.size():
        raise ValueError(
            f"key/value heads ({heads}) must be a multiple of the ranks that exchange them "
            f"({cp.a2a.size()}): use another ContextOptions.way"
        )
    if k.shape[1] != q.shape[1] and not (cp.gathers and k.shape[1] == q.shape[1] * cp.size):
        raise ValueError(
            f"keys ({k.shape[1]}) must be as many as queries ({q.shape[1]}): pass this rank's"
        )
    if cp.a2a is not None:
        q, k, v = scatter_heads((q, k, v), cp.a2a, local_tokens.a2a_layout)
        if sinks_H is not None:
            sinks_H = sinks_H.chunk(cp.a2a.size())[cp.a2a.rank()]
    ring = local_tokens.ring_tokens
    # With a window the queries have little to compute during the sends of a ring. An all-gather of
    # the ring's keys sends as much.
    if cp.gathers or (cp.ring is not None and window is not None):
        o: Tensor = run_product(GatherAttention.apply, q, k, v, sinks_H, ring, window, scale)
    elif cp.ring is not None:
        o = run_product(RingAttention.apply, q, k, v, sinks_H, ring.layout, cp.ring, scale)
    else:
        full_sequence = replace(sequence, local_tokens=None)
        o = attend(q, k, v, full_sequence, scale=scale, window=window, sinks_H=sinks_H)
    return o if cp.a2a is None else gather_heads(o, cp.a2a, local_tokens.a2a_layout)


def _attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return contiguous outputs o_BTHv and fp32 log-sum-exps lse_BHT of causal attention."""
    mask = Sequence(cu_seqlens=cu_seqlens, max_seqlen=max_seqlen).mask(window)
    o, lse = attention_forward(q, k, v, mask, scale)
    if sinks is not None:
        o, lse = add_sinks(o, lse, sinks)
    return o.contiguous(), lse.contiguous()


def _fake_forward(q, k, v, sinks, cu_seqlens, max_seqlen, window, scale):  # type: ignore[no-untyped-def]
    dtype = torch.promote_types(q.dtype, torch.float32)
    B, T, H, _ = q.shape
    return q.new_empty(B, T, H, v.shape[-1]), q.new_empty(B, H, T, dtype=dtype)


def _attention_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dq, dk, dv and dsinks; dsinks is empty without sinks. o and lse include sinks."""
    mask = Sequence(cu_seqlens=cu_seqlens, max_seqlen=max_seqlen).mask(window)
    grads = attention_backward(do, q, k, v, o, lse, mask, scale)
    dsinks = lse.new_empty(0)
    if sinks is not None:
        dsinks = compute_sinks_grad(do, o, lse, sinks)
    dq, dk, dv = (g.contiguous() for g in grads)
    return dq, dk, dv, dsinks


def _fake_backward(do, q, k, v, o, lse, sinks, *options):  # type: ignore[no-untyped-def]
    dsinks = lse.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return (*(x.new_empty(x.shape) for x in (q, k, v)), dsinks)


_attention_bwd = Op("attention_bwd", _attention_backward, _fake_backward)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, cu_seqlens, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, sinks, cu_seqlens)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, do: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    """Return the gradients of `_attention_forward`'s eight arguments; lse has no gradient."""
    *tensors, sinks, cu_seqlens = ctx.saved_tensors
    *grads, dsinks = _attention_bwd(do, *tensors, sinks, cu_seqlens, *ctx.options)
    return *grads, None if sinks is None else dsinks, *(None for _ in range(4))


_attention = Op(
    "attention",
    _attention_forward,
    _fake_forward,
    setup_context=_setup_context,
    backward=_differentiate,
)
