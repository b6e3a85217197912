"""Micro-batches of one optimizer step that share their communication: gathered once, reduced once.

Without it every micro-batch gathers dense parameters and reduces their gradients. With it each rank
adds whole gradients of the dense parameters, in `FSDPOptions.reduce_dtype`, until the last
micro-batch reduces them: 4 bytes per dense parameter more, for one reduction instead of n.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule

STAYS_GATHERED = "_stays_gathered"  # attribute of units that forward leaves gathered


def start_micro_batch(model: nn.Module, *, is_last: bool) -> None:
    """Say before each micro-batch's forward whether it is the last one of its step.

    Gradients are reduced by the last one's backward, all of them; only then are they to be read or
    clipped. Units that forward leaves gathered (`FSDPOptions.reshard_after_forward`, False) are so
    until then; others are gathered by each micro-batch as before. A model for which this is never
    called reduces every time.

    Args:
        model: of `parallelize_moe`.
        is_last: whether an optimizer step follows.

    Example, three micro-batches: it is called with is_last False, False, True.
    """
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.set_requires_gradient_sync(is_last, recurse=False)
            if getattr(unit, STAYS_GATHERED, False):
                unit.set_reshard_after_backward(is_last, recurse=False)
