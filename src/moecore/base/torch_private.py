"""Every private name of torch that moecore uses, each behind one name of ours.

A name counts when it, or a module on the way to it, begins with one underscore: imported, looked
up in a module, or on an object (`group._get_backend`), by dots or as a string.
`tests/base/test_torch_private.py` reads all of src for such names, finds them here alone, and holds
each to what it is used for: a torch that renames one fails there by name. These do not count:

- Operators. torch registers them with a schema that programs exported by older releases call. They
  are named here too, for no documentation promises their arguments.
- `Tensor._version`, of which the documentation of inference mode speaks, and what subclasses of
  `nn.Module` are made of: `_parameters`, `_buffers`, `_modules`, `_apply`, `_load_from_state_dict`.
- `_step_supports_amp_scaling`, which optimizers define for `torch.amp`: moecore's do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass
from torch.autograd import forward_ad
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

# Operators; their overloads are for torchtitan's selective checkpointing.
aten = torch.ops.aten
assert_async = torch._assert_async
attention_overloads = (
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_attention_math.default,
)
cudnn_attention = aten._scaled_dot_product_cudnn_attention
cudnn_attention_backward = aten._scaled_dot_product_cudnn_attention_backward
flash_attention = aten._flash_attention_forward
flash_attention_backward = aten._flash_attention_backward
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_div_ = torch._foreach_div_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
fused_adamw_: Any = torch._fused_adamw_
grouped_mm_overload = aten._grouped_mm.default
reduce_scatter_overload = torch.ops._c10d_functional.reduce_scatter_tensor.default
scaled_grouped_mm: Any = torch._scaled_grouped_mm  # `F.scaled_grouped_mm` takes other arguments
scaled_mm: Any = torch._scaled_mm_v2  # `F.scaled_mm` does too
unsafe_view = aten._unsafe_view


def is_grouped_mm(function: Any) -> bool:
    """Whether a function that a torch function mode sees is the grouped product."""
    return function is F.grouped_mm or function is torch._grouped_mm


# Collectives that 2.13 renamed: it warns about the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# A DTensor whose StridedShard marks separate pieces, not an order of dims: 2.11 raises in the
# backward and in full_tensor(); 2.13 handles both. 2.12 has not been tried.
HAS_SEPARATE_PIECES = tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 13)

# Trees of tensors: what moecore's records, and those of models, are registered with.
register_dataclass = _pytree.register_dataclass
register_pytree_node = _pytree.register_pytree_node
tree_flatten = _pytree.tree_flatten
tree_leaves = _pytree.tree_leaves
tree_map_only = _pytree.tree_map_only
tree_unflatten = _pytree.tree_unflatten

# Where the hooks of a module lie, and those among them that run around forward and backward.
HOOKS = frozenset(n for n, value in vars(nn.Module()).items() if "hook" in n and value == {})
_AROUND = tuple(n for n in HOOKS if n.endswith("hooks") and ("forward" in n or "backward" in n))

StridedShard = _StridedShard


class DispatchMode(TorchDispatchMode):
    """A mode that no compiled code calls: torch.compile need not be told to leave it alone."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


# What sees the operations that run.


_keys = torch._C._dispatch_tls_local_include_set  # looked up once: kernels ask at every call
_unpack = forward_ad.unpack_dual


def _plain_keys() -> frozenset[int]:
    """Return the dispatch keys of a thread without modes, transforms and tracers."""
    key_sets = set()
    with _disable_current_modes():
        for mode in (False, True):
            with torch.inference_mode(mode):
                key_sets.add(_keys().raw_repr())
    return frozenset(key_sets)


_PLAIN_KEYS = _plain_keys()
_UNTRACKED = torch.zeros(())  # carries no derivative


NOTHING = nullcontext()  # made once: a host has many to enter


class _Seen(threading.local):
    """What modes of this thread see."""

    inside = False
    on_host = False
    phases: tuple[str, ...] = ()


_seen = _Seen()


@contextmanager
def inside_operations() -> Iterator[None]:
    """Within, modes see what moecore's operations do, on meta too, in place of the operations."""
    before, _seen.inside = _seen.inside, True
    try:
        yield
    finally:
        _seen.inside = before


def is_inside() -> bool:
    """Whether modes see what operations do."""
    return _seen.inside


@contextmanager
def host_memory() -> Iterator[None]:
    """Within, what is allocated on meta stands for host memory."""
    _seen.on_host = True
    try:
        yield
    finally:
        _seen.on_host = False


def is_host_memory() -> bool:
    """Whether what is allocated on meta stands for host memory."""
    return _seen.on_host


def phases() -> tuple[str, ...]:
    """Return the names of the marks that this thread is in, where modes see operations."""
    return _seen.phases


@contextmanager
def _phase(name: str) -> Iterator[None]:
    before, _seen.phases = _seen.phases, (*_seen.phases, name)
    try:
        yield
    finally:
        _seen.phases = before


def is_silent(x: Tensor) -> bool:
    """Whether ranks send nothing for a tensor: it is on meta, and nothing records what they do."""
    return x.is_meta and not _seen.inside


def no_dispatch_modes() -> AbstractContextManager[Any]:
    """Return a context without modes such as selective checkpointing's."""
    return nullcontext() if _seen.inside else _disable_current_modes()


def is_plain_eager() -> bool:
    """Whether autograd alone sees operations: no compiler, mode, transform or tracer."""
    if torch.compiler.is_compiling():
        return False
    return (_keys().raw_repr() in _PLAIN_KEYS and not in_forward_mode()) or _seen.inside


def in_forward_mode() -> bool:
    """Whether forward-mode derivatives are being taken."""
    return _unpack(_UNTRACKED).primal is not _UNTRACKED


def have_tangents(*tensors: Tensor) -> bool:
    """Whether one of the tensors carries a forward-mode derivative."""
    return in_forward_mode() and any(_unpack(t).tangent is not None for t in tensors)


def mark(name: str) -> AbstractContextManager[Any]:
    """Return a context that a profile shows by this name; 0.5 us of a host without a profiler."""
    if torch.compiler.is_compiling():
        return NOTHING
    if _seen.inside:
        return _phase(name)
    if not torch.autograd._profiler_enabled():
        return NOTHING
    return torch.profiler.record_function(name)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype of autocast on a tensor's device; None without, and on meta."""
    device = x.device.type
    if x.is_meta or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


# Backwards.


def current_node() -> Node:
    """Return the node whose backward runs; only in one."""
    node: Node = torch._C._current_autograd_node()
    return node


def is_recomputing() -> bool:
    """Whether this forward runs inside a backward: activation checkpointing repeats it."""
    return torch._C._current_autograd_node() is not None


def run_backward(outputs: Sequence[Any], grads: Sequence[Tensor]) -> None:
    """Run a backward of tensors or edges as `torch.autograd.backward`, past function modes."""
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward(tuple(outputs), tuple(grads), False, False, (), True, accumulate_grad=True)


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
    return any(node is not None and will_run(node) for node, _ in current_node().next_functions)


def saved_tensor_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the innermost pair of `torch.autograd.graph.saved_tensors_hooks` that is on."""
    hooks: tuple[Callable[..., Any], Callable[..., Any]] | None
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks


# Modules and tensors.


def hooks_around(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the hooks of a module's forward and backward."""
    kinds = vars(module)
    return [hook for name in _AROUND for hook in kinds[name].values()]


def num_gradient_hooks(param: Tensor) -> int:
    """Return how many hooks of a parameter wait for its gradient."""
    return len(param._backward_hooks or ()) + len(_accumulate_hooks(param))


def has_gradient_hooks(param: Tensor) -> bool:
    """Whether there is one."""
    return num_gradient_hooks(param) > 0


def has_accumulate_hooks(param: Tensor) -> bool:
    """Whether a hook of `register_post_accumulate_grad_hook` takes the parameter's gradient."""
    return bool(_accumulate_hooks(param))


def has_value_hooks(param: Tensor) -> bool:
    """Whether a hook of `register_hook` may change the parameter's gradient."""
    return bool(param._backward_hooks)


def through_hooks(param: Tensor, grad: Tensor) -> Tensor:
    """Return a gradient as these hooks return it, for one that autograd has not accumulated."""
    for hook in (param._backward_hooks or {}).values():
        changed = hook(grad)
        grad = grad if changed is None else changed
    return grad


def call_accumulate_hooks(param: Tensor) -> None:
    """Call the former hooks, for a gradient that autograd has not accumulated."""
    hooks = param._post_accumulate_grad_hooks
    for hook in (hooks or {}).values():
        hook(param)


def _accumulate_hooks(param: Tensor) -> dict[int, Callable[[Tensor], None]]:
    return param._post_accumulate_grad_hooks or {}


def storage_key(x: Tensor) -> int:
    """Return what all views of one storage share while it lives, on meta too."""
    return id(x.untyped_storage())  # one Python object for as long


def version(*tensors: Tensor) -> int:
    """Return the count of changes in place; 0 for a tensor of inference mode, which has none."""
    changes = 0
    for x in tensors:
        changes += 0 if x.is_inference() else x._version
    return changes


def set_versions(tensors: list[Tensor], versions: list[int]) -> None:
    """Set the counts of changes in place, which backward compares with those at forward."""
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


# Ranks.


def default_timeout() -> timedelta | None:
    """Return how long collectives of the default group wait; None = for ever, as fake ones do."""
    group = dist.group.WORLD
    assert group is not None, "asked for only with a process group"
    options = group._get_backend(torch.device(next(iter(_backends(group))))).options
    return None if options is None else options._timeout


def inherit_timeout(group: dist.ProcessGroup) -> None:
    """Give a group the timeout of the default group, which a new one does not have."""
    timeout = default_timeout()
    if timeout is not None:
        group.set_timeout(timeout)


def is_gloo(group: dist.ProcessGroup, device_type: str) -> bool:
    """Whether gloo runs a group's collectives for tensors of a device type."""
    return _backends(group)[device_type] == "gloo"


def object_device_type(group: dist.ProcessGroup | None) -> str:
    """Return the device type of small tensors that a group exchanges: "cpu" where it can."""
    names = _backends(group or dist.group.WORLD)  # type: ignore[arg-type]
    return "cpu" if "cpu" in names else next(iter(names))


def has_cpu_backend(group: dist.ProcessGroup) -> bool:
    """Return whether a group's collectives take CPU tensors."""
    return "cpu" in _backends(group)


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Return device type -> backend."""
    config = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    return dict(pair.split(":") for pair in config.split(","))


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, the same object each time; else the tensor."""
    if not isinstance(tensor, DTensor):
        return tensor
    if not torch.is_grad_enabled():  # 0.3 us of a host, else 1.5 us
        return tensor.to_local()
    with torch.no_grad():
        return tensor.to_local()


def own_local(tensor: Tensor) -> Tensor:
    """Return the tensor in which a DTensor has its part: `local_of` of a parameter is a view."""
    if not isinstance(tensor, DTensor):
        return tensor
    names, _ = tensor.__tensor_flatten__()  # the part is the first of what a DTensor is made of
    local_tensor: Tensor = getattr(tensor, names[0])
    return local_tensor


def wrapped_like(local: Tensor, like: Tensor) -> Tensor:
    """Return a DTensor of a local part that lies as another does; 4 us, `from_local` takes 70."""
    return DTensor(local, like._spec, requires_grad=False)  # type: ignore[attr-defined]


def zeros_like(tensor: Tensor, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Return zeros that lie as a tensor does; of a DTensor torch would plan the operation: 1 ms."""
    is_moved = device not in (None, tensor.device)
    if not isinstance(tensor, DTensor) or dtype != tensor.dtype or is_moved:
        return torch.zeros_like(tensor, dtype=dtype, device=device)
    return wrapped_like(torch.zeros_like(local_of(tensor)), tensor)


def parameter_like(data: Tensor, like: Tensor) -> nn.Parameter:
    """Return a tensor that nobody else has as a parameter, trained if `like` is."""
    if isinstance(data, DTensor):
        data.detach = lambda: data  # type: ignore[method-assign]  # torch would plan it for 1 ms
    param = nn.Parameter(data, requires_grad=like.requires_grad)
    vars(param).pop("detach", None)
    return param


def clear_sharding_caches() -> None:
    """Remove what DTensor keeps of meshes, which it finds again by their sizes and names."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # imported in 0.9 s

    _clear_sharding_prop_cache()
    if torch.cuda.is_initialized():  # autograd's thread of the device keeps some, too
        x = torch.zeros(1, device="cuda", requires_grad=True).clone()
        x.register_hook(lambda _: _clear_sharding_prop_cache())
        x.backward()


def symmetric_memory(
    num_bytes: int, group: dist.ProcessGroup, device: torch.device
) -> tuple[Tensor, Any]:
    """Return memory that all ranks of a group see, and the handle that knows theirs. Collective."""
    from torch.distributed import _symmetric_memory

    # Not `empty` of that module, which cuts a pool: offsets in it may differ between ranks once
    # one of them has freed its memory later than the others.
    allocate = _symmetric_memory._SymmetricMemory.empty_strided_p2p
    memory = allocate((num_bytes,), (1,), torch.uint8, device)
    return memory, _symmetric_memory.rendezvous(memory, group)


# Pipelines of `torch.ops.symm_mem.fused_*`, whose operators multiply by one matrix alone and
# allocate each result: slices of dim 0 travel through a workspace of the group, which grows with
# them, on copy engines. On another stream than the current one too, which waits at the end.


def gather_and_consume(
    x_C: Tensor, consume: Callable[[Tensor, int], None], x_GC: Tensor, group: dist.ProcessGroup
) -> None:
    """Gather dim 0 of all ranks, and call consume(slice, rank) with each slice that is here."""
    from torch.distributed import _symmetric_memory

    _symmetric_memory._pipelined_all_gather_and_consume(x_C, consume, x_GC, group.group_name)


def produce_and_send(
    produce: Callable[[int, Tensor], None], output_GC: Tensor, group: dist.ProcessGroup
) -> None:
    """Call produce(rank, slice), and send each rank its slice of dim 0 when it is full."""
    from torch.distributed import _symmetric_memory

    _symmetric_memory._pipelined_produce_and_all2all(produce, output_GC, group.group_name)
