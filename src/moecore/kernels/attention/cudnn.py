"""Attention by cuDNN: rows that are one document each, head dims up to 128.

Its causal mask is aligned at the top left, so queries and keys must be as many; `lse` is fp32
[B, H, T, 1] there, contiguous. The operators are private: their arguments are those of torch 2.13.

Note "wide heads": with head dims of 192 and 128 torch 2.11's backward is right for the o and lse of
its own forward and wrong, by more than 2% of the largest gradient, for those of merged blocks.
Plain causal rows (`F.scaled_dot_product_attention`) are not concerned.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moecore.kernels.attention.contract import AttentionMask, refuse_half


def supports(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> str | None:
    """Return why cuDNN cannot compute such a block, one line; None = it can."""
    if mask.is_packed:
        return "cu_seqlens_q must be None for cuDNN, whose rows are one document each"
    if mask.window is not None:
        return f"window ({mask.window}) must be None for cuDNN, whose attention reads all keys"
    if mask.causal and q.shape[1] != k.shape[1]:
        return (
            f"queries ({q.shape[1]}) must be as many as keys ({k.shape[1]}) for cuDNN, whose "
            "causal mask starts at the first of both"
        )
    if not q.numel() or not k.numel() or not v.numel() or q.shape[1] == 1 or k.shape[1] == 1:
        return "cuDNN leaves empty blocks undefined, and some releases refuse one token"
    dims = (q.shape[-1], v.shape[-1])
    if max(dims) > 128:
        return f'head dims {dims} must be up to 128 for cuDNN: see the note "wide heads"'
    return refuse_half(q, v, (9, 0))


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float
) -> tuple[Tensor, Tensor]:
    """Return o and lse: see `attention.attention_forward`."""
    o_BHTv, lse_BHT1, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *_heads_first(q, k, v), None, True, 0.0, mask.causal, False, scale=scale
    )
    return o_BHTv.transpose(1, 2), lse_BHT1.squeeze(-1)


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    mask: AttentionMask,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv: see `attention.attention_backward`."""
    unused = lse.new_empty(0, dtype=torch.int64)  # the seed of dropout
    dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *_heads_first(do, q, k, v, o),
        lse.contiguous().unsqueeze(-1),
        unused,
        unused,
        None,
        None,
        None,
        q.shape[1],
        k.shape[1],
        0.0,
        mask.causal,
        scale=scale,
    )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in _transposed(tensors))


def _transposed(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.transpose(1, 2) for x in tensors)
