"""Private names of torch: `base/torch_private.py` alone has them; each means what it is used for.

What counts is in its docstring; this file reads it off the syntax of all of src.
"""

import ast
import importlib
import inspect
import operator
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import moecore
from moecore import ParallelConfig, build_meshes
from moecore.base import torch_private as _torch
from moecore.parallel.mesh import concatenate_meshes

SRC = Path(moecore.__file__).parent
MOST = 21

# Each name, and where torch has it.
NAMES = {
    "CustomGraphPass": "_inductor.custom_graph_pass.CustomGraphPass",
    "TorchDispatchMode": "utils._python_dispatch.TorchDispatchMode",
    "_StridedShard": "distributed.tensor.placement_types._StridedShard",
    "_SymmetricMemory": "distributed._symmetric_memory._SymmetricMemory.empty_strided_p2p",
    "_backward_hooks": "Tensor._backward_hooks",
    "_clear_sharding_prop_cache": "distributed.tensor.debug._clear_sharding_prop_cache",
    "_current_autograd_node": "_C._current_autograd_node",
    "_disable_current_modes": "utils._python_dispatch._disable_current_modes",
    "_dispatch_tls_local_include_set": "_C._dispatch_tls_local_include_set",
    "_execution_engine": "autograd.Variable._execution_engine.queue_callback",
    "_get_backend": "distributed.ProcessGroup._get_backend",
    **{
        name: f"distributed._symmetric_memory.{name}"
        for name in ("_pipelined_all_gather_and_consume", "_pipelined_produce_and_all2all")
    },
    "_post_accumulate_grad_hooks": "Tensor._post_accumulate_grad_hooks",
    "_profiler_enabled": "autograd._profiler_enabled",
    "_pytree": "utils._pytree.tree_leaves",
    "_spec": "distributed.tensor.DTensor._spec",
    "_timeout": "distributed.ProcessGroupGloo._Options._timeout",
    "_top_saved_tensors_default_hooks": "_C._autograd._top_saved_tensors_default_hooks",
    "_unsafe_set_version_counter": "_C._autograd._unsafe_set_version_counter",
    "_will_engine_execute_node": "_C._will_engine_execute_node",
}
# Modules on the way to names, which do not count beside these.
MODULES = {"_C", "_autograd", "_python_dispatch", "_symmetric_memory"}
# Operators: registered with a schema.
OPERATORS = {
    "_assert_async", "_c10d_functional", "_flash_attention_backward", "_flash_attention_forward",
    "_foreach_add_", "_foreach_copy_", "_foreach_div_", "_foreach_mul_", "_foreach_norm",
    "_fused_adamw_", "_grouped_mm", "_scaled_dot_product_attention_math",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention",
    "_scaled_grouped_mm", "_scaled_mm_v2", "_unsafe_view",
}  # fmt: skip
# Everywhere.
ALLOWED = {
    "_apply": "subclasses of nn.Module extend it, as torch.nn.RNNBase does: `to` calls no other",
    "_buffers": "what an nn.Module is made of, as its subclasses and its pickles see it",
    "_forward_hooks": "as _buffers",
    "_last_lr": "a key of the state dicts of schedulers: data",
    "_load_from_state_dict": "subclasses extend it, as the documentation of nn.Module has it",
    "_modules": "as _buffers",
    "_parameters": "as _buffers",
    "_replace": "of a NamedTuple: Python's, and documented",
    "_reset_parameters": "what nn.MultiheadAttention and nn.Transformer name reset_parameters",
    "_step_supports_amp_scaling": "what torch.amp asks optimizers for; moecore's define it",
    "_version": "in the documentation of torch.inference_mode",
}
# Of other libraries, from where moecore adapts to them.
FOREIGN = {
    "_asdict": "of a NamedTuple",
    "_fields": "of a NamedTuple",
    "_apply_gate": "transformers",
    "_attn_implementation": "transformers",
    "_current_frames": "documented, of sys",
    "_debug_force_load_balance": "torchtitan",
    "_experts_implementation": "transformers",
    "_flash_attn_bwd": "flash-attn-4",
    "_flash_attn_fwd": "flash-attn-4",
    "_from_config": "transformers",
    "_get_dtype_plan": "transformers",
    "_gradient_checkpointing_func": "transformers",
    "_heterogeneity_spec": "transformers",
    "_init_weights": "transformers",
    "_param_init": "torchtitan",
    "_post_init": "torchtitan",
    "_save_rng_state": "transformers",
}
LOOK_UPS = ("getattr", "hasattr", "setattr", "delattr")


def names_of_torch() -> set[str]:
    """Return the private names of torch's modules and objects that moecore has in its hands."""
    x = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([x], fused=True)
    owners: list[Any] = [
        *(torch, torch._C, torch.autograd, torch.nn, torch.compiler, torch.optim, torch.cuda),
        *(dist, dist.distributed_c10d, dist.device_mesh, DeviceMesh, DTensor, dist.ProcessGroup),
        *(dist.ProcessGroupGloo, dist.ProcessGroupGloo._Options, dist.tensor.placement_types),
        *(x, x.untyped_storage(), (x * 2).grad_fn, nn.Module(), nn.Parameter, optimizer),
        *(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0), torch.ops.aten.mm.default),
        torch.utils.checkpoint,
    ]
    return {name for owner in owners for name in dir(owner) if is_private(name)} - {"_"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def parse() -> dict[str, ast.Module]:
    return {f.relative_to(SRC).as_posix(): ast.parse(f.read_text()) for f in SRC.rglob("*.py")}


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def defined(tree: ast.Module) -> Iterator[str]:
    """Yield the names that moecore's own modules, classes and objects have."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and is_self(node.value):
            yield from [node.attr] if isinstance(node.ctx, ast.Store) else []


def used(tree: ast.Module, own: set[str], torchs: set[str]) -> Iterator[str]:
    """Yield the private names of others: imported, by dots, and as strings."""
    slots = [n for n in ast.walk(tree) if isinstance(n, ast.Assign) and "__slots__" in names(n)]
    own_strings = {id(n) for slot in slots for n in ast.walk(slot)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (p for a in node.names for p in a.name.split(".") if is_private(p))
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("moecore"):
            path = [p for p in (node.module or "").split(".") if is_private(p)]
            for alias in node.names:
                yield from [alias.name] if path or is_private(alias.name) else []
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            mine = node.attr in own and (is_self(node.value) or node.attr not in torchs)
            yield from [] if mine else [node.attr]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value in torchs and id(node) not in own_strings:
                yield node.value
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in LOOK_UPS:
            asked = node.args[1]
            if isinstance(asked, ast.Constant) and is_private(asked.value):
                yield from [] if asked.value in own else [asked.value]


def names(node: ast.Assign) -> list[str]:
    return [target.id for target in node.targets if isinstance(target, ast.Name)]


def test_one_file_has_private_names_of_torch() -> None:
    trees, torchs = parse(), names_of_torch()
    own = {name for tree in trees.values() for name in defined(tree)}
    counted = set(used(trees.pop("base/torch_private.py"), own, torchs)) - MODULES - OPERATORS
    assert counted - ALLOWED.keys() == set(NAMES) and len(NAMES) <= MOST
    elsewhere = {file: set(used(tree, own, torchs)) for file, tree in trees.items()}
    known = ALLOWED.keys() | FOREIGN.keys()
    assert {file: found - known for file, found in elsewhere.items() if found - known} == {}
    assert known <= counted.union(*elsewhere.values())  # nothing is allowed in vain


@pytest.mark.parametrize("name", NAMES)
def test_torch_has_the_name(name: str) -> None:
    importlib.import_module("torch.distributed._symmetric_memory")  # the one that torch leaves out
    operator.attrgetter(NAMES[name])(torch)


def test_pipelines_of_symmetric_memory_take_these_arguments() -> None:
    from torch.distributed import _symmetric_memory

    gather = inspect.signature(_symmetric_memory._pipelined_all_gather_and_consume)
    send = inspect.signature(_symmetric_memory._pipelined_produce_and_all2all)
    assert list(gather.parameters)[:4] == ["shard", "shard_consumer", "ag_out", "group_name"]
    assert list(send.parameters)[:3] == ["chunk_producer", "output", "group_name"]
    assert all(p.default is not p.empty for p in list(gather.parameters.values())[4:])
    assert all(p.default is not p.empty for p in list(send.parameters.values())[3:])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_views_of_one_storage_have_one_key(device: str) -> None:
    tensors = [torch.empty(4, 4, device=device) for _ in range(100)]
    keys = [_torch.get_storage_key(x) for x in tensors]
    assert len(set(keys)) == 100
    for view in (Tensor.t, Tensor.detach, lambda x: x[1:], lambda x: x.view(torch.int32)):
        assert [_torch.get_storage_key(view(x)) for x in tensors] == keys


class OnDTensors(_torch.TorchDispatchMode):
    """The operations on DTensors, each of which torch plans."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found += [func] if DTensor in types else []
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("no_group_left")
def test_parameters_and_zeros_of_dtensors_take_no_operation() -> None:
    mesh = build_meshes(ParallelConfig(), "cpu").dense
    part = torch.ones(4, 2)
    data = DTensor.from_local(part, mesh, [Shard(0)] + [Replicate()] * (mesh.ndim - 1))
    with OnDTensors() as mode:
        found = _torch.make_parameter_like(data, torch.ones(1, requires_grad=True))
        zeros = _torch.zeros_like(found, torch.float32)
    assert mode.found == [] and isinstance(found, nn.Parameter) and isinstance(found, DTensor)
    assert found.is_leaf and found.requires_grad and "detach" not in vars(found)
    assert _torch.get_local_tensor(found).data_ptr() == part.data_ptr()
    assert zeros.placements == found.placements and not zeros.any()
    assert _torch.zeros_like(found, torch.bfloat16).dtype == torch.bfloat16


def leaf() -> Tensor:
    return torch.ones(2, requires_grad=True)


def in_backward(function: Callable[[], object]) -> object:
    """Return what a function gives inside a backward."""
    seen, y = [], leaf() * 2
    y.register_hook(lambda grad: seen.append(function()))
    y.sum().backward()
    return seen[0]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputed_forward_is_known(use_reentrant: bool) -> None:
    seen = []

    def forward(x: Tensor) -> Tensor:
        seen.append(_torch.is_inside_backward())
        return x.sin()

    checkpoint(forward, leaf(), use_reentrant=use_reentrant).sum().backward()
    assert seen == [False, True]
    assert in_backward(_torch.is_inside_backward) and not _torch.is_inside_backward()


def test_the_node_of_a_backward_has_what_the_forward_wrote() -> None:
    y = leaf() * 2
    node: Any = y.grad_fn
    node.metadata["mine"] = 3
    seen: list[Any] = []
    y.register_hook(lambda grad: seen.append(_torch.get_current_node().metadata))
    y.sum().backward()
    assert seen == [{"mine": 3}]


def test_callbacks_run_after_the_backward() -> None:
    order, x = [], leaf()
    y = x * 2
    y.register_hook(lambda grad: _torch.call_after_backward(lambda: order.append("after")))
    x.register_hook(lambda grad: order.append("leaf"))
    y.sum().backward()
    assert order == ["leaf", "after"]


def test_a_backward_that_asks_for_less_leaves_nodes_out() -> None:
    a, b = leaf(), leaf()
    y, seen = a.sin() * b.sin(), []
    nodes = [node for node, _ in y.grad_fn.next_functions]  # type: ignore[union-attr]
    y.register_hook(lambda grad: seen.extend(map(_torch.will_run_node, nodes)))
    torch.autograd.grad(y.sum(), a)
    assert seen == [True, False]


def test_what_continues_behind_a_node() -> None:
    assert in_backward(_torch.has_next_node) is True
    seen, y = [], leaf() * 2
    y.register_hook(lambda grad: seen.append(_torch.has_next_node()))
    torch.autograd.grad(y.sum(), y)
    assert seen == [False]


def test_hooks_are_seen() -> None:
    assert _torch.get_saved_tensor_hooks() is None
    pair = (lambda t: t), (lambda t: t)
    with torch.autograd.graph.saved_tensors_hooks(*pair):
        assert _torch.get_saved_tensor_hooks() == pair
    x, called = leaf(), []
    assert not _torch.has_gradient_hooks(x)
    x.register_post_accumulate_grad_hook(called.append)
    assert _torch.has_gradient_hooks(x) and _torch.has_accumulate_hooks(x)
    _torch.call_accumulate_hooks(x)
    assert called == [x]
    y = leaf()
    y.register_hook(lambda grad: grad)
    assert _torch.has_gradient_hooks(y) and not _torch.has_accumulate_hooks(y)
    assert _torch.has_tensor_hooks(y) and not _torch.has_tensor_hooks(x)
    y.register_hook(lambda grad: grad * 3)
    y.register_hook(lambda grad: None)
    assert torch.equal(_torch.apply_tensor_hooks(y, torch.ones(2)), torch.full((2,), 3.0))
    module = nn.Linear(2, 2)
    hooks = [lambda *_: None for _ in range(4)]
    module.register_forward_pre_hook(hooks[0])
    module.register_forward_hook(hooks[1], with_kwargs=True, always_call=True)
    module.register_full_backward_pre_hook(hooks[2])
    module.register_full_backward_hook(hooks[3])
    module.register_state_dict_post_hook(lambda *_: None)  # around nothing
    assert set(_torch.list_module_hooks(module)) == set(hooks)


def test_plain_eager_is_autograd_alone() -> None:
    seen = []

    def see(x: Tensor) -> Tensor:
        seen.append(_torch.is_plain_eager())
        return x * 2

    for ordinary in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu")):
        with ordinary:
            assert _torch.is_plain_eager()
    assert in_backward(_torch.is_plain_eager)
    with torch._subclasses.FakeTensorMode():
        assert not _torch.is_plain_eager()
        with _torch.disable_dispatch_modes():
            assert _torch.is_plain_eager()
    torch.vmap(see)(torch.ones(2))
    torch.func.grad(lambda x: see(x).sum())(torch.ones(2))
    make_fx(see)(torch.ones(2))
    make_fx(see, pre_dispatch=True)(torch.ones(2))
    torch.jit.trace(see, torch.ones(2), check_trace=False)
    assert seen == [False] * 5 and _torch.is_plain_eager()


def test_tangents_are_seen() -> None:
    x = leaf()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones(2))
        assert _torch.is_in_forward_mode() and not _torch.is_plain_eager()
        assert _torch.has_tangents(x, dual) and not _torch.has_tangents(x)
    assert not _torch.is_in_forward_mode()


def test_versions_count_changes_in_place_and_can_be_set() -> None:
    x = torch.ones(2)
    before = _torch.sum_version_counters(x)
    x.add_(1)
    assert _torch.sum_version_counters(x) == before + 1
    with torch.inference_mode():
        assert _torch.sum_version_counters(torch.ones(2)) == 0
    w = leaf()
    y = (w * w).sum()
    _torch.set_version_counters([w], [_torch.sum_version_counters(w) + 1])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_a_mark_is_in_profiles() -> None:
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu) as profile, _torch.annotate_range("moecore::here"):
        torch.ones(2)
    assert "moecore::here" in {event.name for event in profile.events()}


@pytest.mark.usefixtures("no_group_left")
def test_groups_and_meshes() -> None:
    timeout = timedelta(seconds=77)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    group, world = dist.new_group([0]), dist.group.WORLD
    assert world is not None and _torch.get_default_timeout() == timeout
    _torch.set_timeout_to_default(group)
    options = group._get_backend(torch.device("cpu")).options
    assert options._timeout == timeout and _torch.is_gloo(group, "cpu")
    assert build_meshes(ParallelConfig(), "cpu").stage_group is world
    strided = _torch.StridedShard(0, split_factor=2)
    assert (strided.dim, strided.split_factor) == (0, 2)
    a, b = (init_device_mesh("cpu", (1, 1), mesh_dim_names=n) for n in (("w", "x"), ("y", "z")))
    both = concatenate_meshes(a, b["z"])
    assert both.mesh_dim_names == ("w", "x", "z") and both.mesh.tolist() == [[[0]]]
    assert both.get_group("z") is b.get_group("z")
    local = torch.ones(2, 2)
    sharded = DTensor.from_local(local, both, [Shard(0)] * 3, run_check=False)
    again = _torch.make_dtensor_like(torch.zeros(2, 2), sharded)
    assert again.placements == sharded.placements and again.full_tensor().sum() == 0
    param = torch.nn.Parameter(sharded.detach())
    _torch.get_stored_local_tensor(param).data = torch.full((2, 2), 7.0)
    assert _torch.get_local_tensor(param)[0, 0] == 7
    assert _torch.get_stored_local_tensor(param) is _torch.get_stored_local_tensor(param)
    part = _torch.get_local_tensor(sharded.requires_grad_())
    assert part is _torch.get_local_tensor(sharded) and torch.equal(part, local) and part.is_leaf


@pytest.mark.parametrize("clears", [False, True])
@pytest.mark.usefixtures("no_group_left")
def test_meshes_of_an_earlier_world_are_removed(clears: bool) -> None:
    for _ in range(2):
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        own = DTensor.from_local(torch.ones(1), mesh, [Shard(0)], run_check=False).detach()
        dist.destroy_process_group()
        if clears:
            _torch.clear_sharding_caches()
    assert (own.device_mesh is mesh) == clears


TAKEN = {
    "_flash_attention_forward": "query key value cum_seq_q cum_seq_k max_q max_k dropout_p "
    "is_causal return_debug_mask scale window_size_left window_size_right",
    "_scaled_mm_v2": "self mat2 scale_a recipe_a swizzle_a scale_b recipe_b swizzle_b bias "
    "out_dtype",
    "_scaled_grouped_mm": "self mat2 scale_a scale_b offs bias scale_result out_dtype",
}


@pytest.mark.parametrize("name", TAKEN)
def test_an_operator_takes_these_arguments_in_this_order(name: str) -> None:
    arguments = operator.attrgetter(name)(torch.ops.aten).default._schema.arguments
    wanted = TAKEN[name].split()
    assert [a.name for a in arguments][: len(wanted)] == wanted


def test_grouped_products_are_known_where_a_mode_sees_them() -> None:
    a = torch.ones(4, 16, dtype=torch.bfloat16)
    b, ends = torch.ones(2, 16, 8, dtype=torch.bfloat16), torch.tensor([1, 4], dtype=torch.int32)
    seen = []

    class See(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(_torch.is_grouped_mm(func))
            return func(*args, **(kwargs or {}))

    with See():
        y = F.grouped_mm(a, b, offs=ends)
    assert any(seen) and torch.equal(y, torch.full((4, 8), 16.0).bfloat16())
