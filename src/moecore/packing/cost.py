"""What a document costs a rank, by its length and by how many ranks share it.

All documents of a micro-batch are shared by the same ranks, and their costs are added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

import numpy as np

from moecore.base.fields import CheckedRecord, Count, Positive, PositiveOrZero, Rules
from moecore.packing.documents import Integers

Costs = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentCost(CheckedRecord):
    """Attention, work per token and the exchange of keys and values, in any unit of time.

        linear * L / cp + max(quadratic * L^2 / cp, exchange * L * (cp - 1) / cp)

    The exchange runs beside attention, so the longer of the two counts. Of a model with h heads of
    dim d, k key-value heads, and P parameters per layer that a token meets, on a GPU of F FLOP/s
    with B bytes/s to its neighbour, a layer's forward has

        quadratic = 2 h d / F       linear = 2 P / F       exchange = 4 k d / B

    The defaults are Qwen3-30B-A3B's on H200 with 200 GB/s between GPUs, as multiples of quadratic.

    Attributes:
        quadratic: attention, per squared token; causal.
        linear: all other products, per token.
        exchange: keys and values, per token that a rank gets from another.
        fixed: per micro-batch: launches, and what units gather; by default that of 1,000 tokens.
    """

    quadratic: PositiveOrZero = 1.0
    linear: PositiveOrZero = 20_000.0
    exchange: PositiveOrZero = 750.0
    fixed: PositiveOrZero = 2e7

    def _rules(self) -> Rules:
        if not self.quadratic and not self.linear:
            yield "quadratic", f"be > 0 with linear ({self.linear}): give one of them"

    @property
    def most_cp(self) -> int | None:
        """None: a document may be shared by any number of ranks."""
        return None

    def of(self, lengths_N: Integers, cp: int) -> Costs:
        """Return what each document costs each of its cp ranks, float64 [N]."""
        length = lengths_N.astype(np.float64)
        exchange = self.exchange * length * (cp - 1)
        compute = self.linear * length + np.maximum(self.quadratic * length**2, exchange)
        costs: Costs = compute / cp
        return costs


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredCost(CheckedRecord):
    """Measured times of documents; between two lengths on a line, beyond the last as its square.

    Attributes:
        lengths: that were measured, ascending.
        seconds: cp -> time of a document of each length, ascending, for each cp 1, 2, 4, ... that
            was measured. No document is shared by more ranks.
        fixed: of a micro-batch without tokens.
    """

    lengths: Annotated[tuple[Count, ...], "pass the lengths that were measured"]
    seconds: Mapping[int, tuple[Positive, ...]]
    fixed: PositiveOrZero = 0.0

    def _rules(self) -> Rules:
        if not self.lengths or any(a >= b for a, b in pairwise(self.lengths)):
            yield "lengths", "ascend, with at least one: sort the table"
        if not self.seconds or set(self.seconds) != {1 << i for i in range(len(self.seconds))}:
            yield "seconds", "have the keys 1, 2, 4, ... without a gap: measure each cp"
        for cp, times in self.seconds.items():
            if len(times) != len(self.lengths) or any(a >= b for a, b in pairwise(times)):
                yield (
                    "seconds",
                    f"ascend with lengths, {len(self.lengths)} for each cp, also for {cp}: "
                    "take medians",
                )

    @property
    def most_cp(self) -> int | None:
        """The largest cp that was measured."""
        return max(self.seconds)

    def of(self, lengths_N: Integers, cp: int) -> Costs:
        """Return the time of each document on each of its cp ranks, float64 [N]."""
        first, last = self.lengths[0], self.lengths[-1]
        times = self.seconds[cp]
        inside = np.interp(lengths_N, self.lengths, times)
        below = times[0] * lengths_N / first
        beyond = times[-1] * (lengths_N / last) ** 2
        return np.where(lengths_N < first, below, np.where(lengths_N > last, beyond, inside))


Cost = DocumentCost | MeasuredCost
