"""Linear attention layers with a state of fixed size: a gated delta net and Mamba-2.

Legend: B sequences, T tokens of a sequence, t tokens of this tp rank, D model dim, C channels of
the convolution, h query and key heads or groups of heads, H value heads, r = H / h, k and v dims of
a head. Under tp methods return the heads and channels of this rank. Parameters with one
value per head are replicated over tp, and each rank reads the values of its heads.

    gated delta net
    x_BtD -> in_proj_qkvz -> q, k, v -> short convolution, silu -> delta rule -> o_BTHv -> norm
          -> in_proj_ba   -> decays, learning rates --------------+                         |
          -> in_proj_qkvz -> z_BTHv -> silu -------------------------------------- times ---+
                                                                   out_proj -> y_BtD
    Mamba-2
    x_BtD -> in_proj -> x, B, C -> short convolution, silu -> state space model -> y_BTHv
          -> in_proj -> time steps --------------------------------+                 |
          -> in_proj -> z -> silu ------------------------------------------------ times
                                              out_proj -> y_BtD <- norm of groups ---+

The rows of input projections are ordered by query head or group, so that tensor parallelism can
shard them: each group of `in_proj` has its z, x, B, C and time steps. The convolution's filters
have all queries, then all keys, then all values, or all x, B and C, as in checkpoints of Hugging
Face (`io/hf/names.py`).

Source: Gated Delta Networks (arXiv:2412.06464), Mamba-2 (arXiv:2405.21060). Names and order are
transformers' Qwen3-Next and Nemotron-H.
"""

import math
from collections.abc import Sequence as Sizes

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moecore.attention.linear import attend_linear, causal_conv1d, scan_states
from moecore.attention.sequence import Sequence
from moecore.base.params import get_local_param, init_uniform_
from moecore.base.torch_private import get_local_tensor
from moecore.models.config import DecoderConfig, LinearAttentionConfig, Mamba2Config
from moecore.models.layers import RMSNorm
from moecore.models.tensor_parallel import TensorParallel
from moecore.models.tp_products import apply_column_linears, apply_row_linear
from moecore.precision.plain import Linear


class LinearAttention(nn.Module):
    """Base class of linear attention layers: causal convolution, time steps and decay rates.

    The convolution's channels are concatenated by kind: for example all queries, all keys, all
    values. `sizes` has the number of channels of each kind over all tp ranks. The channels of a
    kind are ordered by head.
    """

    is_eager = True  # in no CUDA graph: a package reads the borders of documents on the host
    min_decay_rate = 0.01  # of a step of 1, in the logarithm; at most 16

    def __init__(
        self,
        linear: LinearAttentionConfig,
        sizes: Sizes[int],
        *,
        bias: bool,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.tp: TensorParallel | None = None
        self.num_k_heads, self.num_v_heads = linear.num_k_heads, linear.num_v_heads
        self.head_k_dim, self.head_v_dim = linear.head_k_dim, linear.head_v_dim
        self.sizes, C = tuple(sizes), sum(sizes)
        self.conv1d = nn.Conv1d(C, C, linear.conv_size, groups=C, bias=bias, dtype=dtype)
        self.dt_bias = nn.Parameter(torch.empty(self.num_v_heads, dtype=dtype))
        self.A_log = nn.Parameter(torch.empty(self.num_v_heads, dtype=dtype))

    def apply_convolution(self, xs_BTC: Sizes[Tensor], sequence: Sequence) -> list[Tensor]:
        """Apply the short convolution and silu to local channels, one tensor per kind."""
        bias = None if self.conv1d.bias is None else self._slice_channels(self.conv1d.bias)
        filters = self._slice_channels(self.conv1d.weight).squeeze(1), bias
        mixed_BTC = causal_conv1d(torch.cat(list(xs_BTC), -1), *filters, sequence, apply_silu=True)
        return list(mixed_BTC.split([part.shape[-1] for part in xs_BTC], dim=-1))

    def compute_time_steps(self, a_BTH: Tensor) -> Tensor:
        """Return the time steps softplus(a + dt_bias), [B, T, H], in fp32, or fp64 if a is."""
        return F.softplus(upcast_to_fp32(a_BTH) + self.slice_local_heads(self.dt_bias))

    def compute_decay_rates(self) -> Tensor:
        """Return -exp(A_log) of each local head, fp32 [H]: log-decay per unit of the time step."""
        return -upcast_to_fp32(self.slice_local_heads(self.A_log)).exp()

    def slice_local_heads(self, param: nn.Parameter) -> Tensor:
        """Slice a parameter with one value per head, replicated over tp, to this rank's heads."""
        full_param = get_local_param(param)
        return full_param if self.tp is None else full_param.chunk(self.tp.size)[self.tp.rank]

    def _slice_channels(self, param: Tensor) -> Tensor:
        full_param = get_local_param(param)
        if self.tp is None:
            return full_param
        parts = full_param.split(self.sizes)
        return torch.cat([part.chunk(self.tp.size)[self.tp.rank] for part in parts])

    def init_weights(self, *, key: str, seed: int) -> None:
        """Draw filters as Conv1d does, decay rates from U(min_decay_rate, 16); set `dt_bias` to 1.

        The values depend only on `key` (the module's name), `seed` and parameter names.
        """
        bound = self.conv1d.weight.shape[-1] ** -0.5
        for name, param in self.conv1d.named_parameters():
            init_uniform_(param, bound=bound, key=f"{key}.conv1d.{name}", seed=seed)
        get_local_tensor(self.dt_bias).fill_(1.0)
        half = (16 - self.min_decay_rate) / 2
        init_uniform_(self.A_log, bound=half, key=f"{key}.A_log", seed=seed)
        get_local_tensor(self.A_log).add_(16 - half).log_()


def upcast_to_fp32(x: Tensor) -> Tensor:
    """Return x in fp32, or unchanged if it is fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class GatedDeltaNet(LinearAttention):
    """Linear attention with the gated delta rule and an output gate (Qwen3-Next)."""

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
        """Return the layer's output [B, t, D] of this rank's normed tokens, before the residual."""
        k, v, r = self.head_k_dim, self.head_v_dim, self.num_v_heads // self.num_k_heads
        qkvz, ba = apply_column_linears(x_BTD, (self.in_proj_qkvz, self.in_proj_ba), self.tp)
        parts = qkvz.unflatten(-1, (-1, 2 * (k + r * v))).split((k, k, r * v, r * v), dim=-1)
        *qkv, z = (part.flatten(2) for part in parts)
        b_BTH, a_BTH = (part.flatten(2) for part in ba.unflatten(-1, (-1, 2, r)).unbind(-2))
        qkv = self.apply_convolution(qkv, sequence)
        of_heads = [x.unflatten(-1, (-1, d)) for x, d in zip(qkv, (k, k, v), strict=True)]
        gates = self.compute_decay_rates() * self.compute_time_steps(a_BTH), b_BTH.sigmoid()
        o_BTHv = attend_linear(*of_heads, *gates, sequence, scale=k**-0.5, norm_qk=True)
        gate_BTHv = F.silu(upcast_to_fp32(z.unflatten(-1, (-1, v))))
        y_BTHv = (self.norm(o_BTHv) * gate_BTHv).to(o_BTHv.dtype)
        return apply_row_linear(y_BTHv.flatten(2), self.out_proj, self.tp)


MIN_STEP, MAX_STEP = 1e-3, 0.1  # of a new layer


class Mamba2(LinearAttention):
    """Linear attention as a state space model with time steps, a skip and an output gate."""

    min_decay_rate = 1.0

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
        """Return the layer's output [B, t, D] of this rank's normed tokens, before the residual."""
        k, v, r = self.head_k_dim, self.head_v_dim, self.num_v_heads // self.num_k_heads
        (rows,) = apply_column_linears(x_BTD, (self.in_proj,), self.tp)
        sizes = (r * v, r * v, k, k, r)
        parts = rows.unflatten(-1, (-1, sum(sizes))).split(sizes, dim=-1)
        z, *mixed, dt_BTH = (part.flatten(2) for part in parts)
        mixed = self.apply_convolution(mixed, sequence)
        dims = zip(mixed, (v, k, k), strict=True)
        x_BTHv, B_BThk, C_BThk = (part.unflatten(-1, (-1, d)) for part, d in dims)
        steps_BTH = self.compute_time_steps(dt_BTH).clamp(min=self.min_step)
        rates_H, skip_H = self.compute_decay_rates(), self.slice_local_heads(self.D)
        y_BTHv = scan_states(x_BTHv, steps_BTH, rates_H, B_BThk, C_BThk, skip_H, sequence)
        y_BTC = self.norm(y_BTHv.flatten(2), z).to(x_BTD.dtype)
        return apply_row_linear(y_BTC, self.out_proj, self.tp)

    def init_weights(self, *, key: str, seed: int) -> None:
        """Initialise as `LinearAttention` does, but set the skip to 1 and draw `dt_bias`.

        softplus(dt_bias) is a time step whose logarithm is U(log MIN_STEP, log MAX_STEP).
        """
        super().init_weights(key=key, seed=seed)
        get_local_tensor(self.D).fill_(1.0)
        half = math.log(MAX_STEP / MIN_STEP) / 2
        init_uniform_(self.dt_bias, bound=half, key=f"{key}.dt_bias", seed=seed)
        steps = get_local_tensor(self.dt_bias).add_(half + math.log(MIN_STEP)).exp_()
        steps.add_(torch.log(-torch.expm1(-steps)))  # softplus gives the step


class GatedGroupNorm(RMSNorm):
    """RMSNorm of x * silu(gate) over each group of heads, with one weight per element."""

    def __init__(
        self, num_groups: int, dim: int, eps: float, *, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(dim, eps, dtype=dtype)
        self.group_dim = dim // num_groups

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        """Return the gated and normed x of this rank's heads, in the shape of x."""
        weight = get_local_param(self.weight)
        if self.tp is not None:
            weight = weight.chunk(self.tp.size)[self.tp.rank]
        h = (upcast_to_fp32(x) * F.silu(upcast_to_fp32(gate))).unflatten(-1, (-1, self.group_dim))
        return weight * F.rms_norm(h, (self.group_dim,), None, self.eps).flatten(-2).to(x.dtype)
