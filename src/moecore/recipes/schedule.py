"""Where in a run a step is: its learning rate, and whether a checkpoint follows it."""

from __future__ import annotations

import math

WARMUP_SHARE = 0.05  # of the schedule's steps
LAST_LR_SHARE = 0.1  # of the peak


def lr_at(step: int, *, peak: float, steps: int) -> float:
    """Return the learning rate of a step >= 1: linear warm-up, then cosine to a tenth."""
    warmup = max(1, round(WARMUP_SHARE * steps))
    if step <= warmup:
        return peak * step / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    cosine = 0.5 * (1 + math.cos(math.pi * done))
    return peak * (LAST_LR_SHARE + (1 - LAST_LR_SHARE) * cosine)


def is_due(step: int, *, every: int, steps: int) -> bool:
    """Whether what happens every so many steps, and after the last one, follows; 0 = never."""
    return every > 0 and (step % every == 0 or step == steps)
