"""Alarms about loss spikes, idle experts, uneven loads and large gradients of a training run."""

import math
from collections import deque
from collections.abc import Iterator
from statistics import median

from moecore.recipes.metrics import Loads, Metrics

WINDOW, MIN_LOSSES = 128, 32  # previous losses that are compared: at most, and at least
FACTOR = 10.0  # 6.7 standard deviations of normal noise
IDLE_STEPS = 100
MAX_LISTED = 8  # experts in one line
BLOCK_STEPS = 20  # steps whose loads are averaged: few tokens of one step are uneven by chance
COLLAPSED_SHARE = 0.5  # of the experts, as the effective number of experts has it
FIRST_STEPS = 20  # of a run
FIRST_NORM = 100.0  # decoders with matrices of N(0, 0.02^2) begin at 1 to 20
NORM_GROWTH, LOSS_GROWTH = 3.0, 0.3  # a factor, and nats above the lowest loss before


class Alarms:
    """A detector of alarms, such as loss spikes and idle experts, in the metrics of each step.

        loss         The loss is above the median of the last `WINDOW` losses by more than `FACTOR`
                     times their median absolute deviation, and the previous loss was not.
        experts      No token has chosen an expert for `IDLE_STEPS` steps.
        collapse     The loads of a layer, averaged over `BLOCK_STEPS` steps, are as uneven as if at
                     most half of its experts shared all tokens: 1 / sum(share^2) <= E / 2.
        gradient     The gradient norm is nan, inf or above the limit of [skip_spikes], so the
                     step was skipped. With a loss scale, nan and inf raise no alarm.
        first steps  The first gradient norm is above `FIRST_NORM`. Or in the first steps, two
                     consecutive losses are `LOSS_GROWTH` nats above the lowest earlier loss, and a
                     gradient norm of these is at least `NORM_GROWTH` times the first norm.

    An alarm about experts or collapse is repeated only after the condition has ended. Losses of
    reinforcement learning (metrics with "reward") raise no alarm.
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

    def find_alarms(self, step: int, metrics: Metrics, loads: Loads) -> list[str]:
        """Return one line of text per alarm of a step with these metrics and loads of experts."""
        lines = [*self._check_loss(metrics), *self._check_experts(loads)]
        lines += [*self._check_collapse(loads), *self._check_gradient(metrics)]
        lines += self._check_first_steps(step, metrics)
        return [f"alarm at step {step}: {line}" for line in lines]

    def _check_loss(self, metrics: Metrics) -> Iterator[str]:
        loss, before, was_high = metrics["loss"], [*self._losses], self._is_high
        if not math.isfinite(loss) or "reward" in metrics:
            return
        self._losses.append(loss)
        if len(before) < MIN_LOSSES:
            return
        middle = median(before)
        spread = median(abs(value - middle) for value in before)
        self._is_high = loss > middle + FACTOR * spread
        if self._is_high and not was_high:
            yield (
                f"loss ({loss:.4g}) is more than {FACTOR:g} median absolute deviations "
                f"({spread:.2g}) above {middle:.4g}, the median of the {len(before)} before it"
            )

    def _check_experts(self, loads: Loads) -> Iterator[str]:
        for layer, loads_E in loads.items():
            new = []
            for e, load in enumerate(loads_E):
                idle = self._idle[layer, e] = 0 if load else self._idle.get((layer, e), 0) + 1
                new += [e] if idle == IDLE_STEPS else []
            if new:
                names = ", ".join(map(str, new[:MAX_LISTED]))
                names += f" and {len(new) - MAX_LISTED} more" if len(new) > MAX_LISTED else ""
                yield f"no token of {IDLE_STEPS} steps has chosen experts {names} of {layer}"

    def _check_gradient(self, metrics: Metrics) -> Iterator[str]:
        norm = metrics.get("grad_norm", 0.0)
        if not math.isfinite(norm):
            if "loss_scale" not in metrics:
                yield f"grad_norm ({norm}) is not finite, so the step was skipped"
        elif metrics.get("skipped", 0.0) > 0:
            spike = f"grad_norm ({norm:.4g}) is above the limit of [skip_spikes]"
            yield f"{spike}, so the step was skipped"

    def _check_collapse(self, loads: Loads) -> Iterator[str]:
        for layer, loads_E in loads.items():
            sums_E = self._block.setdefault(layer, [0.0] * len(loads_E))
            self._block[layer] = [a + b for a, b in zip(sums_E, loads_E, strict=True)]
        self._block_steps += 1
        if self._block_steps < BLOCK_STEPS:
            return
        uneven = {
            layer: _compute_effective_expert_fraction(sums_E)
            for layer, sums_E in self._block.items()
        }
        uneven = {layer: share for layer, share in uneven.items() if share <= COLLAPSED_SHARE}
        block, self._block, self._block_steps = self._block, {}, 0
        is_new, self._has_collapsed = bool(uneven) and not self._has_collapsed, bool(uneven)
        if not is_new:
            return
        layer = min(uneven, key=lambda name: uneven[name])
        sums_E = block[layer]
        busiest = max(range(len(sums_E)), key=lambda e: sums_E[e])
        share = sums_E[busiest] / sum(sums_E)
        layers = layer if len(uneven) == 1 else f"{len(uneven)} layers, most of all {layer},"
        yield (
            f"loads of {layers} have collapsed: expert {busiest} has {share:.1%} of the "
            f"choices of {BLOCK_STEPS} steps, {share * len(sums_E):.1f} times the mean: raise "
            "--aux-loss (in pretrain also --global-batch-coef), lower --lr or lengthen the warm-up"
        )

    def _check_first_steps(self, step: int, metrics: Metrics) -> Iterator[str]:
        norm, loss = metrics.get("grad_norm", math.nan), metrics["loss"]
        if step > FIRST_STEPS or "reward" in metrics or not math.isfinite(norm + loss):
            return
        rise, self._lowest_loss = loss - self._lowest_loss, min(loss, self._lowest_loss)
        norms = self._rising_norms = [*self._rising_norms, norm] if rise > LOSS_GROWTH else []
        if step == 1:
            self._first_norm = norm
            if norm > FIRST_NORM:
                yield (
                    f"grad_norm ({norm:.4g}) of the first step is above {FIRST_NORM:g}: check the "
                    "initialisation of the weights, or the weights that the run starts from"
                )
            return
        growth = max(norms, default=0.0) / max(self._first_norm, 1e-30)
        if len(norms) >= 2 and growth >= NORM_GROWTH and not self._has_grown:
            self._has_grown = True
            yield (
                f"grad_norm ({max(norms):.4g}) is {growth:.1f} times that of the first step and "
                f"the loss ({loss:.4g}) has risen by {rise:.2g}: lower --lr or lengthen the warm-up"
            )


def _compute_effective_expert_fraction(loads_E: list[float]) -> float:
    """Return the effective number of experts divided by E: 1 for even loads, 1/E for one expert."""
    squares = sum(load * load for load in loads_E)
    return sum(loads_E) ** 2 / squares / len(loads_E) if squares else 1.0
