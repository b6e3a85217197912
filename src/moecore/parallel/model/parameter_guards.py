"""Checks for parameters added after `parallelize_moe`, and optimizers made before it.

No unit reduces the gradients of a parameter that was added later, such as a new head: every rank
would train its own copy. An optimizer of the parameters before `parallelize_moe` would train
nothing. Hooks on optimizer steps also increment the versions of parameters, which backward checks.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from moecore.base.torch_private import has_accumulate_hooks, is_inside_custom_ops
from moecore.parallel.model.parallel_state import list_engines

REPLACED = "_moecore_replaced"  # attribute of a parameter that `parallelize_moe` replaced


def check_no_added_parameter(model: nn.Module) -> None:
    """Raise a ValueError if a trainable parameter was added after `parallelize_moe`."""
    # FSDP2, DistributedDataParallel, or a `register_post_accumulate_grad_hook` hook may reduce its
    # gradient. Only models with a parallelized part are checked.
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    plain = [
        param
        for module in model.modules()
        for param in module._parameters.values()
        if param is not None and param.requires_grad and not isinstance(param, DTensor)
    ]
    if not plain or not list_engines(model):
        return
    wrapped = (m for m in model.modules() if isinstance(m, DistributedDataParallel | FSDPModule))
    reduced = {param for module in wrapped for param in module.parameters()}
    added = {p for p in plain if p not in reduced and not has_accumulate_hooks(p)}
    if added:
        names = [name for name, param in model.named_parameters() if param in added]
        raise ValueError(
            f"{names[0]} (and {len(names) - 1} more) must be in the model before parallelize_moe, "
            "or its gradient is not reduced and every rank trains its own: add it before, freeze "
            "it, or reduce it in a hook (register_post_accumulate_grad_hook)"
        )


def check_optimizer_is_newer(
    model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None
) -> None:
    """Raise a ValueError if all of an optimizer's parameters predate `parallelize_moe`."""
    optimizers = optimizer if isinstance(optimizer, Sequence) else [optimizer] if optimizer else []
    params_of = [{p for group in o.param_groups for p in group["params"]} for o in optimizers]
    model_params = set(model.parameters())
    missing = {p for p in model_params if p.requires_grad}.difference(*params_of)
    for earlier, params in zip(optimizers, params_of, strict=True):
        if missing and params and model_params.isdisjoint(params):
            raise _make_replaced_error(earlier)


def mark_replaced_params(params: Iterable[nn.Parameter]) -> None:
    """Mark parameters that shards have replaced: an optimizer step on them raises a ValueError."""
    _register_optimizer_hooks()
    for param in params:
        setattr(param, REPLACED, True)


@cache
def _register_optimizer_hooks() -> None:
    register_optimizer_step_pre_hook(_check_no_replaced_params)
    register_optimizer_step_post_hook(_increment_versions)


def _check_no_replaced_params(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    # A parameter with a gradient is still used by another module.
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is None and param.requires_grad and hasattr(param, REPLACED):
                raise _make_replaced_error(optimizer)


def _increment_versions(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    # Fused and foreach steps, and kernels, do not increment versions.
    params = (p for group in optimizer.param_groups for p in group["params"])
    changed = [p for p in params if p.grad is not None and isinstance(p, DTensor)]
    if changed:
        increment_version(changed)


def _make_replaced_error(optimizer: Optimizer) -> ValueError:
    return ValueError(
        f"optimizer ({type(optimizer).__name__}) must hold parameters of the model, which "
        "parallelize_moe and to_empty have replaced: make it of model.parameters() afterwards"
    )


def check_not_on_meta(model: nn.Module, caller: str) -> None:
    """Raise a ValueError if a parameter is on meta; the error names the class `caller`."""
    on_meta = next((name for name, param in model.named_parameters() if param.is_meta), None)
    if on_meta is not None and not is_inside_custom_ops():
        raise ValueError(
            f"{on_meta} (on meta) must have storage before the {caller} is made: call "
            "model.to_empty(device=...) and fill it (init_weights, load_hf, load)"
        )
