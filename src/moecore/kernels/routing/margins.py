"""Histograms of the bias with which an expert would be chosen, and the bias that balances loads.

    margin[t, e] = cutoff[t] - score[t, e]      cutoff[t] = the (K + 1)-th best score + bias of t
    histogram[e, bin(margin[t, e])] += 1        for every token that is no padding
    even_bias[e] = the K / E quantile of histogram[e]

Scores are in [0, 1], so margins are within 1 of the least and the greatest bias; the bins divide
that range. Integer atomics give the same counts in every run if scores have the same bits.

Letters: L layers, T tokens, E experts, K choices, X bins. One launch reads the logits, 4 * T * E
bytes, and does T * E atomic adds in L2. Another computes the quantiles of any number of layers.
"""

import torch
from torch import Tensor

from moecore.kernels.common import can_use_kernel, cdiv, launch, next_power_of_2
from moecore.kernels.routing.scores import compute_scores_ref, load_token_scores
from moecore.kernels.triton_api import tl, triton

NUM_BINS = 1000
TILE = 1024  # logits of one warp, which holds whole rows


def compute_margin_range(bias_E: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lower end of a histogram's first bin, and the width of a bin, fp64 [..., 1]."""
    low, high = (f(dim=-1, keepdim=True).double() for f in (bias_E.amin, bias_E.amax))
    return low - 1, (high + 2 - low) / NUM_BINS


def add_margins_ref(
    histogram_EX: Tensor,
    logits_TE: Tensor,
    bias_E: Tensor,
    top_k: int,
    score_function: str,
    padding_mask_T: Tensor | None,
) -> None:
    """Compute `add_margins_` in plain PyTorch."""
    E, X = histogram_EX.shape
    low, width = (edge.float() for edge in compute_margin_range(bias_E))
    scores_TE = compute_scores_ref(logits_TE, score_function)
    cutoff_T1 = (scores_TE + bias_E).topk(top_k + 1, dim=-1).values[:, -1:]
    # A NaN would become an address. It counts in bin 0, and the step will be skipped.
    bins_TE = ((cutoff_T1 - scores_TE - low) / width).nan_to_num(0.0).clamp(0, X - 1).long()
    bins_TE = bins_TE + torch.arange(E, device=bins_TE.device) * X
    counts_TE = torch.ones_like(bins_TE)
    if padding_mask_T is not None:
        counts_TE = counts_TE.masked_fill(padding_mask_T[:, None], 0)
    histogram_EX.view(-1).scatter_add_(0, bins_TE.flatten(), counts_TE.flatten())


def compute_even_bias_ref(histogram_EX: Tensor, bias_E: Tensor, top_k: int) -> Tensor:
    """Compute `compute_even_bias` in plain PyTorch."""
    E, X = histogram_EX.shape[-2:]
    low_1, width_1 = compute_margin_range(bias_E)
    below_EX = histogram_EX.cumsum(-1)
    total_E1 = below_EX[..., -1:]
    target_E1 = total_E1.double() * top_k / E
    bin_E1 = torch.searchsorted(below_EX.double(), target_E1).clamp(max=X - 1)
    inside_E1 = histogram_EX.gather(-1, bin_E1)
    before_E1 = below_EX.gather(-1, bin_E1) - inside_E1
    place_E1 = bin_E1 + (target_E1 - before_E1) / inside_E1.clamp(min=1)
    solved_E = (low_1 + width_1 * place_E1[..., 0]).float()
    return torch.where(total_E1[..., 0] > 0, solved_E, bias_E)


@triton.jit(do_not_specialize=["num_tokens"])
def _add_margins_kernel(
    logits_ptr,  # [T, E] fp32
    bias_ptr,  # [E] fp32
    padding_ptr,  # [T] bool, or None
    histogram_ptr,  # [E, X] int64, added to
    num_tokens,
    E: tl.constexpr,
    K: tl.constexpr,
    X: tl.constexpr,
    FUNCTION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    E_POW2: tl.constexpr,  # E up to a power of two
):
    """Add the margins of BLOCK_T tokens to the experts' histograms by integer atomics."""
    scores, columns, token_mask = load_token_scores(
        logits_ptr, padding_ptr, num_tokens, FUNCTION, E, BLOCK_T, E_POW2
    )
    real = columns < E
    bias = tl.load(bias_ptr + columns, mask=real, other=0.0)
    low = tl.min(tl.where(real, bias, float("inf")), axis=1, keep_dims=True).to(tl.float64)
    high = tl.max(tl.where(real, bias, float("-inf")), axis=1, keep_dims=True).to(tl.float64)
    width = ((high + 2.0 - low) / X).to(tl.float32)
    low = (low - 1.0).to(tl.float32)

    biased = tl.where(real, scores + bias, float("-inf"))
    for _ in range(K):  # remove one of the best
        best = tl.max(biased, axis=1, keep_dims=True)
        column = tl.min(tl.where(biased == best, columns, E_POW2), axis=1, keep_dims=True)
        biased = tl.where(columns == column, float("-inf"), biased)
    cutoff = tl.max(biased, axis=1, keep_dims=True)
    place = tl.div_rn(cutoff - scores - low, tl.broadcast_to(width, [BLOCK_T, E_POW2]))
    place = tl.where(place == place, place, 0.0)  # a NaN would become an address
    bins = tl.minimum(tl.maximum(place, 0.0), X - 1.0).to(tl.int64)
    at, increments = (
        histogram_ptr + columns * X + bins,
        tl.full([BLOCK_T, E_POW2], 1, dtype=tl.int64),
    )
    tl.atomic_add(at, increments, mask=token_mask & real, sem="relaxed")


def add_margins_(
    histogram_EX: Tensor,
    logits_TE: Tensor,
    bias_E: Tensor,
    top_k: int,
    score_function: str,
    padding_mask_T: Tensor | None = None,
) -> None:
    """Count each token's margin for each expert in the experts' histograms, in place. No host sync.

    The margin of a token and an expert is the bias with which the token would just choose the
    expert. histogram_EX is int64, contiguous, X bins per expert; a margin of NaN counts in bin 0.
    Logits and bias are fp32, and scores are in [0, 1]. Padding (True) is not counted.
    """
    if not can_use_kernel(logits_TE) or logits_TE.dtype != torch.float32:
        add_margins_ref(histogram_EX, logits_TE, bias_E, top_k, score_function, padding_mask_T)
        return
    T, E = logits_TE.shape
    E_POW2 = next_power_of_2(E)
    BLOCK_T = max(1, TILE // E_POW2)
    padding = None if padding_mask_T is None else padding_mask_T.contiguous()
    launch(
        _add_margins_kernel,
        cdiv(T, BLOCK_T),
        *(logits_TE.contiguous(), bias_E.contiguous(), padding, histogram_EX, T),
        E=E,
        K=top_k,
        X=histogram_EX.shape[1],
        FUNCTION=score_function,
        BLOCK_T=BLOCK_T,
        E_POW2=E_POW2,
        enable_fp_fusion=False,  # scores with the bits of `route`
        num_warps=max(1, E_POW2 // TILE),
    )


@triton.jit
def _even_bias_kernel(
    histogram_ptr,  # [L, E, X] int64
    bias_ptr,  # [L, E] fp32
    out_ptr,  # [L, E] fp32, out
    E: tl.constexpr,
    K: tl.constexpr,
    X: tl.constexpr,
    X_POW2: tl.constexpr,  # X up to a power of two
    E_POW2: tl.constexpr,  # E up to a power of two
):
    """Write to `out_ptr` one expert's bias for an even load, in one layer."""
    row = tl.program_id(0).to(tl.int64)  # of [L * E]
    bins, columns = tl.arange(0, X_POW2), tl.arange(0, E_POW2)
    counts = tl.load(histogram_ptr + row * X + bins, mask=bins < X, other=0)
    below = tl.cumsum(counts, axis=0)
    total = tl.sum(counts, axis=0)
    target = total.to(tl.float64) * K / E
    place = tl.minimum(tl.sum((below.to(tl.float64) < target).to(tl.int32), axis=0), X - 1)
    inside = tl.sum(tl.where(bins == place, counts, 0), axis=0)
    before = tl.sum(tl.where(bins < place, counts, 0), axis=0)
    share = (target - before.to(tl.float64)) / tl.maximum(inside, 1).to(tl.float64)

    real = columns < E
    bias = tl.load(bias_ptr + row // E * E + columns, mask=real, other=0.0)
    low = tl.min(tl.where(real, bias, float("inf")), axis=0).to(tl.float64)
    high = tl.max(tl.where(real, bias, float("-inf")), axis=0).to(tl.float64)
    width = (high + 2.0 - low) / X
    solved = (low - 1.0 + width * (place.to(tl.float64) + share)).to(tl.float32)
    tl.store(out_ptr + row, tl.where(total > 0, solved, tl.load(bias_ptr + row)))


def compute_even_bias(histogram_EX: Tensor, bias_E: Tensor, top_k: int) -> Tensor:
    """Return bias [..., E], fp32, for which each expert gets about top_k / E of the counted tokens.

    The share is approximate, because other experts' biases change too, and because the quantile is
    interpolated within a bin. If no token was counted, the result is `bias_E`. No host sync.
    `histogram_EX` [..., E, X] and `bias_E` [..., E] are arguments of `add_margins_`.
    """
    if not can_use_kernel(bias_E):
        return compute_even_bias_ref(histogram_EX, bias_E, top_k)
    E, X = histogram_EX.shape[-2:]
    out_E = torch.empty_like(bias_E, memory_format=torch.contiguous_format)
    args = (histogram_EX.contiguous(), bias_E.contiguous(), out_E)
    sizes = dict(E=E, K=top_k, X=X, X_POW2=next_power_of_2(X), E_POW2=next_power_of_2(E))
    launch(_even_bias_kernel, bias_E.numel(), *args, **sizes, enable_fp_fusion=False)
    return out_E
