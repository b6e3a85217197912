"""Attention by FlashAttention 4, of the package flash-attn-4: documents, windows, dims up to 256.

The package compiles a kernel at the first call of a process for each pair of head dims and kind of
mask. Backward sums dq by atomics, in a fixed order under torch's deterministic algorithms. The
functions are private: their arguments are of 4.0.0b36, and a release without them is not used.

Source: arXiv:2407.08608, the algorithm on Hopper.
"""

import inspect
import math
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moecore.kernels.attention.contract import AttentionMask, QKVBlock, find_16_bit_problem
from moecore.kernels.invariant import is_batch_invariant

PACKAGE = "flash-attn-4"
PARAMETERS = {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale"}
PARAMETERS |= {"causal", "window_size_left", "window_size_right"}


class _Functions(NamedTuple):
    """The private forward and backward functions of flash-attn-4."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]


def find_problem(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> str | None:
    """Return why FlashAttention 4 cannot run on these inputs, in one line; None = it can."""
    if (reason := find_16_bit_problem(q, k, v, (9, 0))) is not None:
        return reason
    if q.is_meta:
        return f"device (meta) must be cuda for {PACKAGE}"
    is_exact = torch.are_deterministic_algorithms_enabled()
    if is_exact and torch.cuda.get_device_capability(q.device)[0] == 12:
        return f"deterministic algorithms must be off for {PACKAGE}, which has none for SM 12"
    if is_batch_invariant():
        return f"batch invariance must be off for {PACKAGE}, whose tiles follow from lengths"
    return _find_import_problem()


@cache
def warn_if_missing(device: torch.device) -> None:
    """Warn once per GPU, on Hopper and later, if flash-attn-4 is missing or unusable."""
    # On an H200 FlashAttention 2 has 0.44 to 0.59 of its FLOP/s: docs/context_parallel.md.
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return
    if (reason := _find_import_problem()) is not None:
        text = "documents and windows are computed by torch's FlashAttention 2, at about half the"
        warnings.warn(f"{text} speed: {reason}", stacklevel=2)


def forward(block: QKVBlock) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, heads, dim] and log-sum-exps [B, heads, T], by FlashAttention 4."""
    q, k, v, mask, scale = block
    heads, arguments = _flatten_packed_rows(mask, q, k, v), _make_arguments(mask, scale)
    o, lse, *_ = _import_functions().forward(*heads, **arguments, return_lse=True)
    if mask.is_packed:  # [H, B * T]
        lse = lse.unflatten(1, q.shape[:2]).transpose(0, 1)
    return o.view(*q.shape[:3], v.shape[-1]), lse


def backward(block: QKVBlock, do: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of q, k and v. o and lse are output and log-sum-exp over all keys."""
    q, k, v, mask, scale = block
    lse = lse.masked_fill(lse == -math.inf, math.inf)  # exp(s - lse) of a row that sees no key is 0
    if mask.is_packed:
        lse = lse.transpose(0, 1).flatten(1)
    heads = _flatten_packed_rows(mask, q, k, v, o, do)
    is_exact = torch.are_deterministic_algorithms_enabled()
    dq, dk, dv = _import_functions().backward(
        *heads, lse.contiguous(), **_make_arguments(mask, scale), deterministic=is_exact
    )
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)


def _flatten_packed_rows(mask: AttentionMask, *tensors: Tensor) -> list[Tensor]:
    """Flatten rows with packed documents to [B * T, H, dim]; make the last dim contiguous."""
    dense = [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]
    return [x.flatten(0, 1) for x in dense] if mask.is_packed else dense


def _make_arguments(mask: AttentionMask, scale: float) -> dict[str, Any]:
    """Return the keyword arguments of the package's functions for a mask and a softmax scale."""
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
def _import_functions() -> _Functions:
    """Return flash-attn-4's functions; raise ImportError or AttributeError if missing."""
    from flash_attn.cute import interface

    return _Functions(interface._flash_attn_fwd, interface._flash_attn_bwd)


@cache
def _find_import_problem() -> str | None:
    """Return why the package cannot be imported or called; None = it can."""
    try:
        functions = _import_functions()
    except (ImportError, AttributeError) as error:
        return f"{PACKAGE} must be installed and have its functions ({error}): install it"
    for function in functions:
        missing = PARAMETERS - inspect.signature(function).parameters.keys()
        if missing:
            return f"{PACKAGE} must take {', '.join(sorted(missing))}: install another release"
    return None
