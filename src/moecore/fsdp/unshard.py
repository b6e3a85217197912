"""Units of several modules: each of them finds the unit's parameters gathered, whatever ran before.

FSDP2 gathers such a unit before the first of its modules in a forward, and for backward at the
output of the last one. That is enough where all modules run once, one after the other, and all
outputs have gradients. It is not where a forward leaves modules out or recomputes some of them, or
where a loss needs an inner block alone: the unit may be freed by then, and 2.11 would compute with
this rank's shard. So every module gathers what has been freed, before its forward and at its
output's gradient, as it would as a unit of its own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.utils._pytree import tree_leaves

from moecore._autograd import disable_dynamo
from moecore._compat import fsdp_groups


def gather_for_each(modules: list[nn.Module]) -> None:
    """Let every module of a unit gather what it needs. Hooks their forwards.

    Args:
        modules: those that `fully_shard` has made one unit; nothing to do for a single one.
    """
    if len(modules) == 1:
        return
    unit = modules[0]
    assert isinstance(unit, FSDPModule)
    for module in modules:
        module.register_forward_pre_hook(partial(_before_forward, unit))
        module.register_forward_hook(partial(_after_forward, unit))


@disable_dynamo
def _before_forward(unit: FSDPModule, *_: Any) -> None:
    for group in fsdp_groups(unit):
        if group.is_unsharded:
            continue
        group.unshard()
        group.wait_for_unshard()
        if group._training_state == TrainingState.POST_BACKWARD:
            group._training_state = TrainingState.IDLE  # or nobody would reduce what comes now


@disable_dynamo
def _after_forward(unit: FSDPModule, _module: nn.Module, _args: Any, output: Any) -> None:
    if not torch.is_grad_enabled():
        return
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(partial(_before_backward, unit))


def _before_backward(unit: FSDPModule, grad: Tensor) -> Tensor:
    if not all(group.is_unsharded for group in fsdp_groups(unit)):
        unit._get_fsdp_state()._pre_backward(grad)
    return grad
