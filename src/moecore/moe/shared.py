"""The shared expert: a dense MLP that every token passes, added to the routed experts' output.

Legend: T local tokens, D model dim, F hidden dim of the shared expert.

Under sequence parallelism every tp rank holds other tokens, so its weights are whole on each tp
rank and need no communication.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moecore.config import MoEConfig
from moecore.kernels.activation import weighted_activation
from moecore.moe.activation import activation_options
from moecore.moe.params import init_normal_, local_param


class SharedExpert(nn.Module):
    """w2 @ act(w1 @ x), times sigmoid(gate @ x) when the layer asks for a gate.

    Parameters: `w1` [2F or F, D], `w2` [D, F], and `gate` [1, D] with `config.shared_gate`.

    Args:
        config: the layer; F is `config.shared_hidden_dim`.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        D, F_ = config.dim, config.shared_hidden_dim
        fc1_dim = F_ * (2 if config.gated else 1)
        self.w1 = nn.Parameter(torch.empty(fc1_dim, D, device=device, dtype=dtype))
        self.w2 = nn.Parameter(torch.empty(D, F_, device=device, dtype=dtype))
        gate = torch.empty(1, D, device=device, dtype=dtype) if config.shared_gate else None
        self.gate = None if gate is None else nn.Parameter(gate)

    def init_weights(self, *, std: float, key: str, seed: int) -> None:
        """Fill the weights with N(0, std^2), the same on every layout."""
        for name, parameter in self.named_parameters(recurse=False):
            init_normal_(parameter, std=std, key=f"{key}.{name}", seed=seed)

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return y_TD in the dtype of x_TD."""
        h_TF = F.linear(x_TD, local_param(self.w1))
        a_TF = weighted_activation(h_TF, None, None, activation_options(self.config))
        y_TD = F.linear(a_TF, local_param(self.w2))
        if self.gate is None:
            return y_TD
        gate_T1 = torch.sigmoid(F.linear(x_TD, local_param(self.gate)).float())
        return (y_TD * gate_T1).to(x_TD.dtype)
