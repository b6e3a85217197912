"""Sums that copy engines bring home, beside whatever the multiprocessors do.

    copy_sums    sums [S, D] -> slot `SUMS_SLOT` of the tokens' ranks; the `reduce` that follows,
                 with `copied`, raises the flags of its operation and adds

In the i-th step each rank sends to the i-th rank after it, so that all links are busy.

When the slot is free. Between two uses of it there must be something that tells all ranks that it
has been read: an operation of `operations.py` without `copied`. A rank that has ended it has
seen flags of all ranks, raised after their reads.

Letters: as in `operations.py`. Copies move (G - 1) * C * D elements out and as many in, at about
280 GB/s.
"""

import torch
from torch import Tensor

from moecore.kernels.exchange.buffer import SymmetricBuffer


def copy_sums(buffer: SymmetricBuffer, sums_SD: Tensor) -> None:
    """Copy the sums of all source rows, holes too, to the tokens' ranks. No host sync.

    Args:
        buffer: this rank's end, of a layout with a slot of sums.
        sums_SD: contiguous, rows of `row_bytes`; must live until the `reduce`.
    """
    G = buffer.layout.num_ranks
    bytes_G = sums_SD.view(torch.uint8).view(G, -1)
    for i in range(1, G + 1):  # every rank begins with another peer
        peer = (buffer.rank + i) % G
        buffer.sums_slots[peer].copy_(bytes_G[peer], non_blocking=True)
