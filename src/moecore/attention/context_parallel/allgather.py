"""Attention of a rank's queries to all-gathered keys and values.

Legend: B rows, T tokens of a row, G ranks, t = T / G tokens of a row of this rank, H query heads, h
key/value heads, d and v dims of a head.

Rank r stores chunks r and 2 * G - 1 - r of each document's 2 * G chunks. The queries of chunk c see
the keys of the first c + 1 chunks. Causal masks are aligned at the last key (note "alignment" of
`kernels/attention/contract.py`), so each chunk of queries is one call:

    G = 2, rank 0    chunk 0 -> keys 0          chunk 3 -> keys 0 1 2 3
           rank 1    chunk 1 -> keys 0 1        chunk 2 -> keys 0 1 2

Backward all-gathers keys and values again, because forward saves only the local ones.

Source: context parallelism of Llama 3 (arXiv:2407.21783).
"""

from typing import Any

import torch
from torch import Tensor

from moecore.attention.context_parallel.local_tokens import Half, LocalTokens
from moecore.kernels.attention import (
    AttentionMask,
    add_sinks,
    attention_backward,
    attention_forward,
    compute_sinks_grad,
)


def _list_key_blocks(
    local_tokens: LocalTokens, window: int | None
) -> list[tuple[Half, int, AttentionMask]]:
    """Return each half of the local queries, its number of first chunks of keys, and the mask."""
    rank, last = local_tokens.cp.rank, 2 * local_tokens.cp.size - 1
    halves: tuple[tuple[Half, int], ...] = (("early", rank + 1), ("late", last - rank + 1))
    make_mask = local_tokens.layout.make_mask
    return [(half, num, make_mask(1, num, window=window)) for half, num in halves]


def _gather_kv(local_tokens: LocalTokens, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """All-gather local k and v to full rows [B, T, ...] each, without autograd."""
    kv = local_tokens.gather_values(torch.cat((k.flatten(2), v.flatten(2)), dim=-1))
    ks, vs = kv.split((k[0, 0].numel(), v[0, 0].numel()), dim=-1)
    return ks.unflatten(2, k.shape[2:]), vs.unflatten(2, v.shape[2:])


class GatherAttention(torch.autograd.Function):
    """The autograd node of causal attention of this rank's queries to the keys of full rows.

    Local keys and values [B, t, ...] are all-gathered in forward. Full rows [B, T, ...] are used as
    they are, and their gradients have only the contribution of this rank's queries. Collective.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        local_tokens: LocalTokens,
        window: int | None,
        scale: float,
    ) -> Tensor:
        """Return outputs o_BtHv of local queries. `sinks` [H] are scores of sinks; None = none."""
        layout, (B, t, H, _) = local_tokens.layout, q.shape
        ks, vs = (k, v) if k.shape[1] != t else _gather_kv(local_tokens, k, v)
        qs, ks, vs = layout.flatten_rows(q), layout.flatten_rows(ks), layout.flatten_rows(vs)
        o = q.new_empty(*qs.shape[:3], v.shape[-1])
        dtype = torch.promote_types(q.dtype, torch.float32)
        lse = q.new_empty(qs.shape[0], H, qs.shape[1], dtype=dtype)
        for half, num, mask in _list_key_blocks(local_tokens, window):
            k_first, v_first = (layout.select_first_chunks(x, num) for x in (ks, vs))
            q_half = layout.select_half(qs, half)
            o_half, lse_half = attention_forward(q_half, k_first, v_first, mask, scale)
            layout.write_half(o, half, o_half)
            layout.write_half(lse, half, lse_half, dim=2)
        if sinks is not None:
            o, lse = add_sinks(o, lse, sinks)
        ctx.local_tokens, ctx.window, ctx.scale = local_tokens, window, scale
        o = o.view(B, t, H, v.shape[-1])
        ctx.save_for_backward(q, k, v, o, lse, sinks)
        return o

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradients of q, k, v and sinks."""
        q, k, v, o, lse, sinks = ctx.saved_tensors
        local_tokens: LocalTokens = ctx.local_tokens
        layout, is_unsharded = local_tokens.layout, k.shape[1] != q.shape[1]
        ks, vs = (k, v) if is_unsharded else _gather_kv(local_tokens, k, v)
        do, qs, os, ks, vs = (layout.flatten_rows(x) for x in (grads[0], q, o, ks, vs))
        dq = torch.empty_like(qs, memory_format=torch.contiguous_format)
        dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (ks, vs))
        for half, num, mask in _list_key_blocks(local_tokens, ctx.window):
            k_first, v_first = (layout.select_first_chunks(x, num) for x in (ks, vs))
            do_half, q_half, o_half = (layout.select_half(x, half) for x in (do, qs, os))
            lse_half = layout.select_half(lse, half, dim=2)
            dq_half, *dkv_first = attention_backward(
                do_half, q_half, k_first, v_first, o_half, lse_half, mask, ctx.scale
            )
            layout.write_half(dq, half, dq_half)
            for total, part in zip((dk, dv), dkv_first, strict=True):
                layout.add_first_chunks(total, num, part)
        dsinks = None if sinks is None else compute_sinks_grad(do, os, lse, sinks)
        if not is_unsharded:
            dkv = torch.cat((dk.flatten(2), dv.flatten(2)), dim=-1)
            dkv = dkv.view(k.shape[0], k.shape[1] * local_tokens.cp.size, -1)
            widths = k[0, 0].numel(), v[0, 0].numel()
            dk, dv = local_tokens.reduce_scatter_values(dkv).split(widths, dim=-1)
        return dq.view(q.shape), dk.reshape(k.shape), dv.reshape(v.shape), dsinks, None, None, None
