"""Quantile balancing: solve for the expert bias instead of stepping towards it.

Legend: T local tokens, E experts, K choices per token, X bins.

A token takes expert e when score_e + bias_e exceeds its cutoff, the (K + 1)-th best score + bias.
So the margin cutoff - score_e is the bias that e would have needed, and the bias at which e gets
K / E of the tokens is the K / E quantile of its margins. A histogram per expert counts the margins
of a step, on all ranks; scores lie in [0, 1], so margins lie within 1 of the least and the greatest
bias, and the bins divide that range.

Source: https://kexue.fm/archives/11619; Kimi K3 technical report, section 2.3.3 and appendix D.
"""

from __future__ import annotations

import torch
from torch import Tensor

NUM_BINS = 1000


def new_histogram(num_experts: int, device: torch.device) -> Tensor:
    """Return int64 [E, X] zeros."""
    return torch.zeros(num_experts, NUM_BINS, dtype=torch.int64, device=device)


def add_margins(
    histogram_EX: Tensor,
    scores_TE: Tensor,
    bias_E: Tensor,
    top_k: int,
    padding_mask_T: Tensor | None,
) -> None:
    """Add one micro-batch's margins in place; no host sync, and the same bits in every run.

    Args:
        histogram_EX: int64.
        scores_TE: in [0, 1].
        bias_E: the bias with which these tokens chose.
        top_k: K, less than E.
        padding_mask_T: bool, True = not counted; None = no padding.
    """
    E, X = histogram_EX.shape
    low, width = _range(bias_E)
    cutoff_T1 = (scores_TE + bias_E).topk(top_k + 1, dim=-1).values[:, -1:]
    # A NaN would become an address; it lands in bin 0, of a step that will be skipped.
    bins_TE = ((cutoff_T1 - scores_TE - low) / width).clamp(0, X - 1).nan_to_num().long()
    bins_TE = bins_TE + torch.arange(E, device=bins_TE.device) * X
    counted_TE = torch.ones_like(bins_TE)
    if padding_mask_T is not None:
        counted_TE = counted_TE.masked_fill(padding_mask_T[:, None], 0)
    histogram_EX.view(-1).scatter_add_(0, bins_TE.flatten(), counted_TE.flatten())


def solve_bias(histogram_EX: Tensor, bias_E: Tensor, top_k: int) -> Tensor:
    """Return fp32 [E]: the balanced bias, with mean 0; the old one where nothing was counted.

    Args:
        histogram_EX: counts of a step's margins over all ranks.
        bias_E: the bias under which they were counted.
        top_k: K.
    """
    E, X = histogram_EX.shape
    low, width = _range(bias_E)
    below_EX = histogram_EX.cumsum(1)
    total_E1 = below_EX[:, -1:]
    wanted_E1 = total_E1.double() * (top_k / E)
    bin_E1 = torch.searchsorted(below_EX.double(), wanted_E1).clamp(max=X - 1)
    inside_E1 = histogram_EX.gather(1, bin_E1).clamp(min=1)
    before_E1 = below_EX.gather(1, bin_E1) - histogram_EX.gather(1, bin_E1)
    solved_E1 = low + width * (bin_E1 + (wanted_E1 - before_E1) / inside_E1)
    solved_E = solved_E1[:, 0] - solved_E1.mean()
    return torch.where(total_E1[:, 0] > 0, solved_E, bias_E).float()


def _range(bias_E: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lower end of the first bin and the width of one, fp64."""
    low = bias_E.min().double() - 1
    return low, (bias_E.max().double() + 1 - low) / NUM_BINS
