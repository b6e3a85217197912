"""Forced loads of experts, in given shares of all choices."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moecore.moe.forced_routing import force_ids
from moecore.moe.layer import MoELayer

GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples modulo 1 fill [0, 1) evenly, however many there are


def force_expert_loads(model: nn.Module, shares: Mapping[int, float]) -> None:
    """Force the loads of experts in every MoELayer, in place, to `shares` of all T * top_k choices.

    Experts without an entry have equal shares. A rank's loads differ from the shares by a few
    tokens. Weights and selection biases are treated as in `force_even_load`.

    Args:
        model: before or after `parallelize_moe`.
        shares: expert id -> its share, at most 1 / top_k, because a token chooses an expert once.

    Raises:
        ValueError: for an id without an expert, shares that no routing can have, or a layer with
            expert choice routing.
    """
    layers = {n: m for n, m in model.named_modules() if isinstance(m, MoELayer)}
    for name, layer in layers.items():
        config = layer.config
        E, K, sum_ = config.num_candidates, config.top_k, sum(shares.values())
        rest = (1 - sum_) / max(1, E - len(shares))
        if not all(0 <= e < E for e in shares):
            raise ValueError(
                f"shares ({dict(shares)}) must be of experts 0 to {E - 1} of {name}: correct ids"
            )
        if not all(0 <= s <= 1 / K for s in (*shares.values(), rest)) or (
            len(shares) == E and not math.isclose(sum_, 1)
        ):
            raise ValueError(
                f"shares ({dict(shares)}) must lie in [0, 1 / top_k ({K})] and leave each other "
                f"expert of {name} such a share, not {rest:.3g}: choose others"
            )
        if config.assignment == "expert_choice":
            raise ValueError(f"shares must be left out for {name}, whose experts choose evenly")
    for layer in layers.values():
        force_ids(layer, partial(make_ids_from_shares, shares=dict(shares)))


def make_ids_from_shares(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    device: torch.device,
    *,
    shares: Mapping[int, float],
) -> Tensor:
    """Return int32 ids [T, K], distinct in each token, whose frequencies are the given shares.

    `shares` maps expert ids to fractions of all ids. Other experts have equal fractions.
    """
    # Experts divide [0, K) into intervals of K times their shares, each at most 1 long. A token has
    # the experts at u, u + 1, .. for its own u in [0, 1).
    rest = (1 - sum(shares.values())) / max(1, num_experts - len(shares))
    wide: Any = dict(dtype=torch.float64, device=device)
    shares_E = torch.full((num_experts,), rest, **wide)
    for expert, share in shares.items():
        shares_E[expert] = share
    points_TK = torch.arange(num_tokens, **wide)[:, None] * GOLDEN % 1 + torch.arange(top_k, **wide)
    ids_TK = torch.searchsorted((top_k * shares_E).cumsum(0), points_TK, right=True)
    return ids_TK.clamp(max=num_experts - 1).to(torch.int32)
