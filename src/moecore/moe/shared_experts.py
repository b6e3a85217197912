"""Modules that process every token: shared experts, and the projections of a LatentMoE layer.

Legend: T local tokens, D model dim, n shared experts, F hidden dim of all n shared experts, L
latent dim, the dim of dispatched rows and routed experts.

With sequence parallelism every tp rank has other tokens. These weights are therefore replicated on
all tp ranks and need no communication.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moecore.base.options.layer import MoEConfig
from moecore.base.params import get_local_param, init_normal_
from moecore.kernels.linear import LinearProducts, PlainProducts
from moecore.kernels.rows.activation import weighted_activation
from moecore.moe.experts import make_activation_options


def _make_matrix(
    *shape: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))


class _MatrixModule(nn.Module):
    """Base class of modules whose parameters are matrices."""

    def init_weights(self, *, std: float, key: str, seed: int) -> None:
        """Draw weights from N(0, std^2), which depend only on `key`, `seed` and parameter names."""
        for name, parameter in self.named_parameters(recurse=False):
            init_normal_(parameter, std=std, key=f"{key}.{name}", seed=seed)


class SharedExpert(_MatrixModule):
    """The sum of n MLPs w2 @ act(w1 @ x), each optionally times sigmoid(gate @ x).

    The matrices of the n MLPs are concatenated and multiplied in one matmul. Expert i owns hidden
    columns [i * F / n, (i + 1) * F / n). With a gated activation, the rows of w1 are the gates of
    all n experts, then the up halves.

    Parameters: `w1` [2F or F, D], `w2` [D, F], and `gate` [n, D] with `config.shared_gate`; F is
    `num_shared_experts * shared_hidden_dim`.
    """

    def __init__(self, config: MoEConfig, **factory_kwargs: Any) -> None:
        super().__init__()
        self.config = config
        n = config.num_shared_experts
        D, F_ = config.dim, n * config.shared_hidden_dim
        self.w1 = _make_matrix(F_ * (2 if config.gated else 1), D, **factory_kwargs)
        self.w2 = _make_matrix(D, F_, **factory_kwargs)
        self.gate = _make_matrix(n, D, **factory_kwargs) if config.shared_gate else None
        # By w1 and by w2; the gate is never quantised.
        self.products: tuple[LinearProducts, LinearProducts] = (PlainProducts(), PlainProducts())

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return the sum of the n experts' (gated) outputs, y_TD, in the dtype of x_TD."""
        by_w1, by_w2 = self.products
        h_TF = by_w1(x_TD, self.w1)
        a_TF = weighted_activation(h_TF, None, None, make_activation_options(self.config))
        if self.gate is None:
            return by_w2(a_TF, self.w2)
        gate_Tn = torch.sigmoid(F.linear(x_TD, get_local_param(self.gate)).float())
        if self.config.num_shared_experts == 1:
            return (by_w2(a_TF, self.w2) * gate_Tn).to(x_TD.dtype)
        # w2 is linear: a gate on an expert's hidden columns is a gate on its output.
        gated_TnF = a_TF.unflatten(-1, (gate_Tn.shape[1], -1)) * gate_Tn[..., None]
        return by_w2(gated_TnF.flatten(1).to(x_TD.dtype), self.w2)


class SharedRun:
    """One forward of the shared experts, on the current stream or concurrently with dispatch.

    `forward` returns the experts' output, or None without shared experts. Forward and backward run
    on `stream`; None = the current stream. Read `y_TD` through `wait_for_output`.
    """

    def __init__(
        self,
        forward: Callable[[Tensor], Tensor | None],
        x_TD: Tensor,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self._stream = stream
        if stream is None:
            self.y_TD = forward(x_TD)
            return
        stream.wait_stream(torch.cuda.current_stream(x_TD.device))
        with torch.cuda.stream(stream):
            self.y_TD = forward(x_TD)
        x_TD.record_stream(stream)

    def wait_for_output(self) -> Tensor:
        """Make the current stream wait for the shared experts; return y_TD. No host sync."""
        assert self.y_TD is not None, "there are no shared experts to wait for"
        if self._stream is not None:
            current = torch.cuda.current_stream(self.y_TD.device)
            current.wait_stream(self._stream)
            self.y_TD.record_stream(current)
        return self.y_TD


class Latent(_MatrixModule):
    """Projections `w_down` [L, D] before dispatch and `w_up` [D, L] after combine.

    With `config.latent_norm_eps`, an RMSNorm with weight `norm` [L] is applied before `w_up`.
    Source: LatentMoE, arXiv:2603.07685.
    """

    def __init__(self, config: MoEConfig, **factory_kwargs: Any) -> None:
        super().__init__()
        D, L = config.dim, config.latent_dim
        self.w_down = _make_matrix(L, D, **factory_kwargs)
        self.w_up = _make_matrix(D, L, **factory_kwargs)
        self.eps = config.latent_norm_eps
        self.norm = None if self.eps is None else _make_matrix(L, **factory_kwargs)

    def init_weights(self, *, std: float, key: str, seed: int) -> None:
        """Draw matrices from N(0, std^2) by `key` and `seed`, and set the norm's weight to 1."""
        super().init_weights(std=std, key=key, seed=seed)
        if self.norm is not None:
            nn.init.ones_(self.norm)

    def project_down(self, x_TD: Tensor) -> Tensor:
        """Return x @ w_down^T, [T, L] with the latent dim L, in the dtype of x."""
        return F.linear(x_TD, get_local_param(self.w_down).to(x_TD.dtype))

    def project_up(self, y_TL: Tensor) -> Tensor:
        """Return norm(y) @ w_up^T, or y @ w_up^T without a norm, [T, D], in the dtype of y."""
        if self.norm is not None:
            weight = get_local_param(self.norm).to(y_TL.dtype)
            y_TL = F.rms_norm(y_TL, weight.shape, weight, self.eps)
        return F.linear(y_TL, get_local_param(self.w_up).to(y_TL.dtype))
