"""Linear attention of a `Sequence`, whose state cp ranks pass to each other.

Legend: B rows, T tokens of a row, H value heads, h query and key heads, k and v dims of a head, D
channels, W taps.

Layers with linear attention mix tokens by a short causal convolution and a delta rule with decays.
`kernels/linear_attention` computes both, and `context_parallel/states.py` computes them over ranks.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from moecore.attention.context_parallel.states import causal_conv1d_over_ranks, run_rule_over_ranks
from moecore.attention.sequence import Sequence
from moecore.base.regions import run_product
from moecore.kernels.linear_attention import DeltaRule, causal_convolution, gated_delta_rule
from moecore.kernels.zigzag import make_row_cu_seqlens


@torch.compiler.disable  # a graph break; code before and after it is compiled
def attend_linear(
    q_BThk: Tensor,
    k_BThk: Tensor,
    v_BTHv: Tensor,
    g_BTHk: Tensor,
    beta_BTH: Tensor | None,
    sequence: Sequence,
    *,
    scale: float,
    norm_qk: bool,
) -> Tensor:
    """Return o_BTHv: each token's query applied to the state of its document up to this token.

    `g_BTHk` has logarithms of decays, and `beta_BTH` learning rates (None = no delta rule). If
    `norm_qk`, queries and keys are divided by their L2 norms. Collective with cp > 1.
    """
    q, k, v, g = (x.flatten(0, 1) for x in (q_BThk, k_BThk, v_BTHv, g_BTHk))
    beta = None if beta_BTH is None else beta_BTH.flatten(0, 1)
    rule = DeltaRule(q, k, v, g, beta, scale, norm_qk)
    if sequence.local_tokens is not None:
        chunks = sequence.local_tokens.make_local_chunks(v_BTHv.device)
        o = run_product(run_rule_over_ranks, rule, chunks)
    else:
        o, _ = run_product(gated_delta_rule, rule, _get_cu_seqlens(sequence, v_BTHv))
    return o.view(v_BTHv.shape)  # type: ignore[no-any-return]


def scan_states(
    x_BTHv: Tensor,
    steps_BTH: Tensor,
    rates_H: Tensor,
    B_BThk: Tensor,
    C_BThk: Tensor,
    D_H: Tensor | None,
    sequence: Sequence,
) -> Tensor:
    """Return the outputs y_BTHv of a state space model with inputs x (Mamba-2, arXiv:2405.21060).

    Each token updates the state, S = exp(step * rate) S + step * B x^T, and has y = C S + D x. This
    is linear attention with queries C, keys B and no delta rule. Steps are fp32 or fp64; rates are
    negative. Collective with cp > 1.
    """
    values_BTHv = (x_BTHv * steps_BTH[..., None]).to(x_BTHv.dtype)
    rule = C_BThk, B_BThk, values_BTHv, steps_BTH * rates_H, None, sequence
    y_BTHv = attend_linear(*rule, scale=1.0, norm_qk=False)
    return y_BTHv if D_H is None else y_BTHv + D_H[:, None] * x_BTHv  # type: ignore[no-any-return]


@torch.compiler.disable
def causal_conv1d(
    x_BTD: Tensor, weight_DW: Tensor, bias_D: Tensor | None, sequence: Sequence, *, apply_silu: bool
) -> Tensor:
    """Return y_BTD: a causal depthwise convolution per document, then SiLU if `apply_silu`."""
    inputs = x_BTD.flatten(0, 1), weight_DW, bias_D
    if sequence.local_tokens is not None:
        pieces = sequence.local_tokens.make_local_chunks(x_BTD.device)
        y = run_product(causal_conv1d_over_ranks, *inputs, pieces, apply_silu=apply_silu)
    else:
        cu_seqlens = _get_cu_seqlens(sequence, x_BTD)
        y = run_product(causal_convolution, *inputs, cu_seqlens, apply_silu=apply_silu)
    return y.view(x_BTD.shape)  # type: ignore[no-any-return]


def _get_cu_seqlens(sequence: Sequence, x_BTX: Tensor) -> Tensor:
    """Return `sequence.cu_seqlens`; if it is None, the `cu_seqlens` of the rows of x."""
    if sequence.cu_seqlens is not None:
        return sequence.cu_seqlens
    # A fake tensor must not enter the cache, where a later run would read it.
    make = _make_cached_cu_seqlens if type(x_BTX) is Tensor else _make_cached_cu_seqlens.__wrapped__
    return make(x_BTX.shape[0], x_BTX.shape[1], x_BTX.device)


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def _make_cached_cu_seqlens(B: int, T: int, device: torch.device) -> Tensor:
    # With one tensor for all layers and steps, layers share the tables of their kernels.
    return make_row_cu_seqlens(B, B * T, device)
