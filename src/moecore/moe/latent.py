"""The two shared projections of a LatentMoE layer, around dispatch and combine.

Legend: T local tokens, D model dim, L latent dim, in which tokens travel and experts work.

Under sequence parallelism every tp rank holds other tokens, so both matrices are whole on each tp
rank and need no communication.

Source: LatentMoE, section 7.3 of the Megatron-Core MoE report (arXiv:2603.07685).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moecore.base.options.layer import MoEConfig
from moecore.moe.params import init_normal_, local_param


class Latent(nn.Module):
    """`w_down` [L, D] before dispatch, `w_up` [D, L] after combine.

    Args:
        config: the layer; L is `config.latent_dim`.
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
        D, L = config.dim, config.latent_dim
        self.w_down = nn.Parameter(torch.empty(L, D, device=device, dtype=dtype))
        self.w_up = nn.Parameter(torch.empty(D, L, device=device, dtype=dtype))

    def init_weights(self, *, std: float, key: str, seed: int) -> None:
        """Fill the weights with N(0, std^2), the same on every layout."""
        for name, parameter in self.named_parameters(recurse=False):
            init_normal_(parameter, std=std, key=f"{key}.{name}", seed=seed)

    def down(self, x_TD: Tensor) -> Tensor:
        """Return [T, L] in the dtype of x."""
        return F.linear(x_TD, local_param(self.w_down).to(x_TD.dtype))

    def up(self, y_TL: Tensor) -> Tensor:
        """Return [T, D] in the dtype of y."""
        return F.linear(y_TL, local_param(self.w_up).to(y_TL.dtype))
