"""`ContextOptions`: how attention communicates between context parallel ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from moecore.base.fields import CheckedRecord, Count, FieldErrors

Way = Literal["allgather", "a2a", "p2p", "a2a+p2p"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextOptions(CheckedRecord):
    """How attention communicates between context parallel ranks.

    Attributes:
        way: communication method: "allgather" of keys and values, "a2a" (all-to-all) over heads,
            "p2p" (ring), or "a2a+p2p" (both). "auto" = "allgather" for latent attention, otherwise
            the method that sends the fewest values.
        a2a_ranks: for "a2a+p2p": number of consecutive ranks in each all-to-all, a divisor of cp;
            None = the largest number that the heads allow.
        dynamic: each forward has its own cp size: groups of 1, 2, 4, ... consecutive data ranks
            share the sequences of a micro-batch (`packing.schedule_documents`). Requires
            `ParallelConfig.cp` 1 and loss="sum".
    """

    way: Way | Literal["auto"] = "auto"
    a2a_ranks: Count | None = None
    dynamic: bool = False

    def _find_field_errors(self) -> FieldErrors:
        if self.a2a_ranks is not None and self.way != "a2a+p2p":
            yield "a2a_ranks", f"be None with way ({self.way!r}): only 'a2a+p2p' reads it"

    def resolve(
        self, cp: int, num_heads: int, num_kv_heads: int, *, has_latents: bool
    ) -> ContextOptions:
        """Return the options with `way` ("auto" is replaced) and `a2a_ranks` chosen for `cp` ranks.

        `num_heads` and `num_kv_heads` are the heads of one tp rank. `has_latents` means latent
        attention (MLA). Raises ValueError if heads or cp do not allow the communication method.
        """
        way, ranks = self.way, self.a2a_ranks
        if way == "auto" and has_latents:
            way = "allgather"
        elif way == "auto":
            ranks = _choose_a2a_ranks(cp, num_heads, num_kv_heads)
            way = "p2p" if ranks == 1 else "a2a" if ranks == cp else "a2a+p2p"
        if way == "a2a+p2p":
            ranks = math.gcd(cp, num_kv_heads) if ranks is None else ranks
            problem = None
            if ranks in (1, cp):
                problem = (
                    f"be more than 1 and less than cp ({cp}): use 'p2p' or 'a2a', or another cp"
                )
            elif cp % ranks:
                problem = f"divide cp ({cp}): choose another number"
            elif num_kv_heads % ranks:
                heads = f"the key/value heads of a tp rank ({num_kv_heads})"
                problem = f"divide {heads}: choose another number"
            if problem is not None:
                raise ValueError(f"ContextOptions.a2a_ranks ({ranks}) must {problem}")
            return ContextOptions(way=way, a2a_ranks=ranks)
        if way == "a2a" and num_kv_heads % cp:
            raise ValueError(
                "ContextOptions.way ('a2a') must go with key/value heads of a tp rank "
                f"({num_kv_heads})"
                f" that divide by cp ({cp}): lower cp, or use 'a2a+p2p', 'p2p' or 'allgather'"
            )
        return ContextOptions(way=way)


def _choose_a2a_ranks(cp: int, num_heads: int, num_kv_heads: int) -> int:
    """Return the number of ranks per all-to-all for which all-to-alls and rings send the least."""
    max_ranks = math.gcd(cp, num_kv_heads)
    # An all-to-all of A ranks sends (A - 1) / A of H query and h key/value heads of a token each
    # way. A ring of cp / A ranks sends h heads cp / A - 1 times in forward and in backward, and
    # their gradients, which are twice as wide.

    def count_sent_heads(A: int) -> float:
        return (A - 1) / A * (num_heads + num_kv_heads) + 2 * (cp // A - 1) * num_kv_heads

    return min((A for A in range(1, max_ranks + 1) if max_ranks % A == 0), key=count_sent_heads)
