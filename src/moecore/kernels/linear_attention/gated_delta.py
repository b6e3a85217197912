"""The delta rule with decays of packed documents, by kernels or in plain PyTorch.

    chunked.py            16 bits on GPUs
    gated_delta_rule_ref  all other tensors, any device

The reference cuts each document into chunks of C tokens, and pads its last chunk with tokens that
do not change the state. The number of chunks is an upper bound, which needs no host sync:

    documents of 3 and 5 tokens, C = 4    a b c .    d e f g    h . . .    . . . .

Within a chunk, u is the update of each key if the chunk's first state is zero. w is the part of
that first state that each key removes. One triangular system gives both (the UT transform).

Letters of `contract.py`; m chunks of C tokens.

Source: Gated Delta Networks (arXiv:2412.06464), section 3.3.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moecore.kernels.common import disable_autocast, warn_on_fallback
from moecore.kernels.linear_attention import chunked
from moecore.kernels.linear_attention.contract import DeltaRule, StateChain
from moecore.kernels.zigzag import find_document_ids, find_positions_in_documents

CHUNK = 64


def gated_delta_rule_ref(
    rule: DeltaRule, cu_seqlens: Tensor, initial_states_nHkv: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute `gated_delta_rule` in plain PyTorch, chunk by chunk, in fp32 (fp64 for fp64)."""
    T, H, v = rule.v_THv.shape
    cu_seqlens = cu_seqlens.long()
    firsts = F.pad((-(-cu_seqlens.diff() // CHUNK)).cumsum(0), (1, 0))  # documents' first chunks
    num_chunks = T // CHUNK + len(cu_seqlens) - 1
    places_T = firsts[find_document_ids(cu_seqlens, T)] * CHUNK + find_positions_in_documents(
        cu_seqlens, T
    )

    def split_into_chunks(x_THX: Tensor) -> Tensor:
        """Return zero-padded chunks of x, [chunks, heads, chunk length, X], in at least fp32."""
        dtype = torch.promote_types(x_THX.dtype, torch.float32)
        filled = x_THX.new_zeros((num_chunks * CHUNK, *x_THX.shape[1:]), dtype=dtype)
        filled = filled.index_copy(0, places_T, x_THX.to(dtype))
        return filled.unflatten(0, (num_chunks, CHUNK)).transpose(1, 2)  # type: ignore[no-any-return]

    g_THk = rule.g_THk if rule.g_THk.ndim == 3 else rule.g_THk[..., None]
    q, k, values, g = (split_into_chunks(x) for x in (*rule[:3], g_THk))
    if rule.norm_qk:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(H // x.shape[1], dim=1) for x in (q * rule.scale, k))
    decay = g.cumsum(-2)  # since the chunk began
    future_mask = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).triu(1)[..., None]
    between = decay[..., None, :] - decay[..., None, :, :]
    between = between.masked_fill(future_mask, -torch.inf).exp()

    def multiply_keys(x: Tensor) -> Tensor:
        """Return decayed dot products of x with earlier keys, [chunks, heads, chunk, chunk]."""
        if decay.shape[-1] == 1:
            return (x @ k.mT) * between[..., 0]
        return (x[..., None, :] * k[..., None, :, :] * between).sum(-1)

    u, w, local_scores = values, torch.zeros_like(k), multiply_keys(q)
    if rule.beta_TH is not None:
        beta = split_into_chunks(rule.beta_TH)[..., None]
        system = multiply_keys(k * beta)
        targets = torch.cat((values, k * decay.exp()), dim=-1) * beta
        solved = torch.linalg.solve_triangular(system, targets, upper=False, unitriangular=True)
        u, w = solved.split((v, k.shape[-1]), dim=-1)
    q, last_k = q * decay.exp(), k * (decay[..., -1:, :] - decay).exp()
    chunk_decay = decay[..., -1, :, None].exp()

    chunk_m = torch.arange(num_chunks, device=g.device)
    documents_m = find_document_ids(firsts, num_chunks).clamp(max=len(cu_seqlens) - 2)
    begins_m = chunk_m == firsts[documents_m]
    state = u.new_zeros(H, k.shape[-1], v)
    outs, states = [], []
    for i in range(num_chunks):
        first = torch.zeros_like(state)
        if initial_states_nHkv is not None:
            first = initial_states_nHkv[documents_m[i]]
        state = torch.where(begins_m[i], first, state)
        updates = u[i] - w[i] @ state
        outs.append(q[i] @ state + local_scores[i] @ updates)
        state = state * chunk_decay[i] + last_k[i].mT @ updates
        states.append(state)
    o_THv = torch.stack(outs).transpose(1, 2).flatten(0, 1)[places_T].to(rule.v_THv.dtype)
    last = torch.stack(states)[(firsts[1:] - 1).clamp(min=0)]
    is_empty = (cu_seqlens.diff() == 0)[:, None, None, None]
    return o_THv, torch.where(
        is_empty, 0 if initial_states_nHkv is None else initial_states_nHkv, last
    )


def compute_transitions_ref(rule: DeltaRule, cu_seqlens: Tensor) -> Tensor:
    """Return [n, H, k, v + k or 1], L and M of each document, for `StateChain`.

    They are the last state of a rule with k more columns of values. These values are zero, and
    their initial state is the identity.
    """
    (_, H, v), k, n = rule.v_THv.shape, rule.k_Thk.shape[-1], len(cu_seqlens) - 1
    dtype = torch.promote_types(rule.v_THv.dtype, torch.float32)
    identity = torch.eye(k, dtype=dtype, device=rule.v_THv.device)
    wide = rule._replace(v_THv=F.pad(rule.v_THv, (0, k)))
    initial = F.pad(identity, (v, 0)).expand(n, H, k, v + k)
    _, last = gated_delta_rule_ref(wide, cu_seqlens, initial)
    if rule.beta_TH is not None:
        return last
    return torch.cat((last[..., :v], last[..., v:].sum(-1, keepdim=True)), dim=-1)


class _ChainedReference(torch.autograd.Function):
    """apply(q, k, v, g, beta, scale, norm_qk, cu_seqlens, chain) -> outputs, last states."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        rule, (cu_seqlens, ctx.chain) = DeltaRule(*inputs[:7]), inputs[7:]
        transitions = compute_transitions_ref(rule, cu_seqlens)
        states = ctx.chain.compute_initial_states(transitions, rule.v_THv.shape[-1])
        ctx.save_for_backward(*rule[:5], cu_seqlens, *states)
        ctx.options = rule[5:]
        return gated_delta_rule_ref(rule, cu_seqlens, states[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, cu_seqlens, initial, maps = ctx.saved_tensors
        leaves: list[Any] = [
            x if x is None else x.detach().requires_grad_() for x in (*inputs, initial)
        ]
        with torch.enable_grad():
            rule = DeltaRule(*leaves[:5], *ctx.options)
            outs = gated_delta_rule_ref(rule, cu_seqlens, leaves[5])
        dinitial = torch.autograd.grad(outs[0], leaves[5:], grads[0], retain_graph=True)
        dlast = ctx.chain.compute_last_gradients(*dinitial, maps)
        torch.autograd.backward(outs, (grads[0], dlast))
        return *(None if x is None else x.grad for x in leaves[:5]), *(None,) * 4


def gated_delta_rule(
    rule: DeltaRule,
    cu_seqlens: Tensor,
    initial_states_nHkv: Tensor | None = None,
    chain: StateChain | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs of linear attention by a gated delta rule, and each document's last state.

    Differentiable once. Deterministic. No host sync.

    Args:
        rule: tensors of any strides; q, k and v have one float dtype, which the outputs have too.
        cu_seqlens: int32 [n + 1]: each document's first token, then T. Documents may be empty.
        initial_states_nHkv: each document's initial state, fp32 (fp64 for fp64); None = 0.
        chain: computes the initial states instead. Last states then get no gradient from outside.
    """
    with disable_autocast(rule.v_THv):
        if (problem := chunked.find_problem(rule)) is None:
            return chunked.gated_delta_rule(rule, cu_seqlens, initial_states_nHkv, chain)
        warn_on_fallback(rule.v_THv, f"a gated delta rule ({problem})")
        if chain is not None:
            return _ChainedReference.apply(*rule, cu_seqlens, chain)  # type: ignore[no-any-return]
        return gated_delta_rule_ref(rule, cu_seqlens, initial_states_nHkv)
