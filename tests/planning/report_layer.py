"""A layer of DeepSeek-V3 as the report's framework runs it, for what it keeps for backward.

Plain modules that keep what Megatron-Core's keep without memory-efficient permutation, FP8 or
recompute: a copy of its row for each expert of a token, the expert's output (the routing weight
comes after FC2), outputs of norms beside their inputs. On one rank, with even loads. Experts are
one product here: what is kept of rows does not depend on whose they are.

Legend: T tokens, D model dim, K experts per token, R rows (K T), F expert hidden dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moecore.models import DecoderConfig

BF16: dict[str, Any] = dict(device="meta", dtype=torch.bfloat16)


class Linear(nn.Linear):
    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__(in_dim, out_dim, bias=False, **BF16)


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, **BF16))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, 1e-6)


class SwiGLU(torch.autograd.Function):
    """One kernel, which keeps its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


class Weigh(torch.autograd.Function):
    """y * p, where the gradient of p reads y."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, p: Tensor) -> Tensor:
        ctx.save_for_backward(y, p)
        return torch.empty_like(y)


class Attention(nn.Module):
    """Latent attention."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        assert config.mla is not None
        D, H, self.mla, self.num_heads = config.dim, config.num_heads, config.mla, config.num_heads
        Q, C, rope = self.mla.q_lora_rank, self.mla.kv_lora_rank, self.mla.qk_rope_head_dim
        self.q_a_proj, self.q_a_layernorm = Linear(D, Q), RMSNorm(Q)
        self.q_b_proj = Linear(Q, H * self.mla.qk_head_dim)
        self.kv_a_proj, self.kv_a_layernorm = Linear(D, C + rope), RMSNorm(C)
        self.kv_b_proj = Linear(C, H * (self.mla.qk_nope_head_dim + self.mla.v_head_dim))
        self.o_proj = Linear(H * self.mla.v_head_dim, D)

    def forward(self, x_TD: Tensor) -> Tensor:
        T, H, mla = x_TD.shape[0], self.num_heads, self.mla
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_TD))).view(T, H, -1)
        latent, k_rope = self.kv_a_proj(x_TD).split([mla.kv_lora_rank, mla.qk_rope_head_dim], -1)
        keys_values = self.kv_b_proj(self.kv_a_layernorm(latent.contiguous())).view(T, H, -1)
        k_nope, v = keys_values.split([mla.qk_nope_head_dim, mla.v_head_dim], -1)
        k = torch.cat([k_nope, k_rope[:, None].expand(T, H, -1)], -1)
        heads = (x.transpose(0, 1)[None] for x in (q, k, v.contiguous()))
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.o_proj(attended[0].transpose(0, 1).flatten(1))


class ReportLayer(nn.Module):
    """One layer.

    Args:
        config: of DeepSeek-V3.
        weighs_late: whether the routing weight comes after FC2, and not before it.
    """

    def __init__(self, config: DecoderConfig, *, weighs_late: bool = True) -> None:
        super().__init__()
        assert config.moe is not None
        D, shared = config.dim, config.moe.shared_hidden_dim
        self.hidden_dim, self.top_k = config.moe.hidden_dim, config.moe.top_k
        self.weighs_late = weighs_late
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(D), RMSNorm(D)
        self.self_attn = Attention(config)
        self.shared1, self.shared2 = Linear(D, 2 * shared), Linear(shared, D)
        self.fc1, self.fc2 = Linear(D, 2 * self.hidden_dim), Linear(self.hidden_dim, D)

    def forward(self, x_TD: Tensor) -> Tensor:
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD))
        y_TD = self.post_attention_layernorm(x_TD)
        shared_TD = self.shared2(SwiGLU.apply(self.shared1(y_TD)))
        return x_TD + shared_TD + self.experts(y_TD)

    def experts(self, y_TD: Tensor) -> Tensor:
        p_R1 = torch.empty(self.top_k * y_TD.shape[0], 1, **BF16).requires_grad_()
        rows_RD = y_TD.repeat(self.top_k, 1)  # permuted
        out_RD = self.fc2(SwiGLU.apply(self.fc1(rows_RD)))
        weighed_RD = Weigh.apply(out_RD, p_R1) if self.weighs_late else out_RD
        return weighed_RD.view(self.top_k, *y_TD.shape).sum(0)
