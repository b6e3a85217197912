"""Copies of a model's modules with new parameters, for example on the meta device."""

from collections.abc import Callable, Sequence
from inspect import unwrap
from types import MethodType

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from moecore.base.torch_private import (
    HOOKS,
    get_local_tensor,
    make_dtensor_like,
    make_parameter_like,
)

COMPILED_OF = "_orig_mod"  # attribute with the original module of a `torch.compile` module
NewParameter = Callable[[nn.Parameter], nn.Parameter]


def copy_modules(
    model: nn.Module, make_parameter: NewParameter, *, removes_wrappers: bool = False
) -> dict[nn.Module, nn.Module]:
    """Copy every module of a model and return {module: copy}.

    `make_parameter` receives a parameter and returns the parameter of the copy. A copy shares all
    attribute values with its module, except submodules, parameters and hooks. Bound methods in
    attributes are bound to the copy, and modules in tuples are replaced by their copies.
    `removes_wrappers` removes hooks and wrappers of methods, including compiled methods, and maps a
    `torch.compile` wrapper to the copy of its original module.
    """
    copies: dict[nn.Module, nn.Module] = {m: object.__new__(type(m)) for m in model.modules()}
    twins = dict(copies)
    for module in copies if removes_wrappers else ():
        copies[module] = twins[module._modules.get(COMPILED_OF) or module]
    params = {param: make_parameter(param) for param in model.parameters()}
    for module, twin in twins.items():
        state = dict(vars(module))
        for name, value in vars(module).items():
            hides_method = callable(value) and callable(getattr(type(module), name, None))
            is_left_out = removes_wrappers and hides_method
            method = unwrap(value) if is_left_out else value
            if isinstance(method, MethodType) and method.__self__ is module:
                state[name] = MethodType(method.__func__, twin)
                is_left_out &= method.__func__ is getattr(type(module), name, None)
            if is_left_out:
                del state[name]
            elif isinstance(value, tuple) and any(isinstance(v, nn.Module) for v in value):
                state[name] = tuple(copies.get(v, v) for v in value)
        for name in HOOKS & state.keys():
            state[name] = type(state[name])(() if removes_wrappers else state[name])
        state["_buffers"] = dict(module._buffers)
        state["_parameters"] = {
            n: p if p is None else params[p] for n, p in module._parameters.items()
        }
        state["_modules"] = {n: m if m is None else copies[m] for n, m in module._modules.items()}
        vars(twin).update(state)
    return copies


def make_meta_parameter(param: nn.Parameter) -> nn.Parameter:
    """Return a parameter on the meta device with the shape, dtype and sharding of `param`."""
    empty = torch.empty_like(get_local_tensor(param), device="meta", requires_grad=False)
    part = make_dtensor_like(empty, param) if isinstance(param, DTensor) else empty
    return make_parameter_like(part, param)


def make_dtensor(
    local_tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], *, like: Tensor
) -> DTensor:
    """Return a DTensor of a local shard with the global shape of `like`; differentiable."""
    return DTensor.from_local(
        local_tensor, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )
