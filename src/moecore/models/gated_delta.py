"""A gated delta net, linear attention of a layer: tokens are mixed by a state of fixed size.

Legend: B sequences, T tokens of a sequence, t tokens of this tp rank, D model dim, h query and key
heads, H value heads, r = H / h, k and v dims of a head; heads are this rank's share under tp.

    x_BtD -> in_proj_qkvz -> q, k, v -> short convolution, silu -> delta rule -> o_BTHv -> norm
          -> in_proj_ba   -> decays, learning rates --------------+                         |
          -> in_proj_qkvz -> z_BTHv -> silu -------------------------------------- times ---+
                                                                   out_proj -> y_BtD

Rows of both projections are ordered by query head, so tensor parallelism cuts them. The filters of
the convolution have all queries, then all keys, then all values.

Source: Gated Delta Networks (arXiv:2412.06464); names and order are transformers' Qwen3-Next.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moecore.attention.linear import attend_linear
from moecore.attention.sequence import Sequence
from moecore.models.config import DecoderConfig
from moecore.models.layers import RMSNorm
from moecore.models.linear_attention import LinearAttention, wide
from moecore.models.tp_products import column_products, row_product
from moecore.precision.plain import Linear


class GatedDeltaNet(LinearAttention):
    """Linear attention with a delta rule, decays and an output gate, of a linear layer."""

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype | None = None) -> None:
        linear = config.linear_attention
        assert linear is not None, "a linear layer has its dims"
        D, H = config.dim, linear.num_v_heads
        keys, values = linear.num_k_heads * linear.head_k_dim, H * linear.head_v_dim
        super().__init__(linear, (keys, keys, values), bias=False, dtype=dtype)
        self.in_proj_qkvz = Linear(D, 2 * (keys + values), tp_shard_dim=0, dtype=dtype)
        self.in_proj_ba = Linear(D, 2 * H, tp_shard_dim=0, dtype=dtype)
        self.norm = RMSNorm(self.head_v_dim, config.norm_eps, dtype=dtype)
        self.out_proj = Linear(values, D, tp_shard_dim=1, residual=True, dtype=dtype)

    def forward(self, x_BTD: Tensor, sequence: Sequence) -> Tensor:
        """Return the output of own tokens, normed; the sequence is of the whole rows."""
        k, v, r = self.head_k_dim, self.head_v_dim, self.num_v_heads // self.num_k_heads
        qkvz, ba = column_products(x_BTD, (self.in_proj_qkvz, self.in_proj_ba), self.tp)
        parts = qkvz.unflatten(-1, (-1, 2 * (k + r * v))).split((k, k, r * v, r * v), dim=-1)
        *qkv, z = (part.flatten(2) for part in parts)
        b_BTH, a_BTH = (part.flatten(2) for part in ba.unflatten(-1, (-1, 2, r)).unbind(-2))
        qkv = self.convolved(qkv, sequence)
        of_heads = [x.unflatten(-1, (-1, d)) for x, d in zip(qkv, (k, k, v), strict=True)]
        gates = self.rates() * self.steps(a_BTH), b_BTH.sigmoid()
        o_BTHv = attend_linear(*of_heads, *gates, sequence, scale=k**-0.5, norm_qk=True)
        gate_BTHv = F.silu(wide(z.unflatten(-1, (-1, v))))
        y_BTHv = (self.norm(o_BTHv) * gate_BTHv).to(o_BTHv.dtype)
        return row_product(y_BTHv.flatten(2), self.out_proj, self.tp)
