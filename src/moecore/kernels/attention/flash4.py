"""Attention by FlashAttention 4, of the package flash-attn-4: documents, windows, dims up to 256.

It compiles a kernel when a process first needs it, of a pair of head dims and a kind of mask. The
backward adds up dq with atomics, whose order is fixed under torch's deterministic algorithms. The
functions are private: their arguments are those of 4.0.0b36, and a release without them is not
used.

Source: arXiv:2407.08608, the algorithm on Hopper.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moecore.kernels.attention.contract import AttentionBlock, AttentionMask, refuse_half
from moecore.kernels.invariant import is_batch_invariant

PACKAGE = "flash-attn-4"
PARAMETERS = {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale"}
PARAMETERS |= {"causal", "window_size_left", "window_size_right"}


class _Functions(NamedTuple):
    forward: Callable[..., Any]
    backward: Callable[..., Any]


def supports(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> str | None:
    """Return why FlashAttention 4 cannot compute such a block, one line; None = it can."""
    reason = refuse_half(q, k, v, (9, 0))
    if reason is None and q.is_meta:
        reason = f"device ({q.device.type}) must be cuda for {PACKAGE}: it has no shapes alone"
    is_exact = torch.are_deterministic_algorithms_enabled()
    if reason is None and is_exact and torch.cuda.get_device_capability(q.device)[0] == 12:
        reason = f"deterministic algorithms must be off for {PACKAGE}, which has none for SM 12"
    if reason is None and is_batch_invariant():
        reason = f"batch invariance must be off for {PACKAGE}, whose tiles follow from lengths"
    return reason or _why_not()


@cache
def recommend(device: torch.device) -> None:
    """Say, once, that documents and windows would be faster with the package."""
    # On an H200 FlashAttention 2 has 0.44 to 0.59 of its FLOP/s: docs/context_parallel.md.
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return
    if (reason := _why_not()) is not None:
        warnings.warn(
            f"documents and windows are computed by torch's FlashAttention 2, at about half the "
            f"speed: {reason}",
            stacklevel=2,
        )


def forward(block: AttentionBlock) -> tuple[Tensor, Tensor]:
    """Return o and lse: see `attention.attention_forward`."""
    q, k, v, mask, scale = block
    heads = _as_inputs(mask, q, k, v)
    o, lse, *_ = _functions().forward(*heads, **_arguments(mask, scale), return_lse=True)
    if mask.is_packed:  # [H, B * T]
        lse = lse.unflatten(1, q.shape[:2]).transpose(0, 1)
    return o.view(*q.shape[:3], v.shape[-1]), lse


def backward(
    block: AttentionBlock, do: Tensor, o: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv: see `attention.attention_backward`."""
    q, k, v, mask, scale = block
    lse = lse.masked_fill(lse == -math.inf, math.inf)  # exp(s - lse) of a row that sees no key is 0
    if mask.is_packed:
        lse = lse.transpose(0, 1).flatten(1)
    heads = _as_inputs(mask, q, k, v, o, do)
    is_exact = torch.are_deterministic_algorithms_enabled()
    dq, dk, dv = _functions().backward(
        *heads, lse.contiguous(), **_arguments(mask, scale), deterministic=is_exact
    )
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)


def _as_inputs(mask: AttentionMask, *tensors: Tensor) -> list[Tensor]:
    """Return packed rows as one [B * T, H, dim]."""
    dense = [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]
    return [x.flatten(0, 1) for x in dense] if mask.is_packed else dense


def _arguments(mask: AttentionMask, scale: float) -> dict[str, Any]:
    """Return its arguments beside tensors of heads; windows count keys before a query's own."""
    return dict(
        softmax_scale=scale,
        causal=mask.causal and mask.window is None,
        window_size_left=None if mask.window is None else mask.window - 1,
        window_size_right=None if mask.window is None else 0,
        cu_seqlens_q=mask.cu_seqlens_q,
        cu_seqlens_k=mask.cu_seqlens_k,
        max_seqlen_q=mask.max_length_q,
        max_seqlen_k=mask.max_length_k,
    )


@cache
def _functions() -> _Functions:
    from flash_attn.cute import interface

    return _Functions(interface._flash_attn_fwd, interface._flash_attn_bwd)


@cache
def _why_not() -> str | None:
    """Return why the package cannot be called, or None; imports it."""
    try:
        functions = _functions()
    except (ImportError, AttributeError) as error:
        return f"{PACKAGE} must be installed and have its functions ({error}): install it"
    for function in functions:
        missing = PARAMETERS - inspect.signature(function).parameters.keys()
        if missing:
            return f"{PACKAGE} must take {', '.join(sorted(missing))}: install another release"
    return None
