"""A parallelized model as an `nn.Module`: copies, whole state dicts, methods beside forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moecore.base.copies import as_part, copy_modules
from moecore.base.fields import check_arguments
from moecore.moe.params import global_indices
from moecore.parallel.attached import ATTACHED


def act_as_modules(model: nn.Module) -> None:
    """Make `copy.deepcopy` and `load_state_dict` work on a parallelized model and its parts.

    A copy has this rank's shards as parameters of its own, and no units: it can be averaged, saved,
    exported and loaded from, and its forward raises. `AveragedModel` needs no more. A state dict
    may hold whole tensors, of which each rank takes its part.
    """
    for module in model.modules():  # of each one: wrappers have attributes of what they wrap
        vars(module)["__deepcopy__"] = partial(_copy, module)
        module.register_load_state_dict_pre_hook(_take_parts)


@torch.no_grad()
def _take_parts(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replace whole tensors of a state dict by this rank's parts of them; no communication."""
    for name, param in module._parameters.items():
        value = state.get(prefix + name)
        is_whole = isinstance(value, Tensor) and not isinstance(value, DTensor)
        if not (is_whole and isinstance(param, DTensor) and value.shape == param.shape):
            continue
        for dim, index in enumerate(global_indices(param)):
            value = value.index_select(dim, index.to(value.device))
        state[prefix + name] = as_part(
            value.to(param.device), param.device_mesh, param.placements, of=param
        )


def _copy(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    copies = copy_modules(model, _copied, unwrapped=True)
    memo.update({id(module): twin for module, twin in copies.items()})
    for module, twin in copies.items():
        for name, buffer in module._buffers.items():
            twin._buffers[name] = None if buffer is None else buffer.detach().clone()
        twin.register_forward_pre_hook(_refuse_forward)
        if ATTACHED in vars(module):
            found = vars(module)[ATTACHED]
            layers = {name: copies[layer] for name, layer in found.layers.items()}
            setattr(twin, ATTACHED, replace(found, engine=None, layers=layers))
            found.request.family.attached(twin, wrapper=copies[model], drops_cache=False)
    act_as_modules(copies[model])
    return copies[model]


def _copied(param: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)


def _refuse_forward(module: nn.Module, _args: Any) -> None:
    raise ValueError(
        f"forward of {type(module).__name__} (a copy of a parallelized model) must run in the "
        "model itself, which gathers shards: call model.load_state_dict(copy.state_dict())"
    )


def register_forward_method(model: nn.Module, name: str) -> None:
    """Make a method of a parallelized model run as its forward does, with gathered parameters.

    As `torch.distributed.fsdp.register_fsdp_forward_method`. Every rank calls the method, because
    it communicates. Hooks of the model's forward run around it, with its arguments.

    Args:
        model: parallelized, or a module in such a model whose parameters are a unit.
        name: of its method, or of a function that is its attribute.

    Raises:
        ValueError: when the model has no such method.
    """
    check_arguments(register_forward_method, locals())
    method = getattr(model, name, None)
    if not callable(method):
        raise ValueError(
            f"name ({name!r}) must be a method of model ({type(model).__name__}): define it first"
        )
    setattr(model, name, partial(_run_as_forward, model, method))


def _run_as_forward(
    module: nn.Module, method: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    own = vars(module)  # where forwards that are wrapped stand, before those of the class
    before = {"forward": own["forward"]} if "forward" in own else {}

    def restore() -> None:
        own.pop("forward", None)
        own.update(before)

    def run(*args: Any, **kwargs: Any) -> Any:
        restore()  # the method may call forward
        return method(*args, **kwargs)

    own["forward"] = run
    try:
        return module(*args, **kwargs)
    finally:
        restore()
