"""Router(x_TD) -> Routing: which experts each token goes to, and with which weight.

Legend: T local tokens, D model dim, E experts, K experts per token, G expert groups.

Logits, scores and weights are fp32 (or fp64), whatever the dtype of x: a rounded score picks
another expert, which no later precision repairs. The router's own weight still arrives in FSDP2's
`param_dtype`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moecore.config import MoEConfig
from moecore.moe.params import init_normal_, local_param

ROUTER_DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True, slots=True)
class Routing:
    """The decision for T tokens.

    Attributes:
        expert_ids_TK: int32, global expert ids, best first; -1 = dropped.
        weights_TK: fp32, factor on the expert's output; differentiable.
        scores_TE: fp32, each token's scores over all experts, summing to 1; for balance losses.
        logits_TE: router dtype; for the z-loss.
    """

    expert_ids_TK: Tensor
    weights_TK: Tensor
    scores_TE: Tensor
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
        config = self.config
        dtype = ROUTER_DTYPES[config.router_dtype]
        with _no_autocast(x_TD):
            bias = None if self.bias is None else local_param(self.bias).to(dtype)
            logits_TE = F.linear(x_TD.to(dtype), local_param(self.weight).to(dtype), bias)
            scores_TE = _scores(logits_TE, config)
            selection_TE = scores_TE if config.score_order == "pre" else logits_TE
            ids_TK = select_experts(selection_TE.detach(), self.selection_bias, config)
            weights_TK = _weights(logits_TE, scores_TE, ids_TK, config)
        return Routing(
            expert_ids_TK=ids_TK.to(torch.int32),
            weights_TK=weights_TK.float(),
            scores_TE=_normalized(scores_TE, config).float(),
            logits_TE=logits_TE,
        )


def _no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Autocast knows no meta device, and nothing rounds there."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def select_experts(scores_TE: Tensor, expert_bias_E: Tensor | None, config: MoEConfig) -> Tensor:
    """Return the ids [T, K] int64 of the K best experts of each token, best first.

    Experts of groups that are not among the `top_groups` best are excluded whatever their score.

    Example, E=4, two groups, top_groups=1, K=2: scores [.1 .6 .5 .4] have group sums .7 and .9,
    so the ids are [2, 3] although expert 1 has the best score.
    """
    T, E = scores_TE.shape
    if config.assignment == "balanced":
        slots = torch.arange(T * config.top_k, device=scores_TE.device)
        return (slots % E).view(T, config.top_k)
    if expert_bias_E is not None:
        scores_TE = scores_TE + expert_bias_E
    if config.top_groups < config.num_groups:
        scores_TGe = scores_TE.view(T, config.num_groups, E // config.num_groups)
        group_scores_TG = scores_TGe.topk(2, dim=-1).values.sum(-1)
        kept = group_scores_TG.topk(config.top_groups, dim=-1).indices
        keep_TG = torch.zeros_like(group_scores_TG, dtype=torch.bool).scatter_(1, kept, True)
        scores_TE = scores_TGe.masked_fill(~keep_TG[..., None], float("-inf")).view(T, E)
    return scores_TE.topk(config.top_k, dim=-1).indices


def _scores(logits_TE: Tensor, config: MoEConfig) -> Tensor:
    return logits_TE.sigmoid() if config.score_function == "sigmoid" else logits_TE.softmax(-1)


def _weights(logits_TE: Tensor, scores_TE: Tensor, ids_TK: Tensor, config: MoEConfig) -> Tensor:
    if config.score_order == "post":
        weights_TK = logits_TE.gather(1, ids_TK).softmax(-1)
    else:
        weights_TK = scores_TE.gather(1, ids_TK)
        if config.normalize_weights:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return weights_TK * config.routed_scaling_factor


def _normalized(scores_TE: Tensor, config: MoEConfig) -> Tensor:
    if config.score_function == "softmax":
        return scores_TE
    return scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20)
