"""The private names of autograd and dispatch: each is there and means what moecore assumes."""

import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moecore import _autograd

NAMES = [
    "_C.DispatchKey.PreDispatch",
    "_C._are_functorch_transforms_active",
    "_C._autograd._top_saved_tensors_default_hooks",
    "_C._autograd._unsafe_set_version_counter",
    "_C._current_autograd_node",
    "_C._current_graph_task_id",
    "_C._dispatch_tls_is_dispatch_key_included",
    "_C._len_torch_dispatch_stack",
    "_C._will_engine_execute_node",
    "UntypedStorage._cdata",
    "_compile._disable_dynamo",
    "_guards.detect_fake_mode",
    "Tensor._backward_hooks",
    "Tensor._post_accumulate_grad_hooks",
    "Tensor._version",
    "autograd._get_sequence_nr",
    "autograd._profiler_enabled",
    "autograd.Variable._execution_engine.queue_callback",
    "autograd.forward_ad._current_level",
    "utils._python_dispatch._disable_current_modes",
]


@pytest.mark.parametrize("name", NAMES)
def test_torch_has_the_name(name: str) -> None:
    operator.attrgetter(name)(torch)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_views_of_one_storage_have_one_key(device: str) -> None:
    x, y = torch.empty(4, 4, device=device), torch.empty(4, 4, device=device)
    views = (x, x[1:].t(), x.detach(), x.view(torch.int32))
    assert {_autograd.storage_key(view) for view in views} == {_autograd.storage_key(x)}
    assert _autograd.storage_key(x) != _autograd.storage_key(y)


def leaf() -> Tensor:
    return torch.ones(2, requires_grad=True)


def in_backward(function: Callable[[], object]) -> object:
    """Return what a function gives inside a backward."""
    seen = []
    y = leaf() * 2
    y.register_hook(lambda grad: seen.append(function()))
    y.sum().backward()
    return seen[0]


def test_a_recomputed_forward_is_known() -> None:
    seen = []

    def forward(x: Tensor) -> Tensor:
        seen.append(_autograd.is_recomputing())
        return x.sin()

    checkpoint(forward, leaf(), use_reentrant=False).sum().backward()
    assert seen == [False, True]
    assert _autograd.current_backward() == -1


def test_nodes_are_numbered_in_the_order_of_forward() -> None:
    start = _autograd.next_node_number()
    y = leaf() * 2
    end = _autograd.next_node_number()
    seen = []
    y.register_hook(lambda grad: seen.append(_autograd.current_node_number()))
    y.sum().backward()
    assert start <= seen[0] < end


def test_callbacks_run_after_the_backward() -> None:
    order = []
    x = leaf()
    y = x * 2
    y.register_hook(lambda grad: _autograd.call_after_backward(lambda: order.append("after")))
    x.register_hook(lambda grad: order.append("leaf"))
    y.sum().backward()
    assert order == ["leaf", "after"]


def test_a_backward_that_asks_for_less_leaves_nodes_out() -> None:
    a, b = leaf(), leaf()
    y = a.sin() * b.sin()
    seen = []
    nodes = [node for node, _ in y.grad_fn.next_functions]  # type: ignore[union-attr]
    y.register_hook(lambda grad: seen.extend(map(_autograd.will_run, nodes)))
    torch.autograd.grad(y.sum(), a)
    assert seen == [True, False]


def test_what_continues_behind_a_node() -> None:
    assert in_backward(_autograd.continues) is True
    x = leaf()
    seen = []
    y = x * 2
    y.register_hook(lambda grad: seen.append(_autograd.continues()))
    torch.autograd.grad(y.sum(), y)
    assert seen == [False]


def test_hooks_of_saved_tensors_and_gradients_are_seen() -> None:
    assert _autograd.saved_tensor_hooks() is None
    pair = (lambda t: t), (lambda t: t)
    with torch.autograd.graph.saved_tensors_hooks(*pair):
        assert _autograd.saved_tensor_hooks() == pair
    x = leaf()
    assert not _autograd.has_gradient_hooks(x)
    x.register_post_accumulate_grad_hook(lambda p: None)
    assert _autograd.has_gradient_hooks(x) and _autograd.has_accumulate_hooks(x)
    y = leaf()
    y.register_hook(lambda grad: grad)
    assert _autograd.has_gradient_hooks(y) and not _autograd.has_accumulate_hooks(y)


def test_plain_eager_is_autograd_alone() -> None:
    assert _autograd.is_plain_eager() and not _autograd.is_traced()
    with torch._subclasses.FakeTensorMode():
        assert not _autograd.is_plain_eager() and _autograd.is_traced()
        with _autograd.no_dispatch_modes():
            assert _autograd.is_plain_eager()
    seen = []
    torch.vmap(lambda x: (seen.append(_autograd.is_plain_eager()), x)[1])(torch.ones(2))
    assert seen == [False]


def test_tangents_are_seen() -> None:
    x = leaf()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones(2))
        assert _autograd.in_forward_mode() and not _autograd.is_plain_eager()
        assert _autograd.have_tangents(x, dual) and not _autograd.have_tangents(x)
    assert not _autograd.in_forward_mode()


def test_the_leaf_of_an_accumulating_node() -> None:
    x = leaf()
    node = (x * 2).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    assert _autograd.leaf_of(node) is x
    assert _autograd.leaf_of((x * 2).grad_fn) is None


def test_versions_count_changes_in_place() -> None:
    x = torch.ones(2)
    before = _autograd.version(x)
    x.add_(1)
    assert _autograd.version(x) == before + 1
    with torch.inference_mode():
        assert _autograd.version(torch.ones(2)) == 0
