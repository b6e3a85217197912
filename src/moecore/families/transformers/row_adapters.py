"""The argument `adapter_ids` of a transformers model with several LoRA adapters of peft.

    model(input_ids, adapter_ids=...)      row b uses only the active adapter number adapter_ids[b]
    linears (peft's lora.Linear)           x A^T is 0 in the rows of other adapters
    experts                                rows are grouped by (expert, adapter), `moe/low_rank.py`

Without the argument, every row uses the sum of the active adapters, as in peft. An adapter without
a row in the batch has a gradient of zeros. Backward restores the ids for layers that it recomputes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moecore.base.peft_layers import find_lora_base, is_tuner_layer
from moecore.families.transformers import stock
from moecore.moe.layer import RoutedLayer
from moecore.moe.low_rank import LowRank, RowAdapters
from moecore.moe.routed_experts import RoutedExperts
from moecore.parallel.model.parallel_state import get_request

ARGUMENT = "adapter_ids"  # keyword argument of a forward


def accept_adapter_ids(model: nn.Module) -> None:
    """Make forwards accept `adapter_ids`, the LoRA adapter of each row, in place."""
    tuners: list[Any] = [module for module in model.modules() if is_tuner_layer(module)]
    names = {name for t in tuners for kind in t.adapter_layer_names for name in getattr(t, kind)}
    if not names:
        return
    rows = RowAdapters(len(names))
    layers = [module for module in model.modules() if isinstance(module, RoutedLayer)]
    for experts in (layer.get_part("experts") for layer in layers):
        if experts.lora_updates and len(names) > 1:
            experts.row_adapters = rows
    for tuner in tuners:
        if find_lora_base(tuner) is not None and len(names) > 1:
            for name, linear_a in tuner.lora_A.items():
                linear_a.register_forward_hook(partial(_mask_rows, rows, tuner, name))
    take = partial(_take_ids, rows, tuners, layers)
    model.register_forward_pre_hook(take, with_kwargs=True, prepend=True)
    model.register_forward_hook(partial(_hook_backward, rows), always_call=True)


def _mask_rows(
    rows: RowAdapters, tuner: Any, name: str, _module: nn.Module, _args: Any, u_Nr: Tensor
) -> Tensor | None:
    """Forward hook of an adapter's A: return its output with 0 in rows of other adapters."""
    ids_N = rows.expand(u_Nr.shape[:-1].numel())
    if ids_N is None:
        return None
    is_other_N = ids_N != tuner.active_adapters.index(name)
    return u_Nr.masked_fill(is_other_N.view(*u_Nr.shape[:-1], 1), 0)


def _take_ids(
    rows: RowAdapters,
    tuners: list[Any],
    layers: list[RoutedLayer],
    model: Any,
    args: Any,
    kwargs: Any,
) -> stock.Arguments | None:
    """Forward pre-hook: check the argument `adapter_ids`, store it in `rows`, and remove it."""
    rows.ids_B, ids_B = None, kwargs.get(ARGUMENT)  # a failed backward may have left ids
    if ARGUMENT not in kwargs:
        return None
    kwargs = {name: value for name, value in kwargs.items() if name != ARGUMENT}
    if ids_B is None:
        return args, kwargs
    inputs = stock.bind_arguments(model, args, kwargs)
    tokens = next(x for x in map(inputs.get, ("input_ids", "inputs_embeds")) if x is not None)
    active = tuners[0].active_adapters
    if (problem := _find_problem(model, tuners, layers)) is not None:
        raise ValueError(f"{ARGUMENT} must be left out, because {problem}")
    is_integer = isinstance(ids_B, Tensor) and ids_B.dtype in (torch.int32, torch.int64)
    if not is_integer or ids_B.shape != tokens.shape[:1]:
        raise ValueError(
            f"{ARGUMENT} ({getattr(ids_B, 'dtype', type(ids_B).__name__)}) must be int32 or int64 "
            f"[{len(tokens)}]: pass one id per row of the batch"
        )
    if ids_B.device.type == "cpu" and not all(0 <= i < len(active) for i in ids_B.tolist()):
        raise ValueError(
            f"{ARGUMENT} ({ids_B.tolist()}) must lie in [0, {len(active)}), the active adapters "
            f"{active}: activate all adapters by model.base_model.set_adapter([...])"
        )
    rows.ids_B = ids_B.to(tokens.device)
    return args, kwargs


def _find_problem(model: nn.Module, tuners: list[Any], layers: list[RoutedLayer]) -> str | None:
    """Return why rows of one batch cannot use different adapters, or None."""
    for tuner in tuners:
        if not isinstance(tuner, LowRank) and find_lora_base(tuner) is None:
            return f"{type(tuner).__name__} has adapters other than LoRA without biases on linears"
    request = get_request(model)
    for layer in layers:
        balance, experts = layer.config.balance, layer.get_part("experts")
        if balance.needs_loss or balance.bias_update_rate or layer.config.capacity is not None:
            return (
                "BalanceConfig and MoEConfig.capacity of the model let the rows of one adapter "
                "change those of another: use parallelize_moe(moe={'balance': BalanceConfig()})"
            )
        has_slices = request is not None and request.meshes.parallel.tp > 1
        if isinstance(layer, RoutedExperts) and has_slices and experts.row_adapters is not None:
            return "tp divides the rows of experts that have the model's own router: use tp=1"
        if experts.row_adapters is not None and layer.cloner is not None:
            return "clones of experts have no adapters per row: leave out DispatchOptions.clones"
    return None


def _hook_backward(rows: RowAdapters, _model: nn.Module, _args: Any, output: Any) -> None:
    """Forward hook: end the use of the ids, and restore them during this forward's backward."""
    ids_B, rows.ids_B = rows.ids_B, None
    if ids_B is not None:
        stock.restore_in_backward(output, rows, "ids_B", ids_B)
