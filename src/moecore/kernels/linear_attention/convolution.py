"""Short causal convolutions of packed documents, channel by channel.

Letters of `contract.py`; D channels, W taps, w = W - 1 tokens before a document.

Plain PyTorch inserts w tokens, or zeros, before each document, runs one convolution over all
tokens, and drops the results of the inserted tokens:

    documents a b c and d e, W = 3    . . a b c . . d e
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moecore.kernels.common import disable_autocast
from moecore.kernels.linear_attention import fla
from moecore.kernels.zigzag import find_document_ids


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
    """
    with disable_autocast(x_TD):
        if fla.find_convolution_problem(x_TD) is None:
            return fla.causal_convolution(
                x_TD, weight_DW, bias_D, cu_seqlens, previous_tokens_nwD, apply_silu
            )
        (T, D), w, num = x_TD.shape, weight_DW.shape[1] - 1, len(cu_seqlens) - 1
        ends_T = torch.arange(T, device=x_TD.device) + find_document_ids(cu_seqlens, T) * w
        long = x_TD.new_zeros(T + num * w, D, dtype=weight_DW.dtype)
        long = long.index_copy(0, ends_T + w, x_TD.to(long.dtype))
        if previous_tokens_nwD is not None:
            firsts_n = cu_seqlens[:-1].long() + torch.arange(num, device=x_TD.device) * w
            places_nw = firsts_n[:, None] + torch.arange(w, device=x_TD.device)
            before = previous_tokens_nwD.flatten(0, 1).to(long.dtype)
            long = long.index_copy(0, places_nw.flatten(), before)
        y_1DL = F.conv1d(long.T[None], weight_DW[:, None], bias_D, groups=D)
        y_TD = y_1DL[0].T[ends_T]
        return (F.silu(y_TD) if apply_silu else y_TD).to(x_TD.dtype)
