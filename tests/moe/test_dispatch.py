"""Row movers and the local dispatcher: exact, by hand, and for random routings with dropped ids."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moecore.moe.dispatch.base import ExpertInput, gather_rows, group_rows, sum_rows
from moecore.moe.dispatch.local import LocalDispatcher
from moecore.moe.router import Routing


def routing_of(ids_TK: Tensor, weights_TK: Tensor, num_experts: int) -> Routing:
    zeros_TE = torch.zeros(ids_TK.shape[0], num_experts)
    return Routing(ids_TK, weights_TK, zeros_TE, zeros_TE)


def pairs_by_hand(ids: list[list[int]], first: int, num_local: int) -> list[list[tuple[int, int]]]:
    """Per local expert, the (row, k) pairs that go to it, in order of row and k."""
    return [
        [(s, k) for s, row in enumerate(ids) for k, e in enumerate(row) if e == first + i]
        for i in range(num_local)
    ]


# --------------------------------------------------------------------------- group_rows


def test_worked_example_of_expert_input() -> None:
    ids = torch.tensor([[0, 1], [1, -1]], dtype=torch.int32)
    weights = torch.tensor([[0.1, 0.2], [0.3, 0.4]])
    rows, w, offsets = group_rows(ids, weights, first=0, num_local=2)
    assert rows.tolist() == [0, 0, 1, 1]
    assert offsets.tolist() == [1, 3]
    torch.testing.assert_close(w, torch.tensor([0.1, 0.2, 0.3, 0.0]))
    assert (rows.dtype, w.dtype, offsets.dtype) == (torch.int32, torch.float32, torch.int32)


def test_worked_example_in_the_middle_of_the_experts() -> None:
    # This rank owns experts 2 and 3 of six.
    ids = torch.tensor([[3, 0], [2, 3], [5, 1], [-1, 2]], dtype=torch.int32)
    weights = torch.arange(1.0, 9.0).view(4, 2)
    rows, w, offsets = group_rows(ids, weights, first=2, num_local=2)
    assert offsets.tolist() == [2, 4]
    assert rows[:4].tolist() == [1, 3, 0, 1]
    assert w.tolist() == [3.0, 8.0, 1.0, 4.0, 0.0, 0.0, 0.0, 0.0]
    rows, w, offsets = group_rows(ids, weights, first=2, num_local=2, num_rows=4)
    assert rows.tolist() == [1, 3, 0, 1] and w.tolist() == [3.0, 8.0, 1.0, 4.0]


@st.composite
def routings(draw: st.DrawFn) -> tuple[Tensor, Tensor, int, int]:
    """ids with dropped and foreign experts (distinct per token), weights, first, num_local."""
    E = draw(st.integers(1, 9))
    K = draw(st.integers(1, E))
    S = draw(st.integers(0, 8))
    first = draw(st.integers(0, E - 1))
    num_local = draw(st.integers(1, E - first))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    ids = torch.rand(S, E, generator=generator).argsort(1)[:, :K]
    dropped = torch.rand(S, K, generator=generator) < draw(st.sampled_from([0.0, 0.3, 1.0]))
    ids = ids.masked_fill(dropped, -1).to(torch.int32)
    return ids, torch.rand(S, K, generator=generator) + 0.5, first, num_local


@settings(max_examples=150, deadline=None, database=None)
@given(routings(), st.booleans())
def test_group_rows_property(routing: tuple[Tensor, Tensor, int, int], exact: bool) -> None:
    ids_SK, weights_SK, first, num_local = routing
    S, K = ids_SK.shape
    expected = pairs_by_hand(ids_SK.tolist(), first, num_local)
    used = sum(len(pairs) for pairs in expected)
    rows, weights, offsets = group_rows(
        ids_SK, weights_SK, first=first, num_local=num_local, num_rows=used if exact else None
    )
    assert rows.numel() == weights.numel() == (used if exact else S * K)
    assert offsets.tolist() == [sum(map(len, expected[: i + 1])) for i in range(num_local)]
    flat = [pair for pairs in expected for pair in pairs]
    assert rows[:used].tolist() == [s for s, _ in flat]
    assert weights[:used].tolist() == [float(weights_SK[s, k]) for s, k in flat]
    # Past num_rows: a valid row id and weight 0.
    assert (weights[used:] == 0).all()
    assert ((rows >= 0) & (rows < max(S, 1))).all()


@settings(max_examples=50, deadline=None, database=None)
@given(routings())
def test_gradient_of_the_weights_returns_to_their_pairs(
    routing: tuple[Tensor, Tensor, int, int],
) -> None:
    ids_SK, weights_SK, first, num_local = routing
    weights_SK.requires_grad_()
    _, weights, offsets = group_rows(ids_SK, weights_SK, first=first, num_local=num_local)
    used = int(offsets[-1])
    grad = torch.arange(1.0, weights.numel() + 1)
    grad[used:] = float("nan")  # unused rows may hold anything
    weights.backward(grad)
    flat = [p for pairs in pairs_by_hand(ids_SK.tolist(), first, num_local) for p in pairs]
    expected = torch.zeros_like(weights_SK)
    for r, (s, k) in enumerate(flat):
        expected[s, k] = r + 1.0
    assert torch.equal(weights_SK.grad, expected)  # type: ignore[arg-type]


def test_weights_of_dropped_pairs_may_be_nan() -> None:
    ids = torch.tensor([[0, -1], [-1, 1]], dtype=torch.int32)
    weights = torch.tensor([[1.0, float("nan")], [float("nan"), 2.0]])
    rows, w, offsets = group_rows(ids, weights, first=0, num_local=2)
    assert w.tolist() == [1.0, 2.0, 0.0, 0.0] and rows[:2].tolist() == [0, 1]
    assert offsets.tolist() == [1, 2]


# --------------------------------------------------------------------------- gather and sum


def test_gather_then_sum_of_one_row_each_is_the_identity() -> None:
    x = torch.randn(7, 5)
    order = torch.randperm(7).int()
    assert torch.equal(sum_rows(gather_rows(x, order), order, 7), x)
    strided = torch.randn(5, 7).T
    assert torch.equal(sum_rows(gather_rows(strided, order), order, 7), strided)


@settings(max_examples=60, deadline=None, database=None)
@given(st.integers(0, 6), st.integers(0, 12), st.integers(0, 10**6), st.booleans())
def test_gather_and_sum_are_adjoint(S: int, R: int, seed: int, half: bool) -> None:
    """<gather(x), y> == <x, sum(y)>, and each is the other's gradient."""
    generator = torch.Generator().manual_seed(seed)
    R = R if S else 0
    dtype = torch.bfloat16 if half else torch.float32
    ids = torch.randint(0, max(S, 1), (R,), generator=generator).int()
    # Small whole numbers: exact in bf16, so that equality is exact.
    x = torch.randint(-4, 5, (S, 3), generator=generator).to(dtype).requires_grad_()
    y = torch.randint(-4, 5, (R, 3), generator=generator).to(dtype).requires_grad_()
    gathered, summed = gather_rows(x, ids), sum_rows(y, ids, S)
    assert gathered.dtype == summed.dtype == dtype and summed.shape == x.shape
    by_hand = torch.zeros(S, 3)
    for r, s in enumerate(ids.tolist()):
        assert torch.equal(gathered[r], x[s])
        by_hand[s] += y[r].detach().float()
    assert torch.equal(summed.float(), by_hand)
    gathered.backward(y.detach())
    assert torch.equal(x.grad, summed.detach())  # type: ignore[arg-type]
    summed.backward(x.detach())
    assert torch.equal(y.grad, gathered.detach())  # type: ignore[arg-type]


def test_gradcheck() -> None:
    ids = torch.tensor([2, 0, 2, 2, 1], dtype=torch.int32)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    y = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: gather_rows(t, ids), x)
    assert torch.autograd.gradcheck(lambda t: sum_rows(t, ids, 4), y)


def test_bf16_sums_round_once() -> None:
    """1 + 256 ones: added in bf16 the sum sticks at 256."""
    ids = torch.zeros(257, dtype=torch.int32)
    ones = torch.ones(257, 2, dtype=torch.bfloat16)
    assert sum_rows(ones, ids, 1).tolist() == [[256.0, 256.0]]  # 257 rounds to 256
    ids = torch.zeros(1000, dtype=torch.int32)
    ones = torch.ones(1000, 2, dtype=torch.bfloat16, requires_grad=True)
    assert sum_rows(ones, ids, 1).tolist() == [[1000.0, 1000.0]]
    x = torch.ones(1, 2, dtype=torch.bfloat16, requires_grad=True)
    gather_rows(x, ids).backward(torch.ones(1000, 2, dtype=torch.bfloat16))
    assert x.grad is not None and x.grad.tolist() == [[1000.0, 1000.0]]


# --------------------------------------------------------------------------- local


@settings(max_examples=60, deadline=None, database=None)
@given(routings())
def test_local_dispatch_then_combine(routing: tuple[Tensor, Tensor, int, int]) -> None:
    """With experts that multiply by their weight, the layer is x times the sum of weights."""
    ids_TK, weights_TK, *_ = routing
    num_experts = 9
    dispatcher = LocalDispatcher(num_experts)
    T = ids_TK.shape[0]
    x_TD = torch.randn(T, 4)
    inp = dispatcher.dispatch(x_TD, routing_of(ids_TK, weights_TK, num_experts))
    assert inp.rows_SD is x_TD, "no copy without EP"
    assert inp.offsets_e.shape == (num_experts,) and inp.num_rows.shape == ()
    assert int(inp.num_rows) == int((ids_TK >= 0).sum())
    y_RD = gather_rows(inp.rows_SD, inp.row_ids_R) * inp.weights_R[:, None]
    y_TD = dispatcher.combine(sum_rows(y_RD, inp.row_ids_R, T), inp.plan)
    total_T = torch.where(ids_TK >= 0, weights_TK, 0).sum(1)
    torch.testing.assert_close(y_TD, x_TD * total_T[:, None])


def test_expert_input_is_a_pytree_and_frozen() -> None:
    """FSDP2 finds the tensors of a module's input through pytree."""
    inp = LocalDispatcher(2).dispatch(
        torch.randn(2, 4),
        routing_of(torch.tensor([[0], [1]], dtype=torch.int32), torch.ones(2, 1), 2),
    )
    leaves, spec = torch.utils._pytree.tree_flatten(inp)
    assert any(leaf is inp.rows_SD for leaf in leaves)
    assert any(leaf is inp.weights_R for leaf in leaves)
    again = torch.utils._pytree.tree_unflatten(leaves, spec)
    assert isinstance(again, ExpertInput) and again.rows_SD is inp.rows_SD
    with pytest.raises(AttributeError):
        inp.num_rows = torch.tensor(0)  # type: ignore[misc]
