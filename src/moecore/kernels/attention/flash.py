"""Attention by torch's FlashAttention 2: documents, sliding windows, one head dim.

If head dims of values differ, all tensors are padded with zeros to the larger dim. A query that
sees no key has lse = inf instead of -inf, so that exp(s - lse) is 0 in backward. Backward sums dq
by atomics, so bits differ from run to run, except under torch's deterministic algorithms without
`warn_only`. The bits of a document in forward do not depend on other documents. The operators are
private: their arguments are of torch 2.13.

Source: arXiv:2307.08691.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from moecore.base.torch_private import flash_attention, flash_attention_backward
from moecore.kernels.attention.contract import AttentionMask, QKVBlock, find_16_bit_problem


def find_problem(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> str | None:
    """Return why FlashAttention 2 cannot run on these inputs, in one line; None = it can."""
    return find_16_bit_problem(q, k, v, (8, 0))


def forward(block: QKVBlock) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, heads, dim] and log-sum-exps [B, heads, T], by FlashAttention 2."""
    q, k, v, mask, scale = block
    dim = max(q.shape[-1], v.shape[-1])
    o, lse, *_ = flash_attention(
        *_pad_and_flatten(mask, dim, q, k, v),
        *_get_document_arguments(mask, q, k),
        0.0,
        mask.causal and mask.window is None,
        False,
        scale=scale,
        **_get_window_arguments(mask),
    )
    if mask.is_packed:  # [H, B * T]
        lse = lse.unflatten(1, q.shape[:2]).transpose(0, 1)
    o = o.reshape(*q.shape[:3], dim)[..., : v.shape[-1]]
    return o, lse.masked_fill(lse == math.inf, -math.inf)


def backward(block: QKVBlock, do: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of q, k and v. o and lse are output and log-sum-exp over all keys."""
    q, k, v, mask, scale = block
    dim = max(q.shape[-1], v.shape[-1])
    lse = lse.masked_fill(lse == -math.inf, math.inf)
    if mask.is_packed:
        lse = lse.transpose(0, 1).flatten(1)
    unused = lse.new_empty(0)
    dq, dk, dv = flash_attention_backward(
        *_pad_and_flatten(mask, dim, do, q, k, v, o),
        lse.contiguous(),
        *_get_document_arguments(mask, q, k),
        0.0,
        mask.causal and mask.window is None,
        torch.zeros(2, dtype=torch.uint64, device=q.device),  # the seed of dropout
        unused,
        scale=scale,
        **_get_window_arguments(mask),
    )
    dq = dq.reshape(*q.shape[:3], dim)[..., : q.shape[-1]]
    dk = dk.reshape(*k.shape[:3], dim)[..., : k.shape[-1]]
    return dq, dk, dv.reshape(*v.shape[:3], dim)[..., : v.shape[-1]]


def _pad_and_flatten(mask: AttentionMask, head_dim: int, *tensors: Tensor) -> list[Tensor]:
    """Return the tensors, with head dims padded by zeros; packed rows are [B * T, H, head_dim]."""
    pads = [(0, head_dim - x.shape[-1]) for x in tensors]
    wide = [F.pad(x, pad) if pad[1] else x for x, pad in zip(tensors, pads, strict=True)]
    wide = [x if x.stride(-1) == 1 else x.contiguous() for x in wide]
    return [x.flatten(0, 1) for x in wide] if mask.is_packed else wide


def _get_document_arguments(
    mask: AttentionMask, q: Tensor, k: Tensor
) -> tuple[Tensor | int | None, ...]:
    """Return cu_seqlens (or None) of q and k, and their maximum document (or row) lengths."""
    if mask.is_packed:
        return mask.cu_seqlens_q, mask.cu_seqlens_k, mask.max_length_q, mask.max_length_k
    return None, None, q.shape[1], k.shape[1]


def _get_window_arguments(mask: AttentionMask) -> dict[str, int]:
    """Return the window arguments: numbers of keys that a query sees before and after; -1 = all."""
    if mask.window is not None:
        return {"window_size_left": mask.window - 1, "window_size_right": 0}
    return {"window_size_left": -1, "window_size_right": 0 if mask.causal else -1}
