"""The parts of a block besides the MoE layer: RMSNorm, grouped-query attention, rotary table, MLP.

Legend: B sequences, T tokens of a sequence, D model dim, H query heads, h key/value heads, d head
dim, F hidden dim of the MLP. Under tensor parallelism H, h and F are this rank's share, and x_BTD
contains only this rank's tokens until a module gathers all tokens (see tensor_parallel.py).

Activations are local tensors and not DTensors; modules read every parameter by `get_local_param`.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moecore.attention.function import attend
from moecore.attention.sequence import RotaryTable, Sequence
from moecore.base.params import get_local_param
from moecore.kernels.rows.activation import ActivationOptions, weighted_activation
from moecore.models.config import DecoderConfig, YarnConfig
from moecore.models.tensor_parallel import TensorParallel
from moecore.models.tp_products import apply_column_linears, apply_row_linear
from moecore.precision.plain import Linear

# [B, T, H, d], [B, T, h, d], where the tokens stand, scale
ScoreObserver = Callable[[Tensor, Tensor, Sequence, float], None]


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim, computed in fp32 and rounded once.

    If `over_tp`, the last dim, of global size `dim`, is sharded over tp, and the mean square is
    all-reduced over tp. If `zero_centered`, the factor is 1 + weight.
    """

    def __init__(
        self,
        dim: int,
        eps: float,
        *,
        over_tp: bool = False,
        zero_centered: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.over_tp, self.zero_centered = eps, over_tp, zero_centered
        self.tp: TensorParallel | None = None
        self.weight = nn.Parameter(torch.empty(dim, dtype=dtype))

    @classmethod
    def from_config(
        cls,
        config: DecoderConfig,
        dim: int | None = None,
        *,
        over_tp: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Return an RMSNorm with a decoder's epsilon and centering; `dim` None = the model dim."""
        zero_centered, dim = config.zero_centered_norms, dim or config.dim
        return cls(dim, config.norm_eps, over_tp=over_tp, zero_centered=zero_centered, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x over its last dim and multiply by the weight, in the dtype of x."""
        weight_D, wide = get_local_param(self.weight), torch.promote_types(x.dtype, torch.float32)
        if self.zero_centered:
            weight_D = 1.0 + weight_D.to(wide)
        if self.tp is None or not self.over_tp:
            if self.zero_centered:  # 16 bits are too few for its factor
                return F.rms_norm(x.to(wide), weight_D.shape, weight_D, self.eps).to(x.dtype)
            return F.rms_norm(x, weight_D.shape, weight_D.to(x.dtype), self.eps)
        weight_D = weight_D.chunk(self.tp.size)[self.tp.rank]
        x_fp32 = x.to(wide)
        squares = self.tp.all_reduce(x_fp32.square().sum(-1, keepdim=True))
        rms = torch.rsqrt(squares / self.weight.shape[0] + self.eps)
        return (x_fp32 * rms * weight_D).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary embedding.

    A token attends to at most `window` keys, its own key included; None = all. Sinks are replicated
    over tp, and each rank reads the sinks of its heads. The output bias is added after the
    reduce-scatter over tp. If heads have gates, `q_proj` returns each head's query, followed by the
    head's gate. Every forward calls `observe_scores`, unless it is None, with the rotated queries
    and keys.
    """

    observe_scores: ScoreObserver | None = None

    def __init__(
        self, config: DecoderConfig, window: int | None = None, *, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.window = window
        self.tp: TensorParallel | None = None
        D, d = config.dim, config.head_dim
        q_dim, kv_dim = config.num_heads * d, config.num_kv_heads * d
        has_bias = config.attention_bias is not None
        column = partial(Linear, D, tp_shard_dim=0, bias=has_bias, dtype=dtype)
        self.q_proj = column(q_dim * (1 + config.attention_gate))
        self.k_proj = column(kv_dim)
        self.v_proj = column(kv_dim)
        self.o_proj = Linear(q_dim, D, tp_shard_dim=1, residual=True, dtype=dtype)
        self.o_bias: nn.Parameter | None = None
        if config.attention_bias == "all":
            self.o_bias = nn.Parameter(torch.empty(D, dtype=dtype))
        self.sinks: nn.Parameter | None = None
        if config.attention_sinks:
            self.sinks = nn.Parameter(torch.empty(config.num_heads, dtype=dtype))
        if config.qk_norm is not None:
            over_tp = config.qk_norm == "full"
            q_norm_dim, k_norm_dim = (q_dim, kv_dim) if over_tp else (d, d)
            self.q_norm = RMSNorm.from_config(config, q_norm_dim, over_tp=over_tp, dtype=dtype)
            self.k_norm = RMSNorm.from_config(config, k_norm_dim, over_tp=over_tp, dtype=dtype)

    def forward(self, x_BTD: Tensor, sequence: Sequence) -> Tensor:
        """Return the attention output of this rank's normed tokens, in the shape of x."""
        d = self.config.head_dim
        q, k, v = apply_column_linears(x_BTD, (self.q_proj, self.k_proj, self.v_proj), self.tp)
        gate_BTHd: Tensor | None = None
        if self.config.attention_gate:
            q_BTHd, gate_BTHd = q.unflatten(-1, (-1, 2 * d)).chunk(2, dim=-1)
            q = q_BTHd.flatten(2)
        if self.config.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q_BTHd, k_BThd, v_BThd = (x.unflatten(-1, (-1, d)) for x in (q, k, v))
        if self.config.qk_norm == "head":
            q_BTHd, k_BThd = self.q_norm(q_BTHd), self.k_norm(k_BThd)
        if sequence.rotary is not None:
            q_BTHd, k_BThd = sequence.rotary.rotate(q_BTHd), sequence.rotary.rotate(k_BThd)
        scale = d**-0.5
        if self.observe_scores is not None:
            self.observe_scores(q_BTHd, k_BThd, sequence, scale)
        sinks_H = None if self.sinks is None else get_local_param(self.sinks)
        if sinks_H is not None and self.tp is not None:
            sinks_H = sinks_H.chunk(self.tp.size)[self.tp.rank]
        y_BTHd = attend(
            q_BTHd, k_BThd, v_BThd, sequence, scale=scale, window=self.window, sinks_H=sinks_H
        )
        if gate_BTHd is not None:
            y_BTHd = y_BTHd * gate_BTHd.sigmoid()
        y_BTD = apply_row_linear(y_BTHd.flatten(2), self.o_proj, self.tp)
        if self.o_bias is not None:
            y_BTD = y_BTD + get_local_param(self.o_bias).to(y_BTD.dtype)
        return y_BTD


class MLP(nn.Module):
    """The feed-forward part of a dense layer, by `mlp_activation`.

    "swiglu"     down(silu(gate(x)) * up(x))
    "relu2"      down(relu(up(x)) ** 2)
    "situ_glu"   down(f(gate(x), up(x))), see `MoEConfig`
    """

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.tp: TensorParallel | None = None
        D, F_ = config.dim, config.mlp_hidden_dim
        self.is_gated = config.mlp_activation != "relu2"
        self.limited: ActivationOptions | None = None
        if config.mlp_activation == "situ_glu":
            limits = config.mlp_activation_limit, config.mlp_activation_up_limit
            self.limited = ActivationOptions(kind="situ_glu", limit=limits[0], up_limit=limits[1])
        if self.is_gated:
            self.gate_proj = Linear(D, F_, tp_shard_dim=0, dtype=dtype)
        self.up_proj = Linear(D, F_, tp_shard_dim=0, dtype=dtype)
        self.down_proj = Linear(F_, D, tp_shard_dim=1, residual=True, dtype=dtype)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Apply the MLP to this rank's tokens; return the same shape and dtype."""
        if not self.is_gated:
            (up_BTF,) = apply_column_linears(x_BTD, (self.up_proj,), self.tp)
            return apply_row_linear(F.relu(up_BTF).square(), self.down_proj, self.tp)
        gate_BTF, up_BTF = apply_column_linears(x_BTD, (self.gate_proj, self.up_proj), self.tp)
        if self.limited is None:
            h_BTF = F.silu(gate_BTF) * up_BTF
        else:
            h_NC = torch.cat((gate_BTF, up_BTF), dim=-1).flatten(0, -2)
            h_BTF = weighted_activation(h_NC, None, None, self.limited).view_as(up_BTF)
        return apply_row_linear(h_BTF, self.down_proj, self.tp)


def build_rotary_table(config: DecoderConfig, positions: Tensor) -> RotaryTable | None:
    """Return cos and sin of positions [T] or [B, T] by RoPE or YaRN; None without `rope_theta`."""
    if config.rope_theta is None:
        return None
    mla = config.mla
    head_dim = config.rotary_dim or config.head_dim if mla is None else mla.qk_rope_head_dim
    yarn = config.yarn if mla is None else mla.yarn
    half = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    frequencies_d = 1.0 / config.rope_theta ** (half / head_dim)
    if yarn is None:
        return RotaryTable(positions, frequencies_d)
    factors_d = _compute_yarn_factors(head_dim, config.rope_theta, yarn, positions.device)
    return RotaryTable(positions, frequencies_d * factors_d, yarn.table_scale)


def _compute_yarn_factors(dim: int, theta: float, yarn: YarnConfig, device: torch.device) -> Tensor:
    """Return fp32 [dim / 2], the factor of each frequency: 1 if it is fast, 1 / factor if slow."""
    # Frequency i turns `original * theta^(-2i / d) / (2 pi)` times over the original length. The
    # factor is linear in i between the i that turns beta_fast times, rounded down if `truncate`,
    # and the i that turns beta_slow times, rounded up if `truncate`.

    def find_index(turns: float) -> float:
        length = yarn.original_max_seq_len / (2 * math.pi * turns)
        return dim * math.log(length) / (2 * math.log(theta))

    first, last = find_index(yarn.beta_fast), find_index(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    index_d = torch.arange(dim // 2, device=device, dtype=torch.float32)
    # A thousandth in place of no width at all, as published.
    slow_d = ((index_d - first) / (last - first or 0.001)).clamp(0, 1)
    return 1.0 - slow_d + slow_d / yarn.factor
