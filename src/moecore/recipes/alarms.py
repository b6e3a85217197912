"""Alarms: lines about loss spikes, idle experts, uneven loads and large gradients of a run."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from moecore.recipes.metrics import Metrics, expert_loads, layer_names

WINDOW, FEWEST = 128, 32  # losses before a step: the most that count, and the least
FACTOR = 10.0  # 6.7 standard deviations of normal noise
IDLE_STEPS = 100
MOST_NAMED = 8  # experts of a line
BLOCK_STEPS = 20  # steps whose loads are averaged: few tokens of one step are uneven by chance
COLLAPSED_SHARE = 0.5  # of the experts, as the effective number of experts has it
FIRST_STEPS = 20  # of a run
FIRST_NORM = 100.0  # decoders with matrices of N(0, 0.02^2) begin at 1 to 20
NORM_GROWTH, LOSS_GROWTH = 3.0, 0.3  # a factor, and nats above the lowest loss before


class Alarms:
    """A detector of alarms, such as loss spikes and idle experts, in the metrics of each step.

    loss      it is above the median of the `WINDOW` losses before it by `FACTOR` times their median
              absolute deviation, and the loss before it was not. Neither number moves with a few
              spikes. Only without a reward: losses of a policy measure nothing.
    experts   no token has chosen them for `IDLE_STEPS` steps; once until one does.
    collapse  over `BLOCK_STEPS` steps the loads of a layer are as uneven as if at most half of its
              experts shared all tokens: 1 / sum(share^2) <= E / 2. Once until no layer is.
    gradient  its norm is nan, inf or above the limit of [skip_spikes], so the step was skipped. Not
              with a loss scale, which finds its value by steps that overflow.
    first steps  the norm of the first gradient is above `FIRST_NORM`; or two of the first steps in
              turn have losses that have risen by `LOSS_GROWTH`, and one of them has a norm that is
              `NORM_GROWTH` times the first. Each once. Without a reward only.
    """

    def __init__(self) -> None:
        self._block: dict[str, list[float]] = {}  # layer -> sum of the loads of a block
        self._block_steps = 0
        self._has_collapsed = False
        self._first_norm, self._lowest_loss = math.inf, math.inf
        self._rising_norms: list[float] = []  # of the steps in turn whose losses have risen
        self._has_grown = False
        self._losses = deque[float](maxlen=WINDOW)
        self._is_high = False
        self._idle: dict[tuple[str, int], int] = {}  # layer and expert -> steps without a token

    def find_alarms(self, step: int, metrics: Metrics) -> list[str]:
        """Return the alarms of a step, one line each; `metrics` has the load of each expert."""
        lines = [
            *self._check_loss(metrics),
            *self._check_experts(metrics),
            *self._check_collapse(metrics),
        ]
        lines += [*self._check_gradient(metrics), *self._check_first_steps(step, metrics)]
        return [f"alarm at step {step}: {line}" for line in lines]

    def _check_loss(self, metrics: Metrics) -> list[str]:
        """Return the alarm about a loss far above the losses before, or []."""
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

    def _check_experts(self, metrics: Metrics) -> list[str]:
        """Return a line for each layer whose experts have had no token for `IDLE_STEPS` steps."""
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

    def _check_gradient(self, metrics: Metrics) -> list[str]:
        """Return the alarm about a step that was skipped because of its gradient norm, or []."""
        norm = metrics.get("grad_norm", 0.0)
        if math.isfinite(norm):
            is_spike = metrics.get("skipped", 0.0) > 0
            spike = f"grad_norm ({norm:.4g}) is above the limit of [skip_spikes]"
            return [f"{spike}, so the step was skipped"] * is_spike
        if "loss_scale" in metrics:
            return []
        return [f"grad_norm ({norm}) is not finite, so the step was skipped"]

    def _check_collapse(self, metrics: Metrics) -> list[str]:
        """Return the alarm about layers with uneven loads over `BLOCK_STEPS` steps, or []."""
        for layer in layer_names(metrics):
            loads_E = expert_loads(metrics, layer)
            if not loads_E:
                continue
            sums_E = self._block.setdefault(layer, [0.0] * len(loads_E))
            self._block[layer] = [a + b for a, b in zip(sums_E, loads_E, strict=True)]
        self._block_steps += 1
        if self._block_steps < BLOCK_STEPS:
            return []
        uneven = {
            layer: _compute_effective_expert_fraction(sums_E)
            for layer, sums_E in self._block.items()
        }
        uneven = {layer: share for layer, share in uneven.items() if share <= COLLAPSED_SHARE}
        block, self._block, self._block_steps = self._block, {}, 0
        is_new, self._has_collapsed = bool(uneven) and not self._has_collapsed, bool(uneven)
        if not is_new:
            return []
        layer = min(uneven, key=lambda name: uneven[name])
        sums_E = block[layer]
        busiest = max(range(len(sums_E)), key=lambda e: sums_E[e])
        share = sums_E[busiest] / sum(sums_E)
        layers = layer if len(uneven) == 1 else f"{len(uneven)} layers, most of all {layer},"
        return [
            f"loads of {layers} have collapsed: expert {busiest} has {share:.1%} of the "
            f"choices of {BLOCK_STEPS} steps, {share * len(sums_E):.1f} times the mean: raise "
            "[balance] global_batch_coef, lower --lr or lengthen the warm-up"
        ]

    def _check_first_steps(self, step: int, metrics: Metrics) -> list[str]:
        """Return the alarm about large gradients or rising losses in the first steps, or []."""
        norm, loss = metrics.get("grad_norm", math.nan), metrics["loss"]
        if step > FIRST_STEPS or "reward" in metrics or not math.isfinite(norm + loss):
            return []
        rise, self._lowest_loss = loss - self._lowest_loss, min(loss, self._lowest_loss)
        norms = self._rising_norms = [*self._rising_norms, norm] if rise > LOSS_GROWTH else []
        if step == 1:
            self._first_norm = norm
            if norm <= FIRST_NORM:
                return []
            return [
                f"grad_norm ({norm:.4g}) of the first step is above {FIRST_NORM:g}: check the "
                "initialisation of the weights, or the weights that the run starts from"
            ]
        growth = max(norms, default=0.0) / max(self._first_norm, 1e-30)
        if len(norms) < 2 or growth < NORM_GROWTH or self._has_grown:
            return []
        self._has_grown = True
        return [
            f"grad_norm ({max(norms):.4g}) is {growth:.1f} times that of the first step and the "
            f"loss ({loss:.4g}) has risen by {rise:.2g}: lower --lr or lengthen the warm-up"
        ]


def _compute_effective_expert_fraction(loads_E: list[float]) -> float:
    """Return the effective number of experts divided by E: 1 for even loads, 1/E for one expert.

    `_compute_effective_expert_fraction([2, 2, 0, 0])` is 0.5. Without tokens it is 1.
    """
    squares = sum(load * load for load in loads_E)
    return sum(loads_E) ** 2 / squares / len(loads_E) if squares else 1.0
