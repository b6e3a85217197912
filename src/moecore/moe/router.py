"""Router(x_TD) -> Routing: which experts each token goes to, and with which weight.

Legend: T local tokens, D model dim, E experts, K experts per token.

Logits, scores and weights are fp32 (or fp64), whatever the dtype of x: a rounded score picks
another expert, which no later precision repairs. The router's own weight still arrives in FSDP2's
`param_dtype`. Among equal scores the lower expert id wins.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moecore.config import MoEConfig
from moecore.kernels.route import RouteOptions, route
from moecore.kernels.router_logits import router_logits, router_logits_ref
from moecore.moe.params import init_normal_, local_param


@dataclass(frozen=True, slots=True)
class Routing:
    """The decision for T tokens.

    Attributes:
        expert_ids_TK: int32, global expert ids, best first; -1 = dropped.
        weights_TK: fp32, factor on the expert's output; differentiable.
        logits_TE: router dtype, differentiable; for the balance losses.
    """

    expert_ids_TK: Tensor
    weights_TK: Tensor
    logits_TE: Tensor


class Router(nn.Module):
    """A linear layer, a score function and a top-k choice.

    Parameters and buffers: `weight` [E, D]; `bias` [E] when `config.router_bias`; buffer
    `expert_bias` [E] fp32 when `config.expert_bias` (under the name `expert_bias_name`).

    Args:
        config: the layer.
        expert_bias_name: name of the selection bias buffer, for models that have their own.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        expert_bias_name: str = "expert_bias",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.expert_bias_name = expert_bias_name
        E, D = config.num_experts, config.dim
        self.weight = nn.Parameter(torch.empty(E, D, device=device, dtype=dtype))
        bias = torch.empty(E, device=device, dtype=dtype) if config.router_bias else None
        self.bias = None if bias is None else nn.Parameter(bias)
        if config.expert_bias:
            buffer = torch.zeros(E, device=device, dtype=torch.float32)
            self.register_buffer(expert_bias_name, buffer)

    @property
    def selection_bias(self) -> Tensor | None:
        """The fp32 [E] buffer added to the scores for selection, or None."""
        return self._buffers.get(self.expert_bias_name)

    def _apply(self, fn: Any, recurse: bool = True) -> Router:
        """Move like any module, but keep the selection bias in fp32: its steps are small."""
        bias = self.selection_bias
        super()._apply(fn, recurse)
        moved = self.selection_bias
        if bias is not None and moved is not None and moved.dtype != bias.dtype:
            self._buffers[self.expert_bias_name] = bias.to(moved.device)
        return self

    def init_weights(self, *, std: float, key: str, seed: int) -> None:
        """Fill the parameters, the same on every layout; biases become 0."""
        init_normal_(self.weight, std=std, key=f"{key}.weight", seed=seed)
        for tensor in (self.bias, self.selection_bias):
            if tensor is not None:
                nn.init.zeros_(tensor)

    def forward(self, x_TD: Tensor) -> Routing:
        """Route T tokens.

        Args:
            x_TD: any float dtype.

        Returns:
            The routing of these tokens; no host sync.
        """
        weight_ED = local_param(self.weight)
        bias_E = None if self.bias is None else local_param(self.bias)
        with _no_autocast(x_TD):
            if self.config.router_dtype == "float64":
                logits_TE = router_logits_ref(x_TD, weight_ED, bias_E, dtype=torch.float64)
            else:
                logits_TE = router_logits(x_TD, weight_ED, bias_E)
            ids_TK, weights_TK = route(logits_TE, self.selection_bias, _options(self.config))
        return Routing(expert_ids_TK=ids_TK, weights_TK=weights_TK, logits_TE=logits_TE)


def _options(config: MoEConfig) -> RouteOptions:
    return RouteOptions(
        top_k=config.top_k,
        score_function=config.score_function,
        score_order=config.score_order,
        normalize=config.normalize_weights,
        scale=config.routed_scaling_factor,
        num_groups=config.num_groups,
        top_groups=config.top_groups,
        balanced=config.assignment == "balanced",
    )


def _no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Autocast knows no meta device, and nothing rounds there."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
