"""ContextParallel: the ranks that hold parts of the same rows, and the way of their attention.

Activations are cut along the tokens, and attention alone communicates, in one of four ways:

    allgather   every rank gathers all keys and values and computes its own queries
    a2a         every rank gets all tokens of some heads, and sends the results back
    p2p         keys and values go round a ring, and every rank merges what its queries see
    a2a+p2p     heads for tokens among neighbours, rings between those groups
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class ContextParallel:
    """This rank's place among the cp ranks, and who communicates with whom."""

    group: dist.ProcessGroup
    # those that exchange heads for tokens, consecutive ranks of the group; None = none
    a2a: dist.ProcessGroup | None = None
    # those that keys and values go round, every len(a2a)-th rank of the group; None = none. Without
    # both keys and values are gathered
    ring: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """This rank's index."""
        return self.group.rank()

    @property
    def gathers(self) -> bool:
        """Whether the way is "allgather"."""
        return self.a2a is None and self.ring is None
