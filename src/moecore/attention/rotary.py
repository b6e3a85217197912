"""Rotary position embedding: one table of angles per forward, with two ways to pair dims.

Legend: B rows, T tokens of a row, H heads, d rotated dims of a head.
"""

from __future__ import annotations

from torch import Tensor

from moecore.kernels.rows.rotary import rotary


class RotaryTable:
    """cos and sin of every position and frequency, made once per forward.

    It is no tuple or dataclass, because FSDP's mixed precision casts floating tensors of a block's
    arguments, also those in tuples and dataclasses, and 16 bits are too few for an angle's sine.

    Args:
        positions: whole numbers, [T] for all rows, or [B, T] for each token: then T is B * T.
        frequencies_d: fp32 [d / 2], radians from one position to the next.
        scale: factor on cos and sin.

    Source: RoFormer (arXiv:2104.09864).
    """

    def __init__(self, positions: Tensor, frequencies_d: Tensor, scale: float = 1.0) -> None:
        self.is_shared = positions.ndim == 1
        angles_Td = positions.flatten().to(frequencies_d.dtype).outer(frequencies_d)
        self.cos_Td, self.sin_Td = angles_Td.cos(), angles_Td.sin()
        if scale != 1.0:
            self.cos_Td *= scale
            self.sin_Td *= scale

    def rotate(self, x_BTHd: Tensor) -> Tensor:
        """Turn each pair (i, i + d / 2) of the last dim (Llama); fp32 inside, rounded once."""
        return self._turn(x_BTHd, neighbours=False)

    def rotate_pairs(self, x_BTHw: Tensor) -> Tensor:
        """Turn each pair (2i, 2i + 1) of the last d dims (DeepSeek); earlier dims stay."""
        # The result has all firsts, then all seconds: q and k may have any common order of dims.
        return self._turn(x_BTHw, neighbours=True)

    def _turn(self, x_BTHw: Tensor, neighbours: bool) -> Tensor:
        if self.is_shared:
            return rotary(x_BTHw, self.cos_Td, self.sin_Td, neighbours=neighbours)
        one_row = x_BTHw.flatten(0, 1)[None]
        return rotary(one_row, self.cos_Td, self.sin_Td, neighbours=neighbours).view(x_BTHw.shape)
