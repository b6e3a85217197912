"""A Mamba-2 layer: tokens are mixed by a state space model of fixed size.

Legend: B sequences, T tokens of a sequence, t tokens of this tp rank, D model dim, h groups of
heads, H heads, r = H / h, k dim of a state, v dim of a head; h and H are this rank's share under
tp.

    x_BtD -> in_proj -> x, B, C -> short convolution, silu -> state space model -> y_BTHv
          -> in_proj -> time steps --------------------------------+                 |
          -> in_proj -> z -> silu ------------------------------------------------ times
                                              out_proj -> y_BtD <- norm of groups ---+

Rows of `in_proj` are ordered by group, so tensor parallelism cuts them: of each group z, x, B, C
and time steps. Files have all groups of a kind one after the other (`io/hf/names.py`), as the
filters of the convolution have here: x, B, C.

Source: Mamba-2 (arXiv:2405.21060); names are transformers' Nemotron-H.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moecore.attention.linear import scan_states
from moecore.attention.sequence import Sequence
from moecore.base.params import init_uniform_, local_param
from moecore.base.torch_private import local_of
from moecore.models.config import DecoderConfig, Mamba2Config
from moecore.models.layers import RMSNorm
from moecore.models.linear_attention import LinearAttention, wide
from moecore.models.tp_products import column_products, row_product
from moecore.precision.plain import Linear

LEAST_STEP, MOST_STEP = 1e-3, 0.1  # of a new layer


class Mamba2(LinearAttention):
    """A state space model with time steps, a skip and an output gate, of a linear layer."""

    least_decay = 1.0

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype | None = None) -> None:
        mamba = config.linear_attention
        assert isinstance(mamba, Mamba2Config), "a linear layer has its dims"
        D, h, H = config.dim, mamba.num_k_heads, mamba.num_v_heads
        keys, values = h * mamba.head_k_dim, H * mamba.head_v_dim
        super().__init__(mamba, (values, keys, keys), bias=True, dtype=dtype)
        self.min_step = mamba.min_step
        self.in_proj = Linear(D, 2 * (values + keys) + H, tp_shard_dim=0, dtype=dtype)
        self.D = nn.Parameter(torch.empty(H, dtype=dtype))
        self.norm = GatedGroupNorm(h, values, config.norm_eps, dtype=dtype)
        self.out_proj = Linear(values, D, tp_shard_dim=1, residual=True, dtype=dtype)

    def forward(self, x_BTD: Tensor, sequence: Sequence) -> Tensor:
        """Return the output of own tokens, normed; the sequence is of the whole rows."""
        k, v, r = self.head_k_dim, self.head_v_dim, self.num_v_heads // self.num_k_heads
        (rows,) = column_products(x_BTD, (self.in_proj,), self.tp)
        sizes = (r * v, r * v, k, k, r)
        parts = rows.unflatten(-1, (-1, sum(sizes))).split(sizes, dim=-1)
        z, *mixed, dt_BTH = (part.flatten(2) for part in parts)
        mixed = self.convolved(mixed, sequence)
        x_BTHv, B_BThk, C_BThk = (
            part.unflatten(-1, (-1, d)) for part, d in zip(mixed, (v, k, k), strict=True)
        )
        steps_BTH = self.steps(dt_BTH).clamp(min=self.min_step)
        y_BTHv = scan_states(
            x_BTHv, steps_BTH, self.rates(), B_BThk, C_BThk, self.local_heads(self.D), sequence
        )
        y_BTC = self.norm(y_BTHv.flatten(2), z).to(x_BTD.dtype)
        return row_product(y_BTC, self.out_proj, self.tp)

    def init_weights(self, *, key: str, seed: int) -> None:
        """Fill filters as torch does, the skip with 1, decays with exp(-steps * U(1, 16)).

        Time steps of a zero input have the logarithm U(log LEAST_STEP, log MOST_STEP).
        """
        super().init_weights(key=key, seed=seed)
        local_of(self.D).fill_(1.0)
        half = math.log(MOST_STEP / LEAST_STEP) / 2
        init_uniform_(self.dt_bias, bound=half, key=f"{key}.dt_bias", seed=seed)
        steps = local_of(self.dt_bias).add_(half + math.log(LEAST_STEP)).exp_()
        steps.add_(torch.log(-torch.expm1(-steps)))  # softplus gives the step


class GatedGroupNorm(RMSNorm):
    """The RMSNorm of each group of heads of x * silu(gate), and a weight an element."""

    def __init__(
        self, num_groups: int, dim: int, eps: float, *, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(dim, eps, dtype=dtype)
        self.group_dim = dim // num_groups

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        """Return the gated and normed x of this rank's heads, at least in its dtype."""
        weight = local_param(self.weight)
        if self.tp is not None:
            weight = weight.chunk(self.tp.size)[self.tp.rank]
        h = (wide(x) * F.silu(wide(gate))).unflatten(-1, (-1, self.group_dim))
        return weight * F.rms_norm(h, (self.group_dim,), None, self.eps).flatten(-2).to(x.dtype)
