"""Quantile balancing: solve for the expert bias instead of stepping towards it.

Legend: L layers, T tokens, E experts, K choices per token, X bins.

A token takes expert e when score_e + bias_e exceeds its cutoff, the (K + 1)-th best score + bias.
So the margin cutoff - score_e is the bias that e would have needed, and the bias at which e gets
K / E of the tokens is the K / E quantile of its margins. A histogram per expert counts the margins
(`kernels/routing/margins.py`): those of a step on all ranks move the bias that the layer keeps;
those of one micro-batch, where asked for, are solved before its tokens choose.

Source: https://kexue.fm/archives/11619; Kimi K3 technical report, section 2.3.3 and appendix D;
for one batch at a time arXiv:2502.15451.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.base.options.layer import MoEConfig
from moecore.kernels.routing.margins import NUM_BINS, add_margins_, even_bias
from moecore.moe.micro_batch import MicroBatch


def new_histogram(num_experts: int, device: torch.device) -> Tensor:
    """Return int64 [E, X] zeros."""
    return torch.zeros(num_experts, NUM_BINS, dtype=torch.int64, device=device)


def bias_move(histogram_LEX: Tensor, bias_LE: Tensor, top_k: int) -> Tensor:
    """Return fp32 [L, E]: what to add for even loads, with mean 0; 0 where nothing was counted.

    Args:
        histogram_LEX: counts of a step's margins over all ranks, of layers of the same sizes.
        bias_LE: the biases under which they were counted.
        top_k: K.
    """
    move_LE = even_bias(histogram_LEX, bias_LE, top_k) - bias_LE
    return move_LE - move_LE.mean(-1, keepdim=True)


@torch.compiler.disable
@torch.no_grad()
def bias_of_micro_batch(
    logits_TE: Tensor, bias_E: Tensor, config: MoEConfig, micro_batch: MicroBatch
) -> Tensor:
    """Return fp32 [E]: the bias that evens out the loads of one micro-batch.

    The same on all ranks that share it: one all-reduce of the histogram where there are several.
    No host sync.

    Args:
        bias_E: the layer's own bias, from which the margins are counted.
        micro_batch: where the tokens stand; its padding is not counted.
    """
    histogram_EX = new_histogram(config.num_experts, logits_TE.device)
    how = (config.top_k, config.score_function)
    add_margins_(histogram_EX, logits_TE, bias_E, *how, micro_batch.padding_mask_T)
    if micro_batch.group is not None:
        dist.all_reduce(histogram_EX, group=micro_batch.group)
    return even_bias(histogram_EX, bias_E, config.top_k)
