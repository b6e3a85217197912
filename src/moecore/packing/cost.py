"""Cost models: the time of a document on each of its cp ranks, from its length and cp.

The cp ranks of a micro-batch share all its documents. The cost of the micro-batch is the sum.
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
    """An analytic cost model: attention, other matmuls, key/value exchange; any unit of time.

        linear * L / cp + max(quadratic * L^2 / cp, exchange * L * (cp - 1) / cp)

    L is the length of the document. The exchange overlaps with attention, so the formula takes the
    longer time. A model has h heads of dim d, k key/value heads and P active parameters per layer.
    A GPU has F FLOP/s and B bytes/s to the next GPU. Then the forward of a layer has

        quadratic = 2 h d / F       linear = 2 P / F       exchange = 4 k d / B

    The defaults are for Qwen3-30B-A3B on H200 with 200 GB/s between GPUs, divided by `quadratic`.

    Attributes:
        quadratic: time of causal attention per squared token.
        linear: time of all other matmuls per token.
        exchange: time per token whose keys and values a rank receives from other ranks.
        fixed: time per micro-batch for launches and FSDP all-gathers. The default is `linear` times
            1,000 tokens.
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
        """The largest cp of the cost model. None = no limit."""
        return None

    def of(self, lengths_N: Integers, cp: int) -> Costs:
        """Return the time of each document on each of its cp ranks, float64 [N]."""
        length = lengths_N.astype(np.float64)
        exchange = self.exchange * length * (cp - 1)
        compute = self.linear * length + np.maximum(self.quadratic * length**2, exchange)
        costs: Costs = compute / cp
        return costs


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredCost(CheckedRecord):
    """A cost model from measured times of documents.

    Times are interpolated linearly between measured lengths, and proportional to the length below
    the first. Above the last length, times grow with the square of the length.

    Attributes:
        lengths: the measured lengths in tokens, ascending.
        seconds: cp -> measured times of one document of each length, ascending. The keys are 1, 2,
            4, ...; the largest key limits the cp of every document.
        fixed: time of a micro-batch without tokens, in seconds.
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
