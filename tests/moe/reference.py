"""The whole MoE layer in plain PyTorch, one process, differentiable: the truth of every test.

Nothing here is shared with the production path: every expert runs on every token, a mask picks
what counts, and nothing is sorted, gathered or grouped. Memory E times that of a dense layer.
Who chooses whom is decided on the host, token by token: `reference_route.py`.

Legend: B sequences, T tokens, N = B T, D model dim, L dim of the routed experts (D, or the latent
dim), F hidden dim, E experts, K experts per token, n shared experts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moecore.base.options.layer import MoEConfig
from tests.moe.reference_route import ReferenceRouting, route_reference


@dataclass(frozen=True, slots=True)
class ReferenceOutput:
    """What `moe_reference` computes.

    Attributes:
        y_BTD: the layer's output, dtype of x.
        losses: "micro_batch", "sequence", "global_batch" and "z", fp32 scalars with their
            coefficients applied; "global_batch" is over these tokens alone.
        counts_E: assignments of each expert before capacity dropped any, int64.
        mean_scores_E: mean score of each expert over the real tokens, fp32, differentiable.
        routing: who was chosen, who stayed, and with which weight.
    """

    y_BTD: Tensor
    losses: dict[str, Tensor]
    counts_E: Tensor
    mean_scores_E: Tensor
    routing: ReferenceRouting


def moe_reference(
    x_BTD: Tensor,
    params: Mapping[str, Tensor],
    config: MoEConfig,
    *,
    training: bool = True,
    padding_mask_BT: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    given_ids_NK: Tensor | None = None,
    given_weights_NK: Tensor | None = None,
    jitter_ND: Tensor | None = None,
) -> ReferenceOutput:
    """Return the layer's output and its auxiliary losses for one micro-batch of one data rank.

    Args:
        x_BTD: [B, T, D].
        params: name -> whole tensor, under moecore's own names: "router.weight", "router.bias",
            "router.expert_bias", "experts.w1", "experts.b1", "experts.w2", "experts.b2",
            "latent.w_down", "latent.w_up", "shared.w1", "shared.w2", "shared.gate"; those that
            the config asks for.
        config: the layer.
        training: the mode; it decides about capacity, Sinkhorn and jitter.
        padding_mask_BT: bool, True = padding; None = none.
        cu_seqlens: whole numbers [n + 1], documents over all rows; None = rows.
        given_ids_NK: expert ids that are chosen instead, -1 = no choice; capacity still drops.
        given_weights_NK: their weights, constants; None = those of the logits.
        jitter_ND: the factors that jitter drew; None = 1.

    Returns:
        The output; losses are those of training in both modes.
    """
    B, T, D = x_BTD.shape
    x_ND = x_BTD.reshape(B * T, D)
    real_BT = torch.ones(B, T, dtype=torch.bool, device=x_ND.device)
    if padding_mask_BT is not None:
        real_BT = ~padding_mask_BT
    router_x_ND = x_ND if jitter_ND is None or not training else x_ND.float() * jitter_ND
    # Experts that return their input are experts to the router and to losses.
    E = config.num_experts + config.zero_experts
    wide = replace(config, num_experts=E, zero_experts=0)
    borders = [b * T for b in range(B + 1)] if cu_seqlens is None else cu_seqlens.tolist()
    routing = route_reference(
        router_x_ND,
        real_BT.flatten(),
        borders,
        params,
        wide,
        training=training,
        given_ids_NK=given_ids_NK,
        given_weights_NK=given_weights_NK,
    )
    y_ND = _routed(x_ND, routing, params, config)
    for i in range(config.num_shared_experts if config.shared_hidden_dim else 0):
        y_ND = y_ND + _shared(x_ND, i, params, config)
    losses = _losses(routing, borders, wide)
    counts_E = routing.chosen_NE.sum(0)
    mean_scores_E = routing.real_mean(routing.scores_NE)
    return ReferenceOutput(y_ND.view(B, T, D), losses, counts_E, mean_scores_E, routing)


def _routed(
    x_ND: Tensor, routing: ReferenceRouting, params: Mapping[str, Tensor], config: MoEConfig
) -> Tensor:
    """Return the sum over the routed experts, [N, D]."""
    rows_NL = x_ND @ params["latent.w_down"].T if config.latent_dim else x_ND
    weights_EN1 = routing.weights_NE.T.unsqueeze(-1)
    parts_ENL = _experts(rows_NL, weights_EN1[: config.num_experts], params, config)
    own_ENL = rows_NL * weights_EN1[config.num_experts :]
    parts_ENL = torch.cat([parts_ENL.to(own_ENL.dtype), own_ENL])
    parts_ENL = torch.where(routing.kept_NE.T.unsqueeze(-1), parts_ENL, 0)
    dtype = torch.promote_types(rows_NL.dtype, torch.float32)
    y_NL = parts_ENL.sum(0, dtype=dtype).to(x_ND.dtype)
    if config.latent_norm_eps is not None:
        mean_N1 = y_NL.square().mean(-1, keepdim=True)
        y_NL = y_NL * (mean_N1 + config.latent_norm_eps).rsqrt() * params["latent.norm"]
    return y_NL @ params["latent.w_up"].T if config.latent_dim else y_NL


def _experts(
    x_NL: Tensor, weights_EN1: Tensor, params: Mapping[str, Tensor], config: MoEConfig
) -> Tensor:
    """Return every expert's output for every token, [E, N, L]."""
    x_ENL = x_NL.expand(config.num_experts, *x_NL.shape)
    if config.weights_on_input:
        x_ENL = (x_ENL * weights_EN1).to(x_NL.dtype)
        weights_EN1 = torch.ones_like(weights_EN1)
    h = x_ENL @ params["experts.w1"].flatten(1, -2).mT
    if config.fc1_bias:
        h = h + params["experts.b1"].flatten(1).unsqueeze(1)
    a = (_activation(h, config) * weights_EN1).to(x_NL.dtype)
    y = a @ params["experts.w2"].mT
    if config.fc2_bias:
        y = y + (params["experts.b2"].unsqueeze(1) * weights_EN1).to(y.dtype)
    return y


def _shared(x_ND: Tensor, i: int, params: Mapping[str, Tensor], config: MoEConfig) -> Tensor:
    """Return shared expert i's output, gate included."""
    n, F, D = config.num_shared_experts, config.shared_hidden_dim, config.dim
    # All gates of all n experts come before all ups.
    w1_XFD = params["shared.w1"].reshape(-1, n, F, D)[:, i]
    w2_DF = params["shared.w2"][:, i * F : (i + 1) * F]
    a_NF = _activation(x_ND @ w1_XFD.flatten(0, 1).T, config).to(x_ND.dtype)
    y_ND = a_NF @ w2_DF.T
    if config.shared_gate:
        gate_N1 = torch.sigmoid((x_ND @ params["shared.gate"][i : i + 1].T).float())
        y_ND = (y_ND * gate_N1).to(x_ND.dtype)
    return y_ND


def _activation(h: Tensor, config: MoEConfig) -> Tensor:
    h = h.to(torch.promote_types(h.dtype, torch.float32))
    if config.activation == "relu":
        return h.clamp(min=0)
    if config.activation == "relu2":
        return h.clamp(min=0) ** 2
    if config.activation == "silu":
        return h * torch.sigmoid(h)
    if config.activation == "gelu":
        return 0.5 * h * (1 + torch.erf(h / 2**0.5))
    F = h.shape[-1] // 2
    gate, up = h[..., :F], h[..., F:]
    if config.activation == "swiglu":
        return gate * torch.sigmoid(gate) * up
    if config.activation == "geglu":
        inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
        return 0.5 * gate * (1 + torch.tanh(inner)) * up
    b, c = config.activation_limit, config.activation_up_limit or config.activation_limit
    if config.activation == "situ_glu":
        return b * torch.tanh(gate / b) * torch.sigmoid(gate) * (c * torch.tanh(up / c))
    gate = torch.minimum(gate, torch.tensor(b))
    up = torch.clip(up, -c, c)
    if config.activation == "limited_swiglu":
        return gate * torch.sigmoid(gate) * up
    return gate * torch.sigmoid(config.activation_alpha * gate) * (1 + up)


def _losses(routing: ReferenceRouting, borders: list[int], config: MoEConfig) -> dict[str, Tensor]:
    E, K, balance = config.num_experts, config.top_k, config.balance
    counted_NE = routing.counted_NE.float()
    mean_scores_E = routing.real_mean(routing.scores_NE)
    even = E * (routing.real_mean(counted_NE) / K * mean_scores_E).sum()
    shares_E = counted_NE.sum(0) / counted_NE.sum().clamp(min=1)
    globally = E * (shares_E * mean_scores_E).sum()
    per_sequence, num_sequences = torch.zeros_like(even), 0
    for part in map(slice, borders, borders[1:]):
        f_E = routing.real_mean(counted_NE, part) / K
        num_sequences += int(routing.real_N[part].any())
        per_sequence = per_sequence + E * (f_E * routing.real_mean(routing.scores_NE, part)).sum()
    top_N1 = routing.logits_NE.amax(-1, keepdim=True)
    sums_N = torch.exp(routing.logits_NE - top_N1).sum(-1)
    z = routing.real_mean((top_N1[:, 0] + torch.log(sums_N)).square()).float()
    return {
        "micro_batch": balance.micro_batch_coef * even,
        "sequence": balance.sequence_coef * per_sequence / max(num_sequences, 1),
        "global_batch": balance.global_batch_coef * globally,
        "z": balance.z_loss_coef * z,
    }
