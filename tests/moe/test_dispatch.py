import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moecore import MoEConfig, MoELayer
from moecore.kernels.invariant import batch_invariant
from moecore.kernels.rows import move as rows
from moecore.moe.dispatch.local import ChoiceDispatcher, LocalDispatcher
from moecore.moe.dispatch.send_order import assign_send_rows
from moecore.moe.records import Routing


@st.composite
def routings(draw: st.DrawFn) -> tuple[Tensor, Tensor, int]:
    """ids with dropped experts (distinct per token), weights, E."""
    E = draw(st.integers(1, 9))
    K, S = draw(st.integers(1, E)), draw(st.integers(0, 8))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    ids = torch.rand(S, E, generator=generator).argsort(1)[:, :K]
    dropped = torch.rand(S, K, generator=generator) < draw(st.sampled_from([0.0, 0.3, 1.0]))
    ids = ids.masked_fill(dropped, -1).to(torch.int32)
    return ids, torch.rand(S, K, generator=generator) + 0.5, E


@settings(max_examples=60, deadline=None, database=None)
@given(routings())
def test_local_dispatch_then_combine(drawn: tuple[Tensor, Tensor, int]) -> None:
    """With experts that multiply by their weight, the layer is x times the sum of weights."""
    ids_TK, weights_TK, num_experts = drawn
    dispatcher = LocalDispatcher(num_experts)
    x_TD = torch.randn(ids_TK.shape[0], 4)
    routing = Routing(expert_ids_TK=ids_TK, weights_TK=weights_TK, chosen_ids_TK=ids_TK)
    inp = dispatcher.dispatch(x_TD, routing)
    assert inp.rows.values is x_TD, "no copy without EP"
    assert inp.index.offsets_e.shape == (num_experts,) and inp.index.num_rows.shape == ()
    assert int(inp.index.num_rows) == int((ids_TK >= 0).sum())
    where = (inp.index.row_ids_R, inp.index.slots_SK, inp.index.num_rows)
    y_RD = rows.gather_rows(inp.rows.values, *where) * inp.index.weights_R[:, None]
    y_TD = dispatcher.combine(rows.sum_rows(y_RD, *where), inp.plan)
    total_T = torch.where(ids_TK >= 0, weights_TK, 0).sum(1)
    torch.testing.assert_close(y_TD, x_TD * total_T[:, None])


@settings(max_examples=60, deadline=None, database=None)
@given(st.integers(1, 5), st.integers(0, 8), st.integers(0, 10**6))
def test_order_of_sending(G: int, T: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    needs_GT = torch.rand(G, T, generator=generator) < torch.rand(1, generator=generator)
    wanted = [(g, t) for g in range(G) for t in range(T) if needs_GT[g, t]]
    token_ids, slots = assign_send_rows(needs_GT, len(wanted))
    assert (token_ids.dtype, slots.dtype) == (torch.int32, torch.int32)
    assert token_ids.tolist() == [t for _, t in wanted]
    expected = torch.full((T, G), -1)
    for m, (g, t) in enumerate(wanted):
        expected[t, g] = m
    assert slots.tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_choices_that_are_dispatched_one_by_one(dtype: torch.dtype) -> None:
    """The sum has the bits of a rank that owns all experts, and the same gradients."""
    layer = MoELayer(MoEConfig(dim=16, hidden_dim=24, num_experts=6, top_k=4), dtype=dtype)
    x_TD, padding_mask_T = torch.randn(9, 16).to(dtype), torch.arange(9) == 4

    def found() -> list[Tensor]:
        x = x_TD.clone().requires_grad_()
        y_TD = layer(x, padding_mask=padding_mask_T)
        grads = torch.autograd.grad(y_TD.float().square().sum(), [x, *layer.parameters()])
        return [y_TD.detach(), *grads]

    with batch_invariant("cpu"):
        y_TD, *want = found()
        layer.dispatcher = ChoiceDispatcher(layer.dispatcher, 4)
        y_by_choice_TD, *grads = found()
    assert torch.equal(y_TD, y_by_choice_TD)
    for got, wanted in zip(grads, want, strict=True):
        scale = float(wanted.abs().max())
        torch.testing.assert_close(
            got, wanted, rtol=0, atol=scale * (1e-6 if dtype == torch.float32 else 2**-7)
        )
