"""The whole MoE layer in plain PyTorch, one process, differentiable: the truth of every test.

Nothing here is shared with the production path: every expert runs on every token, a mask picks
what counts, and nothing is sorted, gathered or grouped. Memory E times that of a dense layer.

Legend: B sequences, T tokens, D model dim, F hidden dim, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moecore.config import MoEConfig


@dataclass(frozen=True, slots=True)
class ReferenceOutput:
    """What `moe_reference` computes.

    Attributes:
        y_BTD: the layer's output, dtype of x.
        losses: "micro_batch", "sequence", "global_batch" and "z", fp32 scalars with their
            coefficients applied; "global_batch" is over these tokens alone.
        counts_E: assignments of each expert, int64.
        mean_scores_E: mean score of each expert, fp32, differentiable.
    """

    y_BTD: Tensor
    losses: dict[str, Tensor]
    counts_E: Tensor
    mean_scores_E: Tensor


def moe_reference(
    x_BTD: Tensor, params: Mapping[str, Tensor], config: MoEConfig
) -> ReferenceOutput:
    """Return the layer's output and its auxiliary losses for one micro-batch of one data rank.

    Args:
        x_BTD: [B, T, D].
        params: name -> whole tensor, under moecore's own names: "router.weight", "router.bias",
            "router.expert_bias", "experts.w1", "experts.b1", "experts.w2", "experts.b2",
            "shared.w1", "shared.w2", "shared.gate"; those that the config asks for.
        config: the layer.
    """
    B, T, D = x_BTD.shape
    x_ND = x_BTD.reshape(B * T, D)
    logits_NE, scores_NE, chosen_NE, weights_NE = _route(x_ND, params, config)
    y_ND = torch.zeros(B * T, D, dtype=torch.promote_types(x_ND.dtype, torch.float32))
    y_ND = y_ND.to(x_ND.device)
    for e in range(config.num_experts):
        part = _expert(x_ND, weights_NE[:, e : e + 1], e, params, config)
        y_ND = y_ND + torch.where(chosen_NE[:, e : e + 1], part, 0)
    y_ND = y_ND.to(x_ND.dtype)
    if config.shared_hidden_dim:
        h = _activation(x_ND @ params["shared.w1"].T, config).to(x_ND.dtype)
        shared_ND = h @ params["shared.w2"].T
        if config.shared_gate:
            gate_N1 = torch.sigmoid((x_ND @ params["shared.gate"].T).float())
            shared_ND = (shared_ND * gate_N1).to(x_ND.dtype)
        y_ND = y_ND + shared_ND
    losses = _losses(logits_NE, scores_NE, chosen_NE, B, config)
    return ReferenceOutput(y_ND.view(B, T, D), losses, chosen_NE.sum(0), scores_NE.mean(0))


def _route(
    x_ND: Tensor, params: Mapping[str, Tensor], config: MoEConfig
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return logits, scores that sum to 1, the chosen mask and dense weights, all [N, E]."""
    dtype = getattr(torch, config.router_dtype)
    logits_NE = x_ND.to(dtype) @ params["router.weight"].to(dtype).T
    if config.router_bias:
        logits_NE = logits_NE + params["router.bias"].to(dtype)
    if config.score_function == "sigmoid":
        scores_NE = 1 / (1 + torch.exp(-logits_NE))
    else:
        exps = torch.exp(logits_NE - logits_NE.amax(-1, keepdim=True))
        scores_NE = exps / exps.sum(-1, keepdim=True)
    selection_NE = (scores_NE if config.score_order == "pre" else logits_NE).detach().clone()
    if config.expert_bias:
        selection_NE += params["router.expert_bias"]
    chosen_NE = _choose(selection_NE, config)
    if config.score_order == "post":
        masked = logits_NE.masked_fill(~chosen_NE, float("-inf"))
        weights_NE = torch.exp(masked - masked.amax(-1, keepdim=True))
        weights_NE = weights_NE / weights_NE.sum(-1, keepdim=True)
    else:
        weights_NE = torch.where(chosen_NE, scores_NE, 0)
        if config.normalize_weights:
            weights_NE = weights_NE / weights_NE.sum(-1, keepdim=True)
    weights_NE = (weights_NE * config.routed_scaling_factor).float()
    normalized_NE = scores_NE / scores_NE.sum(-1, keepdim=True)
    return logits_NE, normalized_NE.float(), chosen_NE, weights_NE


def _choose(selection_NE: Tensor, config: MoEConfig) -> Tensor:
    """Token by token, on the host: rank groups, then experts."""
    N, E = selection_NE.shape
    chosen_NE = torch.zeros(N, E, dtype=torch.bool, device=selection_NE.device)
    for n, row in enumerate(selection_NE.tolist()):
        if config.assignment == "balanced":
            picks = [(n * config.top_k + k) % E for k in range(config.top_k)]
        else:
            size = E // config.num_groups
            groups = list(range(config.num_groups))
            if config.top_groups < config.num_groups:
                best = {g: sum(sorted(row[g * size : (g + 1) * size])[-2:]) for g in groups}
                groups = sorted(groups, key=lambda g: -best[g])[: config.top_groups]
            allowed = [e for g in groups for e in range(g * size, (g + 1) * size)]
            picks = sorted(allowed, key=lambda e: -row[e])[: config.top_k]
        chosen_NE[n, picks] = True
    return chosen_NE


def _expert(
    x_ND: Tensor, weight_N1: Tensor, e: int, params: Mapping[str, Tensor], config: MoEConfig
) -> Tensor:
    h = x_ND @ params["experts.w1"][e].flatten(0, -2).T
    if config.fc1_bias:
        h = h + params["experts.b1"][e].flatten()
    a = (_activation(h, config) * weight_N1).to(x_ND.dtype)
    y = a @ params["experts.w2"][e].T
    if config.fc2_bias:
        y = y + (params["experts.b2"][e] * weight_N1).to(y.dtype)
    return y


def _activation(h: Tensor, config: MoEConfig) -> Tensor:
    h = h.to(torch.promote_types(h.dtype, torch.float32))
    if config.activation == "relu2":
        return h.clamp(min=0) ** 2
    F = h.shape[-1] // 2
    gate, up = h[..., :F], h[..., F:]
    if config.activation == "swiglu":
        return gate / (1 + torch.exp(-gate)) * up
    if config.activation == "geglu":
        inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
        return 0.5 * gate * (1 + torch.tanh(inner)) * up
    gate = torch.minimum(gate, torch.tensor(config.activation_limit))
    up = torch.clip(up, -config.activation_limit, config.activation_limit)
    return gate / (1 + torch.exp(-config.activation_alpha * gate)) * (1 + up)


def _losses(
    logits_NE: Tensor, scores_NE: Tensor, chosen_NE: Tensor, B: int, config: MoEConfig
) -> dict[str, Tensor]:
    E, K, balance = config.num_experts, config.top_k, config.balance
    share_BTE = chosen_NE.float().view(B, -1, E) / K
    scores_BTE = scores_NE.view(B, -1, E)
    even = E * (share_BTE.mean((0, 1)) * scores_BTE.mean((0, 1))).sum()
    per_sequence = E * (share_BTE.mean(1) * scores_BTE.mean(1)).sum(-1).mean()
    top_N1 = logits_NE.amax(-1, keepdim=True)
    z = (top_N1[:, 0] + torch.log(torch.exp(logits_NE - top_N1).sum(-1))).square().mean().float()
    return {
        "micro_batch": balance.micro_batch_coef * even,
        "sequence": balance.sequence_coef * per_sequence,
        "global_batch": balance.global_batch_coef * even,
        "z": balance.z_loss_coef * z,
    }
