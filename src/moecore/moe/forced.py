"""Choices that are forced, whatever the scores: for benchmarks and debugging."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from moecore.moe.layer import MoELayer


def force_even_load(model: nn.Module) -> None:
    """Deal experts out in turn in every MoELayer, in place: a rank's loads differ by one at most.

    Weights still come from the scores. The choice reads no selection bias, so none moves. Layers
    whose experts choose are even already and stay. Before or after `parallelize_moe`.
    """
    for layer in model.modules():
        if isinstance(layer, MoELayer) and layer.config.assignment != "expert_choice":
            layer.part("router").forced_ids = even_ids
            off: Any = dict(bias_update_rate=0.0, bias_update="sign", bias_per_micro_batch=False)
            layer.set_balance(replace(layer.config.balance, **off))


def even_ids(num_tokens: int, num_experts: int, top_k: int, device: torch.device) -> Tensor:
    """Return int32 ids [T, K]: the j-th choice of all tokens is `j * step % E`."""
    # The step is the first number from 2E / 3K on that has no divisor in common with E. A token's
    # experts then span two thirds of all, so it goes to about as many ranks as one with random
    # choices: E=128, K=8, 8 ranks: 5.5 and 5.3; 4 ranks: 3.4 and 3.6.
    # Example, E=8, K=2, step 3: [0, 3], [6, 1], [4, 7], [2, 5], and again.
    step = max(1, 2 * num_experts // (3 * top_k))
    while math.gcd(step, num_experts) > 1:
        step += 1
    ids = torch.arange(num_tokens * top_k, device=device) * step % num_experts
    return ids.to(torch.int32).view(num_tokens, top_k)
