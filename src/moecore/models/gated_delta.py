"""A gated delta net, linear attention of a layer: tokens are mixed by a state of fixed size.

Legend: B sequences, T tokens of a sequence, t tokens of this tp rank, D model dim, h query and key
heads, H value heads, r = H / h, k and v dims of a head; heads are this rank's share under tp.

    x_BtD -> in_proj_qkvz -> q, k, v -> short convolution, silu -> delta rule -> o_BTHv -> norm
          -> in_proj_ba   -> decays, learning rates --------------+                         |
          -> in_proj_qkvz -> z_BTHv -> silu -------------------------------------- times ---+
                                                                   out_proj -> y_BtD

Rows of both projections are ordered by query head, so tensor parallelism cuts them. The filters of
the convolution have all queries, then all keys, then all values: like decays they are whole on each
tp rank, which reads its heads'.

Source: Gated Delta Networks (arXiv:2412.06464); names and order are transformers' Qwen3-Next.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moecore.attention.linear import attend_linear, convolve
from moecore.attention.sequence import Sequence
from moecore.base.torch_names import local_of
from moecore.models.config import DecoderConfig
from moecore.models.layers import RMSNorm
from moecore.models.tensor_parallel import TensorParallel
from moecore.models.tp_products import column_products, row_product
from moecore.moe.params import init_uniform_, local_param
from moecore.precision.plain import Linear


class GatedDeltaNet(nn.Module):
    """Linear attention with a delta rule, decays and an output gate, of a linear layer."""

    is_eager = True  # in no CUDA graph: a package reads the borders of documents on the host

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        linear = config.linear_attention
        assert linear is not None, "a linear layer has its dims"
        self.tp: TensorParallel | None = None
        D, h, H = config.dim, linear.num_k_heads, linear.num_v_heads
        self.num_k_heads, self.num_v_heads = h, H  # over all tp ranks
        self.head_k_dim, self.head_v_dim = linear.head_k_dim, linear.head_v_dim
        keys, values = h * self.head_k_dim, H * self.head_v_dim
        self.in_proj_qkvz = Linear(D, 2 * (keys + values), tp_shard_dim=0, dtype=dtype)
        self.in_proj_ba = Linear(D, 2 * H, tp_shard_dim=0, dtype=dtype)
        channels, how = 2 * keys + values, dict(groups=2 * keys + values, bias=False, dtype=dtype)
        self.conv1d = nn.Conv1d(channels, channels, linear.conv_size, **how)  # type: ignore[arg-type]
        self.dt_bias = nn.Parameter(torch.empty(H, dtype=dtype))
        self.A_log = nn.Parameter(torch.empty(H, dtype=dtype))
        self.norm = RMSNorm(self.head_v_dim, config.norm_eps, dtype=dtype)
        self.out_proj = Linear(values, D, tp_shard_dim=1, residual=True, dtype=dtype)

    def forward(self, x_BTD: Tensor, sequence: Sequence) -> Tensor:
        """Return the output of own tokens, normed; the sequence is of the whole rows."""
        k, v, r = self.head_k_dim, self.head_v_dim, self.num_v_heads // self.num_k_heads
        qkvz, ba = column_products(x_BTD, (self.in_proj_qkvz, self.in_proj_ba), self.tp)
        parts = qkvz.unflatten(-1, (-1, 2 * (k + r * v))).split((k, k, r * v, r * v), dim=-1)
        *qkv, z = (part.flatten(2) for part in parts)
        b_BTH, a_BTH = (part.flatten(2) for part in ba.unflatten(-1, (-1, 2, r)).unbind(-2))
        mixed = convolve(torch.cat(qkv, -1), self._filters(), None, sequence, silu=True)
        qkv = mixed.split([part.shape[-1] for part in qkv], dim=-1)
        of_heads = [x.unflatten(-1, (-1, d)) for x, d in zip(qkv, (k, k, v), strict=True)]
        gates = self._decays(a_BTH), b_BTH.sigmoid()
        o_BTHv = attend_linear(*of_heads, *gates, sequence, scale=k**-0.5, norm_qk=True)
        gate_BTHv = F.silu(_wide(z.unflatten(-1, (-1, v))))
        y_BTHv = (self.norm(o_BTHv) * gate_BTHv).to(o_BTHv.dtype)
        return row_product(y_BTHv.flatten(2), self.out_proj, self.tp)

    def _filters(self) -> Tensor:
        """Return [channels, W] of this rank's heads."""
        weight_DW = local_param(self.conv1d.weight).squeeze(1)
        keys = self.num_k_heads * self.head_k_dim
        parts = weight_DW.split((keys, keys, len(weight_DW) - 2 * keys))
        return torch.cat([self._own(part) for part in parts])

    def _decays(self, a_BTH: Tensor) -> Tensor:
        """Return the logarithms of decays of this rank's heads."""
        A_H, bias_H = (self._own(local_param(p)) for p in (self.A_log, self.dt_bias))
        steps_BTH = F.softplus(_wide(a_BTH) + bias_H)
        return -_wide(A_H).exp() * steps_BTH

    def _own(self, x: Tensor) -> Tensor:
        return x if self.tp is None else x.chunk(self.tp.size)[self.tp.rank]

    def init_weights(self, *, key: str, seed: int) -> None:
        """Fill filters and decays, which are exp(-softplus(a + 1) * U(0.01, 16))."""
        bound = self.conv1d.weight.shape[-1] ** -0.5  # as of torch's convolutions
        init_uniform_(self.conv1d.weight, bound=bound, key=f"{key}.conv1d.weight", seed=seed)
        local_of(self.dt_bias).fill_(1.0)
        init_uniform_(self.A_log, bound=7.995, key=f"{key}.A_log", seed=seed)
        local_of(self.A_log).add_(8.005).log_()


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
