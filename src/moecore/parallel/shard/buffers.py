"""Buffer: memory that the units of one kind take turns to use, allocated once.

A unit has its place in a buffer for good: its whole parameters keep their addresses, so that what
autograd saves of them in forward is there again in backward, and CUDA graphs replay.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import torch
from torch import Tensor

from moecore.parallel.shard.streams import Mark

Holder = TypeVar("Holder")  # a unit, or its gradients


class Buffer(Generic[Holder]):
    """One flat tensor, and whose values are in it.

    Args:
        numel: elements of the largest unit.
        dtype: of them.
        mark: behind which it may be overwritten.

    Attributes:
        holder: who has it; None = nobody.
    """

    def __init__(self, numel: int, dtype: torch.dtype, mark: Mark) -> None:
        self.numel, self.dtype, self.mark = numel, dtype, mark
        self.holder: Holder | None = None
        self._flat: Tensor | None = None

    def flat(self, device: torch.device) -> Tensor:
        """Return the memory."""
        if self._flat is None or self._flat.device != device:
            with torch.inference_mode(False):
                self._flat = torch.empty(self.numel, dtype=self.dtype, device=device)
        return self._flat
