"""`nn.Module` features of a parallelized model: copies, state dicts, initialisation, methods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moecore.base.copies import copy_modules, make_dtensor
from moecore.base.fields import PositiveOrZero, Seed, check_arguments
from moecore.base.params import clean_name, compute_global_indices, derive_seed
from moecore.base.torch_private import get_local_tensor
from moecore.moe.experts import Experts
from moecore.moe.router import Router
from moecore.moe.shared_experts import Latent, SharedExpert
from moecore.parallel.model.parallel_state import PARALLEL_STATE

SELF_FILLING = (Router, Experts, SharedExpert, Latent)  # modules of moecore with `init_weights`


def patch_module_protocols(model: nn.Module) -> None:
    """Make `copy.deepcopy` and `load_state_dict` work on a parallelized model and submodules.

    A deep copy has copies of this rank's shards and no FSDP units: it can be saved and exported,
    but its forward cannot run. `load_state_dict` also accepts unsharded tensors. `pickle` raises.
    """
    for module in model.modules():  # every module, because wrappers read attributes of submodules
        vars(module)["__deepcopy__"] = partial(_deepcopy, module)
        vars(module)["__reduce_ex__"] = partial(_reduce_for_copy, module)
        module.register_load_state_dict_pre_hook(_replace_by_shards)


@torch.no_grad()
def _replace_by_shards(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replace unsharded tensors in a state dict by this rank's shards, before they are loaded."""
    for name, param in module._parameters.items():
        value: Any = state.get(prefix + name)
        is_plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
        if param is not None and is_plain and value.shape == param.shape:
            state[prefix + name] = _copy_local_shard(value, param)


def _deepcopy(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Deep-copy a parallelized model with this rank's shards, but without units."""

    def copy_param(param: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)

    twins = copy_modules(model, copy_param, removes_wrappers=True)
    memo.update({id(module): twin for module, twin in twins.items()})
    for module, twin in twins.items():
        for name, buffer in module._buffers.items():
            twin._buffers[name] = None if buffer is None else buffer.detach().clone()
        twin.register_forward_pre_hook(_refuse_forward)
        if PARALLEL_STATE in vars(module):
            state = vars(module)[PARALLEL_STATE]
            layers = {name: twins[layer] for name, layer in state.layers.items()}
            setattr(twin, PARALLEL_STATE, replace(state, engine=None, layers=layers))
            state.request.family.install_guards(twin, wrapper=twins[model], warns_about_cache=False)
    patch_module_protocols(twins[model])
    return twins[model]


class _ShallowConstructor:
    """Constructs an object for `copy.copy`; `pickle` of this constructor raises an error."""

    def __call__(self, kind: type, *args: Any) -> Any:
        return kind.__new__(kind, *args)

    def __reduce_ex__(self, _: Any) -> NoReturn:
        raise ValueError(
            "a parallelized model must not be pickled, because it holds this rank's shards and "
            "process groups: save it by moecore.io.save or export_hf, or save its state_dict()"
        )


def _reduce_for_copy(module: nn.Module, protocol: Any) -> tuple[Any, ...]:
    """Return a `__reduce_ex__` tuple with which `copy.copy` copies a module and `pickle` raises."""
    reduction: Any = type(module).__reduce_ex__(module, max(protocol, 2))
    module_state = {name: value for name, value in reduction[2].items() if name != "__reduce_ex__"}
    return _ShallowConstructor(), reduction[1], module_state


def _refuse_forward(module: nn.Module, _args: Any) -> None:
    raise ValueError(
        f"forward of {type(module).__name__} (a copy of a parallelized model) must run in the "
        "model itself, which gathers shards: call model.load_state_dict(copy.state_dict())"
    )


def register_forward_method(model: nn.Module, name: str) -> None:
    """Make a method of a parallelized model all-gather parameters, as the forward does.

    Like `torch.distributed.fsdp.register_fsdp_forward_method`. Every later call of the method is
    collective, and runs the model's forward hooks before and after the method.

    Args:
        model: a parallelized model, or a module in it whose parameters are a unit.
        name: name of the method; a ValueError if the model does not have it.
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
    """Call `method` in place of the module's forward, with the forward hooks; return its result."""
    attributes = vars(module)  # a wrapped forward is an attribute of the module
    before = {"forward": attributes["forward"]} if "forward" in attributes else {}

    def restore() -> None:
        attributes.pop("forward", None)
        attributes.update(before)

    def run(*args: Any, **kwargs: Any) -> Any:
        restore()  # the method may call forward
        return method(*args, **kwargs)

    attributes["forward"] = run
    try:
        return module(*args, **kwargs)
    finally:
        restore()


@torch.no_grad()
def init_modules(model: nn.Module, *, seed: Seed = 0, std: PositiveOrZero = 0.02) -> None:
    """Initialise all parameters by `reset_parameters`; the values do not depend on the sharding.

    Each module is initialised unsharded, with a seed from its name, and each rank copies its
    shards. (`nn.init` on DTensors gives all CPU ranks the same random numbers.) No communication.
    The largest module with `reset_parameters` must fit into memory unsharded.

    Args:
        model: a plain or parallelized model with storage (after `to_empty`).
        seed: different seeds give independent values.
        std: standard deviation of matrices in moecore's modules, see `MoELayer.init_weights`.

    Raises:
        ValueError: if a module with parameters has no `reset_parameters`; nothing is changed.
    """
    check_arguments(init_modules, locals())
    modules = dict[str, nn.Module]()
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}." if outer else "") for outer in modules):
            continue
        if isinstance(module, SELF_FILLING) or _find_reset_method(module) is not None:
            modules[name] = module
        elif any(True for _ in module.parameters(recurse=False)):
            raise ValueError(
                f"{name or 'model'} ({type(module).__name__}) must have reset_parameters() to be "
                "filled: give its class one, or call the model's own init_weights"
            )
    for name, module in modules.items():
        if isinstance(module, SELF_FILLING):
            module.init_weights(std=std, key=clean_name(name), seed=seed)
        else:
            _reset_module(module, name, seed, std)


def _reset_module(module: nn.Module, module_name: str, seed: int, std: float) -> None:
    """Initialise an unsharded copy of a module, and copy this rank's shards to the module."""

    def make_empty(param: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(torch.empty(param.shape, dtype=param.dtype, device=param.device))

    copies: Any = copy_modules(module, make_empty, removes_wrappers=True)
    for inner, path in reversed([(m, n) for n, m in module.named_modules()]):
        twin, key = copies[inner], clean_name(f"{module_name}.{path}".strip("."))
        reset = _find_reset_method(twin)
        if isinstance(twin, SELF_FILLING):
            twin.init_weights(std=std, key=key, seed=seed)
        elif reset is not None:
            with torch.random.fork_rng({p.device for p in twin.parameters() if p.is_cuda}):
                torch.manual_seed(derive_seed(seed, key))
                reset()
    for param, values in zip(module.parameters(), copies[module].parameters(), strict=True):
        get_local_tensor(param).copy_(get_local_tensor(_copy_local_shard(values, param)))


def _find_reset_method(module: nn.Module) -> Callable[[], None] | None:
    reset: Any = getattr(module, "reset_parameters", None)
    return reset or getattr(module, "_reset_parameters", None)  # of nn.MultiheadAttention


def _copy_local_shard(full_tensor: Tensor, like: Tensor) -> Tensor:
    """Return this rank's shard of `full_tensor`; `full_tensor` itself if `like` is no DTensor."""
    if not isinstance(like, DTensor):
        return full_tensor
    for dim, index in enumerate(compute_global_indices(like)):
        full_tensor = full_tensor.index_select(dim, index.to(full_tensor.device))
    return make_dtensor(full_tensor.to(like.device), like.device_mesh, like.placements, like=like)
