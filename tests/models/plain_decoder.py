"""The decoder and its losses once more, in plain PyTorch: shares no code with src but the config.

Every sequence is cut to the positions that exist (no padding, no masks), attention is a loop over
heads, linear attention one over tokens, rotary pairs are complex numbers, experts come from
`moe_reference`.

Legend: B sequences, T tokens of a sequence, D model dim.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from moecore.models import DecoderConfig, Mamba2Config, YarnConfig
from tests.moe.reference import moe_reference

Params = Mapping[str, Tensor]


@dataclass
class PlainLosses:
    """What one micro-batch of equally long sequences gives.

    Attributes:
        main: mean cross-entropy of the next token, or the sum over `num_tokens`.
        ahead: of each multi-token prediction module the sum over its labels, divided likewise.
        aux: every auxiliary loss of every MoE layer.
    """

    main: Tensor
    ahead: list[Tensor] = field(default_factory=list)
    aux: list[Tensor] = field(default_factory=list)

    def total(self, config: DecoderConfig) -> Tensor:
        """What training minimises."""
        extra = sum(self.ahead, torch.zeros(())) / max(1, len(self.ahead))
        return self.main + config.mtp_loss_coef * extra + sum(self.aux, torch.zeros(()))


def plain_losses(
    params: Params,
    config: DecoderConfig,
    tokens_BT: Tensor,
    labels_BT: Tensor,
    num_tokens: int | None = None,
) -> PlainLosses:
    """All losses of a decoder with these parameters (its `state_dict`, gradients attached)."""
    aux: list[Tensor] = []
    table_VD = params["model.embed_tokens.weight"]
    head_VD = table_VD if config.tie_embeddings else params["lm_head.weight"]

    def loss_of(h_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        logits = (h_BTD @ head_VD.T).flatten(0, 1)
        total = F.cross_entropy(logits, targets_BT.flatten(), ignore_index=-100, reduction="sum")
        return total / (num_tokens or max(1, int((labels_BT != -100).sum())))

    x_BTD = table_VD[tokens_BT]
    for i in range(config.num_layers):
        x_BTD = block(below(params, f"model.layers.{i}."), config, x_BTD, i, aux)
    h_BTD = normed(x_BTD, params["model.norm.weight"], config)
    losses = PlainLosses(loss_of(h_BTD, labels_BT), aux=aux)
    if config.mtp_detached:
        h_BTD, table_VD, head_VD = h_BTD.detach(), table_VD.detach(), head_VD.detach()
    for k in range(1, config.num_mtp_layers * config.mtp_repeats + 1):
        own = below(params, f"mtp.{(k - 1) // config.mtp_repeats}.")
        # Position i of T - k has the token i + k to read and the token i + k + 1 to predict.
        e_BTD = normed(table_VD[tokens_BT[:, k:]], own["enorm.weight"], config)
        h_BTD = normed(h_BTD[:, :-1], own["hnorm.weight"], config)
        x_BTD = torch.cat([e_BTD, h_BTD], -1) @ own["eh_proj.weight"].T
        x_BTD = block(below(own, "block."), config, x_BTD, config.num_layers - 1, aux)
        h_BTD = normed(x_BTD, own["norm.weight"], config)
        losses.ahead.append(loss_of(h_BTD, labels_BT[:, k:]))
    return losses


def below(params: Params, prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): p for n, p in params.items() if n.startswith(prefix)}


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def normed(x: Tensor, weight: Tensor, config: DecoderConfig) -> Tensor:
    """A norm of the decoder, not of an attention that has its own."""
    return norm(x, 1 + weight if config.zero_centered_norms else weight, config.norm_eps)


def block(
    params: Params, config: DecoderConfig, x_BTD: Tensor, layer: int, aux: list[Tensor]
) -> Tensor:
    letter = config.pattern[layer] if config.pattern else ""
    if letter not in ("E", "-"):
        x_BTD = x_BTD + mixed(params, config, x_BTD, layer)
    if letter in ("M", "*"):
        return x_BTD
    y = normed(x_BTD, params["post_attention_layernorm.weight"], config)
    own = below(params, "mlp.")
    if letter == "-" or (not letter and config.is_dense(layer)):
        return x_BTD + mlp(own, config, y)
    out = moe_reference(y, own, config.moe)
    aux.extend(out.losses.values())
    return x_BTD + out.y_BTD


def mixed(params: Params, config: DecoderConfig, x_BTD: Tensor, layer: int) -> Tensor:
    """What attention of any kind adds to the residual stream."""
    y = normed(x_BTD, params["input_layernorm.weight"], config)
    own = below(params, "self_attn.")
    if not own:
        is_mamba = isinstance(config.linear_attention, Mamba2Config)
        return (state_space if is_mamba else linear_attention)(
            below(params, "linear_attn."), config, y
        )
    if config.mla is not None:
        return latent_attention(own, config, y)
    window = (config.windows or (0,))[layer % max(1, len(config.windows))]
    return grouped_attention(own, config, y, window)


def mlp(params: Params, config: DecoderConfig, y: Tensor) -> Tensor:
    up, down = y @ params["up_proj.weight"].T, params["down_proj.weight"].T
    if config.mlp_activation == "relu2":
        return torch.where(up > 0, up * up, 0) @ down
    gate = y @ params["gate_proj.weight"].T
    return (gate * torch.sigmoid(gate) * up) @ down


def attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int = 0, sink: Tensor | None = None
) -> Tensor:
    """One head: [B, T, d] each; a window of 0 is none."""
    T = q.shape[1]
    scores = (q @ k.transpose(1, 2)) * scale
    ago = torch.arange(T)[:, None] - torch.arange(T)
    scores = scores.masked_fill((ago < 0) | (ago >= (window or T)), -math.inf)
    if sink is None:
        return scores.softmax(-1) @ v
    one_more = torch.cat((scores, sink.expand(*scores.shape[:2], 1)), dim=-1)
    return one_more.softmax(-1)[..., :-1] @ v


def turn(x: Tensor, frequencies: Tensor, scale: float, pairs: bool) -> Tensor:
    """Rotate [B, T, d] by position: neighbours are pairs, or the halves' dims are."""
    T, d = x.shape[1:]
    split = x.unflatten(-1, (d // 2, 2)) if pairs else x.unflatten(-1, (2, d // 2)).transpose(2, 3)
    angles = torch.arange(T)[:, None] * frequencies
    turned = torch.view_as_complex(split.contiguous()) * torch.polar(scale + 0 * angles, angles)
    turned = torch.view_as_real(turned)
    return (turned if pairs else turned.transpose(2, 3)).flatten(2)


def grouped_attention(params: Params, config: DecoderConfig, x: Tensor, window: int) -> Tensor:
    d, group = config.head_dim, config.num_heads // config.num_kv_heads
    r = config.rotary_dim or d
    frequencies, table_scale, _ = yarn(r, config.yarn, config.rope_theta or 1.0)
    q, k, v = (x @ params[f"{n}_proj.weight"].T + params.get(f"{n}_proj.bias", 0) for n in "qkv")
    heads, gated = [], 1 + config.attention_gate
    for h in range(config.num_heads):
        qh, *gate = q[..., gated * h * d : gated * (h + 1) * d].split(d, -1)
        kh, vh = (t[..., h // group * d : (h // group + 1) * d] for t in (k, v))
        if config.qk_norm == "head":
            qh = normed(qh, params["q_norm.weight"], config)
            kh = normed(kh, params["k_norm.weight"], config)
        if config.rope_theta is not None:
            turned = (turn(t[..., :r], frequencies, table_scale, pairs=False) for t in (qh, kh))
            qh, kh = (
                torch.cat((t, all_[..., r:]), -1) for t, all_ in zip(turned, (qh, kh), strict=True)
            )
        sink = params["sinks"][h] if "sinks" in params else None
        o = attention(qh, kh, vh, d**-0.5, window, sink)
        heads.append(o * torch.sigmoid(gate[0]) if gate else o)
    return torch.cat(heads, -1) @ params["o_proj.weight"].T + params.get("o_bias", 0)


def short_convolution(params: Params, x: Tensor) -> Tensor:
    """Each token and those before it, weighted by channel; then silu."""
    taps = params["conv1d.weight"][:, 0]
    W, T = taps.shape[1], x.shape[1]
    padded = F.pad(x, (0, 0, W - 1, 0))
    return F.silu(
        sum(padded[:, w : w + T] * taps[:, w] for w in range(W)) + params.get("conv1d.bias", 0)
    )


def state_space(params: Params, config: DecoderConfig, x: Tensor) -> Tensor:
    """Mamba-2: head by head, token by token."""
    mamba = config.linear_attention
    h, k, v = mamba.num_k_heads, mamba.head_k_dim, mamba.head_v_dim
    r = mamba.num_v_heads // h
    rows = (x @ params["in_proj.weight"].T).unflatten(-1, (h, 2 * r * v + 2 * k + r))
    z, *parts, dt = (part.flatten(2) for part in rows.split((r * v, r * v, k, k, r), -1))
    after = short_convolution(params, torch.cat(parts, -1))
    values, keys, queries = after.split((h * r * v, h * k, h * k), -1)
    outs = []
    for H in range(mamba.num_v_heads):
        where, own = slice(H // r * k, (H // r + 1) * k), slice(H * v, (H + 1) * v)
        step = F.softplus(dt[..., H] + params["dt_bias"][H]).clamp(min=mamba.min_step)
        decay = torch.exp(-step * params["A_log"][H].exp())
        state, heads = x.new_zeros(len(x), k, v), []
        for t in range(x.shape[1]):
            new = keys[:, t, where, None] * values[:, t, None, own] * step[:, t, None, None]
            state = state * decay[:, t, None, None] + new
            heads.append(torch.einsum("bk,bkv->bv", queries[:, t, where], state))
        outs.append(torch.stack(heads, 1) + params["D"][H] * values[..., own])
    gated = torch.cat(outs, -1) * F.silu(z)
    one = torch.ones(r * v)
    groups = [norm(part, one, config.norm_eps) for part in gated.split(r * v, -1)]
    return torch.cat(groups, -1) * params["norm.weight"] @ params["out_proj.weight"].T


def linear_attention(params: Params, config: DecoderConfig, x: Tensor) -> Tensor:
    """Value head by value head, token by token."""
    linear = config.linear_attention
    h, k, v = linear.num_k_heads, linear.head_k_dim, linear.head_v_dim
    r = linear.num_v_heads // h
    qkvz = (x @ params["in_proj_qkvz.weight"].T).unflatten(-1, (h, 2 * k + 2 * r * v))
    ba = (x @ params["in_proj_ba.weight"].T).unflatten(-1, (h, 2, r))
    parts = [part.flatten(2) for part in qkvz.split((k, k, r * v, r * v), -1)[:3]]
    after = short_convolution(params, torch.cat(parts, -1))
    queries, keys, values = after.split((h * k, h * k, h * r * v), -1)
    outs, T = [], x.shape[1]
    for H in range(linear.num_v_heads):
        where = slice(H // r * k, (H // r + 1) * k)
        q, key = (t[..., where] for t in (queries, keys))
        q, key = (t / torch.sqrt((t * t).sum(-1, keepdim=True) + 1e-6) for t in (q, key))
        value = values[..., H * v : (H + 1) * v]
        rate, step = ba[:, :, H // r, 0, H % r].sigmoid(), ba[:, :, H // r, 1, H % r]
        step = F.softplus(step + params["dt_bias"][H]) * params["A_log"][H].exp()
        state, heads = x.new_zeros(len(x), k, v), []
        for t in range(T):
            state = state * torch.exp(-step[:, t])[:, None, None]
            known = torch.einsum("bk,bkv->bv", key[:, t], state)
            new = (value[:, t] - known) * rate[:, t, None]
            state = state + key[:, t, :, None] * new[:, None]
            heads.append(torch.einsum("bk,bkv->bv", q[:, t], state) * k**-0.5)
        z = qkvz[:, :, H // r, 2 * k + r * v :][..., H % r * v : (H % r + 1) * v]
        outs.append(norm(torch.stack(heads, 1), params["norm.weight"], config.norm_eps) * F.silu(z))
    return torch.cat(outs, -1) @ params["out_proj.weight"].T


def latent_attention(params: Params, config: DecoderConfig, x: Tensor) -> Tensor:
    mla = config.mla
    n, r, v = mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim
    frequencies, table_scale, score_scale = yarn(r, mla.yarn, config.rope_theta)
    if mla.q_lora_rank:
        latent = norm(x @ params["q_a_proj.weight"].T, params["q_a_layernorm.weight"], mla.norm_eps)
        q = latent @ params["q_b_proj.weight"].T
    else:
        q = x @ params["q_proj.weight"].T
    both = x @ params["kv_a_proj_with_mqa.weight"].T
    c = norm(both[..., : mla.kv_lora_rank], params["kv_a_layernorm.weight"], mla.norm_eps)
    shared = turn(both[..., mla.kv_lora_rank :], frequencies, table_scale, pairs=True)
    kv = c @ params["kv_b_proj.weight"].T
    heads = []
    for h in range(config.num_heads):
        qh = q[..., h * (n + r) : (h + 1) * (n + r)]
        turned = turn(qh[..., n:], frequencies, table_scale, pairs=True)
        kvh = kv[..., h * (n + v) : (h + 1) * (n + v)]
        keys = torch.cat([kvh[..., :n], shared], -1)
        queries = torch.cat([qh[..., :n], turned], -1)
        heads.append(attention(queries, keys, kvh[..., n:], score_scale * (n + r) ** -0.5))
    return torch.cat(heads, -1) @ params["o_proj.weight"].T


def yarn(r: int, config: YarnConfig | None, theta: float) -> tuple[Tensor, float, float]:
    """Frequencies, factor on cos and sin, factor on scores: YaRN's formulas, one by one."""
    if config is None:
        return theta ** (-torch.arange(0, r, 2) / r), 1.0, 1.0
    frequencies = []
    for i in range(r // 2):
        frequency = theta ** (-2 * i / r)

        def place(turns: float) -> float:
            return (
                r
                * math.log(config.original_max_seq_len / (turns * 2 * math.pi))
                / (2 * math.log(theta))
            )

        low, high = place(config.beta_fast), place(config.beta_slow)
        if config.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(0, low), min(r - 1, high)
        slow = min(1.0, max(0.0, (i - low) / max(high - low, 1e-3)))
        frequencies.append(frequency * (1 - slow) + frequency / config.factor * slow)
    ln = math.log(config.factor)
    all_dims = 0.1 * config.mscale_all_dim * ln + 1
    return torch.tensor(frequencies), (0.1 * config.mscale * ln + 1) / all_dims, all_dims**2
