"""The frequencies of a decoder's rotary position embedding."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moecore.attention.rotary import RotaryTable
from moecore.models.config import DecoderConfig, YarnConfig


def rotary_table(config: DecoderConfig, positions: Tensor) -> RotaryTable:
    """Return the table that this decoder's attention reads.

    Args:
        config: the decoder.
        positions: whole numbers, [T] for all rows, or [B, T] with those of every token.

    Source: RoFormer (arXiv:2104.09864); YaRN (arXiv:2309.00071).
    """
    mla = config.mla
    head_dim = config.head_dim if mla is None else mla.qk_rope_head_dim
    half = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    frequencies_d = 1.0 / config.rope_theta ** (half / head_dim)
    if mla is None or mla.yarn is None:
        return RotaryTable(positions, frequencies_d)
    factors_d = _yarn_factors(head_dim, config.rope_theta, mla.yarn, positions.device)
    return RotaryTable(positions, frequencies_d * factors_d, mla.yarn.table_scale)


def _yarn_factors(head_dim: int, theta: float, yarn: YarnConfig, device: torch.device) -> Tensor:
    """Return fp32 [d / 2], the factor on each frequency: 1 for fast ones, 1 / factor for slow ones.

    Frequency i turns `original * theta^(-2i / d) / (2 pi)` times over the original length. The
    mix is linear in i, between the i that turns beta_fast times (rounded down) and the one that
    turns beta_slow times (rounded up).
    """

    def index_of(turns: float) -> float:
        length = yarn.original_max_seq_len / (2 * math.pi * turns)
        return head_dim * math.log(length) / (2 * math.log(theta))

    first = max(math.floor(index_of(yarn.beta_fast)), 0)
    last = min(math.ceil(index_of(yarn.beta_slow)), head_dim - 1)
    index_d = torch.arange(head_dim // 2, device=device, dtype=torch.float32)
    # A thousandth in place of no width at all, as published.
    slow_d = ((index_d - first) / (last - first or 0.001)).clamp(0, 1)
    return 1.0 - slow_d + slow_d / yarn.factor
