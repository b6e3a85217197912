"""Quantile balancing: solve for the expert bias instead of stepping towards it.

Legend: L layers, E experts, K choices per token, X bins.

A token takes expert e when score_e + bias_e exceeds its cutoff, the (K + 1)-th best score + bias.
So the margin cutoff - score_e is the bias that e would have needed, and the bias at which e gets
K / E of the tokens is the K / E quantile of its margins. A histogram per expert counts the margins
of a step, on all ranks (`kernels/margins.py`).

Source: https://kexue.fm/archives/11619; Kimi K3 technical report, section 2.3.3 and appendix D.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moecore.kernels.margins import NUM_BINS, margin_range


def new_histogram(num_experts: int, device: torch.device) -> Tensor:
    """Return int64 [E, X] zeros."""
    return torch.zeros(num_experts, NUM_BINS, dtype=torch.int64, device=device)


def solve_bias(histogram_LEX: Tensor, bias_LE: Tensor, top_k: int) -> Tensor:
    """Return fp32 [L, E]: balanced biases, with mean 0; the old ones where nothing was counted.

    Args:
        histogram_LEX: counts of a step's margins over all ranks, of layers of the same sizes.
        bias_LE: the biases under which they were counted.
        top_k: K.
    """
    E, X = histogram_LEX.shape[-2:]
    low_L1, width_L1 = margin_range(bias_LE)
    below_LEX = histogram_LEX.cumsum(-1)
    total_LE1 = below_LEX[..., -1:]
    wanted_LE1 = total_LE1.double() * (top_k / E)
    bin_LE1 = torch.searchsorted(below_LEX.double(), wanted_LE1).clamp(max=X - 1)
    inside_LE1 = histogram_LEX.gather(-1, bin_LE1)
    before_LE1 = below_LEX.gather(-1, bin_LE1) - inside_LE1
    bins_LE1 = bin_LE1 + (wanted_LE1 - before_LE1) / inside_LE1.clamp(min=1)
    solved_LE = low_L1 + width_L1 * bins_LE1[..., 0]
    solved_LE = solved_LE - solved_LE.mean(-1, keepdim=True)
    return torch.where(total_LE1[..., 0] > 0, solved_LE, bias_LE).float()
