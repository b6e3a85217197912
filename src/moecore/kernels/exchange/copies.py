"""Sums that copy engines bring home, beside whatever the multiprocessors do.

    copy_sums    sums [S, D] -> slot `SUMS_SLOT` of the tokens' ranks; the `reduce` that follows,
                 with `copied`, raises the flags of its operation and adds

In the i-th step each rank sends to the i-th rank after it, so that all links are busy.

When the slot is free: `TRANSITIONS`. Between a read of it and the next copies there is an operation
that does not read it. A rank that has ended that operation has seen flags of all ranks, raised
after their reads. Copies are part of a backward pass, behind that of a combine, an operation: so
what is captured into a CUDA graph, or replayed, comes before both or after both. Letters: as in
`operations.py`. Copies move (G - 1) * C * D elements out and as many in, at about 280 GB/s.
"""

from enum import Enum

import torch
from torch import Tensor

from moecore.kernels.exchange.buffer import SymmetricBuffer


class SlotState(Enum):
    """What this rank knows of the slot of copied sums; the same on all ranks."""

    FREE = "every rank has read it"
    COPYING = "copies write it"
    READ = "this rank has read it, others may be reading"


class SlotEvent(Enum):
    """What an exchange does next."""

    OPERATION = "an operation that does not read the slot"
    COPY = "copies into the slot begin"
    READ = "the `reduce` that reads the slot"


# State -> event -> next state; an event that is not there must not come.
TRANSITIONS = {
    SlotState.FREE: {SlotEvent.OPERATION: SlotState.FREE, SlotEvent.COPY: SlotState.COPYING},
    SlotState.COPYING: {SlotEvent.OPERATION: SlotState.COPYING, SlotEvent.READ: SlotState.READ},
    SlotState.READ: {SlotEvent.OPERATION: SlotState.FREE},
}


def copy_sums(buffer: SymmetricBuffer, sums_SD: Tensor) -> None:
    """Copy the sums of all source rows, holes too, to the tokens' ranks. No host sync."""
    # Rows are contiguous, of `row_bytes`, and must live until the `reduce`.
    G = buffer.layout.num_ranks
    bytes_G = sums_SD.view(torch.uint8).view(G, -1)
    for i in range(1, G + 1):  # every rank begins with another peer
        peer = (buffer.rank + i) % G
        buffer.sums_slots[peer].copy_(bytes_G[peer], non_blocking=True)
