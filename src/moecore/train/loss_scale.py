"""The loss scale of fp16: main and auxiliary losses times one number, gradients divided by it.

    scale(loss).backward()    the main loss
    LoadTracker               auxiliary losses, in backward: `MoEState.set_loss_scale`
    finish()                  norm and clipping divide by it, then `update`

An fp16 gradient less than 2^-24 is 0, and one of 65,520 or more is inf. So the scale is as large as
it can be: an inf or nan on any rank drops the step and halves the scale on all ranks, and after
`growth_interval` steps without one it doubles.

It is a tensor on the device that changes in place: nothing waits for it, and CUDA graphs read it
where it lies. Scales are powers of two, so nothing is rounded by them: in fp32 and bf16 a scaled
step equals one without a scale, bit for bit.

Source: https://arxiv.org/abs/1710.03740, section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from moecore.base.fields import Bound, Count, Rules, check_fields
from moecore.parallel.attached import request_of
from moecore.precision.apply import has_history

SMALLEST = 1.0  # gradients that overflow without a scale are no matter of it
LARGEST = 2.0**32  # with it fp16 holds gradients down to 2^-56


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicLossScale:
    """How the loss scale of a `TrainStep` starts and grows.

    Attributes:
        initial: the first scale, a power of two; some steps are skipped where it is too large.
        growth_interval: steps without an overflow, one after the other, after which it doubles.

    Raises:
        ValueError: for a number that is not among these.
    """

    initial: Annotated[float, Bound(">=", SMALLEST), Bound("<=", LARGEST)] = 2.0**16
    growth_interval: Count = 2000

    def __post_init__(self) -> None:
        check_fields(self, self._rules)

    def _rules(self) -> Rules:
        if not _is_power_of_two(self.initial):
            yield "initial", "be a power of two, which rounds no gradient: use 2.0**16"


class LossScale:
    """The scale of one `TrainStep`, the same on every rank.

    Args:
        options: how it starts and grows.

    Attributes:
        value: fp32 scalar, changed in place.
        num_good: int32 scalar, steps since the last overflow or growth, changed in place.
    """

    def __init__(self, options: DynamicLossScale, device: torch.device) -> None:
        self.options = options
        self.value = torch.full((), float(options.initial), device=device)
        self.num_good = torch.zeros((), dtype=torch.int32, device=device)

    @torch.no_grad()
    def update(self, skipped: Tensor) -> None:
        """End a step: halve, keep or double. No host sync.

        Args:
            skipped: bool scalar, the same on every rank.
        """
        self.num_good.add_(1).masked_fill_(skipped, 0)
        grows = self.num_good >= self.options.growth_interval
        factor = 1.0 + grows.float() - 0.5 * skipped.float()
        self.value.mul_(factor).clamp_(SMALLEST, LARGEST)
        self.num_good.masked_fill_(grows, 0)

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of the scale and of its count, on the device."""
        return {"loss_scale": self.value.clone(), "loss_scale_num_good": self.num_good.clone()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` gave, in place.

        Raises:
            ValueError: when it lacks either, or the scale is none.
        """
        missing = [name for name in self.state_dict() if name not in state]
        if missing:
            raise ValueError(
                f"state ({', '.join(state)}) must have {missing[0]}: pass what a TrainStep with a "
                "loss_scale gave, or leave load_state_dict out to start with the initial scale"
            )
        value, num_good = float(state["loss_scale"]), int(state["loss_scale_num_good"])
        if not (SMALLEST <= value <= LARGEST and _is_power_of_two(value)):
            raise ValueError(
                f"loss_scale ({value}) must be a power of two >= {SMALLEST} and <= {LARGEST}: "
                "leave load_state_dict out to start with the initial scale"
            )
        self.value.fill_(value)
        self.num_good.fill_(num_good)


def is_fp16(model: nn.Module) -> bool:
    """Whether a parallelized model computes in fp16, and so needs a loss scale."""
    request = request_of(model)
    return request is not None and request.fsdp.param_dtype == torch.float16


def check_loss_scale(model: nn.Module, loss_scale: DynamicLossScale | None) -> None:
    """Raise for fp16 without a loss scale, and for what can not be scaled."""
    if loss_scale is None:
        if is_fp16(model):
            raise ValueError(
                "loss_scale (None) must be a DynamicLossScale for FSDPOptions.param_dtype "
                "(torch.float16): pass DynamicLossScale() in place of torch's GradScaler, which "
                "reaches no auxiliary loss"
            )
        return
    for name, param in model.named_parameters():
        if param.requires_grad and param.dtype == torch.float16:
            raise ValueError(
                f"dtype of {name} (torch.float16) must be torch.float32 with a loss_scale, or its "
                "divided gradient would be 0: use FSDPOptions(param_dtype=torch.float16) instead"
            )
    if has_history(model):
        raise ValueError(
            "Recipe.amax_history must be 0 with a loss_scale, because a scale that doubles would "
            "clip the gradients of the steps after it: use the recipe without a history"
        )


def _is_power_of_two(value: float) -> bool:
    return math.frexp(value)[0] == 0.5
