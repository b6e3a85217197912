"""Amax histories of a model with delayed scaling: its linears and its experts together."""

import torch.distributed as dist
from torch import Tensor, nn

from moecore.base.params import clean_name
from moecore.moe.amax_history import AmaxHistory, advance_amax_histories, get_amax_history
from moecore.moe.experts import Experts
from moecore.precision.plain import ProductLinear


def list_amax_histories(model: nn.Module) -> dict[str, AmaxHistory]:
    """Return the amax histories of linears and experts with delayed scaling, by module name."""
    histories = {}
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            history = module.history
        else:
            history = get_amax_history(module) if isinstance(module, ProductLinear) else None
        if history is not None:
            histories[clean_name(name)] = history
    return histories


def advance_amax(
    model: nn.Module, group: dist.ProcessGroup | None = None, *, is_skipped: bool | Tensor = False
) -> None:
    """Start the next step of delayed scaling, after each optimizer step. No host sync.

    Args:
        group: all ranks that share a layer's weights or tokens, over which each amax is all-reduced
            by MAX. None = this rank only.
        is_skipped: whether the optimizer skipped the step. Its amax values are then discarded.
    """
    if histories := list(list_amax_histories(model).values()):
        device = next(model.parameters()).device
        advance_amax_histories(histories, device, group, is_skipped=is_skipped)


def drop_amax(model: nn.Module) -> None:
    """Zero the amax values that delayed scaling recorded since the last step. No host sync."""
    for history in list_amax_histories(model).values():
        for amax in history.current_amax.values():
            amax.zero_()


def has_amax_history(model: nn.Module) -> bool:
    """Whether any module of a model uses delayed scaling."""
    return bool(list_amax_histories(model))
