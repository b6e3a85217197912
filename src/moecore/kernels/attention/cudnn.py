"""Attention by cuDNN: rows that are one document each, head dims up to 128, or 192 and 128.

cuDNN's `lse` is fp32 [B, H, T, 1], contiguous. The operators are private: their arguments are of
torch 2.13.
"""

import torch
from torch import Tensor

from moecore.base.torch_private import cudnn_attention, cudnn_attention_backward
from moecore.kernels.attention.contract import (
    AttentionMask,
    QKVBlock,
    find_16_bit_problem,
    merge_blocks,
)


def find_problem(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> str | None:
    """Return why cuDNN cannot compute attention on these inputs, in one line; None = it can."""
    if mask.is_packed:
        return "cu_seqlens_q must be None for cuDNN, whose rows are one document each"
    if torch.get_deterministic_debug_mode() > 1:  # errors, not warnings: as in torch's own choice
        return "deterministic algorithms must be off for cuDNN"
    if mask.window is not None:
        return f"window ({mask.window}) must be None for cuDNN, whose attention reads all keys"
    T, S = q.shape[1], k.shape[1]
    if mask.causal and T > S:
        return f"queries ({T}) must be at most as many as keys ({S}) for cuDNN, else some see none"
    if 1 in (T, S, S - T if mask.causal else S):
        return f"queries ({T}) of keys ({S}) must not leave one token: some cuDNNs refuse it"
    dims = (q.shape[-1], v.shape[-1])
    if dims != (192, 128) and not dims[1] <= dims[0] <= 128:
        return f"head dims {dims} must be up to 128, values' the smaller, or (192, 128) for cuDNN"
    return find_16_bit_problem(q, k, v, (9, 0))


def forward(block: QKVBlock) -> tuple[Tensor, Tensor]:
    """Return attention outputs [B, T, heads, dim] and log-sum-exps [B, heads, T], by cuDNN."""
    q, k, v, mask, scale = block
    # cuDNN's causal mask is aligned at the top left, moecore's at the bottom right. T queries and
    # S > T keys are two calls: all keys 0 : S - T, and a causal square of keys S - T : S.
    before = k.shape[1] - q.shape[1]
    if not mask.causal or not before:
        return _run_forward(q, k, v, mask.causal, scale)
    o, lse = merge_blocks(
        *_run_forward(q, k[:, :before], v[:, :before], False, scale),
        *_run_forward(q, k[:, before:], v[:, before:], True, scale),
    )
    return o.to(q.dtype), lse


def backward(block: QKVBlock, do: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of q, k and v. o and lse are output and log-sum-exp over all keys."""
    q, k, v, mask, scale = block
    do, o = _copy_with_stride_order_of(do, q), _copy_with_stride_order_of(o, q)
    lse = lse.contiguous()
    before = k.shape[1] - q.shape[1]
    if not mask.causal or not before:
        return _run_backward(do, q, k, v, o, lse, mask.causal, scale)
    of_all = _run_backward(do, q, k[:, :before], v[:, :before], o, lse, False, scale)
    of_square = _run_backward(do, q, k[:, before:], v[:, before:], o, lse, True, scale)
    dq = (of_all[0].to(lse.dtype) + of_square[0]).to(q.dtype)
    dk, dv = (torch.cat(parts, dim=1) for parts in zip(of_all[1:], of_square[1:], strict=True))
    return dq, dk, dv


def _run_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Call cuDNN; return o_BTHv and log-sum-exp lse_BHT. `causal`: query i sees keys 0 to i."""
    o_BHTv, lse_BHT1, *_ = cudnn_attention(
        *_move_heads_first(q, k, v), None, True, 0.0, causal, False, scale=scale
    )
    return o_BHTv.transpose(1, 2), lse_BHT1.squeeze(-1)


def _run_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Call cuDNN's backward once; return dq, dk and dv with heads in dim 2, as the inputs."""
    seed = lse.new_empty(0, dtype=torch.int64)  # of dropout
    grads = cudnn_attention_backward(
        *_move_heads_first(do, q, k, v, o),
        *(lse.unsqueeze(-1), seed, seed, None, None, None, q.shape[1], k.shape[1], 0.0, causal),
        scale=scale,
    )
    dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
    return dq, dk, dv


def _copy_with_stride_order_of(x: Tensor, like: Tensor) -> Tensor:
    """Return x in dense memory whose dims have the stride order of `like`; copies if necessary."""
    # Torch caches a graph per shape and strides of q, k and v, and assumes that o and its gradient
    # have the strides of the first backward. Forward allocates o dense, in the order of q.
    order = sorted(range(4), key=like.stride, reverse=True)
    return x.permute(order).contiguous().permute([order.index(dim) for dim in range(4)])


def _move_heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return views [B, H, T, d] of [B, T, H, d]; copies if the last dim is not contiguous."""
    first = (x.transpose(1, 2) for x in tensors)
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in first)
