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
from moecore.kernels.linear_attention.convolution_kernel import (
    convolution_bwd_kernel,
    convolution_fwd_kernel,
)
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
