"""What somebody should look at, one line each, from metrics that the host has read anyway."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from moecore.recipes.metrics import Metrics, expert_loads, layer_names

WINDOW, FEWEST = 128, 32  # losses before a step: the most that count, and the least
FACTOR = 10.0  # 6.7 standard deviations of normal noise
IDLE_STEPS = 100
MOST_NAMED = 8  # experts of a line


class Alarms:
    """Looks at each step of a start.

    loss      it is above the median of the `WINDOW` losses before it by `FACTOR` times their median
              absolute deviation, and the loss before it was not. Neither number moves with a few
              spikes. Without a reward alone: losses of a policy measure nothing.
    experts   no token has chosen them for `IDLE_STEPS` steps; once until one does.
    gradient  its norm is nan or inf, so the step was skipped. Not with a loss scale, which finds
              its value by such steps.
    """

    def __init__(self) -> None:
        self._losses = deque[float](maxlen=WINDOW)
        self._is_high = False
        self._idle: dict[tuple[str, int], int] = {}  # layer and expert -> steps without a token

    def of(self, step: int, metrics: Metrics) -> list[str]:
        """Return the lines of a step; of its metrics, with the load of each expert."""
        lines = [*self._loss(metrics), *self._experts(metrics), *self._gradient(metrics)]
        return [f"alarm at step {step}: {line}" for line in lines]

    def _loss(self, metrics: Metrics) -> list[str]:
        loss, before, was_high = metrics["loss"], [*self._losses], self._is_high
        if not math.isfinite(loss) or "reward" in metrics:
            return []
        self._losses.append(loss)
        if len(before) < FEWEST:
            return []
        middle = median(before)
        spread = median(abs(value - middle) for value in before)
        self._is_high = loss > middle + FACTOR * spread
        if not self._is_high or was_high:
            return []
        return [
            f"loss ({loss:.4g}) is more than {FACTOR:g} median absolute deviations ({spread:.2g}) "
            f"above {middle:.4g}, the median of the {len(before)} before it"
        ]

    def _experts(self, metrics: Metrics) -> list[str]:
        lines = []
        for layer in layer_names(metrics):
            new = []
            for e, load in enumerate(expert_loads(metrics, layer)):
                idle = self._idle[layer, e] = 0 if load else self._idle.get((layer, e), 0) + 1
                new += [e] if idle == IDLE_STEPS else []
            if new:
                names = ", ".join(map(str, new[:MOST_NAMED]))
                names += f" and {len(new) - MOST_NAMED} more" if len(new) > MOST_NAMED else ""
                lines.append(
                    f"no token of {IDLE_STEPS} steps has chosen experts {names} of {layer}"
                )
        return lines

    def _gradient(self, metrics: Metrics) -> list[str]:
        norm = metrics.get("grad_norm", 0.0)
        if math.isfinite(norm) or "loss_scale" in metrics:
            return []
        return [f"grad_norm ({norm}) is not finite, so the step was skipped"]
