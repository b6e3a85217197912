"""Micro-batches of one optimizer step that share their communication: gathered once, reduced once.

It is for units that `FSDPOptions` leaves gathered from forward to backward: those have room for
whole parameters, and here for whole gradients too, in `FSDPOptions.reduce_dtype`, until the last
micro-batch reduces them. Other units (all blocks with `reshard_after_forward`, experts with
`reshard_experts`) gather and reduce for every micro-batch as before. Experts that no other rank
holds have nothing to gather; those whose cast weights are kept cast them once.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule

from moecore.fsdp.gathered import GATHERED
from moecore.moe.experts import Experts

STAYS_GATHERED = "_stays_gathered"  # attribute of units that forward leaves gathered


def start_micro_batch(model: nn.Module, *, is_last: bool) -> None:
    """Say before each micro-batch's forward whether it is the last one of its step.

    Gradients are complete after the last one's backward; only then may they be read or clipped. A
    model for which this is never called gathers and reduces every time.

    Args:
        model: of `parallelize_moe`.
        is_last: whether an optimizer step follows.

    Example, three micro-batches: it is called with is_last False, False, True.
    """
    gathered = getattr(model, GATHERED, None)
    if gathered is not None:
        gathered.start_micro_batch(is_last=is_last)
    for unit in model.modules():
        if isinstance(unit, FSDPModule) and getattr(unit, STAYS_GATHERED, False):
            unit.set_requires_gradient_sync(is_last, recurse=False)
            unit.set_reshard_after_backward(is_last, recurse=False)
        if isinstance(unit, Experts):
            unit.reader.start_micro_batch(is_last=is_last)
