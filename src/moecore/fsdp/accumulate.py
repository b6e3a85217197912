"""Micro-batches of one optimizer step that share their communication: gathered once, reduced once.

A step that breaks off between two of them has left gradients where no optimizer sees them:
`drop_step` forgets it.

It is for units that `FSDPOptions` leaves gathered from forward to backward: those have room for
whole parameters, and here for whole gradients too, in `FSDPOptions.reduce_dtype`, until the last
micro-batch reduces them. Other units (all blocks with `reshard_after_forward`, experts with
`reshard_experts`) gather and reduce for every micro-batch as before. Experts that no other rank
holds have nothing to gather; those whose cast weights are kept cast them once.
"""

from __future__ import annotations

from torch import nn

from moecore.fsdp.resident import resident_units
from moecore.moe.experts import Experts
from moecore.moe.layer import MoELayer


def start_micro_batch(model: nn.Module, *, is_last: bool) -> None:
    """Say before each micro-batch's forward whether it is the last one of its step.

    Gradients are complete after the last one's backward; only then may they be read or clipped. A
    model for which this is never called gathers and reduces every time.

    Args:
        model: of `parallelize_moe`.
        is_last: whether an optimizer step follows.

    Example, three micro-batches: it is called with is_last False, False, True.
    """
    for resident in resident_units(model):
        resident.start_micro_batch(is_last=is_last)
    for module in model.modules():
        if isinstance(module, Experts):
            module.reader.start_micro_batch(is_last=is_last)


def drop_step(model: nn.Module) -> None:
    """Forget the micro-batches since the last optimizer step, as if they had never run.

    That are their gradients, `.grad` and those that units keep for the last micro-batch (where
    `optimizer.zero_grad()` does not reach), their counts, gathered and cast weights, and what
    `start_micro_batch` has said. Such as when a micro-batch is not finite. `load` and `load_hf`
    call it. No communication, no host sync; call it on every rank. What `clip_grad_norm_` has told
    a fused optimizer goes with the gradients.

    After a backward that ended in an exception the next forward still refuses: that leaves more
    behind than can be forgotten.

    Args:
        model: of `parallelize_moe`, or one that holds it; a plain one has less to forget.
    """
    for resident in resident_units(model):
        resident.drop_step()
    for module in model.modules():
        if isinstance(module, MoELayer):
            module.forget_step()
    for param in model.parameters():
        param.grad = None
