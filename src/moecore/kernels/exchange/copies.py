"""Sums that copy engines send to the tokens' ranks while the multiprocessors compute.

`copy_sums_to_peers` copies sums [S, D] into slot `SUMS_SLOT` of the tokens' ranks. The next
`reduce`, with `has_sums`, raises the flags of its operation and adds them. In the i-th step each
rank sends to the i-th rank after it, so that all links are busy. A rank sends and receives (G - 1)
* C * D elements each, at about 280 GB/s.

`TRANSITIONS` says when the slot may be written. Between a read of the slot and the next copies is
an operation that does not read it. A rank that has finished this operation has seen the flags of
all ranks, which they raised after their reads. CUDA graphs contain the copies and their `reduce`
together.

Letters: as in `operations.py`.
"""

from enum import Enum

import torch
from torch import Tensor

from moecore.kernels.exchange.buffer import SymmetricBuffer


class SlotState(Enum):
    """State of the buffer slot to which copy engines write partial sums; identical on all ranks."""

    FREE = "every rank has read it"
    COPYING = "copies write it"
    READ = "this rank has read it, others may be reading"


class SlotEvent(Enum):
    """An event that changes `SlotState`: copies begin, sums are read, or another operation runs."""

    OPERATION = "an operation that does not read the slot"
    COPY = "copies into the slot begin"
    READ = "the `reduce` that reads the slot"


# State -> event -> next state. Other events must not occur.
TRANSITIONS = {
    SlotState.FREE: {SlotEvent.OPERATION: SlotState.FREE, SlotEvent.COPY: SlotState.COPYING},
    SlotState.COPYING: {SlotEvent.OPERATION: SlotState.COPYING, SlotEvent.READ: SlotState.READ},
    SlotState.READ: {SlotEvent.OPERATION: SlotState.FREE},
}


def copy_sums_to_peers(buffer: SymmetricBuffer, sums_SD: Tensor) -> None:
    """Send sums [S, D] to the ranks of their tokens by copy engines, without SMs. No host sync.

    Row g * C + t is this rank's sum for token t of rank g, C = `max_tokens`. Rows without a sum are
    also copied. `sums_SD` is contiguous with rows of `row_bytes`, and must not be freed before the
    `combine_rows` that adds the sums.
    """
    G = buffer.layout.num_ranks
    bytes_G = sums_SD.view(torch.uint8).view(G, -1)
    for i in range(1, G + 1):  # each rank begins with a different peer
        peer = (buffer.rank + i) % G
        buffer.sums_slots[peer].copy_(bytes_G[peer], non_blocking=True)
