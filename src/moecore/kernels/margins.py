"""Histograms of the bias with which an expert would be chosen: what quantile balancing counts.

    margin[t, e] = cutoff[t] - score[t, e]      cutoff[t] = the (K + 1)-th best score + bias of t
    histogram[e, bin(margin[t, e])] += 1        for every token that is no padding

Scores lie in [0, 1], so margins lie within 1 of the least and the greatest bias; the bins divide
that range. Integer atomics: the same counts in every run, where scores have the same bits.

Letters: T tokens, E experts, K choices, X bins. One launch reads the logits, 4 * T * E bytes, and
adds T * E times in the second-level cache; the reference makes about ten passes over [T, E].
"""

from functools import partial

import torch
from torch import Tensor

from moecore.kernels.common import cdiv, next_power_of_2, on_device, tl, triton, use_kernel
from moecore.kernels.scores import row_scores, scores_ref

NUM_BINS = 1000
TILE = 1024  # logits of one warp, which holds whole rows


def margin_range(bias_E: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lower end of the first bin and the width of one, fp64 [..., 1] for [..., E]."""
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
    """Do what `add_margins_` does, in plain PyTorch."""
    E, X = histogram_EX.shape
    low, width = (edge.float() for edge in margin_range(bias_E))
    scores_TE = scores_ref(logits_TE, score_function)
    cutoff_T1 = (scores_TE + bias_E).topk(top_k + 1, dim=-1).values[:, -1:]
    # A NaN would become an address; it lands in bin 0, of a step that will be skipped.
    bins_TE = ((cutoff_T1 - scores_TE - low) / width).nan_to_num(0.0).clamp(0, X - 1).long()
    bins_TE = bins_TE + torch.arange(E, device=bins_TE.device) * X
    counted_TE = torch.ones_like(bins_TE)
    if padding_mask_T is not None:
        counted_TE = counted_TE.masked_fill(padding_mask_T[:, None], 0)
    histogram_EX.view(-1).scatter_add_(0, bins_TE.flatten(), counted_TE.flatten())


# `partial` because jit with options, as a decorator, needs Triton to be installed.
@partial(triton.jit, do_not_specialize=["num_tokens"])
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
    BT: tl.constexpr,
    EP: tl.constexpr,  # E up to a power of two
):
    rows = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)[:, None]
    columns = tl.arange(0, EP)[None, :]
    here = rows < num_tokens
    real = columns < E
    logits = tl.load(logits_ptr + rows * E + columns, mask=here & real, other=float("-inf"))
    scores, _, _ = row_scores(tl.where(here, logits, 0.0), FUNCTION)
    bias = tl.load(bias_ptr + columns, mask=real, other=0.0)
    low = tl.min(tl.where(real, bias, float("inf")), axis=1, keep_dims=True).to(tl.float64)
    high = tl.max(tl.where(real, bias, float("-inf")), axis=1, keep_dims=True).to(tl.float64)
    width = ((high + 2.0 - low) / X).to(tl.float32)
    low = (low - 1.0).to(tl.float32)

    biased = tl.where(real, scores + bias, float("-inf"))
    for _ in range(K):  # one of the best goes, whichever
        best = tl.max(biased, axis=1, keep_dims=True)
        column = tl.min(tl.where(biased == best, columns, EP), axis=1, keep_dims=True)
        biased = tl.where(columns == column, float("-inf"), biased)
    cutoff = tl.max(biased, axis=1, keep_dims=True)
    place = tl.div_rn(cutoff - scores - low, tl.broadcast_to(width, [BT, EP]))
    place = tl.where(place == place, place, 0.0)  # a NaN would become an address
    bins = tl.minimum(tl.maximum(place, 0.0), X - 1.0).to(tl.int64)
    counted = here & real
    if padding_ptr is not None:
        counted = counted & (tl.load(padding_ptr + rows, mask=here, other=1).to(tl.int32) == 0)
    ones = tl.full([BT, EP], 1, dtype=tl.int64)
    tl.atomic_add(histogram_ptr + columns * X + bins, ones, mask=counted, sem="relaxed")


def add_margins_(
    histogram_EX: Tensor,
    logits_TE: Tensor,
    bias_E: Tensor,
    top_k: int,
    score_function: str,
    padding_mask_T: Tensor | None = None,
) -> None:
    """Add the margins of some tokens to their experts' histograms, in place. No host sync.

    A margin that is NaN counts in bin 0.

    Args:
        histogram_EX: int64, contiguous.
        logits_TE: fp32, of the router.
        bias_E: fp32, the bias with which these tokens chose.
        top_k: K, less than E.
        score_function: one of `SCORE_FUNCTIONS` whose scores lie in [0, 1].
        padding_mask_T: bool, True = not counted; None = no padding.
    """
    if not use_kernel(logits_TE) or logits_TE.dtype != torch.float32:
        add_margins_ref(histogram_EX, logits_TE, bias_E, top_k, score_function, padding_mask_T)
        return
    T, E = logits_TE.shape
    EP = next_power_of_2(E)
    BT = max(1, TILE // EP)
    if T:
        with on_device(logits_TE):
            _add_margins_kernel[(cdiv(T, BT),)](
                logits_TE.contiguous(),
                bias_E.contiguous(),
                None if padding_mask_T is None else padding_mask_T.contiguous(),
                histogram_EX,
                T,
                E=E,
                K=top_k,
                X=histogram_EX.shape[1],
                FUNCTION=score_function,
                BT=BT,
                EP=EP,
                enable_fp_fusion=False,  # scores with the bits of `route`
                num_warps=max(1, EP // TILE),
            )
