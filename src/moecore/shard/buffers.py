"""Buffer: memory that the units of one kind take turns to use, allocated once.

A unit has its place in a buffer for good: its whole parameters keep their addresses, so that what
autograd saves of them in forward is there again in backward, and CUDA graphs replay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from moecore.shard.unit import Unit


class Buffer:
    """One flat tensor and the unit whose values are in it.

    Args:
        numel: elements of the largest unit.
        dtype: of them.

    Attributes:
        holder: the unit that has it; None = nobody.
        event: after which it may be overwritten; None = now.
    """

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self.numel, self.dtype = numel, dtype
        self.holder: Unit | None = None
        self.event: torch.Event | None = None
        self._flat: Tensor | None = None

    def flat(self, device: torch.device) -> Tensor:
        """Return the memory."""
        if self._flat is None or self._flat.device != device:
            with torch.inference_mode(False):
                self._flat = torch.empty(self.numel, dtype=self.dtype, device=device)
        return self._flat
