"""Forced choices of experts, independent of the scores: for benchmarks and debugging."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from moecore.moe.layer import MoELayer


def force_even_load(model: nn.Module) -> None:
    """Force even choices of experts in every MoELayer, in place.

    Experts are chosen cyclically, so the numbers of a rank's tokens per expert differ by at most
    one. Weights are still computed from the scores. Selection biases are no longer updated. Layers
    with expert choice routing are not changed, because their loads are even. Call it before or
    after `parallelize_moe`.
    """
    for layer in model.modules():
        if isinstance(layer, MoELayer) and layer.config.assignment != "expert_choice":
            force_ids(layer, make_even_ids)


def force_ids(layer: MoELayer, make_ids: Callable[[int, int, int, torch.device], Tensor]) -> None:
    """Make the router choose make_ids(T, E, K, device), int32 [T, K]; stop its bias updates."""
    layer.get_part("router").forced_ids = make_ids
    off: Any = dict(bias_update_rate=0.0, bias_update="sign", bias_per_micro_batch=False)
    layer.set_balance(replace(layer.config.balance, **off))


def make_even_ids(num_tokens: int, num_experts: int, top_k: int, device: torch.device) -> Tensor:
    """Return int32 ids [T, K]: entry j of the T * K is j * step % E; step and E are coprime."""
    # The step is the first number >= 2E / 3K that is coprime to E. A token's experts then span two
    # thirds of all experts, so it is sent to about as many ranks as with random choices: for E=128,
    # K=8, to 5.5 (random: 5.3) of 8 ranks, and to 3.4 (random: 3.6) of 4.
    # Example, E=8, K=2, step 3: [0, 3], [6, 1], [4, 7], [2, 5], and again.
    step = max(1, 2 * num_experts // (3 * top_k))
    while math.gcd(step, num_experts) > 1:
        step += 1
    ids = torch.arange(num_tokens * top_k, device=device) * step % num_experts
    return ids.to(torch.int32).view(num_tokens, top_k)
