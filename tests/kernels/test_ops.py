from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from moecore.kernels.common import cdiv, device_of, next_power_of_2
from moecore.kernels.experts.contract import ExpertMLPOptions, ExpertWeights
from moecore.kernels.hyper_connections import SinkhornOptions, collapse_streams, expand_streams
from moecore.kernels.ops import Op
from moecore.kernels.routing.balance import balance_statistics
from moecore.kernels.routing.balance_loss import balance_loss
from moecore.kernels.routing.counts import count_experts_and_tokens
from moecore.kernels.routing.route import route, route_weights
from moecore.kernels.routing.router_logits import router_logits
from moecore.kernels.rows.activation import ActivationOptions, weighted_activation
from moecore.kernels.rows.index import build_index
from moecore.kernels.rows.move import gather_rows, sum_rows
from moecore.kernels.rows.record import Rows
from tests.helpers.operations import Operations
from tests.kernels.choices import SIGMOID
from tests.kernels.experts.chosen import expert_mlp

T, D, F, E, K = 6, 16, 8, 4, 2
ROUTE_OPTIONS = replace(SIGMOID, top_k=K, scale=2.0)
IDS = torch.tensor([[0, 1], [1, 2], [3, 0], [2, -1], [1, 3], [0, 2]], dtype=torch.int32)


# Notes which operations of moecore run.
Watch = partial(Operations, lambda func, _: func._opname if func.namespace == "moecore" else None)


def _scale(x: Tensor, y: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    return x * y * factor, x.sum().int()


def _scale_fake(x: Tensor, y: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((), dtype=torch.int32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, y, ctx.factor = inputs
    ctx.save_for_backward(x, y)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _scale_backward(ctx: Any, dout: Tensor | None, dnumber: None) -> tuple[Tensor | None, ...]:
    x, y = ctx.saved_tensors
    needed.append(ctx.needs_input_grad)
    assert dout is not None and dnumber is None  # not made of zeros
    need_x, need_y, _ = ctx.needs_input_grad
    dx, dy = (dout * other * ctx.factor for other in (y, x))
    return dx if need_x else None, dy if need_y else None, None


def _copy(x: Tensor) -> Tensor:
    return x.clone()


def _add(total: Tensor | None, x: Tensor) -> None:
    if total is not None:
        total.detach().numpy()[...] += x.detach().numpy()  # as a kernel does: unseen by torch


needed: list[tuple[bool, ...]] = []
scale = Op("test_scale", _scale, _scale_fake, setup_context=_save, backward=_scale_backward)
copy = Op("test_copy", _copy, torch.empty_like)
add = Op("test_add", _add, lambda total, x: None, mutates_args=("total",))


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def run_balance(logits: Tensor, ids: Tensor) -> Tensor:
    sums, z_sum = balance_statistics(logits, 2, "sigmoid")
    return balance_loss(sums, z_sum, count_experts_and_tokens(ids, 2, E), [1.0, 4.0, 0.0, 1.0])


def run_experts(x: Tensor, w1: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    index = build_index(ids, weights, first_expert=0, num_local_experts=E)
    options = ExpertMLPOptions(activation=ActivationOptions(kind="swiglu"))
    return expert_mlp(Rows(x), ExpertWeights(w1_eCD=w1, w2_eDF=w2), index, options)


def run_rows(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    index = build_index(ids, weights, first_expert=0, num_local_experts=E, row_multiple=4)
    where = (index.row_ids_R, index.slots_SK, index.offsets_e[-1])
    return sum_rows(gather_rows(x, *where) * index.weights_R[:, None], *where)


def run_streams(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor) -> Tensor:
    options = SinkhornOptions(iterations=3, eps=1e-6, norm_eps=1e-6)
    x, collapsed = collapse_streams(streams, fn, base, scale, options)
    return expand_streams(x, collapsed)


Case = tuple[Callable[..., Any], tuple[Tensor, ...], set[str]]
CASES: dict[str, Case] = {
    "rows": (
        lambda x, w, ids: run_rows(x, w, ids),
        (leaf(T, D), leaf(T, K)),
        {"build_index", "build_index_bwd", "gather_rows", "sum_rows"},
    ),
    "route": (
        lambda logits, ids: route(logits, None, ROUTE_OPTIONS),
        (leaf(T, E),),
        {"route", "route_bwd"},
    ),
    "route weights": (
        lambda logits, ids: route_weights(logits, ids, ROUTE_OPTIONS),
        (leaf(T, E),),
        {"route_weights", "route_bwd"},
    ),
    "router logits": (
        lambda x, w, b, ids: router_logits(x, w, b),
        (leaf(T, D, dtype=torch.bfloat16), leaf(E, D), leaf(E)),
        {"router_logits", "router_logits_bwd"},
    ),
    "balance": (
        run_balance,
        (leaf(T, E),),
        {
            "add_expert_counts",
            "balance_statistics",
            "balance_statistics_bwd",
            "balance_loss",
            "balance_loss_bwd",
        },
    ),
    "activation": (
        lambda h, w, ids: weighted_activation(h, w, None, ActivationOptions(kind="swiglu")),
        (leaf(T, 2 * F), leaf(T)),
        {"weighted_activation", "weighted_activation_bwd"},
    ),
    "hyper-connections": (
        lambda *given: run_streams(*given[:4]),
        (leaf(T, 2, D), leaf(8, 2 * D), leaf(8), leaf(3)),
        {*("collapse_streams", "collapse_streams_bwd"), *("expand_streams", "expand_streams_bwd")},
    ),
    "experts": (
        run_experts,
        (leaf(T, D), leaf(E, 2 * F, D), leaf(E, D, F), leaf(T, K)),
        {"expert_mlp", "expert_mlp_bwd", "build_index", "build_index_bwd"},
    ),
}


def run(case: Case, device: str, frozen: int | None) -> tuple[list[Tensor], list[Any], list[Any]]:
    """Return outputs, gradients, and what backward keeps: shapes and dtypes, in order."""
    function, tensors, _ = case
    tensors = tuple(t.to(device).requires_grad_(i != frozen) for i, t in enumerate(tensors))
    kept: list[Any] = []

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage().nbytes():  # an op returns what it does not keep as empty
            kept.append((t.shape, t.dtype, t.untyped_storage().nbytes()))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        found = function(*tensors, IDS.to(device))
    outputs = [found] if isinstance(found, Tensor) else list(found)
    loss = sum(o.square().sum() for o in outputs if o.is_floating_point())
    if loss.requires_grad:
        loss.backward()
    return outputs, [t.grad for t in tensors], kept


@pytest.mark.parametrize("frozen", [None, 0, 1])
@pytest.mark.parametrize("name", CASES)
def test_same_bits_and_same_memory_either_way(name: str, frozen: int | None, device: str) -> None:
    case = CASES[name]
    outputs, grads, kept = run(case, device, frozen)
    with Watch() as watch:
        expected, expected_grads, expected_kept = run(case, device, frozen)
    assert frozen is not None or set(watch.found) == case[2]
    assert [o.requires_grad for o in outputs] == [o.requires_grad for o in expected]
    assert kept == expected_kept
    for ours, theirs in zip(outputs + grads, expected + expected_grads, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)


WAYS = [pytest.param(Watch, id="custom op"), pytest.param(torch.enable_grad, id="function")]


@pytest.mark.parametrize("way", WAYS)
def test_context_of_backward(way: Any) -> None:
    x, y = leaf(3).requires_grad_(), leaf(3)
    with way():
        out, number = scale(x, y, 2.0)
        assert out.requires_grad and not number.requires_grad
        needed.clear()
        (dx,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(dx, 2 * y) and needed == [(True, False, False)]


@pytest.mark.parametrize("way", WAYS)
def test_double_backward(way: Any) -> None:
    x, y = leaf(3).double().requires_grad_(), leaf(3).double().flip(0).requires_grad_()
    with way():
        assert torch.autograd.gradgradcheck(lambda x, y: scale(x, y, 2.0)[0], (x, y))


@pytest.mark.parametrize("way", WAYS)
def test_an_op_without_backward_refuses_gradients(way: Any) -> None:
    x = leaf(3).requires_grad_()
    with way():
        assert not copy(x.detach()).requires_grad
        with pytest.raises(RuntimeError, match="no autograd formula"):
            copy(x).sum().backward()


@pytest.mark.parametrize("way", WAYS)
def test_writing_is_noticed(way: Any) -> None:
    total, x = torch.zeros(3), leaf(3)
    w = leaf(3).requires_grad_()
    product, before = w * total, total._version
    with way():
        add(total, x)
        add(None, x)
    assert torch.equal(total, x) and total._version == before + 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_inference_tensors() -> None:
    with torch.inference_mode():
        total, x = torch.zeros(3), leaf(3)
        add(total, x)
        out, _ = scale(x, total, 1.0)
    assert torch.equal(out, x * x) and not out.requires_grad


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What called the custom op, while the test runs."""
    found: list[str] = []
    custom = scale.custom

    def spy(*args: Any) -> Any:
        found.append("custom")
        return custom(*args)

    monkeypatch.setattr(scale, "custom", spy)
    return found


def test_plain_eager_calls_no_custom_op(calls: list[str]) -> None:
    x, y = leaf(3).requires_grad_(), torch.nn.Parameter(leaf(3))
    scale(x, y, 2.0)[0].sum().backward()
    with torch.no_grad():
        assert scale(x, y, 2.0)[0].grad_fn is None
    assert scale(x.detach(), y.detach(), 2.0)[0].grad_fn is None
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("cpu"):
        scale(x, y, 2.0)
    checkpoint(lambda x: scale(x, y, 2.0)[0], x, use_reentrant=False).sum().backward()
    checkpoint(lambda x: scale(x, y, 2.0)[0], x, use_reentrant=True).sum().backward()
    assert calls == []


class Subclass(Tensor):
    """Neither Tensor nor Parameter."""


def _trace(f: Callable[..., Any], *args: Any) -> None:
    torch.jit.trace(f, args, check_trace=False)


def _under_fake_mode(f: Callable[..., Any], *args: Any) -> None:
    with FakeTensorMode() as mode:
        f(*(mode.from_tensor(a) for a in args))


def _fake_tensors(f: Callable[..., Any], *args: Any) -> None:
    mode = FakeTensorMode()
    f(*(mode.from_tensor(a) for a in args))


def _under_watch(f: Callable[..., Any], *args: Any) -> None:
    with Watch():
        f(*args)


def _forward_mode(f: Callable[..., Any], *args: Any) -> None:
    with torch.autograd.forward_ad.dual_level():
        f(*args)


WATCHED: dict[str, Callable[..., Any]] = {
    "dispatch mode": _under_watch,
    "fake mode": _under_fake_mode,
    "fake tensors": _fake_tensors,
    "meta tensors": lambda f, *args: f(*(a.to("meta") for a in args)),
    "a subclass": lambda f, *args: f(*(a.as_subclass(Subclass) for a in args)),
    "a negated view": lambda f, *args: f(*(torch._neg_view(a) for a in args)),
    "make_fx": lambda f, *args: make_fx(f)(*args),
    "make_fx before dispatch": lambda f, *args: make_fx(f, pre_dispatch=True)(*args),
    "functorch": lambda f, *args: torch.func.functionalize(f)(*args),
    "jit tracing": _trace,
    "forward mode": _forward_mode,
}


@pytest.mark.parametrize("name", WATCHED)
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_whoever_watches_sees_the_custom_op(name: str, calls: list[str]) -> None:
    WATCHED[name](lambda x, y: scale(x, y, 2.0)[0], leaf(3), leaf(3))
    assert calls


def test_compiled_graph_holds_the_custom_op() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda x, y: scale(x, y, 2.0)[0] + 1, backend=backend, fullgraph=True)
    x, y = leaf(3), leaf(3).flip(0)
    assert torch.equal(compiled(x, y), x * y * 2.0 + 1)
    assert torch.ops.moecore.test_scale.default in [node.target for node in graphs[0].graph.nodes]


@pytest.mark.parametrize("keep", [True, False])
def test_selective_checkpointing_keeps_an_op_by_name(keep: bool) -> None:
    name, runs = f"test_kept_{keep}", [0]

    def forward(x: Tensor, y: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        runs[0] += 1
        return _scale(x, y, factor)

    op = Op(name, forward, _scale_fake, setup_context=_save, backward=_scale_backward)

    def policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = keep and func is getattr(torch.ops.moecore, name).default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    x, y = leaf(3).requires_grad_(), leaf(3)
    out = checkpoint(
        lambda x: op(x.sin(), y, 2.0)[0].exp(),
        x,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )
    out.sum().backward()
    assert runs == [1 if keep else 2]
    (expected,) = torch.autograd.grad((x.sin() * y * 2.0).exp().sum(), x)
    torch.testing.assert_close(x.grad, expected)


def test_profiles_show_the_name() -> None:
    with torch.profiler.profile() as profile:
        scale(leaf(3).requires_grad_(), leaf(3), 2.0)
    assert "moecore::test_scale" in {event.name for event in profile.events()}


def test_sizes_are_those_of_triton() -> None:
    triton = pytest.importorskip("triton")
    assert next_power_of_2(0) == 1
    for n in (*range(1, 70), 1023, 1024, 1025, 2**31):
        assert next_power_of_2(n) == triton.next_power_of_2(n) and cdiv(n, 7) == triton.cdiv(n, 7)
    assert cdiv(0, 7) == 0


@pytest.mark.gpu
def test_the_current_device_is_not_set_again() -> None:
    x = torch.empty(1, device="cuda")
    assert device_of(x) is device_of(torch.empty(1))


@pytest.mark.gpu
@pytest.mark.gpus(2)
def test_another_device_is_made_current() -> None:
    with device_of(torch.empty(1, device="cuda:1")):
        assert torch.cuda.current_device() == 1
    assert torch.cuda.current_device() == 0
