"""What runs now: autograd, dispatch modes and tracing, asked through torch's private names.

No other file of moecore uses these names. `tests/test_autograd.py` looks each of them up, so a
torch that renames one fails there by name.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch._compile
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch

# torch.compiler.disable, whose import of Dynamo (half a second) waits for the first call.
disable_dynamo = torch._compile._disable_dynamo

# A context without dispatch modes, such as selective checkpointing's.
no_dispatch_modes = _disable_current_modes


def is_traced() -> bool:
    """Whether a compiler or a fake mode runs the code: no value may be read."""
    return torch.compiler.is_compiling() or torch._guards.detect_fake_mode() is not None


def is_plain_eager() -> bool:
    """Whether autograd alone sees operations: no compiler, mode, transform or tracer."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._dispatch_tls_is_dispatch_key_included(_PRE_DISPATCH)
        or forward_ad._current_level >= 0
        or torch.jit.is_tracing()
    )


def in_forward_mode() -> bool:
    """Whether forward-mode derivatives are being taken."""
    return forward_ad._current_level >= 0


def have_tangents(*tensors: Tensor) -> bool:
    """Whether one of the tensors carries a forward-mode derivative."""
    if not in_forward_mode():
        return False
    return any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def mark(name: str) -> AbstractContextManager[Any]:
    """Return a context that a profile shows by this name; 0.5 us of a host without a profiler."""
    if torch.compiler.is_compiling() or not torch.autograd._profiler_enabled():
        return nullcontext()
    return torch.profiler.record_function(name)


def is_recomputing() -> bool:
    """Whether this forward runs inside a backward: activation checkpointing repeats it."""
    return torch._C._current_graph_task_id() != -1


def current_backward() -> int:
    """Return the number of the running backward; -1 = none."""
    return torch._C._current_graph_task_id()


def current_node_number() -> int:
    """Return the sequence number of the node whose backward runs."""
    number: int = torch._C._current_autograd_node()._sequence_nr()
    return number


def next_node_number() -> int:
    """Return the sequence number that the next recorded node gets."""
    return torch.autograd._get_sequence_nr()


def call_after_backward(function: Callable[[], None]) -> None:
    """Call a function at the end of the running backward."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def will_run(node: Any) -> bool:
    """Whether the running backward reaches a node; None is a leaf, which it reaches."""
    try:
        return node is None or torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf's node while `autograd.grad` asks for its gradient
        return False


def continues() -> bool:
    """Whether the running backward needs more than the gradient of the current node's inputs."""
    behind = torch._C._current_autograd_node().next_functions
    return any(node is not None and will_run(node) for node, _ in behind)


def saved_tensor_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the innermost pair of `torch.autograd.graph.saved_tensors_hooks` that is on."""
    found: tuple[Callable[..., Any], Callable[..., Any]] | None
    found = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return found


def has_gradient_hooks(param: Tensor) -> bool:
    """Whether hooks of a parameter wait for its gradient."""
    return bool(param._backward_hooks) or has_accumulate_hooks(param)


def has_accumulate_hooks(param: Tensor) -> bool:
    """Whether a hook of `register_post_accumulate_grad_hook` takes the parameter's gradient."""
    return bool(getattr(param, "_post_accumulate_grad_hooks", None))


def call_accumulate_hooks(param: Tensor) -> None:
    """Call these hooks, for a gradient that autograd has not accumulated."""
    for hook in (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(param)


def leaf_of(node: Any) -> Tensor | None:
    """Return the parameter whose gradient a node accumulates; None for other nodes."""
    return getattr(node, "variable", None)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype of autocast on a tensor's device; None without, and on meta."""
    device = x.device.type
    if x.is_meta or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def storage_key(x: Tensor) -> int:
    """Return what all views of one storage share while it lives, on meta too."""
    key: int = x.untyped_storage()._cdata
    return key


def version(x: Tensor) -> int:
    """Return the count of changes in place; 0 for a tensor of inference mode, which has none."""
    return 0 if x.is_inference() else x._version


def set_versions(tensors: list[Tensor], versions: list[int]) -> None:
    """Set the counts of changes in place, which backward compares with those at forward."""
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))
