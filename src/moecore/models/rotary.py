"""Rotary position embedding: one table of angles per forward, two ways to pair up dims.

Legend: B sequences, T tokens of a sequence, H heads, d rotated dims of a head.

Note "order of dims": attention only reads q . k, so both may come back in any common order.
`rotate_pairs` returns the first of every pair, then the second of every pair.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moecore.kernels.rows.rotary import rotary
from moecore.models.config import DecoderConfig, YarnConfig


class RotaryTable:
    """cos and sin of every position and frequency, made once per forward.

    A plain class on purpose: FSDP's mixed precision casts floating tensors in the arguments of a
    block, those inside tuples and dataclasses too, and 16 bits are too few for an angle's sine.

    Args:
        seq_len: positions 0 .. seq_len - 1.
        head_dim: d.
        theta: base of the frequencies theta^(-2i / d).
        device: device of the table.
        yarn: slows the slow frequencies down and scales the table; None = off.

    Attributes:
        cos_Td: fp32 [T, d / 2].
        sin_Td: fp32 [T, d / 2].

    Source: RoFormer (arXiv:2104.09864); YaRN (arXiv:2309.00071).
    """

    def __init__(
        self,
        seq_len: int,
        head_dim: int,
        theta: float,
        device: torch.device,
        yarn: YarnConfig | None = None,
    ) -> None:
        half = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32)
        positions_T = torch.arange(seq_len, device=device, dtype=torch.float32)
        frequencies_d = 1.0 / theta ** (half / head_dim)
        if yarn is not None:
            frequencies_d = frequencies_d * _yarn_factors(head_dim, theta, yarn, device)
        angles_Td = torch.outer(positions_T, frequencies_d)
        self.cos_Td, self.sin_Td = angles_Td.cos(), angles_Td.sin()
        if yarn is not None:
            self.cos_Td *= yarn.table_scale
            self.sin_Td *= yarn.table_scale

    def rotate(self, x_BTHd: Tensor) -> Tensor:
        """Turn each pair (i, i + d / 2) of the last dim (Llama); fp32 inside, rounded once."""
        return rotary(x_BTHd, self.cos_Td, self.sin_Td)

    def rotate_pairs(self, x_BTHw: Tensor) -> Tensor:
        """Turn each pair (2i, 2i + 1) of the last d dims (DeepSeek) and leave those before alone.

        See the note "order of dims".
        """
        return rotary(x_BTHw, self.cos_Td, self.sin_Td, neighbours=True)


def rotary_table(config: DecoderConfig, seq_len: int, device: torch.device) -> RotaryTable:
    """Return the table that this decoder's attention reads.

    Args:
        config: the decoder.
        seq_len: T of the whole sequence.
        device: device of the table.
    """
    if config.mla is None:
        return RotaryTable(seq_len, config.head_dim, config.rope_theta, device)
    mla = config.mla
    return RotaryTable(seq_len, mla.qk_rope_head_dim, config.rope_theta, device, mla.yarn)


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
