"""Short causal convolutions of packed documents, channel by channel.

Letters of `contract.py`; D channels, W taps, w = W - 1 tokens before a document.

    kernels        T D elements are read and written; backward reads x and dy, and recomputes y
    plain PyTorch  one convolution over all tokens, with w tokens inserted before each document,
                   whose results are dropped

Tokens before a document, if there are any, are inserted for the kernels too:

    documents a b c and d e, W = 3    . . a b c . . d e
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moecore.kernels.common import (
    KERNEL_DTYPES,
    can_use_kernel,
    cdiv,
    disable_autocast,
    launch_or_record,
)
from moecore.kernels.triton_api import tl, triton
from moecore.kernels.zigzag import find_document_ids, get_shared_table

TILE = dict(BLOCK_T=32, BLOCK_D=64)


def causal_convolution(
    x_TD: Tensor,
    weight_DW: Tensor,
    bias_D: Tensor | None,
    cu_seqlens: Tensor,
    *,
    previous_tokens_nwD: Tensor | None = None,
    apply_silu: bool,
) -> Tensor:
    """Return y_TD: each channel's causal convolution over W tokens within a document.

    x_TD has any float dtype, which is the dtype of y. The last tap of weight_DW multiplies the
    token itself. cu_seqlens, int32 [n + 1], is each document's first token, then T.
    previous_tokens_nwD are the w = W - 1 tokens before each document, in order; None = zeros.
    `apply_silu` applies SiLU to the result. Differentiable once.
    """
    with disable_autocast(x_TD):
        has_kernel = x_TD.dtype in KERNEL_DTYPES and can_use_kernel(x_TD)
        if has_kernel and previous_tokens_nwD is None:
            return _Convolution.apply(x_TD, weight_DW, bias_D, cu_seqlens, apply_silu)  # type: ignore[no-any-return]
        (T, D), w, num = x_TD.shape, weight_DW.shape[1] - 1, len(cu_seqlens) - 1
        ends_T = torch.arange(T, device=x_TD.device) + find_document_ids(cu_seqlens, T) * w
        dtype = x_TD.dtype if has_kernel else weight_DW.dtype
        long = x_TD.new_zeros(T + num * w, D, dtype=dtype)
        long = long.index_copy(0, ends_T + w, x_TD.to(dtype))
        if previous_tokens_nwD is not None:
            firsts_n = cu_seqlens[:-1].long() + torch.arange(num, device=x_TD.device) * w
            places_nw = firsts_n[:, None] + torch.arange(w, device=x_TD.device)
            before = previous_tokens_nwD.flatten(0, 1).to(dtype)
            long = long.index_copy(0, places_nw.flatten(), before)
        if has_kernel:
            borders = cu_seqlens + torch.arange(num + 1, device=x_TD.device) * w
            y = _Convolution.apply(long, weight_DW, bias_D, borders, apply_silu)
            return y[ends_T + w]  # type: ignore[no-any-return]
        y_1DL = F.conv1d(long.T[None], weight_DW[:, None], bias_D, groups=D)
        y_TD = y_1DL[0].T[ends_T]
        return (F.silu(y_TD) if apply_silu else y_TD).to(x_TD.dtype)


def _make_borders(cu_seqlens: Tensor, T: int) -> Tensor:
    """Return int32 [2, T]: the first token of each token's document, and its end."""
    documents = find_document_ids(cu_seqlens, T)
    return torch.stack((cu_seqlens[documents], cu_seqlens[documents + 1])).int()


@triton.jit
def _load_tokens(ptr, tokens, first, end, d, D):
    """Return rows of [T, D] in fp32; rows before `first` or from `end` on are zero."""
    mask = ((tokens >= first) & (tokens < end))[:, None] & (d < D)[None, :]
    cells = tokens.to(tl.int64)[:, None] * D + d[None, :]
    return tl.load(ptr + cells, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _convolve(x_ptr, weight_ptr, bias_ptr, tokens, first, end, d, D, W: tl.constexpr, HAS_BIAS):
    """Return a tile of the convolution, before the activation."""
    y = tl.zeros([tokens.shape[0], d.shape[0]], dtype=tl.float32)
    if HAS_BIAS:
        y += tl.load(bias_ptr + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(W):
        weight = tl.load(weight_ptr + d * W + tap, mask=d < D, other=0.0).to(tl.float32)
        y += weight[None, :] * _load_tokens(x_ptr, tokens - (W - 1 - tap), first, end, d, D)
    return y


@triton.jit(do_not_specialize=["num_tokens"])
def convolution_fwd_kernel(
    x_ptr,  # [T, D]
    weight_ptr,  # [D, W]
    bias_ptr,  # [D]
    borders_ptr,  # int32 [2, T]: the first token and the end of each token's document
    y_ptr,  # [T, D], out
    num_tokens,
    D,
    W: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write the outputs of BLOCK_T tokens and BLOCK_D channels."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    first = tl.load(borders_ptr + t, mask=t < num_tokens, other=0)
    y = _convolve(x_ptr, weight_ptr, bias_ptr, t, first, num_tokens, d, D, W, HAS_BIAS)
    if SILU:
        y *= tl.sigmoid(y)
    mask = (t < num_tokens)[:, None] & (d < D)[None, :]
    cells = t.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(y_ptr + cells, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def convolution_bwd_kernel(
    x_ptr,  # [T, D]
    weight_ptr,  # [D, W]
    bias_ptr,  # [D]
    borders_ptr,  # int32 [2, T]
    dy_ptr,  # [T, D]
    dx_ptr,  # [T, D], out
    sums_ptr,  # fp32 [tiles of tokens, W + 1, D], out: gradients of the weight and of the bias
    num_tokens,
    D,
    W: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write a tile of dx, and the tile's sums for the gradients of weight and bias."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    first = tl.load(borders_ptr + t, mask=t < num_tokens, other=0)
    end = tl.load(borders_ptr + num_tokens + t, mask=t < num_tokens, other=0)
    dx = tl.zeros([BLOCK_T, BLOCK_D], dtype=tl.float32)
    sums_ptr += tl.program_id(0).to(tl.int64) * (W + 1) * D + d
    for lag in tl.static_range(W):  # the token `lag` of t reads t with this tap from the last
        dy = _load_tokens(dy_ptr, t + lag, first, end, d, D)
        if SILU:
            y = _convolve(x_ptr, weight_ptr, bias_ptr, t + lag, first, end, d, D, W, HAS_BIAS)
            gate = tl.sigmoid(y)
            dy *= gate * (1.0 + y * (1.0 - gate))
        weight = tl.load(weight_ptr + d * W + W - 1 - lag, mask=d < D, other=0.0).to(tl.float32)
        dx += weight[None, :] * dy
        dweight = tl.sum(dy * _load_tokens(x_ptr, t, first, end, d, D), 0)
        tl.store(sums_ptr + (W - 1 - lag) * D, dweight, mask=d < D)
        if lag == 0:
            tl.store(sums_ptr + W * D, tl.sum(dy, 0), mask=d < D)
    mask = (t < num_tokens)[:, None] & (d < D)[None, :]
    cells = t.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(dx_ptr + cells, dx.to(dx_ptr.dtype.element_ty), mask=mask)


class _Convolution(torch.autograd.Function):
    """apply(x, weight, bias or None, cu_seqlens, apply_silu) -> y."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        x, weight, bias, cu_seqlens, apply_silu = inputs
        x, weight = x.contiguous(), weight.contiguous()
        borders = get_shared_table(_make_borders, cu_seqlens, len(x))
        (T, D), W, y = x.shape, weight.shape[1], torch.empty_like(x)
        ctx.constants = dict(W=W, HAS_BIAS=bias is not None, SILU=apply_silu, **TILE)
        ctx.save_for_backward(x, weight, bias, borders)
        args = x, weight, weight if bias is None else bias, borders
        grid = cdiv(T, TILE["BLOCK_T"]), cdiv(D, TILE["BLOCK_D"])
        launch_or_record(convolution_fwd_kernel, grid, *args, y, T, D, **ctx.constants)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, borders = ctx.saved_tensors
        (T, D), W, dx = x.shape, weight.shape[1], torch.empty_like(x)
        grid = cdiv(T, TILE["BLOCK_T"]), cdiv(D, TILE["BLOCK_D"])
        sums = x.new_empty(grid[0], W + 1, D, dtype=torch.float32)
        args = x, weight, weight if bias is None else bias, borders, dy.contiguous(), dx, sums
        launch_or_record(convolution_bwd_kernel, grid, *args, T, D, **ctx.constants)
        sums = sums.sum(0)
        dbias = None if bias is None else sums[W].to(bias.dtype)
        return dx, sums[:W].T.to(weight.dtype), dbias, None, None
