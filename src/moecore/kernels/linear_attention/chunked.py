"""The delta rule with decays in plain PyTorch, chunk by chunk; fp32 inside (fp64 for fp64).

Letters of `contract.py`; m chunks of C tokens. Documents are cut into chunks of their own, the last
of each filled up with tokens that change nothing. Their number has a bound that no device is asked
for, so chunks may be left over at the end:

    documents of 3 and 5 tokens, C = 4    a b c .    d e f g    h . . .    . . . .

Inside of a chunk, u is what each key writes if the chunk's first state is zero, and w what it
unwrites of that state: both solve one triangular system (the UT transform).

Source: Gated Delta Networks (arXiv:2412.06464), section 3.3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moecore.kernels.linear_attention.contract import DeltaRule
from moecore.kernels.zigzag import documents_of, positions_of

CHUNK = 64


def gated_delta_rule(
    rule: DeltaRule, cu_seqlens: Tensor, initial_nHkv: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return o_THv and states_nHkv: see `gated_delta.gated_delta_rule`."""
    T, H, v = rule.v_THv.shape
    cu_seqlens = cu_seqlens.long()
    firsts = torch.zeros_like(cu_seqlens)  # the first chunk of each document, and their number
    firsts[1:] = (-(-cu_seqlens.diff() // CHUNK)).cumsum(0)
    num_chunks = T // CHUNK + len(cu_seqlens) - 1
    places_T = firsts[documents_of(cu_seqlens, T)] * CHUNK + positions_of(cu_seqlens, T)

    def chunks(x_THX: Tensor) -> Tensor:
        """Return x_mHCX."""
        dtype = torch.promote_types(x_THX.dtype, torch.float32)
        filled = x_THX.new_zeros((num_chunks * CHUNK, *x_THX.shape[1:]), dtype=dtype)
        filled = filled.index_copy(0, places_T, x_THX.to(dtype))
        return filled.unflatten(0, (num_chunks, CHUNK)).transpose(1, 2)  # type: ignore[no-any-return]

    g_THk = rule.g_THk if rule.g_THk.ndim == 3 else rule.g_THk[..., None]
    q, k, values, g = (chunks(x) for x in (*rule[:3], g_THk))
    if rule.norm_qk:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(H // x.shape[1], dim=1) for x in (q * rule.scale, k))
    decay = g.cumsum(-2)  # since the chunk began
    future_mask = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).triu(1)[..., None]
    between = decay[..., None, :] - decay[..., None, :, :]
    between = between.masked_fill(future_mask, -torch.inf).exp()

    def paired(x: Tensor) -> Tensor:
        """Return what each token's x finds of the keys before it in its chunk, decayed."""
        if decay.shape[-1] == 1:
            return (x @ k.mT) * between[..., 0]
        return (x[..., None, :] * k[..., None, :, :] * between).sum(-1)

    u, w, local_scores = values, torch.zeros_like(k), paired(q)
    if rule.beta_TH is not None:
        beta = chunks(rule.beta_TH)[..., None]
        system, targets = paired(k * beta), torch.cat((values, k * decay.exp()), dim=-1) * beta
        solved = torch.linalg.solve_triangular(system, targets, upper=False, unitriangular=True)
        u, w = solved.split((v, k.shape[-1]), dim=-1)
    q, last_k = q * decay.exp(), k * (decay[..., -1:, :] - decay).exp()
    chunk_decay = decay[..., -1, :, None].exp()

    chunk_m = torch.arange(num_chunks, device=g.device)
    documents_m = documents_of(firsts, num_chunks).clamp(max=len(cu_seqlens) - 2)
    begins_m = chunk_m == firsts[documents_m]
    state = u.new_zeros(H, k.shape[-1], v)
    outs, states = [], []
    for i in range(num_chunks):
        first = torch.zeros_like(state) if initial_nHkv is None else initial_nHkv[documents_m[i]]
        state = torch.where(begins_m[i], first, state)
        updates = u[i] - w[i] @ state
        outs.append(q[i] @ state + local_scores[i] @ updates)
        state = state * chunk_decay[i] + last_k[i].mT @ updates
        states.append(state)
    o_mHCv = torch.stack(outs)
    o_THv = o_mHCv.transpose(1, 2).flatten(0, 1)[places_T].to(rule.v_THv.dtype)
    last = torch.stack(states)[(firsts[1:] - 1).clamp(min=0)]
    is_empty = (cu_seqlens.diff() == 0)[:, None, None, None]
    return o_THv, torch.where(is_empty, 0 if initial_nHkv is None else initial_nHkv, last)
