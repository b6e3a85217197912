"""Sparse attention's indexer: which keys a query reads, and what the indexer learns from.

Legend: B rows, T tokens of a row, D model dim, Q latent of the queries, h heads of the indexer, i
dims of one.

Source: DeepSeek-V3.2-Exp (arXiv:2512.02556, section 2.1); names and order are transformers'.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moecore.attention.sequence import RotaryTable, Sequence
from moecore.attention.sparse import KeyChoice
from moecore.base.options.indexer import IndexerConfig
from moecore.base.params import local_param
from moecore.kernels.sparse_attention import IndexerHeads
from moecore.models.config import DecoderConfig
from moecore.models.tensor_parallel import TensorParallel, sum_value
from moecore.precision.plain import Linear


class KeyNorm(nn.LayerNorm):
    """A layer norm, whatever the layout of its parameters."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the normed input."""
        weight, bias = (local_param(p).to(input.dtype) for p in (self.weight, self.bias))
        return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


class Indexer(nn.Module):
    """Scores of queries and keys, of latent attention with `sparse`; whole on each tp rank."""

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        mla = config.mla
        assert mla is not None and mla.sparse is not None, "sparse attention has its dims"
        self.num_heads, self.head_dim = mla.sparse.num_heads, mla.sparse.head_dim
        self.tp: TensorParallel | None = None
        self.wq_b = Linear(mla.q_lora_rank, self.num_heads * self.head_dim, dtype=dtype)
        self.wk = Linear(config.dim, self.head_dim, dtype=dtype)
        self.k_norm = KeyNorm(self.head_dim, eps=1e-6, dtype=dtype)
        self.weights_proj = Linear(config.dim, self.num_heads, dtype=dtype)

    def forward(self, x_BTD: Tensor, q_BTQ: Tensor, rotary: RotaryTable) -> IndexerHeads:
        """Return what pairs are scored by, of own tokens x and of latents of all T of tp."""
        k_BTi, w_BTh = self.k_norm(self.wk(x_BTD)), self.weights_proj(x_BTD)
        if self.tp is not None:
            kw_BTX = self.tp.gather(torch.cat((k_BTi, w_BTh), dim=-1))
            k_BTi, w_BTh = kw_BTX.split((self.head_dim, self.num_heads), dim=-1)
        q_BThi = rotary.rotate(self.wq_b(q_BTQ).unflatten(-1, (-1, self.head_dim)))
        k_BTi = rotary.rotate(k_BTi.unsqueeze(2)).squeeze(2)
        scale = self.num_heads**-0.5 * self.head_dim**-0.5
        return IndexerHeads(q_BThi, k_BTi, w_BTh.float() * scale)


def key_choice(config: IndexerConfig | None, layer: nn.Module, top_k: int) -> KeyChoice:
    """Return which keys a layer with an indexer reads; config None = the indexer learns nothing."""
    learns = config is not None and layer.training and torch.is_grad_enabled()
    is_warm_up = config is not None and config.stage == "warm_up"
    return KeyChoice(top_k=None if is_warm_up else top_k, diverges=learns)


def mean_divergence(divergence_BT: Tensor, sequence: Sequence) -> Tensor:
    """Return this rank's part of the mean over tokens, of all ranks' and without padding."""
    mask_BT, local_tokens = sequence.padding_mask_BT, sequence.local_tokens
    if mask_BT is None:
        return divergence_BT.sum() / (
            divergence_BT.numel() * (1 if local_tokens is None else local_tokens.cp.size)
        )
    number = (~mask_BT).sum()
    if local_tokens is not None:
        number = sum_value(number, local_tokens.cp.group)
    return divergence_BT.masked_fill(mask_BT, 0).sum() / number.clamp(min=1)
