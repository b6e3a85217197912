"""How many rows and tokens each step of a run has: batch ramps, and stages of other lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moecore.base.fields import CheckedRecord, Count, Rules
from moecore.recipes.schedule import NumTokens


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRamp(CheckedRecord):
    """The growth of the batch at the beginning of a run.

    The first steps have `ramp_start` rows. Each equal part of `ramp_tokens` adds `ramp_increment`
    rows, until a step has all rows: batch_size x grad_accum x data ranks. The number of rows is a
    function of the tokens that the run has read, padding included.

    Attributes:
        ramp_start: rows of the first step over all ranks; None = all steps have all rows.
        ramp_increment: rows that are added at once: whole micro-batches of all data ranks.
        ramp_tokens: tokens after which a step has all rows.
    """

    ramp_start: Count | None = None
    ramp_increment: Count | None = None
    ramp_tokens: NumTokens | None = None

    def _rules(self) -> Rules:
        names = ("ramp_start", "ramp_increment", "ramp_tokens")
        missing = [name for name in names if getattr(self, name) is None]
        names_set = ", ".join(name for name in names if name not in missing)
        if missing and names_set:
            yield (
                missing[0],
                f"be given with {names_set}: give all three options of [batch] or none",
            )

    def check(self, *, rows: int, micro_batch_rows: int) -> None:
        """Raise ValueError unless micro-batches divide the ramp, whose end is all rows.

        Args:
            rows: of a step after the ramp.
            micro_batch_rows: rows of one micro-batch over all data ranks.
        """
        if self.ramp_start is None or self.ramp_increment is None:
            return
        for name in ("ramp_start", "ramp_increment"):
            if (value := getattr(self, name)) % micro_batch_rows:
                raise ValueError(
                    f"{name} ({value}) must be a multiple of {micro_batch_rows}, the rows of a "
                    "micro-batch of all data ranks: round it"
                )
        if self.ramp_start > rows or (rows - self.ramp_start) % self.ramp_increment:
            raise ValueError(
                f"ramp_start ({self.ramp_start}) plus a multiple of ramp_increment "
                f"({self.ramp_increment}) must be {rows}, the rows of a step: change one of them"
            )


class EqualSteps(NamedTuple):
    """Neighbouring steps of one size: the first of them, and rows and tokens of a row."""

    first: int
    rows: int
    seq_len: int


class StepSizes:
    """The rows and tokens of each step; steps count from 1.

    `StepSizes([EqualSteps(1, 2, 8), EqualSteps(4, 4, 8)])` has 16 tokens in steps 1, 2 and 3, and
    32 in each later one: `tokens_through(5)` is 112, and `steps_of(49)` is 4.
    """

    def __init__(self, parts: Sequence[EqualSteps]) -> None:
        self.parts = tuple(parts)

    def rows(self, step: int) -> int:
        """Return the rows of a step over all data ranks."""
        return max(part for part in self.parts if part.first <= max(step, 1)).rows

    def tokens_through(self, step: int) -> int:
        """Return the tokens of a step and of all before it, padding included."""
        ends = [*(part.first for part in self.parts), step + 1][1:]
        return sum(
            max(0, min(end, step + 1) - part.first) * part.rows * part.seq_len
            for part, end in zip(self.parts, ends, strict=True)
        )

    def steps_of(self, tokens: int) -> int:
        """Return the fewest steps that read so many tokens."""
        for number, part in enumerate(self.parts):
            remaining = tokens - self.tokens_through(part.first - 1)
            step = part.first - 1 + -(-remaining // (part.rows * part.seq_len))
            if number + 1 == len(self.parts) or step < self.parts[number + 1].first:
                return max(step, 0)
        raise AssertionError("the last part has no end")


def equal_steps(
    ramp: BatchRamp, *, first: int, rows: int, seq_len: int, tokens: int
) -> Iterator[EqualSteps]:
    """Yield the parts of steps whose rows grow, from step `first` on.

    Args:
        ramp: the growth.
        first: the first step.
        rows: of a step after the ramp.
        seq_len: tokens of a row.
        tokens: that the run has read before the first step.
    """
    if ramp.ramp_start is None or ramp.ramp_increment is None or ramp.ramp_tokens is None:
        yield EqualSteps(first, rows, seq_len)
        return
    num_increments = (rows - ramp.ramp_start) // ramp.ramp_increment
    while True:
        number = min(num_increments, tokens * num_increments // ramp.ramp_tokens)
        step_rows = ramp.ramp_start + number * ramp.ramp_increment
        yield EqualSteps(first, step_rows, seq_len)
        if number == num_increments:
            return
        end = -(-(number + 1) * ramp.ramp_tokens // num_increments)  # tokens of the next increment
        num_steps = -(-(end - tokens) // (step_rows * seq_len))
        first, tokens = first + num_steps, tokens + num_steps * step_rows * seq_len
