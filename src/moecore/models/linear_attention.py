"""What layers of linear attention share: a short convolution, and decays of states by head.

Legend: B sequences, T tokens of a sequence, H value heads, C channels of the convolution. Under tp
heads and channels are this rank's share where a method returns them; parameters are whole on each
tp rank, which reads its heads'.
"""

from __future__ import annotations

from collections.abc import Sequence as Sizes

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moecore.attention.linear import convolve
from moecore.attention.sequence import Sequence
from moecore.base.params import init_uniform_, local_param
from moecore.base.torch_private import local_of
from moecore.models.config import LinearAttentionConfig
from moecore.models.tensor_parallel import TensorParallel


class LinearAttention(nn.Module):
    """Dims, filters and decays of a layer; subclasses have projections, a rule and a norm.

    Channels are kinds one after the other, `sizes` of each over all tp ranks, in the order of
    heads.
    """

    is_eager = True  # in no CUDA graph: a package reads the borders of documents on the host
    least_decay = 0.01  # of a step of 1, in the logarithm; at most 16

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

    def convolved(self, parts_BTC: Sizes[Tensor], sequence: Sequence) -> list[Tensor]:
        """Return each kind of channels after the convolution and silu."""
        bias = None if self.conv1d.bias is None else self._channels(self.conv1d.bias)
        filters = self._channels(self.conv1d.weight).squeeze(1), bias
        mixed_BTC = convolve(torch.cat(list(parts_BTC), -1), *filters, sequence, silu=True)
        return list(mixed_BTC.split([part.shape[-1] for part in parts_BTC], dim=-1))

    def steps(self, a_BTH: Tensor) -> Tensor:
        """Return softplus(a + dt_bias), at least in fp32."""
        return F.softplus(wide(a_BTH) + self.local_heads(self.dt_bias))

    def rates(self) -> Tensor:
        """Return the logarithm of each head's decay in a step of 1, negative, [H]."""
        return -wide(self.local_heads(self.A_log)).exp()

    def local_heads(self, param: nn.Parameter) -> Tensor:
        """Return this rank's part of a parameter by heads."""
        full_param = local_param(param)
        return full_param if self.tp is None else full_param.chunk(self.tp.size)[self.tp.rank]

    def _channels(self, param: Tensor) -> Tensor:
        full_param = local_param(param)
        if self.tp is None:
            return full_param
        parts = full_param.split(self.sizes)
        return torch.cat([part.chunk(self.tp.size)[self.tp.rank] for part in parts])

    def init_weights(self, *, key: str, seed: int) -> None:
        """Fill filters as torch does, and decays: exp(-softplus(a + 1) * U(least_decay, 16))."""
        bound = self.conv1d.weight.shape[-1] ** -0.5
        for name, param in self.conv1d.named_parameters():
            init_uniform_(param, bound=bound, key=f"{key}.conv1d.{name}", seed=seed)
        local_of(self.dt_bias).fill_(1.0)
        half = (16 - self.least_decay) / 2
        init_uniform_(self.A_log, bound=half, key=f"{key}.A_log", seed=seed)
        local_of(self.A_log).add_(16 - half).log_()


def wide(x: Tensor) -> Tensor:
    """Return x in fp32, or in fp64 as it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
