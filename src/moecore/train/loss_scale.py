"""LossScale: the factor on the losses of fp16 training, divided out of gradients in `finish`.

An fp16 gradient less than 2^-24 is 0, and one of 65,520 or more is inf. The scale is therefore as
large as possible. An inf or nan on any rank skips the step and halves the scale on all ranks. After
`growth_interval` steps without an inf or nan the scale doubles. `scale_loss(loss).backward()`
scales the main loss, and `MoEState.set_loss_scale` scales auxiliary losses in backward.

The scale is a tensor on the device that changes in place. The host never waits for it, and a CUDA
graph reads it at its address. A scale is a power of two, so it rounds no gradient: in fp32 and bf16
a step with a scale has the same bits as a step without.

Source: https://arxiv.org/abs/1710.03740, section 3.2.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from moecore.base.fields import Bound, CheckedRecord, Count, FieldErrors
from moecore.parallel.model.parallel_state import get_request
from moecore.precision.amax import has_amax_history

SMALLEST = 1.0  # a smaller scale would be for gradients that overflow without one
LARGEST = 2.0**32  # this scale lets fp16 hold gradients down to 2^-56


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicLossScale(CheckedRecord):
    """Options of the dynamic loss scale of a `TrainStep`.

    Attributes:
        initial: the first scale, a power of two. The first steps are skipped if it is too large.
        growth_interval: the number of consecutive steps without an overflow after which the scale
            doubles.

    Raises:
        ValueError: when a number is out of range, or `initial` is not a power of two.
    """

    initial: Annotated[float, Bound(">=", SMALLEST), Bound("<=", LARGEST)] = 2.0**16
    growth_interval: Count = 2000

    def _find_field_errors(self) -> FieldErrors:
        if not _is_power_of_two(self.initial):
            yield "initial", "be a power of two, which rounds no gradient: use 2.0**16"


class LossScale:
    """The dynamic loss scale of fp16 training: two 0-dim device tensors that change in place.

    `value` is the scale, fp32. `num_good` counts steps without an overflow since the scale changed.
    """

    def __init__(self, options: DynamicLossScale, device: torch.device) -> None:
        self.options = options
        self.value = torch.full((), float(options.initial), device=device, dtype=torch.float32)
        self.num_good = torch.zeros((), dtype=torch.int32, device=device)

    @torch.no_grad()
    def update_scale(self, is_skipped: Tensor) -> None:
        """Halve the scale if `is_skipped` (bool tensor); double after `growth_interval` steps."""
        self.num_good.add_(1).masked_fill_(is_skipped, 0)
        grows = self.num_good >= self.options.growth_interval
        factor = 1.0 + grows.float() - 0.5 * is_skipped.float()
        self.value.mul_(factor).clamp_(SMALLEST, LARGEST)
        self.num_good.masked_fill_(grows, 0)

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of `value` as "loss_scale" and of `num_good` as "loss_scale_num_good"."""
        return {"loss_scale": self.value.clone(), "loss_scale_num_good": self.num_good.clone()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict` in place; ValueError if an entry is missing or invalid. Host sync."""
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


def make_loss_scale(model: nn.Module) -> DynamicLossScale | None:
    """Return default options if a parallelized model computes in fp16, otherwise None."""
    request = get_request(model)
    is_fp16 = request is not None and request.fsdp.param_dtype == torch.float16
    return DynamicLossScale() if is_fp16 else None


def check_loss_scale(model: nn.Module, loss_scale: DynamicLossScale | None) -> None:
    """Raise ValueError if `loss_scale` is None for fp16 compute, or unsupported by the model."""
    if loss_scale is None:
        if make_loss_scale(model) is not None:
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
    if has_amax_history(model):
        raise ValueError(
            "Recipe.amax_history must be 0 with a loss_scale, because a scale that doubles would "
            "clip the gradients of the steps after it: use the recipe without a history"
        )


def _is_power_of_two(value: float) -> bool:
    return math.frexp(value)[0] == 0.5
