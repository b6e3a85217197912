"""LearningRateSchedule: the learning rate of a step, and when periodic events are due."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from moecore.base.fields import Bound, CheckedRecord, Count, CountOrZero, Rules

Share = Annotated[float, Bound(">=", 0), Bound("<=", 1)]
NumTokens = Annotated[int, Bound(">=", 1), Bound("<", 2**62)]
Shape = Literal["linear", "cosine", "1-sqrt"]
# From 1 to 0 over the decay; the argument is the completed share of the decay.
SHAPES: dict[Shape, Callable[[float], float]] = {
    "linear": lambda share: 1 - share,
    "cosine": lambda share: 0.5 * (1 + math.cos(math.pi * share)),
    "1-sqrt": lambda share: 1 - math.sqrt(share),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningRateSchedule(CheckedRecord):
    """The learning rate over the steps of a run: linear warm-up, then constant, then decay.

    The rate is a function of the step alone, so a resumed run needs no state of it.

    Attributes:
        lr_schedule: "cosine" and "linear" decay from the end of the warm-up to the last step; "wsd"
            (warm-up, stable, decay) decays over the last `decay_steps` steps; "constant" never.
        warmup_steps: steps of the warm-up; None = `warmup_tokens`, else 5% of the schedule.
        min_warmup_steps: the fewest steps of a warm-up of 5%, but at most a third of the schedule.
        warmup_tokens: tokens of the warm-up, rounded up to whole steps.
        schedule_steps: the step at which the decay ends; None = the last step of the run.
        decay_steps: steps of the decay of "wsd"; None = 10% of the schedule.
        decay_shape: the curve of the decay of "wsd".
        min_lr_ratio: the rate after the decay, as a share of the peak.
    """

    lr_schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    warmup_steps: CountOrZero | None = None
    min_warmup_steps: CountOrZero = 0
    warmup_tokens: NumTokens | None = None
    schedule_steps: Count | None = None
    decay_steps: Count | None = None
    decay_shape: Shape = "1-sqrt"
    min_lr_ratio: Share = 0.1

    def _rules(self) -> Rules:
        if self.warmup_steps is not None and self.warmup_tokens is not None:
            yield "warmup_tokens", f"be None with warmup_steps ({self.warmup_steps}): drop one"
        if self.decay_steps is not None and self.lr_schedule != "wsd":
            yield "decay_steps", f"be None with lr_schedule ({self.lr_schedule!r}): use 'wsd'"

    def factor(self, step: int, *, steps: int, steps_of: Callable[[int], int]) -> float:
        """Return the learning rate of a step as a share of the peak.

        Args:
            step: the optimizer step, from 1.
            steps: optimizer steps of the run.
            steps_of: returns the fewest steps that read so many tokens over all ranks.
        """
        total = self.schedule_steps or steps
        warmup = self._warmup(total, steps_of)
        if step <= warmup:
            return step / warmup
        if self.lr_schedule == "constant":
            return 1.0
        shape: Shape = self.decay_shape if self.lr_schedule == "wsd" else self.lr_schedule
        begin = warmup
        if self.lr_schedule == "wsd":
            begin = max(warmup, total - (self.decay_steps or max(1, round(0.1 * total))))
        share = min(1.0, max(0, step - begin) / max(1, total - begin))
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * SHAPES[shape](share)

    def _warmup(self, total: int, steps_of: Callable[[int], int]) -> int:
        if self.warmup_tokens is not None:
            return steps_of(self.warmup_tokens)
        if self.warmup_steps is None:
            return max(1, round(0.05 * total), min(self.min_warmup_steps, total // 3))
        return self.warmup_steps


def is_due(step: int, *, every: int, steps: int) -> bool:
    """Whether an event of every `every` steps and of the last step is due; every 0 = never."""
    return every > 0 and (step % every == 0 or step == steps)
