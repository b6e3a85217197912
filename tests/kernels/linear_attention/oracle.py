"""The delta rule with decays and the short convolution, token by token, in fp64."""

from itertools import pairwise

import torch
from torch import Tensor

from moecore.kernels.linear_attention import DeltaRule


def delta_rule_ref(
    rule: DeltaRule, borders: list[int], initial_nHkv: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return o_THv and the last state of each document."""
    q, k, v, g = (x.double() for x in rule[:4])
    beta = None if rule.beta_TH is None else rule.beta_TH.double()
    H, dim = v.shape[1], k.shape[-1]
    if rule.norm_qk:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(H // x.shape[1], dim=1) for x in (q, k))
    g_THk = g if g.ndim == 3 else g[..., None]
    outs, states = [], []
    for document, (start, end) in enumerate(pairwise(borders)):
        S_Hkv = torch.zeros(H, dim, v.shape[-1], dtype=v.dtype, device=v.device)
        if initial_nHkv is not None:
            S_Hkv = initial_nHkv[document].double()
        for t in range(start, end):
            S_Hkv = S_Hkv * g_THk[t].exp()[..., None]
            known_Hv = torch.einsum("hkv,hk->hv", S_Hkv, k[t])
            delta_Hv = v[t] if beta is None else beta[t][:, None] * (v[t] - known_Hv)
            S_Hkv = S_Hkv + k[t][:, :, None] * delta_Hv[:, None]
            outs.append(torch.einsum("hkv,hk->hv", S_Hkv, q[t]) * rule.scale)
        states.append(S_Hkv)
    return torch.stack(outs), torch.stack(states)


def convolution_ref(
    x_TD: Tensor,
    weight_DW: Tensor,
    bias_D: Tensor | None,
    borders: list[int],
    before_nwD: Tensor | None = None,
) -> Tensor:
    """Return y_TD before an activation."""
    w, outs = weight_DW.shape[1] - 1, []
    for document, (start, end) in enumerate(pairwise(borders)):
        own = x_TD[start:end].double()
        before = own.new_zeros(w, own.shape[1])
        if before_nwD is not None:
            before = before_nwD[document].double()
        long = torch.cat((before, own))
        for t in range(end - start):
            outs.append((long[t : t + w + 1] * weight_DW.double().T).sum(0))
    y_TD = torch.stack(outs)
    return y_TD if bias_D is None else y_TD + bias_D.double()
