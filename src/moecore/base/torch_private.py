"""The only file that uses private names of torch; each private name has one public name here.

A name is private if the name, or a module in its path, begins with one underscore. It can be
imported, read from a module or an object (`group._get_backend`), or passed as a string.
`tests/base/test_torch_private.py` finds these names in src and tests each one, so a torch release
that renames one fails a test by name. These names are allowed everywhere:

- `Tensor._version`, and members that subclasses of `nn.Module` use: `_parameters`, `_buffers`,
  `_modules`, `_apply`, `_load_from_state_dict`.
- `_step_supports_amp_scaling`, which optimizers define for `torch.amp`.

Operators (`torch.ops`) have a stable schema but no documentation, so they are listed here too.
"""

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
    """Whether a function that a torch function mode receives is `grouped_mm`."""
    return function is F.grouped_mm or function is torch._grouped_mm


# Collectives that 2.13 renamed: it warns about the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# StridedShard with separate pieces (gate and up): torch 2.11 raises in backward and full_tensor(),
# 2.13 supports both, and 2.12 has not been tested.
HAS_SEPARATE_PIECES = tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 13)

# Trees of tensors.
register_dataclass = _pytree.register_dataclass
register_pytree_node = _pytree.register_pytree_node
tree_flatten = _pytree.tree_flatten
tree_leaves = _pytree.tree_leaves
tree_map_only = _pytree.tree_map_only
tree_unflatten = _pytree.tree_unflatten

# Names of the hook dictionaries of a module, and of those with forward and backward hooks.
HOOKS = frozenset(n for n, value in vars(nn.Module()).items() if "hook" in n and value == {})
_CALL_HOOKS = tuple(n for n in HOOKS if n.endswith("hooks") and ("forward" in n or "backward" in n))

StridedShard = _StridedShard


class DispatchMode(TorchDispatchMode):
    """A base class for dispatch modes that do not disable torch.compile."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


# Dispatch modes, transforms and tracers.

_keys = torch._C._dispatch_tls_local_include_set  # looked up once: every kernel call reads it
_unpack = forward_ad.unpack_dual


def _collect_plain_dispatch_keys() -> frozenset[int]:
    """Return this thread's dispatch key sets in plain eager code, in and out of inference mode."""
    key_sets = set()
    with _disable_current_modes():
        for mode in (False, True):
            with torch.inference_mode(mode):
                key_sets.add(_keys().raw_repr())
    return frozenset(key_sets)


_PLAIN_KEYS = _collect_plain_dispatch_keys()
_UNTRACKED = torch.zeros((), dtype=torch.float32, device="cpu")  # a tensor without a derivative
NOTHING = nullcontext()  # one object for all calls, which saves host time


class _DryRunState(threading.local):
    """Thread-local flags that the dispatch modes of a dry run read."""

    inside = False
    on_host = False
    phases: tuple[str, ...] = ()


_dry = _DryRunState()


@contextmanager
def patch_attributes(target: Any, **new_values: Any) -> Iterator[None]:
    """Return a context that sets attributes of an object, and restores their previous values."""
    before = {name: getattr(target, name) for name in new_values}
    try:
        for name, value in new_values.items():
            setattr(target, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)


def enter_custom_ops() -> AbstractContextManager[None]:
    """Return a context of a dry run in which dispatch modes intercept operations in custom ops."""
    return patch_attributes(_dry, inside=True)


def is_inside_custom_ops() -> bool:
    """Whether this thread's dispatch modes intercept operations in custom ops (a dry run)."""
    return _dry.inside


def allocate_as_host_memory() -> AbstractContextManager[None]:
    """Return a context in which allocations on the meta device count as host memory."""
    return patch_attributes(_dry, on_host=True)


def is_host_memory() -> bool:
    """Whether this thread's meta allocations count as host memory."""
    return _dry.on_host


def list_open_ranges() -> tuple[str, ...]:
    """Return names of this thread's `annotate_range` contexts in a dry run, outermost first."""
    return _dry.phases


def skips_communication(x: Tensor) -> bool:
    """Whether collectives skip this tensor, because it is on meta outside of a dry run."""
    return x.is_meta and not _dry.inside


def disable_dispatch_modes() -> AbstractContextManager[Any]:
    """Return a context without active dispatch modes; does nothing inside `enter_custom_ops`."""
    return nullcontext() if _dry.inside else _disable_current_modes()


def is_plain_eager() -> bool:
    """Whether no compiler, mode, transform or tracer is active; True in custom ops of a dry run."""
    if torch.compiler.is_compiling():
        return False
    return (_keys().raw_repr() in _PLAIN_KEYS and not is_in_forward_mode()) or _dry.inside


def is_in_forward_mode() -> bool:
    """Whether forward-mode autograd is active."""
    return _unpack(_UNTRACKED).primal is not _UNTRACKED


def has_tangents(*tensors: Tensor) -> bool:
    """Whether one of the tensors has a forward-mode tangent."""
    return is_in_forward_mode() and any(_unpack(t).tangent is not None for t in tensors)


def annotate_range(name: str) -> AbstractContextManager[Any]:
    """Return a context that profilers, and `list_open_ranges` in a dry run, show by this name."""
    if torch.compiler.is_compiling():
        return NOTHING
    if _dry.inside:
        return patch_attributes(_dry, phases=(*_dry.phases, name))
    if not torch.autograd._profiler_enabled():
        return NOTHING
    return torch.profiler.record_function(name)


def get_autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the autocast dtype for a tensor's device; None if autocast is off or x is on meta."""
    device = x.device.type
    if x.is_meta or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


# Backwards.


def get_current_node() -> Node:
    """Return the autograd node whose backward is running."""
    return torch._C._current_autograd_node()


def is_inside_backward() -> bool:
    """Whether the caller runs inside a backward pass, such as a recomputed forward."""
    return torch._C._current_autograd_node() is not None


def run_backward(outputs: Sequence[Any], grads: Sequence[Tensor]) -> None:
    """Run `torch.autograd.backward` on tensors or graph edges without torch function modes."""
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward(tuple(outputs), tuple(grads), False, False, (), True, accumulate_grad=True)


def call_after_backward(function: Callable[[], None]) -> None:
    """Register a function that autograd calls when the running backward has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def will_run_node(node: Any) -> bool:
    """Whether the running backward will execute `node`; None means a leaf, for which it is True."""
    try:
        return node is None or torch._C._will_engine_execute_node(node)
    except RuntimeError:  # the node of a leaf whose gradient `autograd.grad` computes
        return False


def has_next_node() -> bool:
    """Whether the running backward will execute another node after the current node."""
    edges = get_current_node().next_functions
    return any(node is not None and will_run_node(node) for node, _ in edges)


def get_saved_tensor_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the innermost active pair of `torch.autograd.graph.saved_tensors_hooks`, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


# Modules and tensors.


def list_module_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """Return all forward and backward hooks that are registered on a module."""
    kinds = vars(module)
    return [hook for name in _CALL_HOOKS for hook in kinds[name].values()]


def count_gradient_hooks(param: Tensor) -> int:
    """Return the number of a parameter's hooks, before and after gradient accumulation."""
    return len(param._backward_hooks or ()) + len(param._post_accumulate_grad_hooks or ())


def has_gradient_hooks(param: Tensor) -> bool:
    """Whether a parameter has a gradient hook, before or after accumulation."""
    return count_gradient_hooks(param) > 0


def has_accumulate_hooks(param: Tensor) -> bool:
    """Whether a parameter has hooks of `register_post_accumulate_grad_hook`."""
    return bool(param._post_accumulate_grad_hooks)


def has_tensor_hooks(param: Tensor) -> bool:
    """Whether a parameter has hooks of `register_hook`, which may change its gradient."""
    return bool(param._backward_hooks)


def apply_tensor_hooks(param: Tensor, grad: Tensor) -> Tensor:
    """Call the parameter's `register_hook` hooks on a gradient and return the changed gradient."""
    for hook in (param._backward_hooks or {}).values():
        changed = hook(grad)
        grad = grad if changed is None else changed
    return grad


def call_accumulate_hooks(param: Tensor) -> None:
    """Call a parameter's `register_post_accumulate_grad_hook` hooks, as autograd would do."""
    for hook in (param._post_accumulate_grad_hooks or {}).values():
        hook(param)


def get_storage_key(x: Tensor) -> int:
    """Return a number that identifies a tensor's storage (also on meta) as long as it exists."""
    return id(x.untyped_storage())  # the same Python object as long as the storage exists


def sum_version_counters(*tensors: Tensor) -> int:
    """Return the sum of the tensors' version counters; inference tensors count as 0."""
    changes = 0
    for x in tensors:
        changes += 0 if x.is_inference() else x._version
    return changes


def set_version_counters(tensors: list[Tensor], versions: list[int]) -> None:
    """Set the version counters with which autograd detects in-place changes of saved tensors."""
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


# Process groups.

# First letters of the methods of a group that start a collective.
STARTS = ("all", "reduce", "broadcast", "gather", "scatter", "send", "recv", "barrier")


def get_default_timeout() -> timedelta | None:
    """Return the timeout of the default process group; None for a fake group without one."""
    group = dist.group.WORLD
    assert group is not None, "the default process group must exist"
    options = group._get_backend(torch.device(next(iter(_get_backends(group))))).options
    return None if options is None else options._timeout


def set_timeout_to_default(group: dist.ProcessGroup) -> None:
    """Set a group's timeout to the timeout of the default process group."""
    timeout = get_default_timeout()
    if timeout is not None:
        group.set_timeout(timeout)


@contextmanager
def wrap_collectives(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Return a context in which `wrap` wraps process group methods that launch or await work."""
    wait = vars(dist.Work)["wait"]  # `getattr` would return a function that is no method
    methods: list[tuple[type, str, Any]] = [(dist.Work, "wait", wait)]
    for name, method in vars(dist.ProcessGroup).items():
        if name.lstrip("_").startswith(STARTS):
            methods.append((dist.ProcessGroup, name, method))
    try:
        for owner, name, method in methods:
            setattr(owner, name, wrap(method))
        yield
    finally:
        for owner, name, method in methods:
            setattr(owner, name, method)


def is_gloo(group: dist.ProcessGroup, device_type: str) -> bool:
    """Whether gloo is the group's backend for tensors of a device type."""
    return _get_backends(group)[device_type] == "gloo"


@contextmanager
def register_allocations(
    group: dist.ProcessGroup, device: torch.device
) -> Iterator[Callable[[], None]]:
    """Return a context whose allocations become NCCL's symmetric windows at its end. Collective.

    The context yields a function that ends the registration; call it before memory is freed. The
    group must have run a collective before, which creates NCCL's communicator.
    """
    backend: Any = group._get_backend(device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        yield lambda: backend.deregister_mem_pool(pool)
    backend.register_mem_pool(pool, symm=True)


def choose_small_tensor_device_type(group: dist.ProcessGroup | None) -> str:
    """Return "cpu" if the group has a CPU backend, otherwise its first backend's device type."""
    names = _get_backends(group or dist.group.WORLD)  # type: ignore[arg-type]
    return "cpu" if "cpu" in names else next(iter(names))


def has_cpu_backend(group: dist.ProcessGroup) -> bool:
    """Whether a group has a backend for CPU tensors."""
    return "cpu" in _get_backends(group)


def _get_backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Return {device type: backend name} of a process group."""
    config = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    return dict(pair.split(":") for pair in config.split(","))


def get_local_tensor(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, not differentiable; other tensors are unchanged."""
    if not isinstance(tensor, DTensor):
        return tensor
    if not torch.is_grad_enabled():  # 0.3 us of a host, else 1.5 us
        return tensor.to_local()
    with torch.no_grad():
        return tensor.to_local()


def get_stored_local_tensor(tensor: Tensor) -> Tensor:
    """Return the tensor object that a DTensor stores; `get_local_tensor` returns a view of it."""
    if not isinstance(tensor, DTensor):
        return tensor
    names, _ = tensor.__tensor_flatten__()  # the first name is the local tensor
    local_tensor: Tensor = getattr(tensor, names[0])
    return local_tensor


def make_dtensor_like(local_tensor: Tensor, like: Tensor) -> Tensor:
    """Return a DTensor of a local shard with the mesh, placements and shape of `like`."""
    # Faster than `DTensor.from_local`.
    return DTensor(local_tensor, like._spec, requires_grad=False)  # type: ignore[attr-defined]


def zeros_like(tensor: Tensor, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Return zeros like a tensor or DTensor in `dtype`; `device` None = the tensor's device."""
    is_moved = device not in (None, tensor.device)
    if not isinstance(tensor, DTensor) or dtype != tensor.dtype or is_moved:
        return torch.zeros_like(tensor, dtype=dtype, device=device)
    return make_dtensor_like(torch.zeros_like(get_local_tensor(tensor)), tensor)


def make_parameter_like(data: Tensor, like: Tensor) -> nn.Parameter:
    """Return a parameter that contains the tensor `data`, with `requires_grad` of `like`."""
    if isinstance(data, DTensor):
        data.detach = lambda: data  # type: ignore[method-assign]  # torch's own DTensor operation takes 1 ms
    param = nn.Parameter(data, requires_grad=like.requires_grad)
    vars(param).pop("detach", None)
    return param


def clear_sharding_caches() -> None:
    """Clear DTensor's sharding caches, which mix up meshes of equal sizes and axis names."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # imported in 0.9 s

    _clear_sharding_prop_cache()
    if torch.cuda.is_initialized():  # autograd's thread of the device has a cache of its own
        x = torch.zeros(1, device="cuda", requires_grad=True, dtype=torch.float32).clone()
        x.register_hook(lambda _: _clear_sharding_prop_cache())
        x.backward()


def allocate_symmetric_memory(
    num_bytes: int, group: dist.ProcessGroup, device: torch.device
) -> tuple[Tensor, Any]:
    """Allocate symmetric memory, uint8 [num_bytes]; return it and its handle. Collective."""
    from torch.distributed import _symmetric_memory

    # `empty` of that module uses a pool, whose offsets can differ between ranks after frees.
    allocate = _symmetric_memory._SymmetricMemory.empty_strided_p2p
    memory = allocate((num_bytes,), (1,), torch.uint8, device)
    return memory, _symmetric_memory.rendezvous(memory, group)


# The pipelines of `torch.ops.symm_mem.fused_*`. Copy engines move slices of dim 0 through a
# workspace of the group. Work runs on a second stream too, for which the current stream waits at
# the end. torch's fused operators support only one matrix product and allocate each result.


def all_gather_and_consume(
    x_C: Tensor,
    consume_slice: Callable[[Tensor, int], None],
    x_GC: Tensor,
    group: dist.ProcessGroup,
) -> None:
    """All-gather `x_C` along dim 0 to `x_GC`; call consume_slice(slice, rank) per arrived rank."""
    from torch.distributed import _symmetric_memory

    _symmetric_memory._pipelined_all_gather_and_consume(x_C, consume_slice, x_GC, group.group_name)


def produce_and_all_to_all(
    produce_slice: Callable[[int, Tensor], None], output_GC: Tensor, group: dist.ProcessGroup
) -> None:
    """Call produce_slice(rank, slice) to fill each rank's slice; all-to-all to `output_GC`."""
    from torch.distributed import _symmetric_memory

    _symmetric_memory._pipelined_produce_and_all2all(produce_slice, output_GC, group.group_name)
